"""Which extents go together: those that gather strided elements from one stretch of a source read it once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.plan.steps import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.plan.check import Totals
    from ckptctl.plan.planner import Plan

Gang = tuple[Extent, ...]


def gangs(plan: Plan, totals: Totals, budget_nbytes: int) -> Iterator[Gang]:
    """Every extent once: alone where it copies runs, else with others that read an overlapping stretch, in the budget.

    Extents of a gang are gathered together, each in its own buffer; the sum of their sizes is at most budget_nbytes
    (one larger extent still makes a gang).
    """
    strided = sorted(totals.spans, key=lambda e: min((source, span) for source, span in totals.spans[e].items()))
    gang: list[Extent] = []
    held, reach = 0, (-1, -1)
    for extent in strided:
        source, span = min(totals.spans[extent].items())
        size = extent.stop - extent.start
        apart = source != reach[0] or span[0] >= reach[1]
        if gang and (apart or held + size > budget_nbytes):
            yield tuple(gang)
            gang, held, reach = [], 0, (-1, -1)
        gang.append(extent)
        held += size
        reach = (source, max(reach[1], span[1]) if reach[0] == source else span[1])
    if gang:
        yield tuple(gang)
    for extent in plan.extents():
        if extent not in totals.spans:
            yield (extent,)


def reread_factor(plan: Plan, totals: Totals, budget_nbytes: int) -> float:
    """Bytes of source windows that gangs read, over those that strided moves stretch across; 1.0: each is read once."""
    windows: dict[int, list[tuple[int, int]]] = {}
    read = 0
    for gang in gangs(plan, totals, budget_nbytes):
        own: dict[int, list[tuple[int, int]]] = {}
        for extent in gang:
            for source, span in totals.spans.get(extent, {}).items():
                own.setdefault(source, []).append(span)
                windows.setdefault(source, []).append(span)
        read += sum(map(_union, own.values()))
    needed = sum(map(_union, windows.values()))
    return read / needed if needed else 1.0


def _union(spans: list[tuple[int, int]]) -> int:
    total, at = 0, -1
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, at))
        at = max(at, stop)
    return total
