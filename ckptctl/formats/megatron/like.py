"""What a result takes from the run that it is for (`--like`): a Megatron checkpoint of it, or a file of its arguments.

Args and scheduler are read, no tensors. Files of arguments are a JSON object, YAML, or flags of a command line.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFact, MissingFile, Unrecognised, Unsafe
from ckptctl.core.values import TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.megatron import model, runconfig, schedule, yamltext
from ckptctl.formats.megatron.facts import Facts, of_namespace
from ckptctl.formats.megatron.ranks import model_file, rank_folders
from ckptctl.formats.megatron.read import detect
from ckptctl.formats.torchfile.read import open_torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.core.values import Tree

_TEXT_LIMIT = 4 << 20
_OFF = re.compile(r"no_|disable_")
_OFF_NAMES = {"disable_bias_linear": "add_bias_linear", "no_position_embedding": "add_position_embedding"}
"""Flags that switch something off, where it has another name than the flag without its first word."""
_PARTS = ("train", "optimizer", "scheduler", "rng")
"""Sections of a Megatron-Bridge's config whose fields are named as Megatron's arguments.

Source: NVIDIA-NeMo/Megatron-Bridge 067f987, training/config.py.
"""
_KEPT = ("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")


@dataclass(frozen=True)
class Like:
    """The run that a result is for. args are as Megatron names them; constants are those of its scheduler."""

    where: str
    args: Mapping[str, Any]
    is_whole: bool
    """Whether args are all of a run's, as a checkpoint has them."""
    constants: Mapping[str, Tree] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a conversion that the run decides where no flag does: its mesh, file format, kind of optimizer."""


def read(path: Path) -> Like:
    """The run of a checkpoint's folder, or of a file of arguments. Unrecognised where it is neither."""
    if path.is_file():
        return _of_args(_arguments(path), str(path))
    if not path.exists():
        raise MissingFile(f"--like: nothing is at {path}", fix="check the path")
    found = detect(path)
    if found is None:
        raise Unrecognised(
            "--like: no Megatron checkpoint is here",
            where=str(path),
            fix="give a run's folder, an iteration's, or a file of Megatron's arguments",
        )
    return _of_checkpoint(found.path)


def _of_checkpoint(path: Path) -> Like:
    common = path / "common.pt"
    is_dist = common.is_file()
    folders = [] if is_dist else rank_folders(path)
    file = common if is_dist else model_file(folders[0]) if folders else None
    if file is None:
        raise MissingFile("--like: no rank's file is there", where=str(path))
    with FileBytes(file, name=str(file)) as reader:
        opened = open_torch(reader)
    if opened.unsafe:
        raise Unsafe(
            f"--like: a pickle names {opened.unsafe[0].name}, which would run code",
            where=str(file),
            fix="nothing was run; ask who made it",
            code="pickle-calls-code",
        )
    root = opened.root
    args = dict(of_namespace(root.get("args"), str(file)).args) if isinstance(root, dict) else {}
    if not args:
        beside, file_name = runconfig.read_beside(path)
        if beside is not None:
            return _of_args(_from_yaml(beside, file_name), file_name, form="torch_dist" if is_dist else "torch")
        raise MissingFact(
            "--like: the checkpoint has no args", where=str(file), fix="give a file of the run's arguments instead"
        )
    saved = schedule.constants_in(root.get("opt_param_scheduler", root.get("lr_scheduler")))
    facts = Facts(args, str(file))
    facts.require_known()
    chunk = root.get("model", root.get("model0"))
    names = chunk if isinstance(chunk, dict) else {}
    if is_dist:
        is_fused = args.get("transformer_impl") != "local"
    else:
        is_fused = any(model.is_fused(str(n)) for n, v in names.items() if isinstance(v, TensorRef))
    defaults = {
        **_mesh(facts),
        "megatron_format": "torch_dist" if is_dist else "torch",
        "layer_spec": "te" if is_fused else "local",
    }
    if root.get("optimizer") is not None:
        defaults["optimizer"] = "distributed" if facts.flag("use_distributed_optimizer") else "plain"
    return Like(str(path), args, True, saved or schedule.constants_of(args), defaults)


