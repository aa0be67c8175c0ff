"""Reads a DCP folder: FSDP2, HSDP, FSDP with TP, one process, compressed or not.

Reads `.metadata`, byte items and heads of items; no tensor data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.checkpoint import (
    EMA,
    Checkpoint,
    Entry,
    File,
    Optimizer,
    PathKey,
    UnsafeGlobal,
)
from ckptctl.core.dtype import DType, packed
from ckptctl.core.errors import CkptError, Damaged, Unrecognised, Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import Array, Held, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.datafiles import DataFiles
from ckptctl.formats.dcp.blobs import place
from ckptctl.formats.dcp.copies import Place, same_item
from ckptctl.formats.dcp.items import Heads, LazyTable, read_object
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, Index, read_index
from ckptctl.formats.dcp.paths import is_setting, nested, setting_name, without_paths
from ckptctl.formats.dcp.ranklocal import RANK_METADATA, is_rank_local, ranks_of, read_ranks
from ckptctl.formats.parameters import named_states
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.state import Found, config_in, counted, find, number
from ckptctl.formats.torchtensor import VALUE_LIMIT
from ckptctl.formats.wrapping import unwrapped
from ckptctl.names import looks_like_torchtitan

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANK_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A tensor of the index, in the nested tree."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


def detect(path: Path) -> Evidence | None:
    """A folder with a `.metadata` file or one a rank, or one of its files. Unrecognised for a data file by itself."""
    is_data = path.suffix == ".distcp" and path.is_file()
    if is_data or ((path.name == NAME or RANK_METADATA.fullmatch(path.name)) and path.is_file()):
        file, path = path, path.parent
        if is_data and not (path / NAME).is_file() and not ranks_of(path):
            raise Unrecognised(
                f"{file.name} is a data file of a distributed checkpoint, and the others are not there",
                where=str(file),
                why=f"what is in it, and where, stands in {NAME}, which would be beside it",
                fix="give the whole folder",
            )
    if path.is_dir() and (path / NAME).is_file():
        return Evidence("dcp", f"it holds {NAME}", path)
    if path.is_dir() and (ranks := ranks_of(path)):
        return Evidence("dcp", f"it holds {next(iter(ranks.values())).name}, one metadata a rank", path)
    return None


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a DCP folder. Damaged where index and files disagree as far as heads tell."""
    folder = _Folder(path, hints.replica)
    found = find(folder.nested(), lambda tree: isinstance(tree, Leaf), averages=True)
    for name, leaf in found.model.items():
        folder.add(Key(name), leaf)
    for name, leaf in found.ema.items():
        folder.add(Key(name, EMA), leaf)
    optimizer = folder.optimizer(found, hints) if found.has_optimizer else None
    rest = {name: folder.value(name, tree) for name, tree in found.rest.items()}
    model_values = {name: folder.value(f"model.{name}", tree) for name, tree in found.model_values.items()}
    folder.require_equal_objects(found)
    return Checkpoint(
        "dcp",
        _variant(folder, found),
        str(path),
        tuple(folder.sources),
        folder.tensors,
        optimizer,
        rest,
        model_values,
        facts=config_in(rest, path.name),
        layout=folder.layout(),
        step=folder.step(rest, found),
        files=folder.sizes(),
        entries=folder.entries(),
        unsafe=tuple(folder.unsafe),
        unknown_globals=tuple(sorted(folder.unknown)),
        warnings=(*folder.index.warnings, *unwrapped(found)),
        gap_reason="archives' headers, pickles and directories; byte items",
    )


def _variant(folder: _Folder, found: Found) -> str:
    return "torchtitan" if looks_like_torchtitan(found.model) else folder.variant()


