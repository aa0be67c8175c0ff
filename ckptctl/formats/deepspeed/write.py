"""ZeRO-1, 2 and 3 and universal folders for any number of data-parallel ranks, as output segments.

Flat groups follow the optimizer's own groups and order. Masters and moments are float32 (a narrower source is widened,
which is exact); module weights keep the run's type. Pickles name DeepSpeed's own classes, and are made here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, Group, Optimizer
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.core.output import Fill, OutputFile, Put, Region
from ckptctl.core.values import Global, OrderedPairs, Record, TensorRef, Tree
from ckptctl.formats.deepspeed import layout
from ckptctl.formats.deepspeed.zero import EXPERT
from ckptctl.formats.pickles.nodes import SizeTuple
from ckptctl.formats.target import Choices, Content, Item, Line, Written
from ckptctl.formats.torch.write import TorchTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.core.output import Segment

F32 = BY_NAME["float32"]
VERSION = "0.19.8"
"""What files say wrote them where the source does not: the version whose files are the test."""
SUB_GROUP_SIZE = 1_000_000_000
"""zero_optimization.sub_group_size where the source's configuration has none. Source: DeepSpeed 0.19.8, config.py."""
_PREFIX = {"bfloat16": "bf16_"}
_LOSS = "deepspeed.runtime.fp16.loss_scaler"


def write(content: Content, choices: Choices) -> Written:
    """The files of one step and its tracker. Unsupported for experts, and for state that does not follow parameters."""
    made = _Run.of(content, choices)
    tag = f"global_step{made.step}"
    if choices.universal:
        files = _universal(made, f"{tag}_universal")
    else:
        files = [OutputFile("latest", lambda: [Put(tag.encode())])]
        for rank in range(choices.dp):
            if made.stage == 3 or rank == 0:
                name = f"zero_pp_rank_{rank}_mp_rank_00" if made.stage == 3 else "mp_rank_00"
                files.append(_file(f"{tag}/{name}_model_states.pt", made, partial(_model, made, rank)))
        for rank in range(choices.dp if made.has_shards else 0):
            name = f"{made.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            files.append(_file(f"{tag}/{name}", made, partial(_shard, made, rank)))
    if not made.has_shards:
        how = "one model-states file, for load_checkpoint(load_module_only=True): no optimizer is beside it"
        return Written(tuple(files), True, (Line("layout", "written", how),))
    how = "universal" if choices.universal else f"ZeRO-{made.stage} over {choices.dp} ranks"
    lines = [Line("layout", "written", f"{how}; {len(made.groups)} param groups")]
    widened = sum(i.tensor.held.name != "float32" for i in made.masters.values())
    if widened:
        lines.append(Line("masters", "filled", f"{widened} of {len(made.masters)}: the weights, widened to float32"))
    return Written(tuple(files), True, tuple(lines), casts=made.casts)


