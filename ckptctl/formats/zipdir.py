"""Zip directories: where each record of an archive lies. Nothing is decompressed, no payload is read.

An archive says everything two or three times: the central directory at its end, a header before each record, and, for
records that were streamed, a descriptor behind it. Loaders differ in which they believe, so an archive is taken only
where all agree. No record's name is used as a path here.
Source: PKWARE APPNOTE.TXT 6.3.10; what torch writes: torch 2.13.0, caffe2/serialize/inline_container.cc, and miniz.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.zipformat import (
    CENTRAL,
    CENTRAL_HEADER,
    ENCRYPTED,
    END,
    END64,
    END64_RECORD,
    END_RECORD,
    FULL16,
    FULL32,
    KNOWN_FLAGS,
    LOCAL_HEADER,
    LOCATOR,
    LOCATOR64,
    UTF8,
    Entry,
    bad,
    shown,
    zip64_field,
)
from ckptctl.formats.zipfront import first_records
from ckptctl.formats.ziplocal import check_locals, near_headers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.formats.bytesource import ByteSource

__all__ = ["ZipDirectory", "ZipRecord", "first_records", "read_zip"]

_DIRECTORY_LIMIT = 1 << 26
"""The largest central directory that is read, in bytes: about 800,000 records of a torch file."""
_COMMENT_LIMIT = 0xFFFF


class ZipRecord(NamedTuple):
    """One record. start is its first payload byte in the reader; compressed_nbytes are there, nbytes decompressed.

    crc is that of the decompressed bytes, 0 where the writer did not compute it
    (torch.serialization.set_crc32_options(False)) or where it happens to be 0. method 0 is STORED, 8 deflate.
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
    """The records by name, in the central directory's order, and the folder that holds data.pkl ("" for none)."""

    records: dict[str, ZipRecord]
    root: str

    def record(self, name: str) -> ZipRecord | None:
        """The record of that name below root, None where there is none."""
        return self.records.get(f"{self.root}/{name}" if self.root else name)

    @property
    def has_checksums(self) -> bool:
        """Whether any record has a CRC-32: where all are 0 the writer did not compute them."""
        return any(r.crc for r in self.records.values())


def read_zip(reader: ByteSource) -> ZipDirectory:
    """The directory of an archive that fills reader, checked against every local header and descriptor.

    Raises Damaged with code archive-truncated (the end is not there), archive-inconsistent (two of its statements
    differ), archive-encrypted, duplicate-name or trailing-bytes; Unsupported for archives in several volumes or with
    a directory over 64 MiB.
    """
    count, size, at = _find_directory(reader)
    entries = _central(reader, reader.read(at, size), count, at)
    if isinstance(reader, FileBytes) and reader.is_far:
        reader.expect(near_headers(entries, at))
    starts = check_locals(reader, entries, at)
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


def _find_directory(reader: ByteSource) -> tuple[int, int, int]:
    """(records, directory's bytes, its first byte), from the end records."""
    end_at, fields = _end_record(reader)
    disk, first_disk, on_disk, total, size, at = fields
    stop = end_at
    locator = reader.read(end_at - LOCATOR.size, LOCATOR.size) if end_at >= LOCATOR.size else b""
    if locator[:4] == LOCATOR64:
        stop, (disk, first_disk, on_disk, total, size, at) = _end_record64(
            reader, end_at - LOCATOR.size, locator, fields
        )
    elif FULL16 in (disk, first_disk, on_disk, total) or FULL32 in (size, at):
        bad(reader.path, "the zip64 end record is missing", f"the end record at byte {end_at} says that there is one")
    if disk or first_disk or on_disk != total:
        why = f"volume {disk}, its directory on {first_disk}"
        raise Unsupported("the archive is one of several volumes", where=reader.path, why=why, fix="join them")
    if at + size != stop:
        why = f"bytes {at} to {at + size} are named, it would have to stop at {stop}"
        bad(reader.path, "the zip directory is not where the end record says", why)
    if total * CENTRAL_HEADER.size > size:
        bad(reader.path, "the zip directory is too small for its records", f"{total} records in {size} bytes")
    if size > _DIRECTORY_LIMIT:
        what, why = f"the zip directory is over {_DIRECTORY_LIMIT:,} bytes", f"{total} records in {size:,} bytes"
        raise Unsupported(what, where=reader.path, why=why, code="directory-too-large")
    return total, size, at


def _end_record(reader: ByteSource) -> tuple[int, tuple[int, ...]]:
    """Where the classic end record is, and (volume, directory's volume, records here, records, bytes, first byte)."""
    n = reader.nbytes
    tail_at = max(0, n - END_RECORD.size)
    tail = reader.read(tail_at, n - tail_at)
    if tail[:4] != END or tail[-2:] != b"\0\0":  # a comment, or no archive: look wherever the record may be
        tail_at = max(0, n - END_RECORD.size - _COMMENT_LIMIT)
        tail = reader.read(tail_at, n - tail_at)
    p = tail.rfind(END)
    if p < 0 or len(tail) - p < END_RECORD.size:
        why = f"the last {len(tail)} of {n} bytes hold no complete end record (PK 5 6)"
        _cut(reader, "the archive is cut off: no end of the zip directory", why)
    end_at = tail_at + p
    comment = int.from_bytes(tail[p + END_RECORD.size - 2 : p + END_RECORD.size], "little")
    more = n - end_at - END_RECORD.size - comment
    why = f"the end record at byte {end_at} announces a comment of {comment} bytes, the file has {n} bytes"
    if more > 0:
        what, fix = f"{more} bytes stand behind the archive's end", "copy the file again"
        raise Damaged(what, where=reader.path, why=why, fix=fix, code="trailing-bytes")
    if more < 0:
        _cut(reader, "the archive is cut off in its comment", why)
    return end_at, END_RECORD.unpack_from(tail, p)[1:7]


