"""One rank's flat tensors of a DeepSpeed target, and what stands beside them in its optimizer-states file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptctl.core.output import Fill, Put, Region
from ckptctl.core.values import Global, OrderedPairs, Record, TensorRef, Tree
from ckptctl.formats.deepspeed import layout
from ckptctl.formats.deepspeed.run import F32

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.formats.deepspeed.run import Run
    from ckptctl.formats.deepspeed.teams import Team
    from ckptctl.formats.target import Item
    from ckptctl.formats.torch.write import TorchTree

_LOSS = "deepspeed.runtime.fp16.loss_scaler"
Parts = list[Region | Fill]


def flat(made: TorchTree, parts: Sequence[Region | Fill], numel: int, dtype: DType = F32) -> TensorRef:
    """A flat tensor of regions and padding."""
    return made.packed(dtype, (numel,), parts or [Put(b"")])


def slot_of(item: Item, dp: int, rank: int) -> tuple[Parts, int]:
    """A rank's slot of a parameter that is cut on its own (ZeRO-3), and its elements. Padding is zeros."""
    numel = math.prod(item.shape)
    slot = layout.param_slot(numel, dp)
    start, stop = min(numel, rank * slot), min(numel, (rank + 1) * slot)
    parts: Parts = [_run(item, start, stop)] if stop > start else []
    return parts + _zeros(slot - (stop - start), "parameter padding", item.dtype), slot


def piece(run: Run, made: TorchTree, team: Team, items: Mapping[str, Item], *, pad: bool) -> TensorRef:
    """One rank's flat tensor of a group, or at stage 3 of a sub-group."""
    if run.stage == 3:
        slots = [slot_of(items[name], team.dp, team.rank) for name in team.names]
        return flat(made, [p for parts, _ in slots for p in parts], sum(n for _, n in slots))
    parts: Parts = [_run(items[team.names[i]], start, stop) for i, start, stop in runs(run, team)]
    held, slot = sum(p.numel for p in parts if isinstance(p, Region)), group_slot(run, team)
    return flat(made, [*parts, *_zeros(slot - held, "flat group padding")], slot) if pad else flat(made, parts, held)


def group_slot(run: Run, team: Team) -> int:
    """Elements of a rank's piece of a group, padding included (ZeRO-1 and 2)."""
    return layout.group_slot(sum(map(run.numel, team.names)), team.dp)


def runs(run: Run, team: Team) -> list[tuple[int, int, int]]:
    """(position, start, stop) of the runs of parameters that a rank's piece of a group holds (ZeRO-1 and 2)."""
    slot = group_slot(run, team)
    return list(layout.runs_of(map(run.numel, team.names), team.rank * slot, (team.rank + 1) * slot))


def slices(run: Run, team: Team) -> OrderedPairs:
    """param_slice_mappings: where in the rank's piece each parameter starts, and how much of it is there."""
    out, at = OrderedPairs(), 0
    for position, start, stop in runs(run, team):
        state = {"numel": stop - start, "start": at}
        address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
        out[team.local[position]] = Record(address, (), "newobj", state=state, has_state=True)
        at += stop - start
    return out


def state(run: Run, made: TorchTree, number: int, team: Team) -> dict[str, Tree]:
    """A flat group's state: moments as flat tensors, and the first parameter's single values for all."""
    out: dict[str, Tree] = {}
    first = next(iter(team.names), "")
    at = step(run, made, first)
    if at is not None:
        out["step"] = at
    for kind in run.kinds[number]:
        out[kind] = piece(run, made, team, {n: run.states[n][kind] for n in team.names}, pad=True)
    return out | singles(run, made, first)


def singles(run: Run, made: TorchTree, name: str) -> dict[str, Tree]:
    """A parameter's single values besides its step."""
    own = run.states.get(name, {})
    values = {kind: made.value(value) for kind, value in run.singles.get(name, {}).items()}
    return values | {kind: made.tensor(own[kind]) for kind in own if kind in run.lone}


