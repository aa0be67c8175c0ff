"""Parameters out of flat groups: one model-parallel rank's shards, joined over its data-parallel ranks.

Everything is arithmetic on param_shapes (order and shapes) and the shards' flat tensors; lengths are checked, so that a
shard of another world size or another save is an error and never other parameters' numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import MASTER, Group
from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.tensor import Key, Tensor
from ckptctl.formats.deepspeed import layout
from ckptctl.formats.deepspeed.modelfile import ROUND_ROBIN, zero_section
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.torchtensor import tensor_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import PieceTable
    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.layout import Flat, Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile
    from ckptctl.formats.deepspeed.shards import Shard, State

EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


@dataclass
class Native:
    """The tensors of one model-parallel rank under the names and shapes of its module, and its optimizer's groups."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scalars: dict[tuple[str, str], Tree] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    """Elements of padding by kind of state, over all ranks."""
    ep: int = 1
    unnamed: str = ""
    said: dict[tuple[int, str], object] = field(default_factory=dict)
    """Single values of each flat group's state, comparable: by (group, kind)."""
    notes: list[str] = field(default_factory=list)


def padding_of(parts: Iterable[Native]) -> dict[str, int]:
    """Elements of padding of several ranks' flat tensors together, by kind of state."""
    out: dict[str, int] = {}
    for part in parts:
        for kind, count in part.padding.items():
            out[kind] = out.get(kind, 0) + count
    return out


def of_shards(model: ModelFile, shards: Sequence[Shard], *, data_first: bool = False) -> Native:
    """Masters, states and groups of one model-parallel rank. shards are in order of their data-parallel rank.

    data_first: expert-data-parallel ranks are neighbours (use_data_before_expert_parallelism).

    Raises Damaged where shapes, shards and world size contradict each other, MissingFact without param_shapes.
    """
    if model.shapes is None:
        raise MissingFact(
            "the order of the parameters in the flat groups is not in the checkpoint",
            where=model.path,
            why="it has no param_shapes, which DeepSpeed writes since 0.3.14",
            fix="load it with DeepSpeed and save it again",
            code="param-order",
        )
    first = shards[0]
    notes = [note for shard in shards for note in _alike(first, shard)]
    if len(model.shapes) != len(first.masters):
        raise Damaged(
            f"param_shapes lists {len(model.shapes)} flat groups, the shards hold {len(first.masters)}",
            where=first.path,
            why=f"param_shapes is in {model.path}",
            fix="the files are of different saves: copy the step again",
            code="mixed-saves",
        )
    out, members = Native(notes=notes[:1]), list[list[str]]()
    for number, shapes in enumerate(model.shapes):
        members.append([])
        for team, named in _teams(number, shapes, shards, data_first, out):
            cut = _slotted if first.stage == 3 else _joined
            cut(number, named, list(shapes), team, out)
            _singles(number, named, team, out)
            members[-1] += _optimizer_order(number, list(shapes), list(named), team, model)
    _settings(first, members, out)
    return out


def _alike(first: Shard, shard: Shard) -> list[str]:
    """What is to be said of two shards of one save. Damaged where they are not of one."""
    for what, a, b in (
        ("stage", first.stage, shard.stage),
        ("partition_count", first.counts, shard.counts),
        ("number of groups", len(first.masters), len(shard.masters)),
        ("param groups", len(first.groups), len(shard.groups)),
    ):
        if a != b:
            raise Damaged(
                f"two ranks' files differ in their {what}: {a} and {b}",
                where=f"{first.path}, {shard.path}",
                why="they are of saves of different runs or world sizes",
                fix="copy the step again, from one save",
                code="mixed-saves",
            )
    return _alike_settings(first, shard)


