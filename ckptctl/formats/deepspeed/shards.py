"""One rank's optimizer-states file: flat masters and states by group, and how the run had them cut.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, state_dict; runtime/zero/stage3.py, _rigid_state_dict;
runtime/bf16_optimizer.py, state_dict.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.values import Array, Record, TensorRef, Tree
from ckptctl.formats.deepspeed.layout import param_slot
from ckptctl.formats.deepspeed.modelfile import shapes_of
from ckptctl.formats.deepspeed.opened import plain_object, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.formats.deepspeed.layout import Flat, Shape
    from ckptctl.formats.deepspeed.opened import Opened

_PARTS = frozenset(
    {
        "base_optimizer_state",
        "optimizer_state_dict",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "zero_stage",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
        "ds_version",
        "universal_checkpoint_info",
        "ds_zero_partition_groups",
    }
)


@dataclass
class State:
    """A state of one flat group on one rank: a flat tensor, or a single value (a step) with where it lies."""

    flat: Flat | None = None
    dtype: DType | None = None
    ref: TensorRef | None = None
    value: Tree = None

    @property
    def said(self) -> object:
        """A single value, comparable."""
        return (self.value.dtype, self.value.shape, self.value.data) if isinstance(self.value, Array) else self.value


@dataclass
class Shard:
    """One optimizer-states file. stage None is BF16_Optimizer. Lists go by flat group: sub-groups at stage 3."""

    path: str
    source: int
    stage: int | None
    counts: list[int]
    masters: list[tuple[Flat, DType]]
    states: list[dict[str, State]]
    groups: list[dict[str, Tree]]
    members: list[list[int]]
    paddings: list[int]
    alignments: list[list[int]]
    elastic: bool
    rest: dict[str, Tree] = field(default_factory=dict)
    info: Mapping[str, Tree] = field(default_factory=dict)
    shared_step: bool = False
    """Whether an elastic file has its step apart from the states."""
    slices: list[dict[str, int]] = field(default_factory=list)
    """Elements of each parameter in the rank's piece of a group, as the file says (ZeRO-1 and 2 since 0.7)."""
    shapes: list[dict[str, Shape]] | None = None
    """param_shapes, which files of 0.3.14 to 0.4 have here, for all flat groups together."""

    def count(self, group: int) -> int | None:
        """Ranks that a group is cut over, as the file says."""
        return self.counts[group] if group < len(self.counts) else self.counts[0] if len(self.counts) == 1 else None


def read_shard(file: Opened) -> Shard:
    """The parts of an optimizer-states file. Damaged where parts lack, Unsupported for layouts before 0.3.17."""
    outer = file.mapping(file.root, "the optimizer-states file")
    tree = file.mapping(outer.get("optimizer_state_dict"), "optimizer_state_dict")
    if "local_sub_partitions_of_fp32_groups" in tree:
        raise Unsupported(
            "this is ZeRO-1 as DeepSpeed before 0.3.17 wrote it",
            where=file.path,
            why="it has local_sub_partitions_of_fp32_groups",
            fix="DeepSpeed itself refuses such files since; load it with the version that wrote it",
        )
    is_three = "fp32_flat_groups" in tree
    stage = 3 if is_three else whole_number(tree.get("zero_stage"))
    base = tree.get("optimizer_state_dict" if is_three else "base_optimizer_state")
    flats = tree.get("fp32_flat_groups" if is_three else "single_partition_of_fp32_groups")
    if not isinstance(flats, (list, tuple)):
        raise Damaged(
            "the file has no float32 groups", where=file.path, why="no list of flat tensors", code="zero-layout"
        )
    masters = [file.flat(f, f"the float32 weights of group {i}") for i, f in enumerate(flats)]
    elastic = isinstance(base, (list, tuple))
    # But in elastic form, moments of stages 1 and 2 have two elements at least, of which one may be padding.
    held = [flat.numel if is_three or elastic else 2 for flat, _ in masters]
    if isinstance(base, (list, tuple)):
        states = [_states(file, s, i, held[i] if i < len(held) else 0) for i, s in enumerate(base)]
        groups: list[dict[str, Tree]] = []
        members: list[list[int]] = []
    else:
        inner = file.mapping(base, "the optimizer's state")
        by_id = file.mapping(inner.get("state", {}), "state")
        states = [_states(file, by_id.get(i, {}), i, held[i]) for i in range(len(masters))]
        groups, members = _groups(file, inner.get("param_groups"))
        lost = [i for i in by_id if not (type(i) is int and 0 <= i < len(masters))]
        if lost:
            raise Damaged(
                f"there is state for group {lost[0]!r}, but float32 weights for {len(masters)} groups",
                where=file.path,
                code="zero-layout",
            )
    shared_step = tree.get("base_optimizer_state_step")
    if shared_step is not None:
        for entry in states:
            entry.setdefault("step", State(value=file.value("step", shared_step)))
    info = tree.get("universal_checkpoint_info")
    return Shard(
        file.path,
        file.number,
        stage,
        _ints(tree.get("partition_count")),
        masters,
        states,
        groups,
        members,
        _ints(tree.get("group_paddings")),
        [_ints(a) for a in tree.get("param_alignment_paddings") or ()],
        elastic,
        {
            str(k): file.value(f"deepspeed.{k}", plain_object(v))
            for k, v in tree.items()
            if k not in _PARTS and k != "base_optimizer_state_step"
        },
        info if isinstance(info, dict) else {},
        "base_optimizer_state_step" in tree,
        [_slices(group) for group in _listed(tree.get("param_slice_mappings"))],
        shapes_of(file, outer),
    )


