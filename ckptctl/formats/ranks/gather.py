"""One tensor out of what many ranks hold of it: boxes as rows of integers, and the copies among them.

Nothing is read here. A row costs about a hundred bytes, whatever the number of ranks.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Ints, Piece, PieceTable, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.tensor import Key
    from ckptctl.formats.ranks.slices import Slice

_FIXED = 4
"""Columns before the boxes: rank, file, first byte, checksum (-1 where none)."""


class Copy(NamedTuple):
    """Two places that should hold the same elements: rows of `Gathered.columns`."""

    first: int
    again: int


class Gathered:
    """A tensor of the set. how is that of its slices, or "flat"; sizes are the elements that each rank has.

    is_cut tells plain tensors of different shapes under one name: fragments of a flat parameter. way is each rank's
    place among the `ways` that the tensor is cut into.
    """

    def __init__(self, name: str, first: Slice) -> None:
        self.name, self.dtype, self.how, self.axes, self.ways = name, first.dtype, first.how, first.axes, first.ways
        self.shape: tuple[int, ...] = first.shape
        self.final = first.shape
        """The tensor's shape, where shape is that of the flat run it is kept as."""
        self.is_cut = False
        self.trainable, self.why = first.trainable, ""
        self.sizes: dict[int, int] = {}
        self.way: dict[int, int] = {}
        self.rows = array("q")

    @property
    def numel(self) -> int:
        """Elements of all ranks together, copies too."""
        return sum(self.sizes.values())

    def add(self, part_of: Slice, rank: int, where: str) -> None:
        """What one more rank holds. Damaged where its file tells another tensor under the same name."""
        self._require_alike(part_of, rank, where)
        self.sizes[rank] = sum(math.prod(p.size) for p in part_of.parts)
        self.way[rank] = part_of.way
        item = part_of.dtype.itemsize
        for p in part_of.parts:
            if p.ref.conj or p.ref.neg:
                self.why = "its conjugate or negative bit is set: the stored bytes are before it"
            start = p.ref.storage.start_byte + p.ref.offset * item
            self.rows.extend((rank, part_of.file, start, p.crc, *p.lo, *p.size, *(s * item for s in p.ref.stride)))

    def _require_alike(self, other: Slice, rank: int, where: str) -> None:
        if (other.how, other.dtype.name, len(other.shape)) != (self.how, self.dtype.name, len(self.shape)):
            first = next(iter(self.sizes), rank)
            raise Damaged(
                f"{self.name} is another tensor on rank {rank} than on rank {first}",
                where=where,
                why=f"{self.how} of {self.dtype.name}, shape {self.shape}, and {other.how} of {other.dtype.name}, "
                f"shape {other.shape}",
                fix="check that the files are of one run and one step",
                code="ranks-differ",
            )
        if other.shape != self.shape:
            if self.how != "plain":
                raise Damaged(
                    f"{self.name} has another shape on rank {rank}",
                    where=where,
                    why=f"{self.shape} on rank {next(iter(self.sizes), rank)}, {other.shape} here",
                    fix="check that the files are of one run and one step",
                    code="ranks-differ",
                )
            self.is_cut = True

    @property
    def columns(self) -> Ints:
        """(rows, 4 + 3 k): rank, file, start, checksum; lo, size and strides (bytes) by axis. No empty boxes."""
        k = len(self.shape)
        table: Ints = np.frombuffer(self.rows, np.int64).reshape(-1, _FIXED + 3 * k)
        return table[(table[:, _FIXED + k : _FIXED + 2 * k] > 0).all(axis=1)] if k else table

    def by_rows(self) -> bool:
        """Whether every part has whole rows: it is cut on axis 0 alone."""
        k = len(self.shape)
        sizes = self.columns[:, _FIXED + k + 1 : _FIXED + 2 * k]
        return bool((sizes == np.array(self.shape[1:], np.int64)).all())

    def place(self) -> tuple[object, ...]:
        """What two tensors share that are one: the same bytes on every rank, seen the same way. () for empty ones."""
        return (self.dtype.name, self.shape, self.final, self.rows.tobytes()) if self.numel else ()

    def tensor(self, key: Key, where: str) -> tuple[Tensor, list[Copy]]:
        """The tensor, and which places hold the same elements. Damaged where ranks together do not hold all of it."""
        columns, k = self.columns, len(self.shape)
        itemsize = self.dtype.itemsize
        if not math.prod(self.shape):
            strides = (0,) * k
            table = PieceTable.of([Piece(self.shape, (0,) * k, self.shape, self._any_file(), 0, strides)], itemsize)
            return Tensor(key, packed(self.dtype), self.final, (table,), trainable=self.trainable), []
        boxes = columns[:, _FIXED : _FIXED + 2 * k]
        first, turn = _turns(boxes)
        unique = np.flatnonzero(turn == 0)
        held = int(boxes[unique, k:].prod(axis=1).sum()) if k else len(unique)
        if held != math.prod(self.shape):
            raise Damaged(
                f"{key.name} ({key.kind}) is not whole",
                where=where,
                why=f"the ranks' files hold {held} elements of it, its shape {self.shape} has {math.prod(self.shape)}",
                fix="copy the missing files of the checkpoint",
                code="tensor-incomplete",
            )
        replicas = []
        latest: dict[int, int] = {}
        for number in range(1, int(turn.max(initial=0)) + 1):
            latest |= dict(zip(first[turn == number].tolist(), np.flatnonzero(turn == number).tolist(), strict=True))
            rows = np.array([latest.get(row, row) for row in unique.tolist()])
            replicas.append((self._table(columns[rows]),))
        copies = [Copy(int(first[row]), row) for row in np.flatnonzero(turn > 0).tolist()]
        pieces = (self._table(columns[unique]),)
        made = Tensor(
            key,
            packed(self.dtype),
            self.final,
            pieces,
            tuple(replicas),
            trainable=self.trainable,
            why_unsupported=self.why,
        )
        return made, copies

    def _any_file(self) -> int:
        k = len(self.shape)
        return int(np.frombuffer(self.rows, np.int64).reshape(-1, _FIXED + 3 * k)[0, 1]) if self.rows else 0

    def _table(self, rows: Ints) -> PieceTable:
        k = len(self.shape)
        lo, size, strides = (np.ascontiguousarray(rows[:, _FIXED + i * k : _FIXED + (i + 1) * k]) for i in range(3))
        return PieceTable(
            self.shape, self.dtype.itemsize, lo, size, rows[:, 1].astype(np.int32), rows[:, 2].copy(), strides
        )

    def laid(self, way: Mapping[int, int], each: int | None, where: str) -> Gathered:
        """The one-dimensional parts of all ranks as one flat run: way gives each rank's place in it.

        each is how many elements every place has; None where they follow one another with the sizes they have. Ranks
        of one place hold copies. Damaged where those differ in size, or a place has another size than each.
        """
        sizes: dict[int, int] = {}
        for rank, n in self.sizes.items():
            if sizes.setdefault(way[rank], n) != n or (each is not None and n != each):
                raise Damaged(
                    f"{self.name} has a part of another size on rank {rank}",
                    where=where,
                    why=f"{n} elements, {each if each is not None else sizes[way[rank]]} are wanted",
                    fix="check that the files are of one run and one step",
                    code="ranks-differ",
                )
        begins, at = {}, 0
        for place in sorted(sizes):
            begins[place] = at if each is None else each * place
            at += sizes[place]
        rows = self.columns.copy()
        if len(rows) and (rows.shape[1] != _FIXED + 3 or (rows[:, 6] != self.dtype.itemsize)[rows[:, 5] > 1].any()):
            raise Damaged(f"{self.name} is no packed run of elements", where=where, code="ranks-differ")
        if len(rows):
            rows[:, 4] = np.array([begins[way[rank]] for rank in rows[:, 0].tolist()])
        return self._like((at if each is None else each * (max(sizes, default=-1) + 1),), rows, self.name)

    def part(self, name: str, start: int, stop: int, shape: tuple[int, ...]) -> Gathered:
        """Elements [start, stop) of a flat run as a tensor of that shape, of as many elements."""
        rows = self.columns
        lo = np.maximum(rows[:, 4], start)
        size = np.minimum(rows[:, 4] + rows[:, 5], stop) - lo
        kept = size > 0
        cut = rows[kept].copy()
        lo, size = lo[kept], size[kept]
        cut[:, 2] += (lo - cut[:, 4]) * self.dtype.itemsize
        cut[size != cut[:, 5], 3] = -1  # a checksum is of the whole run
        cut[:, 4], cut[:, 5] = lo - start, size
        out = self._like((stop - start,), cut, name)
        out.final = shape
        return out

    def _like(self, shape: tuple[int, ...], rows: Ints, name: str) -> Gathered:
        out = Gathered.__new__(Gathered)
        out.name, out.dtype, out.how, out.axes, out.ways = name, self.dtype, "flat", self.axes, self.ways
        out.shape, out.final, out.is_cut, out.trainable, out.why = shape, shape, False, self.trainable, self.why
        out.sizes, out.way = dict(self.sizes), dict(self.way)
        out.rows = array("q", rows.astype(np.int64).tobytes())
        return out


def aliases(model: Mapping[str, Gathered]) -> dict[str, str]:
    """Names of tensors that are an earlier one on every rank, and which: tied weights over one storage."""
    seen: dict[tuple[object, ...], str] = {}
    out = {}
    for name, gathered in model.items():
        place = gathered.place()
        if place and seen.setdefault(place, name) != name:
            out[name] = seen[place]
    return out


def _turns(boxes: Ints) -> tuple[Ints, Ints]:
    """For each row, the first row with the same box, and how many rows with it came before this one."""
    n = len(boxes)
    if not boxes.shape[1]:
        return np.zeros(n, np.int64), np.arange(n)
    order = np.lexsort(boxes.T[::-1])
    same = np.zeros(n, bool)
    same[1:] = (boxes[order][1:] == boxes[order][:-1]).all(axis=1)
    begin = np.maximum.accumulate(np.where(same, 0, np.arange(n)))
    first, turn = np.empty(n, np.int64), np.empty(n, np.int64)
    first[order], turn[order] = order[begin], np.arange(n) - begin
    return first, turn