def step(run: Run, made: TorchTree, name: str) -> Tree:
    """A parameter's step, None where it has none. That a group has one is checked before (operations/masters)."""
    item = run.states.get(name, {}).get("step")
    return made.value(run.scalars.get((name, "step"))) if item is None else made.tensor(item)


def scaling(run: Run, *, required: bool = False) -> dict[str, Tree]:
    """Loss scale and overflow: DeepSpeed's own object, as the source has it.

    Where the source has none, what a run in bfloat16 or float32 has; of float16 nothing at stages 1 and 2, so that the
    run that loads keeps its own, and where one is required, as at stage 3, a dynamic one at its beginning.
    Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py; runtime/zero/stage_1_and_2.py, _load_global_state;
    runtime/zero/stage3.py, _rigid_load_state_dict.
    """
    own = None if run.is_recast else run.own.get("loss_scaler")
    scale = run.own.get("cur_scale")
    known = isinstance(scale, (int, float)) and not run.is_recast  # by a wrapper of stage 0
    dynamic = not run.is_recast and bool(run.own.get("dynamic_loss_scale", False))
    if isinstance(own, dict) and str(own.get("class", "")).startswith(_LOSS):
        name, inner = str(own["class"]).rpartition(".")[2], {k: v for k, v in own.items() if k != "class"}
    elif (known and dynamic) or (not known and run.dtype == "float16"):
        if not known and run.stage != 3 and not required:
            return {}
        name, inner, dynamic = "DynamicLossScaler", _dynamic(run), True
    else:
        name, inner = "LossScaler", {"cur_scale": float(run.own["cur_scale"]) if known else 1.0, "dynamic": False}
    return {
        "loss_scaler": Record(Global(_LOSS, name), (), "newobj", state=inner, has_state=True),
        "dynamic_loss_scale": dynamic,
        "overflow": bool(run.own.get("overflow", False)),
    }


def _dynamic(run: Run) -> dict[str, Tree]:
    """A dynamic loss scaler's attributes: what a wrapper of stage 0 counted, the configuration's, DeepSpeed's own.

    Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, DynamicLossScaler; runtime/fp16/unfused_optimizer.py,
    state_dict; runtime/precision_config.py, DeepSpeedFP16Config.
    """
    section, counted = run.config.get("fp16"), {} if run.is_recast else run.own

    def said(name: str, default: int) -> int:
        value = section.get(name) if isinstance(section, dict) else None
        return value if type(value) is int and 0 <= value < 1 << 31 else default

    delay, power = said("hysteresis", 2), min(64, said("initial_scale_power", 16))
    return {
        "cur_scale": counted.get("cur_scale", float(1 << power)),
        "cur_iter": counted.get("cur_iter", 0),
        "last_overflow_iter": counted.get("last_overflow_iter", -1),
        "scale_factor": counted.get("scale_factor", 2.0),
        "scale_window": counted.get("scale_window", said("loss_scale_window", 1000)),
        "min_scale": said("min_loss_scale", 1),
        "delayed_shift": delay,
        "cur_hysteresis": delay,
        "consecutive_hysteresis": isinstance(section, dict) and section.get("consecutive_hysteresis") is True,
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": Global("torch", "float16"),
    }


def clipping(run: Run) -> dict[str, Tree]:
    """The largest norm of gradients: only the source's own, since what a file says goes before the configuration.

    Files of stages 0 and 3 do not say it. Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, _load_global_state.
    """
    own = run.own.get("clip_grad")
    return {} if own is None else {"clip_grad": own}


def stage_enum(stage: int) -> Record:
    """ZeRO's stage as DeepSpeed pickles it."""
    return Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))


def options(run: Run, made: TorchTree, number: int, members: list[int]) -> dict[str, Tree]:
    """A param group as the optimizer's state dict has it."""
    return {**{k: made.value(v) for k, v in run.groups[number].options.items()}, "params": members}


def _run(item: Item, start: int, stop: int) -> Region:
    return Region(item.key, item.dtype, (math.prod(item.shape),), (start,), (stop - start,))


def _zeros(numel: int, why: str, dtype: DType = F32) -> Parts:
    return [Fill(numel * dtype.itemsize, b"\0", why)] if numel else []
