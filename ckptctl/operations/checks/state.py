"""The training state: can a run go on from it, and what lacks. Metadata only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import WEIGHTS, is_state
from ckptctl.operations.inspecting import lacking, state_of, there, trainer_needs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.checks.found import Found

LOADERS = {
    "trainer": "Transformers' Trainer, resume_from_checkpoint",
    "dcp": "torch.distributed.checkpoint",
    "torch": "torch.load, and load_state_dict of model and optimizer",
    "deepspeed": "DeepSpeed, load_checkpoint",
    "megatron": "Megatron, --load",
}
_ADAM = ("exp_avg", "exp_avg_sq")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Resumable:
    """Whether a run can go on, for which loader, and what lacks. partial: part of a training state is there."""

    answer: bool
    why: str
    loader: str
    lacks: tuple[str, ...]
    partial: bool


def resumable(found: Found, checkpoint: Checkpoint | None) -> Resumable:
    """The third answer. A weights-only folder is whole and no run goes on from it."""
    if checkpoint is None:
        return Resumable(False, "it could not be read", "", (), False)
    state = state_of(checkpoint)
    loader = LOADERS.get(checkpoint.format, "")
    needed = lacking(checkpoint, state)
    beside = [p for p in ("scheduler", "rng", "counters") if state[p] == "absent"]
    has_state = any(state[p] != "absent" for p in ("moments", "masters", "groups", "scheduler", "rng"))
    if any(f.rule.question in ("safe", "resumable") and f.severity == "error" for f in found.findings):
        return Resumable(False, "a finding forbids it", loader, tuple(needed), has_state)
    broken = sum(f.severity == "error" and f.rule.question == "intact" for f in found.findings)
    if broken:
        return Resumable(False, "it is not intact", loader, tuple(needed), has_state)
    if needed:
        return Resumable(False, f"no {', no '.join(needed)}", loader, (*needed, *beside), has_state)
    if refused := trainer_needs(checkpoint):
        return Resumable(False, refused, loader, tuple(beside), has_state)
    more = f"; without {', '.join(beside)}" if beside else ""
    return Resumable(True, there(checkpoint, state) + more, loader, tuple(beside), False)


def _is_lion(checkpoint: Checkpoint, kinds: Iterable[set[str]]) -> bool:
    """Whether the optimizer has one moment by nature, by its settings: betas, and none of the eps of Adam's division.

    Source: DeepSpeed 0.19.8, ops/lion/fused_lion.py and cpu_lion.py: lr, betas, weight_decay; exp_avg alone.
    """
    groups = checkpoint.optimizer.groups if checkpoint.optimizer else ()
    has_settings = bool(groups) and all("betas" in g.options and "eps" not in g.options for g in groups)
    return has_settings and not any("exp_avg_sq" in has for has in kinds)


def check_state(found: Found, checkpoint: Checkpoint) -> None:
    """Whether the optimizer's state is whole: moments in pairs, each for a weight."""
    if checkpoint.damaged_state:
        what = "the optimizer's state is damaged by its writer"
        found.note("state-misplaced", what, why=checkpoint.damaged_state)
    kinds: dict[str, set[str]] = {}
    for key in checkpoint.tensors:
        if is_state(key) and key.kind != "other":
            kinds.setdefault(key.name, set()).add(key.kind)
    optimizer = checkpoint.optimizer
    unnamed = bool(optimizer and optimizer.unnamed)
    if unnamed and optimizer is not None:
        found.note("param-order", "the optimizer's parameters have numbers and no names", why=optimizer.unnamed)
    weights = {k.name for k in checkpoint.tensors if k.kind in WEIGHTS}
    buffers = {k.name for k in checkpoint.tensors if k.kind == "buffer"}
    is_lion = _is_lion(checkpoint, kinds.values())
    for name, has in kinds.items():
        lost = [k for k in _ADAM if k not in has]
        if len(lost) == 1 and not is_lion:
            what = f"{name} has no {lost[0]}"
            found.note("state-part-missing", what, tensor=name, why=f"it has {', '.join(sorted(has))}")
    moments = {n for n, has in kinds.items() if has - {"master", "step", "ema"}}
    if weights and moments and not unnamed:
        odd = sorted(moments - weights - set(checkpoint.ties))
        if odd:
            why = ", ".join(odd[:_SHOWN]) + (", ..." if len(odd) > _SHOWN else "")
            found.note("state-without-weight", f"{len(odd)} parameters have state and no weight", why=why)
        without = sorted(weights - moments - buffers - set(checkpoint.ties))
        if without:
            why = ", ".join(without[:_SHOWN]) + (", ..." if len(without) > _SHOWN else "")
            found.note("state-absent-for-some", f"{len(without)} weights have no optimizer state", why=why)
