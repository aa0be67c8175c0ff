"""The planner: extents of output files, and the steps of one extent. Pure; copies are never all held at once.

    plan = Plan(files, index)
    for extent in plan.extents(): for step in plan.extent(extent): ...

`Plan.extent` finds an extent's segments and source pieces by bisection and returns steps in rising order of
destination. It checks by count that they fill the extent exactly; that source pieces tile their tensors, so that none
is written twice, is `plan.check`'s part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from ckptctl.core.compose import compose
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.output import Fill, Late, OutputFile, Put, Region
from ckptctl.core.tensor import Key, Piece, dense_strides
from ckptctl.core.view import Box, run_boxes
from ckptctl.plan.merging import merges
from ckptctl.plan.steps import After, Cast, Extent, Merge, Move, Repeat, Step, Write, step_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.plan.index import SourceIndex

EXTENT_NBYTES = 64 << 20
"""The largest extent, in bytes."""


@dataclass(frozen=True)
class Plan:
    """A whole job as data: what is to be written, and where its bytes come from.

    casts lists the pairs (source dtype, target dtype) of names that were asked for; a region whose dtype differs from
    its source's without being listed is refused: a copy never casts.
    """

    files: tuple[OutputFile, ...]
    index: SourceIndex
    casts: frozenset[Cast] = frozenset()
    extent_nbytes: int = EXTENT_NBYTES

    def extents(self) -> Iterator[Extent]:
        """Every extent of every file, in file order. Files without bytes have none."""
        for number, file in enumerate(self.files):
            yield from extents_of(number, file, self.extent_nbytes)

    def extent(self, extent: Extent) -> list[Step]:
        """The steps that fill an extent, in rising order of destination.

        Damaged where the source's pieces leave a hole or overlap there (the count of bytes differs).
        """
        file = self.files[extent.file]
        steps: list[Step] = []
        number = bisect_right(file.starts, extent.start) - 1
        while number < len(file.segments) and file.starts[number] < extent.stop:
            first = file.starts[number]
            start, stop = max(extent.start, first), min(extent.stop, file.starts[number + 1])
            if start < stop:
                steps += self._segment(file, number, start, stop)
            number += 1
        return steps

    def _segment(self, file: OutputFile, number: int, start: int, stop: int) -> list[Step]:
        segment, first = file.segments[number], file.starts[number]
        match segment:
            case Put(data):
                return [Write(start, data[start - first : stop - first])]
            case Fill():
                return [Repeat(start, stop - start, segment.value, (start - first) % len(segment.value))]
            case Late():
                return [After(start, stop - start, number)]
            case Region():
                return list(self.region(segment, first, start, stop))

    def region(self, region: Region, first: int, start: int, stop: int) -> list[Move | Merge]:
        """The moves for bytes [start, stop) of a region that begins at byte first of its file."""
        item = region.dtype.itemsize
        moves: list[Move | Merge] = []
        for wanted in _wanted(region, first, start, stop, item):
            if not region.parts:
                moves += self._moves(region.key, region.dtype, wanted)
                continue
            for part in region.parts:
                for piece in compose(part, wanted):
                    moves += self._moves(part.hub, region.dtype, piece)
        moves.sort(key=itemgetter(slice(0, 4)))
        done = sum(step_nbytes(m) for m in moves)
        if done != stop - start:
            word = "no piece holds some of its elements" if done < stop - start else "two pieces hold the same elements"
            raise Damaged(
                f"{region.key.name} ({region.key.kind}) is not whole: {word}",
                where=f"bytes {start} to {stop} of the result",
                why=f"{done} bytes of {stop - start} are in the source",
                fix="copy the missing files of the checkpoint, or use `ckptctl ls`, which needs no values",
                code="tensor-incomplete",
            )
        return moves

    def _moves(self, key: Key, dtype: DType, wanted: Piece) -> Iterator[Move | Merge]:
        tensor = self.index.tensors.get(key)
        if tensor is None:
            raise Damaged(
                f"the plan names {key.name} ({key.kind}), which the source does not hold", code="tensor-missing"
            )
        rule = None
        if tensor.held.name != dtype.name:
            rule = Cast(tensor.held.name, dtype.name)
            if rule not in self.casts:
                raise Unsupported(
                    f"{key.name} is {tensor.held.name} in the source and {dtype.name} in the target, "
                    "and no cast was asked for"
                )
        if tensor.made is not None:
            yield from merges(self.index, tensor, dtype, wanted)
            return
        item, own = dtype.itemsize, tensor.held.itemsize
        yield from self.index.moves(key, wanted, item, own, rule)


def _wanted(region: Region, first: int, start: int, stop: int, item: int) -> Iterator[Piece]:
    """Bytes [start, stop) of a region as boxes of its native view; start and strides of each are bytes of the file."""
    if (start - first) % item or (stop - first) % item:
        raise ValueError(f"bytes {start} to {stop} cut an element of {region.key.name}")
    boxes: list[Box] = run_boxes((start - first) // item, (stop - first) // item, region.size)
    at = start
    for lo, size in boxes:
        yield Piece(
            region.view, tuple(map(sum, zip(region.lo, lo, strict=True))), size, -1, at, dense_strides(size, item)
        )
        at += math.prod(size) * item


def extents_of(number: int, file: OutputFile, largest: int) -> Iterator[Extent]:
    """The extents of one file: as large as allowed, never through an element, nor through bytes that are made late."""
    start, size = 0, file.nbytes
    while start < size:
        stop = min(start + largest, size)
        if stop < size:
            stop = _cut(file, start, stop)
        yield Extent(number, start, stop)
        start = stop


def _cut(file: OutputFile, start: int, stop: int) -> int:
    """The last place at or before stop (but after start) where a file may be cut; after it where there is no other."""
    at = bisect_right(file.starts, stop) - 1
    segment, first = file.segments[at], file.starts[at]
    if isinstance(segment, Late):
        return first if first > start else file.starts[at + 1]
    if isinstance(segment, Region) and segment.dtype.bits % 8 == 0:
        cut = stop - (stop - first) % segment.dtype.itemsize
        return cut if cut > start else cut + segment.dtype.itemsize
    return stop


def segments_in(file: OutputFile, start: int, stop: int) -> Sequence[tuple[int, int, int]]:
    """(segment, start, stop) of the segments that share bytes with [start, stop), cut to it."""
    out = []
    number = bisect_right(file.starts, start) - 1
    while number < len(file.segments) and file.starts[number] < stop:
        low, high = max(start, file.starts[number]), min(stop, file.starts[number + 1])
        if low < high:
            out.append((number, low, high))
        number += 1
    return out
