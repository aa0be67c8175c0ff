"""Megatron-core's tensors as made of the hub's, by the table in megatron.toml. Pure but for reading that table once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.remake import Native
from ckptctl.core.tensor import Key, Part
from ckptctl.names.expression import NoNumber, value_of
from ckptctl.names.table import table

if TYPE_CHECKING:
    from ckptctl.names.families import Family, Parameter

Shape = tuple[int, ...]
_HEADS = ("lm_head.weight", "embed_out.weight")


def megatron(family: Family, *, head: bool) -> list[Native]:
    """The parameters and buffers of a family as Megatron has them. head: a tied head, too, where a file holds one.

    Unsupported for a family, or a parameter of a config, that its models do not have.
    """
    blocks = table("megatron")["families"].get(family.name)
    if blocks is None:
        raise Unsupported(
            f"Megatron's names of {family.name} models are not known here",
            why=f"known are {', '.join(table('megatron')['families'])}",
            fix="convert to hf, dcp or torch instead",
            code="family-unknown",
        )
    shapes = {p.name: p.shape for p in _parameters(family)}
    if head and not any(h in shapes for h in _HEADS):
        embedding = next(n for n in shapes if "emb" in n or n.endswith("wte.weight"))
        shapes[table("ties")["head_of"].get(embedding, _HEADS[0])] = shapes[embedding]
    by_pattern: dict[str, list[tuple[str, str]]] = {}
    for name in shapes:
        numbers = re.findall(r"\.(\d+)(?=\.)", name)
        pattern = re.sub(r"\.\d+(?=\.)", ".{l}", name, count=1)
        pattern = re.sub(r"\.\d+(?=\.)", ".{e}", pattern, count=1)
        by_pattern.setdefault(pattern, []).append(((*numbers, "")[0], (*numbers, "", "")[1]))
    out, covered = [], set[str]()
    for entry in (e for block in blocks for e in table("megatron")["tensors"][block]):
        how, hub = next((k, v) for k, v in entry.items() if k != "name")
        patterns = [hub] if isinstance(hub, str) else hub
        for layer, expert in by_pattern.get(patterns[0], ()):
            made = [p.replace("{l}", layer).replace("{e}", expert) for p in patterns]
            lacking = [m for m in made if m not in shapes]
            if lacking:
                raise Damaged(f"the config has {made[0]} and not {lacking[0]}", code="config-numbers")
            covered.update(made)
            name = entry["name"].replace("{l}", layer).replace("{e}", expert)
            out.append(_MAKERS[how](name, made, [shapes[m] for m in made], family))
    unknown = [n for n in shapes if n not in covered]
    if unknown:
        raise Unsupported(
            f"Megatron's {family.name} has no parameter for {unknown[0]}",
            why=f"{len(unknown)} of {len(shapes)} parameters of the config are in no Megatron model",
            fix="convert to hf, dcp or torch instead",
            code="family-unknown",
        )
    return out


def megatron_arguments(family: Family) -> dict[str, Any]:
    """What a run's args say of a model of the family, by their names. Damaged where the config lacks a number."""
    ropes = family.config.get("rope_parameters")
    theta = ropes.get("rope_theta") if isinstance(ropes, dict) else None
    sizes = {**family.sizes, "rope_theta": family.config.get("rope_theta", theta if theta is not None else 10000)}
    if isinstance(ropes, dict):
        sizes["partial_rotary_factor"] = ropes.get("partial_rotary_factor")
    out: dict[str, Any] = {}
    for block in table("megatron")["args_of"][family.name]:
        for name, text in table("megatron")["args"][block].items():
            try:
                out[name] = value_of(text, sizes)
            except NoNumber as err:
                raise Damaged(
                    f"the config does not say Megatron's {name}", why=str(err), code="config-numbers"
                ) from err
    base = out.get("rotary_base")
    if isinstance(base, float) and base.is_integer():
        out["rotary_base"] = int(base)
    if out["num_experts"]:
        out["moe_layer_freq"] = _expert_layers(family)
    return out


