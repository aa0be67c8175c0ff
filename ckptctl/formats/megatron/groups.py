"""Which parameters a param group of Megatron's optimizer has: files number them, and say no name. Pure.

Source: Megatron-LM core_v0.16.1, core/optimizer/__init__.py, _get_param_groups; older versions alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.megatron import model
from ckptctl.formats.pickles.nodes import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.facts import Facts

FOREIGN_FIELDS = ("params", "step", "is_expert_parallel")
"""What stands in a group of a file besides its settings: its parameters, their count, and what the mesh says."""


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a rank, in named_parameters() order: its local name and shape, and the chunk that holds it."""

    name: str
    shape: tuple[int, ...]
    chunk: int = 0
    dtype: str = "float32"


@dataclass
class Part:
    """One optimizer of a file: several are chained where experts have groups of their own.

    groups are its param groups as the file has them, state its moments by number, masters the float32 copies by group
    (16-bit runs with the plain optimizer).
    """

    groups: list[Mapping[str, Tree]]
    state: Mapping[Any, Tree] = field(default_factory=dict)
    masters: list[Sequence[Tree]] = field(default_factory=list)
    rest: dict[str, Tree] = field(default_factory=dict)


def parts_of(tree: Tree, where: str) -> list[Part]:
    """The optimizers in the value of `optimizer`: one, a list of them, or a dict of them by number."""
    if isinstance(tree, (list, tuple)):
        return [p for t in tree for p in parts_of(t, where)]
    if isinstance(tree, dict) and tree and all(isinstance(k, int) for k in tree):
        return [p for k in sorted(tree) for p in parts_of(tree[k], where)]
    if not isinstance(tree, dict):
        raise Damaged("the optimizer's state is no dict", where=where, why=show(tree), code="optimizer-damaged")
    inner = tree.get("optimizer", tree)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise Unsupported(
            "the optimizer's state is of a kind that is not read",
            where=where,
            why=f"it has {', '.join(map(str, list(tree)[:6]))}",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-unknown",
        )
    masters = tree.get("fp32_from_fp16_params", tree.get("fp32_from_float16_params", [])) or []
    if not isinstance(masters, (list, tuple)):
        raise Damaged(
            "the optimizer's float32 copies are no list",
            where=where,
            why=show(masters),
            fix="take the weights alone with --no-optimizer",
            code="optimizer-damaged",
        )
    known = ("optimizer", "fp32_from_fp16_params", "fp32_from_float16_params", "state", "param_groups")
    rest = {str(k): v for k, v in tree.items() if k not in known} if inner is not tree else {}
    state = inner.get("state")
    return [Part(groups, state if isinstance(state, dict) else {}, list(masters), rest)]


def ids_of(group: Mapping[str, Tree]) -> list[Tree]:
    """The numbers of a group's parameters; none where it has none."""
    listed = group.get("params")
    return list(listed) if isinstance(listed, (list, tuple)) else []


def is_decoupled(group: Mapping[str, Tree], facts: Facts) -> bool:
    """Whether a group has the learning rate of --decoupled-lr, as embedding and head then do.

    Up to 0.15 it says so; from 0.16 on it only has bounds of its own, and is not the default.
    Source: core_v0.16.1, core/optimizer/__init__.py, get_standard_config_overrides, _get_param_groups.
    """
    if group.get("is_decoupled_lr"):
        return True
    decays = group.get("wd_mult", group.get("pre_wd_mult", 1.0)) != 0
    return decays and group.get("default_config") is False and facts.args.get("decoupled_lr") is not None


def members(part: Part, params: Iterable[Param], facts: Facts, *, experts_apart: bool, where: str) -> list[list[Param]]:
    """The parameters of each group of one optimizer, in the group's order.

    experts_apart: expert-parallel ranks differ, so that experts are in groups of their own. Unsupported where a group's
    settings do not say whose they are: a wrong guess would give moments to other parameters.
    """
    every = list(params)
    decoupled = any(is_decoupled(g, facts) for g in part.groups)
    out: list[list[Param]] = []
    for number, group in enumerate(part.groups):
        found = [p for p in every if _is_of(p, group, facts, experts_apart=experts_apart, decoupled=decoupled)]
        count = len(ids_of(group))
        if "params" in group and count != len(found):
            raise Unsupported(
                f"param group {number} has {count} parameters, and {len(found)} of the model's fit its settings",
                where=where,
                why="parameters are numbered by how decay and learning rates are grouped, and no file says it",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-groups",
            )
        out.append(found)
    seen: set[tuple[int, str]] = set()
    for p in (p for g in out for p in g):
        if (p.chunk, p.name) in seen:
            raise Unsupported(
                f"{p.name} fits the settings of two param groups",
                where=where,
                fix="take the weights alone with --no-optimizer",
                code="optimizer-groups",
            )
        seen.add((p.chunk, p.name))
    return out


def _is_of(param: Param, group: Mapping[str, Tree], facts: Facts, *, experts_apart: bool, decoupled: bool) -> bool:
    """Whether a group's settings are those of a parameter."""
    wd_mult = group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    if bool(group.get("is_expert_parallel")) != (experts_apart and model.is_expert(param.name)):
        return False
    if is_decoupled(group, facts) != (decoupled and param.name in model.VOCABULARY):
        return False
    return model.decays(param.name, param.shape, norms=facts.decays_norms) == bool(wd_mult != 0)


def settings(group: Mapping[str, Tree]) -> dict[str, Tree]:
    """A group's settings: what tells it from others, and how it is trained."""
    return {str(k): v for k, v in group.items() if k not in FOREIGN_FIELDS}


__all__ = ["Param", "Part", "ids_of", "is_decoupled", "members", "parts_of", "settings"]
