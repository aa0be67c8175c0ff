"""Which flat groups a rank of a target has: every rank's the same, but for experts, which have fewer ranks each.

Pure. Experts are placed on expert-parallel ranks in order: rank r of ep has experts [r, r + 1) * n / ep of each layer's
n, under numbers from 0. Data-parallel rank d is rank d % ep of the experts' and holds piece d // ep of them.

Source: DeepSpeed 0.19.8, utils/groups.py, _create_expert_and_data_parallel; runtime/zero/stage_1_and_2.py, __init__
(partition_count); a real run over four ranks, two of them expert-parallel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Group
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.deepspeed.zero import EXPERT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptctl.core.values import Tree

_SIZED = re.compile(r"ep_size_\d+")


@dataclass(frozen=True, slots=True)
class Team:
    """A flat group of one rank: the parameters in it, by their own names and by those that the rank has for them.

    dp ranks hold it, of which this one has number rank.
    """

    names: tuple[str, ...]
    local: tuple[str, ...]
    dp: int
    rank: int


def team(names: Sequence[str], dp: int, ep: int, rank: int) -> Team:
    """A param group as rank of dp has it; for experts' groups those of its expert-parallel rank."""
    if not names or EXPERT.fullmatch(names[0]) is None:
        return Team(tuple(names), tuple(names), dp, rank)
    share = {prefix: count // ep for prefix, count in counts(names).items()}
    mine, local = [], []
    for name in names:
        prefix, number, rest = _split(name)
        if number // share[prefix] == rank % ep:
            mine.append(name)
            local.append(f"{prefix}{number % share[prefix]}{rest}")
    return Team(tuple(mine), tuple(local), dp // ep, rank // ep)


def counts(names: Iterable[str]) -> dict[str, int]:
    """Experts of each MoE layer, by what stands before their numbers, in order of first appearance."""
    out: dict[str, set[int]] = {}
    for name in names:
        if EXPERT.fullmatch(name):
            prefix, number, _ = _split(name)
            out.setdefault(prefix, set()).add(number)
    for prefix, numbers in out.items():
        if numbers != set(range(len(numbers))):
            raise Unsupported(
                f"the experts of {prefix.rstrip('.')} are {sorted(numbers)[:8]}: not all of them are there",
                why="experts are placed on ranks by their number",
            )
    return {prefix: len(numbers) for prefix, numbers in out.items()}


def _split(name: str) -> tuple[str, int, str]:
    m = EXPERT.fullmatch(name)
    if m is None:
        raise Unsupported(f"{name} is in a param group of experts and is none", why="experts have other ranks")
    return m[1], int(m[2]), m[3]


def expert_groups(groups: Sequence[Group], dp: int, ep: int) -> list[Group]:
    """Groups as DeepSpeed wants them: experts apart, marked `moe`, in the order of their modules.

    Unsupported where ranks and experts do not divide, and for groups of several expert-parallel sizes; MissingFact
    where the order inside one is not the modules'.
    """
    if dp % ep:
        raise Unsupported(
            f"--ep {ep} does not divide --dp {dp}", fix="experts' ranks are some of the data-parallel ones"
        )
    sizes = _sizes(groups)
    if len(sizes) > 1:
        raise Unsupported(
            f"the experts have several expert-parallel sizes ({', '.join(sorted(sizes))})",
            fix="convert to torch or dcp",
        )
    out: list[Group] = []
    for number, group in enumerate(groups):
        experts = tuple(n for n in group.params if EXPERT.fullmatch(n))
        dense = tuple(n for n in group.params if not EXPERT.fullmatch(n))
        if experts and dense and group.options:
            raise Unsupported(
                f"param group {number} has experts ({experts[0]}) and others ({dense[0]})",
                why="DeepSpeed cuts experts over fewer ranks, so that their groups are apart",
                fix="--no-optimizer lets the groups go",
            )
        if dense or not experts:
            out.append(Group(dense, group.options, group.owner))
        if experts:
            out.append(Group(_by_module(experts, ep, number), _marked(group.options, ep), group.owner))
    return out


def unsized(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups without the expert-parallel size in their names, which is layout; where there are several, they stay."""
    if len(_sizes(groups)) != 1:
        return tuple(groups)
    return tuple(
        Group(g.params, {k: v for k, v in g.options.items() if k != "name"}, g.owner) if _sizes([g]) else g
        for g in groups
    )


def _sizes(groups: Iterable[Group]) -> set[str]:
    return {name for g in groups if _SIZED.fullmatch(name := str(g.options.get("name", "")))}


def _by_module(names: tuple[str, ...], ep: int, number: int) -> tuple[str, ...]:
    """Experts' parameters layer by layer, expert by expert: the order of a module of any number of local experts."""
    for prefix, count in counts(names).items():
        if count % ep:
            raise Unsupported(
                f"--ep {ep} does not divide {prefix.rstrip('.')}, which has {count} experts",
                fix="give a number that divides the experts",
            )
    places: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        prefix, expert, rest = _split(name)
        places.setdefault(expert, []).append((prefix, rest))
    first = places[0]
    prefixes = list(dict.fromkeys(p for p, _ in first))
    rests = list(dict.fromkeys(r for _, r in first))
    order = {(p, r): at for at, (p, r) in enumerate((p, r) for p in prefixes for r in rests)}
    for listed in places.values():
        if any(place not in order for place in listed) or listed != sorted(listed, key=order.__getitem__):
            raise MissingFact(
                f"param group {number} has its experts in another order than their modules'",
                why="which order they have in a group of other experts is in no file",
                fix="keep --ep as it is, or let the optimizer's state go with --no-optimizer",
                code="param-order",
            )
    return tuple(sorted(names, key=lambda n: _place(n, prefixes, rests)))


def _place(name: str, prefixes: list[str], rests: list[str]) -> tuple[int, int, int]:
    prefix, number, rest = _split(name)
    return prefixes.index(prefix), number, rests.index(rest)


def _marked(options: Mapping[str, Tree], ep: int) -> dict[str, Tree]:
    """An experts' group says so, and its size. Source: DeepSpeed 0.19.8, moe/utils.py."""
    named = str(options.get("name", ""))
    own = {"name": f"ep_size_{ep}"} if not named or _SIZED.fullmatch(named) else {}
    return {**options, **own, "moe": True}
