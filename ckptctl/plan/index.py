"""The source index: each tensor's pieces sorted once, so that those that meet a box are found by bisection. Pure.

Columns stay NumPy arrays: a million pieces take about 100 MB here, whatever their number of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptctl.core.compose import joined, meetings, refined
from ckptctl.core.tensor import Ints, Key, Piece, PieceTable, Source, Tensor
from ckptctl.core.view import Index, refinement, run_boxes, run_of, suffixes
from ckptctl.plan.columns import refined_rows, strides_of
from ckptctl.plan.steps import Move

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptctl.plan.steps import Cast


class Hit(NamedTuple):
    """Elements that the target wants and one source piece holds: a box, and where it lies in target and source."""

    dst: int
    dst_strides: Index
    source: int
    src: int
    src_strides: Index
    size: Index


@dataclass(frozen=True, slots=True)
class SortedTable:
    """A PieceTable without its empty rows, in order of first element.

    first and last are flat element numbers of each row's corners; reach is the running maximum of last; runs tells
    whether every row is one run of the flattened tensor with its bytes packed.
    """

    table: PieceTable
    first: Ints
    last: Ints
    reach: Ints
    runs: bool

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        own = self.first.nbytes + (0 if self.runs else self.last.nbytes + self.reach.nbytes)
        return self.table.nbytes + own


def sort_table(table: PieceTable) -> SortedTable:
    """Sort a table's rows by their first element, leaving out those without elements."""
    weights = np.array(suffixes(table.view), dtype=np.int64)
    keep = np.flatnonzero((table.size > 0).all(axis=1)) if table.view else np.arange(len(table))
    first = table.lo[keep] @ weights if table.view else np.zeros(len(keep), np.int64)
    if len(first) > 1 and (np.diff(first) < 0).any():
        order = np.argsort(first, kind="stable")
        keep, first = keep[order], first[order]
    if len(keep) == len(table) and bool((np.diff(keep) == 1).all()):
        kept = table
    else:
        strides = None if table.strides is None else table.strides[keep]
        kept = PieceTable(
            table.view, table.itemsize, table.lo[keep], table.size[keep], table.source[keep], table.start[keep], strides
        )
    last = first + ((kept.size - 1) @ weights if table.view else 0)
    runs = _all_runs(kept, first, last)
    reach = last if runs else np.maximum.accumulate(last) if len(last) else last
    return SortedTable(kept, first, last, reach, runs)


def _all_runs(table: PieceTable, first: Ints, last: Ints) -> bool:
    count = table.size.prod(axis=1) if table.view else np.ones(len(table), np.int64)
    if not bool((last - first + 1 == count).all()):
        return False
    if table.strides is None or not table.view:
        return True
    want = np.full(len(table), table.itemsize, dtype=np.int64)
    for axis in range(len(table.view) - 1, -1, -1):
        if bool(((table.size[:, axis] > 1) & (table.strides[:, axis] != want)).any()):
            return False
        want = want * table.size[:, axis]
    # Rows cannot overlap here: the tiling is checked apart, and reach = last needs last to rise.
    return bool((np.diff(last) > 0).all())


class SourceIndex:
    """Finds which source pieces hold a box of a tensor. Tables are sorted on first use and kept."""

    def __init__(self, tensors: Mapping[Key, Tensor], sources: Sequence[Source]) -> None:
        self.tensors, self.sources = tensors, sources
        self._sorted: dict[Key, tuple[SortedTable, ...]] = {}

    def tables(self, key: Key) -> tuple[SortedTable, ...]:
        """The tensor's sorted tables."""
        found = self._sorted.get(key)
        if found is None:
            found = self._sorted[key] = tuple(sort_table(t) for t in self.tensors[key].pieces)
        return found

    @property
    def nbytes(self) -> int:
        """Memory of all that is sorted so far."""
        return sum(t.nbytes for tables in self._sorted.values() for t in tables)

    def moves(self, key: Key, wanted: Piece, item: int, own: int, rule: Cast | None = None) -> Iterator[Move]:
        """The moves that fill one wanted piece. item and own are bytes an element, in the target and in the source."""
        for hit in self.hits(key, wanted, item):
            if len(hit.size) == 1:
                yield Move(hit.dst, hit.source, hit.src, hit.size, hit.src_strides, hit.dst_strides, own, item, rule)
                continue
            size, src, dst = joined(hit.size, hit.src_strides, hit.dst_strides)
            yield Move(hit.dst, hit.source, hit.src, size, src, dst, own, item, rule)

    def hits(self, key: Key, wanted: Piece, item: int) -> Iterator[Hit]:
        """The source elements of one wanted piece, whose start and strides are bytes of the output.

        item is the target's bytes an element.
        """
        if math.prod(wanted.size) == 0:
            return
        for table in self.tables(key):
            yield from _hits(table, wanted, item)


