"""Tensors of a checkpoint inside a larger one: the same pieces, in sources that are numbered on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from ckptctl.core.tensor import Key, PieceTable, Tensor


class _Shifted(Sequence["PieceTable"]):
    """Piece tables whose sources are counted from another number. Nothing is located before it is asked for."""

    def __init__(self, tables: Sequence[PieceTable], first: int) -> None:
        self.tables, self.first = tables, first

    @property
    def pieces(self) -> int:
        """How many pieces there are, without locating them where that is known."""
        counted = getattr(self.tables, "pieces", None)
        return counted if isinstance(counted, int) else sum(map(len, self.tables))

    def __len__(self) -> int:
        return len(self.tables)

    @overload
    def __getitem__(self, i: int) -> PieceTable: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PieceTable]: ...
    def __getitem__(self, i: int | slice) -> PieceTable | Sequence[PieceTable]:
        return tuple(self)[i] if isinstance(i, slice) else self._moved(self.tables[i])

    def __iter__(self) -> Iterator[PieceTable]:
        return map(self._moved, self.tables)

    def _moved(self, table: PieceTable) -> PieceTable:
        return replace(table, source=table.source + self.first)


def shifted(tensor: Tensor, key: Key, first: int) -> Tensor:
    """A tensor under a key, whose sources are counted from first."""
    replicas = tuple(_Shifted(tables, first) for tables in tensor.replicas)
    return replace(tensor, key=key, pieces=_Shifted(tensor.pieces, first), replicas=replicas)