def _alike_settings(first: Shard, shard: Shard) -> list[str]:
    """Damaged where two ranks' param groups have another learning rate, or any other setting.

    A word only, where nothing but the rate differs and the rest tells whether they are of one save: steps, and weights
    beside the masters (not at stage 3). Schedulers that go by a rank's own loss do it.
    """
    groups, notes = first.groups, []
    is_told = first.stage != 3 and any(bool(held) and all("step" in h for h in held) for held in (first.states, groups))
    for number, (a, b) in enumerate(zip(groups, shard.groups, strict=True)):
        odd = [n for n in {**a, **b} if repr(a.get(n)) != repr(b.get(n))]
        if odd == ["lr"] and is_told:
            rates = f"{show(a.get('lr'))} in {first.path}, {show(b.get('lr'))} in {shard.path}"
            notes.append(f"ranks have param group {number} at different learning rates, the first's is taken: {rates}")
        elif odd:
            raise Damaged(
                f"two ranks' files differ in {odd[0]} of param group {number}",
                where=f"{first.path}, {shard.path}",
                why=f"it is {show(a.get(odd[0]))} and {show(b.get(odd[0]))}: of saves of different runs or steps",
                fix="copy the step again, from one save",
                code="mixed-saves",
            )
    return notes


def _teams(
    number: int, shapes: dict[str, Shape], shards: Sequence[Shard], data_first: bool, out: Native
) -> list[tuple[list[Shard], dict[str, Shape]]]:
    """The ranks that a group is cut over, with the parameters' global names: one team, or one for each expert rank."""
    dp = len(shards)
    count = shards[0].count(number) or dp
    if count == dp:
        return [(list(shards), shapes)]
    local = _local_experts(shapes)
    if not local or dp % count:
        raise Damaged(
            f"the optimizer's files are cut over {count} ranks, but there are files of {dp}",
            where=shards[0].path,
            why=f"group {number}: partition_count {count}",
            fix="copy the files of one save; older ones of another world size may be left in the folder",
            code="world-size",
        )
    ep = dp // count
    out.ep = max(out.ep, ep)
    teams = []
    for rank in range(ep):
        team = [shards[rank * count + i] if data_first else shards[rank + i * ep] for i in range(count)]
        teams.append((team, {global_name(n, rank, local): s for n, s in shapes.items()}))
    return teams


def _optimizer_order(
    number: int, own: list[str], named: list[str], team: Sequence[Shard], model: ModelFile
) -> list[str]:
    """A group's parameters as the optimizer was given them: another order than the flat group's with round robin.

    With round_robin_gradients parameters are dealt to ranks (0, dp, ...; 1, dp + 1, ...), whose hands lie end to end.
    The ranks' param_slice_mappings, which are made before that, have the optimizer's own order; where there are none,
    the hands are taken up again. Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, _round_robin_reorder,
    _create_param_mapping; a real run.
    """
    said = dict.fromkeys(n for s in team if number < len(s.slices) for n in s.slices[number])
    if len(said) == len(own) and set(said) == set(own):
        names = dict(zip(own, named, strict=True))
        return [names[n] for n in said]
    if team[0].stage == 3 or said or zero_section(model.config).get(ROUND_ROBIN) is not True:
        return named
    dealt = [i for hand in range(len(team)) for i in range(hand, len(own), len(team))]
    return [name for _, name in sorted(zip(dealt, named, strict=True))]


def _local_experts(shapes: dict[str, Shape]) -> dict[str, int]:
    """Experts of one rank by the name they begin with; {} where not every parameter is an expert's."""
    out: dict[str, int] = {}
    for name in shapes:
        m = EXPERT.fullmatch(name)
        if m is None:
            return {}
        out[m[1]] = max(out.get(m[1], 0), int(m[2]) + 1)
    return out


def global_name(name: str, rank: int, local: dict[str, int]) -> str:
    """An expert's parameter of an expert-parallel rank, under the expert's number in the whole model."""
    m = EXPERT.fullmatch(name)
    return name if m is None else f"{m[1]}{int(m[2]) + rank * local[m[1]]}{m[3]}"


def _joined(number: int, shapes: dict[str, Shape], own: list[str], team: Sequence[Shard], out: Native) -> None:
    """A group of ZeRO-1/2: parameters end to end, cut in as many slots as there are ranks. own: the ranks' names."""
    alignments = team[0].alignments[number] if number < len(team[0].alignments) else []
    if alignments and len(alignments) != len(shapes):
        raise Damaged(
            f"group {number} has {len(shapes)} parameters, and paddings for {len(alignments)}",
            where=team[0].path,
            why="param_alignment_paddings and param_shapes contradict each other",
            code="zero-layout",
        )
    starts, total = layout.starts_of(shapes.values(), alignments)
    slot = _slot(number, total, team)
    if not any(alignments):
        _require_own_places(number, dict(zip(own, shapes.values(), strict=True)), slot, team)
    for kind, flats, dtype in _kinds(number, team):
        table_of = layout.columns(flats)
        out.padding[kind] = out.padding.get(kind, 0) + sum(f.numel for f in flats) - total + sum(alignments)
        for (name, shape), at in zip(shapes.items(), starts, strict=True):
            table = layout.joined_table(math.prod(shape), at, slot, table_of, dtype.itemsize)
            _put(out, Key(name, kind), dtype, shape, table)


