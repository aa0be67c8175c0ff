"""Whether two items hold the same: chunks and objects that several ranks wrote each for itself.

Small items are compared by their bytes, larger archives by the checksums that torch recorded, by bytes where it did
not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptctl.formats.bytesource import ByteSource, FileBytes
from ckptctl.formats.zipdir import read_zip

if TYPE_CHECKING:
    from ckptctl.formats.datafiles import DataFiles

SMALL_NBYTES = 1 << 20
_BLOCK = 4 << 20


class Place(NamedTuple):
    """Bytes of a file of the index."""

    file: int
    offset: int
    length: int


def same_item(files: DataFiles, a: Place, b: Place, *, archives: bool) -> bool:
    """Whether two items hold the same tensor or object. archives: they are plain torch archives."""
    with _opened(files, a) as left, _opened(files, b) as right:
        if not archives or max(a.length, b.length) <= SMALL_NBYTES:
            if a.length == b.length and _same(left, 0, right, 0, a.length):
                return True
            if not archives:
                return False
        mine, other = read_zip(left), read_zip(right)
        if set(mine.records) != set(other.records):
            return False
        for name, x in mine.records.items():
            y = other.records[name]
            if name.endswith("/.data/serialization_id"):
                continue  # a digest of names and checksums, where they were computed
            if x.nbytes != y.nbytes or (x.crc and y.crc and x.crc != y.crc):
                return False
            known = x.crc and y.crc and x.nbytes > SMALL_NBYTES
            if not known and not _same(left, x.start, right, y.start, x.nbytes):
                return False
        return True


def _opened(files: DataFiles, place: Place) -> FileBytes:
    return FileBytes(files.full(place.file), place.offset, place.offset + place.length, name=files.names[place.file])


def _same(a: ByteSource, a_start: int, b: ByteSource, b_start: int, nbytes: int) -> bool:
    for at in range(0, nbytes, _BLOCK):
        n = min(_BLOCK, nbytes - at)
        if a.read(a_start + at, n) != b.read(b_start + at, n):
            return False
    return True
