"""Reads a file of torch.save: weights, optimizer, scheduler, random state, whatever the dict holds.

No tensor data is read.

Shapes taken: a state dict; `{model|state_dict|..., optimizer|optim|..., ...}`, also one level deeper under one key
(`app`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, Checkpoint, File, Optimizer, UnsafeGlobal
from ckptctl.core.errors import Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import Record, TensorRef, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.parameters import named_states
from ckptctl.formats.ranks import read as ranks
from ckptctl.formats.state import Found, config_in, counted, find
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchstate import placed
from ckptctl.formats.torchtensor import aliases, same_place, steps_made, tensor_of, value_of
from ckptctl.formats.wrapping import unwrapped

if TYPE_CHECKING:
    from pathlib import Path

PICKLE_STARTS = (b"\x80", b"PK\x03\x04")


def detect(path: Path) -> Evidence | None:
    """A file that begins as a zip or as a pickle, or whose name says it is torch's."""
    if path.is_dir():
        return ranks.detect(path)
    if not path.is_file():
        return None
    head = read_whole(path, 4)
    if head.startswith(PICKLE_STARTS):
        return Evidence("torch", f"the file begins with {head[:4]!r}", path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar"):
        return Evidence("torch", f"its name ends with {path.suffix}", path)
    return None


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in one torch file. Unsupported for what torch pickles besides plain tensors, naming it."""
    if path.is_dir():
        return ranks.read(path, hints)
    with FileBytes(path, name=path.name) as reader:
        return read_dict(path, hints, reader)


def read_dict(path: Path, hints: Hints, reader: FileBytes) -> Checkpoint:
    """As read, of a file that is open."""
    opened = open_torch(reader)
    if opened.cut:  # reading slices as tensors would be silently wrong
        return ranks.read(path, hints)
    found = find(_as_dict(opened.root, str(path), is_unsafe=bool(opened.unsafe)), _is_tensor, averages=True)
    return checkpoint_of(opened, found, path, hints, reader)


def _as_dict(root: Tree, where: str, *, is_unsafe: bool) -> Tree:
    """The root as a state dict: one tensor or a list of them gets names.

    Unsupported for a pickled module, naming its class.
    """
    if isinstance(root, TensorRef):
        return {"tensor": root}
    if isinstance(root, (list, tuple)) and any(isinstance(v, TensorRef) for v in root):
        return {str(i): v for i, v in enumerate(root)}
    if isinstance(root, Record) and is_unsafe:
        return {}  # what it is does not matter any more: inspect reports it, everything else stops
    if isinstance(root, Record):
        raise Unsupported(
            f"the file holds an object of class {root.cls or 'unknown'}, not a state dict",
            where=where,
            why="a pickled module keeps its tensors under names of its own class",
            fix="load it where it was made, and save module.state_dict()",
        )
    return root


def _is_tensor(tree: Tree) -> bool:
    return isinstance(tree, TensorRef)


def checkpoint_of(opened: TorchFile, found: Found, path: Path, hints: Hints, reader: FileBytes) -> Checkpoint:
    """The parts of the tree as a checkpoint over this one file."""
    tensors: dict[Key, Tensor] = {}
    for name, ref in found.model.items():
        tensors[Key(name)] = tensor_of(Key(name), ref, 0)
    for name, ref in found.ema.items():
        tensors[Key(name, EMA)] = tensor_of(Key(name, EMA), ref, 0)
    ties = aliases(found.model)
    optimizer = _optimizer(found, ties, tensors, str(path), hints, reader) if found.has_optimizer else None
    unsupported = [(f"{opened.path}: {where}", why) for where, why in opened.unsupported]

    def value(name: str, tree: Tree) -> Tree:
        return value_of(tree, name, reader, tensors, 0)

    values = {name: value(name, tree) for name, tree in found.rest.items()}
    step = counted(values)
    return Checkpoint(
        "torch",
        opened.variant,
        str(path),
        (Source(""),),
        tensors,
        optimizer,
        values,
        {n: value(n, v) for n, v in found.model_values.items()},
        ties,
        config_in(found.rest, path.name),
        {},
        step if step is not None else steps_made(found.states, reader),
        (File(path.name, reader.nbytes),),
        unsafe=tuple(UnsafeGlobal(path.name, str(f.name), f.why) for f in opened.unsafe),
        unknown_globals=tuple(str(f.name) for f in opened.unknown),
        unsupported=tuple(unsupported),
        warnings=(*unwrapped(found), *_one_moment(found)),
        model_path=found.model_path,
        gap_reason="zip headers, pickle and alignment; parts of storages that no tensor views",
    )


def _one_moment(found: Found) -> tuple[str, ...]:
    """A word where both moments of a parameter are one tensor: the first is lost, the second stands in its place.

    Source: torch 2.13.0, what FSDP1's FULL optim_state_dict gives on the CPU with use_orig_params=True.
    """
    entries = [(e.get("exp_avg"), e.get("exp_avg_sq")) for e in found.states.values()]
    pairs = [(a, b) for a, b in entries if isinstance(a, TensorRef) and isinstance(b, TensorRef)]
    alike = sum(a is b or (same_place(a, b) and a.numel > 0) for a, b in pairs)
    if not alike:
        return ()
    return (
        f"exp_avg and exp_avg_sq are one tensor for {alike} of {len(pairs)} parameters: exp_avg was lost when this was "
        "saved (FSDP1's full optimizer state on the CPU does that)",
    )


def _optimizer(
    found: Found, ties: dict[str, str], tensors: dict[Key, Tensor], where: str, hints: Hints, reader: FileBytes
) -> Optimizer:
    shapes = {n: ref.shape for n, ref in found.model.items() if n not in ties}
    return placed(*named_states(found, shapes, where, hints.param_order), reader, tensors, 0)