@dataclass
class _Run:
    """What every file says: parameters by group in order, where each one's states are, and the run's settings."""

    content: Content
    dp: int
    stage: int
    step: int
    groups: list[Group]
    masters: dict[str, Item]
    states: dict[str, dict[str, Item]]
    kinds: list[list[str]]
    frozen: list[str]
    buffers: list[str]
    dtype: str
    own: dict[str, Any]
    config: dict[str, Any]
    casts: frozenset[tuple[str, str]]

    @property
    def has_shards(self) -> bool:
        """Whether ranks have files of an optimizer: not at stage 0, which stands for the model alone."""
        return self.stage > 0

    @property
    def prefix(self) -> str:
        return _PREFIX.get(self.dtype, "")

    @property
    def version(self) -> str:
        return str(self.own.get("ds_version") or VERSION)

    def numel(self, name: str) -> int:
        return math.prod(self.content.weights[name].shape)

    def subs(self, number: int) -> list[list[str]]:
        """A group's flat groups: itself, or at stage 3 its sub-groups."""
        names = list(self.groups[number].params)
        if self.stage != 3:
            return [names]
        zero = self.config.get("zero_optimization")
        size = zero.get("sub_group_size") if isinstance(zero, dict) else None
        limit = int(size) if isinstance(size, (int, float)) and size > 0 else SUB_GROUP_SIZE
        return [[names[i] for i in sub] for sub in layout.sub_groups([self.numel(n) for n in names], self.dp, limit)]

    @staticmethod
    def of(content: Content, choices: Choices) -> _Run:
        """Sorts the content. Raises Unsupported or MissingFact for what has no place."""
        expert = next((n for n in content.weights if EXPERT.fullmatch(n)), None)
        if expert is not None:
            raise Unsupported(
                f"{expert} is an expert of DeepSpeed's own: they are not written by this version",
                where=content.source.root,
                fix="convert to torch or dcp",
            )
        aliases = set(content.ties)
        buffers = [n for n, i in content.weights.items() if i.key.kind == "buffer" or not i.dtype.is_float]
        candidates = [n for n in content.weights if n not in aliases and n not in buffers]
        optimizer = content.optimizer or Optimizer(())
        groups = [
            Group(tuple(n for n in g.params if n in content.weights and n not in aliases), g.options)
            for g in optimizer.groups
        ] or [Group(tuple(candidates), {})]
        listed = {n for g in groups for n in g.params}
        astray = next((n for n, kind in content.states if n not in listed and n not in aliases), None)
        if astray is not None:
            raise MissingFact(
                f"{astray} has state, and is in no param group",
                where=content.source.root,
                why="flat tensors are by group, in the group's order",
                fix="--no-optimizer lets the state go",
                code="param-order",
            )
        masters: dict[str, Item] = {}
        states: dict[str, dict[str, Item]] = {}
        for name in listed:
            weight = content.weights[name]
            master = content.states.get((name, MASTER))
            base = master or weight
            if master is None and base.tensor.cast_from is None and base.tensor.dtype.name not in _WIDENED:
                raise Unsupported(f"{name} is {base.tensor.dtype.name}: no float32 master can be made of it")
            masters[name] = Item(base.key, base.tensor, F32)
        for (name, kind), item in content.states.items():
            if kind == MASTER or name in aliases:
                continue
            if kind != "step" and item.shape != content.weights[name].shape:
                raise Unsupported(
                    f"{kind} of {name} has shape {item.shape}: DeepSpeed's flat tensors hold states of the "
                    "parameter's own shape",
                    where=content.source.root,
                    fix="--no-optimizer lets the state go",
                )
            states.setdefault(name, {})[kind] = item if kind == "step" else Item(item.key, item.tensor, F32)
        kinds = [_kinds(g.params, states) for g in groups]
        own = content.values.get("deepspeed")
        own = dict(own) if isinstance(own, dict) else {}
        first = next((content.weights[n].dtype.name for n in candidates), "float32")
        config = dict(own.get("ds_config") or {})
        stage = choices.zero_stage or 2
        if choices.weights_alone and stage != 3 and not choices.universal:
            stage = 0  # at stage 3 the weights are the shards' masters and nothing else
        zero = config.get("zero_optimization")
        config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": stage}
        if first in _SECTION and _SECTION[first] not in config:
            config[_SECTION[first]] = {"enabled": True}
        every = [*masters.values(), *(i for entry in states.values() for k, i in entry.items() if k != "step")]
        casts = {(i.tensor.held.name, "float32") for i in every if i.tensor.held.name != "float32"}
        frozen = [n for n in candidates if n not in listed]
        return _Run(
            content,
            choices.dp,
            stage,
            content.source.step or 0,
            groups,
            masters,
            states,
            kinds,
            frozen,
            buffers,
            first,
            own,
            config,
            frozenset(casts),
        )


_WIDENED = ("float32", "bfloat16", "float16")
_SECTION = {"bfloat16": "bf16", "float16": "fp16"}


def _kinds(names: Sequence[str], states: dict[str, dict[str, Item]]) -> list[str]:
    """The states of a group: every parameter must have the same."""
    kinds = list(dict.fromkeys(k for n in names for k in states.get(n, {}) if k != "step"))
    for kind in kinds:
        without = next((n for n in names if kind not in states.get(n, {})), None)
        if without is not None:
            raise Unsupported(
                f"{without} has no {kind}, and others of its param group have",
                why="one flat tensor holds the whole group's",
                fix="--no-optimizer lets the state go",
            )
    return kinds


def _file(path: str, run: _Run, tree: Callable[[TorchTree], Tree]) -> OutputFile:
    def segments() -> list[Segment]:
        made = TorchTree(held=run.content.held)
        return made.segments(tree(made))

    return OutputFile(path, segments)


def _flat(made: TorchTree, parts: list[Region | Fill], numel: int, dtype: Any = F32) -> TensorRef:
    storage = made.new_storage(dtype, numel, numel * dtype.itemsize, parts or Put(b""))
    return TensorRef(storage, dtype, 0, (numel,), (1,))


def _run_of(item: Item, start: int, stop: int) -> Region:
    numel = math.prod(item.shape)
    return Region(item.key, item.dtype, (numel,), (start,), (stop - start,))


def _zeros(numel: int, why: str, item: int = F32.itemsize) -> list[Region | Fill]:
    return [Fill(numel * item, b"\0", why)] if numel else []


