"""Reads Megatron checkpoints: classic folders and torch_dist, weights and training state. No tensor data but replicas.

Names are megatron-core's own with global numbers (see model.py); what maps them to Hugging Face's is in names/.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import Checkpoint, File
from ckptctl.core.errors import Damaged, MissingFile, Unrecognised
from ckptctl.core.remake import Native, remade, to_hub
from ckptctl.core.tensor import Key, Part, Tensor
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import read_whole
from ckptctl.formats.megatron import archive, classic, dist, fsdp, heads, model, zarr
from ckptctl.formats.megatron.found import Found, optimizer_of
from ckptctl.formats.megatron.ranks import model_file, rank_folders

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def detect(path: Path) -> Evidence | None:
    """A run's folder with a tracker, or an iteration's: ranks' folders, or common.pt beside .metadata (torch_dist)."""
    if not path.is_dir():
        return Evidence("megatron", "it is a NeMo archive", path) if archive.is_archive(path) else None
    here = _of_iteration(path)
    if here is not None:
        return here
    if (path / TRACKER).is_file():
        folder = tracked(path)
        found = _of_iteration(folder)
        if found is None:
            raise Unrecognised(
                f"{folder.name} holds no Megatron checkpoint", where=str(path), why=f"{TRACKER} names it"
            )
        return Evidence("megatron", f"{TRACKER} names {folder.name}: {found.why}", folder)
    inner = [p for p in (path / "weights", path / "release") if p.is_dir()]
    for folder in inner:
        found = _of_iteration(folder)
        if found is not None:
            return found
    return None


def _of_iteration(path: Path) -> Evidence | None:
    if not path.is_dir():
        return None
    if (path / ".metadata").is_file() and (path / "common.pt").is_file():
        return Evidence("megatron", "it holds common.pt and .metadata (torch_dist)", path)
    if (path / "common.pt").is_file() and zarr.is_zarr(path):
        return Evidence("megatron", "it holds common.pt, and metadata.json says zarr", path)
    if fsdp.is_fsdp(path):
        return Evidence("megatron", "its .metadata names Megatron's parameters and groups (fsdp_dtensor)", path)
    folders = rank_folders(path)
    if folders and any(model_file(f) for f in folders):
        return Evidence("megatron", f"it holds {folders[0].name}", path)
    return None


def tracked(path: Path) -> Path:
    """The folder that a run's tracker names: iter_0000100, or release. MissingFile where it is not there.

    Source: Megatron-LM core_v0.16.1, megatron/training/checkpointing.py, read_metadata, get_checkpoint_name.
    """
    text = read_whole(path / TRACKER, 64).decode("utf-8", "replace").strip()
    if text != "release" and not re.fullmatch(r"\d{1,12}", text):
        raise Damaged(
            f"{TRACKER} holds no iteration", where=str(path), why=f"it says {text[:40]!r}", code="tracker-damaged"
        )
    folder = path / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise MissingFile(
            f"{folder.name} is not there",
            where=str(path),
            why=f"{TRACKER} names it",
            fix="copy the folder, or choose another with --step",
            code="step-missing",
        )
    return folder