def _require_own_places(number: int, shapes: dict[str, Shape], slot: int, team: Sequence[Shard]) -> None:
    """Damaged where a rank's file has, by its own account, what another rank holds: files were swapped.

    Exactly another rank's piece, or other parameters than the group's at all: another pipeline stage's. Other accounts
    tell nothing: with round_robin_gradients DeepSpeed writes wrong ones, of the right parameters.
    """
    names, numels = list(shapes), [math.prod(s) for s in shapes.values()]
    wanted = [
        {names[i]: stop - start for i, start, stop in layout.runs_of(numels, r * slot, (r + 1) * slot)}
        for r in range(len(team))
    ]
    for rank, shard in enumerate(team):
        said = shard.slices[number] if number < len(shard.slices) else {}
        strange = next((n for n in said if n not in shapes), None)
        if strange is not None:
            raise Damaged(
                f"the optimizer's file of rank {rank} holds {strange}, which is not in its group",
                where=shard.path,
                why=f"by param_shapes group {number} has {len(shapes)} parameters, the first of them {names[0]}",
                fix="give the files back their ranks' names, or copy the step again",
                code="mixed-saves",
            )
        if said and said != wanted[rank] and said in wanted:
            raise Damaged(
                f"the optimizer's file of rank {rank} holds the piece of rank {wanted.index(said)}",
                where=shard.path,
                why=f"by its param_slice_mappings group {number} begins with {next(iter(said))}",
                fix="give the files back their ranks' names, or copy the step again",
                code="mixed-saves",
            )


