"""Reads torch_dist: a DCP without paths, common.pt beside it, layers stacked or apart, optimizers in several forms.

Source: Megatron-LM core_v0.16.1, core/dist_checkpointing/strategies/torch.py, core/optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.checkpoint import UnsafeGlobal
from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.remake import remade, to_hub
from ckptctl.core.tensor import Key, Piece, Source, Tensor
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.datafiles import DataFiles
from ckptctl.formats.dcp.items import Heads, LazyTable, read_object
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, Index, read_index
from ckptctl.formats.megatron import flat, model, runconfig, zarr
from ckptctl.formats.megatron.collect import Whole
from ckptctl.formats.megatron.facts import Facts, of_namespace
from ckptctl.formats.megatron.found import Found, number_of, require_parts, require_states
from ckptctl.formats.megatron.groups import Param, members, parts_of, settings
from ckptctl.formats.megatron.groups import Part as Chained
from ckptctl.formats.megatron.stacked import natives, unflattened
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchtensor import read_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.core.values import Tree
    from ckptctl.formats import Hints
    from ckptctl.formats.bytesource import ByteSource

COMMON = "common.pt"
COUNTS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""Counters of a Bridge's train_state.pt that are args of a run of Megatron-LM."""
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z_0-9]+)\.(.+)")
KINDS = {"param": "master", "fp32_param": "master"}
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_[\d.]+")


def read(path: Path, hints: Hints) -> Found:
    """The folder of one iteration. Unsupported for optimizers in a form that is not known, naming it."""
    if not (path / COMMON).is_file():
        raise MissingFile(f"{COMMON} is missing", where=str(path), fix="copy the file")
    with FileBytes(path / COMMON, name=COMMON) as reader:
        opened, root = common_of(reader)
        sizes = [(COMMON, reader.nbytes)]
    facts, root = _facts(path, root)
    if zarr.is_zarr(path):
        variant, index = "zarr", zarr.read_index(path)
    else:
        with FileBytes(path / NAME, name=NAME) as reader:
            variant, index = "torch_dist", read_index(reader)
            sizes.append((NAME, reader.nbytes))
    whole = Whole(hints.replica, hints.verify_replicas)
    given = replace(facts, given=hints.facts.config or {})
    out = Found(given, variant, whole, fused=True, sizes=sizes, weights_only=hints.weights_only)
    for name in index.files:
        out.sources.append(Source(name))
        out.sizes.append((name, (path / name).stat().st_size if (path / name).is_file() else 0))
    return read_parts(opened, root, index, path, out)


def common_of(reader: ByteSource) -> tuple[TorchFile, dict[str, Tree]]:
    """common.pt, and its dict with tensors as values. Damaged where it holds none."""
    opened = open_torch(reader)
    root = read_leaves(opened.root, reader)
    if not isinstance(root, dict):
        if not opened.unsafe:
            raise Damaged(f"{COMMON} holds no dict", where=reader.path, code="root-damaged")
        root = {}
    return opened, root


def read_parts(opened: TorchFile, root: Mapping[str, Tree], index: Index, path: Path, out: Found) -> Found:
    """What common.pt and an index say, the index's files being in the folder path."""
    out.facts.require_known()
    out.unsafe += [UnsafeGlobal(COMMON, str(f.name), f.why) for f in opened.unsafe]
    out.unknown.update(str(f.name) for f in opened.unknown)
    out.unsafe += index.unsafe
    out.layer_keys = any(model.LAYER.fullmatch(n) for n in index.items)
    folder = Folder(path, index, out)
    iteration = number_of(root.get("iteration", root.get("global_step")))
    out.iteration = iteration if isinstance(iteration, int) and not isinstance(iteration, bool) else None
    _weights(folder, out)
    if root.get("optimizer") is not None and not out.weights_only:
        _optimizer(root["optimizer"], folder, out)
    elif flat.is_flat(index) and not out.weights_only:
        raise Damaged(
            f"the optimizer's buffers are there, and {COMMON} has no optimizer",
            where=COMMON,
            why="its groups say which parameters are in them",
            fix="copy the file again, or take the weights alone with --no-optimizer",
            code="optimizer-damaged",
        )
    _values(root, folder, out)
    return out


def _facts(path: Path, root: Mapping[str, Tree]) -> tuple[Facts, dict[str, Tree]]:
    """The run's facts and counters: args of common.pt, else the config that Megatron-Bridge or NeMo keeps beside."""
    facts = of_namespace(root.get("args"), COMMON)
    if facts.args:
        return facts, dict(root)
    args, where = runconfig.args_beside(path)
    progress = runconfig.progress_of(path)
    more: dict[str, Tree] = {k: v for k, v in progress.items() if k != "step"}
    if "step" in progress:
        more["iteration"] = progress["step"]
    if args:
        args = {**args, **{k: progress[k] for k in COUNTS if isinstance(progress.get(k), int)}}
    if "floating_point_operations_so_far" in more:
        more["num_floating_point_operations_so_far"] = more.pop("floating_point_operations_so_far")
    # Such a run's config is its args: what is written for Megatron-LM has them.
    known = {"args": args} if args else {}
    return Facts(args, where or COMMON), {**root, **more, **known}


