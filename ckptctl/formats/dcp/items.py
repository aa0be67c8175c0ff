"""Items of `.distcp` files: where a tensor item's data lie, and what a byte item holds. Reads the heads of items only.

An item is a complete torch.save archive at any byte of its file, perhaps inside a zstd frame. Its data offset depends
on the length of its
pickle, so the head of every chunk that is needed is read; equal pickles, of which there are few, are parsed once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import PieceTable, dense_strides
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.bytesource import HeldBytes
from ckptctl.formats.dcp.copies import Place, same_item
from ckptctl.formats.pickles.build import load
from ckptctl.formats.torchfile.read import CALLS, TorchFile, open_torch
from ckptctl.formats.torchfile.rebuild import Storages
from ckptctl.formats.torchtensor import map_leaves, read_array
from ckptctl.formats.zipdir import first_records

if TYPE_CHECKING:
    from ckptctl.formats.bytesource import FileBytes
    from ckptctl.formats.datafiles import DataFiles
    from ckptctl.formats.dcp.metadata import ByteItem, Chunks

HEAD_NBYTES = 4096
"""What is read of an item's front at first; torch 2.13 puts the data of most items at byte 704."""
_STARTS, _FRONTS = 4, 4096
"""How many lengths of fronts are known, and how many fronts."""
BYTE_ITEM_LIMIT = 256 << 20
OBJECT_TENSOR_LIMIT = 16 << 20
"""The largest tensor inside a pickled object that is read, in bytes."""


class Heads:
    """Reads heads of items. Equal pickles are parsed once."""

    def __init__(self, files: DataFiles) -> None:
        self.files = files
        self._parsed: dict[bytes, TensorRef] = {}
        self._fronts: dict[bytes, tuple[int, TensorRef]] = {}
        """What was found, by all bytes before the data: tensors of one shape mostly have the same."""
        self._starts: tuple[int, ...] = ()
        """How long such fronts are."""

    def tensor(self, chunks: Chunks, row: int) -> tuple[int, TensorRef]:
        """(byte of the data within the item, decoded; the tensor as the item's pickle describes it)."""
        offset, length = int(chunks.offset[row]), int(chunks.length[row])
        reader = self.files.get(int(chunks.file[row]))
        where = f"{reader.path}, item at byte {offset}"
        if offset + length > reader.nbytes:
            raise Damaged(
                f"an item of {chunks.name} goes past the end of its file",
                where=where,
                why=f"it should stop at byte {offset + length}, the file has {reader.nbytes}",
                fix="copy the file again",
                code="data-truncated",
            )
        wanted = HEAD_NBYTES
        while True:
            head = self._head(reader, offset, length, chunks.codec, wanted, where)
            found = self._known(head)
            if found is not None:
                return found
            found = self._locate(head, where, chunks.name)
            if found is not None:
                self._know(head, found)
                return found
            if len(head) < wanted or wanted > 1 << 24:
                raise Damaged(
                    f"an item of {chunks.name} has no tensor data",
                    where=where,
                    why="its archive lacks data.pkl or data/0",
                    fix="copy the file again",
                    code="storage-missing",
                )
            wanted *= 8

    def _known(self, head: bytes) -> tuple[int, TensorRef] | None:
        """What an item with the same front gave: all that _locate looks at stands before the data."""
        return next((found for at in self._starts if (found := self._fronts.get(head[:at])) is not None), None)

    def _know(self, head: bytes, found: tuple[int, TensorRef]) -> None:
        at = found[0]
        if at not in self._starts:
            if len(self._starts) >= _STARTS:
                return
            self._starts = (*self._starts, at)
        if at <= HEAD_NBYTES and len(self._fronts) < _FRONTS:
            self._fronts[head[:at]] = found

    def _head(self, reader: FileBytes, offset: int, length: int, codec: str, wanted: int, where: str) -> bytes:
        if not codec:
            return reader.read(offset, min(wanted, length))
        return decoded_prefix(reader.read(offset, min(length, max(wanted, 1 << 16))), wanted, where)

    def _locate(self, head: bytes, where: str, name: str) -> tuple[int, TensorRef] | None:
        if head[:1] == b"{" or head[8:9] == b"{":
            raise _safetensors(name, where)
        if head[:2] == b"\x80\x02" and head[2:4] != b"PK":
            raise Unsupported(
                f"{name} is an item in torch's stream format", where=where, fix="save with the default zip format"
            )
        try:
            records = first_records(head)
        except Damaged as err:
            raise Damaged(
                f"an item of {name} is no torch archive",
                where=where,
                why=f"it begins with {head[:4]!r}",
                fix="copy the file again",
                code="archive-truncated",
            ) from err
        by_tail = {n.split("/", 1)[-1]: place for n, place in records.items()}
        if "data/0" not in by_tail or "data.pkl" not in by_tail:
            return None
        start, nbytes = by_tail["data.pkl"]
        if nbytes < 0:
            return None
        return by_tail["data/0"][0], self._parse(head[start : start + nbytes], where, name)

    def _parse(self, pickle: bytes, where: str, name: str) -> TensorRef:
        found = self._parsed.get(pickle)
        if found is None:
            loaded = load(pickle, where, persistent=Storages(where), rebuild=CALLS)
            tree = loaded.tree
            if not isinstance(tree, TensorRef):
                raise Unsupported(
                    f"an item of {name} holds no plain tensor",
                    where=where,
                    why=f"it holds {', '.join(sorted(str(g) for g in loaded.globals))[:200]}",
                )
            found = tree
            if len(self._parsed) < 4096:
                self._parsed[pickle] = found
        return found


