"""The checks made on a plan before a byte moves: pieces tile tensors, target bytes are filled, source bytes counted.

Pure, like the plan. The two first together say that each target element is written exactly once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.compose import flat_runs
from ckptctl.core.errors import Damaged
from ckptctl.core.output import Fill
from ckptctl.plan.steps import Extent, Merge, Move, step_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.tensor import Ints, Key, PieceTable, Tensor
    from ckptctl.plan.index import SortedTable, SourceIndex
    from ckptctl.plan.planner import Plan


def tiles(tensor: Tensor, tables: tuple[SortedTable, ...]) -> str:
    """Why the pieces do not cover the tensor exactly once, with both numbers; "" where they do."""
    volume = sum(int(t.table.size.prod(axis=1).sum()) if t.table.view else len(t.table) for t in tables)
    for t in tables:
        if math.prod(t.table.view) != tensor.numel:
            return f"a piece counts {math.prod(t.table.view)} elements in all, the tensor {tensor.numel}"
        if (
            t.table.view
            and len(t.table)
            and bool(((t.table.lo < 0) | (t.table.lo + t.table.size > np.array(t.table.view))).any())
        ):
            return f"a piece goes past the tensor's shape {tensor.shape}"
    if volume != tensor.numel:
        return f"its pieces hold {volume} elements, its shape {tensor.shape} has {tensor.numel}"
    if len(tables) > 1:
        return _disjoint_by_runs(tables)
    for t in tables:
        if t.runs:
            if len(t.first) > 1 and bool((t.first[1:] <= t.last[:-1]).any()):
                return "two of its pieces hold the same elements"
        elif not _disjoint(t.table.lo, t.table.size):
            return "two of its pieces hold the same elements"
    return ""


def _disjoint(lo: Ints, size: Ints) -> bool:
    """Whether boxes share no element.

    Axis by axis they are put in slabs of equal intervals; only boxes of one slab can still meet.
    Where intervals of a slab differ and cross, its boxes are compared with one another.
    """
    slab = np.zeros(len(lo), np.int64)
    for axis in range(lo.shape[1]):
        order = np.lexsort((size[:, axis], lo[:, axis], slab))
        lo, size, slab = lo[order], size[order], slab[order]
        first, length = lo[:, axis], size[:, axis]
        new = np.ones(len(lo), bool)
        new[1:] = (np.diff(slab) != 0) | (np.diff(first) != 0) | (np.diff(length) != 0)
        begin = np.flatnonzero(new)
        # Intervals that differ, sorted: where any two of a slab cross, two neighbours do.
        cross = (slab[begin[1:]] == slab[begin[:-1]]) & (first[begin[1:]] < (first + length)[begin[:-1]])
        if cross.any():
            apart = np.isin(slab, slab[begin[:-1][cross]])
            for number in np.unique(slab[apart]).tolist():
                a, b = np.searchsorted(slab, [number, number + 1]).tolist()
                if not _disjoint_in_pairs(lo[a:b], size[a:b], axis):
                    return False
            lo, size, slab, new = lo[~apart], size[~apart], slab[~apart], new[~apart]
        slab = np.cumsum(new)
    return len(slab) == 0 or bool((np.bincount(slab) <= 1).all())


def _disjoint_in_pairs(lo: Ints, size: Ints, axis: int) -> bool:
    """The same for boxes sorted by lo of an axis: each is compared with those that begin before it stops there."""
    first, stop = lo[:, axis], lo[:, axis] + size[:, axis]
    for row, last in enumerate(np.searchsorted(first, stop, side="left").tolist()):
        others = slice(row + 1, last)
        both = np.minimum(lo[others] + size[others], lo[row] + size[row]) > np.maximum(lo[others], lo[row])
        if bool(both.all(axis=1).any()):
            return False
    return True


def _disjoint_by_runs(tables: tuple[SortedTable, ...]) -> str:
    """Pieces over different views, as intervals of the flattened tensor."""
    spans = sorted(
        (run.lo[0], run.lo[0] + run.size[0]) for t in tables for piece in t.table for run in flat_runs(piece)
    )
    at = 0
    for start, stop in spans:
        if start < at:
            return "two of its pieces hold the same elements"
        at = max(at, stop)
    return ""


def require_whole(index: SourceIndex, keys: Iterable[Key]) -> None:
    """Damaged, naming the tensor, where one is not tiled by its pieces exactly once."""
    for key in [stored.key for k in keys for stored in index.tensors[k].stored]:
        why = tiles(index.tensors[key], index.tables(key))
        if why:
            raise Damaged(
                f"{key.name} ({key.kind}) is not whole",
                why=why,
                code="tensor-incomplete",
                fix="copy the missing files of the checkpoint; a save that was interrupted cannot be completed",
            )


@dataclass
class Totals:
    """What a plan will do, counted: bytes read, written and made, moves, strided ones, casts, fills by reason."""

    extents: int = 0
    written_nbytes: int = 0
    read_nbytes: int = 0
    moves: int = 0
    strided: int = 0
    shortest_run: int = 0
    casts: Counter[str] = field(default_factory=Counter)
    fills: Counter[str] = field(default_factory=Counter)
    spans: dict[Extent, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """For extents with strided moves: by source, the first and one past the last byte that those read."""
    largest_extent: int = 0
    merged: int = 0
    """Elements that are computed from a base and adapters."""


def check(plan: Plan) -> Totals:
    """One pass over the whole plan: each extent's steps fill it exactly (else Damaged); returns the counts."""
    totals = Totals(shortest_run=1 << 62)
    for extent in plan.extents():
        steps = plan.extent(extent)
        done = sum(map(step_nbytes, steps))
        if done != extent.stop - extent.start:
            raise Damaged(
                f"the plan fills {done} of {extent.stop - extent.start} bytes",
                where=plan.files[extent.file].path,
                code="plan-incomplete",
            )
        count(totals, extent, steps)
    for file in plan.files:
        for segment in file.segments:
            if isinstance(segment, Fill):
                totals.fills[segment.why] += segment.nbytes
    if not totals.moves:
        totals.shortest_run = 0
    return totals


