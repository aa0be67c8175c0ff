"""A record of what a framework saved after its load and after its steps, read by the format's own reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.operations.opening import Reading
from ckptctl.operations.tensors import TensorReader
from ckptctl.operations.verify.record import SAMPLES, Record, Trained
from ckptctl.operations.verify.sides import NO_STATE, Side, opened

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.verify.rules import Rule

Document = dict[str, Any]


def padding_rows(named: Checkpoint) -> int:
    """Rows of the vocabulary's padding that a checkpoint takes along, as Megatron trains them; else 0."""
    return next((t.shape[0] for k, t in named.tensors.items() if k.part == "padding" and t.shape), 0)


def record_of_saves(folder: Path, told: Document, named: Checkpoint, rule: Rule | None) -> Record:
    """The record of folder/before and folder/after. named has the names, and the config, that both are read by."""
    names = [k.name for k in named.tensors if k.kind in WEIGHTS and not k.part and k.name not in named.ties]
    record = Record(losses=told["losses"], lr=told["lr"], finite=told["finite"])
    types: dict[str, str] = {}
    for word in ("before", "after"):
        side = _side(folder / word, named, names)
        settings = side.settings
        with TensorReader(side.checkpoint, 64 << 20) as reader:
            for key, tensor in side.checkpoint.tensors.items():
                is_state = key.kind in (*WEIGHTS, MASTER) or key.kind not in NO_STATE
                if key.part not in ("", "made") or key.name in named.ties or not is_state:
                    continue
                kind = "weight" if key.kind in WEIGHTS else key.kind
                types.setdefault(kind, tensor.dtype.name)
                into = record.parameters.setdefault(key.name, Trained(key.name, tensor.shape))
                array, after = reader.array(key), side.padding_of(key)
                if word == "before":
                    into.before[kind] = _digest(array)
                    if after is not None:
                        into.before[f"{kind} padding"] = _digest(reader.array(after.key))
                        types.setdefault(f"{kind} padding", tensor.dtype.name)
                else:
                    array = array if after is None else np.concatenate([array, reader.array(after.key)])
                    into.after[kind], into.samples[kind] = _digest(array), _samples(array)
        for name, into in record.parameters.items():
            if word == "before":
                into.step_before = side.steps.get(name)
                if name in settings and rule is not None:
                    into.settings = rule.settings(settings[name])
            else:
                into.step_after = side.steps.get(name)
    told["types"] = types
    return record


def _side(folder: Path, named: Checkpoint, names: list[str]) -> Side:
    """What was saved, under the same names, with the same config, and the vocabulary's padding where named has it."""
    rows, config = padding_rows(named), dict(named.facts.config or {})
    if rows:
        config["vocab_size"] -= rows
    file = folder.parent / "config.json"
    file.write_text(json.dumps(config))
    side = opened(folder, Reading(model_config=file)).under(names, dict(named.ties))
    return (side.padded() or side) if rows else side


def _digest(array: Any) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).tobytes()))


def _samples(array: Any) -> list[float]:
    """Numbers spread evenly over a tensor, as `step.samples_of` takes them."""
    flat = np.ascontiguousarray(array).reshape(-1)
    count = min(SAMPLES, flat.size)
    if not count:
        return []
    at = np.arange(count) * (flat.size - 1) // max(1, count - 1)
    return [float(x) for x in flat[at].astype(np.float64)]
