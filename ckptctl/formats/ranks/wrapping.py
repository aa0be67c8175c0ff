"""FSDP1's wrapping: which parameters make one flat parameter. Pure arithmetic on names and sizes; no tensor is here.

A unit (a wrapped module, or the root with what is left) lays its own parameters one after the other, in module order,
without padding between them (torch pads between them only with use_orig_params, where optimizers know the original
parameters), and is cut into ceil(elements / ranks) for each rank.
Source: torch 2.13.0, distributed/fsdp/_flat_param.py, FlatParamHandle._init_flat_param_and_metadata, _get_shard.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Shape = tuple[int, ...]
_MOST_TRIED, _MOST_STEPS = 4000, 400_000
"""How many ways to wrap a model are tried, and looked for, before saying that there are too many."""


class Member(NamedTuple):
    """A parameter in a unit: elements [start, stop) of the unit's flat run."""

    name: str
    start: int
    stop: int
    shape: Shape


def members(names: Sequence[str], shapes: Mapping[str, Shape]) -> tuple[Member, ...]:
    """Those parameters one after the other."""
    out, at = [], 0
    for name in names:
        n = math.prod(shapes[name])
        out.append(Member(name, at, at + n, shapes[name]))
        at += n
    return tuple(out)


def share(numel: int, ways: int) -> int:
    """How many elements of a unit each rank has, padding with them."""
    return -(-numel // ways)


def unit_of(name: str, prefixes: Sequence[str]) -> str | None:
    """The innermost of the units (by the prefix of their parameters' names, "" for the root) that has a parameter."""
    return max((p for p in prefixes if name.startswith(p)), key=len, default=None)


def wrappings(
    shapes: Mapping[str, Shape], shares: Sequence[int | None], ways: int
) -> tuple[list[tuple[tuple[str, ...], ...]], bool]:
    """Every way to wrap modules of one kind alike to get units of those shares, and whether all were tried.

    shapes are the parameters' in module order. A share is None where nothing tells it. A kind of module is its path
    with numbers left out (`model.layers.*.mlp`). Units come in the order of modules, outer before inner, root first.
    """
    kinds = _kinds(shapes)
    found: dict[tuple[tuple[str, ...], ...], None] = {}
    tried = steps = 0
    for chosen in _choices(kinds, len(shares)):
        steps, tried = steps + 1, tried + (chosen is not None)
        if tried > _MOST_TRIED or steps > _MOST_STEPS:
            return list(found), False
        if chosen is None:
            continue
        units = _units(shapes, chosen)
        if len(units) == len(shares) and all(
            wanted is None or share(sum(math.prod(shapes[n]) for n in unit), ways) == wanted
            for unit, wanted in zip(units, shares, strict=True)
        ):
            found[units] = None
    return list(found), True


def _kind(module: str) -> str:
    return ".".join("*" if word.isdecimal() else word for word in module.split("."))


def _modules(name: str) -> Iterator[str]:
    """The modules that a parameter is in, outermost first, without the root."""
    words = name.split(".")[:-1]
    for n in range(1, len(words) + 1):
        yield ".".join(words[:n])


def _kinds(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """How many modules there are of each kind; lists of modules are none, since nothing calls them."""
    modules = dict.fromkeys(m for name in shapes for m in _modules(name))
    lists = {m.rpartition(".")[0] for m in modules if m.rpartition(".")[2].isdecimal()}
    return dict(Counter(_kind(m) for m in modules if m not in lists))


def _choices(kinds: Mapping[str, int], units: int) -> Iterator[tuple[str, ...] | None]:
    """Sets of kinds with that many modules, or one fewer where the root has a part; None for each step in between.

    Modules whose parameters are all in modules within them are no units: leaving them out gives the same units.
    """
    names = sorted(kinds, key=lambda k: (-kinds[k], k))

    def below(at: int, left: int, chosen: tuple[str, ...]) -> Iterator[tuple[str, ...] | None]:
        yield chosen if left in (0, 1) else None
        for i in range(at, len(names)):
            if kinds[names[i]] <= left:
                yield from below(i + 1, left - kinds[names[i]], (*chosen, names[i]))

    yield from below(0, units, ())


def _units(shapes: Mapping[str, Shape], chosen: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The units' parameters where all modules of the chosen kinds are wrapped, in order."""
    wrapped = set(chosen)
    of: dict[str, list[str]] = {"": []}
    for name in shapes:
        unit = ""
        for module in _modules(name):
            if _kind(module) in wrapped:
                unit = module
                of.setdefault(module, [])
        of[unit].append(name)
    return tuple(tuple(names) for names in of.values() if names)
