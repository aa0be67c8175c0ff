"""Hypothesis strategies for the geometry: views, boxes, pieces, parts, and ways to cut an axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from ckptctl.core.tensor import Key, Part, Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMELS = (1, 2, 6, 7, 12, 13, 24, 30, 36, 60, 64)
"""Counts of elements with many, few and no factors."""


@st.composite
def views(draw: st.DrawFn, numel: int) -> tuple[int, ...]:
    """A row-major factorisation of numel, axes of size 1 among them; () is one of 1."""
    out: list[int] = []
    rest = numel
    for _ in range(draw(st.integers(0, 4))):
        n = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        out.append(n)
        rest //= n
    if rest > 1:
        out.insert(draw(st.integers(0, len(out))), rest)
    return tuple(out)


@st.composite
def boxes(draw: st.DrawFn, view: Sequence[int], *, least: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """lo and size of a box of a view; at least least long on every axis."""
    size = tuple(draw(st.integers(least, n)) for n in view)
    return tuple(draw(st.integers(0, n - k)) for n, k in zip(view, size, strict=True)), size


@st.composite
def pieces(draw: st.DrawFn, numel: int, *, item: int = 1, least: int = 1) -> Piece:
    """A box of some view, its axes laid down in any order, with room between steps."""
    view = draw(views(numel))
    lo, size = draw(boxes(view, least=least))
    step, strides = item, [0] * len(view)
    for axis in draw(st.permutations(range(len(view)))):
        strides[axis] = step
        step = step * size[axis] + draw(st.sampled_from([0, 0, 0, item, 3]))
    return Piece(view, lo, size, draw(st.integers(0, 5)), draw(st.integers(0, 1000)), tuple(strides))


@st.composite
def parts(draw: st.DrawFn, numel: int) -> Part:
    """A box of some view of a native tensor, as a box of a hub tensor with its axes in any order."""
    view = draw(views(numel))
    lo, size = draw(boxes(view))
    axes = tuple(draw(st.permutations(range(len(view)))))
    hub_lo, hub_view = [0] * len(view), [0] * len(view)
    for axis, to in enumerate(axes):
        hub_lo[to] = draw(st.integers(0, 2))
        hub_view[to] = hub_lo[to] + size[axis] + draw(st.integers(0, 2))
    return Part(Key("hub"), view, lo, size, tuple(hub_view), tuple(hub_lo), axes)


@st.composite
def cuts(draw: st.DrawFn, size: int, *, most: int = 5) -> list[tuple[int, int]]:
    """[0, size) as up to most intervals, empty ones among them; also more of them than there are places."""
    inner = sorted(draw(st.lists(st.integers(0, size), max_size=most - 1)))
    return list(zip([0, *inner], [*inner, size], strict=True))


def even(size: int, ranks: int) -> list[tuple[int, int]]:
    """[0, size) in slots of ceil(size / ranks): late ones may be empty."""
    slot = -(-size // ranks)
    return [(min(size, r * slot), min(size, (r + 1) * slot)) for r in range(ranks)]


def numel_of(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
