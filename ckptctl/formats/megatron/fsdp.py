"""Reads fsdp_dtensor: the plain DCP that a run with Megatron-FSDP saves, its DTensors whole over ranks.

Source: Megatron-LM core_v0.16.1, core/transformer/fsdp_dtensor_checkpoint.py, core/optimizer/distrib_optimizer.py
(sharded_param_state_fsdp_dtensor), megatron/training/checkpointing.py (preprocess_fsdp_dtensor_state_dict).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.core.remake import remade, to_hub
from ckptctl.core.tensor import Key, Source
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, read_index
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.dist import KINDS, Folder
from ckptctl.formats.megatron.facts import of_namespace
from ckptctl.formats.megatron.found import Found, number_of, require_parts
from ckptctl.formats.megatron.groups import settings
from ckptctl.formats.megatron.stacked import natives

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.values import Tree
    from ckptctl.formats import Hints

_LOOKED_AT = 64 << 20
_STATE = re.compile(r"optimizer\.state\.(.+)\.([a-z_0-9]+)")
_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(.+)\.([a-z_0-9]+)")
_WEIGHT = re.compile(r"(?:model\d*|state_dict)\.(.+)")


def is_fsdp(path: Path) -> bool:
    """Whether a DCP folder is such a run's: its metadata names Megatron's parameters under `model.`, and its args."""
    file = path / NAME
    if not file.is_file() or (path / "common.pt").is_file():
        return False
    try:
        with FileBytes(file, name=NAME) as reader:
            text = reader.read(0, min(reader.nbytes, _LOOKED_AT))
    except CkptError:
        return False
    return re.search(rb"model\.(?:module\.)+(?:embedding|decoder|output_layer)\.", text) is not None


def read(path: Path, hints: Hints) -> Found:
    """The folder of one iteration. Damaged where groups or states are of no parameter."""
    with FileBytes(path / NAME, name=NAME) as reader:
        index, nbytes = read_index(reader), reader.nbytes
    values: dict[str, Tree] = {}
    options: dict[str, dict[str, Tree]] = {}
    scratch = Found(of_namespace(None, NAME), "fsdp_dtensor")
    looked = Folder(path, index, scratch)
    args = index.items.get("args")
    facts = of_namespace(looked.object(args) if isinstance(args, ByteItem) else None, NAME)
    out = Found(replace(facts, given=hints.facts.config or {}), "fsdp_dtensor")
    out.facts.require_known()
    out.unsafe += [*index.unsafe, *scratch.unsafe]
    out.unknown |= scratch.unknown
    out.sizes.append((NAME, nbytes))
    for name in index.files:
        out.sources.append(Source(name))
        out.sizes.append((name, (path / name).stat().st_size if (path / name).is_file() else 0))
    folder = Folder(path, index, out)
    for name, item in index.items.items():
        weight, state, setting = _WEIGHT.fullmatch(name), _STATE.fullmatch(name), _SETTING.fullmatch(name)
        if isinstance(item, Chunks) and (weight or state):
            called = weight or state
            assert called is not None
            kind = "weight" if weight else KINDS.get(str(called[2]), str(called[2]))
            if kind == "step":
                continue
            key = Key(_plain(called[1]), kind)
            folder.raw[key] = folder.tensor(name, key)
        elif setting and isinstance(item, ByteItem):
            options.setdefault(_plain(setting[1]), {})[setting[2]] = folder.object(item)
        elif name.startswith("optimizer.") or name.endswith("_extra_state"):
            continue
        elif isinstance(item, ByteItem) and name != "args":
            _keep(values, name, folder.object(item), out)
        elif name != "args":
            out.unsupported.append((name, "it is a tensor of no known part of a fsdp_dtensor checkpoint"))
    raw = folder.raw
    made = remade(raw, to_hub(natives(raw)))
    out.tensors = {k: replace(m.tensor, key=k) for k, m in made.items()}
    out.fused = any(model.is_fused(f"decoder.{k.name.partition('decoder.')[2]}") for k in raw)
    out.layer_keys, out.distributed = True, True
    out.native["args"] = looked.object(args) if isinstance(args, ByteItem) else None
    iteration = values.pop("iteration", None)
    out.iteration = iteration if isinstance(iteration, int) else None
    out.values.update(values)
    _groups(options, out)
    require_parts(out, NAME)
    return out


def _plain(name: str) -> str:
    """A parameter's key without what wraps the model."""
    while name.startswith(("module.", "model.")):
        name = name.partition(".")[2]
    return name


def _keep(values: dict[str, Tree], name: str, value: Tree, out: Found) -> None:
    """A value that is no tensor: of the scheduler, a counter, a rank's random state."""
    head, _, rest = name.partition(".")
    if head == "rng_state":
        states = out.native.setdefault("rng_state", {})
        numbers = tuple(map(int, re.findall(r"\d{1,6}", rest)[:2]))
        if isinstance(states, dict) and len(numbers) == 2:
            states[*numbers, 0] = value
    elif rest and head == "opt_param_scheduler":
        scheduler = values.setdefault(head, {})
        if isinstance(scheduler, dict):
            scheduler[rest] = value
    elif head == "checkpoint_version":
        out.native[head] = value
    else:
        values[name] = value


def _groups(options: dict[str, dict[str, Tree]], out: Found) -> None:
    out.has_optimizer = any(k.kind != "weight" for k in out.tensors)
    if not out.has_optimizer:
        return
    weights = {k.name for k in out.tensors if k.kind == "weight"}
    for key, said in options.items():
        half = re.fullmatch(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_[wv]", key)
        name = model.local_name(half[1] if half else key)
        if name not in weights:
            raise Damaged(
                f"the optimizer has a group for {key}, which is no parameter", where=NAME, code="optimizer-groups"
            )
        out.add_group(settings(said), [name], number_of(said.get("step")), NAME)
    lacking = [n for n in weights if not model.is_buffer(n) and not any(n in names for _, names in out.groups)]
    if lacking and out.groups:
        raise Damaged(f"{lacking[0]} is in no group of the optimizer", where=NAME, code="optimizer-groups")


__all__ = ["is_fsdp", "read"]
