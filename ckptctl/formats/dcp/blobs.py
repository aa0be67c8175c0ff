"""Items as safetensors inside `.distcp` files: one blob holds all tensors of a file, and says where each one lies.

The metadata gives every tensor of a blob the blob's own offset, and as length the tensor's bytes; byte items may stand
before it. No reader of torch takes these. Source: torch 2.13.0, distributed/checkpoint/filesystem.py,
_write_files_from_queue, SerializationFormat.SAFETENSORS.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp.metadata import Chunks, Copies
from ckptctl.formats.st.header import read_header
from ckptctl.formats.st.slices import slices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.tensor import Ints
    from ckptctl.formats.datafiles import DataFiles
    from ckptctl.formats.dcp.metadata import Index


def place(index: Index, files: DataFiles) -> bool:
    """Puts the true places of tensors in blobs into the index; whether there are any.

    Damaged where a blob has no slice like the one that the metadata lists.
    """
    names = [n for n, c in index.items.items() if isinstance(c, Chunks) and _is_bare(c)]
    if not names:
        return False
    start: dict[str, Ints] = {n: np.zeros(len(_of(index, n).offset), np.int64) for n in names}
    again = {n: np.zeros(len(twice.row), np.int64) for n in names if (twice := _of(index, n).copies) is not None}
    for file, offset, members in _by_blob(index, names):
        blob = _Blob(files, file, offset)
        for name, row, copy in members:
            chunks = _of(index, name)
            place = blob.place(chunks, row)
            if copy < 0:
                start[name][row] = place
            else:
                again[name][copy] = place
    for name in names:
        c = _of(index, name)
        copies = Copies(c.copies.row, c.copies.file, again[name], c.copies.length) if c.copies is not None else None
        index.items[name] = replace(c, offset=start[name], bare=True, copies=copies)
    return True


def _of(index: Index, name: str) -> Chunks:
    found = index.items[name]
    assert isinstance(found, Chunks)
    return found


def _is_bare(c: Chunks) -> bool:
    """Whether the chunks are listed with the bytes of their elements: an archive is longer than its tensor."""
    if c.codec:
        return False
    nbytes = _nbytes(c)
    full = nbytes > 0
    bare = full & (c.length == nbytes)
    if bare.any() and not bare[full].all():
        raise Unsupported(f"the chunks of {c.name} are encoded in several ways")
    if bare.any() and c.dtype.bits % 8:
        raise Unsupported(f"{c.name} has elements of {c.dtype.bits} bits, which are read from torch archives only")
    return bool(bare.any())


def _nbytes(c: Chunks) -> Ints:
    count: Ints = c.size.prod(axis=1, dtype=np.int64) if c.shape else np.ones(len(c.offset), np.int64)
    return count * packed(c.dtype).itemsize


def _by_blob(index: Index, names: list[str]) -> Iterator[tuple[int, int, list[tuple[str, int, int]]]]:
    """(file, offset of the blob, its chunks as (name, row, number of the copy or -1)); chunks without elements not."""
    tensor: list[Ints] = []
    row: list[Ints] = []
    copy: list[Ints] = []
    file: list[Ints] = []
    offset: list[Ints] = []
    for number, name in enumerate(names):
        c = _of(index, name)
        rows = np.flatnonzero(_nbytes(c) > 0)
        parts: list[tuple[Ints, ...]] = [(rows, np.full(len(rows), -1), c.file[rows].astype(np.int64), c.offset[rows])]
        if c.copies is not None:
            parts.append((c.copies.row, np.arange(len(c.copies.row)), c.copies.file, c.copies.offset))
        for r, k, f, o in parts:
            tensor.append(np.full(len(r), number))
            row.append(r)
            copy.append(k)
            file.append(f)
            offset.append(o)
    columns = [np.concatenate(c) for c in (tensor, row, copy, file, offset)]
    order = np.lexsort((columns[4], columns[3]))
    columns = [c[order] for c in columns]
    if not len(order):
        return
    new = np.flatnonzero((np.diff(columns[3]) != 0) | (np.diff(columns[4]) != 0)) + 1
    for begin, stop in zip([0, *new.tolist()], [*new.tolist(), len(order)], strict=True):
        listed = zip(*(c[begin:stop].tolist() for c in columns[:3]), strict=True)
        yield int(columns[3][begin]), int(columns[4][begin]), [(names[t], r, k) for t, r, k in listed]


class _Blob:
    """The header of one blob, which fills its file from offset to the end."""

    def __init__(self, files: DataFiles, file: int, offset: int) -> None:
        self.path, self.offset = files.names[file], offset
        with FileBytes(files.full(file), offset, name=self.path) as reader:
            header = read_header(reader)
        self.entries, self.offsets = header.entries, slices(header, self.path)

    def place(self, c: Chunks, row: int) -> int:
        """The first byte of a chunk in the file. Damaged where the blob has no such slice."""
        lo, size = tuple(c.lo[row].tolist()), tuple(c.size[row].tolist())
        entry = self.entries.get(c.name)
        if entry is None:
            raise self._damaged(c.name, "the safetensors there has no tensor of that name")
        have = self.offsets.get(c.name) if self.offsets is not None else lo
        if entry.dtype.name != c.dtype.name or entry.shape != size or have != lo:
            it_is = f"the item is {entry.dtype.name} {entry.shape} at {have}"
            raise self._damaged(c.name, f"{it_is}, the metadata says {c.dtype.name} {size} at {lo}")
        return self.offset + entry.start_byte

    def _damaged(self, name: str, why: str) -> Damaged:
        return Damaged(
            f"an item of {name} is not what the metadata says",
            where=f"{self.path}, safetensors at byte {self.offset}",
            why=why,
            fix="copy the checkpoint again",
            code="item-differs",
        )
