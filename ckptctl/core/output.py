"""Output files as ordered segments, each of a size known before the first byte is written. Nothing here writes.

A file is its segments back to back. A Region's bytes come from source tensors, by the planner; a Late's depend on
checksums of regions of the same file, so every offset is known beforehand and extents can be written in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Key, Part


@dataclass(frozen=True, slots=True)
class Put:
    """Bytes known now: headers, pickles, JSON."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Fill:
    """A pattern repeated: padding that the target wants. why is what the report says."""

    nbytes: int
    value: bytes
    why: str


@dataclass(frozen=True, slots=True)
class Region:
    """A dense, row-major box of one native tensor: all of it, a shard, or a run of its flattened elements.

    view is a row-major factorisation of the native tensor's shape; lo and size are the box in it. The region's bytes
    are the box's elements in row-major order, packed, in dtype. parts say how the native tensor is made of hub tensors;
    empty: the native tensor is the hub tensor key, in the same order. crc asks the executor for the CRC-32 of the
    region's bytes.
    """

    key: Key
    dtype: DType
    view: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    crc: bool = False

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.nbytes(self.size)


@dataclass(frozen=True, slots=True)
class Late:
    """nbytes whose content is made once the CRC-32 of each segment in needs (indices into the file's) is known.

    make gets those checksums in the order of needs and returns exactly nbytes.
    """

    nbytes: int
    needs: tuple[int, ...]
    make: Callable[[Sequence[int]], bytes]


Segment = Put | Fill | Region | Late


@dataclass(frozen=True)
class OutputFile:
    """One file of the result. path is relative to the output folder ("" where the output is this one file)."""

    path: str
    make: Callable[[], Sequence[Segment]]
    """The segments, made on demand: a pure function of the plan. nbytes and starts are computed from it once."""

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in file order."""
        return tuple(self.make())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first byte of each segment, and after them the file's size."""
        at = [0]
        for segment in self.segments:
            at.append(at[-1] + segment.nbytes)
        return tuple(at)

    @property
    def nbytes(self) -> int:
        """The file's size."""
        return self.starts[-1]
