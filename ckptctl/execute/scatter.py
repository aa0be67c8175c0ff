"""From a window of a source into a buffer: strided boxes, as they are or cast, by NumPy.

No file is read here, no plan is known.

What makes it fast: runs of bytes are moved as the widest items they fit, and boxes whose fastest axes differ on both
sides (transposes) go in tiles, as NumPy would else touch a cache line for every element.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.compose import joined
from ckptctl.execute.cast import carrier, convert

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptctl.execute.memory import Bytes
    from ckptctl.plan.steps import Move

_LONG, _SHORT = 512, 16
"""Elements of a tile along the axis that is fastest in the source, and in the target.

Measured, with and without strides that are powers of two; with those, square tiles are three times slower, as their
lines fall into the same places of the cache.
"""
_PAGE = 4096
_FAR = 64 << 10
"""Gaps beyond this are never read along."""


def place(move: Move, window: Bytes, window_start: int, out: Bytes, out_start: int) -> None:
    """Move a box from window (whose first byte is the source's byte window_start) into out (the file's byte out_start).

    ValueError where it leaves either: a plan that was checked has no such move.
    """
    if move.rule is not None:
        size, src, dst = move.size or (1,), move.src_strides or (0,), move.dst_strides or (0,)
        types = carrier(move.rule.source), carrier(move.rule.target)
    else:
        size, src, dst, unit = _widened(move)
        types = unit, unit
    a = np.ndarray(size, types[0], window, move.src - window_start, src)
    b = np.ndarray(size, types[1], out, move.dst - out_start, dst)
    for index in _tiles(size, src, dst):
        if move.rule is None:
            b[index] = a[index]
        else:
            convert(b[index], a[index], move.rule)


def _widened(move: Move) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], np.dtype[Any]]:
    """Size, strides and item of a move of bits: a run on both sides becomes one wide item, or an axis of bytes."""
    size, src, dst = joined(move.size, move.src_strides, move.dst_strides)
    inner = next((i for i in range(len(size)) if src[i] == dst[i] == move.item), None)
    run = move.item
    if inner is not None:
        run *= size[inner]
        size, src, dst = (v[:inner] + v[inner + 1 :] for v in (size, src, dst))
    if run > 64 or not size:
        return (*size, run), (*src, 1), (*dst, 1), np.dtype("u1")
    return size, src, dst, np.dtype(f"u{run}" if run in (1, 2, 4, 8) else f"V{run}")


def _tiles(size: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The box as one, or as tiles where its fastest axes on the two sides differ and both are long."""
    axes = [i for i in range(len(size)) if size[i] > 1]
    everything = (slice(None),) * len(size)
    if len(axes) < 2:
        yield everything
        return
    a = min(axes, key=lambda i: abs(src[i]) or 1 << 62)
    b = min(axes, key=lambda i: abs(dst[i]) or 1 << 62)
    if a == b or min(size[a], size[b]) < 8:
        yield everything
        return
    for i, j in product(range(0, size[a], _LONG), range(0, size[b], _SHORT)):
        index = list(everything)
        index[a], index[b] = slice(i, i + _LONG), slice(j, j + _SHORT)
        yield tuple(index)


def stretch(move: Move) -> int:
    """Bytes from a move's first source byte to one past its last."""
    return sum((n - 1) * s for n, s in zip(move.size, move.src_strides, strict=True)) + move.item


def parts(move: Move, limit: int) -> Iterator[Move]:
    """A move as moves that stretch over at most limit bytes of the source (or are one element), in rising order."""
    reach = stretch(move)
    if reach <= limit or all(n == 1 for n in move.size):
        yield move
        return
    axis = max(range(len(move.size)), key=lambda i: move.src_strides[i] if move.size[i] > 1 else -1)
    stride, n = move.src_strides[axis], move.size[axis]
    step = max(1, (limit - (reach - (n - 1) * stride)) // stride + 1)
    for part in _sliced(move, axis, step):
        if step == 1:
            yield from parts(part, limit)
        else:
            yield part


def _sliced(move: Move, axis: int, step: int) -> Iterator[Move]:
    """The move in slices of step indices of one axis."""
    for first in range(0, move.size[axis], step):
        n = min(step, move.size[axis] - first)
        yield move._replace(
            src=move.src + first * move.src_strides[axis],
            dst=move.dst + first * move.dst_strides[axis],
            size=(*move.size[:axis], n, *move.size[axis + 1 :]),
        )


def far_axes(move: Move) -> tuple[tuple[int, ...], int]:
    """The axes whose steps leave far gaps in the source, longest first; and over how many bytes the others stretch.

    A gap is far where it is more than a page and more than 8 times what lies before it, or more than 64 KiB.
    """
    order = sorted((i for i, n in enumerate(move.size) if n > 1), key=lambda i: move.src_strides[i])
    reach = move.item
    for at, i in enumerate(order):
        gap = move.src_strides[i] - reach
        if gap > _FAR or gap > max(_PAGE, 8 * reach):
            return tuple(reversed(order[at:])), reach
        reach += (move.size[i] - 1) * move.src_strides[i]
    return (), reach


def blocks(move: Move, axes: Sequence[int], most: int) -> Iterator[Move]:
    """A move as moves that have at most that many indices on the axes together."""
    if math.prod(move.size[i] for i in axes) <= most:
        yield move
        return
    first, *rest = axes
    step = max(1, most // math.prod(move.size[i] for i in rest))
    for part in _sliced(move, first, step):
        yield from blocks(part, rest, most) if step == 1 else (part,)
