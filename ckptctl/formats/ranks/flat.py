"""FSDP1's flat parameters and what optimizers keep for them, as the model's own parameters.

Three things occur. Fragments (use_orig_params): each rank has its part of each parameter, in one dimension, under the
parameter's name; in the order of ranks they are the flattened parameter, whatever padding lies between parameters.
Units: `<prefix>_flat_param`, whose members and shapes are in no file. State of units, under numbers, beside weights
that have names and shapes.
Source: torch 2.13.0, distributed/fsdp/_state_dict_utils.py, _local_pre_state_dict_hook, _local_post_state_dict_hook.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.formats.parameters import named_states
from ckptctl.formats.ranks.gather import Gathered, aliases
from ckptctl.formats.ranks.shapes import NO_SHAPE, shapes_of
from ckptctl.formats.ranks.wrapping import Member, members, share, unit_of, wrappings
from ckptctl.names import head_and_embedding, is_tied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.checkpoint import Facts, Optimizer, PathKey
    from ckptctl.core.values import Tree
    from ckptctl.formats.state import Found

SUFFIX = "flat_param"
"""What names of flat parameters end with."""
States = dict[tuple[str, str], "Tree"]


class Flat(NamedTuple):
    """A set's model, and how its optimizer's state is laid. units are by the name of their flat parameter."""

    model: dict[str, Gathered]
    way: dict[int, int]
    """By rank: which of the parts that a flat run is cut into it has."""
    units: dict[str, tuple[Member, ...]]
    shares: dict[str, int]
    fragments: dict[str, Gathered]


def has_units(model: Mapping[str, Gathered]) -> bool:
    """Whether the model is what LOCAL_STATE_DICT gives."""
    return any(_is_unit(n, g) for n, g in model.items())


def _is_unit(name: str, gathered: Gathered) -> bool:
    return name.endswith(SUFFIX) and gathered.how == "sharded" and len(gathered.shape) == 1


# ---- a model of flat parameters ---------------------------------------------------------------------------------


def from_units(model: Mapping[str, Gathered], facts: Facts, where: str) -> Flat:
    """The model's parameters out of fragments or units. Where shapes are in no file they stay flat, and say so.

    Damaged where fragments do not lie in their unit as FSDP1 lays them; MissingFact where the config does not fit.
    """
    units = {n: g for n, g in model.items() if _is_unit(n, g)}
    prefixes = {n[: -len(SUFFIX)].rstrip("_"): n for n in units}
    first = next(iter(units.values()))
    shares = {n: _share(g, where) for n, g in units.items()}
    fragments: dict[str, Gathered] = {}
    out: dict[str, Gathered] = {}
    for name, gathered in model.items():
        prefix = unit_of(name, list(prefixes))
        if name in units:
            continue
        if prefix is None or not _lies_in(gathered, units[prefixes[prefix]], where):
            out[name] = gathered  # a buffer
            continue
        fragments[name] = out[name] = gathered.laid(first.way, None, where)
    shapes, why = shapes_of(facts, list(fragments))
    for name, flat in fragments.items():
        out[name] = _shaped(flat, name, shapes.get(name), why or NO_SHAPE, facts)
    if fragments:
        return Flat(out, first.way, {}, shares, fragments)
    laid = {n: tuple(_members_of(n, prefixes, shapes)) for n in units} if shapes else {}
    for unit, inside in laid.items():
        total = inside[-1].stop if inside else 0
        if total != units[unit].shape[0]:
            raise MissingFact(
                f"the model's config does not fit {unit}",
                where=where,
                why=f"its parameters have {total} elements by the config, the files hold {units[unit].shape[0]}",
                fix="give the config of this model with --model-config",
                code="wrapping",
            )
    for unit, gathered in units.items():
        for m in laid.get(unit, ()):
            out[m.name] = gathered.part(m.name, m.start, m.stop, m.shape)
        if not laid:
            out[unit] = gathered
            gathered.why = why or NO_SHAPE
    order = {n: i for i, n in enumerate(shapes)}
    out = dict(sorted(out.items(), key=lambda item: order.get(item[0], -1)))
    return Flat(out, first.way, laid, shares, {})


def _share(unit: Gathered, where: str) -> int:
    """How many elements of a unit each rank has, the last ones with padding that the unit itself leaves out.

    Damaged where shards are not equal parts in the order of ranks.
    """
    each = share(unit.shape[0], unit.ways)
    for row in unit.columns.tolist():
        first = each * unit.way[row[0]]
        if row[4] != first or row[5] != min(each, unit.shape[0] - first):
            raise Damaged(
                f"{unit.name} is not cut as FSDP1 cuts",
                where=where,
                why=f"rank {row[0]} has {row[5]} elements from {row[4]} on, {each} from {first} on are due",
                code="wrapping",
            )
    return each


def _lies_in(fragment: Gathered, unit: Gathered, where: str) -> bool:
    """Whether plain tensors of one name are views of their unit's shards; a buffer lies elsewhere.

    Damaged where they are, but not so that in the order of ranks they join to one parameter.
    """
    if len(fragment.shape) != 1 or fragment.dtype.name != unit.dtype.name:
        return False
    shard = {row[1]: (row[2], row[5]) for row in unit.columns.tolist()}
    item = unit.dtype.itemsize
    placed = []
    for row in fragment.columns.tolist():
        start, n = shard.get(row[1], (0, 0))
        if not start <= row[2] or row[2] + row[5] * item > start + n * item:
            return False
        placed.append((unit.way[row[0]], (row[2] - start) // item, row[5], n, row[0]))
    placed.sort()
    for a, b in pairwise(placed):
        if a[0] != b[0] and (b[0] != a[0] + 1 or a[1] + a[2] != a[3] or b[1] != 0):
            raise Damaged(
                f"the parts of {fragment.name} do not join",
                where=where,
                why=f"rank {a[4]} has {a[2]} elements from {a[1]} on of {a[3]}, rank {b[4]} goes on at {b[1]}",
                fix="check that the files are of one run and one step",
                code="wrapping",
            )
    return True


def _shaped(flat: Gathered, name: str, shape: tuple[int, ...] | None, why: str, facts: Facts) -> Gathered:
    n = flat.shape[0]
    if shape is not None and math.prod(shape) != n:
        raise MissingFact(
            f"the model's config does not fit {name}",
            why=f"its shape is {shape} by {facts.origin}, the files hold {n} elements of it",
            fix="give the config of this model with --model-config",
            code="wrapping",
        )
    made = flat.part(name, 0, n, shape or (n,))
    made.why = made.why or ("" if shape is not None else why)
    return made


def _members_of(unit: str, prefixes: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Member, ...]:
    mine = [n for n in shapes if prefixes.get(unit_of(n, list(prefixes)) or "") == unit]
    return members(mine, shapes)


# ---- the optimizer's state --------------------------------------------------------------------------------------


def is_flat_state(model: Mapping[str, Gathered], states: Mapping[PathKey, Mapping[str, Tree]]) -> bool:
    """Whether all state is plain and in one dimension while weights are cut: state of flat parameters or fragments."""
    kept = [v for entry in states.values() for v in entry.values() if isinstance(v, Gathered) and v.shape]
    plain = bool(kept) and all(v.how == "plain" and len(v.shape) == 1 for v in kept)
    return plain and any(g.how != "plain" for g in model.values())


def flat_states(flat: Flat, found: Found, facts: Facts, order: Sequence[str], where: str) -> tuple[Optimizer, States]:
    """The optimizer with every parameter under its name, and its state by (name, kind), out of flat runs.

    ties are other names of the model's parameters. Where which parameters a run is made of cannot be told, runs stay
    flat under their numbers, and the optimizer says why.
    """
    numbered = dict(found.states)
    if flat.shares and not flat.fragments:
        return _of_units(flat, found, order, where)
    ties = aliases(flat.model)
    shapes = {
        n: (math.prod(g.final),)
        for n, g in flat.model.items()
        if n not in ties and (n in flat.fragments or not flat.fragments)
    }
    found.states = {k: _laid(entry, flat.way, where) for k, entry in numbered.items()}
    optimizer, states = named_states(found, shapes, where, order)
    if not optimizer.unnamed and all(_fits(v, n, shapes) for (n, _), v in states.items()):
        made: States = {}
        for (name, kind), value in states.items():
            is_run = isinstance(value, Gathered) and value.shape
            if is_run and name in flat.fragments and _by_way(value) != _by_way(flat.fragments[name]):
                raise Damaged(
                    f"{kind} of {name} is cut otherwise than the parameter",
                    where=where,
                    why=f"elements by rank: {value.sizes} and {flat.fragments[name].sizes}",
                    code="wrapping",
                )
            made[name, kind] = value.part(name, 0, value.shape[0], flat.model[name].final) if is_run else value
            if is_run:
                made[name, kind].why = flat.model[name].why
        return optimizer, made
    found.states = numbered
    try:
        wrapped = _wrapped(flat, found, facts, where)
    except MissingFact as err:
        found.states = {k: _laid(entry, flat.way, where) for k, entry in numbered.items()}
        optimizer, states = named_states(found, {}, where)
        return replace(optimizer, unnamed=f"{err}: {err.why}"), states
    return _of_units(wrapped, found, order, where)


def flat_alone(
    flat: Flat,
    found: Found,
    states: Mapping[PathKey, Mapping[str, Tree]],
    facts: Facts,
    plain: tuple[Optimizer, States],
    where: str,
) -> tuple[Optimizer, States]:
    """One rank's state of units, where that is what it is: all in one dimension, under fewer numbers than weights.

    Otherwise, and where the units cannot be told, what plain says.
    """
    kept = [v for entry in states.values() for v in entry.values() if isinstance(v, Gathered) and v.shape]
    if not kept or any(len(v.shape) != 1 for v in kept):
        return plain
    found.states = {k: dict(entry) for k, entry in states.items()}
    try:
        return _of_units(_wrapped(flat, found, facts, where), found, (), where)
    except MissingFact:
        return plain


def _by_way(gathered: Gathered) -> dict[int, int]:
    return {rank: n for rank, n in gathered.sizes.items() if n}


def _fits(value: Tree, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return not isinstance(value, Gathered) or not value.shape or value.shape == shapes.get(name)


def _laid(entry: Mapping[str, Tree], way: Mapping[int, int], where: str, each: int | None = None) -> dict[str, Tree]:
    """State as flat runs; what has no axis (step) stays."""
    return {k: v.laid(way, each, where) if isinstance(v, Gathered) and v.shape else v for k, v in entry.items()}


def _of_units(flat: Flat, found: Found, order: Sequence[str], where: str) -> tuple[Optimizer, States]:
    """State of units as state of their members. Without members (shapes are in no file) it stays the units'."""
    shares = flat.shares
    ways = max(flat.way.values(), default=0) + 1
    found.states = {k: _laid(entry, flat.way, where) for k, entry in found.states.items()}
    optimizer, states = named_states(found, {u: (n * ways,) for u, n in shares.items()}, where, order)
    if optimizer.unnamed:
        return optimizer, states
    made: States = {}
    for (unit, kind), value in states.items():
        if unit not in flat.units:
            made[unit, kind] = value
            if isinstance(value, Gathered) and value.shape:
                value.why = NO_SHAPE
        for m in flat.units.get(unit, ()):
            is_run = isinstance(value, Gathered) and value.shape
            made[m.name, kind] = value.part(m.name, m.start, m.stop, m.shape) if is_run else value
    place = {n: i for i, n in enumerate(flat.model)}
    groups = []
    for g in optimizer.groups:
        names = [m.name for u in g.params for m in flat.units[u]] if flat.units else list(g.params)
        groups.append(replace(g, params=tuple(sorted(names, key=lambda n: place.get(n, len(place))))))
    scalars = {k: v for k, v in made.items() if not isinstance(v, Gathered)}
    return replace(optimizer, groups=tuple(groups), scalars=scalars), made