def _expert_layers(family: Family) -> int | list[int]:
    """Megatron's --moe-layer-freq: 1 where every layer has experts, else 1 or 0 for each layer.

    Source: Megatron-LM core_v0.16.1, core/models/gpt/gpt_layer_specs.py, get_gpt_decoder_layer_specs.
    """
    count = _size(family, "layers", "n_layer", "num_hidden_layers")
    found = {int(m[1]) for p in family.parameters("disk") if (m := re.search(r"\.(\d+)\..*\.experts\.0\.", p.name))}
    return 1 if len(found) == count else [int(layer in found) for layer in range(count)]


def _parameters(family: Family) -> list[Parameter]:
    return [*family.parameters("disk"), *family.buffers("disk")]


def _same(name: str, hub: list[str], shapes: list[Shape], family: Family) -> Native:
    return Native.renamed(name, hub[0], shapes[0])


def _turned(name: str, hub: list[str], shapes: list[Shape], family: Family) -> Native:
    rows, columns = shapes[0]
    part = Part(Key(hub[0]), (columns, rows), (0, 0), (columns, rows), (rows, columns), (0, 0), (1, 0))
    return Native(name, (columns, rows), (part,), (shapes[0],))


def _stacked(name: str, hub: list[str], shapes: list[Shape], family: Family) -> Native:
    rows, *rest = shapes[0]
    view, size = (len(hub), rows, *rest), (1, rows, *rest)
    zero = (0,) * len(size)
    axes = tuple(range(len(size)))
    parts = tuple(Part(Key(h), view, (i, *zero[1:]), size, size, zero, axes) for i, h in enumerate(hub))
    return Native(name, (len(hub) * rows, *rest), parts, tuple(shapes))


def _qkv(name: str, hub: list[str], shapes: list[Shape], family: Family) -> Native:
    """For each query group its query heads, a key head, a value head.

    Source: Megatron-LM core_v0.16.1, core/transformer/attention.py, SelfAttention.get_query_key_value_tensors.
    """
    heads, groups = _size(family, "heads", "num_attention_heads"), _size(family, "kv_heads", "num_key_value_heads")
    rest = shapes[1][1:]
    if groups < 1 or heads % groups or shapes[1][0] % groups or shapes[0][0] * groups != shapes[1][0] * heads:
        raise Damaged(
            f"{hub[0]} {shapes[0]} and {hub[1]} {shapes[1]} are not {heads} heads in {groups} groups",
            fix="check num_attention_heads, num_key_value_heads and head_dim of the config (--model-config)",
            code="config-numbers",
        )
    per, head = heads // groups, shapes[1][0] // groups
    view = (groups, per + 2, head, *rest)
    zero, axes = (0,) * len(view), tuple(range(len(view)))
    parts = []
    for name_, first, count in zip(hub, (0, per, per + 1), (per, 1, 1), strict=True):
        size = (groups, count, head, *rest)
        parts.append(Part(Key(name_), view, (0, first, *zero[2:]), size, size, zero, axes))
    return Native(name, (groups * (per + 2) * head, *rest), tuple(parts), tuple(shapes))


def _thirds(name: str, hub: list[str], shapes: list[Shape], family: Family) -> Native:
    """GPT-2's c_attn: (in, 3 * heads * head), or its bias, as rows by head: query, key, value."""
    heads = _size(family, "heads", "n_head")
    *rest, rows = shapes[0]
    if heads < 1 or rows % (3 * heads):
        raise Damaged(f"{hub[0]} {shapes[0]} is not of {heads} heads", fix="check n_head", code="config-numbers")
    head = rows // (3 * heads)
    view, hub_view = (heads, 3, head, *rest), (*rest, 3, heads, head)
    n = len(rest)
    axes = (n + 1, n, n + 2, *range(n))
    part = Part(Key(hub[0]), view, (0,) * len(view), view, hub_view, (0,) * len(view), axes)
    return Native(name, (rows, *rest), (part,), (shapes[0],))


def _size(family: Family, *names: str) -> int:
    """A whole number of the config, by the first of those names that it has."""
    found = next((family.sizes[n] for n in names if family.sizes.get(n) is not None), None)
    if type(found) is not int:
        raise Damaged(f"the config has no {names[-1]}", fix="give the whole config.json", code="config-numbers")
    return found


_MAKERS = {"same": _same, "turned": _turned, "stacked": _stacked, "qkv": _qkv, "thirds": _thirds}
