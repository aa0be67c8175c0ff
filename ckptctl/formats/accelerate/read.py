"""Reads the folders of Accelerate's save_state: with FSDP (DCPs, or whole files) and without. No tensor data is read.

A folder is several checkpoints side by side, each read as what it is: DCP folders, torch files, safetensors. Where
there are several models, each one's names begin with `model_0.`, `model_1.`, ...; --module takes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import OTHER, Checkpoint, Entry, File, Group, Optimizer, UnsafeGlobal
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.accelerate.parts import OTHER_VALUES, Parts, parts_of
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp import read as dcp
from ckptctl.formats.hf import read as hf
from ckptctl.formats.modules import under
from ckptctl.formats.shifted import shifted
from ckptctl.formats.state import find
from ckptctl.formats.torch import read as torch
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchstate import placed
from ckptctl.formats.torchtensor import steps_made, value_of
from ckptctl.formats.trainer.order import named

if TYPE_CHECKING:
    from pathlib import Path


def detect(path: Path) -> Evidence | None:
    """A folder with FSDP's parts by Accelerate's names, with random states of ranks, or with an optimizer's file."""
    if not path.is_dir():
        return None
    parts = parts_of(path)
    sign = next((n for n in parts.models.values() if n.startswith("pytorch_model_fsdp")), "")
    # Without random states an optimizer is sign enough: read as weights alone, the folder would lose it unsaid.
    sign = sign or next(iter((*parts.of_ranks, *parts.random.values(), *parts.optimizers.values())), "")
    if not sign or not (parts.models or parts.optimizers or parts.of_ranks):
        return None
    return Evidence("accelerate", f"it holds {sign}", path)


@dataclass
class _Reading:
    """One folder while it is read."""

    root: Path
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    values: dict[str, Tree] = field(default_factory=dict)
    model_values: dict[str, Tree] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scalars: dict[tuple[str, str], Tree] = field(default_factory=dict)
    options: dict[str, Tree] = field(default_factory=dict)
    order_known: bool = True
    keyed: str = "names"
    unnamed: str = ""
    entries: list[Entry] = field(default_factory=list)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    step: int | None = None
    ranks: int | None = None

    def add(self, part: Checkpoint, name: str, prefix: str) -> None:
        """A checkpoint that lies under a name of the folder; prefix stands before its parameters' names."""
        is_folder = (self.root / name).is_dir()
        inside = f"{name}/" if is_folder else ""
        first = len(self.sources)
        self.sources += [replace(s, path=inside + s.path if is_folder else name) for s in part.sources]
        keys = {k: k if k.kind == OTHER else k._replace(name=prefix + k.name) for k in part.tensors}
        for key, tensor in part.tensors.items():
            if keys[key] in self.tensors:
                raise Damaged(f"{keys[key].name} ({key.kind}) is in two parts of the folder", where=name)
            self.tensors[keys[key]] = shifted(tensor, keys[key], first)
        self.ties.update({prefix + a: prefix + o for a, o in part.ties.items()})
        self.model_values.update({prefix + n: v for n, v in part.model_values.items()})
        self.values.update({n if n not in self.values else f"{name}.{n}": v for n, v in part.values.items()})
        self.files += [replace(f, path=inside + f.path) for f in part.files]
        if is_folder:
            moved = (replace(e, key=keys.get(e.key) if e.key else None, folder=inside) for e in part.entries)
            self.entries += moved
            ranks = part.layout.get("world_size")
            self.ranks = ranks if self.ranks is None else self.ranks
        self.note(name, part)
        self.step = part.step if self.step is None else self.step

    def note(self, name: str, part: Checkpoint) -> None:
        """What a part says of itself."""
        self.unsafe += [replace(u, file=f"{name}/{u.file}" if u.file != name else name) for u in part.unsafe]
        self.unknown.update(part.unknown_globals)
        self.unsupported += part.unsupported
        self.warnings += [f"{name}: {w}" for w in part.warnings]

    def optimizer(self, part: Optimizer, prefix: str, owner: int) -> None:
        """One model's optimizer, after those before."""
        if self.groups and (self.options or part.options):
            raise Unsupported(
                f"an optimizer of several has entries of its own ({', '.join(part.options or self.options)})",
                where=str(self.root),
                why="several optimizers are joined into one, which has one place for such entries",
                fix="save the optimizers apart",
            )
        params = (tuple(n if n.startswith("#") else prefix + n for n in g.params) for g in part.groups)
        self.groups += [replace(g, params=p, owner=owner) for g, p in zip(part.groups, params, strict=True)]
        self.scalars.update({(prefix + n, kind): v for (n, kind), v in part.scalars.items()})
        self.options.update(part.options)
        self.order_known = self.order_known and part.order_known
        self.keyed, self.unnamed = part.keyed, self.unnamed or part.unnamed

    def whole_optimizer(self) -> Optimizer:
        """The optimizers of all models as one."""
        return Optimizer(tuple(self.groups), self.scalars, self.order_known, self.keyed, self.options, self.unnamed)

    def open(self, name: str, reader: FileBytes, role: str) -> TorchFile:
        """A torch file of the folder, with a source for its tensors."""
        opened = open_torch(reader)
        self.files.append(File(name, reader.nbytes, role))
        self.sources.append(Source(name))
        self.unsafe += [UnsafeGlobal(name, str(f.name), f.why) for f in opened.unsafe]
        self.unknown.update(str(f.name) for f in opened.unknown)
        self.unsupported += [(f"{name}: {where}", why) for where, why in opened.unsupported]
        return opened

    def tree(self, name: str) -> Tree:
        """The value in one torch file of the folder."""
        with FileBytes(self.root / name, name=name) as reader:
            root = self.open(name, reader, "state").root
            return value_of(root, name.partition(".")[0], reader, self.tensors, len(self.sources) - 1)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a folder. Unsupported for files of single ranks, and for two sets of one model's weights."""
    parts = parts_of(path)
    _require_plain(parts, path)
    out = _Reading(path)
    several = len({*parts.models, *parts.optimizers}) > 1
    for number in sorted({*parts.models, *parts.optimizers}):
        prefix = f"model_{number}." if several else ""
        weights = _weights(path, parts.models.get(number), hints)
        if weights is not None:
            out.add(weights, parts.models[number], prefix)
        if number in parts.optimizers:
            _optimizer(out, parts.optimizers[number], weights, prefix, number, hints)
    _values(out, parts)
    made = Checkpoint(
        "accelerate",
        _variant(parts, path),
        str(path),
        tuple(out.sources),
        out.tensors,
        out.whole_optimizer() if parts.optimizers else None,
        out.values,
        out.model_values,
        out.ties,
        layout={"world_size": out.ranks or len(parts.random) or None},
        step=out.step,
        files=tuple(out.files),
        entries=tuple(out.entries),
        unsafe=tuple(out.unsafe),
        unknown_globals=tuple(sorted(out.unknown)),
        unsupported=tuple(out.unsupported),
        warnings=tuple(out.warnings),
        modules=tuple(f"model_{n}" for n in parts.models) if several else (),
        gap_reason="headers, pickles and alignment",
    )
    return under(made, hints.module) if hints.module else made


