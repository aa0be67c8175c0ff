"""Param groups of fused Adams, with the settings that torch's own Adam has in a group and they have not. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Group, Optimizer

TORCH_ADAM: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""What torch's AdamW has in a group besides rates. Source: torch 2.13.0, optim/adamw.py."""
_MEGATRON = ("wd_mult", "pre_wd_mult")
"""By these a group is known as Megatron's, whose Adam decouples decay: megatron-core 0.16.1, OptimizerConfig."""


def completed(optimizer: Optimizer | None) -> tuple[Optimizer | None, int]:
    """The optimizer with torch's settings in Megatron's groups, and how many groups lacked them.

    A loader that takes state by torch's template (torch.distributed.checkpoint) stops where one is missing.
    """
    if optimizer is None:
        return None, 0
    lacking = [g for g in optimizer.groups if _lacks(g)]
    groups = tuple(replace(g, options={**g.options, **TORCH_ADAM}) if _lacks(g) else g for g in optimizer.groups)
    return (replace(optimizer, groups=groups) if lacking else optimizer), len(lacking)


def _lacks(group: Group) -> bool:
    return any(k in group.options for k in _MEGATRON) and not any(k in group.options for k in TORCH_ADAM)
