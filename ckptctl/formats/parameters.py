"""Which parameter each state of an optimizer belongs to: by name, or by numbers where counts and shapes leave no doubt.

Pure; takes what `state.find` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import OTHER, WEIGHTS, Group, Optimizer
from ckptctl.core.errors import Damaged, MissingFact, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.checkpoint import PathKey
    from ckptctl.core.values import Tree
    from ckptctl.formats.state import Found

TAKEN_KINDS = (*WEIGHTS, OTHER, "file")
"""Kinds of tensors that are no optimizer's: a state of that name would stand in a weight's place."""


def named_states(
    found: Found, shapes: Mapping[str, tuple[int, ...]], where: str, order: Sequence[str] = ()
) -> tuple[Optimizer, dict[tuple[str, str], Tree]]:
    """The optimizer with every parameter under its name, and its states by (name, kind): tensors and values alike.

    Which of them are the optimizer's scalars is for the reader to say, who reads them. shapes are those of the model's
    parameters in registration order, aliases left out. Integer ids are mapped by `order` (a list of names that the user
    gives), by names that the groups record (`param_names`), or where exactly one assignment of the model's order fits
    every shape of every group; else they stay numbers, and the optimizer says why (`unnamed`).

    Raises Damaged for groups that contradict themselves; MissingFact for an order that does not fit.
    """
    ids = [p for g in found.groups for p in _members(g)]
    keyed = "integers" if any(isinstance(p, int) for p in (*ids, *found.states)) else "names"
    names: dict[PathKey, str] = {}
    unnamed = ""
    by_id = found.states
    if keyed == "integers":
        # DCP joins keys to names, so that numbers come back as text there.
        by_id = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in found.states.items()}
        named = _names_of_ids(found, by_id, shapes, where, order)
        names = named if isinstance(named, dict) else {i: f"#{i}" for i in (*ids, *by_id)}
        unnamed = named if isinstance(named, str) else ""
    states: dict[tuple[str, str], Tree] = {}
    for key, entry in by_id.items():
        name = names.get(key, str(key))
        if keyed == "integers" and key not in names:
            raise Damaged(
                f"the optimizer has state for parameter {key}, which no group lists", where=where, code="optimizer-ids"
            )
        for kind, value in entry.items():
            if kind in TAKEN_KINDS:
                raise Unsupported(
                    f"the optimizer calls a state of {name} {kind!r}, a word for the model's own tensors here",
                    where=where,
                    fix="leave the optimizer out, or save that state under another name",
                )
            states[name, kind] = value
    groups = []
    owners = [*found.owners, *[0] * len(found.groups)]
    for g, owner in zip(found.groups, owners, strict=False):
        options = {k: v for k, v in g.items() if k not in ("params", "param_names")}
        groups.append(Group(tuple(names.get(p, str(p)) for p in _members(g)), options, owner))
    _once([n for g in groups for n in g.params], where)
    known = not found.flat_optimizer
    return Optimizer(tuple(groups), {}, known, keyed, found.optimizer_options, unnamed), states


def _members(group: Mapping[str, Tree]) -> list[PathKey]:
    members = group.get("params")
    return (
        [p if isinstance(p, int) and not isinstance(p, bool) else str(p) for p in members]
        if isinstance(members, (list, tuple))
        else []
    )


def _once(members: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in members:
        if name in seen:
            raise Damaged(f"parameter {name} is in two param groups", where=where, code="optimizer-groups")
        seen.add(name)


def _names_of_ids(
    found: Found,
    states: Mapping[PathKey, dict[str, Tree]],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    order: Sequence[str],
) -> dict[PathKey, str] | str:
    """The name of each number, or why there is none."""
    recorded: dict[PathKey, str] = {}
    for g in found.groups:
        members, given = _members(g), g.get("param_names")
        if isinstance(given, (list, tuple)) and len(given) == len(members):
            recorded.update(zip(members, map(str, given), strict=True))
    groups = [list(_members(g)) for g in found.groups] or [sorted(k for k in states if isinstance(k, int))]
    ids = [p for g in groups for p in g]
    if len(recorded) == len(ids):
        return recorded
    if order:
        return _given_order(ids, order, states, shapes, where)
    if not shapes:
        return "there is no model beside it"
    wanted = [[_shape_of(states.get(p)) for p in g] for g in groups]
    assigned = _interleavings(list(shapes.values()), wanted)
    if assigned is None or isinstance(assigned, str):
        return assigned or "no order of the model's parameters fits the shapes of the optimizer's state"
    by_position = list(shapes)
    return {groups[g][i]: by_position[at] for at, (g, i) in assigned.items()}


def _given_order(
    ids: list[PathKey],
    order: Sequence[str],
    states: Mapping[PathKey, dict[str, Tree]],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> dict[PathKey, str]:
    if len(order) != len(ids) or len(set(order)) != len(order):
        raise MissingFact(
            f"--param-order names {len(set(order))} parameters, the optimizer has {len(ids)}",
            where=where,
            fix="list each parameter once, in the optimizer's order",
            code="param-order",
        )
    names = dict(zip(ids, order, strict=True))
    for p, name in names.items():
        shape = _shape_of(states.get(p))
        if name not in shapes or (shape is not None and shape != shapes[name]):
            raise MissingFact(
                f"--param-order: parameter {p} is {name}, whose shape is {shapes.get(name)}, but its state has {shape}",
                where=where,
                code="param-order",
            )
    return names


def _shape_of(entry: Mapping[str, Tree] | None) -> tuple[int, ...] | None:
    """The shape of a parameter by its state; None where there is none, or only scalars."""
    found = [tuple(v.shape) for k, v in (entry or {}).items() if k != "step" and hasattr(v, "shape")]
    return found[0] if found and all(s == found[0] for s in found) else None


def _interleavings(
    shapes: list[tuple[int, ...]], groups: list[list[tuple[int, ...] | None]]
) -> dict[int, tuple[int, int]] | str | None:
    """The one way to deal the model's parameters, in order, to the groups in theirs, so that every shape fits.

    A parameter may be in none. Ways are counted parameter by parameter: after each, how far every group has come, and
    by how many ways (one, or more). Few such places can be reached where shapes differ, however many there are.

    Returns {position: (group, place in it)}, None where no way fits, or a text that says why it is not one way.
    """
    sizes = tuple(len(g) for g in groups)
    spare = len(shapes) - sum(sizes)
    if spare < 0:
        return f"the optimizer lists {len(shapes) - spare} parameters, the model has {len(shapes)}"
    seen = 0
    layers: list[dict[tuple[int, ...], int]] = [{(0,) * len(sizes): 1}]
    for position, shape in enumerate(shapes):
        after: dict[tuple[int, ...], int] = {}
        for at, ways in layers[-1].items():
            if position - sum(at) < spare:
                after[at] = min(2, after.get(at, 0) + ways)
            for g, i in enumerate(at):
                if i < sizes[g] and groups[g][i] in (None, shape):
                    moved = (*at[:g], i + 1, *at[g + 1 :])
                    after[moved] = min(2, after.get(moved, 0) + ways)
        seen += len(after)
        if seen > _PLACES:
            return "there are too many ways to deal the model's parameters to the param groups"
        layers.append(after)
    total = layers[-1].get(sizes, 0)
    if total != 1:
        return "more than one order of the model's parameters fits the shapes" if total else None
    return _walked_back(layers, shapes, groups, spare)


_PLACES = 4_000_000


def _walked_back(
    layers: list[dict[tuple[int, ...], int]],
    shapes: list[tuple[int, ...]],
    groups: list[list[tuple[int, ...] | None]],
    spare: int,
) -> dict[int, tuple[int, int]]:
    """The only way to the end, from there: one place before each leads to it."""
    out: dict[int, tuple[int, int]] = {}
    at = tuple(len(g) for g in groups)
    for position in range(len(shapes) - 1, -1, -1):
        before = layers[position]
        if at in before and position - sum(at) < spare:
            continue
        for g, i in enumerate(at):
            earlier = (*at[:g], i - 1, *at[g + 1 :])
            if i and earlier in before and groups[g][i - 1] in (None, shapes[position]):
                out[position] = (g, i - 1)
                at = earlier
                break
    return out
