"""Reads a Trainer's folder: weights as a Hugging Face folder, and beside them optimizer, scheduler, random state.

Headers and pickles only. The optimizer's state is keyed by numbers; which parameter each one means is told by the
family's order of parameters (`order`), or stays open.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Checkpoint, Facts, File, Optimizer, UnsafeGlobal
from ckptctl.core.errors import CkptError, Unsupported
from ckptctl.core.tensor import Source
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.hf import read as hf
from ckptctl.formats.state import find
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchstate import placed
from ckptctl.formats.torchtensor import steps_made, value_of
from ckptctl.formats.trainer import files
from ckptctl.formats.trainer.order import named

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.tensor import Key, Tensor


def detect(path: Path) -> Evidence | None:
    """A folder with a Trainer's state or its optimizer. One that DeepSpeed's engine saved is DeepSpeed's."""
    if not path.is_dir():
        return None
    found = next((n for n in (files.STATE, files.OPTIMIZER) if (path / n).is_file()), None)
    if found is None or _is_deepspeed(path):
        return None
    return Evidence("trainer", f"it holds {found}", path)


def is_complete(path: Path) -> bool:
    """Whether a save came to its end: the Trainer writes its state after the tensors."""
    return (path / files.STATE).is_file()


def _is_deepspeed(path: Path) -> bool:
    return (path / "latest").is_file() and any(p.is_dir() for p in path.glob("global_step*"))


require_one_source = hf.require_one_source