def _slot(number: int, total: int, team: Sequence[Shard]) -> int:
    """Elements of a rank's piece: the one that all lengths in the files fit. Damaged where none does.

    DeepSpeed before 0.5 aligned groups to one element a rank.
    """
    every = [
        (shard, kind, flat.numel)
        for kind, flats, _ in _kinds(number, team)
        for shard, flat in zip(team, flats, strict=True)
    ]
    for alignment in (layout.ALIGNMENT, 1):
        slot = layout.group_slot(total, len(team), alignment)
        rank_of = {id(s): r for r, s in enumerate(team)}
        data = [max(0, min(slot, total - r * slot)) for r in range(len(team))]
        if all(n in (slot, data[rank_of[id(shard)]]) for shard, _, n in every):
            return max(1, slot)
    slot = layout.group_slot(total, len(team))
    data = [max(0, min(slot, total - r * slot)) for r in range(len(team))]
    for (shard, kind, n), want in zip(every, data * (len(every) // len(team)), strict=True):
        if n not in (slot, want):
            _wrong_length(shard, number, kind, n, slot, want)
    raise Damaged(f"group {number} fits no layout", where=team[0].path, code="zero-layout")


def _wrong_length(shard: Shard, number: int, kind: str, n: int, slot: int, data: int) -> None:
    word = f"{slot}" if slot == data else f"{slot}, or {data} without padding"
    raise Damaged(
        f"{kind} of group {number} has {n} elements, not {word}",
        where=shard.path,
        why="param_shapes and the number of ranks say so"
        if n
        else "the file holds no values: the optimizer was offloaded to NVMe, in files beside it",
        fix="copy the files of one save; values in offloaded_tensors/ are not read" if not n else "copy the step again",
        code="zero-layout",
    )


def _slotted(number: int, shapes: dict[str, Shape], _own: list[str], team: Sequence[Shard], out: Native) -> None:
    """A sub-group of ZeRO-3: of every parameter each rank has its own slot."""
    dp = len(team)
    slots = [layout.param_slot(math.prod(s), dp) for s in shapes.values()]
    want = sum(slots)
    for kind, flats, dtype in _kinds(number, team):
        for shard, flat in zip(team, flats, strict=True):
            if flat.numel != want:
                _wrong_length(shard, number, kind, flat.numel, want, want)
        table_of = layout.columns(flats)
        at = 0
        for (name, shape), slot in zip(shapes.items(), slots, strict=True):
            numel = math.prod(shape)
            table = layout.slotted_table(numel, at, dp, table_of, dtype.itemsize)
            _put(out, Key(name, kind), dtype, shape, table)
            out.padding[kind] = out.padding.get(kind, 0) + slot * dp - numel
            at += slot


def _put(out: Native, key: Key, dtype: DType, shape: Shape, table: PieceTable) -> None:
    if key in out.tensors:
        raise Damaged(f"{key.name} is in two flat groups", code="zero-layout")
    out.tensors[key] = Tensor(key, dtype, shape, (table,), trainable=True)


def _kinds(number: int, team: Sequence[Shard]) -> list[tuple[str, list[Flat], DType]]:
    """The flat tensors of a group by kind, one of each rank. Damaged where ranks differ in what they have."""
    out = [(MASTER, [s.masters[number][0] for s in team], _dtype([s.masters[number][1] for s in team], team, number))]
    names = dict.fromkeys(k for s in team for k, v in _states(s, number).items() if v.flat is not None)
    for kind in names:
        states = [_states(s, number).get(kind) for s in team]
        flats: list[Flat] = []
        dtypes: list[DType] = []
        for shard, state in zip(team, states, strict=True):
            if state is None or state.flat is None or state.dtype is None:
                raise Damaged(
                    f"one rank has no {kind} of group {number}, others have",
                    where=shard.path,
                    fix="copy the step again",
                    code="mixed-saves",
                )
            flats.append(state.flat)
            dtypes.append(state.dtype)
        if kind == MASTER:
            raise Unsupported("the optimizer calls a state 'master', as the float32 weights are called here")
        out.append((kind, flats, _dtype(dtypes, team, number)))
    return out


def _states(shard: Shard, number: int) -> dict[str, State]:
    return shard.states[number] if number < len(shard.states) else {}


def _dtype(dtypes: list[DType], team: Sequence[Shard], number: int) -> DType:
    if any(d.name != dtypes[0].name for d in dtypes):
        raise Damaged(
            f"ranks have group {number} in different types: {', '.join(sorted({d.name for d in dtypes}))}",
            where=team[0].path,
            code="mixed-saves",
        )
    return dtypes[0]


def _singles(number: int, shapes: dict[str, Shape], team: Sequence[Shard], out: Native) -> None:
    """Single values of a group's state (step): every parameter of it has them. Damaged where ranks differ."""
    for kind, state in _states(team[0], number).items():
        if state.flat is not None:
            continue
        out.said[number, kind] = state.said
        for shard in team:
            other = _states(shard, number).get(kind)
            if other is None or other.said != state.said:
                raise Damaged(
                    f"ranks differ in {kind} of group {number}",
                    where=f"{team[0].path}, {shard.path}",
                    why="they are of different steps" if kind == "step" else "one of them lacks it, or has another",
                    fix="copy the step again, from one save",
                    code="mixed-saves",
                )
        for name in shapes:
            if state.ref is not None:
                out.tensors[Key(name, kind)] = tensor_of(Key(name, kind), state.ref, team[0].source)
            else:
                out.scalars[name, kind] = state.value


def _settings(first: Shard, members: list[list[str]], out: Native) -> None:
    """Param groups with the names in them. Files of elastic checkpoints have no settings."""
    if not first.groups:
        out.groups = [Group(tuple(names), {}) for names in members]
        return
    listed = [i for m in first.members for i in m]
    if sorted(listed) != list(range(len(members))):
        raise Damaged(
            f"the param groups list the flat groups {listed[:8]}, of which there are {len(members)}",
            where=first.path,
            code="zero-layout",
        )
    for options, numbers in zip(first.groups, first.members, strict=True):
        names = [n for i in numbers for n in members[i]]
        step = options.get("step")
        if step is not None:  # FusedAdam keeps it here
            out.scalars.update({(n, "step"): step for n in names if (n, "step") not in out.scalars})
        out.groups.append(Group(tuple(names), options))