class _Folder:
    """One folder while it is read: its index, its files, and the tensors found so far."""

    def __init__(self, path: Path, take: str) -> None:
        self.path = path
        self.index, self.metadata_nbytes = _index_of(path, take)
        self.files = DataFiles(path, self.index.files)
        self.heads = Heads(self.files)
        self.has_blobs = place(self.index, self.files)
        self.sources = [Source(name) for name in self.index.files]
        self.tensors: dict[Key, Tensor] = {}
        self.keys: dict[str, Key] = {}
        self.unsafe: list[UnsafeGlobal] = list(self.index.unsafe)
        self.unknown: set[str] = set()
        self.differing: dict[str, str] = {}
        self._require_apart()
        self.leaves = {n: Leaf(n, c.dtype, c.shape) for n, c in self.index.items.items() if isinstance(c, Chunks)}
        self.values = {n: self._object(item) for n, item in self.index.items.items() if isinstance(item, ByteItem)}

    def _require_apart(self) -> None:
        """Damaged where two items share bytes: one of them is then not what it is said to be.

        Chunks without elements are left out: those of several ranks stand under one key, so that all get the last's.
        """
        cut = [(c, (c.size > 0).all(axis=1)) for c in self.index.items.values() if isinstance(c, Chunks)]
        whole = [c for c in self.index.items.values() if isinstance(c, ByteItem)]
        columns = [
            np.concatenate(
                [*(getattr(c, name)[held] for c, held in cut), np.array([getattr(c, name) for c in whole], np.int64)]
            )
            for name in ("file", "offset", "length")
        ]
        order = np.lexsort((columns[1], columns[0]))
        file, offset, length = (c[order] for c in columns)
        meet = (file[1:] == file[:-1]) & (offset[:-1] + length[:-1] > offset[1:]) & (length[1:] > 0)
        for row in np.flatnonzero(meet).tolist():
            raise Damaged(
                "two items of the metadata share bytes of a file",
                where=self.index.files[int(file[row])],
                why=f"one is at bytes {offset[row]} to {offset[row] + length[row]}, another from {offset[row + 1]} on",
                fix="copy the metadata again",
                code="overlap",
            )

    def variant(self) -> str:
        """How the folder differs from what torch writes by default, in words."""
        return " ".join(
            word
            for word, is_so in (
                ("rank-local", NAME not in self.metadata_nbytes),
                ("safetensors", self.has_blobs),
                ("zstd", any(c.codec for c in self.index.items.values())),
            )
            if is_so
        )

    def _object(self, item: ByteItem) -> Tree:
        tree, opened = read_object(item, self.files)
        for copy in item.copies:
            if not self._is_same(item, tree, copy):
                self.differing.setdefault(item.name, self.files.names[copy.file])
        if opened is None:
            return tree
        self.unsafe += [
            UnsafeGlobal(f"{self.files.names[item.file]} ({item.name})", str(f.name), f.why) for f in opened.unsafe
        ]
        self.unknown.update(str(f.name) for f in opened.unknown)
        return tree

    def _is_same(self, item: ByteItem, tree: Tree, copy: ByteItem) -> bool:
        """Whether another rank wrote the same object."""
        a, b = (Place(i.file, i.offset, i.length) for i in (item, copy))
        if same_item(self.files, a, b, archives=False):
            return True
        other, opened = read_object(copy, self.files)
        if opened is not None:
            self.unsafe += [
                UnsafeGlobal(f"{self.files.names[copy.file]} ({item.name})", str(f.name), f.why) for f in opened.unsafe
            ]
        return dump(tree) == dump(other)

    def require_equal_objects(self, found: Found) -> None:
        """Damaged where ranks that saved by themselves differ about the model or the optimizer.

        Anything else that differs, such as each rank's random state, is the lowest rank's, with a warning.
        """
        for name, file in self.differing.items():
            path = self.index.paths.get(name, (name,))
            parts = [p for p in (found.model_path, found.optimizer_path) if p]
            if not parts or any(path[: len(p)] == p for p in parts):
                raise Damaged(
                    f"two ranks wrote different values of {name}",
                    where=file,
                    why="each rank saved by itself (use_collectives=False)",
                    fix="which one is right is in no file: --replica first or last says whose is taken",
                    code="replicas-differ",
                )
            self.index.warnings.append(f"{name} differs between ranks: the lowest rank's is taken")

    def nested(self) -> Tree:
        """The nested state that was saved. Settings of a group are values, whatever holds them: lr may be a tensor."""
        paths = self.index.paths or without_paths(self.index.items)

        def leaf_or_value(name: str, path: tuple[PathKey, ...]) -> Tree:
            leaf = self.leaves.get(name)
            if leaf is None:
                return self.values[name]
            return self.value(setting_name(path, name), leaf) if is_setting(path) else leaf

        return nested(self.index.items, paths, leaf_or_value)

    def add(self, key: Key, leaf: Leaf) -> None:
        """A tensor under its key. Each compressed chunk is a source of its own."""
        chunks = self.index.items[leaf.name]
        assert isinstance(chunks, Chunks)
        numbers = chunks.file
        if chunks.codec:
            first = len(self.sources)
            for file, offset, length in zip(
                chunks.file.tolist(), chunks.offset.tolist(), chunks.length.tolist(), strict=True
            ):
                self.sources.append(Source(self.index.files[file], offset, offset + length, chunks.codec))
            numbers = np.arange(first, len(self.sources), dtype=np.int32)
        self.keys[leaf.name] = key
        self.tensors[key] = Tensor(key, packed(leaf.dtype), leaf.shape, LazyTable(chunks, self.heads, numbers))

    def optimizer(self, found: Found, hints: Hints) -> Optimizer:
        """Groups and scalars; tensors are added under (name, kind)."""
        shapes = {n: leaf.shape for n, leaf in found.model.items()}
        optimizer, states = named_states(found, shapes, str(self.path), hints.param_order)
        for (name, kind), value in states.items():
            if isinstance(value, Leaf):
                self.add(Key(name, kind), value)
        scalars = {k: self.value(".".join(k), v) for k, v in states.items() if not isinstance(v, Leaf)}
        options = {k: self.value(f"optimizer.{k}", v) for k, v in optimizer.options.items()}
        return replace(optimizer, scalars=scalars, options=options)

    def value(self, name: str, tree: Tree) -> Tree:
        """A value with the small tensors inside it read.

        Larger ones become tensors of kind other, and Held in the tree.
        """
        if isinstance(tree, Leaf):
            chunks = self.index.items[tree.name]
            if tree.dtype.nbytes(tree.shape) > VALUE_LIMIT or (isinstance(chunks, Chunks) and len(chunks.offset) != 1):
                self.add(Key(name, "other"), tree)
                return Held(name)
            return self.array(tree)
        if isinstance(tree, dict):
            return {k: self.value(f"{name}.{k}", v) for k, v in tree.items()}
        if isinstance(tree, list):
            return [self.value(f"{name}.{i}", v) for i, v in enumerate(tree)]
        return tree

    def array(self, leaf: Leaf) -> Tree:
        """A small tensor as a value. Unsupported where it is cut over ranks: then it is no value."""
        chunks = self.index.items[leaf.name]
        assert isinstance(chunks, Chunks)
        if len(chunks.offset) != 1:
            raise Unsupported(
                f"{leaf.name} is a small tensor in {len(chunks.offset)} chunks outside model and optimizer", where=NAME
            )
        file, offset, length = int(chunks.file[0]), int(chunks.offset[0]), int(chunks.length[0])
        if chunks.bare or 0 in leaf.shape:
            reader = self.files.get(file)
            data = reader.read(offset, leaf.dtype.nbytes(leaf.shape)) if 0 not in leaf.shape else b""
            value: Tree = Array(leaf.dtype.name, leaf.shape, data)
        else:
            value = self._object(ByteItem(leaf.name, file, offset, length, chunks.codec))
        self._compare_array(chunks)
        return value

    def _compare_array(self, chunks: Chunks) -> None:
        """Notes where another rank has another value of a small tensor."""
        if chunks.copies is None:
            return
        mine = Place(int(chunks.file[0]), int(chunks.offset[0]), int(chunks.length[0]))
        columns = (chunks.copies.file, chunks.copies.offset, chunks.copies.length)
        for other in zip(*(c.tolist() for c in columns), strict=True):
            if not same_item(self.files, mine, Place(*other), archives=not (chunks.codec or chunks.bare)):
                self.differing.setdefault(chunks.name, self.files.names[other[0]])

    def step(self, rest: Mapping[str, Tree], found: Found) -> int | None:
        """The step: a counter at the top, else what the optimizer's first parameter counts."""
        if (step := counted(rest)) is not None:
            return step
        for entry in found.states.values():
            value = entry.get("step")
            if isinstance(value, Leaf):
                try:
                    value = self.array(value)
                except CkptError:
                    return None
            if value is not None:
                return number(value)
        return None

    def layout(self) -> dict[str, int | None]:
        """How many ranks wrote, and the axes of their mesh where a tensor shows both.

        The metadata names no mesh. A tensor that is cut in a grid of dp rows and tp columns, one box a rank, shows it.
        """
        world = self.world_size()
        out: dict[str, int | None] = {"world_size": world}
        for c in self.index.items.values():
            if not isinstance(c, Chunks) or len(c.shape) != 2 or world is None or len(c.offset) != world or world < 4:
                continue
            dp, tp = (len(np.unique(c.lo[:, axis])) for axis in (0, 1))
            if dp > 1 and tp > 1 and dp * tp == world:
                return {**out, "dp": dp, "tp": tp}
        return out

    def world_size(self) -> int | None:
        """How many ranks wrote, by the numbers in the files' names."""
        ranks = {int(m[1]) for f in self.index.files if (m := _RANK_FILE.fullmatch(Path(f).name))}
        ranks |= {int(m[1]) for f in self.metadata_nbytes if (m := RANK_METADATA.fullmatch(f))}
        return max(ranks) + 1 if ranks else None

    def sizes(self) -> tuple[File, ...]:
        """The files with their sizes; one that is not there has none."""
        data = (File(f, (self.path / f).stat().st_size if (self.path / f).is_file() else 0) for f in self.index.files)
        return (*(File(n, size, "index") for n, size in self.metadata_nbytes.items()), *data)

    def entries(self) -> tuple[Entry, ...]:
        """Every item under the source's own name and path."""
        out = []
        for name in self.index.items:
            path = self.index.paths.get(name, (name,))
            if name in self.keys:
                out.append(Entry(name, path, self.keys[name]))
            else:
                out.append(
                    Entry(name, path, None, self.array(self.leaves[name]) if name in self.leaves else self.values[name])
                )
        return tuple(out)


def _index_of(path: Path, take: str) -> tuple[Index, dict[str, int]]:
    """The index of a folder, and the metadata files that it comes from, with their bytes."""
    if is_rank_local(path):
        return read_ranks(path, take)
    with FileBytes(path / NAME, name=NAME) as reader:
        index, sizes = read_index(reader), {NAME: reader.nbytes}
    if left := ranks_of(path):
        index.warnings.append(
            f"{NAME} is taken; {len(left)} files of single ranks lie beside it ({next(iter(left.values())).name}, ...)"
        )
    return index, sizes