class Folder:
    """The index of a folder while it is read, and its tensors by key of the file."""

    def __init__(self, path: Path, index: Index, out: Found) -> None:
        self.path, self.index, self.out = path, index, out
        self.files = DataFiles(path, index.files)
        self.heads = Heads(self.files)
        self.raw: dict[Key, Tensor] = {}
        """Tensors of the model's keys as the file has them."""

    def tensor(self, name: str, key: Key) -> Tensor:
        """A tensor of the index under a key."""
        chunks = self.index.items[name]
        if not isinstance(chunks, Chunks):
            raise Damaged(f"{name} is no tensor", where=NAME, code="metadata-damaged")
        if chunks.codec:
            raise Unsupported(f"{name} is compressed, as Megatron does not write", where=NAME)
        return Tensor(key, packed(chunks.dtype), chunks.shape, LazyTable(chunks, self.heads, chunks.file))

    def object(self, item: ByteItem) -> Tree:
        """The value of a byte item: Megatron saves a list of one."""
        tree, opened = read_object(item, self.files)
        if opened is not None:
            where = f"{self.files.names[item.file]} ({item.name})"
            self.out.unsafe += [UnsafeGlobal(where, str(f.name), f.why) for f in opened.unsafe]
            self.out.unknown.update(str(f.name) for f in opened.unknown)
        return tree[0] if isinstance(tree, list) and len(tree) == 1 else tree


def _weights(folder: Folder, out: Found) -> None:
    """Weights and states that have the model's keys."""
    raw = folder.raw
    for name, item in folder.index.items.items():
        if not isinstance(item, Chunks) or ".gbuf_idx_" in name:
            continue
        found = STATE.fullmatch(name)
        if out.weights_only and (found or name.startswith(("optimizer.", "chained_"))):
            continue
        kind, key = (KINDS.get(found[1], found[1]), found[2]) if found else ("weight", name)
        if not found and name.startswith(("optimizer.", "chained_")):
            raise Unsupported(
                f"{name} is of an optimizer's form that is not read",
                where=NAME,
                fix="save with --dist-ckpt-optim-fully-reshardable",
                code="optimizer-unknown",
            )
        key = key.removeprefix("module.").removeprefix("model.")
        if Key(key, kind) in raw:
            raise Damaged(f"{name} is there under another name, too", where=NAME, code="duplicate-tensor")
        raw[Key(key, kind)] = folder.tensor(name, Key(key, kind))
    out.has_optimizer = any(k.kind != "weight" for k in raw)
    shaped = unflattened(raw)
    made = remade(shaped, to_hub(natives(shaped)))
    half = {k.name for k, m in made.items() if k.kind == "weight" and m.tensor.dtype.name != "float32"}
    out.tensors = {
        k: replace(m.tensor, key=k) for k, m in made.items() if not (k.kind == "master" and k.name not in half)
    }


# ---- optimizer ------------------------------------------------------------------------------------------------------


def _optimizer(tree: Tree, folder: Folder, out: Found) -> None:
    """Groups, steps, and moments in buffers where they are not under the model's keys."""
    parts = _parts(tree, folder)
    weights = [k.name for k in out.tensors if k.kind == "weight" and not model.is_buffer(k.name)]
    tied = out.facts.tied or Key(model.HEAD) not in out.tensors
    params = [Param(n, out.tensors[Key(n)].shape, 0, out.tensors[Key(n)].dtype.name) for n in weights]
    params = [p for p in params if not (tied and p.name == model.HEAD)]
    apart = len(parts) > 1 and any(bool(g.get("is_expert_parallel")) for p in parts for g in p.groups)
    out.add_scaler([p.rest for p in parts], None)
    out.distributed = any("param_state_sharding_type" in p.rest for p in parts) or flat.is_flat(folder.index)
    for part in parts:
        common = part.state.get("common_step")
        for group, of in zip(
            part.groups, members(part, params, out.facts, experts_apart=apart, where=COMMON), strict=True
        ):
            out.add_group(settings(group), (p.name for p in of), number_of(group.get("step", common)), COMMON)
    if flat.is_flat(folder.index):
        out.has_optimizer = True
        out.tensors.update(flat.states(folder.index, folder.files, folder.heads, params, out))
    else:
        _require_right(params, folder, out)
    (require_states if out.distributed else require_parts)(out, NAME)


def _parts(tree: Tree, folder: Folder) -> list[Chained]:
    """The optimizers of common.pt. Where their groups are an object of every group of ranks, those of the first."""
    if isinstance(tree, dict) and tree and all(isinstance(k, int) for k in tree):
        parts = [_with_groups(tree[k], folder, f"chained_{k}.") for k in sorted(tree)]
        return parts_of(parts, COMMON)
    return parts_of(_with_groups(tree, folder, ""), COMMON)


