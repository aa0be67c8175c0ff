"""Making the elements of a merged tensor: base + scale * (left @ right), in float64, rounded once to the result's type.

Every element is made by the same operations in the same order: its products are summed over the rank from 0 on, then
scaled, then added to the base, adapter by adapter. No matrix library has a part in it, whose order of summing would
depend on the sizes of blocks, on threads and on the machine. So the result does not depend on how work is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged
from ckptctl.execute.cast import carrier, convert
from ckptctl.execute.gather import gather
from ckptctl.plan.merging import BOX_NUMEL, FACTOR_NUMEL
from ckptctl.plan.steps import Cast, Extent, Merge, step_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from ckptctl.execute.memory import Bytes
    from ckptctl.execute.sources import Sources
    from ckptctl.plan.steps import Move

    Wide = npt.NDArray[np.float64]

NEED_NBYTES = BOX_NUMEL * 3 * 8 + FACTOR_NUMEL * 4 * 8
"""What one step holds beside windows, in bytes, at most: base, sum and product, and the factors as read and widened."""
_TILE_NUMEL = 1 << 15
"""Elements that are summed at a time: what a core's cache holds."""


def merge(
    sources: Sources, step: Merge, into: Bytes, start: int, window_nbytes: int, check: Callable[[], None]
) -> None:
    """Do a step: its bytes of the result lie in `into`, whose first byte is the output file's byte `start`."""
    made = _read(sources, step.base, step.base_dtype, (step.rows, step.columns), window_nbytes, check)
    for term in step.terms:
        left = _read(sources, term.left, term.left_dtype, (step.rows, term.rank), window_nbytes, check)
        right = _read(sources, term.right, term.right_dtype, (term.rank, step.columns), window_nbytes, check)
        add_product(made, left, right, term.scale)
    size = (step.rows, step.columns)
    out = np.ndarray(size, carrier(step.dtype), into.data, step.dst - start, step.dst_strides)
    convert(out, made, Cast("float64", step.dtype))


def add_product(made: Wide, left: Wide, right: Wide, scale: float) -> None:
    """Add scale * (left @ right) to made, (rows, columns); left is (rows, rank), right (rank, columns)."""
    rows, columns = made.shape
    high = max(1, _TILE_NUMEL // max(1, columns))
    total, product = np.empty((high, columns)), np.empty((high, columns))
    # Infinities and NaN of the factors are what the adapter means; they go into the result as they come.
    with np.errstate(all="ignore"):
        for i in range(0, rows, high):
            some = left[i : i + high]
            out, one = total[: len(some)], product[: len(some)]
            np.multiply(some[:, :1], right[0], out=out)
            for k in range(1, len(right)):
                np.multiply(some[:, k : k + 1], right[k], out=one)
                out += one
            out *= scale
            made[i : i + high] += out


def _read(
    sources: Sources,
    moves: Sequence[Move],
    dtype: str,
    size: tuple[int, int],
    window_nbytes: int,
    check: Callable[[], None],
) -> Wide:
    """A packed box of a stored tensor, widened: exact for every type that a merge takes."""
    stored = carrier(dtype)
    nbytes = size[0] * size[1] * stored.itemsize
    if sum(map(step_nbytes, moves)) != nbytes:
        raise Damaged("a tensor of the merge is not whole", code="tensor-incomplete", fix="copy its files again")
    (filled,) = gather(sources, [(Extent(0, 0, nbytes), moves)], window_nbytes, check)
    out = np.empty(size)
    convert(out, filled.data.view(stored).reshape(size), Cast(dtype, "float64"))
    return out