def _mesh(facts: Facts) -> dict[str, Any]:
    """What args say of mesh and vocabulary; only what they do say."""
    own = {
        "tp": facts.optional("tensor_model_parallel_size"),
        "pp": facts.optional("pipeline_model_parallel_size"),
        "vpp": facts.vpp if facts.vpp > 1 else facts.optional("virtual_pipeline_model_parallel_size"),
        "ep": facts.optional("expert_model_parallel_size"),
        "dp": facts.optional("data_parallel_size"),
        "vocab_divisor": facts.optional("make_vocab_size_divisible_by"),
    }
    return {k: n for k, n in own.items() if n}


def _of_args(args: dict[str, Any], where: str, form: str = "") -> Like:
    facts = Facts(args, where)
    facts.require_known()
    layers, pp = facts.optional("num_layers"), facts.pp
    per_chunk = facts.optional("num_layers_per_virtual_pipeline_stage")
    chunks = facts.optional("num_virtual_stages_per_pipeline_rank")
    if per_chunk and layers and layers % (pp * per_chunk) == 0:
        chunks = layers // (pp * per_chunk)
    elif per_chunk and not chunks:
        raise MissingFact(
            "--like: num_layers_per_virtual_pipeline_stage needs num_layers", where=where, fix="add it to the file"
        )
    if chunks:
        args["virtual_pipeline_model_parallel_size"] = chunks
    defaults = _mesh(facts)
    world = facts.optional("world_size")
    if world and "dp" not in defaults:
        defaults["dp"] = max(1, world // (facts.tp * pp * max(1, facts.number("context_parallel_size", 1))))
    form, spec = args.get("ckpt_format") or form, args.get("transformer_impl")
    if form in ("torch", "torch_dist"):
        defaults["megatron_format"] = form
    if spec is not None:
        defaults["layer_spec"] = "local" if spec == "local" else "te"
    if "use_distributed_optimizer" in args:
        defaults["optimizer"] = "distributed" if facts.flag("use_distributed_optimizer") else "plain"
    return Like(where, args, False, schedule.constants_of(args), defaults)


# ---- files of arguments ---------------------------------------------------------------------------------------------


def _arguments(path: Path) -> dict[str, Any]:
    """Arguments by Megatron's names. Damaged where the file holds none."""
    size = path.stat().st_size
    text = path.read_bytes().decode("utf-8", "replace") if size <= _TEXT_LIMIT else ""
    if text.lstrip().startswith("{"):
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise Damaged("--like: the file is no JSON", where=str(path), why=str(err)) from err
        return {str(k).removeprefix("--").replace("-", "_"): v for k, v in tree.items()}
    if re.search(r"(?:^|\s)--\w", text):
        found = _flags(text, str(path))
    else:
        found = _from_yaml(yamltext.parsed(text, str(path)), str(path))
    if not found:
        raise Damaged(
            "--like: the file holds no arguments",
            where=str(path),
            why=f"it has {size} bytes",
            fix="give a JSON object, YAML, or Megatron's flags as its command line has them",
        )
    return found


def _from_yaml(tree: Any, where: str) -> dict[str, Any]:
    """Arguments of a YAML file: flat, in sections, or the config of a run of Megatron-Bridge."""
    if not isinstance(tree, dict):
        return {}
    sections = {k: v for k, v in tree.items() if isinstance(v, dict)}
    flat = {str(k).replace("-", "_"): v for k, v in tree.items() if k not in sections}
    if "model" in sections or "config" in sections:
        flat |= runconfig.args_of(tree, where)
    else:
        for inner in sections.values():
            flat |= {str(k).replace("-", "_"): v for k, v in inner.items() if not isinstance(v, dict)}
    for part in _PARTS:
        inner = sections.get(part, {})
        flat |= {str(k): v for k, v in inner.items() if not isinstance(v, dict) and not str(k).startswith("_")}
    return flat


def _flags(text: str, where: str) -> dict[str, Any]:
    """Flags of a command line; what stands before the first is passed over."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as err:
        raise Damaged("--like: the flags do not read as a command line", where=where, why=str(err)) from err
    out: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word, _, joined = words[at].partition("=")
        at += 1
        if not word.startswith("--"):
            continue
        values = [joined] if joined else []
        while at < len(words) and not words[at].startswith("--") and not joined:
            values.append(words[at])
            at += 1
        name = word[2:].replace("-", "_")
        if values:
            out[name] = yamltext.scalar(values[0]) if len(values) == 1 else [yamltext.scalar(v) for v in values]
        elif name in _OFF_NAMES:
            out[_OFF_NAMES[name]] = False
        elif _OFF.match(name) and name not in _KEPT:
            out[_OFF.sub("", name, count=1)] = False
        else:
            out[name] = True
    return out