def _end_record64(
    reader: ByteSource, locator_at: int, locator: bytes, small: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Where the zip64 end record is, and what the classic one holds in `small`, in full."""
    _, disk, at, disks = LOCATOR.unpack(locator)
    if at + END64_RECORD.size > locator_at:
        why = f"byte {at} is named, the locator itself is at byte {locator_at}"
        bad(reader.path, "the zip64 end record is not where the locator says", why)
    fields = END64_RECORD.unpack(reader.read(at, END64_RECORD.size))
    if fields[0] != END64 or at + 12 + fields[1] != locator_at:
        bad(reader.path, "no zip64 end record stands where the locator says", f"byte {at} holds {fields[0].hex(' ')}")
    limits = (FULL16, FULL16, FULL16, FULL16, FULL32, FULL32)
    if any(s not in (limit, full) for s, full, limit in zip(small, fields[4:], limits, strict=True)):
        bad(reader.path, "the two end records of the archive differ", f"{small} in one, {fields[4:]} in the zip64 one")
    if disk or disks > 1:
        why = f"{disks} volumes"
        raise Unsupported("the archive is one of several volumes", where=reader.path, why=why, fix="join them")
    return at, fields[4:]


def _central(reader: ByteSource, data: bytes, count: int, limit: int) -> list[Entry]:
    """The rows of the central directory; limit is its own first byte, where records must have ended."""
    entries, p, path = [], 0, reader.path
    for i in range(count):
        if p + CENTRAL_HEADER.size > len(data) or data[p : p + 4] != CENTRAL:
            bad(path, f"entry {i} of {count} of the zip directory is not there", f"at byte {p} of its {len(data)}")
        fields: tuple[int, ...] = CENTRAL_HEADER.unpack_from(data, p)
        _, _, _, flags, method, _, _, crc, compressed, nbytes, *lengths, disk, _, _, offset = fields
        name_len, extra_len, comment_len = lengths
        extra_at = p + CENTRAL_HEADER.size + name_len
        stop = extra_at + extra_len + comment_len
        if stop > len(data):
            bad(path, f"entry {i} of the zip directory goes past its end", f"byte {stop} of {len(data)}")
        name = data[extra_at - name_len : extra_at]
        if FULL32 in (nbytes, compressed, offset):
            extra = data[extra_at : extra_at + extra_len]
            nbytes, compressed, offset = _zip64(path, name, extra, (nbytes, compressed, offset))
        entry = Entry(name, offset, nbytes, compressed, method, crc, flags)
        if flags & ENCRYPTED:
            what, why, fix = f"record {entry} is encrypted", f"its flags are {flags:#06x}", "write the file again"
            raise Damaged(what, where=path, why=why, fix=fix, code="archive-encrypted")
        if flags & ~KNOWN_FLAGS:
            bad(path, f"record {entry} has flags that no checkpoint has", f"{flags:#06x}")
        if method == 0 and nbytes != compressed:
            bad(path, f"record {entry} is stored as it is, yet has two sizes", f"{compressed} and {nbytes} bytes")
        if disk not in (0, FULL16) or offset + LOCAL_HEADER.size + name_len + compressed > limit:
            why = f"{compressed} bytes behind a header at byte {offset}; the directory starts at {limit}"
            bad(path, f"record {entry} goes past the end of the records", why)
        entries.append(entry)
        p = stop
    if p != len(data):
        bad(path, "the zip directory is longer than its records", f"{count} records in {p} of {len(data)} bytes")
    return entries


def _zip64(path: str, name: bytes, extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """(nbytes, compressed, offset) with those that are 0xFFFFFFFF taken from the zip64 field, in this order."""
    field = zip64_field(path, name, extra)
    if field is None:
        return values  # a size of exactly 0xFFFFFFFF
    out, p = list(values), 0
    for i, value in enumerate(values):
        if value == FULL32:
            if p + 8 > len(field):
                bad(path, f"the zip64 field of record {shown(name)} is too short", f"{len(field)} bytes")
            out[i] = int.from_bytes(field[p : p + 8], "little")
            p += 8
    return out[0], out[1], out[2]


def _decode(reader: ByteSource, e: Entry) -> str:
    """A record's name as text."""
    try:
        name = e.name.decode("utf-8")
    except UnicodeDecodeError:
        if e.flags & UTF8:
            bad(reader.path, f"record {e} has a name that is no UTF-8", "its flags say that it is")
        name = e.name.decode("cp437")
    if "\0" in name:
        bad(reader.path, f"record {e} has a NUL in its name", "loaders differ in where such a name stops")
    return name


def _root(reader: ByteSource, names: Iterable[str]) -> str:
    """The folder F of the one record F/data.pkl, "" where there is none."""
    roots = [n.removesuffix("/data.pkl") for n in names if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(roots) > 1:
        bad(
            reader.path,
            "the archive holds several pickles of tensors",
            f"data.pkl in {', '.join(map(repr, roots[:4]))}",
        )
    return roots[0] if roots else ""


def _cut(reader: ByteSource, what: str, why: str) -> NoReturn:
    fix = "copy the file again: its last part is missing"
    raise Damaged(what, where=reader.path, why=why, fix=fix, code="archive-truncated")
