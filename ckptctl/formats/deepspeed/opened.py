"""The torch files of a DeepSpeed checkpoint, opened one after another: their trees, and what is gathered from all.

No tensor data is read but of single numbers.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import File, UnsafeGlobal
from ckptctl.core.errors import Damaged, MissingFile
from ckptctl.core.tensor import Key, Source, Tensor, dense_strides
from ckptctl.core.values import Array, Record, TensorRef, Tree
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.deepspeed.folder import rank_of
from ckptctl.formats.deepspeed.layout import Flat
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchtensor import read_array, tensor_of, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckptctl.core.dtype import DType


@dataclass
class Opened:
    """One file: path from the root, its number among the sources, and its tree. Its reader closes with the context."""

    path: str
    number: int
    root: Tree
    reader: FileBytes
    pile: Pile

    def tensor(self, key: Key, ref: TensorRef) -> Tensor:
        """A tensor of it."""
        return tensor_of(key, ref, self.number)

    def array(self, ref: TensorRef) -> Array:
        """A small tensor's values."""
        return read_array(ref, self.reader)

    def value(self, name: str, tree: Tree) -> Tree:
        """A value, with small tensors read; larger ones become tensors of kind other."""
        return value_of(tree, name, self.reader, self.pile.held, self.number)

    def flat(self, ref: Tree, what: str) -> tuple[Flat, DType]:
        """Where a flat tensor lies. Damaged for what is none."""
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or (ref.numel > 1 and ref.stride != (1,)):
            shape = f"shape {ref.shape}, strides {ref.stride}" if isinstance(ref, TensorRef) else type(ref).__name__
            raise Damaged(f"{what} is no flat tensor", where=self.path, why=shape, code="zero-layout")
        start = ref.storage.start_byte + ref.offset * ref.dtype.itemsize
        return Flat(self.number, start, ref.numel), ref.dtype

    def mapping(self, tree: Tree, what: str) -> Mapping[Tree, Tree]:
        """The tree, which must be a dict: Damaged otherwise."""
        if not isinstance(tree, dict):
            kind = tree.cls if isinstance(tree, Record) else type(tree).__name__
            raise Damaged(f"{what} is no dict", where=self.path, why=f"it is {kind or 'an object'}", code="zero-layout")
        return tree


@dataclass
class Pile:
    """All files of a checkpoint: sources in the order they were opened, and what their pickles name."""

    root: Path
    sources: list[Source] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    held: dict[Key, Tensor] = field(default_factory=dict)
    """Large tensors among the values."""

    @contextmanager
    def open(self, path: str) -> Iterator[Opened]:
        """A torch file by its path from the root. MissingFile where it is not there."""
        file = self.root / path
        if not file.is_file():
            raise MissingFile(f"{path} is not there", where=str(self.root), fix="copy it from where the run saved it")
        with FileBytes(file, name=path) as reader:
            opened = open_torch(reader)
            number = len(self.sources)
            self.sources.append(Source(path))
            if path not in self.files:
                self.files[path] = File(path, reader.nbytes)
                self.unsafe += [UnsafeGlobal(path, str(f.name), f.why) for f in opened.unsafe]
                self.unknown.update(dict.fromkeys(str(f.name) for f in opened.unknown))
                self.unsupported += [(f"{path}: {where}", why) for where, why in opened.unsupported]
            if opened.directory is not None:
                _require_own_name(path, opened.directory.root)
            yield Opened(path, number, opened.root, reader, self)


def _require_own_name(path: str, saved_as: str) -> None:
    """Damaged where an archive was saved under another rank's name: often nothing else in it says whose it is.

    Source: torch.save names the archive's folder after the file. What says no rank ("archive") tells nothing.
    """
    here, saved = rank_of(path.rpartition("/")[2]), rank_of(f"{saved_as}.pt")
    if here is None or saved is None or here[0] != saved[0] or here == saved:
        return
    mine, other = next((a, b) for a, b in zip(here[1], saved[1], strict=True) if a != b)
    raise Damaged(
        f"the {here[0]} of rank {mine} holds the piece of rank {other}",
        where=path,
        why=f"it was saved as {saved_as}.pt, by the name inside the archive",
        fix="give the files back their ranks' names, or copy the step again",
        code="mixed-saves",
    )


def whole_number(value: Tree) -> int | None:
    """An int, also one that is an enum's or a torch.Size's; None for anything else."""
    if isinstance(value, Record) and value.cls.endswith("ZeroStageEnum") and isinstance(value.args, tuple):
        value = value.args[0] if len(value.args) == 1 else None
    return value if type(value) is int else None


def plain_object(tree: Tree) -> Tree:
    """A loss scaler as a dict of its attributes, with its class: what every target can hold. Others as they are."""
    if (
        isinstance(tree, Record)
        and tree.cls.startswith("deepspeed.")
        and isinstance(tree.state, dict)
        and not tree.args
    ):
        return {"class": tree.cls, **tree.state}
    return tree


def dense(ref: TensorRef) -> bool:
    """Whether its elements lie packed, row-major."""
    return ref.stride == dense_strides(ref.shape, 1)
