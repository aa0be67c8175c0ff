"""inspect and ls: what a checkpoint holds, from headers and metadata alone."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import WEIGHTS, Checkpoint, is_state, part_of
from ckptctl.formats.hf.adapter import described as described_adapter
from ckptctl.operations.elsewhere import reads_hub
from ckptctl.operations.holdings import holdings
from ckptctl.operations.opening import Reading, open_checkpoint, placeholders, require_tensors
from ckptctl.operations.state_values import plain, state_values

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.tensor import Key, Tensor

Document = dict[str, Any]
AXES = ("tp", "pp", "vpp", "ep", "dp", "zero_stage", "world_size")


@reads_hub()
def inspect(
    path: Path | str, reading: Reading | None = None, *, tensors: bool = False, places: bool = False
) -> Document:
    """What a checkpoint holds (schema ckptctl.inspect/1). Reads headers only.

    tensors lists them; places adds `holdings`, how much of each kind and layer lies in each file. A global that would
    run code is reported, not an error.
    """
    checkpoint, evidence = open_checkpoint(path, reading)
    if not checkpoint.unsafe:
        require_tensors(checkpoint)
    named = _under_one_naming(checkpoint)
    resumable, why = _resumable(checkpoint)
    document: Document = {
        "schema": "ckptctl.inspect/1",
        "path": checkpoint.root,
        "format": checkpoint.format,
        "variant": checkpoint.variant,
        "recognised": evidence.why,
        "layout": {axis: checkpoint.layout.get(axis) for axis in AXES},
        "step": checkpoint.step,
        "family": checkpoint.facts.family,
        "kinds": _kinds(checkpoint),
        "state": state_of(named),
        "state_values": state_values(checkpoint),
        "groups": _groups(checkpoint),
        "ties": dict(checkpoint.ties),
        "frozen": _frozen(named),
        "resumable": resumable,
        "why": why,
        "quantized": checkpoint.quantized,
        "adapter": described_adapter(checkpoint.adapter) if checkpoint.adapter else None,
        "config": checkpoint.facts.origin,
        "unsafe": [{"file": u.file, "global": u.name, "why": u.why} for u in checkpoint.unsafe],
        "unknown_globals": list(checkpoint.unknown_globals),
        "unsupported": [{"what": w, "why": y} for w, y in checkpoint.unsupported],
        "about": plain(dict(checkpoint.about)),
        "warnings": [*checkpoint.warnings, *_unnamed(checkpoint), *_placeholders(checkpoint)],
        "files": [{"path": f.path, "bytes": f.nbytes, "role": f.role} for f in checkpoint.files],
    }
    if tensors:
        document["tensors"] = [described(k, t) for k, t in checkpoint.tensors.items()]
    if places:
        document["holdings"] = holdings(checkpoint)
    return document


def _under_one_naming(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with one name for a weight and its state, where a Trainer gave them several."""
    if checkpoint.facts.config is None or not any(map(is_state, checkpoint.tensors)):
        return checkpoint
    from ckptctl.operations.naming import under_hub_names  # what it wants takes longer to load than to run

    return under_hub_names(checkpoint)


@reads_hub()
def ls(
    path: Path | str, pattern: str = "*", reading: Reading | None = None, *, kinds: tuple[str, ...] = ()
) -> Document:
    """The tensors whose names match (schema ckptctl.ls/1)."""
    checkpoint, _ = open_checkpoint(path, reading)
    require_tensors(checkpoint)
    found = [
        described(k, t)
        for k, t in checkpoint.tensors.items()
        if fnmatchcase(k.name, pattern) and (not kinds or k.kind in kinds)
    ]
    return {"schema": "ckptctl.ls/1", "path": checkpoint.root, "format": checkpoint.format, "tensors": found}


def described(key: Key, tensor: Tensor) -> Document:
    """One tensor as `--json` shows it. pieces counts the places that hold it; nothing is located for that."""
    counted = getattr(tensor.pieces, "pieces", None)
    number = counted if isinstance(counted, int) else sum(map(len, tensor.pieces))
    return {
        "name": key.name,
        "kind": key.kind,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shown),
        "bytes": tensor.nbytes,
        "pieces": number,
    }


def _kinds(checkpoint: Checkpoint) -> Document:
    out: Document = {}
    for key, tensor in checkpoint.tensors.items():
        row = out.setdefault(key.kind, {"tensors": 0, "numel": 0, "bytes": 0, "dtypes": []})
        row["tensors"] += tensor.cast_from is None
        if (key.kind in WEIGHTS and key.name in checkpoint.ties) or tensor.cast_from is not None:
            continue  # an alias has its owner's elements, a weight of which only the master is stored the master's
        row["numel"] += tensor.numel
        row["bytes"] += tensor.nbytes
        if tensor.dtype.name not in row["dtypes"]:
            row["dtypes"].append(tensor.dtype.name)
    return {kind: row for kind, row in out.items() if row["tensors"]}


