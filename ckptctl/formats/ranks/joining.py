"""Joins what the files of many ranks hold: tensors as rows of boxes, optimizers entry by entry, values by name.

One rank's files are open at a time; of each only its pickle is read, and small values.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import File, UnsafeGlobal
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.ranks.gather import Gathered
from ckptctl.formats.ranks.slices import Slicer, is_tensor
from ckptctl.formats.ranks.values import RankValues, same
from ckptctl.formats.state import Found, find
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchtensor import value_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.core.checkpoint import PathKey
    from ckptctl.core.tensor import Key, Tensor
    from ckptctl.core.values import Tree
    from ckptctl.formats.ranks.files import RankFiles


class Joined:
    """A set of ranks' files while it is read: one rank after the other, its tensors by name, its values."""

    def __init__(self, path: Path, files: RankFiles) -> None:
        self.path, self.files = path, files
        self.names: list[str] = []
        self.sizes: list[File] = []
        self.model: dict[str, Gathered] = {}
        self.states: dict[PathKey, dict[str, Tree]] = {}
        self.found = Found()
        self.groups: list[dict[str, Tree]] = []
        self.options: dict[str, Tree] = {}
        self.values, self.model_values = RankValues(), RankValues()
        self.tensors: dict[Key, Tensor] = {}
        self.written: dict[int, int] = {}
        """By number in the file's name, the rank that the file says it is of."""
        self.wanted: set[int] = set()
        self.unsafe: list[UnsafeGlobal] = []
        self.unknown: dict[str, None] = {}
        self.unsupported: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    def add(self, rank: int) -> None:
        """Reads one rank's files. Damaged where they are not like those of the ranks before."""
        with ExitStack() as stack:
            root: dict[Tree, Tree] = {}
            slicers: dict[Tree, Slicer] = {}
            for part, by_rank in self.files.parts.items():
                slicer, tree = self._open(stack, by_rank[rank], rank)
                placed = self._placed(part, tree, slicer.reader.path)
                twice = next((k for k in placed if k in root), None)
                if twice is not None:
                    raise Unsupported(
                        f"two files of rank {rank} hold {twice!r}",
                        where=slicer.reader.path,
                        fix="give the folder of one save",
                        code="duplicate-name",
                    )
                root.update(placed)
                slicers |= dict.fromkeys(placed, slicer)
            any_slicer = next(iter(slicers.values()), None)
            if any_slicer is None:
                return
            found = find(root, is_tensor)
            self._model(found, rank, slicers.get(_first(found.model_path), any_slicer))
            if found.has_optimizer:
                self._optimizer(found, rank, slicers.get(_first(found.optimizer_path), any_slicer))
            for name, tree in found.rest.items():
                slicer = slicers.get(name, any_slicer)
                self.values.add(rank, name, self._value(slicer, rank, name, tree), slicer.reader.path)
        self.values.ranks.append(rank)
        self.model_values.ranks.append(rank)

    def _open(self, stack: ExitStack, name: str, rank: int) -> tuple[Slicer, Tree]:
        path = self.path / name if name else self.path
        reader = stack.enter_context(FileBytes(path, name=path.name))
        opened = open_torch(reader)
        self.unsafe += [UnsafeGlobal(path.name, str(f.name), f.why) for f in opened.unsafe]
        self.unknown.update(dict.fromkeys(str(f.name) for f in opened.unknown))
        self.unsupported += [(f"{path.name}: {where}", why) for where, why in opened.unsupported]
        self.names.append(name)
        is_state = self.files.is_verl and not path.name.startswith("model_")
        self.sizes.append(File(path.name, reader.nbytes, "state" if is_state else "data"))
        slicer = Slicer(reader, rank, len(self.names) - 1, opened.directory)
        return slicer, opened.root

    def _placed(self, part: str, tree: Tree, where: str) -> Mapping[Tree, Tree]:
        """A file's tree as entries of the rank's state: a bare model or optimizer under its usual name."""
        if not isinstance(tree, dict):
            if self.unsafe:
                return {}
            raise Unsupported("the file holds no state dict", where=where, fix="save a dict of names")
        if self.files.is_verl:
            return {"model": tree} if part == "model" else {"optimizer": tree} if part == "optim" else tree
        if len(self.files.parts) == 1:
            return tree
        found = find(tree, is_tensor)
        if found.has_optimizer and not found.optimizer_path:
            return {"optimizer": tree}
        return {"model": tree} if found.model and not found.model_path else tree

    def _model(self, found: Found, rank: int, slicer: Slicer) -> None:
        where = slicer.reader.path
        if self.values.ranks and found.model.keys() != self.model.keys():
            lost = next((n for n in self.model if n not in found.model), None)
            other = next((n for n in found.model if n not in self.model), "")
            raise Damaged(
                f"{lost or other} is not on every rank",
                where=where,
                why=f"rank {rank} does not have it" if lost else f"of the ranks so far only rank {rank} has it",
                fix="check that the files are of one run and one step; stages of a pipeline are not joined here",
                code="ranks-differ",
            )
        for name, tree in found.model.items():
            self.model[name] = self._gather(self.model.get(name), name, tree, rank, slicer)
        for name, tree in found.model_values.items():
            self.model_values.add(rank, name, self._value(slicer, rank, f"model.{name}", tree), where)

    def _optimizer(self, found: Found, rank: int, slicer: Slicer) -> None:
        where = slicer.reader.path
        for key, entry in found.states.items():
            known = self.states.setdefault(key, {})
            for kind, tree in entry.items():
                if is_tensor(tree):
                    before = known.get(kind)
                    if before is not None and not isinstance(before, Gathered):
                        raise self._mixed(rank, f"{kind} of parameter {key} is a tensor here and a value before", where)
                    known[kind] = self._gather(before, f"{key}.{kind}", tree, rank, slicer)
                    continue
                value = self._value(slicer, rank, f"{key}.{kind}", tree)
                if kind in known and not (not isinstance(known[kind], Gathered) and same(known[kind], value)):
                    raise self._mixed(rank, f"{kind} of parameter {key} differs", where)
                known[kind] = value
        groups = [
            {k: self._value(slicer, rank, f"param_groups.{i}.{k}", v) for k, v in g.items()}
            for i, g in enumerate(found.groups)
        ]
        options = {k: self._value(slicer, rank, f"optimizer.{k}", v) for k, v in found.optimizer_options.items()}
        if not self.found.has_optimizer:
            if self.values.ranks:
                raise self._mixed(rank, "it has an optimizer, and the ranks before have none", where)
            self.found, self.groups, self.options = found, groups, options
            self.found.states, self.found.model = {}, {}
        elif not same(groups, self.groups):
            raise self._mixed(rank, "its param groups have other settings", where)

    def _mixed(self, rank: int, why: str, where: str) -> Damaged:
        return Damaged(
            f"rank {rank} does not belong to the ranks before it: {why}",
            where=where,
            fix="put the files of one save together",
            code="ranks-mixed",
        )

    def _gather(self, gathered: Gathered | None, name: str, tree: Tree, rank: int, slicer: Slicer) -> Gathered:
        part = slicer.slice(tree, name)
        gathered = gathered or Gathered(name, part)
        gathered.add(part, rank, slicer.reader.path)
        if part.how != "plain":
            said = self.written.setdefault(rank, part.rank)
            if said != part.rank:
                raise slicer.bad(name, f"says it is of rank {part.rank}, others of rank {said}", "", "ranks-differ")
            self.wanted.update(part.ranks)
        return gathered

    def _value(self, slicer: Slicer, rank: int, name: str, tree: Tree) -> Tree:
        """A value with its small tensors read. Larger ones are tensors of their own, under each rank's name."""
        _refuse_cut(tree, name, slicer.reader.path)
        path = name if len(self.files.ranks) == 1 else f"{name}.rank_{rank}"
        return value_of(tree, path, slicer.reader, self.tensors, slicer.file)


def _first(path: tuple[PathKey, ...]) -> PathKey:
    return path[0] if path else ""


def _refuse_cut(tree: Tree, name: str, where: str) -> None:
    """Unsupported for slices of tensors outside model and optimizer: they are no values."""
    stack, seen = [tree], 0
    while stack and seen < 100_000:
        at = stack.pop()
        seen += 1
        if isinstance(at, dict):
            stack += at.values()
        elif isinstance(at, (list, tuple)):
            stack += at
        elif is_tensor(at) and not hasattr(at, "storage"):
            raise Unsupported(
                f"{name} holds tensors that are cut over ranks, and is neither model nor optimizer",
                where=where,
                why="this version joins those of a model and of its optimizer",
                fix="save it apart",
            )
