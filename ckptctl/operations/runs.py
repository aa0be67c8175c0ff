"""Tensors that lie in long runs of bytes: which elements each run holds. Pure numbers; `tensors` reads them.

What a planner would make of such a tensor is known beforehand, so that values can be read into one small buffer again
and again, as fast as the page cache gives them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.tensor import InOnePlace, dense_strides

if TYPE_CHECKING:
    from ckptctl.core.tensor import Piece, Tensor

_MOST = 1 << 14
_SHORT_NBYTES = 1 << 16
"""Runs that are shorter on average are left to the planner, which reads windows of them."""
_FEW = 64


class Run(NamedTuple):
    """Elements [first, first + numel) of the flattened tensor, at byte start of a source.

    first is -1 where they are elements of a box that is no run of the flattened tensor: all there, in another order.
    """

    first: int
    numel: int
    source: int
    start: int


def runs_of(tensor: Tensor) -> tuple[Run, ...] | None:
    """The runs that hold a tensor, by rising first element; None where it lies otherwise, or in many short ones."""
    if tensor.made is not None or tensor.cast_from is not None or tensor.why_unsupported:
        return None
    item = tensor.dtype.itemsize
    if isinstance(tensor.pieces, InOnePlace):
        return (Run(0, tensor.numel, tensor.pieces.source, tensor.pieces.start),) if tensor.numel else ()
    out: list[Run] = []
    for table in tensor.pieces:
        if len(table) + len(out) > _MOST:
            return None
        for piece in table:
            if piece.numel:
                if piece.strides != dense_strides(piece.size, item):
                    return None
                out.append(Run(_first(piece), piece.numel, piece.source, piece.start))
        if len(out) > _FEW and sum(r.numel for r in out) * item < _SHORT_NBYTES * len(out):
            return None
    return tuple(sorted(out))


def in_order(runs: tuple[Run, ...] | None, numel: int) -> bool:
    """Whether runs give the flattened tensor from its first element to its last."""
    at = 0
    for run in runs or ():
        if run.first != at:
            return False
        at += run.numel
    return runs is not None and at == numel


def _first(piece: Piece) -> int:
    """The number of a box's first element in the flattened tensor; -1 where the box is no run of it."""
    axis = next((i for i, n in enumerate(piece.size) if n != 1), len(piece.size))
    if piece.size[axis + 1 :] != piece.view[axis + 1 :]:
        return -1
    return sum(lo * math.prod(piece.view[i + 1 :]) for i, lo in enumerate(piece.lo))