def state_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Each part of a training state: present, partial or absent."""
    weights = {k.name for k in checkpoint.tensors if k.kind in WEIGHTS and k.name not in checkpoint.ties}
    parts = {part_of(name) for name in (*checkpoint.values, *checkpoint.native)}
    by_kind: dict[str, set[str]] = {}
    for key in checkpoint.tensors:
        if is_state(key):
            by_kind.setdefault(key.kind, set()).add(key.name)
    moments = set().union(
        *(names for kind, names in by_kind.items() if kind not in ("master", "step", "ema", "other")), set()
    )
    steps = by_kind.get("step", set()) | {
        n for n, kind in (checkpoint.optimizer.scalars if checkpoint.optimizer else {}) if kind == "step"
    }
    groups = bool(checkpoint.optimizer and checkpoint.optimizer.groups)

    unnamed = bool(checkpoint.optimizer and checkpoint.optimizer.unnamed)
    buffers = {k.name for k in checkpoint.tensors if k.kind == "buffer"}

    def share(names: set[str], wanted: set[str] = weights - buffers) -> str:
        enough = len(names) >= len(wanted) if unnamed else names >= wanted
        return "absent" if not names else "present" if enough else "partial"

    return {
        "weights": share(weights, weights),
        "masters": share(by_kind.get("master", set())),
        "moments": share(moments),
        "steps": share(steps),
        "groups": "present" if groups else "absent",
        **{p: "present" if p in parts else "absent" for p in ("scheduler", "rng", "counters")},
    }


def lacking(checkpoint: Checkpoint, state: dict[str, str]) -> list[str]:
    """Parts that no run goes on without, and that are not there. state is that of state_of()."""
    needed = [p for p in ("weights", "moments", "groups") if state[p] == "absent"]
    return [p for p in needed if p != "moments" or not keeps_nothing(checkpoint)]


def keeps_nothing(checkpoint: Checkpoint) -> bool:
    """Whether the optimizer has no state at all, by its settings: torch's SGD without momentum."""
    groups = checkpoint.optimizer.groups if checkpoint.optimizer else ()
    return bool(groups) and all("nesterov" in g.options and g.options.get("momentum") == 0 for g in groups)


def there(checkpoint: Checkpoint, state: dict[str, str]) -> str:
    """What a run goes on with, in words."""
    if state["moments"] == "absent" and keeps_nothing(checkpoint):
        return "weights and groups are there, and the optimizer keeps no moments"
    return "weights, moments and groups are there"


def trainer_needs(checkpoint: Checkpoint) -> str:
    """Why Transformers' Trainer does not go on from a folder of its own that has weights, moments and groups, or "".

    Source: transformers 5.24, trainer.py: train reads trainer_state.json whatever is there, and
    _load_optimizer_and_scheduler passes over optimizer.pt, without a word, where scheduler.pt is not there.
    """
    if checkpoint.format != "trainer":
        return ""
    there = {f.path.rpartition("/")[2] for f in checkpoint.files}
    if "trainer_state.json" not in there:
        return "no trainer_state.json, without which the Trainer stops"
    return "" if "scheduler.pt" in there else "no scheduler.pt, without which the Trainer loads no optimizer"


def _resumable(checkpoint: Checkpoint) -> tuple[bool, str]:
    """Whether a run can go on from it, and why (not)."""
    if checkpoint.unsafe:
        return False, "a pickle in it would run code"
    if checkpoint.damaged_state:
        return False, "the optimizer's state is damaged by its writer"
    if checkpoint.missing:
        more = f" (and {len(checkpoint.missing) - 1} more)" if len(checkpoint.missing) > 1 else ""
        return False, f"{checkpoint.missing[0]} is not there{more}"
    state = state_of(checkpoint)
    lost = lacking(checkpoint, state)
    if lost:
        return False, f"no {', no '.join(lost)}"
    if refused := trainer_needs(checkpoint):
        return False, refused
    missing = [p for p in ("scheduler", "rng", "counters") if state[p] == "absent"]
    return True, there(checkpoint, state) + (f"; without {', '.join(missing)}" if missing else "")


def _groups(checkpoint: Checkpoint) -> list[Document]:
    if checkpoint.optimizer is None:
        return []
    several = len({g.owner for g in checkpoint.optimizer.groups}) > 1
    return [
        {
            "parameters": len(g.params),
            **({"optimizer": g.owner} if several else {}),
            "settings": {k: plain(v) for k, v in g.options.items()},
        }
        for g in checkpoint.optimizer.groups
    ]


def _unnamed(checkpoint: Checkpoint) -> list[str]:
    """A word where state is keyed by numbers that mean nothing by themselves."""
    why = checkpoint.optimizer.unnamed if checkpoint.optimizer else ""
    return (
        [f"the optimizer's parameters have numbers and no names: {why}; --param-order FILE gives them"] if why else []
    )


def _placeholders(checkpoint: Checkpoint) -> list[str]:
    names = placeholders(checkpoint)
    return [f"{len(names)} weights are placeholders without data, of shape (0,): {names[0]}"] if names else []


def _frozen(checkpoint: Checkpoint) -> list[str]:
    """Weights without state, where the others have some."""
    updated = {k.name for k in checkpoint.tensors if is_state(k) and k.kind not in ("master", "ema", "other")}
    if not updated or (checkpoint.optimizer and checkpoint.optimizer.unnamed):
        return []
    return [
        k.name
        for k in checkpoint.tensors
        if k.kind == "weight" and k.name not in updated and k.name not in checkpoint.ties
    ]