def _safetensors(name: str, where: str) -> Unsupported:
    return Unsupported(
        f"{name} lies in safetensors inside a .distcp file, and compressed or of another length than its elements",
        where=where,
        fix="save with the default serialization format",
    )


def decoded_prefix(data: bytes, wanted: int, where: str) -> bytes:
    """The first bytes that zstd frames decode to. Damaged where they are no frames."""
    import zstandard

    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data)
    parts: list[bytes] = []
    held = 0
    try:
        while held < wanted:
            got = decoder.read(min(wanted - held, 1 << 20))
            if not got:
                break
            parts.append(got)
            held += len(got)
    except zstandard.ZstdError as err:
        raise Damaged(
            "an item is no zstd frame", where=where, why=str(err), fix="copy the file again", code="archive-truncated"
        ) from err
    return b"".join(parts)


class LazyTable(Sequence[PieceTable]):
    """One tensor's pieces, located when they are first asked for. numbers are the checkpoint's sources, one a chunk."""

    def __init__(self, chunks: Chunks, heads: Heads, numbers: npt.NDArray[np.int32]) -> None:
        self.chunks, self.heads, self.numbers = chunks, heads, numbers
        self._table: PieceTable | None = None
        self._lock = threading.Lock()

    @property
    def pieces(self) -> int:
        """How many pieces there are, without locating them."""
        return len(self.chunks.offset)

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, i: int) -> PieceTable: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PieceTable]: ...
    def __getitem__(self, i: int | slice) -> PieceTable | Sequence[PieceTable]:
        with self._lock:
            if self._table is None:
                self._table = self._located()
        return (self._table,)[i]

    def __iter__(self) -> Iterator[PieceTable]:
        yield self[0]

    def _located(self) -> PieceTable:
        c = self.chunks
        self._require_equal_copies()
        if c.bare:
            return PieceTable(c.shape, packed(c.dtype).itemsize, c.lo, c.size, self.numbers, c.offset)
        n, item = len(c.offset), packed(c.dtype).itemsize
        start = np.zeros(n, np.int64)
        strides = np.empty((n, len(c.shape)), np.int64)
        dense = True
        same: dict[tuple[int, tuple[int, ...]], tuple[TensorRef, tuple[int, ...], bool]] = {}
        for row in range(n):
            size = tuple(c.size[row].tolist())
            if 0 in size:
                strides[row] = dense_strides(size, item)
                continue
            at, ref = self.heads.tensor(c, row)
            known = same.get((id(ref), size))
            if known is None:
                self._agrees(ref, size, row)
                want, have = dense_strides(size, item), tuple(s * item for s in ref.stride)
                is_dense = all(a == b or k == 1 for a, b, k in zip(want, have, size, strict=True))
                known = same[id(ref), size] = (ref, have, is_dense)
            self._is_long_enough(ref, row, at, item)
            start[row] = at + ref.offset * item + (0 if c.codec else int(c.offset[row]))
            strides[row] = known[1]
            dense = dense and known[2]
        return PieceTable(c.shape, item, c.lo, c.size, self.numbers, start, None if dense else strides)

    def _require_equal_copies(self) -> None:
        """Damaged where ranks that wrote the same chunk, each for itself, wrote different values."""
        c = self.chunks
        if c.copies is None:
            return
        files = self.heads.files
        columns = (c.copies.row, c.copies.file, c.copies.offset, c.copies.length)
        for row, file, offset, length in zip(*(col.tolist() for col in columns), strict=True):
            if 0 in c.size[row].tolist():
                continue
            mine = Place(int(c.file[row]), int(c.offset[row]), int(c.length[row]))
            if not same_item(files, mine, Place(file, offset, length), archives=not (c.codec or c.bare)):
                raise Damaged(
                    f"two ranks wrote different values of {c.name}",
                    where=files.names[file],
                    why=f"the chunk at {tuple(c.lo[row].tolist())} is another in {files.names[mine.file]}",
                    fix="which one is right is in no file: --replica first or last says whose is taken",
                    code="replicas-differ",
                )

    def _agrees(self, ref: TensorRef, size: tuple[int, ...], row: int) -> None:
        """The item must be what the index says.

        Torch's own loader does not look, and would cast or leave a hole in silence.
        """
        c, where = self.chunks, self._where(row)
        if ref.dtype.name != c.dtype.name or ref.shape != size:
            raise Damaged(
                f"an item of {c.name} is not what the metadata says",
                where=where,
                why=f"the item is {ref.dtype.name} {ref.shape}, the metadata says {c.dtype.name} {size}",
                fix="copy the checkpoint again",
                code="item-differs",
            )
        if ref.conj or ref.neg:
            raise Unsupported(f"{c.name} is stored with its conjugate or negative bit set", where=where)
        last = ref.offset + sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True))
        if ref.offset < 0 or any(s < 0 for s in ref.stride) or last >= ref.storage.numel:
            raise Damaged(
                f"an item of {c.name} views elements outside its storage",
                where=where,
                why=f"element {last} of {ref.storage.numel}",
                code="storage-size-mismatch",
            )

    def _where(self, row: int) -> str:
        return f"{self.heads.files.names[int(self.chunks.file[row])]}, item at byte {int(self.chunks.offset[row])}"

    def _is_long_enough(self, ref: TensorRef, row: int, at: int, item: int) -> None:
        c = self.chunks
        if not c.codec and at + ref.storage.numel * item > int(c.length[row]):
            raise Damaged(
                f"an item of {c.name} is too short for its data",
                where=self._where(row),
                why=f"{at + ref.storage.numel * item} bytes are needed, the item has {int(c.length[row])}",
                code="data-truncated",
            )