def _wrapped(flat: Flat, found: Found, facts: Facts, where: str) -> Flat:
    """The units behind state that has numbers only, from the names and shapes of the weights."""
    way, ways = flat.way, max(flat.way.values(), default=0) + 1
    ids = [p for g in found.groups for p in g.get("params", ())] or list(found.states)
    if len(found.groups) > 1:
        raise _untold(where, "there are several param groups, and which unit is in which is in no file")
    shares = [_share_of(found.states.get(p, {}), where) for p in ids]
    shapes = {n: g.final for n, g in flat.model.items() if g.dtype.is_float and (ways == 1 or g.how != "plain")}
    shapes = {n: s for n, s in shapes.items() if n not in aliases(flat.model)}
    tied = head_and_embedding(shapes)
    options = [shapes]
    if tied is not None and (facts.config is None or is_tied(facts.config)):
        without = {n: s for n, s in shapes.items() if n != tied[0]}
        options = [without] if facts.config is not None else [shapes, without]
    fits: dict[tuple[tuple[str, ...], ...], dict[str, tuple[int, ...]]] = {}
    for option in options:
        found_here, all_tried = wrappings(option, shares, ways)
        if not all_tried:
            raise _untold(where, "there are too many ways to wrap the model to try them all")
        fits.update(dict.fromkeys(found_here, option))
    if len(fits) != 1:
        listed = ", ".join("?" if n is None else str(n) for n in shares[:6]) + (", ..." if len(shares) > 6 else "")
        said = f"{len(fits)} ways" if fits else "no way"
        raise _untold(where, f"{said} to wrap the model give(s) parts of {listed} elements on each of {ways} ranks")
    units, chosen = next(iter(fits.items()))
    laid = {f"#{i}": members(names, chosen) for i, names in enumerate(units)}
    numbers = {p: f"#{i}" for i, p in enumerate(ids)}
    found.groups = [{**found.groups[0], "params": list(numbers.values())}] if found.groups else []
    found.states = {numbers[p]: entry for p, entry in found.states.items() if p in numbers}
    return Flat(flat.model, way, laid, {f"#{i}": n or 0 for i, n in enumerate(shares)}, {})


