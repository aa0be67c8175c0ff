"""Zip directories: where each record of an archive lies. Nothing is decompressed, no payload is read, no record's name is used as a path.

An archive says everything two or three times: the central directory at its end, a header before each record, and, for records
that were streamed, a descriptor behind it. Loaders differ in which they believe, so an archive is taken only where all agree.
Source: PKWARE APPNOTE.TXT 6.3.10; what torch writes: torch 2.13.0, caffe2/serialize/inline_container.cc, and miniz.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.bytesource import ByteSource
from ckptctl.formats.crc import crc32

LOCAL, CENTRAL, DESCRIPTOR = b"PK\3\4", b"PK\1\2", b"PK\7\b"
END, END64, LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_RECORD = struct.Struct("<4sHHHHIIH")
END64_RECORD = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
ZIP64_ID = 1
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF

STREAMED, UTF8, ENCRYPTED = 0x0008, 0x0800, 0x2041
"""Flag bits: sizes follow the payload; the name is UTF-8; any of the kinds of encryption. Source: APPNOTE 4.4.4."""
_KNOWN_FLAGS = STREAMED | UTF8 | 0x0006
"""Bits 1 and 2 say how hard deflate tried."""

_DIRECTORY_LIMIT = 1 << 26
"""The largest central directory that is read, in bytes: about 800,000 records of a torch file."""
_COMMENT_LIMIT = 0xFFFF
_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record. start is its first payload byte within the reader; compressed_nbytes are there, nbytes once decompressed.

    crc is that of the decompressed bytes, 0 where the writer did not compute it (torch.serialization.set_crc32_options(False)) or
    where it happens to be 0. method 0 is STORED, 8 deflate.
    """

    name: str
    start: int
    nbytes: int
    compressed_nbytes: int
    method: int
    crc: int
    flags: int


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The records by name, in the order of the central directory, and the folder that holds data.pkl ("" where none does)."""

    records: dict[str, ZipRecord]
    root: str

    def record(self, name: str) -> ZipRecord | None:
        """The record of that name below root, None where there is none."""
        return self.records.get(f"{self.root}/{name}" if self.root else name)

    @property
    def has_checksums(self) -> bool:
        """Whether any record has a CRC-32: where all are 0 the writer did not compute them."""
        return any(r.crc for r in self.records.values())


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the central directory; offset is that of the local header."""

    name: bytes
    offset: int
    nbytes: int
    compressed: int
    method: int
    crc: int
    flags: int


def read_zip(reader: ByteSource) -> ZipDirectory:
    """The directory of an archive that fills reader, checked against every local header and descriptor.

    Raises Damaged with code archive-truncated (the end is not there), archive-inconsistent (two of its statements differ),
    archive-encrypted, duplicate-name or trailing-bytes; Unsupported for archives in several volumes or with a directory over 64 MiB.
    """
    count, size, at = _find_directory(reader)
    entries = _central(reader, reader.read(at, size), count, at)
    starts = _check_locals(reader, entries, at)
    records: dict[str, ZipRecord] = {}
    for e, start in zip(entries, starts, strict=True):
        name = _decode(reader, e)
        if name in records:
            raise Damaged(
                f"two records of the archive are called {name!r}",
                where=reader.path,
                why="loaders differ in which one they take",
                fix="write the archive again",
                code="duplicate-name",
            )
        records[name] = ZipRecord(name, start, e.nbytes, e.compressed, e.method, e.crc, e.flags)
    return ZipDirectory(records, _root(reader, records))


