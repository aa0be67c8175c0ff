"""Refinement of many pieces at once: what core.compose.refined does to one, on the columns of a table. Pure.

A run of a flattened tensor against a box, or rows against heads: tables whose view is coarser than what is wanted are
taken apart here without a Python loop over their rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.tensor import PieceTable
from ckptctl.core.view import groups, suffixes

if TYPE_CHECKING:
    from ckptctl.core.tensor import Ints
    from ckptctl.core.view import Index


def strides_of(table: PieceTable, rows: slice | Ints) -> Ints:
    """Strides of some rows in bytes, (n, k): those of the table, or packed row-major."""
    if table.strides is not None:
        return table.strides[rows]
    size = table.size[rows]
    out = np.empty(size.shape, np.int64)
    step = np.full(len(size), table.itemsize, np.int64)
    for axis in range(size.shape[1] - 1, -1, -1):
        out[:, axis] = step
        step = step * size[:, axis]
    return out


def refined_rows(table: PieceTable, rows: slice, fine: Index) -> PieceTable:
    """Some rows of a table as boxes of a finer view. Rows without elements give none; the order of rows is not kept."""
    ids = np.arange(len(table))[rows]
    ids = ids[(table.size[ids] > 0).all(axis=1)]
    strides, start = strides_of(table, ids), table.start[ids]
    columns: list[tuple[Ints, Ints, Ints]] = []  # lo, size, byte stride on each axis of fine, by box
    for axis, factors in enumerate(groups(table.view, fine)):
        if not factors:
            continue
        lo, size, stride = table.lo[ids, axis], table.size[ids, axis], strides[:, axis]
        if len(factors) == 1:
            columns.append((lo, size, stride))
            continue
        of, box_lo, box_size, offset = interval_columns(lo, size, factors)
        ids, strides = ids[of], strides[of]
        start = start[of] + offset * strides[:, axis]
        columns = [(a[of], b[of], c[of]) for a, b, c in columns]
        for i, step in enumerate(suffixes(factors)):
            columns.append((box_lo[:, i], box_size[:, i], strides[:, axis] * step))
    out = [np.stack(c, axis=1) if c else np.empty((len(ids), 0), np.int64) for c in zip(*columns, strict=True)]
    lo, size, strides = out or [np.empty((len(ids), 0), np.int64)] * 3
    return PieceTable(fine, table.itemsize, lo, size, table.source[ids], start, strides)


def interval_columns(lo: Ints, size: Ints, factors: Index) -> tuple[Ints, Ints, Ints, Ints]:
    """Intervals [lo, lo + size) of one axis, none empty, as boxes of its factors: core.view.interval_boxes on columns.

    For each box: the row of its interval, lo and size (n, k), and how far its first element is from the interval's.
    """
    k = len(factors)
    rows = np.arange(len(lo))
    at, stop, origin = lo, lo + size, lo  # of what is left, within the factors from `axis` on; origin is its interval's
    prefix = np.empty((len(lo), 0), np.int64)
    out: list[tuple[Ints, Ints, Ints, Ints]] = []

    def emit(chosen: Ints, first: Ints, count: Ints, inner: Index) -> None:
        n = len(chosen)
        box_lo = np.concatenate([prefix[chosen], first[:, None], np.zeros((n, len(inner)), np.int64)], axis=1)
        ones = np.ones((n, prefix.shape[1]), np.int64)
        full = np.broadcast_to(np.array(inner, np.int64), (n, len(inner)))
        box_size = np.concatenate([ones, count[:, None], full], axis=1)
        out.append((rows[chosen], box_lo, box_size, box_lo @ np.array(suffixes(factors)) - origin[chosen]))

    for axis in range(k):
        inner = factors[axis + 1 :]
        step = math.prod(inner)
        first, last = -(-at // step), stop // step  # whole steps are [first, last)
        whole = np.flatnonzero(last > first)
        emit(whole, first[whole], (last - first)[whole], inner)
        # What is left: all of those within one step; else a head and a tail.
        within = np.flatnonzero((at // step == (stop - 1) // step) & (last <= first))
        apart = at // step != (stop - 1) // step
        head = np.flatnonzero((at % step > 0) & (apart | (last > first)))
        tail = np.flatnonzero((stop % step > 0) & (apart | (last > first)))
        left = np.concatenate([within, head, tail])
        outer = np.concatenate([at[within] // step, at[head] // step, stop[tail] // step])
        begin = np.concatenate([at[within] % step, at[head] % step, np.zeros(len(tail), np.int64)])
        finish = np.concatenate([(stop[within] - 1) % step + 1, np.full(len(head), step), stop[tail] % step])
        prefix = np.concatenate([prefix[left], outer[:, None]], axis=1)
        rows, origin, at, stop = rows[left], origin[left], begin, finish
    of, box_lo, box_size, offset = (np.concatenate(c) for c in zip(*out, strict=True))
    return of, box_lo, box_size, offset
