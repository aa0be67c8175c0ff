"""Whole tensors put together from ranks' parts, and what ranks hold alike compared. Reads small replicas only."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ckptctl.checksum import crc32
from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key, Piece, PieceTable, Tensor, dense_strides

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from ckptctl.core.dtype import DType
    from ckptctl.core.values import TensorRef
    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.megatron.model import Place, Shape
    from ckptctl.formats.torchfile.read import TorchFile

COMPARED_NBYTES = 1 << 20
"""Replicas without a checksum in their file are read and compared up to this many bytes each."""


class Span:
    """Packed elements in a file: where the bytes of a rank's tensor start, and how to tell them from others'."""

    __slots__ = ("_inner", "dtype", "file", "nbytes", "opened", "reader", "ref", "shape", "start")

    def __init__(self, ref: TensorRef, file: int, opened: TorchFile, reader: ByteSource, base: int = 0) -> None:
        """Base is where the archive starts in the file; reader reads the archive."""
        if ref.stride != dense_strides(ref.shape, 1) and ref.numel > 1:
            raise Unsupported("a tensor's elements do not lie one after another", where=opened.path)
        self.ref, self.file, self.opened, self.reader = ref, file, opened, reader
        self.dtype, self.shape = packed(ref.dtype), ref.shape
        self._inner = ref.storage.start_byte + ref.offset * ref.dtype.itemsize
        self.start = base + self._inner
        self.nbytes = ref.numel * ref.dtype.itemsize

    def crc(self, offset: int = 0, numel: int | None = None, *, large: bool = False) -> int | None:
        """The CRC-32 of elements, by the file's own record where they are all of it; None where they are too many.

        large: then they are read, too.
        """
        item = self.dtype.itemsize
        nbytes = self.nbytes if numel is None else numel * item
        directory = self.opened.directory
        record = directory.record(f"data/{self.ref.storage.key}") if directory is not None else None
        if record is not None and nbytes == record.nbytes == self.nbytes and record.crc:
            return record.crc
        if nbytes > COMPARED_NBYTES and not large:
            return None
        crc, start = 0, self._inner + offset * item
        for at in range(0, nbytes, COMPARED_NBYTES):
            crc = crc32(self.reader.read(start + at, min(COMPARED_NBYTES, nbytes - at)), crc)
        return crc

    def elements(self, first: int, numel: int) -> bytes:
        """The bytes of some of its elements."""
        item = self.dtype.itemsize
        return self.reader.read(self._inner + first * item, numel * item)


class Whole:
    """Tensors by key while ranks' parts are added. take and verify are Hints.replica and .verify_replicas."""

    def __init__(self, take: str = "", verify: bool = False) -> None:
        self.take, self.verify = take, verify
        self._differing: dict[Key, str] = {}
        self._rows: dict[Key, list[Piece]] = {}
        self._again: dict[Key, dict[Hashable, list[Piece]]] = defaultdict(dict)
        self._shapes: dict[Key, tuple[Shape, DType, str]] = {}
        self._crcs: dict[tuple[Key, Shape], tuple[int, str]] = {}
        self.compared = self.uncompared = 0
        """Parts that were compared with another rank's, and those that were too large to be."""

    def put(
        self, place: Place, kind: str, span: Span, copy: Hashable = None, *, offset: int = 0, compare: bool
    ) -> None:
        """A rank's part, at element offset of span. copy: which further copy of the tensor it is of, None: the first.

        Damaged where it contradicts what other ranks say of the tensor: shape, type, or the same elements otherwise.
        """
        key, item = Key(place.name, kind), span.dtype.itemsize
        said = self._shapes.setdefault(key, (place.shape, span.dtype, span.opened.path))
        if said[:2] != (place.shape, span.dtype):
            raise Damaged(
                f"ranks do not agree on {place.name} ({kind})",
                where=span.opened.path,
                why=f"it is {span.dtype.name} {place.shape} here, {said[1].name} {said[0]} in {said[2]}",
                fix="take all ranks' files from one save",
                code="ranks-differ",
            )
        strides = tuple(s * item for s in place.strides)
        start = span.start + (offset + place.offset) * item
        piece = Piece(place.view, place.lo, place.size, span.file, start, strides)
        rows = self._rows.setdefault(key, []) if copy is None else self._again[key].setdefault(copy, [])
        rows.append(piece)
        if compare:
            self._compare(key, place, span, offset)

    def _compare(self, key: Key, place: Place, span: Span, offset: int) -> None:
        numel = 1
        for n in place.size:
            numel *= n
        crc = span.crc(offset, numel, large=self.verify)
        if crc is None:
            self.uncompared += 1
            return
        self.compared += 1
        known, where = self._crcs.setdefault((key, place.lo), (crc, span.opened.path))
        if known != crc and self.take:
            self._differing.setdefault(key, span.opened.path)
        elif known != crc:
            raise Damaged(
                f"{key.name} ({key.kind}) is not the same on all ranks",
                where=span.opened.path,
                why=f"every rank has this tensor, and its bytes differ from those in {where}",
                fix="take all ranks' files from one save; if they are, the run's ranks had drifted apart, and "
                "--replica first or last says whose copies are taken",
                code="replicas-differ",
            )

    def warnings(self) -> list[str]:
        """What there is to say of copies that differ, or were not compared."""
        out = []
        if self._differing:
            key, where = next(iter(self._differing.items()))
            others = f" and {len(self._differing) - 1} more" if len(self._differing) > 1 else ""
            out.append(
                f"{key.name} ({key.kind}){others} differ between ranks, first in {where}: "
                f"the {self.take} rank's copy is taken (--replica)"
            )
        if self.verify:
            out.append(
                f"--verify-replicas: {self.compared} parts that ranks hold alike were compared, {len(self._differing)} "
                "tensors differ"
            )
        if self.uncompared:
            out.append(
                f"{self.uncompared} large tensors that several ranks hold alike were not compared; "
                "--verify-replicas does"
            )
        return out

    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """Each tensor. Damaged where the first copy is not whole: a rank's part is missing."""
        for key, rows in self._rows.items():
            shape, dtype, where = self._shapes[key]
            have, want = sum(p.numel for p in rows), _numel(shape)
            if have > want:
                raise Damaged(
                    f"{key.name} ({key.kind}) has {have} of {want} elements over all ranks: some are there twice",
                    where=where,
                    fix="a rank's file may be another's copy: take all ranks' files from one save",
                    code="ranks-differ",
                )
            if have != want:
                raise Damaged(
                    f"{key.name} ({key.kind}) has {have} of {want} elements over all ranks",
                    where=where,
                    fix="check that every rank's file is there",
                    code="ranks-missing",
                )
            again = [copy for copy in self._again.get(key, {}).values() if sum(p.numel for p in copy) == want]
            if self.take == "last" and again:
                rows, again = again[-1], []
            pieces = (PieceTable.of(rows, dtype.itemsize),)
            replicas = tuple((PieceTable.of(c, dtype.itemsize),) for c in again)
            yield key, Tensor(key, dtype, shape, pieces, replicas, trainable=None)


def _numel(shape: Shape) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
