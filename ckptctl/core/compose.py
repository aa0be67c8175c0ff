"""The geometry's two operations: where pieces of a tensor meet, and a native tensor's piece as pieces of hub tensors.

`compose` is the only place that joins the naming level (hub boxes in native tensors) with the byte level (native boxes
in files). The target side uses the same function: there the bytes are those of an output file. Nothing here reads or
writes.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.tensor import Part, Piece
from ckptctl.core.view import Box, Index, groups, interval_boxes, meet, refinement, suffixes, unit_slices

if TYPE_CHECKING:
    from collections.abc import Iterator


class Meeting(NamedTuple):
    """Elements that two pieces share: a box of that size, and where it lies on either side (bytes, strides by axis)."""

    size: Index
    a_start: int
    a_strides: Index
    b_start: int
    b_strides: Index


class Refined(NamedTuple):
    """A piece as one box of a finer view: its index range there, its first element's byte, and strides by fine axis."""

    box: Box
    start: int
    strides: Index


def refined(piece: Piece, fine: Index) -> list[Refined]:
    """The piece as boxes of a finer view, in rising order of first element."""
    parts = groups(piece.view, fine)
    strides: list[int] = []
    for factors, stride in zip(parts, piece.strides, strict=True):
        strides += [s * stride for s in suffixes(factors)]
    per_axis = [interval_boxes(lo, n, f) for lo, n, f in zip(piece.lo, piece.size, parts, strict=True)]
    out = []
    for boxes in product(*per_axis):
        lo = tuple(i for b in boxes for i in b[0])
        size = tuple(n for b in boxes for n in b[1])
        start = piece.start
        for (b_lo, _), factors, origin, stride in zip(boxes, parts, piece.lo, piece.strides, strict=True):
            if factors:
                start += (sum(i * s for i, s in zip(b_lo, suffixes(factors), strict=True)) - origin) * stride
        out.append(Refined((lo, size), start, tuple(strides)))
    return out


def flat_runs(piece: Piece) -> Iterator[Piece]:
    """The piece as boxes of the flattened tensor, one a row: the way out where views do not nest. Always possible."""
    total = (math.prod(piece.view),)
    steps = suffixes(piece.view)
    if not piece.view:
        yield Piece((1,), (0,), (1,), piece.source, piece.start, (0,))
        return
    *outer, inner = piece.size
    for index in unit_slices(tuple(outer)):
        at = (*index, 0)
        lo = sum((first + i) * s for first, i, s in zip(piece.lo, at, steps, strict=True))
        start = piece.start + sum(i * s for i, s in zip(at, piece.strides, strict=True))
        yield Piece(total, (lo,), (inner,), piece.source, start, (piece.strides[-1],))


def joined(size: Index, a: Index, b: Index) -> tuple[Index, Index, Index]:
    """The same box with axes of one element left out and neighbours joined where both sides go on without a step."""
    if len(size) == 2 and size[0] > 1 and size[1] > 1 and (a[0] != size[1] * a[1] or b[0] != size[1] * b[1]):
        return size, a, b  # most strided boxes: worth a shorter way
    out: list[tuple[int, int, int]] = []
    for n, s, t in zip(size, a, b, strict=True):
        if n == 1:
            continue
        if out and out[-1][1] == n * s and out[-1][2] == n * t:
            out[-1] = (out[-1][0] * n, s, t)
        else:
            out.append((n, s, t))
    if not out:
        return (), (), ()
    sizes, left, right = zip(*out, strict=True)
    return sizes, left, right


