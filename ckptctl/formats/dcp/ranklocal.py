"""Folders that ranks saved each by itself (`use_collectives=False`): one `__R.metadata` a rank, joined to one index.

Each rank's metadata lists that rank's chunks only, and whatever every rank has (steps, settings, replicas) is in all of
them. torch's own loader looks at the file of its own rank only, and at another number of ranks loads a part in silence.
Source: torch 2.13.0, distributed/checkpoint/filesystem.py, _get_metadata_path; state_dict_saver.py, use_collectives.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged, MissingFile
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, Copies, Index, read_index

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.tensor import Ints

RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"__(\d+)_\d+\.distcp")


def ranks_of(folder: Path) -> dict[int, Path]:
    """The ranks' metadata files by rank, in rising order; empty where the folder has none."""
    found = {int(m[1]): p for p in folder.glob("__*.metadata") if (m := RANK_METADATA.fullmatch(p.name))}
    return dict(sorted(found.items()))


def read_ranks(folder: Path, take: str = "") -> tuple[Index, dict[str, int]]:
    """The joined index, and the metadata files by name with their bytes. take is Hints.replica.

    MissingFile where a rank wrote data and its metadata is not there; Damaged where ranks contradict each other.
    """
    files = ranks_of(folder)
    data = {int(m[1]) for p in folder.glob("__*_*.distcp") if (m := _DATA.fullmatch(p.name))}
    lost = sorted(set(range(max(data | set(files), default=-1) + 1)) - set(files))
    if lost:
        raise MissingFile(
            f"__{lost[0]}.metadata is missing",
            where=str(folder),
            why=f"each of {max(data | set(files)) + 1} ranks wrote one (use_collectives=False)",
            fix="copy it; without it the chunks of that rank cannot be found",
        )
    out = Index()
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for path in reversed(files.values()) if take == "last" else files.values():
        with FileBytes(path, name=path.name) as reader:
            index, sizes[path.name] = read_index(reader), reader.nbytes
        local = np.array([numbers.setdefault(name, len(numbers)) for name in index.files], np.int32)
        for name, item in index.items.items():
            moved = (
                replace(item, file=local[item.file])
                if isinstance(item, Chunks)
                else replace(item, file=int(local[item.file]))
            )
            mine = out.items.get(name)
            out.items[name] = moved if mine is None else _joined(mine, moved, origin[name], path.name)
            origin.setdefault(name, path.name)
            if out.paths.setdefault(name, index.paths.get(name, (name,))) != index.paths.get(name, (name,)):
                raise _differ(name, "its path", origin[name], path.name)
        out.unsafe += [replace(u, file=path.name) for u in index.unsafe]
        out.warnings += index.warnings
        if not index.paths:
            out.paths.clear()
    out.files = list(numbers)
    out.items = {n: _once(i) if isinstance(i, Chunks) else i for n, i in out.items.items()}
    if take:
        out.items = {n: _alone(i) for n, i in out.items.items()}
        out.warnings.append(f"what several ranks wrote is the {take} rank's, and was not compared (--replica)")
    return out, sizes


def _differ(name: str, what: str, a: str, b: str) -> Damaged:
    return Damaged(
        f"two ranks disagree about {name}",
        where=b,
        why=f"{what} is another in {a}",
        fix="remove what is left of an earlier save, or copy the folder again",
        code="metadata-damaged",
    )


def _joined(a: Chunks | ByteItem, b: Chunks | ByteItem, first: str, where: str) -> Chunks | ByteItem:
    """One rank's entry of a name added to those of ranks before."""
    if isinstance(a, ByteItem) and isinstance(b, ByteItem):
        return replace(a, copies=(*a.copies, replace(b, copies=())))
    if not isinstance(a, Chunks) or not isinstance(b, Chunks):
        raise _differ(a.name, "its kind (tensor or object)", first, where)
    if a.dtype.name != b.dtype.name or a.shape != b.shape:
        raise _differ(a.name, "type or shape", first, where)
    if a.codec != b.codec and len(a.offset) and len(b.offset):
        raise _differ(a.name, "the encoding", first, where)
    return replace(
        a,
        lo=np.concatenate([a.lo, b.lo]),
        size=np.concatenate([a.size, b.size]),
        file=np.concatenate([a.file, b.file]),
        offset=np.concatenate([a.offset, b.offset]),
        length=np.concatenate([a.length, b.length]),
        codec=a.codec or b.codec,
    )


def _once(c: Chunks) -> Chunks:
    """Each box once, as the lowest rank has it; the others' are copies, to be compared before the first one is used."""
    boxes = np.concatenate([c.lo, c.size], axis=1) if c.lo.shape[1] else np.zeros((len(c.offset), 1), np.int64)
    _, first, inverse = np.unique(boxes, axis=0, return_index=True, return_inverse=True)
    if len(first) == len(boxes):
        return c
    keep = np.sort(first)
    at: Ints = np.asarray(np.searchsorted(keep, first), np.int64)
    row_of = at[inverse.reshape(-1)]
    extra = np.setdiff1d(np.arange(len(boxes)), keep)

    def columns(rows: Ints) -> tuple[Ints, ...]:
        return c.file[rows].astype(np.int64), c.offset[rows], c.length[rows]

    copies = Copies(row_of[extra], *columns(extra))
    return replace(
        c,
        lo=c.lo[keep],
        size=c.size[keep],
        file=c.file[keep],
        offset=c.offset[keep],
        length=c.length[keep],
        copies=copies,
    )


def _alone(item: Chunks | ByteItem) -> Chunks | ByteItem:
    """An item without what other ranks wrote of it."""
    return replace(item, copies=None) if isinstance(item, Chunks) else replace(item, copies=())


def is_rank_local(folder: Path) -> bool:
    """Whether a folder has ranks' metadata and no common one."""
    return not (folder / NAME).is_file() and bool(ranks_of(folder))