def count(totals: Totals, extent: Extent, steps: Iterable[object]) -> None:
    """Add one extent's steps to the totals."""
    totals.extents += 1
    totals.written_nbytes += extent.stop - extent.start
    totals.largest_extent = max(totals.largest_extent, extent.stop - extent.start)
    spans: dict[int, tuple[int, int]] = {}
    for step in steps:
        if isinstance(step, Merge):
            totals.moves += len(step.moves)
            totals.read_nbytes += sum(m.numel * m.item for m in step.moves)
            totals.merged += step.numel
            continue
        if not isinstance(step, Move):
            continue
        totals.moves += 1
        totals.read_nbytes += step.numel * step.item
        if step.rule is not None:
            totals.casts[str(step.rule)] += step.numel
        if step.is_run:
            totals.shortest_run = min(totals.shortest_run, step.numel * step.item)
            continue
        if step.rule is None or len(step.size) > 1 or (step.size and step.src_strides[0] != step.item):
            totals.strided += 1
            run = (
                step.size[-1] * step.item
                if step.size and step.src_strides[-1] == step.item == step.dst_strides[-1]
                else step.item
            )
            totals.shortest_run = min(totals.shortest_run, run)
            last = step.src + sum((n - 1) * s for n, s in zip(step.size, step.src_strides, strict=True)) + step.item
            a, b = spans.get(step.source, (step.src, last))
            spans[step.source] = (min(a, step.src), max(b, last))
    if spans:
        totals.spans[extent] = spans


def held_by_source(tables: Iterable[PieceTable]) -> Counter[int]:
    """By source, how many bytes pieces hold. Those that share a storage count twice."""
    out: Counter[int] = Counter()
    for table in tables:
        count_ = (table.size.prod(axis=1) if table.view else np.ones(len(table), np.int64)) * table.itemsize
        sums = np.bincount(table.source, weights=count_) if len(table) else np.zeros(0)
        for source in np.flatnonzero(sums).tolist():
            out[source] += int(sums[source])
    return out
