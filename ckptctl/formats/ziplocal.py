"""What stands around each payload of a zip archive, compared with its directory: header before, descriptor behind."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ckptctl.formats.zipformat import (
    DESCRIPTOR,
    FULL32,
    KNOWN_FLAGS,
    LOCAL,
    LOCAL_HEADER,
    STREAMED,
    Entry,
    bad,
    shown,
    zip64_field,
)

if TYPE_CHECKING:
    from ckptctl.formats.bytesource import ByteSource

_SIGNED = struct.Struct("<4sIII")
_WINDOW = 1 << 16
_NEAR = 64
"""Bytes between a payload and the next header that are read with the header: a descriptor is 12 to 24."""


class _Window:
    """Forward reads: a miss reads far where the next reads are near, and no more than is asked where they are not."""

    def __init__(self, reader: ByteSource, stop: int) -> None:
        self.reader, self.stop = reader, stop
        self.at, self.data = 0, b""

    def get(self, start: int, n: int, until: int) -> bytes:
        """Bytes [start, start + n), fewer at stop. until is how far reads will surely go on."""
        n = min(n, self.stop - start)
        if start < self.at or start + n > self.at + len(self.data):
            ahead = _WINDOW if until - start < _WINDOW else n
            self.at, self.data = start, self.reader.read(start, min(max(n, ahead), self.stop - start))
        return self.data[start - self.at : start - self.at + n]


def near_headers(entries: list[Entry], limit: int) -> list[tuple[int, int]]:
    """Bytes [start, stop) that check_locals reads: each header, and what is close to it on either side."""
    rest = LOCAL_HEADER.size + 2 * _NEAR
    return [(max(0, e.offset - _NEAR), min(limit, e.offset + len(e.name) + rest)) for e in entries]


def check_locals(reader: ByteSource, entries: list[Entry], limit: int) -> list[int]:
    """The first payload byte of each entry, once local headers and descriptors agree with it. limit is the directory.

    Raises Damaged, code archive-inconsistent.
    """
    order = sorted(range(len(entries)), key=lambda i: entries[i].offset)
    offsets = [entries[i].offset for i in order] + [limit]
    if offsets[0]:
        bad(reader.path, "the archive does not start with a record", f"the first header is at byte {offsets[0]}")
    window = _Window(reader, limit)
    starts = [0] * len(entries)
    before: Entry | None = None
    stop = 0  # where the payload of the record before ended
    for k, i in enumerate(order):
        e = entries[i]
        if e.offset < stop:
            why = f"the first stops at byte {stop}, the header of the other is at byte {e.offset}"
            bad(reader.path, f"records {before} and {e} overlap", why)
        gap, size = e.offset - stop, LOCAL_HEADER.size + len(e.name)
        is_near = gap <= _NEAR
        near = stop if is_near else e.offset
        data = window.get(near, e.offset + size + 2 * _NEAR - near, offsets[k + 1])
        if before is not None:
            behind = data[: min(24, gap)] if is_near else window.get(stop, min(24, gap), stop)
            _check_descriptor(reader, before, behind, gap)
        starts[i] = _check_header(reader, e, data[e.offset - near : e.offset - near + size], window)
        stop = starts[i] + e.compressed
        if stop > limit:
            why = f"it stops at byte {stop}, the directory starts at byte {limit}"
            bad(reader.path, f"record {e} goes past the end of the records", why)
        before = e
    if before is not None:
        _check_descriptor(reader, before, window.get(stop, 24, stop), limit - stop)
    return starts


def _check_header(reader: ByteSource, e: Entry, head: bytes, window: _Window) -> int:
    """The first payload byte of an entry; head are its first bytes, with its name."""
    if head[:4] != LOCAL or len(head) < LOCAL_HEADER.size:
        bad(reader.path, f"record {e} is not where the directory says", f"no local header at byte {e.offset}")
    fields: tuple[int, ...] = LOCAL_HEADER.unpack_from(head)
    _, _, flags, method, _, _, crc, compressed, nbytes, name_len, extra_len = fields
    name = head[LOCAL_HEADER.size :]
    start = e.offset + LOCAL_HEADER.size + name_len + extra_len
    if name_len != len(e.name) or name != e.name:
        what = f"the directory calls a record {e}, its own header {shown(name[:name_len])}"
        bad(reader.path, what, f"the header at byte {e.offset}")
    if method != e.method:
        _differ(reader, f"record {e} has two methods of compression", str(e.method), str(method))
    if (flags ^ e.flags) & ~STREAMED or flags & ~KNOWN_FLAGS:
        _differ(reader, f"record {e} has two sets of flags", f"{e.flags:#06x}", f"{flags:#06x}")
    streamed = bool(flags & STREAMED)
    if streamed and not crc and not compressed and not nbytes:
        return start
    if extra_len and FULL32 in (nbytes, compressed):
        field = zip64_field(reader.path, e.name, window.get(start - extra_len, extra_len, start))
        if field is not None and len(field) >= 16:
            nbytes, compressed = struct.unpack_from("<QQ", field)
        if streamed and not nbytes and not compressed:
            nbytes, compressed = e.nbytes, e.compressed
    if (nbytes, compressed) != (e.nbytes, e.compressed):
        _differ(reader, f"record {e} has two sizes", f"{e.compressed} for {e.nbytes}", f"{compressed} for {nbytes}")
    if crc != e.crc and not (streamed and crc == 0):
        _differ(reader, f"record {e} has two checksums", f"{e.crc:#010x}", f"{crc:#010x}")
    return start


def _check_descriptor(reader: ByteSource, e: Entry, data: bytes, room: int) -> None:
    """Compares what follows a payload with the directory: data are its first bytes, room all up to the next header."""
    if not e.flags & STREAMED or (room == 0 and e.nbytes == 0):
        return
    said = data[:room]
    is_short = max(e.compressed, e.nbytes) <= FULL32
    if is_short and said.startswith(_SIGNED.pack(DESCRIPTOR, e.crc, e.compressed, e.nbytes)):  # most of them
        return
    wide = struct.pack("<IQQ", e.crc, e.compressed, e.nbytes)
    usual = struct.pack("<III", e.crc, e.compressed, e.nbytes) if is_short else wide
    if not said.startswith((DESCRIPTOR + usual, DESCRIPTOR + wide, usual, wide)):
        there = data[: min(24, room)].hex(" ") or "nothing"
        why = f"{there} where checksum {e.crc:#010x} and sizes {e.compressed}, {e.nbytes} are due"
        bad(reader.path, f"the descriptor behind record {e} differs from the directory", why)


def _differ(reader: ByteSource, what: str, directory: str, header: str) -> None:
    bad(reader.path, what, f"{directory} in the directory, {header} in the record's own header")