def _dense(piece: Piece, item: int) -> bool:
    want = item
    for n, stride in zip(reversed(piece.size), reversed(piece.strides), strict=True):
        if n > 1 and stride != want:
            return False
        want *= n
    return True


def _hits(table: SortedTable, wanted: Piece, item: int) -> Iterator[Hit]:
    view = table.table.view
    run = run_of(wanted.view, wanted.lo, wanted.size) if _dense(wanted, item) else None
    if run is not None and table.runs:
        yield from _run_hits(table, run[0], run[0] + run[1], wanted.start, item)
    elif run is not None:
        at = wanted.start
        for lo, size in run_boxes(run[0], run[0] + run[1], view):
            strides, step = [0] * len(size), item
            for axis in range(len(size) - 1, -1, -1):
                strides[axis] = step
                step *= size[axis]
            yield from _box_hits(table, Piece(view, lo, size, -1, at, tuple(strides)))
            at += step
    elif view == wanted.view:
        yield from _box_hits(table, wanted)
    else:
        yield from _general_hits(table, wanted)


def _rows(table: SortedTable, first: int, last: int) -> tuple[int, int]:
    """The rows that may hold an element of [first, last]."""
    low = int(np.searchsorted(table.reach, first, side="left"))
    return low, int(np.searchsorted(table.first, last, side="right"))


def _run_hits(table: SortedTable, start: int, stop: int, dst: int, item: int) -> Iterator[Hit]:
    low, high = _rows(table, start, stop - 1)
    t = table.table
    own = t.itemsize
    begin = np.maximum(table.first[low:high], start)
    finish = np.minimum(table.last[low:high] + 1, stop)
    src = t.start[low:high] + (begin - table.first[low:high]) * own
    at = dst + (begin - start) * item
    for d, s, a, n in zip(
        at.tolist(), t.source[low:high].tolist(), src.tolist(), (finish - begin).tolist(), strict=True
    ):
        if n > 0:
            yield Hit(d, (item,), s, a, (own,), (n,))


def _box_hits(table: SortedTable, wanted: Piece) -> Iterator[Hit]:
    """Wanted is a box of the table's own view."""
    t = table.table
    if not t.view:
        for s, a in zip(t.source.tolist(), t.start.tolist(), strict=True):
            yield Hit(wanted.start, (), s, a, (), ())
        return
    yield from _meet_rows(t, _rows(table, *_corners(wanted)), wanted)


def _corners(wanted: Piece) -> tuple[int, int]:
    """The first and the last element of a box, counted in the flattened tensor."""
    weights = suffixes(wanted.view)
    low = sum(i * w for i, w in zip(wanted.lo, weights, strict=True))
    return low, low + sum((n - 1) * w for n, w in zip(wanted.size, weights, strict=True))


def _meet_rows(t: PieceTable, between: tuple[int, int], wanted: Piece) -> Iterator[Hit]:
    """Where some rows of a table meet a box of its view, which has an axis at least."""
    a, b = between
    first, stop = np.array(wanted.lo, np.int64), np.array(wanted.lo, np.int64) + np.array(wanted.size, np.int64)
    lo = np.maximum(t.lo[a:b], first)
    size = np.minimum(t.lo[a:b] + t.size[a:b], stop) - lo
    rows: npt.NDArray[np.intp] = np.flatnonzero((size > 0).all(axis=1))
    if not len(rows):
        return
    lo, size = lo[rows], size[rows]
    rows = rows + a
    strides = strides_of(t, rows)
    src = t.start[rows] + ((lo - t.lo[rows]) * strides).sum(axis=1)
    dst = wanted.start + (lo - first) @ np.array(wanted.strides, np.int64)
    columns = (dst.tolist(), t.source[rows].tolist(), src.tolist(), size.tolist(), strides.tolist())
    for d, s, at, n, own in zip(*columns, strict=True):
        yield Hit(d, wanted.strides, s, at, tuple(own), tuple(n))


def _general_hits(table: SortedTable, wanted: Piece) -> Iterator[Hit]:
    """Views that differ: over the rows that can matter, as boxes of the common refinement, else piece by piece."""
    a, b = _rows(table, *_corners(wanted))
    fine = refinement(wanted.view, table.table.view)
    if fine:
        rows = refined_rows(table.table, slice(a, b), fine)
        for part in refined(wanted, fine):
            yield from _meet_rows(rows, (0, len(rows)), Piece(fine, *part.box, -1, part.start, part.strides))
        return
    for row in range(a, b):
        piece = table.table[row]
        for m in meetings(wanted, piece):
            yield Hit(m.a_start, m.a_strides, piece.source, m.b_start, m.b_strides, m.size)
