"""Steps that make elements of a merged tensor: boxes of it, cut so that few bytes are held for each. Pure.

How a box is cut has no influence on its values: each element is a sum over the rank, in order, whatever is beside it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported
from ckptctl.core.tensor import Piece, dense_strides
from ckptctl.core.view import run_boxes, run_of
from ckptctl.plan.steps import Merge, Term

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Product, Tensor
    from ckptctl.core.view import Box, Index
    from ckptctl.plan.index import SourceIndex
    from ckptctl.plan.steps import Move

BOX_NUMEL = 1 << 18
"""Elements of one step at most."""
FACTOR_NUMEL = 1 << 17
"""Elements of each factor for one step at most, where a row or a column of it has no more."""


def merges(index: SourceIndex, tensor: Tensor, dtype: DType, wanted: Piece) -> Iterator[Merge]:
    """The steps that make one wanted piece of a merged tensor, in rising order of destination where it is packed.

    Unsupported where the target wants the tensor in another order than its own (a change of naming that splits it).
    """
    made = tensor.made
    assert made is not None
    if math.prod(wanted.size) == 0:
        return
    item = dtype.itemsize
    for (lo, size), start, strides in _boxes(tensor, wanted, item):
        rank = max((p.rank for p in made.products), default=1)
        columns = size[-1] if size else 1
        wide = max(1, min(columns, FACTOR_NUMEL // rank, BOX_NUMEL))
        rows = math.prod(size) // columns if columns else 0
        high = max(1, min(rows, FACTOR_NUMEL // rank, BOX_NUMEL // wide))
        if len(size) != 2:
            # Not a matrix: there is no product, only its own elements, which change type.
            yield Merge(start, math.prod(size), 1, (item, item), item, *_stored(index, made.base, lo, size), dtype.name)
            continue
        for i in range(0, rows, high):
            for j in range(0, columns, wide):
                n, m = min(high, rows - i), min(wide, columns - j)
                at = (lo[0] + i, lo[1] + j)
                terms = tuple(_term(index, p, at, (n, m)) for p in made.products)
                dst = start + i * strides[0] + j * strides[1]
                base = _stored(index, made.base, at, (n, m))
                yield Merge(dst, n, m, (strides[0], strides[1]), item, *base, dtype.name, terms)


def _boxes(tensor: Tensor, wanted: Piece, item: int) -> Iterator[tuple[Box, int, Index]]:
    """The wanted piece as boxes of the tensor's own shape: lo and size, first byte, byte strides of the target."""
    packed = wanted.strides == dense_strides(wanted.size, item)
    run = run_of(wanted.view, wanted.lo, wanted.size) if packed else None
    if wanted.view == tensor.shape and (len(tensor.shape) == 2 or packed):
        whole: list[tuple[Index, Index]] = [(wanted.lo, wanted.size)]
        strides = [wanted.strides]
    elif run is not None:
        whole = list(run_boxes(run[0], run[0] + run[1], tensor.shape))
        strides = [dense_strides(size, item) for _, size in whole]
    else:
        raise Unsupported(
            f"{tensor.key.name} is merged with an adapter and taken apart for the target at once",
            why=f"its shape is {tensor.shape}, the target wants parts of {wanted.view}",
            fix="merge first (--to hf), then convert the result",
            code="merge-and-split",
        )
    at = wanted.start
    for (lo, size), own in zip(whole, strides, strict=True):
        for part_lo, part_size, first in _limited(lo, size, own):
            yield (part_lo, part_size), at + first, own
        at += math.prod(size) * item


def _limited(lo: Index, size: Index, strides: Index) -> Iterator[tuple[Index, Index, int]]:
    """Boxes of a tensor that is no matrix cut along its first axis, so that a step stays small."""
    inner = math.prod(size[1:])
    if len(size) == 2 or not size or math.prod(size) <= BOX_NUMEL:
        yield lo, size, 0
        return
    step = max(1, BOX_NUMEL // max(1, inner))
    for i in range(0, size[0], step):
        yield (lo[0] + i, *lo[1:]), (min(step, size[0] - i), *size[1:]), i * strides[0]


def _stored(index: SourceIndex, tensor: Tensor, lo: Index, size: Index) -> tuple[tuple[Move, ...], str]:
    """The moves that bring a box of a stored tensor, packed from byte 0 on, and its type."""
    item = tensor.dtype.itemsize
    wanted = Piece(tensor.shape, lo, size, -1, 0, dense_strides(size, item))
    return tuple(index.moves(tensor.key, wanted, item, item)), tensor.dtype.name


def _term(index: SourceIndex, product: Product, at: Index, size: Index) -> Term:
    """What one product needs for a box: rows of the left factor, columns of the right one, packed as such."""
    left = _factor(index, product.left, product.left_turned, (at[0], 0), (size[0], product.rank))
    right = _factor(index, product.right, product.right_turned, (0, at[1]), (product.rank, size[1]))
    return Term(*left, *right, product.rank, product.scale)


def _factor(index: SourceIndex, tensor: Tensor, turned: bool, lo: Index, size: Index) -> tuple[tuple[Move, ...], str]:
    item = tensor.dtype.itemsize
    strides = dense_strides(size, item)
    if turned:
        lo, size, strides = lo[::-1], size[::-1], strides[::-1]
    wanted = Piece(tensor.shape, lo, size, -1, 0, strides)
    return tuple(index.moves(tensor.key, wanted, item, item)), tensor.dtype.name
