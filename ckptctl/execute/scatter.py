"""From a window of a source into a buffer: strided boxes, as they are or cast, by NumPy.

No file is read here, no plan is known.

What makes it fast: runs of bytes are moved as the widest items they fit, and boxes whose fastest axes differ on both
sides (transposes) go in
tiles, as NumPy would else touch a cache line for every element.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.compose import joined
from ckptctl.execute.cast import carrier, convert

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.execute.memory import Bytes
    from ckptctl.plan.steps import Move

_LONG, _SHORT = 512, 16
"""Elements of a tile along the axis that is fastest in the source, and in the target.

Measured, with and without strides that are powers of
two, where square tiles are three times slower: their lines fall into the same places of the cache."""
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


def parts(move: Move, limit: int) -> Iterator[Move]:
    """A move as moves that each stretch over at most limit bytes of the source, without far gaps inside.

    In rising order of source.

    A gap is far where it is more than a page and more than 8 times what lies between gaps (so at most 9 times the
    needed bytes are
    read), or more than 64 KiB.
    """
    far, reach = _gaps(move)
    if (not far and reach <= limit) or all(n == 1 for n in move.size):
        yield move
        return
    axis = max(range(len(move.size)), key=lambda i: move.src_strides[i] if move.size[i] > 1 else -1)
    stride, n = move.src_strides[axis], move.size[axis]
    step = 1 if far else max(1, (limit - (reach - (n - 1) * stride)) // stride + 1)
    for first in range(0, n, step):
        size = (*move.size[:axis], min(step, n - first), *move.size[axis + 1 :])
        part = move._replace(src=move.src + first * stride, dst=move.dst + first * move.dst_strides[axis], size=size)
        yield from parts(_dropped(part, axis) if step == 1 else part, limit)


def _dropped(move: Move, axis: int) -> Move:
    """The move without an axis of one element."""
    size, src, dst = (v[:axis] + v[axis + 1 :] for v in (move.size, move.src_strides, move.dst_strides))
    return move._replace(size=size, src_strides=src, dst_strides=dst)


def _is_far(gap: int, between: int) -> bool:
    return gap > _FAR or gap > max(_PAGE, 8 * between)


def _gaps(move: Move) -> tuple[bool, int]:
    """Whether a move has far gaps, and over how many bytes of the source it stretches."""
    reach, far = move.item, False
    for stride, n in sorted(zip(move.src_strides, move.size, strict=True)):
        if n > 1 and stride:
            far = far or _is_far(stride - reach, reach)
            reach += (n - 1) * stride
    return far, reach