def first_records(prefix: bytes, base: int = 0) -> dict[str, tuple[int, int]]:
    """Records found from the front of an archive, without its directory: name -> (base + first payload byte, bytes or -1).

    For items of a .distcp file, of which the first few KB hold data.pkl and the start of data/0. prefix begins at a local header. Only
    STORED records are followed; the list ends at the first record whose end is not in prefix (its size is -1), or at anything
    else than a local header. Damaged where prefix does not start with a complete one.

    torch leaves sizes out of local headers and puts them into a descriptor behind the payload (STREAMED), so the payload's end is looked for: the first
    descriptor signature whose two sizes are its own distance from the payload's start and whose CRC-32 is that of the bytes between (or 0,
    "not computed"). Bytes inside a payload pass for that only where somebody made them so; what relies on it must read
    the whole directory where the file is not trusted, and both ways give the same for every archive that read_zip takes and torch wrote.
    """
    found: dict[str, tuple[int, int]] = {}
    p = 0
    while p + LOCAL_HEADER.size <= len(prefix) and prefix[p : p + 4] == LOCAL:
        _, _, flags, method, _, _, _, compressed, _, name_len, extra_len = LOCAL_HEADER.unpack_from(prefix, p)
        start = p + LOCAL_HEADER.size + name_len + extra_len
        if start > len(prefix):
            break
        name = prefix[p + LOCAL_HEADER.size : p + LOCAL_HEADER.size + name_len].decode("utf-8", "replace")
        stop, after = _payload_stop(prefix, start, flags, compressed) if method == 0 and not flags & ENCRYPTED else (-1, -1)
        if name in found:
            break
        found[name] = (base + start, stop - start if stop >= 0 else -1)
        if after < 0:
            break
        p = after
    if not found:
        raise Damaged(
            "no zip record starts here",
            where=f"byte {base}",
            why=f"the first bytes are {prefix[:8].hex(' ')}",
            fix="copy the file again",
            code="archive-inconsistent",
        )
    return found


def _payload_stop(prefix: bytes, start: int, flags: int, compressed: int) -> tuple[int, int]:
    """(payload's end, where the next header may be) within prefix, each -1 where it is not to be found there."""
    if not flags & STREAMED or compressed not in (0, FULL32):
        if compressed == FULL32 or start + compressed > len(prefix):
            return (-1, -1)
        stop = start + compressed
        return (stop, stop + 16 if flags & STREAMED else stop)
    if prefix[start : start + 4] in (LOCAL, CENTRAL):
        return (start, start)
    stop, crc, done = start, 0, start
    while (stop := prefix.find(DESCRIPTOR, stop)) >= 0:
        for size, layout in ((24, "<IQQ"), (16, "<III")):
            if stop + size > len(prefix):
                continue
            said, first, second = struct.unpack_from(layout, prefix, stop + 4)
            if first == second == stop - start:
                crc, done = crc32(memoryview(prefix)[done:stop], crc), stop
                if said in (crc, 0):
                    return (stop, stop + size)
        stop += 1
    return (-1, -1)