def _piece(run: _Run, made: TorchTree, names: Sequence[str], items: dict[str, Item], rank: int, pad: bool) -> TensorRef:
    """One rank's flat tensor of a (sub-)group."""
    parts: list[Region | Fill] = []
    if run.stage == 3:
        total = 0
        for name in names:
            numel, slot = run.numel(name), layout.param_slot(run.numel(name), run.dp)
            start, stop = min(numel, rank * slot), min(numel, (rank + 1) * slot)
            parts += [_run_of(items[name], start, stop)] if stop > start else []
            parts += _zeros(slot - (stop - start), "parameter padding")
            total += slot
        return _flat(made, parts, total)
    numels = [run.numel(n) for n in names]
    slot = layout.group_slot(sum(numels), run.dp)
    held = 0
    for position, start, stop in layout.runs_of(numels, rank * slot, (rank + 1) * slot):
        parts.append(_run_of(items[names[position]], start, stop))
        held += stop - start
    if pad:
        parts += _zeros(slot - held, "flat group padding")
    return _flat(made, parts, slot if pad else held)


def _state(run: _Run, made: TorchTree, number: int, names: Sequence[str], rank: int) -> dict[str, Tree]:
    out: dict[str, Tree] = {}
    step = _step(run, names, made)
    if step is not None:
        out["step"] = step
    for kind in run.kinds[number]:
        items = {n: run.states[n][kind] for n in names}
        out[kind] = _piece(run, made, names, items, rank, True)
    for name in names[:1]:
        for (owner, kind), value in (run.content.optimizer.scalars if run.content.optimizer else {}).items():
            if owner == name and kind != "step":
                out[kind] = made.value(value)
    return out


def _step(run: _Run, names: Sequence[str], made: TorchTree) -> Tree:
    """A group's step: its first parameter's. That all have one is checked before (operations/masters)."""
    for name in names[:1]:
        item = run.states.get(name, {}).get("step")
        if item is not None:
            return made.tensor(item)
        scalars = run.content.optimizer.scalars if run.content.optimizer else {}
        if (name, "step") in scalars:
            return made.value(scalars[name, "step"])
    return None


def _scaler(run: _Run) -> Record:
    own = run.own.get("loss_scaler")
    state: dict[str, Tree] = {"cur_scale": float(run.own.get("cur_scale", 1.0)), "dynamic": False}
    name = "LossScaler"
    if isinstance(own, dict) and str(own.get("class", "")).startswith(_LOSS):
        name = str(own["class"]).rpartition(".")[2]
        state = {k: v for k, v in own.items() if k != "class"}
    return Record(Global(_LOSS, name), (), "newobj", state=state, has_state=True)


def _shard(run: _Run, rank: int, made: TorchTree) -> Tree:
    stage = Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (run.stage,))
    common: dict[str, Tree] = {
        "loss_scaler": _scaler(run),
        "dynamic_loss_scale": bool(run.own.get("dynamic_loss_scale", False)),
        "overflow": bool(run.own.get("overflow", False)),
    }
    masters, states, groups, flat = [], {}, [], 0
    paddings, aligned, slices = [], [], []
    for number, group in enumerate(run.groups):
        members = []
        for names in run.subs(number):
            masters.append(_piece(run, made, names, run.masters, rank, run.stage == 3))
            state = _state(run, made, number, names, rank)
            if state:
                states[flat] = state
            members.append(flat)
            flat += 1
            if run.stage != 3:
                slot = layout.group_slot(sum(map(run.numel, names)), run.dp)
                paddings.append(slot - masters[-1].numel)
                aligned.append([0] * len(names))
                slices.append(_slices(run, names, slot, rank))
        groups.append({**{k: made.value(v) for k, v in group.options.items()}, "params": members})
    base = {"state": states, "param_groups": groups}
    if run.stage == 3:
        inner = {"zero_stage": stage, **common, "partition_count": run.dp, "optimizer_state_dict": base}
        inner["fp32_flat_groups"] = masters
    else:
        inner = {
            **common,
            "clip_grad": run.own.get("clip_grad", 0.0),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "zero_stage": stage,
            "group_paddings": paddings,
            "param_alignment_paddings": aligned,
            "partition_count": [run.dp] * len(run.groups),
            "ds_version": run.version,
            "param_slice_mappings": slices,
        }
    return {"optimizer_state_dict": inner, "ds_config": made.value(run.config), "ds_version": run.version}