def read_object(item: ByteItem, files: DataFiles) -> tuple[Tree, TorchFile | None]:
    """What an item holds, as a value: its tensors are read. For byte items, and for items of small tensors.

    Small items of equal bytes, such as each parameter's learning rate, are opened once; the file is then None.
    """
    reader = files.get(item.file)
    where = f"{reader.path}, {item.name}"
    if item.offset + item.length > reader.nbytes:
        raise Damaged(
            f"the item {item.name} goes past the end of its file",
            where=where,
            why=f"it should stop at byte {item.offset + item.length}, the file has {reader.nbytes}",
            fix="copy the file again",
            code="data-truncated",
        )
    if item.length > BYTE_ITEM_LIMIT:
        raise Unsupported(
            f"the item {item.name} has {item.length} bytes",
            where=where,
            why=f"objects of up to {BYTE_ITEM_LIMIT} bytes are read",
        )
    data = reader.read(item.offset, item.length)
    known = files.plain.get(data, _UNKNOWN)
    if known is not _UNKNOWN:
        return known, None
    held = HeldBytes(decoded_prefix(data, BYTE_ITEM_LIMIT, where) if item.codec else data, where)
    opened = open_torch(held)
    tree = map_leaves(opened.root, lambda ref, _: read_array(ref, held, OBJECT_TENSOR_LIMIT))
    if len(data) <= HEAD_NBYTES and _is_plain(tree) and not opened.globals:
        files.plain[data] = tree
    return tree, opened


_UNKNOWN = object()


def _is_plain(tree: Tree) -> bool:
    """Whether a value can be shared: nothing in it can be changed."""
    if type(tree) is tuple:
        return all(map(_is_plain, tree))
    return tree is None or isinstance(tree, (bool, int, float, str))