def _find_directory(reader: ByteSource) -> tuple[int, int, int]:
    """(records, directory's bytes, its first byte), from the end record."""
    n = reader.nbytes
    tail_at = max(0, n - END_RECORD.size)
    tail = reader.read(tail_at, n - tail_at)
    if tail[:4] != END or tail[-2:] != b"\0\0":  # a comment, or no archive: look at all places where the end record may be
        tail_at = max(0, n - END_RECORD.size - _COMMENT_LIMIT)
        tail = reader.read(tail_at, n - tail_at)
    p = tail.rfind(END)
    if p < 0 or len(tail) - p < END_RECORD.size:
        raise Damaged(
            "the archive is cut off: no end of the zip directory",
            where=reader.path,
            why=f"the last {len(tail)} of {n} bytes hold no complete end record (PK 5 6)",
            fix="copy the file again: its last part is missing",
            code="archive-truncated",
        )
    end_at = tail_at + p
    _, disk, first_disk, on_disk, total, size, at, comment = END_RECORD.unpack_from(tail, p)
    extra = n - end_at - END_RECORD.size - comment
    if extra > 0:
        raise Damaged(
            f"{extra} bytes stand behind the archive's end",
            where=reader.path,
            why=f"the end record at byte {end_at} announces a comment of {comment} bytes; the file goes on to byte {n}",
            fix="copy the file again",
            code="trailing-bytes",
        )
    if extra < 0:
        _cut(reader, f"the end record at byte {end_at} announces a comment of {comment} bytes, {comment + extra} are there")
    directory_stop = end_at
    full = FULL16 in (disk, first_disk, on_disk, total) or FULL32 in (size, at)
    locator = reader.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    if locator[:4] == LOCATOR64:
        _, disk64, end64_at, disks = LOCATOR.unpack(locator)
        if end64_at + END64_RECORD.size > end_at - LOCATOR.size:
            _bad(reader, "the zip64 end record is not where the locator says", f"byte {end64_at}, the locator is at byte {end_at - LOCATOR.size}")
        fields = END64_RECORD.unpack(reader.read(end64_at, END64_RECORD.size))
        if fields[0] != END64 or end64_at + 12 + fields[1] != end_at - LOCATOR.size:
            _bad(reader, "no zip64 end record stands where the locator says", f"byte {end64_at} holds {fields[0].hex(' ')}")
        small = (disk, first_disk, on_disk, total, size, at)
        disk, first_disk, on_disk, total, size, at = fields[4:]
        limits = (FULL16, FULL16, FULL16, FULL16, FULL32, FULL32)
        if any(s not in (limit, b) for s, b, limit in zip(small, fields[4:], limits, strict=True)):
            _bad(reader, "the two end records of the archive differ", f"{small} in the classic one, {fields[4:]} in the zip64 one")
        if disks > 1 or disk64:
            disk = 1
        directory_stop = end64_at
    elif full:
        _bad(reader, "the zip64 end record is missing", f"the end record at byte {end_at} says that there is one")
    if disk or first_disk or on_disk != total:
        raise Unsupported("the archive is one of several volumes", where=reader.path, why=f"volume {disk}, directory on {first_disk}", fix="join it")
    if at + size != directory_stop:
        _bad(
            reader,
            "the zip directory is not where the end record says",
            f"bytes {at} to {at + size} are named, it would have to stop at {directory_stop}",
        )
    if total * CENTRAL_HEADER.size > size:
        _bad(reader, "the zip directory is too small for its records", f"{total} records in {size} bytes")
    if size > _DIRECTORY_LIMIT:
        raise Unsupported(
            f"the zip directory is larger than {_DIRECTORY_LIMIT} bytes", where=reader.path, why=f"{total} records in {size} bytes", code="directory-too-large"
        )
    return total, size, at


def _central(reader: ByteSource, data: bytes, count: int, limit: int) -> list[_Entry]:
    """The rows of the central directory; limit is its own first byte, where records must have ended."""
    entries, p = [], 0
    for i in range(count):
        if p + CENTRAL_HEADER.size > len(data) or data[p : p + 4] != CENTRAL:
            _bad(reader, f"entry {i} of {count} of the zip directory is not there", f"at byte {p} of its {len(data)}")
        fields = CENTRAL_HEADER.unpack_from(data, p)
        _, _, _, flags, method, _, _, crc, compressed, nbytes, name_len, extra_len, comment_len, disk, _, _, offset = fields
        names_at = p + CENTRAL_HEADER.size
        stop = names_at + name_len + extra_len + comment_len
        if stop > len(data):
            _bad(reader, f"entry {i} of the zip directory goes past its end", f"byte {stop} of {len(data)}")
        name = data[names_at : names_at + name_len]
        if FULL32 in (nbytes, compressed, offset):
            extra = data[names_at + name_len : names_at + name_len + extra_len]
            nbytes, compressed, offset = _zip64(reader, name, extra, (nbytes, compressed, offset))
        if flags & ENCRYPTED:
            raise Damaged(
                f"record {_shown(name)} is encrypted",
                where=reader.path,
                why=f"its flags are {flags:#06x}",
                fix="no checkpoint is: write the file again",
                code="archive-encrypted",
            )
        if flags & ~_KNOWN_FLAGS:
            _bad(reader, f"record {_shown(name)} has flags that no checkpoint has", f"{flags:#06x}")
        if method == 0 and nbytes != compressed:
            _bad(reader, f"record {_shown(name)} is stored as it is, yet in two sizes", f"{compressed} and {nbytes} bytes")
        if disk not in (0, FULL16) or offset + LOCAL_HEADER.size + name_len + compressed > limit:
            _bad(
                reader,
                f"record {_shown(name)} goes past the end of the records",
                f"{compressed} bytes behind a header at byte {offset}; the directory starts at {limit}",
            )
        entries.append(_Entry(name, offset, nbytes, compressed, method, crc, flags))
        p = stop
    if p != len(data):
        _bad(reader, "the zip directory is longer than its records", f"{count} records in {p} of {len(data)} bytes")
    return entries


