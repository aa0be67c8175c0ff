"""How FSDP2 cuts tensors over a mesh (dp, tp), whose rank is dp_rank * tp + tp_rank. Pure integers.

Source: torch 2.13.0, distributed/tensor/placement_types.py, Shard and _StridedShard;
distributed/tensor/_utils.py, _compute_local_shape_and_global_offset; distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Box(NamedTuple):
    """Elements lo <= i < lo + size, axis by axis."""

    lo: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh of data-parallel and tensor-parallel ranks."""

    dp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """How many processes."""
        return self.dp * self.tp

    def __str__(self) -> str:
        if self.tp > 1:
            return f"{self.ranks} ranks, a mesh of {self.dp} (data parallel) x {self.tp} (tensor parallel)"
        return "one rank" if self.dp == 1 else f"{self.dp} ranks"


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Rows [start, stop) of axis 0 that a rank has: parts of ceil(rows / ranks), late ones short or empty."""
    part = -(-rows // ranks)
    return min(rows, rank * part), min(rows, (rank + 1) * part)


def box_of(shape: tuple[int, ...], mesh: Mesh, rank: int, axis: int | None, holder: int = 0) -> Box | None:
    """What a rank writes of a tensor that FSDP2 cuts on axis 0, and tensor parallelism on axis (None: not at all).

    Where tensor parallelism cuts axis 0 too, it cuts first, and each of its parts is cut over dp (_StridedShard). A
    tensor that it does not cut is the same on the tp ranks: the one with number holder writes it, the others get None.
    A rank without elements has a box of size 0 that starts at the tensor's end, as FSDP2 writes it.
    """
    d, t = divmod(rank, mesh.tp)
    if axis is None:
        if t != holder % mesh.tp:
            return None
        start, stop = rows_of(shape[0], d, mesh.dp)
        return Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
    if axis == 0:
        first, last = rows_of(shape[0], t, mesh.tp)
        start, stop = rows_of(last - first, d, mesh.dp)
        lo = first + start if stop > start else shape[0]
        return Box((lo, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
    start, stop = rows_of(shape[0], d, mesh.dp)
    left, right = rows_of(shape[axis], t, mesh.tp)
    lo_, size = [0] * len(shape), list(shape)
    lo_[0], size[0], lo_[axis], size[axis] = start, stop - start, left, right - left
    return Box(tuple(lo_), tuple(size))