@dataclass
class _Beside:
    """What is read beside the weights, into the same checkpoint."""

    root: Path
    tensors: dict[Key, Tensor]
    sources: list[Source]
    files: list[File] = field(default_factory=list)
    values: dict[str, Tree] = field(default_factory=dict)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    step: int | None = None

    def tree(self, name: str, reader: FileBytes, role: str) -> Tree:
        """The tree of one torch file, and a source for the tensors in it."""
        opened = open_torch(reader)
        self.files.append(File(name, reader.nbytes, role))
        self.sources.append(Source(name))
        self.unsafe += [UnsafeGlobal(name, str(f.name), f.why) for f in opened.unsafe]
        self.unknown.update(str(f.name) for f in opened.unknown)
        self.unsupported += [(f"{name}: {where}", why) for where, why in opened.unsupported]
        if opened.cut:
            raise Unsupported(
                f"the file holds {opened.cut}s: one rank's part of a state",
                where=name,
                why="a Trainer folder has whole tensors",
                fix="save it with FSDP's full state, or as a sharded folder",
            )
        return opened.root

    def value(self, tree: Tree, at: str, reader: FileBytes) -> Tree:
        """A value of the file that was opened last; large tensors in it are put among the checkpoint's."""
        return value_of(tree, at, reader, self.tensors, len(self.sources) - 1)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint of one step. What is missing beside the weights is a warning, as the Trainer takes it."""
    sharded = files.sharded_by_fsdp(path)
    if sharded:
        raise Unsupported(
            "a Trainer saved this under FSDP: weights and optimizer are Accelerate's files, not read here yet",
            where=str(path),
            why=f"it holds {sharded}",
            fix=f"give {sharded} itself" if (path / sharded / ".metadata").is_file() else "",
        )
    weights = hf.read(path, hints)
    facts = hints.facts if hints.facts.config is not None else weights.facts
    out = _Beside(path, dict(weights.tensors), list(weights.sources))
    optimizer = _optimizer(out, weights, facts, hints) if (path / files.OPTIMIZER).is_file() else None
    _state(out)
    for name, at in ((files.SCHEDULER, "scheduler"), (files.SCALER, "scaler")):
        if (path / name).is_file():
            with FileBytes(path / name, name=name) as reader:
                out.values[at] = out.value(out.tree(name, reader, "state"), at, reader)
    ranks = _random(out)
    _arguments(out)
    _other(out)
    _warn(out, optimizer)
    return replace(
        weights,
        format="trainer",
        sources=tuple(out.sources),
        tensors=out.tensors,
        optimizer=optimizer,
        values={**weights.values, **out.values},
        layout={"world_size": ranks},
        step=out.step,
        files=(*weights.files, *out.files),
        unsafe=(*weights.unsafe, *out.unsafe),
        unknown_globals=tuple(sorted({*weights.unknown_globals, *out.unknown})),
        unsupported=(*weights.unsupported, *out.unsupported),
        warnings=(*weights.warnings, *out.warnings),
        gap_reason="headers, pickles and alignment",
    )


def _optimizer(out: _Beside, weights: Checkpoint, facts: Facts, hints: Hints) -> Optimizer:
    name = files.OPTIMIZER
    with FileBytes(out.root / name, name=name) as reader:
        root = out.tree(name, reader, "data")
        found = find(root, lambda tree: isinstance(tree, TensorRef))
        if out.unsafe and not found.has_optimizer:
            return Optimizer(())  # what it is does not matter any more: inspect reports it, everything else stops
        if not found.has_optimizer or found.model:
            raise Unsupported(
                "the file is not what an optimizer's state_dict() gives",
                where=name,
                why=f"it holds a {type(root).__name__}"
                + (f" of {', '.join(map(str, list(root)[:4]))}" if isinstance(root, dict) else ""),
                fix="give the file itself, or leave it out of the folder",
            )
        source = len(out.sources) - 1
        optimizer, states = named(found, weights, facts, hints, f"{out.root}/{name}")
        if out.step is None:
            out.step = steps_made(found.states, reader)
        return placed(optimizer, states, reader, out.tensors, source)


def _state(out: _Beside) -> None:
    path = out.root / files.STATE
    if not path.is_file():
        return
    state = files.read_state(path)
    out.files.append(File(files.STATE, path.stat().st_size, "state"))
    out.values["trainer_state"] = state
    out.step = state["global_step"]
    out.values["step"] = out.step


def _random(out: _Beside) -> int | None:
    """Random states by rank. Returns how many processes the run had, None where nothing says so."""
    found = files.rng_files(out.root)
    states: dict[int | None, Tree] = {}
    for rank, name in found.items():
        with FileBytes(out.root / name, name=name) as reader:
            states[rank] = out.value(out.tree(name, reader, "state"), f"rng_state.{rank or 0}", reader)
    if None in states:
        out.values["rng_state"] = states.pop(None)
    if states:
        out.values["rng_states"] = states
        return max(r for r in states if r is not None) + 1
    return 1 if found else None


def _other(out: _Beside) -> None:
    """Values of other frameworks that a conversion put beside the Trainer's own."""
    path = out.root / files.OTHER_VALUES
    if not path.is_file():
        return
    with FileBytes(path, name=path.name) as reader:
        more = out.tree(path.name, reader, "state")
        if not isinstance(more, dict):
            out.warnings.append(f"{path.name} holds no dict, and is passed over")
            return
        given = {str(k): out.value(v, str(k), reader) for k, v in more.items()}
        out.values.update({k: v for k, v in given.items() if k not in out.values})


def _arguments(out: _Beside) -> None:
    """training_args.bin is looked through, and carried only into another Trainer folder: it is an object of a class."""
    if (out.root / files.ARGUMENTS).is_file():
        with FileBytes(out.root / files.ARGUMENTS, name=files.ARGUMENTS) as reader:
            try:
                out.tree(files.ARGUMENTS, reader, "own")
            except CkptError as err:  # nothing in it is needed, and what nobody looked through is not carried
                out.files.append(File(files.ARGUMENTS, reader.nbytes, "unread"))
                out.warnings.append(f"{files.ARGUMENTS} cannot be read, and is not carried: {err.what}")


def _warn(out: _Beside, optimizer: Optimizer | None) -> None:
    """What the Trainer would do about files that are not there."""
    there = {f.path for f in out.files}
    if optimizer is None:
        out.warnings.append(f"{files.OPTIMIZER} is not there: weights without an optimizer's state")
    elif files.SCHEDULER not in there:
        out.warnings.append(f"{files.SCHEDULER} is not there: the Trainer would load neither it nor {files.OPTIMIZER}")
    if files.STATE not in there:
        out.warnings.append(f"{files.STATE} is not there: the save was interrupted, or the file was removed")