def _iteration(path: Path) -> Path:
    """The folder of an iteration at a path that is said to be Megatron's. Unrecognised where there is none."""
    found = detect(path)
    if found is None:
        raise Unrecognised(
            "no Megatron checkpoint is here", where=str(path), fix="give a run's folder, or an iteration's"
        )
    return found.path


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint of one iteration. See classic.read and dist.read for what is refused."""
    path = _iteration(path)
    found = _found(path, hints)
    tensors = _ordered(found.tensors)
    heads.require_fitting(tensors, found.facts, str(path))
    tensors, padding = _vocabulary(tensors, found.facts.true_vocabulary, str(path))
    kinds: dict[str, set[str]] = {}
    for key in tensors:
        if key.kind != "weight":
            kinds.setdefault(key.kind, set()).add(key.name)
    values = dict(found.values)
    if found.iteration is not None:
        values["iteration"] = found.iteration
    facts = found.facts
    form = {"layers": found.spec, "distributed": found.distributed, "keys": "layers" if found.layer_keys else ""}
    native = {**found.native, "form": form}
    return Checkpoint(
        "megatron",
        found.variant,
        str(path),
        tuple(found.sources),
        tensors,
        optimizer_of(found, kinds),
        values,
        layout={
            "tp": facts.tp,
            "pp": facts.pp,
            "vpp": facts.vpp,
            "ep": facts.ep,
            "dp": facts.dp,
            "world_size": facts.optional("world_size"),
        },
        step=found.iteration,
        files=tuple(File(n, b) for n, b in found.sizes),
        unsafe=tuple(found.unsafe),
        unknown_globals=tuple(sorted(u for u in found.unknown if not u.startswith("megatron."))),
        unsupported=tuple(found.unsupported),
        warnings=(
            *found.warnings,
            *_renamed(path, found.iteration),
            *_vocabulary_warning(found.facts, found.tensors),
            *heads.unlike_config(facts),
        ),
        damaged_state=found.damaged_state,
        naming="megatron",
        padding=padding,
        native=native,
        rounded_masters=True,
        gap_reason="zip headers, pickles and alignment; copies that other ranks hold; a float32 run's masters",
    )


def _found(path: Path, hints: Hints) -> Found:
    if path.is_file():
        return archive.read(path, hints)
    if (path / "common.pt").is_file():
        return dist.read(path, hints)
    return fsdp.read(path, hints) if fsdp.is_fsdp(path) else classic.read(path, hints)


def _ordered(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Weights in order of registration, then each kind of state alike."""
    kinds = dict.fromkeys(k.kind for k in tensors)
    out: dict[Key, Tensor] = {}
    for kind in sorted(kinds, key=lambda k: k != "weight"):
        for key in sorted((k for k in tensors if k.kind == kind), key=lambda k: model.order(k.name)):
            out[key] = replace(tensors[key], key=key)
    return out


def _vocabulary(
    tensors: dict[Key, Tensor], true: int | None, where: str
) -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """Rows of the vocabulary and the padding after them, apart, in every kind. Damaged where there are too few rows."""
    natives = []
    for name in model.VOCABULARY:
        weight = tensors.get(Key(name))
        if weight is None or true is None or weight.shape[0] == true:
            continue
        rows, rest = weight.shape[0], weight.shape[1:]
        if rows < true:
            raise Damaged(
                f"{name} has {rows} rows, the vocabulary {true}",
                where=where,
                fix="check vocab_size of the config (--model-config)",
                code="config-shape-mismatch",
            )
        zero = (0,) * len(rest)
        sizes = ((true, *rest), (rows - true, *rest))
        axes = tuple(range(len(weight.shape)))
        parts = tuple(
            Part(Key(n), weight.shape, (lo, *zero), size, size, (0, *zero), axes)
            for n, lo, size in zip((name, _padding(name)), (0, true), sizes, strict=True)
        )
        natives.append(Native(name, weight.shape, parts, sizes))
    made = {k: replace(m.tensor, key=k) for k, m in remade(tensors, to_hub(natives)).items()}
    ends = tuple(_padding(n.name) for n in natives)
    padding = {}
    for key in [k for k in made if k.name in ends]:
        new = Key(key.name.removesuffix(_padding("")), key.kind, "padding")
        padding[new] = replace(made.pop(key), key=new)
    return made, padding


def _padding(name: str) -> str:
    return f"{name}#padding"


def _renamed(path: Path, iteration: int | None) -> list[str]:
    """A warning where the folder is called by another iteration than its files are of."""
    called = re.fullmatch(r"iter_(\d{1,12})", path.name)
    if called is None or iteration is None or int(called[1]) == iteration:
        return []
    return [f"{path.name} holds files of iteration {iteration}: runs go on from there, whatever the folder is called"]


def _vocabulary_warning(facts: Any, tensors: Mapping[Key, Tensor]) -> list[str]:
    weight = tensors.get(Key(model.EMBEDDING))
    if weight is None or facts.true_vocabulary is not None:
        return []
    return [
        f"which of the embedding's {weight.shape[0]} rows are padding is in no file: all are taken as tokens; "
        "--model-config says the vocabulary's size"
    ]
