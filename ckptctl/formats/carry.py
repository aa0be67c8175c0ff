"""Files of a source that a target holds unchanged: each is moved like a tensor of bytes. Nothing is read here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint


@dataclass
class Carried:
    """Files that are carried, with the tensors and sources that a writer gives back for them."""

    source: Checkpoint
    files: list[OutputFile] = field(default_factory=list)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()

    def add(self, path: str, to: str = "") -> None:
        """One file of the source, under the same path unless another is given."""
        nbytes = next(f.nbytes for f in self.source.files if f.path == path)
        number = len(self.source.sources) + len(self.sources)
        key, shape, byte = Key(path, "file"), (nbytes,), BY_NAME["uint8"]
        self.sources = (*self.sources, Source(path))
        self.tensors[key] = Tensor(key, byte, shape, (PieceTable.whole(shape, 1, number, 0),))
        region = Region(key, byte, shape, (0,), shape)
        self.files.append(OutputFile(to or path, lambda: [region]))
