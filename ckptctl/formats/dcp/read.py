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
    STEP_NAMES,
    Checkpoint,
    Entry,
    Facts,
    File,
    Optimizer,
    PathKey,
    UnsafeGlobal,
    part_of,
)
from ckptctl.core.dtype import DType, packed
from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import Held, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp.items import DataFiles, Heads, LazyTable, read_object
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, read_index
from ckptctl.formats.state import MODEL_KEYS, OPTIMIZER_KEYS, Found, find, named_states, number, plain
from ckptctl.formats.torchtensor import VALUE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_RANK_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A tensor of the index, in the nested tree."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


def detect(path: Path) -> Evidence | None:
    """A folder with a `.metadata` file, or that file itself."""
    if path.name == NAME and path.is_file():
        path = path.parent
    if path.is_dir() and (path / NAME).is_file():
        return Evidence("dcp", f"it holds {NAME}", path)
    return None


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a DCP folder. Damaged where index and files disagree as far as heads tell."""
    folder = _Folder(path)
    found = find(folder.nested(), lambda tree: isinstance(tree, Leaf))
    for name, leaf in found.model.items():
        folder.add(Key(name), leaf)
    optimizer = folder.optimizer(found, hints) if found.has_optimizer else None
    rest = {name: folder.value(name, tree) for name, tree in found.rest.items()}
    config = rest.get("config")
    facts = (
        Facts.of(plain(config), f"{path.name} (config)")
        if isinstance(config, dict) and isinstance(config.get("model_type"), str)
        else Facts()
    )
    return Checkpoint(
        "dcp",
        "zstd" if any(c.codec for c in folder.index.items.values()) else "",
        str(path),
        tuple(folder.sources),
        folder.tensors,
        optimizer,
        rest,
        found.model_values,
        facts=facts,
        layout={"world_size": folder.world_size()},
        step=folder.step(rest, found),
        files=folder.sizes(),
        entries=folder.entries(),
        unsafe=tuple(folder.unsafe),
        unknown_globals=tuple(sorted(folder.unknown)),
        warnings=tuple(folder.index.warnings),
        gap_reason="archives' headers, pickles and directories; byte items",
    )


class _Folder:
    """One folder while it is read: its index, its files, and the tensors found so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with FileBytes(path / NAME, name=NAME) as reader:
            self.index, self.metadata_nbytes = read_index(reader), reader.nbytes
        self.files = DataFiles(path, self.index.files)
        self.heads = Heads(self.files)
        self.sources = [Source(name) for name in self.index.files]
        self.tensors: dict[Key, Tensor] = {}
        self.keys: dict[str, Key] = {}
        self.unsafe: list[UnsafeGlobal] = list(self.index.unsafe)
        self.unknown: set[str] = set()
        self.leaves = {n: Leaf(n, c.dtype, c.shape) for n, c in self.index.items.items() if isinstance(c, Chunks)}
        self.values = {n: self._object(item) for n, item in self.index.items.items() if isinstance(item, ByteItem)}

    def _object(self, item: ByteItem) -> Tree:
        tree, opened = read_object(item, self.files)
        if opened is None:
            return tree
        self.unsafe += [
            UnsafeGlobal(f"{self.files.names[item.file]} ({item.name})", str(f.name), f.why) for f in opened.unsafe
        ]
        self.unknown.update(str(f.name) for f in opened.unknown)
        return tree

    def nested(self) -> Tree:
        """The nested state that was saved, by the index's own paths; without them every name stands by itself.

        Source: torch 2.13.0, distributed/checkpoint/_nested_dict.py, unflatten_state_dict.
        """
        root: dict[PathKey, Tree] = {}
        paths = self.index.paths or without_paths(self.index.items)
        # The paths keep the order in which the state was saved; the items are in that of the ranks that wrote them.
        for name in [*(n for n in paths if n in self.index.items), *(n for n in self.index.items if n not in paths)]:
            path = paths.get(name) or (name,)
            at = root
            for key in path[:-1]:
                inner = at.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise Damaged(
                        f"{name} lies below another item",
                        where=NAME,
                        why=f"its path is {path}",
                        code="metadata-damaged",
                    )
                at = inner
            at[path[-1]] = self.leaves[name] if name in self.leaves else self.values[name]
        return _lists(root)

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
        scalars = {k: v for k, v in states.items() if not isinstance(v, Leaf)}
        return replace(optimizer, scalars=scalars)

    def value(self, name: str, tree: Tree) -> Tree:
        """A value with the small tensors inside it read.

        Larger ones become tensors of kind other, and Held in the tree.
        """
        if isinstance(tree, Leaf):
            if tree.dtype.nbytes(tree.shape) > VALUE_LIMIT:
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
        return self._object(
            ByteItem(leaf.name, int(chunks.file[0]), int(chunks.offset[0]), int(chunks.length[0]), chunks.codec)
        )

    def step(self, rest: Mapping[str, Tree], found: Found) -> int | None:
        """The step: a counter at the top, else what the optimizer's first parameter counts."""
        for name in STEP_NAMES:
            step = number(rest.get(name))
            if step is not None:
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

    def world_size(self) -> int | None:
        """How many ranks wrote, by the numbers in the files' names."""
        ranks = {int(m[1]) for f in self.index.files if (m := _RANK_FILE.fullmatch(Path(f).name))}
        return max(ranks) + 1 if ranks else None

    def sizes(self) -> tuple[File, ...]:
        """The files with their sizes; one that is not there has none."""
        data = (File(f, (self.path / f).stat().st_size if (self.path / f).is_file() else 0) for f in self.index.files)
        return (File(NAME, self.metadata_nbytes, "index"), *data)

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


def without_paths(names: Iterable[str]) -> dict[str, tuple[PathKey, ...]]:
    """Paths for an index that has none (planner_data absent).

    Cut after a model's or an optimizer's usual key, where every name has one.

    A name cannot be cut at its other dots: parameters have dots of their own. Where one name has no such key, all stand
    by themselves.
    """
    out: dict[str, tuple[PathKey, ...]] = {}
    for name in names:
        head, _, rest = name.partition(".")
        if head in (*MODEL_KEYS, *OPTIMIZER_KEYS) and rest:
            out[name] = (head, rest)
        elif part_of(head) != "other":
            out[name] = tuple(name.split("."))
        else:
            return {}
    optimizers = {p[0] for p in out.values() if p[0] in OPTIMIZER_KEYS}
    models = {p[0] for p in out.values() if p[0] in MODEL_KEYS}
    # `model.` alone may as well be the first word of every parameter's name: without an optimizer beside it, it is left
    # there.
    return out if optimizers and len(models) <= 1 else {}


def _lists(tree: Tree) -> Tree:
    """Dicts whose keys count from 0 are the lists that were saved: only lists have integers in a path."""
    if not isinstance(tree, dict):
        return tree
    inner = {k: _lists(v) for k, v in tree.items()}
    if inner and all(isinstance(k, int) for k in inner):
        return [inner[k] for k in sorted(inner)]
    return inner
