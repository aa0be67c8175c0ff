"""One rank's file of a classic folder while it is read, and how its tensors become parts of whole ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import UnsafeGlobal
from ckptctl.core.tensor import Source
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.collect import Span
from ckptctl.formats.torchfile.read import TorchFile, open_torch

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.values import TensorRef
    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.found import Found
    from ckptctl.formats.megatron.groups import Param
    from ckptctl.formats.megatron.ranks import Rank


@dataclass(frozen=True, slots=True)
class FileAt:
    """Where a rank's file is: a file, or bytes [start, stop) of an archive that holds it under a name."""

    path: Path
    name: str
    start: int = 0
    stop: int | None = None
    beside: Path | None = None
    """The distributed optimizer's file, where there may be one."""
    archive: int = 0
    """Bytes of the archive that it is in, 0 where it is in none."""

    def open(self) -> FileBytes:
        """Its bytes."""
        return FileBytes(self.path, self.start, self.stop, name=self.name)


@dataclass
class RankFile:
    """One rank's file while it is read: its parameters in order, tensors and their shapes by chunk and local name."""

    rank: Rank
    spot: dict[int, model.Spot]
    params: list[Param]
    refs: dict[tuple[int, str], TensorRef]
    shapes: dict[int, dict[str, tuple[int, ...]]]
    opened: TorchFile
    reader: FileBytes
    number: int
    base: int = 0
    """Where the file begins in the source: above 0 in an archive."""

    def span(self, ref: TensorRef) -> Span:
        """The bytes of one of its tensors."""
        return Span(ref, self.number, self.opened, self.reader, self.base)


def opened_file(reader: FileBytes, out: Found, archive: int = 0) -> TorchFile:
    """A file's tree; the file, and what its pickle asks for, are added to what was found.

    archive: bytes of the archive that it is a member of, which is the source of all then.
    """
    opened = open_torch(reader)
    if not archive:
        out.sizes.append((reader.path, reader.nbytes))
    if not archive or not out.sources:
        out.sources.append(Source("" if archive else reader.path))
    out.unsafe += [UnsafeGlobal(reader.path, str(f.name), f.why) for f in opened.unsafe]
    out.unknown.update(str(f.name) for f in opened.unknown)
    out.unsupported += [(f"{reader.path}: {where}", why) for where, why in opened.unsupported]
    return opened


def put(
    name: str, chunk: int, kind: str, span: Span, offset: int, shape: tuple[int, ...], here: RankFile, out: Found
) -> None:
    """A tensor of a rank under its whole name; which further copy it is, where other ranks hold it too."""
    facts, rank = out.facts, here.rank
    for place in model.places(name, shape, here.spot[chunk], here.shapes[chunk]):
        head = _is_copy(place.name, facts)
        tp_rank = here.spot[chunk].cut(place.name)[0]
        # Of the ranks that hold the same part of what is no expert, the first one writes it: its expert-parallel rank.
        holder = rank.tp // facts.etp if facts.etp < facts.tp else 0
        first = not head and (place.cut or tp_rank == 0) and (place.is_expert or rank.ep == holder)
        copy = None if first else (head, -1 if place.cut else rank.tp, -1 if place.is_expert else rank.ep)
        if head:
            place = replace(place, name=model.EMBEDDING)
        alike = (not place.cut and facts.tp > 1) or (not place.is_expert and facts.ep > 1)
        tied = facts.tied and facts.pp > 1 and place.name == model.EMBEDDING
        out.whole.put(place, kind, span, copy, offset=offset, compare=alike or tied)


def whole_names(params: list[Param], here: RankFile, out: Found) -> list[str]:
    """The whole tensors that a rank's parameters are parts of."""
    places = (q for p in params for q in model.places(p.name, p.shape, here.spot[p.chunk], here.shapes[p.chunk]))
    return [model.EMBEDDING if _is_copy(q.name, out.facts) else q.name for q in places]


def _is_copy(name: str, facts: Facts) -> bool:
    """Whether a tensor is the last stage's copy of a tied embedding. One stage has the embedding itself alone."""
    return name == model.HEAD and facts.tied and facts.pp > 1
