"""Whether args, config, and the shapes of attention's tensors are of one model. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.tensor import Tensor
    from ckptctl.formats.megatron.facts import Facts

_QKV, _PROJ = ".self_attention.linear_qkv.weight", ".self_attention.linear_proj.weight"
_CONFIG_HEADS = ("num_attention_heads", "n_head")
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
_UNSEEN = (
    ("layernorm_epsilon", _EPSILONS),
    ("norm_epsilon", _EPSILONS),  # in args of older runs
    ("rotary_base", ("rope_theta", "rotary_emb_base")),
)


def require_fitting(tensors: Mapping[Key, Tensor], facts: Facts, where: str) -> None:
    """Damaged where heads and query groups of args contradict the shapes, or those of the user's config.

    A wrong count would cut rows of query, key and value in other places than the run did. The projection has a query
    head's rows for each head, and a key's and a value's for each group.
    Source: Megatron-LM core_v0.16.1, core/transformer/attention.py, SelfAttention.__init__.
    """
    _require_vocabulary(facts, where)
    heads = facts.optional("num_attention_heads")
    if not heads:
        return
    _require_config(facts, heads, where)
    groups = facts.optional("num_query_groups") if facts.flag("group_query_attention") else heads
    width = facts.optional("kv_channels")
    hidden = facts.optional("hidden_size")
    if width is None and hidden is not None and hidden % heads == 0:
        width = hidden // heads
    if not groups or not width or facts.args.get("heterogeneous_layers_config_path"):
        return
    if heads % groups:
        raise Damaged(
            f"args say {heads} attention heads in {groups} query groups",
            where=where,
            why="each group has as many heads",
            code="heads-contradict",
        )
    gates = heads if facts.flag("attention_output_gate") else 0
    rows, columns = (heads + gates + 2 * groups) * width, heads * width
    for key, tensor in tensors.items():
        if key.kind != "weight" or len(tensor.shape) != 2:
            continue
        if key.name.endswith(_QKV) and tensor.shape[0] != rows:
            said, have = f"{rows} rows", f"{tensor.shape[0]} rows"
        elif key.name.endswith(_PROJ) and tensor.shape[1] != columns and Key(_beside(key.name)) in tensors:
            said, have = f"{columns} columns", f"{tensor.shape[1]} columns"
        else:
            continue
        raise Damaged(
            f"{key.name} has {have}, and args say {said}",
            where=where,
            why=f"num_attention_heads {heads}, num_query_groups {groups}, kv_channels {width}",
            fix="args are of another model, or the files of another run: take all from one save",
            code="heads-contradict",
        )


def _beside(name: str) -> str:
    """The projection of query, key and value of the same attention: latent attention has none."""
    return name.removesuffix(_PROJ) + _QKV


def _require_config(facts: Facts, heads: int, where: str) -> None:
    said = next((n for k in _CONFIG_HEADS if isinstance(n := facts.given.get(k), int)), heads)
    if said != heads:
        raise Damaged(
            f"the config says {said} attention heads, the checkpoint's args {heads}",
            where=where,
            fix="give the config of this model with --model-config",
            code="heads-contradict",
        )


def _require_vocabulary(facts: Facts, where: str) -> None:
    """Damaged where the config has fewer tokens than args: what are tokens would be let go as rows of padding."""
    given, own = facts.true_vocabulary, replace(facts, given={}).true_vocabulary or facts.optional("vocab_size")
    if given is not None and own is not None and given < own:
        raise Damaged(
            f"the config says a vocabulary of {given}, the checkpoint's args one of {own}",
            where=where,
            why="rows beyond the vocabulary are let go as padding, and these are tokens",
            fix="give the config of this model with --model-config",
            code="config-shape-mismatch",
        )


def unlike_config(facts: Facts) -> tuple[str, ...]:
    """A warning for each number that the config has and args have another one for: no shape tells these."""
    ropes = facts.given.get("rope_parameters")
    config = {**(ropes if isinstance(ropes, dict) else {}), **facts.given}
    out: list[str] = []
    for name, keys in _UNSEEN:
        if name == "rotary_base" and facts.args.get("position_embedding_type") != "rope":
            continue
        own, key = facts.args.get(name), next((k for k in keys if config.get(k) is not None), "")
        said = config.get(key)
        if isinstance(own, (int, float)) and isinstance(said, (int, float)) and own != said:
            out.append(f"the config says {key} {said}, the checkpoint's args {name} {own}: is it this model's?")
    return tuple(out)


__all__ = ["require_fitting", "unlike_config"]
