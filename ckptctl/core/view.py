"""Views: row-major factorisations of a shape, and boxes of them. Pure integers; no bytes, no tensors.

A tensor of shape (6, 4) has the views (24,), (6, 4), (2, 3, 4), ... Two views have a common refinement where their
suffix products divide one another in order; an interval on one axis becomes at most 2k - 1 boxes of its k factors.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

Index = tuple[int, ...]
Box = tuple[Index, Index]
"""lo and size, axis by axis; empty tuples are the one index of a 0-d view."""


def suffixes(view: Index) -> Index:
    """Elements that one step on each axis skips: row-major strides in elements."""
    out, step = [0] * len(view), 1
    for axis in range(len(view) - 1, -1, -1):
        out[axis] = step
        step *= view[axis]
    return tuple(out)


@lru_cache(maxsize=4096)
def refinement(a: Index, b: Index) -> Index | None:
    """The coarsest view that both are coarser than, without axes of size 1; None where their factors do not nest.

    Both must have the same number of elements, which is not 0.
    """
    products = sorted({math.prod(a), 1, *(p for v in (a, b) for p in suffixes(v))})
    if math.prod(a) != math.prod(b):
        raise ValueError(f"views {a} and {b} differ in elements")
    factors = []
    for small, large in itertools.pairwise(products):
        if large % small:
            return None
        factors.append(large // small)
    return tuple(reversed(factors))


@lru_cache(maxsize=4096)
def groups(view: Index, fine: Index) -> tuple[Index, ...]:
    """For each axis of view, the sizes of fine's axes that it is made of, outermost first; () for an axis of size 1."""
    out, at = [], 0
    for size in view:
        taken: list[int] = []
        while math.prod(taken) < size:
            taken.append(fine[at])
            at += 1
        if math.prod(taken) != size:
            raise ValueError(f"{fine} does not refine {view}")
        out.append(tuple(taken))
    return tuple(out)


def interval_boxes(lo: int, size: int, factors: Index) -> list[Box]:
    """The interval [lo, lo + size) of an axis as boxes of its factors, in rising order; at most 2k - 1 of them."""
    if size <= 0:
        return []
    if len(factors) <= 1:
        return [((lo,), (size,))] if factors else [((), ())]
    inner = math.prod(factors[1:])
    stop = lo + size
    out: list[Box] = []
    first, last = lo // inner, (stop - 1) // inner
    if first == last:
        return [
            ((first, *b_lo), (1, *b_size)) for b_lo, b_size in interval_boxes(lo - first * inner, size, factors[1:])
        ]
    if lo % inner:
        out += [
            ((first, *b_lo), (1, *b_size))
            for b_lo, b_size in interval_boxes(lo % inner, inner - lo % inner, factors[1:])
        ]
        first += 1
    full = stop // inner
    if full > first:
        out.append(((first, *(0,) * (len(factors) - 1)), (full - first, *factors[1:])))
    if stop % inner:
        out += [((full, *b_lo), (1, *b_size)) for b_lo, b_size in interval_boxes(0, stop % inner, factors[1:])]
    return out


def run_boxes(start: int, stop: int, view: Index) -> list[Box]:
    """Elements [start, stop) of the flattened view as boxes of it, in rising order. A 0-d view has one element."""
    if stop <= start:
        return []
    if not view:
        return [((), ())]
    return interval_boxes(start, stop - start, view)


def flat(lo: Index, view: Index) -> int:
    """The number of the element at lo in row-major order."""
    return sum(i * s for i, s in zip(lo, suffixes(view), strict=True))


def run_of(view: Index, lo: Index, size: Index) -> tuple[int, int] | None:
    """(first element, count) where the box is one run of the flattened tensor, else None. Empty boxes are runs of 0."""
    count = math.prod(size)
    if count == 0:
        return 0, 0
    open_axis = False
    for n, full in zip(size, view, strict=True):
        if open_axis and n != full:
            return None
        open_axis = open_axis or n > 1
    return flat(lo, view), count


def meet(a: Box, b: Box) -> Box | None:
    """The box that both cover, or None where they share no index. Both have as many axes."""
    lo = tuple(map(max, a[0], b[0]))
    size = tuple(min(x + n, y + m) - first for x, n, y, m, first in zip(a[0], a[1], b[0], b[1], lo, strict=True))
    return (lo, size) if all(n > 0 for n in size) else None


def unit_slices(size: Index) -> Iterator[Index]:
    """Every index of a box of that size, in row-major order."""
    if not size:
        yield ()
        return
    for i in range(size[0]):
        for rest in unit_slices(size[1:]):
            yield (i, *rest)