def _require_plain(parts: Parts, path: Path) -> None:
    if parts.of_ranks:
        raise Unsupported(
            "the folder holds one file a rank (save_fsdp_model with use_dcp=False), which is not read",
            where=str(path),
            why=f"it holds {parts.of_ranks[0]}",
            fix="save with use_dcp=True, or the full state",
        )
    if parts.twice:
        raise Unsupported(
            f"two parts are of one model: {parts.twice[0][0]} and {parts.twice[0][1]}",
            where=str(path),
            why="which of them is the newer one is in no file",
            fix="move one of them away",
        )


def _variant(parts: Parts, path: Path) -> str:
    names = (*parts.models.values(), *parts.optimizers.values())
    if any((path / n).is_dir() for n in names):
        return "fsdp sharded"
    return "fsdp full" if any(n.startswith("pytorch_model_fsdp") for n in names) else "plain"


def _weights(path: Path, name: str | None, hints: Hints) -> Checkpoint | None:
    """One model's part."""
    if name is None:
        return None
    if (path / name).is_dir():
        return dcp.read(path / name, hints)
    if name.endswith(".safetensors"):
        return hf.read(path / name, hints)
    with FileBytes(path / name, name=name) as reader:
        return replace(torch.read_dict(path / name, hints, reader), variant="bin")


def _optimizer(out: _Reading, name: str, weights: Checkpoint | None, prefix: str, owner: int, hints: Hints) -> None:
    """One model's optimizer: a DCP, whose state has names, or a file, whose state may have numbers."""
    if (out.root / name).is_dir():
        part = dcp.read(out.root / name, hints)
        out.add(part, name, prefix)
        if part.optimizer is not None:
            out.optimizer(part.optimizer, prefix, owner)
        return
    with FileBytes(out.root / name, name=name) as reader:
        opened = out.open(name, reader, "data")
        if opened.unsafe:
            return  # what it is does not matter any more: inspect reports it, everything else stops
        if opened.cut:
            raise Unsupported(
                f"the file holds {opened.cut}s: one rank's part of a state",
                where=name,
                why="Accelerate's optimizer files have whole tensors",
                fix="save it with FSDP's full state, or as a sharded folder",
            )
        found = find(opened.root, lambda tree: isinstance(tree, TensorRef))
        if not found.has_optimizer or found.model or weights is None:
            raise Unsupported("the file is not the optimizer of weights beside it", where=name)
        optimizer, states = named(found, weights, hints.facts, hints, name)
        if optimizer.unnamed and prefix:
            raise Unsupported(
                f"the optimizer's parameters have numbers and no names: {optimizer.unnamed}",
                where=name,
                why="with several models, numbers cannot be shown",
                fix="--model-config with a known family, or save with FSDP",
            )
        source, before = len(out.sources) - 1, len(out.groups)
        made = placed(optimizer, states, reader, out.tensors, source, prefix=prefix, groups_before=before)
        out.optimizer(made, prefix, owner)
        if out.step is None:
            out.step = steps_made(found.states, reader)


def _values(out: _Reading, parts: Parts) -> None:
    """Schedulers, random states by rank, and the rest by the names of their files."""
    plans = [out.tree(name) for name in parts.schedulers.values()]
    if plans:
        out.values.update({"scheduler": plans[0]} if len(plans) == 1 else {"schedulers": plans})
    if parts.random:
        out.values["random_states"] = {str(rank): out.tree(name) for rank, name in parts.random.items()}
    for value, name in parts.values.items():
        out.values[value] = out.tree(name)
    if (out.root / OTHER_VALUES).is_file():
        more = out.tree(OTHER_VALUES)
        if isinstance(more, dict):
            out.values.update({str(k): v for k, v in more.items() if str(k) not in out.values})