def _slices(run: _Run, names: Sequence[str], slot: int, rank: int) -> OrderedPairs:
    out, at = OrderedPairs(), 0
    for position, start, stop in layout.runs_of([run.numel(n) for n in names], rank * slot, (rank + 1) * slot):
        state = {"numel": stop - start, "start": at}
        out[names[position]] = Record(
            Global("deepspeed.utils.tensor_fragment", "fragment_address"), (), "newobj", state=state, has_state=True
        )
        at += stop - start
    return out


def _shapes(run: _Run, names: Sequence[str]) -> OrderedPairs:
    return OrderedPairs({n: SizeTuple(run.content.weights[n].shape) for n in names})


_RESERVED = frozenset({"deepspeed", "global_steps", "global_samples", "skipped_steps", "lr_scheduler"})


def _model(run: _Run, rank: int, made: TorchTree) -> Tree:
    """The model-states file: of every rank at stage 3, where module only keeps places."""
    content, values = run.content, run.content.values
    module = OrderedPairs()
    for name, item in content.weights.items():
        if run.stage == 3 and name not in run.buffers:
            module[name] = _flat(made, [], 0, item.dtype)
        else:
            module[name] = made.tensor(content.weights[content.ties.get(name, name)])
    module.update({n: made.value(v) for n, v in content.model_values.items()})
    fragments = OrderedPairs()
    for name in run.frozen:
        item = content.weights[name]
        if run.stage != 3:
            fragments[name] = made.tensor(item)
            continue
        numel = run.numel(name)
        slot = layout.param_slot(numel, run.dp)
        start, stop = min(numel, rank * slot), min(numel, (rank + 1) * slot)
        parts: list[Region | Fill] = [_run_of(item, start, stop)] if stop > start else []
        parts += _zeros(slot - (stop - start), "parameter padding", item.dtype.itemsize)
        fragments[name] = _flat(made, parts, slot, item.dtype)
    subs = [names for number in range(len(run.groups)) for names in run.subs(number)]
    is_listed = run.stage > 1
    root: dict[str, Tree] = {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [_shapes(run, names) for names in subs] if run.has_shards else None,
        "frozen_param_shapes": _shapes(run, run.frozen) if is_listed else None,
        "shared_params": dict(content.ties),
        "frozen_param_fragments": fragments if is_listed else None,
        "lr_scheduler": made.value(values.get("lr_scheduler")),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": _count(values.get("skipped_steps"), 0),
        "global_steps": run.step,
        "global_samples": _count(values.get("global_samples"), 0),
        "dp_world_size": run.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": made.value(run.config),
        "ds_version": run.version,
    }
    for name, value in values.items():
        if name not in _RESERVED and (name not in root or root[name] is None):
            root[name] = made.value(value)
    return root


def _count(value: Tree, default: int) -> int:
    return value if type(value) is int else default


def _universal(run: _Run, tag: str) -> list[OutputFile]:
    """A folder a parameter. Loaded with checkpoint.load_universal at any stage up to 2 and any world size."""
    files = [OutputFile("latest_universal", lambda: [Put(tag.encode())])]
    whole = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    run.stage = run.stage if run.stage != 3 else 2
    files.append(_file(f"{tag}/mp_rank_00_model_states.pt", run, lambda t: {**_model(run, 0, t), **whole}))
    files.append(_file(f"{tag}/zero/optimizer_state.pt", run, lambda t: _universal_state(run, t)))
    for group in run.groups:
        for name in group.params:
            kinds = {"fp32": run.masters[name], **{k: i for k, i in run.states.get(name, {}).items() if k != "step"}}
            for kind, item in kinds.items():
                files.append(_file(f"{tag}/zero/{name}/{kind}.pt", run, partial(_param, item)))
            scalars = run.content.optimizer.scalars if run.content.optimizer else {}
            if "step" in run.states.get(name, {}) or (name, "step") in scalars:
                files.append(_file(f"{tag}/zero/{name}/step.pt", run, partial(_step, run, [name])))
    return files


def _param(item: Item, made: TorchTree) -> Tree:
    return {"cat_dim": 0, "param": made.tensor(item)}


def _universal_state(run: _Run, made: TorchTree) -> Tree:
    return {
        "loss_scaler": _scaler(run),
        "dynamic_loss_scale": bool(run.own.get("dynamic_loss_scale", False)),
        "overflow": bool(run.own.get("overflow", False)),
        "clip_grad": run.own.get("clip_grad", 0.0),
        "zero_stage": Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (run.stage,)),
        "partition_count": [run.dp] * len(run.groups),
        "ds_version": run.version,
        "param_groups": [
            {**{k: made.value(v) for k, v in g.options.items()}, "params": [i]} for i, g in enumerate(run.groups)
        ],
    }
