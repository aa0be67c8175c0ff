"""Optimizers' state dicts, nested or with flat keys, one or several: what they hold, under names or numbers that meet.

Pure; called by `state.find`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import PathKey
    from ckptctl.core.values import Tree
    from ckptctl.formats.state import Found

FLAT = ("state.", "param_groups.")


@dataclass
class _One:
    """One optimizer's state dict, taken apart."""

    states: dict[PathKey, dict[str, Tree]] = field(default_factory=dict)
    groups: list[dict[str, Tree]] = field(default_factory=list)
    options: dict[str, Tree] = field(default_factory=dict)
    is_flat: bool = False

    @property
    def members(self) -> list[PathKey]:
        """What its groups list, in order."""
        return [p for g in self.groups for p in _list(g.get("params"))]

    @property
    def is_numbered(self) -> bool:
        """Whether its parameters are numbers."""
        return any(isinstance(p, int) for p in (*self.members, *self.states))


def is_optimizer(value: Tree) -> bool:
    """Whether it looks like optimizer.state_dict(), nested or with flat keys; a list of nothing else counts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, Mapping) and is_optimizer(v) for v in value)
    if not isinstance(value, Mapping):
        return False
    if "state" in value or "param_groups" in value:
        return True
    return any(isinstance(k, str) and k.startswith(FLAT) for k in value)


def join(found: Found, trees: Sequence[Tree]) -> None:
    """Puts one or several optimizers into found. Where they are numbered, later ones count on from those before.

    Unsupported where two optimizers have state of the same parameter: a target has one place for it.
    """
    found.has_optimizer = True
    parts = [_taken_apart(tree, list(found.model)) for tree in trees]
    first = 0
    seen: dict[PathKey, int] = {}
    for owner, part in enumerate(parts):
        if len(parts) > 1 and part.options:
            raise Unsupported(
                f"optimizer {owner} of {len(parts)} has entries of its own ({', '.join(part.options)})",
                why="several optimizers are joined into one, which has one place for such entries",
                fix="save the optimizers apart",
            )
        if len(parts) > 1 and part.is_numbered:
            first = _counted_on(part, first)
        _require_disjoint(part, owner, seen)
        found.states.update(part.states)
        found.groups += part.groups
        found.owners += [owner] * len(part.groups)
        found.optimizer_options.update(part.options)
        found.flat_optimizer = found.flat_optimizer or part.is_flat


def _counted_on(part: _One, first: int) -> int:
    """Adds first to every number of a part (text in DCP folders, whose keys are text); returns the next free number."""

    def moved(p: PathKey) -> PathKey:
        return int(p) + first if isinstance(p, int) or p.isdecimal() else p

    part.states = {moved(p): entry for p, entry in part.states.items()}
    part.groups = [{**g, "params": [moved(p) for p in _list(g.get("params"))]} for g in part.groups]
    return max([first - 1, *(p for p in (*part.members, *part.states) if isinstance(p, int))]) + 1


def _require_disjoint(part: _One, owner: int, seen: dict[PathKey, int]) -> None:
    for p in dict.fromkeys((*part.members, *part.states)):
        if p in seen:
            raise Unsupported(
                f"{p} is in two optimizers, {seen[p]} and {owner}",
                why="a parameter has one set of moments in every target",
                fix="save the optimizers apart",
            )
    seen.update(dict.fromkeys((*part.members, *part.states), owner))


def _list(value: Tree) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _taken_apart(tree: Tree, order: Sequence[str]) -> _One:
    """One optimizer's parts. order are the model's names: flat keys have lost theirs."""
    out = _One()
    if not isinstance(tree, Mapping):
        return out
    state, groups = tree.get("state"), tree.get("param_groups")
    if isinstance(state, Mapping):
        for key, entry in state.items():
            out.states[key if isinstance(key, int) else str(key)] = (
                {str(k): v for k, v in entry.items()} if isinstance(entry, Mapping) else {"": entry}
            )
    if isinstance(groups, (list, tuple)):
        out.groups = [{str(k): v for k, v in g.items()} for g in groups if isinstance(g, Mapping)]
    flat = {k: v for k, v in tree.items() if isinstance(k, str) and k.startswith(FLAT)}
    if flat:
        out.is_flat = True
        _flat(flat, out, order)
    out.options = {str(k): v for k, v in tree.items() if k not in ("state", "param_groups") and k not in flat}
    return out


def _flat(flat: Mapping[str, Tree], out: _One, order: Sequence[str]) -> None:
    """Keys `state.<name>.<kind>` and `param_groups.<name>.<option>`: names may hold dots, kinds and options do not.

    Source: torch 2.13.0, distributed/checkpoint/state_dict.py, _unflatten_optim_state_dict.
    """
    options: dict[str, dict[str, Tree]] = {}
    listed: dict[int, dict[str, Tree]] = {}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if part == "param_groups" and name.isdigit():  # written without paths: the index of a group in its list
            listed.setdefault(int(name), {})[last] = value
            continue
        (out.states.setdefault(name, {}) if part == "state" else options.setdefault(name, {}))[last] = value
    out.groups = [{"params": [], **listed[n]} for n in sorted(listed)]
    if listed and not options:
        out.is_flat = False
        return
    place = {name: i for i, name in enumerate(order)}
    for name in sorted(options, key=lambda n: place.get(n, len(place))):
        for group in out.groups:
            if _same({k: v for k, v in group.items() if k != "params"}, options[name]):
                group["params"].append(name)
                break
        else:
            out.groups.append({"params": [name], **options[name]})


def _same(a: Tree, b: Tree) -> bool:
    """Equal settings, by type and value: 0 and 0.0 and False are three settings."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)
