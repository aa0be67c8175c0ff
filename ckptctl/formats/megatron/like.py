"""What a result takes from the run that it is for (`--like`): a Megatron checkpoint of it, or a file of its arguments.

Args and scheduler are read, no tensors. Files of arguments are a JSON object, lines of `name: value`, or the flags as a
command line has them.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFact, MissingFile, Unrecognised, Unsafe, Unsupported
from ckptctl.core.values import TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.megatron import model, schedule
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
        "vpp": facts.optional("virtual_pipeline_model_parallel_size"),
        "ep": facts.optional("expert_model_parallel_size"),
        "dp": facts.optional("data_parallel_size"),
        "vocab_divisor": facts.optional("make_vocab_size_divisible_by"),
    }
    return {k: n for k, n in own.items() if n}


def _of_args(args: dict[str, Any], where: str) -> Like:
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
    form, spec = args.get("ckpt_format"), args.get("transformer_impl")
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
    found = _flags(text, str(path)) if re.search(r"(?:^|\s)--\w", text) else _lines(text, str(path))
    if not found:
        raise Damaged(
            "--like: the file holds no arguments",
            where=str(path),
            why=f"it has {size} bytes",
            fix="give a JSON object, lines of `name: value`, or Megatron's flags as its command line has them",
        )
    return found


def _lines(text: str, where: str) -> dict[str, Any]:
    """Lines of `name: value`, as a flat YAML file has them. Unsupported for what is nested."""
    out: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        plain = re.sub(r"(?:^|\s)#.*", "", line).rstrip()
        if not plain or plain == "---":
            continue
        found = re.fullmatch(r"([A-Za-z]\w*(?:-\w+)*)\s*:\s*(\S.*)?", plain)
        if found is None or found[2] is None:
            raise Unsupported(
                f"--like: line {number} is no `name: value`",
                where=where,
                why="nested YAML has other names than Megatron's arguments",
                fix="give the arguments flat, or a checkpoint of the run",
            )
        out[found[1].replace("-", "_")] = _value(found[2])
    return out


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
            out[name] = _value(values[0]) if len(values) == 1 else [_value(v) for v in values]
        elif name in _OFF_NAMES:
            out[_OFF_NAMES[name]] = False
        elif _OFF.match(name) and name not in _KEPT:
            out[_OFF.sub("", name, count=1)] = False
        else:
            out[name] = True
    return out


def _value(text: str) -> Any:
    """A number, a truth value, nothing, or the text itself."""
    text = text.strip()
    plain = {"true": True, "false": False, "null": None, "~": None, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    try:
        value = ast.literal_eval(text) if re.fullmatch(r"[-+0-9.eE_]{1,40}", text) else text
    except (ValueError, SyntaxError):
        return text
    return value if not isinstance(value, float) or math.isfinite(value) else text