def by_group(shapes: list[dict[str, Shape]], shards: Sequence[Shard]) -> list[dict[str, Shape]]:
    """An old file's one list of shapes cut by flat group: where each group is of whole parameters' elements.

    MissingFact else: padding would leave doubt. shards are all ranks'.
    Source: DeepSpeed 0.4.5, runtime/engine.py, _get_zero_param_shapes and _save_zero_checkpoint.
    """
    first = shards[0]
    if len(shapes) != 1 or len(first.masters) < 2:
        return shapes
    is_three = first.stage == 3
    totals = [
        sum(s.masters[i][0].numel for s in (shards[:1] if is_three else shards) if i < len(s.masters))
        for i in range(len(first.masters))
    ]
    left = deque(shapes[0].items())
    out: list[dict[str, Shape]] = []
    for total in totals:
        mine: dict[str, Shape] = {}
        held = 0
        while left and held < total:
            name, shape = left.popleft()
            mine[name] = shape
            held += param_slot(math.prod(shape), len(shards)) if is_three else math.prod(shape)
        if held != total:
            break
        out.append(mine)
    if len(out) < len(totals) or left:
        raise MissingFact(
            f"which parameters are in which of {len(totals)} flat groups is not in the checkpoint",
            where=first.path,
            why="param_shapes is one list of all, as DeepSpeed before 0.5 wrote it, and the groups are padded",
            fix="load it with DeepSpeed and save it again",
            code="param-order",
        )
    return out


def _slices(tree: Tree) -> dict[str, int]:
    """Elements by parameter; {} for what is no slice mapping."""
    out = {}
    for name, address in tree.items() if isinstance(tree, dict) else ():
        state = address.state if isinstance(address, Record) else None
        if not isinstance(state, dict) or type(state.get("numel")) is not int:
            return {}
        out[str(name)] = state["numel"]
    return out


def _listed(tree: Tree) -> list[Tree]:
    return list(tree) if isinstance(tree, (list, tuple)) else []


def _states(file: Opened, tree: Tree, group: int, held: int) -> dict[str, State]:
    """A flat group's state by kind.

    held are the elements of its float32 weights: a tensor of one, where they are more or none, is no flat one, but a
    number of the group's own.
    """
    out = {}
    for kind, value in file.mapping(tree, f"the state of group {group}").items():
        is_single = isinstance(value, TensorRef) and value.numel == 1 and held != 1
        if isinstance(value, TensorRef) and len(value.shape) == 1 and not is_single:
            out[str(kind)] = State(*file.flat(value, f"{kind} of group {group}"))
        elif isinstance(value, TensorRef) and value.numel == 1:
            out[str(kind)] = State(ref=value, value=file.array(value))
        elif isinstance(value, TensorRef):
            raise Unsupported(
                f"{kind} of group {group} has shape {value.shape}: it does not follow its parameters",
                where=file.path,
                fix="only element by element states, and single numbers, are known",
            )
        else:
            out[str(kind)] = State(value=file.value(f"state.{group}.{kind}", value))
    return out


def _groups(file: Opened, tree: Tree) -> tuple[list[dict[str, Tree]], list[list[int]]]:
    groups: list[dict[str, Tree]] = []
    members: list[list[int]] = []
    for number, group in enumerate(tree if isinstance(tree, (list, tuple)) else ()):
        entries = file.mapping(group, f"param group {number}")
        members.append(_ints(entries.get("params")))
        groups.append({str(k): file.value(f"group.{k}", v) for k, v in entries.items() if k != "params"})
    return groups, members


def _ints(tree: Tree) -> list[int]:
    if type(tree) is int:
        return [tree]
    return [n for n in tree if type(n) is int] if isinstance(tree, (list, tuple)) else []
