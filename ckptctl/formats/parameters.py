"""Which parameter each state of an optimizer belongs to: by name, or by numbers where counts and shapes leave no doubt.

Pure; takes what `state.find` gives.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import OTHER, WEIGHTS, Group, Optimizer
from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.formats.state import Leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptctl.core.checkpoint import PathKey
    from ckptctl.core.values import Tree
    from ckptctl.formats.state import Found

TAKEN_KINDS = (*WEIGHTS, OTHER, "file")
"""Kinds of tensors that are no optimizer's: a state of that name would stand in a weight's place."""


def named_states(
    found: Found, shapes: Mapping[str, tuple[int, ...]], where: str, order: Sequence[str] = ()
) -> tuple[Optimizer, dict[tuple[str, str], Tree]]:
    """The optimizer with every parameter under its name, and its states by (name, kind).

    shapes are those of the model's parameters in registration order, aliases left out. Integer ids are mapped by
    `order` (a list of names
    that the user gives), by names that the groups record (`param_names`), or where exactly one assignment of the
    model's order fits
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
    for g in found.groups:
        options = {k: v for k, v in g.items() if k not in ("params", "param_names")}
        groups.append(Group(tuple(names.get(p, str(p)) for p in _members(g)), options))
    _once([n for g in groups for n in g.params], where)
    scalars = {k: v for k, v in states.items() if not (isinstance(v, Leaf) and hasattr(v, "shape"))}
    known = not found.flat_optimizer
    return Optimizer(tuple(groups), scalars, known, keyed, found.optimizer_options, unnamed), states


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

    A parameter may be in none.

    Returns {position: (group, place in it)}, None where no way fits, or a text that says why it is not one way.
    """
    spare = len(shapes) - sum(map(len, groups))
    if spare < 0:
        return f"the optimizer lists {len(shapes) - spare} parameters, the model has {len(shapes)}"
    sizes = [len(g) for g in groups]
    states = spare + 1
    for n in sizes:
        states *= n + 1
    if states > 4_000_000:
        return "there are too many param groups to try every order"

    @cache
    def ways(at: tuple[int, ...], skipped: int) -> int:
        position = sum(at) + skipped
        if position == len(shapes):
            return 1
        count = ways(at, skipped + 1) if skipped < spare else 0
        for g, i in enumerate(at):
            if i < sizes[g] and groups[g][i] in (None, shapes[position]) and count < 2:
                count += ways((*at[:g], i + 1, *at[g + 1 :]), skipped)
        return min(count, 2)

    # Filled from the far end, so that recursion stays shallow however many parameters there are.
    at, skipped = tuple(0 for _ in sizes), 0
    _warm(ways, sizes, spare)
    total = ways(at, skipped)
    if total == 0:
        return None
    if total > 1:
        return "more than one order of the model's parameters fits the shapes"
    out = {}
    while sum(at) + skipped < len(shapes):
        position = sum(at) + skipped
        for g, i in enumerate(at):
            after = (*at[:g], i + 1, *at[g + 1 :])
            if i < sizes[g] and groups[g][i] in (None, shapes[position]) and ways(after, skipped):
                out[position] = (g, i)
                at = after
                break
        else:
            skipped += 1
    return out


def _warm(ways: Callable[[tuple[int, ...], int], int], sizes: list[int], spare: int) -> None:
    """Calls ways for every state from the far end when there are many parameters.

    Each then only looks one step ahead.
    """
    if sum(sizes) + spare < 300:
        return
    from itertools import product

    every = sorted(product(*(range(n + 1) for n in sizes)), key=sum, reverse=True)
    for skipped in range(spare, -1, -1):
        for at in every:
            ways(at, skipped)
