"""Tensors, their pieces, and the parts that make one of others. Offsets and strides count bytes. No bytes are here.

A piece is a box of a *view* (a row-major factorisation of the tensor's shape) with one byte stride a view axis: row and
column shards, flat ZeRO runs, QKV groups, rotary order and Conv1D are all pieces. Pieces are kept as columns: a million
Piece objects would cost half a gigabyte, a million rows of a PieceTable about 50 MB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptctl.core.dtype import DType

Ints = npt.NDArray[np.int64]


class Key(NamedTuple):
    """What a tensor is called, and which of the parameter's states it is.

    kind is the framework's own word: weight, master, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, sum, ema,
    buffer, other, ... part is "" or "padding" (rows beyond the true vocabulary).
    """

    name: str
    kind: str = "weight"
    part: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes that pieces lie in: a file (relative to the checkpoint), or its bytes [start, stop) once decoded by codec.

    codec is "" (offsets count from start of the file's range), or "zstd" (the range is one or several frames; offsets
    count in what they decode to, decoded_nbytes long, -1 where the frames do not say).
    """

    path: str
    start: int = 0
    stop: int | None = None
    codec: str = ""
    decoded_nbytes: int = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Some elements of one tensor, and the bytes that hold them.

    The element at lo + x of view (0 <= x < size, axis by axis) is at byte start + sum(strides * x) of source (an index
    into the checkpoint's sources). 0-d tensors have view ().
    """

    view: tuple[int, ...]
    lo: tuple[int, ...]
    size: tuple[int, ...]
    source: int
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.size)


def dense_strides(size: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Strides of a packed row-major array of that size, in units of item."""
    out, step = [0] * len(size), item
    for axis in range(len(size) - 1, -1, -1):
        out[axis] = step
        step *= size[axis]
    return tuple(out)


@dataclass(frozen=True, eq=False, slots=True)
class PieceTable:
    """Pieces of one tensor over one view, as columns: a sequence of Piece, made on demand.

    lo and size are (n, k) for a view of k axes, source and start are (n,), strides (n, k) in bytes or None where each
    box is packed row-major.
    """

    view: tuple[int, ...]
    itemsize: int
    lo: Ints
    size: Ints
    source: npt.NDArray[np.int32]
    start: Ints
    strides: Ints | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, row: int) -> Piece:
        lo, size = tuple(self.lo[row].tolist()), tuple(self.size[row].tolist())
        strides = dense_strides(size, self.itemsize) if self.strides is None else tuple(self.strides[row].tolist())
        return Piece(self.view, lo, size, int(self.source[row]), int(self.start[row]), strides)

    def __iter__(self) -> Iterator[Piece]:
        return (self[row] for row in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Memory of the columns."""
        columns = (self.lo, self.size, self.source, self.start, self.strides)
        return sum(c.nbytes for c in columns if c is not None)

    @staticmethod
    def of(pieces: Iterable[Piece], itemsize: int) -> PieceTable:
        """A table of pieces that share one view. ValueError where they do not, or there are none."""
        rows = list(pieces)
        if not rows or any(p.view != rows[0].view for p in rows):
            raise ValueError("a table needs pieces of one view")
        k = len(rows[0].view)
        cols = [
            np.array([getattr(p, c) for p in rows], dtype=np.int64).reshape(len(rows), k)
            for c in ("lo", "size", "strides")
        ]
        source = np.array([p.source for p in rows], dtype=np.int32)
        start = np.array([p.start for p in rows], dtype=np.int64)
        return PieceTable(rows[0].view, itemsize, cols[0], cols[1], source, start, cols[2])

    @staticmethod
    def whole(
        shape: tuple[int, ...], itemsize: int, source: int, start: int, strides: tuple[int, ...] | None = None
    ) -> PieceTable:
        """The one piece of a tensor that lies in one place; strides are bytes, packed row-major by default."""
        if strides is None:
            strides = dense_strides(shape, itemsize)
        return PieceTable.of([Piece(shape, (0,) * len(shape), shape, source, start, strides)], itemsize)


class InOnePlace(Sequence[PieceTable]):
    """The pieces of a tensor that lies packed in one place, as four numbers: its table is made when it is asked for.

    A file may list hundreds of thousands of tensors, of which a command looks at few; a table takes over a kilobyte.
    """

    __slots__ = ("itemsize", "shape", "source", "start")
    pieces = 1
    """How many pieces there are."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, source: int, start: int) -> None:
        self.shape, self.itemsize, self.source, self.start = shape, itemsize, source, start

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, i: int) -> PieceTable: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PieceTable]: ...
    def __getitem__(self, i: int | slice) -> PieceTable | Sequence[PieceTable]:
        return (PieceTable.whole(self.shape, self.itemsize, self.source, self.start),)[i]


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """One logical tensor: what it is and where its elements lie.

    pieces tile it exactly once (tables may have different views). replicas hold the same elements again elsewhere: each
    is a full set of tables. why_unsupported is the reason why its bytes cannot be moved (sparse, quantized), "" where
    they can.
    """

    key: Key
    dtype: DType
    shape: tuple[int, ...]
    pieces: Sequence[PieceTable]
    replicas: tuple[Sequence[PieceTable], ...] = ()
    trainable: bool | None = None
    why_unsupported: str = ""
    logical: tuple[int, ...] | None = None
    """The shape a header shows where elements are less than a byte; dtype is then core.dtype.packed, shape (bytes,)."""
    made: Sum | None = None
    """How its elements are computed from stored tensors; pieces is then empty, and dtype what they are rounded to."""
    cast_from: DType | None = None
    """The type of the elements that the pieces hold, where it is not dtype: a weight of which only the float32 master
    is stored (ZeRO-3) has the run's dtype, and its values are a cast away."""

    @property
    def held(self) -> DType:
        """The type of its elements as they lie in the files."""
        return self.cast_from or self.dtype

    @property
    def shown(self) -> tuple[int, ...]:
        """The shape in elements, as a header or a person wants it."""
        return self.shape if self.logical is None else self.logical

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors whose pieces hold what it is made of: itself, or those of its sum."""
        if self.made is None:
            return (self,)
        return (self.made.base, *(t for p in self.made.products for t in (p.left, p.right)))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, packed."""
        return self.dtype.nbytes(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """scale * (left @ right): what an adapter adds to a weight (rows, columns).

    left is (rows, rank), stored as (rank, rows) where turned; right is (rank, columns), stored as (columns, rank) where
    turned.
    """

    left: Tensor
    right: Tensor
    left_turned: bool
    right_turned: bool
    rank: int
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class Sum:
    """A base of the sum's own shape, and products that are added to it in order; rounded once, at the end."""

    base: Tensor
    products: tuple[Product, ...] = ()


def with_operands(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Tensors, and those that their sums are made of."""
    return {**tensors, **{t.key: t for tensor in tensors.values() if tensor.made for t in tensor.stored}}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a native tensor that is a box of a hub tensor, axis for axis up to an order of axes.

    Native element native_lo + x (0 <= x < size, in native_view) is hub element hub_lo + y (in hub_view), where
    y[axes[i]] = x[i]. Both views have as many axes. Example: k in Megatron's fused QKV of G groups, m query heads each:
    native_view (G, m + 2, d, h), native_lo (0, m, 0, 0), size (G, 1, d, h); hub_view (G, 1, d, h), hub_lo (0, 0, 0, 0),
    axes (0, 1, 2, 3).
    """

    hub: Key
    native_view: tuple[int, ...]
    native_lo: tuple[int, ...]
    size: tuple[int, ...]
    hub_view: tuple[int, ...]
    hub_lo: tuple[int, ...]
    axes: tuple[int, ...]
