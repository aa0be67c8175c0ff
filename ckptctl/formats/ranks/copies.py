"""Are the copies that ranks hold of one tensor equal? By recorded checksums, else by value where they are small."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import dense_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.tensor import Key
    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.datafiles import DataFiles
    from ckptctl.formats.ranks.gather import Copy, Gathered

VALUE_LIMIT = 1 << 20
"""The largest copy that is read to be compared, in bytes."""


class Copies:
    """Compares copies of a set's tensors. unread counts those that are too large to be read and have no checksum.

    take and verify are Hints.replica and .verify_replicas. differing are tensors whose copies differ, where one is
    taken all the same, and the files that hold them.
    """

    def __init__(self, files: DataFiles, take: str = "", verify: bool = False) -> None:
        self.files, self.unread, self.compared = files, 0, 0
        self.take, self.verify = take, verify
        self.differing: dict[Key, str] = {}

    def check(self, key: Key, gathered: Gathered, copies: Sequence[Copy]) -> None:
        """Damaged where two copies of a part of the tensor differ, naming both files."""
        columns, k, item = gathered.columns, len(gathered.shape), gathered.dtype.itemsize
        for first, again in copies:
            a, b = (columns[row].tolist() for row in (first, again))
            size = tuple(a[4 + k : 4 + 2 * k])
            if a[1:3] == b[1:3]:
                continue
            if a[3] >= 0 and b[3] >= 0:
                equal = a[3] == b[3]
            elif math.prod(size) * item > VALUE_LIMIT and not self.verify:
                self.unread += 1
                continue
            else:
                equal = self._equal(a, b, size, item)
            self.compared += 1
            if not equal:
                step = key.kind == "step"
                places = f"{self.files.names[a[1]]} and {self.files.names[b[1]]}"
                if self.take and not step:
                    self.differing.setdefault(key, places)
                    continue
                raise Damaged(
                    f"rank {b[0]} is of another step: its step of {key.name} differs"
                    if step
                    else f"two ranks hold different values of {key.name} ({key.kind})",
                    where=places,
                    why=f"both hold elements {tuple(a[4 : 4 + k])} and on, sizes {size}, which should be copies",
                    fix="check that the files are of one run and one step; what each rank keeps for itself is no copy"
                    + ("" if step else "; --replica first or last says whose copies are taken"),
                    code="ranks-mixed" if step else "replica-mismatch",
                )

    def _equal(self, a: list[int], b: list[int], size: tuple[int, ...], item: int) -> bool:
        """Whether two parts hold the same, read in parts of axis 0 where they are large."""
        k, rows = len(size), 1
        if size:
            rows = max(1, VALUE_LIMIT // max(1, math.prod(size[1:]) * item))
        for at in range(0, size[0] if size else 1, rows):
            some = (min(rows, size[0] - at), *size[1:]) if size else ()
            first, second = ([*row[:2], row[2] + (at * row[4 + 2 * k] if size else 0), *row[3:]] for row in (a, b))
            if self._bytes(first, some, item) != self._bytes(second, some, item):
                return False
        return True

    def _bytes(self, row: list[int], size: tuple[int, ...], item: int) -> bytes:
        k = len(size)
        return read_box(self.files.get(row[1]), row[2], size, tuple(row[4 + 2 * k :]), item)


def read_box(reader: ByteSource, start: int, size: tuple[int, ...], strides: tuple[int, ...], item: int) -> bytes:
    """The elements of a strided box, packed row-major. strides count bytes."""
    if not math.prod(size):
        return b""
    if all(s == d or n == 1 for s, d, n in zip(strides, dense_strides(size, item), size, strict=True)):
        return reader.read(start, math.prod(size) * item)
    span = sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + item
    raw = np.frombuffer(reader.read(start, span), np.uint8)
    return np.lib.stride_tricks.as_strided(raw, (*size, item), (*strides, 1)).tobytes()