def _share_of(entry: Mapping[str, Tree], where: str) -> int | None:
    """How many elements each rank has of a unit's state; None where it has none."""
    sizes = {n for v in entry.values() if isinstance(v, Gathered) and v.shape for n in v.sizes.values()}
    if len(sizes) > 1:
        raise _untold(where, f"one parameter of the optimizer has parts of {sorted(sizes)[:4]} elements")
    return sizes.pop() if sizes else None


def _untold(where: str, why: str) -> MissingFact:
    return MissingFact(
        "which parameters the optimizer's flat parts are made of cannot be told",
        where=where,
        why=why,
        fix="save with FSDP's own optim_state_dict, or leave the optimizer out: --no-optimizer",
        code="wrapping",
    )


def ways_of(model: Mapping[str, Gathered], ranks: Sequence[int], where: str) -> dict[int, int]:
    """By rank: which part of a flat run it has, as the weights beside it are cut.

    Unsupported where they are cut in more than one way, by several axes of a mesh, or not on axis 0: what a flat run
    holds would then be anyone's guess.
    """
    cut = [g for g in model.values() if g.how != "plain"]
    if not cut:
        return dict.fromkeys(ranks, 0)
    other = next((g for g in cut if g.axes > 1 or g.way != cut[0].way or not g.by_rows()), None)
    if other is not None:
        raise Unsupported(
            "the optimizer's state is flat, and the weights are cut in several ways",
            where=where,
            why=f"{other.name} is not cut on axis 0 as {cut[0].name} is",
            fix="leave the optimizer out with --no-optimizer",
            code="wrapping",
        )
    return dict(cut[0].way)
