"""Checksums of segments and files, joined from those of extents in any order, and the bytes that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.checksum import combine, crc32, crc_of_repeated
from ckptctl.core.output import Late, OutputFile, Region
from ckptctl.execute.journal import Done
from ckptctl.plan.planner import Plan, extents_of, segments_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptctl.plan.steps import Extent


class FileChecks:
    """What is known of one output file so far: which extents are written, and their checksums."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.file: OutputFile = plan.files[number]
        self.number = number
        self.waiting = sum(1 for _ in extents_of(number, self.file, plan.extent_nbytes))
        lates = [s for s in self.file.segments if isinstance(s, Late)]
        self.needed = {i for late in lates for i in late.needs}
        self.needed |= {i for i, s in enumerate(self.file.segments) if isinstance(s, Region) and s.crc}
        self._done: dict[Extent, Done] = {}

    def needs(self, extent: Extent) -> bool:
        """Whether a checksum of some bytes of the extent is needed."""
        return bool(self.needed) and any(
            i in self.needed for i, _, _ in segments_in(self.file, extent.start, extent.stop)
        )

    @property
    def written(self) -> Iterator[Extent]:
        """The extents that are written."""
        return iter(self._done)

    def add(self, extent: Extent, done: Done) -> bool:
        """A written extent. True where it was the file's last."""
        self._done[extent] = done
        self.waiting -= 1
        return self.waiting == 0

    def crcs(self) -> dict[int, int]:
        """The CRC-32 of each needed segment; all extents are written."""
        out = dict.fromkeys(self.needed, 0)
        for extent in sorted(self._done):
            for segment, crc, nbytes in self._done[extent].segments:
                out[segment] = combine(out[segment], crc, nbytes)
        return out

    def lates(self) -> Iterator[tuple[int, bytes]]:
        """(start, bytes) of each segment that comes late; all extents are written.

        ValueError where it is not as long as it said.
        """
        crcs: dict[int, int] | None = None
        for i, segment in enumerate(self.file.segments):
            if isinstance(segment, Late):
                crcs = self.crcs() if crcs is None else crcs
                data = segment.make([crcs[n] for n in segment.needs])
                if len(data) != segment.nbytes:
                    raise ValueError(f"segment {i} of {self.file.path} is {len(data)} bytes, not {segment.nbytes}")
                yield self.file.starts[i], data

    def crc(self, lates: Sequence[tuple[int, bytes]]) -> int | None:
        """The CRC-32 of the whole file, late bytes put in; None where some extent has none."""
        total = 0
        for extent in sorted(self._done):
            crc = self._done[extent].crc
            if crc is None:
                return None
            total = combine(total, crc, extent.stop - extent.start)
        # A CRC is linear: what late bytes change is the checksum of the change, moved to its place.
        for start, data in lates:
            change = crc32(data) ^ crc_of_repeated(b"\0", len(data))
            total ^= combine(change, 0, self.file.nbytes - start - len(data))
        return total


class ExtentChecks:
    """The checksums of one extent, fed with its bytes from first to last."""

    def __init__(self, checks: FileChecks) -> None:
        self._checks = checks
        self._parts: list[tuple[int, int, int]] = []

    def feed(self, start: int, data: memoryview) -> None:
        """The file's bytes from start on."""
        for number, low, high in segments_in(self._checks.file, start, start + len(data)):
            view = data[low - start : high - start]
            if self._parts and self._parts[-1][0] == number:
                _, crc, nbytes = self._parts[-1]
                self._parts[-1] = (number, crc32(view, crc), nbytes + len(view))
            else:
                self._parts.append((number, crc32(view), len(view)))

    def done(self, whole: bool) -> Done:
        """What the journal is to know. whole: all bytes of the extent were fed."""
        total: int | None = None
        if whole:
            total = 0
            for _, crc, nbytes in self._parts:
                total = combine(total, crc, nbytes)
        return Done(tuple(p for p in self._parts if p[0] in self._checks.needed), total)


def extent_crc(checks: FileChecks, start: int, data: memoryview, value: int) -> int:
    """Value joined with the checksum of the file's bytes from start on, those that come late as 0.

    Data is changed so.
    """
    for number, low, high in segments_in(checks.file, start, start + len(data)):
        if isinstance(checks.file.segments[number], Late):
            data[low - start : high - start] = bytes(high - low)
    return crc32(data, value)