def _with_groups(tree: Tree, folder: Folder, prefix: str) -> Tree:
    """An optimizer of common.pt with the groups that are an object of its own, which bear the prefix of its place."""
    if not isinstance(tree, dict) or "param_state_sharding_type" not in tree or "optimizer" in tree:
        return tree
    items = folder.index.items
    pattern = re.escape(prefix) + r"optimizer\.distributed\.dp_group_idx_0\.optimizer/.+"
    item = items.get(next((n for n in items if re.fullmatch(pattern, n)), ""))
    if not isinstance(item, ByteItem):
        return tree
    found = folder.object(item)
    return {**(found if isinstance(found, dict) and "optimizer" in found else {"optimizer": found}), **tree}


def _require_right(params: list[Param], folder: Folder, out: Found) -> None:
    """Moments that the real writer misplaced cannot be moved. Source of the fault: core_v0.15.0 to v0.19.0.

    With fully_reshardable and a padded bucket before another, sharded_param_state_fully_reshardable slices a buffer
    without padding by offsets that count it (core/optimizer/distrib_optimizer.py). The optimizer's copies of weights
    are then not the weights; looked at only where the run had such buckets.
    """
    if not out.distributed or not flat.is_shifted(params, out.facts):
        return
    wrong = next((k.name for k in folder.raw if k.kind == "master" and not _is_rounded(k, folder)), None)
    if wrong is None:
        return
    why = (
        "megatron-core 0.15 to 0.19 writes fully_reshardable moments shifted where a bucket's end is padded, as this "
        f"run's are: the optimizer's copy of {wrong} is not that weight"
    )
    for key, tensor in out.tensors.items():
        if key.kind != "weight":
            out.tensors[key] = replace(tensor, why_unsupported=why)
    out.damaged_state = why
    out.warnings.append(f"the optimizer's state is damaged by its writer: {why}")


_SAMPLE = 1024
"""Elements that are compared at the first corner of each chunk."""


def _is_rounded(key: Key, folder: Folder) -> bool:
    """Whether a float32 copy is its weight, rounded to the weight's type, at the beginning of each of its chunks."""
    master, weight = folder.raw[key], folder.raw.get(Key(key.name))
    if weight is None or weight.shape != master.shape:
        return True
    theirs = [p for table in weight.pieces for p in table]
    for piece in (p for table in master.pieces for p in table):
        other = next((w for w in theirs if _holds(w, piece.lo)), None)
        if other is None or not piece.numel:
            continue
        n = min(_SAMPLE, _left(piece, piece.lo), _left(other, piece.lo))
        a, b = (_elements(t, p, piece.lo, n, folder) for t, p in ((master, piece), (weight, other)))
        with np.errstate(invalid="ignore", over="ignore"):
            if a.astype(b.dtype).tobytes() != b.tobytes():
                return False
    return True


def _holds(piece: Piece, at: tuple[int, ...]) -> bool:
    return all(lo <= i < lo + n for i, lo, n in zip(at, piece.lo, piece.size, strict=True))


def _left(piece: Piece, at: tuple[int, ...]) -> int:
    """Elements from an index to the end of its row."""
    return piece.lo[-1] + piece.size[-1] - at[-1] if at else 1


def _elements(tensor: Tensor, piece: Piece, at: tuple[int, ...], n: int, folder: Folder) -> npt.NDArray[Any]:
    item = tensor.dtype.itemsize
    start = piece.start + sum((i - lo) * s for i, lo, s in zip(at, piece.lo, piece.strides, strict=True))
    if piece.strides and piece.strides[-1] != item:
        n = 1
    return np.frombuffer(folder.files.get(piece.source).read(start, n * item), tensor.dtype.numpy)


def _values(root: Mapping[str, Tree], folder: Folder, out: Found) -> None:
    for key, value in root.items():
        if key in ("args", "checkpoint_version", "content_metadata"):
            out.native[key] = value
        elif key not in ("optimizer", "iteration"):
            out.values[str(key)] = value
    states: dict[tuple[int, ...], Tree] = {}
    lost = []
    for name, item in folder.index.items.items():
        if not isinstance(item, ByteItem):
            continue
        found = _OBJECT.fullmatch(name)
        base = found[1] if found else name
        if base == "rng_state":
            where = re.search(r"/shard_(\d{1,6}(?:\.\d{1,6})*)_", name)
            states[tuple(map(int, where[1].split("."))) if where else ()] = folder.object(item)
        elif base.endswith("_extra_state"):
            if folder.object(item) is not None:
                lost.append(name)
        elif not base.startswith(("optimizer.", "chained_")):
            out.values[name] = folder.object(item)
    if states:
        out.native["rng_state"] = {at if len(at) > 2 else (*at, 0): v for at, v in states.items()}
    if lost:
        out.warnings.append(f"{len(lost)} _extra_state entries (FP8 scales) are not read, such as {lost[0]}")
