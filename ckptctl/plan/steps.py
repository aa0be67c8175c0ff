"""What a plan is made of: extents of output files, and the steps that fill one. Plain data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptctl.core.view import Index


class Extent(NamedTuple):
    """Bytes [start, stop) of output file number file: the unit of work, of writing and of the journal."""

    file: int
    start: int
    stop: int


class Cast(NamedTuple):
    """Elements change type, rounding to nearest, ties to even; NaN stays NaN. Names are those of core.dtype."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"cast {self.source} -> {self.target}"


class Move(NamedTuple):
    """A box of elements from a source to the output file: bits as they are, or by the named rule.

    dst is the byte in the output file, src the byte in source (an index into the plan's sources). size, src_strides and
    dst_strides are by axis, strides in bytes; () is one element. item and dst_item are bytes of an element on either
    side.
    """

    dst: int
    source: int
    src: int
    size: Index
    src_strides: Index
    dst_strides: Index
    item: int
    dst_item: int
    rule: Cast | None = None

    @property
    def numel(self) -> int:
        """Elements moved."""
        return math.prod(self.size)

    @property
    def is_run(self) -> bool:
        """Whether it is one contiguous run of bytes on both sides, moved as they are."""
        if self.rule is not None:
            return False
        return not self.size or (len(self.size) == 1 and self.src_strides[0] == self.item == self.dst_strides[0])


class Write(NamedTuple):
    """Known bytes at dst."""

    dst: int
    data: bytes


class Repeat(NamedTuple):
    """nbytes of a repeated pattern at dst; phase is where in the pattern it begins."""

    dst: int
    nbytes: int
    pattern: bytes
    phase: int = 0


class After(NamedTuple):
    """nbytes at dst that segment number segment of the file makes once checksums are known."""

    dst: int
    nbytes: int
    segment: int


class Term(NamedTuple):
    """What one product adds to a box: moves that bring rows of its left factor and columns of its right one.

    Both packed from byte 0 on, (rows, rank) and (rank, columns); scale is multiplied to their product.
    """

    left: tuple[Move, ...]
    left_dtype: str
    right: tuple[Move, ...]
    right_dtype: str
    rank: int
    scale: float


class Merge(NamedTuple):
    """A box of (rows, columns) elements at dst, computed: base + the terms, in float64, rounded once to dtype.

    base are moves that bring the base's box packed from byte 0 on. dst_strides are bytes, by row and by column.
    """

    dst: int
    rows: int
    columns: int
    dst_strides: tuple[int, int]
    dst_item: int
    base: tuple[Move, ...]
    base_dtype: str
    dtype: str
    terms: tuple[Term, ...] = ()

    @property
    def numel(self) -> int:
        """Elements made."""
        return self.rows * self.columns

    @property
    def moves(self) -> tuple[Move, ...]:
        """All that is read."""
        return (*self.base, *(m for t in self.terms for m in (*t.left, *t.right)))


Step = Move | Write | Repeat | After | Merge


def step_nbytes(step: Step) -> int:
    """Bytes of the output file that a step fills."""
    if isinstance(step, (Move, Merge)):
        return step.numel * step.dst_item
    return len(step.data) if isinstance(step, Write) else step.nbytes