def _zip64(reader: ByteSource, name: bytes, extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """(nbytes, compressed, offset) with those that are 0xFFFFFFFF taken from the zip64 extra field, which holds just these, in order."""
    field = _extra(reader, name, extra)
    if field is None:
        return values  # a size of exactly 0xFFFFFFFF
    out, p = list(values), 0
    for i, value in enumerate(values):
        if value == FULL32:
            if p + 8 > len(field):
                _bad(reader, f"the zip64 field of record {_shown(name)} is too short", f"{len(field)} bytes")
            out[i] = int.from_bytes(field[p : p + 8], "little")
            p += 8
    return out[0], out[1], out[2]


def _extra(reader: ByteSource, name: bytes, extra: bytes) -> bytes | None:
    """The content of the zip64 extra field, None where there is none."""
    p, field = 0, None
    while p + 4 <= len(extra):
        ident, size = struct.unpack_from("<HH", extra, p)
        if p + 4 + size > len(extra):
            break
        if ident == ZIP64_ID:
            if field is not None:
                _bad(reader, f"record {_shown(name)} has two zip64 fields", "loaders differ in which one they take")
            field = extra[p + 4 : p + 4 + size]
        p += 4 + size
    return field


class _Window:
    """Forward reads over a source: a miss reads far where the next reads are near, and no more than is asked where they are not."""

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


def _check_locals(reader: ByteSource, entries: list[_Entry], limit: int) -> list[int]:
    """The first payload byte of each entry, after comparing local headers and descriptors with the directory."""
    order = sorted(range(len(entries)), key=lambda i: entries[i].offset)
    if order and entries[order[0]].offset:
        _bad(reader, "the archive does not start with its first record", f"the first header is at byte {entries[order[0]].offset}")
    window = _Window(reader, limit)
    starts = [0] * len(entries)
    offsets = [entries[i].offset for i in order] + [limit]
    before: _Entry | None = None
    stop = 0  # where the payload of the record before ended
    for k, i in enumerate(order):
        e = entries[i]
        if e.offset < stop:
            _bad(
                reader,
                f"records {_shown(before.name if before else b'')} and {_shown(e.name)} overlap",
                f"one stops at byte {stop}, the header of the other is at {e.offset}",
            )
        # One read takes the descriptor of the record before and this header: torch's padding is at most 63 bytes.
        near = stop if e.offset - stop <= 64 else e.offset
        want = e.offset + LOCAL_HEADER.size + len(e.name) + 128 - near
        block = window.get(near, want, offsets[k + 1])
        if before is not None and near == stop:
            _check_descriptor(reader, before, block[: e.offset - near], e.offset - stop)
        elif before is not None:
            _check_descriptor(reader, before, window.get(stop, 24, stop), e.offset - stop)
        starts[i] = _check_local(reader, e, window.get(e.offset, LOCAL_HEADER.size + len(e.name), e.offset), window)
        stop = starts[i] + e.compressed
        if stop > limit:
            _bad(reader, f"record {_shown(e.name)} goes past the end of the records", f"it stops at byte {stop}, the directory starts at {limit}")
        before = e
    if before is not None:
        _check_descriptor(reader, before, window.get(stop, 24, stop), limit - stop)
    return starts


def _check_local(reader: ByteSource, e: _Entry, head: bytes, window: _Window) -> int:
    """The first payload byte of an entry whose local header starts head."""
    if head[:4] != LOCAL or len(head) < LOCAL_HEADER.size:
        _bad(reader, f"record {_shown(e.name)} is not where the directory says", f"no local header at byte {e.offset}")
    fields: tuple[int, ...] = LOCAL_HEADER.unpack_from(head)
    _, _, flags, method, _, _, crc, compressed, nbytes, name_len, extra_len = fields
    name = head[LOCAL_HEADER.size :]
    start = e.offset + LOCAL_HEADER.size + name_len + extra_len
    if name_len != len(e.name) or name != e.name:
        _bad(reader, f"the directory calls a record {_shown(e.name)}, its own header {_shown(name[:name_len])}", f"the header at byte {e.offset}")
    if method != e.method:
        _bad(reader, f"record {_shown(e.name)} has two methods of compression", f"{e.method} in the directory, {method} in its header")
    if (flags ^ e.flags) & ~STREAMED or flags & ~_KNOWN_FLAGS:
        _bad(reader, f"record {_shown(e.name)} has two sets of flags", f"{e.flags:#06x} in the directory, {flags:#06x} in its header")
    streamed = bool(flags & STREAMED)
    if streamed and not crc and not compressed and not nbytes:
        return start
    if extra_len and FULL32 in (nbytes, compressed):
        field = _extra(reader, e.name, window.get(start - extra_len, extra_len, start))
        if field is not None and len(field) >= 16:
            nbytes, compressed = struct.unpack_from("<QQ", field)
        if streamed and not nbytes and not compressed:
            nbytes, compressed = e.nbytes, e.compressed
    if (nbytes, compressed) != (e.nbytes, e.compressed):
        _bad(
            reader,
            f"record {_shown(e.name)} has two sizes",
            f"{e.compressed} bytes for {e.nbytes} in the directory, {compressed} for {nbytes} in its header",
        )
    if crc != e.crc and not (streamed and crc == 0):
        _bad(reader, f"record {_shown(e.name)} has two checksums", f"{e.crc:#010x} in the directory, {crc:#010x} in its header")
    return start


def _check_descriptor(reader: ByteSource, e: _Entry, data: bytes, room: int) -> None:
    """Compares what follows an entry's payload, up to the next header, with the directory: data are its first bytes, room their number."""
    if not e.flags & STREAMED or (room == 0 and e.nbytes == 0):
        return
    data = data[:room]
    for sign in (DESCRIPTOR, b""):
        for layout in ("<III", "<IQQ"):
            if e.compressed > FULL32 and layout == "<III":
                continue
            want = sign + struct.pack(layout, e.crc, e.compressed, e.nbytes) if max(e.nbytes, e.compressed) <= FULL32 or layout == "<IQQ" else None
            if want is not None and data.startswith(want):
                return
    _bad(
        reader,
        f"the descriptor behind record {_shown(e.name)} differs from the directory",
        f"{data[:24].hex(' ') or 'nothing'} where checksum {e.crc:#010x} and sizes {e.compressed}, {e.nbytes} are due",
    )


def _decode(reader: ByteSource, e: _Entry) -> str:
    """A record's name as text."""
    try:
        name = e.name.decode("utf-8")
    except UnicodeDecodeError:
        if e.flags & UTF8:
            _bad(reader, f"record {_shown(e.name)} has a name that is no UTF-8", "its flags say that it is")
        name = e.name.decode("cp437")
    if "\0" in name:
        _bad(reader, f"record {_shown(e.name)} has a NUL in its name", "loaders differ in where such a name stops")
    return name


def _root(reader: ByteSource, names: Iterable[str]) -> str:
    """The folder F of the one record F/data.pkl, "" where there is none."""
    roots = [n.removesuffix("/data.pkl") for n in names if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(roots) > 1:
        _bad(reader, "the archive holds several pickles of tensors", f"data.pkl in {', '.join(map(repr, roots[:4]))}")
    return roots[0] if roots else ""


def _shown(name: bytes) -> str:
    """A name for a message: short, and without control characters."""
    return repr(name[:80].decode("utf-8", "replace"))


def _bad(reader: ByteSource, what: str, why: str) -> NoReturn:
    raise Damaged(what, where=reader.path, why=why, fix="copy the file again, or write it again where it is what was made", code="archive-inconsistent")


def _cut(reader: ByteSource, why: str) -> NoReturn:
    raise Damaged("the archive is cut off", where=reader.path, why=why, fix="copy the file again", code="archive-truncated")
