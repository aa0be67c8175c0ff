"""torch.save's zip archive as output segments, byte for byte as torch 2.13 lays it out. No pickle is made here.

Every offset follows from names and sizes; checksums come later (Late segments), so an archive streams, and its
extents can be written in any order. Source: torch 2.13.0, caffe2/serialize/inline_container.cc (getPadding,
writeRecord) and third_party/miniz (mz_zip_writer_add_mem_ex_v2, mz_zip_writer_finalize_archive); zip64 checked on an
archive of 4 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.checksum import combine, crc32, crc_of_repeated
from ckptctl.core.output import Fill, Late, Put, Region, Segment
from ckptctl.formats.zipformat import (
    CENTRAL,
    CENTRAL_HEADER,
    DESCRIPTOR,
    END,
    END64,
    END64_RECORD,
    END_RECORD,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_HEADER,
    LOCATOR,
    LOCATOR64,
    STREAMED,
    UTF8,
    ZIP64_ID,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 64
"""Payloads start at multiples of it, counted from the archive's first byte."""
_MADE_BY, _NEEDED64 = 0x031E, 0x2D

Payload = Put | Region | Fill
"""One run of a record's bytes."""


@dataclass(frozen=True, slots=True)
class _Row:
    """What the directory says of one record. Its checksum is joined from those of its runs."""

    name: bytes
    nbytes: int
    offset: int
    runs: tuple[tuple[int | None, int, int], ...]
    """(index of the segment, or None where the checksum is known; that checksum; bytes)"""

    @property
    def flags(self) -> int:
        return UTF8 | (STREAMED if self.nbytes else 0)

    @property
    def is_zip64(self) -> bool:
        return self.nbytes >= FULL32 or self.offset >= FULL32

    @property
    def needs(self) -> tuple[int, ...]:
        return tuple(index for index, _, _ in self.runs if index is not None)

    def crc(self, got: dict[int, int]) -> int:
        total = 0
        for index, known, nbytes in self.runs:
            total = combine(total, known if index is None else got[index], nbytes)
        return total

    def descriptor(self, got: dict[int, int]) -> bytes:
        wide = 8 if self.is_zip64 else 4
        sizes = self.nbytes.to_bytes(wide, "little")
        return DESCRIPTOR + self.crc(got).to_bytes(4, "little") + sizes + sizes if self.nbytes else b""

    def extra64(self, compressed: int) -> bytes:
        """The zip64 extra field, b"" where none is due. A local header has compressed 0, not yet known."""
        values = [self.nbytes, compressed] if self.nbytes >= FULL32 else []
        values += [self.offset] if self.offset >= FULL32 else []
        field = b"".join(v.to_bytes(8, "little") for v in values)
        return _u16(ZIP64_ID) + _u16(len(field)) + field if values else b""

    def local(self) -> bytes:
        head = LOCAL_HEADER.size + len(self.name) + len(extra64 := self.extra64(0)) + 4
        padding = -(self.offset + head) % ALIGNMENT
        extra = extra64 + b"FB" + _u16(padding) + b"Z" * padding
        return LOCAL_HEADER.pack(LOCAL, 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra)) + self.name + extra

    def central(self, got: dict[int, int]) -> bytes:
        size, extra = min(self.nbytes, FULL32), self.extra64(self.nbytes)
        row = CENTRAL_HEADER.pack(
            CENTRAL,
            0,
            0,
            self.flags,
            0,
            0,
            0,
            self.crc(got),
            size,
            size,
            len(self.name),
            len(extra),
            0,
            0,
            0,
            0,
            min(self.offset, FULL32),
        )
        return row + self.name + extra


def _u16(value: int) -> bytes:
    return value.to_bytes(2, "little")


def torch_zip(
    records: Sequence[tuple[str, Payload | Sequence[Payload]]], root: str, *, base_index: int = 0
) -> list[Segment]:
    """The segments of an archive whose records are root/name, in that order, each a payload or several back to back.

    base_index is the index that the first segment will have in its file: `Late.needs` count from there, so that
    several archives (the items of a .distcp) can follow each other. Offsets inside count from the archive's own
    start, which may be any byte. What torch wants of it: data.pkl, version and byteorder are there, storages are
    data/0, data/1, ... in order after byteorder.

    Raises ValueError for a name that stands twice, is empty or longer than 65535 bytes with its root.
    """
    out = _Segments(base_index)
    rows: list[_Row] = []
    seen: set[str] = set()
    for name, content in records:
        if name in seen or not name:
            raise ValueError(f"record {name!r} is empty or stands twice")
        seen.add(name)
        full = f"{root}/{name}".encode()
        if len(full) > FULL16:
            raise ValueError(f"record {name[:40]!r}... has a name of {len(full)} bytes")
        payload = [content] if isinstance(content, Put | Region | Fill) else list(content)
        row = _Row(full, sum(p.nbytes for p in payload), out.at, ())
        out.put(row.local())
        row = replace(row, runs=tuple(out.run(p) for p in payload if p.nbytes))
        out.late(row.needs, 0 if not row.nbytes else 24 if row.is_zip64 else 16, row.descriptor)
        rows.append(row)
    at = out.at
    size = sum(CENTRAL_HEADER.size + len(r.name) + len(r.extra64(r.nbytes)) for r in rows)
    out.late(tuple(i for r in rows for i in r.needs), size, lambda got: b"".join(r.central(got) for r in rows))
    count, end_at = len(rows), at + size
    out.put(END64_RECORD.pack(END64, END64_RECORD.size - 12, _MADE_BY, _NEEDED64, 0, 0, count, count, size, at))
    out.put(LOCATOR.pack(LOCATOR64, 0, end_at, 1))
    out.put(END_RECORD.pack(END, 0, 0, min(count, FULL16), min(count, FULL16), min(size, FULL32), min(at, FULL32), 0))
    return out.done()


class _Segments:
    """Segments in the making: known bytes next to each other become one Put."""

    def __init__(self, base_index: int) -> None:
        self.base, self.at = base_index, 0
        self.segments: list[Segment] = []
        self.pending: list[bytes] = []

    def put(self, data: bytes) -> None:
        self.pending.append(data)
        self.at += len(data)

    def add(self, segment: Segment) -> int:
        """Appends a segment and returns its index in the file."""
        self.flush()
        self.segments.append(segment)
        self.at += segment.nbytes
        return self.base + len(self.segments) - 1

    def run(self, payload: Payload) -> tuple[int | None, int, int]:
        """Appends a payload and says how its checksum is known: see _Row.runs."""
        if isinstance(payload, Put):
            self.put(payload.data)
            return None, crc32(payload.data), payload.nbytes
        if isinstance(payload, Fill):
            whole, rest = divmod(payload.nbytes, len(payload.value))
            self.add(payload)
            crc = combine(crc_of_repeated(payload.value, whole), crc32(payload.value[:rest]), rest)
            return None, crc, payload.nbytes
        return self.add(payload if payload.crc else replace(payload, crc=True)), 0, payload.nbytes

    def late(self, needs: tuple[int, ...], nbytes: int, make: Callable[[dict[int, int]], bytes]) -> None:
        """Bytes that depend on checksums, or on none."""
        if not needs:
            self.put(make({}))
        elif nbytes:
            self.add(Late(nbytes, needs, lambda crcs: make(dict(zip(needs, crcs, strict=True)))))

    def flush(self) -> None:
        if self.pending:
            self.segments.append(Put(b"".join(self.pending)))
            self.pending = []

    def done(self) -> list[Segment]:
        self.flush()
        return self.segments
