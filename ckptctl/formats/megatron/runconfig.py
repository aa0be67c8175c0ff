"""Facts of runs that keep their config in a YAML file beside the weights: Megatron-Bridge, NeMo 2 and NeMo 1.

Class paths in those files are text here and never looked up.
Source: NVIDIA-NeMo/Megatron-Bridge 067f987, training/utils/checkpoint_utils.py, models/gpt_provider.py; NeMo 2.0,
nemo/lightning/io; NeMo 1.23, nemo/collections/nlp/parts/nlp_overrides.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.megatron import yamltext
from ckptctl.formats.megatron.found import number_of
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchtensor import read_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.core.values import Tree

RUN_CONFIG, TRAIN_STATE = "run_config.yaml", "train_state.pt"
_PLACES = (RUN_CONFIG, "../context/model.yaml", "../model_config.yaml", "model_config.yaml")
_NAMES = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu", "encoder_seq_length": "seq_length"}
"""What a config calls otherwise than Megatron's args."""
_PLAIN = (int, float, str, bool)
_MOST_TEXT = 8 << 20


def args_beside(path: Path) -> tuple[dict[str, Any], str]:
    """Megatron's args as a config beside the weights says them, and where it lies; ({}, "") where there is none."""
    tree, where = read_beside(path)
    return ({}, "") if tree is None else (args_of(tree, where), where.rpartition("/")[2])


def read_beside(path: Path) -> tuple[Any, str]:
    """A config beside the weights, and where it lies; (None, "") where there is none."""
    for name in _PLACES:
        file = path / name
        if file.is_file():
            if file.stat().st_size > _MOST_TEXT:
                raise Damaged("the run's config is too long", where=str(file), code="yaml")
            text = read_whole(file, _MOST_TEXT).decode("utf-8", "replace")
            return yamltext.parsed(text, str(file)), str(file)
    return None, ""


def args_of(tree: Any, where: str) -> dict[str, Any]:
    """The args in a run's config. Damaged where it describes no model."""
    if not isinstance(tree, dict):
        raise Damaged("the run's config is no mapping", where=where, code="yaml")
    model = next(
        (
            m
            for m in (tree.get("model"), tree.get("config"), _inner(tree.get("model")), tree)
            if isinstance(m, dict) and isinstance(m.get("num_layers"), int)
        ),
        None,
    )
    if model is None:
        raise Damaged("the run's config does not say num_layers", where=where, code="args-missing")
    plain = {str(k): v for k, v in model.items() if isinstance(v, _PLAIN) or v is None or _is_flat(v)}
    out = {_NAMES.get(k, k): v for k, v in plain.items()}
    _fill(out, model, tree)
    return out


def _inner(tree: Any) -> Any:
    return tree.get("config") if isinstance(tree, dict) else None


def _mapping(tree: Any) -> dict[str, Any]:
    return tree if isinstance(tree, dict) else {}


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, _PLAIN) for v in value)


def _fill(out: dict[str, Any], model: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """What args have under another name, or as the opposite."""
    shared = model.get("share_embeddings_and_output_weights")
    if isinstance(shared, bool):
        out["untie_embeddings_and_output_weights"] = not shared
    groups, heads = model.get("num_query_groups"), model.get("num_attention_heads")
    out["group_query_attention"] = groups is not None and groups != heads
    activation = str(model.get("activation", model.get("activation_func", ""))).lower()
    if "swiglu" in activation:
        out["swiglu"] = True
    if (
        out.get("kv_channels") is None
        and isinstance(heads, int)
        and heads
        and isinstance(model.get("hidden_size"), int)
    ):
        out["kv_channels"] = model["hidden_size"] // heads
    if out.get("ffn_hidden_size") is None and isinstance(model.get("hidden_size"), int):
        out["ffn_hidden_size"] = 4 * model["hidden_size"]
    for part, name, to in (
        ("optimizer", "use_distributed_optimizer", "use_distributed_optimizer"),
        ("ddp", "overlap_grad_reduce", "overlap_grad_reduce"),
        ("ddp", "bucket_size", "ddp_bucket_size"),
    ):
        value = _mapping(tree.get(part)).get(name)
        if isinstance(value, int):
            out[to] = value


def progress_of(path: Path) -> dict[str, Tree]:
    """Counters of a Bridge's train_state.pt by name; {} where there is none."""
    file = path / TRAIN_STATE
    if not file.is_file():
        return {}
    with FileBytes(file, name=TRAIN_STATE) as reader:
        opened = open_torch(reader)
        root = read_leaves(opened.root, reader)
    if not isinstance(root, dict) or opened.unsafe:
        raise Damaged(f"{TRAIN_STATE} holds no plain dict", where=str(file), code="root-damaged")
    return {str(k): number_of(v) for k, v in root.items()}