def meetings(a: Piece, b: Piece) -> list[Meeting]:
    """Where two pieces of one tensor meet, in rising order of element; [] where they share none."""
    if math.prod(a.size) == 0 or math.prod(b.size) == 0:
        return []
    fine = refinement(a.view, b.view)
    if fine is None:
        return [m for run in flat_runs(b) for m in meetings(a, run)]
    out = []
    others = refined(b, fine)
    for x in refined(a, fine):
        for y in others:
            box = meet(x.box, y.box)
            if box is None:
                continue
            a_start = x.start + sum((i - j) * s for i, j, s in zip(box[0], x.box[0], x.strides, strict=True))
            b_start = y.start + sum((i - j) * s for i, j, s in zip(box[0], y.box[0], y.strides, strict=True))
            size, a_strides, b_strides = joined(box[1], x.strides, y.strides)
            out.append(Meeting(size, a_start, a_strides, b_start, b_strides))
    return out


def compose(part: Part, piece: Piece) -> list[Piece]:
    """The hub tensor's pieces within a native tensor's piece: same bytes, hub coordinates. [] where they share none.

    piece.view and part.native_view are views of the same native tensor. Axes whose factors do not fit are cut into
    slices: always possible, only more pieces.
    """
    if math.prod(part.size) == 0 or math.prod(piece.size) == 0:
        return []
    fine = refinement(part.native_view, piece.view)
    if fine is None:
        return [p for run in flat_runs(piece) for p in compose(part, run)]
    shape = groups(part.native_view, fine)
    whole = (part.native_lo, part.size)
    out: list[Piece] = []
    for box in refined(piece, fine):
        out += _hub_pieces(part, piece.source, shape, whole, box)
    return out


def _hub_pieces(part: Part, source: int, shape: tuple[Index, ...], whole: Box, box: Refined) -> list[Piece]:
    """One refined box as hub pieces: on every native axis it is cut to intervals, and these to the part's own."""
    at = 0
    # On each native axis: (lo, size, byte offset from the box's start, byte stride).
    per_axis: list[list[tuple[int, int, int, int]]] = []
    for factors, first, count in zip(shape, whole[0], whole[1], strict=True):
        n = len(factors)
        lo, size, strides = box.box[0][at : at + n], box.box[1][at : at + n], box.strides[at : at + n]
        at += n
        cut = []
        for axis_lo, axis_size, offset, stride in _intervals(factors, lo, size, strides):
            start, stop = max(axis_lo, first), min(axis_lo + axis_size, first + count)
            if start < stop:
                cut.append((start, stop - start, offset + (start - axis_lo) * stride, stride))
        if not cut:
            return []
        per_axis.append(cut)
    out = []
    for chosen in product(*per_axis):
        hub_lo, hub_size, hub_strides = ([0] * len(chosen) for _ in range(3))
        for axis, (lo_, size_, _, stride_) in enumerate(chosen):
            to = part.axes[axis]
            hub_lo[to] = lo_ - part.native_lo[axis] + part.hub_lo[to]
            hub_size[to] = size_
            hub_strides[to] = stride_
        start = box.start + sum(c[2] for c in chosen)
        out.append(Piece(part.hub_view, tuple(hub_lo), tuple(hub_size), source, start, tuple(hub_strides)))
    return out


def _intervals(factors: Index, lo: Index, size: Index, strides: Index) -> list[tuple[int, int, int, int]]:
    """A box over one axis' factors as intervals of the axis with one stride each: (lo, size, offset, stride)."""
    if not factors:
        return [(0, 1, 0, 0)]
    if len(factors) == 1:
        return [(lo[0], size[0], 0, strides[0])]
    inner = math.prod(factors[1:])
    rest = _intervals(factors[1:], lo[1:], size[1:], strides[1:])
    # One interval that spans the inner factors whole, with bytes going on without a step, joins with the outer factor.
    if size[0] == 1:
        return [(lo[0] * inner + a, n, offset, stride) for a, n, offset, stride in rest]
    if len(rest) == 1 and rest[0][1] == inner and strides[0] == inner * rest[0][3]:
        return [(lo[0] * inner, size[0] * inner, 0, rest[0][3])]
    return [
        ((lo[0] + i) * inner + a, n, i * strides[0] + offset, stride)
        for i in range(size[0])
        for a, n, offset, stride in rest
    ]
