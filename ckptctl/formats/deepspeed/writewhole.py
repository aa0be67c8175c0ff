"""The whole optimizer of stage 0, in the model-states file: torch's state dict, in a 16-bit run with a wrapper around.

State goes by numbers, one a parameter, in the order of the groups. A wrapper has the masters beside it, by group.

Source: DeepSpeed 0.19.8, runtime/engine.py, _common_checkpoint_state; runtime/fp16/unfused_optimizer.py, state_dict
and load_state_dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported
from ckptctl.core.values import Record
from ckptctl.formats.deepspeed import flats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.run import Run
    from ckptctl.formats.torch.write import TorchTree

_COUNTED = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def require_place(run: Run) -> None:
    """Unsupported for what stage 0 has no form for, or none that is written."""
    if run.experts:
        raise Unsupported(
            "experts of DeepSpeed's MoE layers are not written with an optimizer at stage 0",
            where=run.content.source.root,
            fix="--zero-stage 1 or 2",
        )
    if not run.has_settings:
        raise Unsupported(
            "the param groups have no settings, without which no optimizer of stage 0 is loaded",
            where=run.content.source.root,
            why="the source has none",
            fix="--zero-stage 1 or 2, in a form whose loader leaves a run its own",
        )


def optimizer(run: Run, made: TorchTree) -> Tree:
    """What stands under `optimizer`."""
    states: dict[int, dict[str, Tree]] = {}
    groups: list[Tree] = []
    masters: list[Tree] = []
    for number, group in enumerate(run.groups):
        first = sum(len(g.params) for g in run.groups[:number])
        numbers = list(range(first, first + len(group.params)))
        groups.append(flats.options(run, made, number, numbers))
        masters.append([made.tensor(run.masters[name]) for name in group.params])
        states |= {n: s for n, name in zip(numbers, group.params, strict=True) if (s := _state(run, made, name))}
    inner = {"state": states, "param_groups": groups}
    if run.dtype == "float32":
        return inner
    return {**_scaling(run), "optimizer_state_dict": inner, "fp32_groups": masters}


def _state(run: Run, made: TorchTree, name: str) -> dict[str, Tree]:
    """One parameter's state, its step first."""
    items: Mapping[str, Tree] = {k: made.tensor(i) for k, i in run.states.get(name, {}).items() if k not in run.single}
    step = flats.step(run, made, name)
    return {**({} if step is None else {"step": step}), **items, **flats.singles(run, made, name)}


def _scaling(run: Run) -> dict[str, Tree]:
    """The loss scale as the wrapper counts it: the source's, else one at its beginning."""
    said = flats.scaling(run, required=True)
    scaler = said["loss_scaler"]
    inner = dict(scaler.state) if isinstance(scaler, Record) and isinstance(scaler.state, dict) else {}
    known = {} if run.is_recast else run.own
    counted = {k: known[k] if k in known else inner.get(k) for k in _COUNTED}
    if counted["cur_iter"] is None:
        counted["cur_iter"] = run.step
    is_dynamic = bool(said["dynamic_loss_scale"])
    kept = _COUNTED if is_dynamic else _COUNTED[:2]
    return {"dynamic_loss_scale": is_dynamic, **{k: counted[k] for k in kept}}
