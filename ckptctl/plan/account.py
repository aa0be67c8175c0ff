"""Where every byte of the source goes: used, dropped with its kind, or a gap (headers, pickles, padding). Pure.

Used bytes are the union of the pieces' stretches, so that tensors that share a storage count once. Tensors that are
dropped
are counted by shape: their pieces need not be located for that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptctl.core.tensor import Ints, Key, PieceTable, Source, Tensor


@dataclass(frozen=True)
class Account:
    """Bytes of the source's files. dropped is by kind; gaps are what no tensor holds."""

    total_nbytes: int
    used_nbytes: int
    dropped_nbytes: Mapping[str, int]
    gap_nbytes: int


def account(
    tensors: Mapping[Key, Tensor],
    sources: Sequence[Source],
    sizes: Mapping[str, int],
    used: Iterable[Key],
    aliases: Iterable[str] = (),
) -> Account:
    """The account of files with these sizes, by path. aliases are names whose bytes are another tensor's.

    Not counted when dropped.
    """
    taken = set(used)
    spans: dict[str, list[tuple[Ints, Ints]]] = {}
    members: dict[int, int] = {}
    for key in taken:
        for table in tensors[key].pieces:
            for number in np.flatnonzero(np.bincount(table.source)).tolist():
                source = sources[number]
                if source.codec:
                    members[number] = (source.stop or sizes.get(source.path, 0)) - source.start
                    continue
                start, stop = _spans(table, np.flatnonzero(table.source == number))
                spans.setdefault(source.path, []).append((start + source.start, stop + source.start))
    other = set(aliases)
    dropped: Counter[str] = Counter()
    for key, tensor in tensors.items():
        if key not in taken and tensor.cast_from is None and not (key.kind == "weight" and key.name in other):
            dropped[key.kind] += tensor.nbytes
    used_nbytes = sum(_union(s) for s in spans.values()) + sum(members.values())
    total = sum(sizes.values())
    return Account(total, used_nbytes, dict(dropped), max(0, total - used_nbytes - sum(dropped.values())))


def _spans(table: PieceTable, rows: npt.NDArray[np.intp]) -> tuple[Ints, Ints]:
    """First byte and one past the last of each row.

    Rows with gaps between their elements count whole, those without elements not.
    """
    size, start = table.size[rows], table.start[rows]
    if not table.view:
        return start, start + table.itemsize
    full = (size > 0).all(axis=1)
    size, start = size[full], start[full]
    if table.strides is None:
        return start, start + size.prod(axis=1) * table.itemsize
    strides = table.strides[rows][full]
    return start, start + ((size - 1) * strides).sum(axis=1) + table.itemsize


def _union(spans: list[tuple[Ints, Ints]]) -> int:
    start = np.concatenate([s for s, _ in spans])
    stop = np.concatenate([s for _, s in spans])
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    before = np.concatenate([start[:1], reach[:-1]])
    return int(np.maximum(0, reach - np.maximum(start, before)).sum())
