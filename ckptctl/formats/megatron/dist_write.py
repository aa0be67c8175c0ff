"""The torch_dist layout of a result: a DCP of whole tensors, common.pt and metadata.json. Nothing is written here.

Source: Megatron-LM core_v0.16.1, core/dist_checkpointing, core/transformer/transformer_block.py
(sharded_state_dict); the real loader takes tensors in any chunks.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from ckptctl.core.output import OutputFile, Put
from ckptctl.core.remake import Composed, Native, from_hub, remade
from ckptctl.core.tensor import Key, Part, Tensor
from ckptctl.formats.dcp.write import Named, laid_out
from ckptctl.formats.megatron import model, predicted, runargs
from ckptctl.formats.megatron.classic_write import step_array
from ckptctl.formats.megatron.found import SCALER
from ckptctl.formats.megatron.write import MOMENTS, ZEROS, Target, common
from ckptctl.formats.target import Choices, Item, Line
from ckptctl.formats.torch.write import TorchTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.state import Sort

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def files(target: Target, choices: Choices) -> tuple[list[OutputFile], list[Line]]:
    """The folder of the iteration: data and `.metadata`, common.pt, and last metadata.json, which says it is whole."""
    stacks = _stacks(target)
    named = [n for kind in _kinds(target) for n in _tensors(target, kind, stacks)]
    named += [Named(name, (name,), None, [None]) for name in _extra_states(target, stacks)]
    named += list(_random(target))
    folder = f"{target.folder}/"
    written = laid_out(named, target.content, replace(choices, tp=1, own_names=True), folder)
    is_stacked = any(s.layers for s in stacks.values())

    def common_file() -> list[object]:
        made = TorchTree()
        return made.segments(_common(target, made, is_stacked=is_stacked), root="common")  # type: ignore[return-value]

    text = json.dumps(METADATA)
    out = [
        *written.files,
        OutputFile(f"{folder}common.pt", common_file),  # type: ignore[arg-type]
        OutputFile(f"{folder}metadata.json", lambda: [Put(text.encode())]),
    ]
    return out, [Line("keys", "written", "layers stacked under one key" if is_stacked else "a key a layer")]


def _kinds(target: Target) -> list[tuple[str, str]]:
    """(kind, prefix of keys) of what is written."""
    out = [("weight", "")]
    if target.groups is None:
        return out
    if target.distributed:
        out.append(("master", "optimizer.state.param."))
    elif any(target.dtype(n, "weight").name != "float32" for n in target.parameters):
        out.append(("master", "optimizer.state.fp32_param."))
    return out + [(m, f"optimizer.state.{m}.") for m in MOMENTS]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Parameters under one key: rows by layer, in a row the experts'. axes says which of the two the key has."""

    rows: list[list[str]]
    layers: bool
    experts: bool

    def indices(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Where each parameter stands on the key's first axes."""
        for layer, row in enumerate(self.rows):
            for expert, name in enumerate(row):
                yield (*((layer,) if self.layers else ()), *((expert,) if self.experts else ())), name

    @property
    def shape(self) -> tuple[int, ...]:
        """The key's first axes."""
        return (*((len(self.rows),) if self.layers else ()), *((len(self.rows[0]),) if self.experts else ()))


def _stacks(target: Target) -> dict[str, _Stack]:
    """What is stacked, by key: layers where all have the same parameters, and the experts of a layer in any case.

    Source: core_v0.16.1, core/transformer/transformer_block.py, sharded_state_dict (non_homogeneous_layers: layers have
    keys of their own where moe_layer_freq is a list or above 1); core/transformer/moe/experts.py.
    """
    layers: dict[int, dict[str, str]] = {}
    for name in target.weights:
        layer = model.layer_of(name)
        if layer is not None:
            layers.setdefault(layer, {})[model.tail_of(name)] = name
    alike = _layers_alike(target, layers)
    out: dict[str, _Stack] = {}
    for layer in sorted(layers):
        row: dict[str, list[str]] = {}
        for tail, name in layers[layer].items():
            expert = _EXPERT.fullmatch(tail)
            if expert or alike:
                row.setdefault(f"mlp.experts.experts.{expert[2]}" if expert else tail, []).append(name)
        for tail, names in row.items():
            key = _key(f"decoder.layers.{layer}.{tail}", target)
            if alike:
                key = key.replace(f"decoder.layers.{layer}.", "decoder.layers.", 1)
            out.setdefault(key, _Stack([], alike, model.is_expert(names[0]))).rows.append(names)
    return out


def _layers_alike(target: Target, layers: Mapping[int, Mapping[str, str]]) -> bool:
    """Whether layers go under one key."""
    form = target.content.source.native.get("form")
    freq = target.facts.args.get("moe_layer_freq")
    if isinstance(freq, (list, str)) or (isinstance(freq, int) and freq > 1 and target.facts.experts):
        return False
    kinds = {tuple((t, target.weights[n].shape) for t, n in tails.items()) for tails in layers.values()}
    return len(kinds) == 1 and not (isinstance(form, dict) and form.get("keys") == "layers")


def _key(name: str, target: Target) -> str:
    """A name as torch_dist has it: the Transformer Engine's for norms before projections.

    The local layers of an MoE keep the norm under the first projection's name. Source: core_v0.16.1,
    core/models/gpt/gpt_layer_specs.py, sharded_state_dict_keys_map.
    """
    tail = model.tail_of(name)
    expert = _EXPERT.fullmatch(tail)
    if expert:
        return name.replace(".mlp.experts.local_experts.", ".mlp.experts.experts.")
    if not target.fused and "layernorm." in tail:
        latent = f"{name.partition(tail)[0]}self_attention.linear_kv_up_proj.weight" in target.weights
        moved = tail.startswith(("input_layernorm.", "pre_mlp_layernorm.")) and not latent
        return model.fused_name(name) if moved else name
    return target.fused_key(name)


def _tensors(target: Target, kind: tuple[str, str], stacks: Mapping[str, _Stack]) -> Iterator[Named]:
    state, prefix = kind
    names = [n for n in target.weights if state == "weight" or not model.is_buffer(n)]
    if state == "master" and not target.distributed:
        names = [n for n in names if target.dtype(n, "weight").name != "float32"]
    stacked = {n for stack in stacks.values() for row in stack.rows for n in row}
    for name in names:
        if name in stacked:
            continue
        key = prefix + _key(name, target)
        if name in model.VOCABULARY:
            yield from _vocabulary(target, name, state, key)
        else:
            yield Named(key, (key,), target.item(name, state))
    for key, stack in stacks.items():
        if stack.rows[0][0] in names:
            yield Named(prefix + key, (prefix + key,), _stacked(target, key, stack, state))


def _vocabulary(target: Target, name: str, kind: str, key: str) -> Iterator[Named]:
    """A padded vocabulary: the true rows, then the source's padding, then zeros."""
    whole = target.shapes[name]
    at = 0
    for part in target.rows(name, kind, 0, whole[0]):
        rows = part.nbytes // (target.item(name, kind).dtype.nbytes(whole) // whole[0])
        item = target.item(name, kind)
        if hasattr(part, "key"):
            tensor = target.made.get(part.key, item.tensor)
            used = Item(part.key, tensor, item.dtype)
            # Only so many rows of the padding as there is room for.
            yield _first_rows(used, rows, target, Named(key, (key,), used, whole=whole, first=at))
        else:
            empty = Tensor(Key(key, "fill"), item.dtype, (rows, *whole[1:]), ())
            yield Named(key, (key,), Item(empty.key, empty, item.dtype), whole=whole, first=at, filled=ZEROS)
        at += rows


def _first_rows(item: Item, rows: int, target: Target, named: Named) -> Named:
    if item.shape[0] == rows:
        return named
    size = (rows, *item.shape[1:])
    zero = (0,) * len(size)
    own = Key(f"{item.key.name}#{rows}", item.key.kind, item.key.part or "made")
    part = Part(Key(own.name), item.shape, zero, size, size, zero, tuple(range(len(size))))
    made = Tensor(own, item.tensor.dtype, size, Composed([(part, item.tensor.pieces)], item.tensor.dtype.itemsize))
    target.made[own] = made
    return replace(named, item=Item(own, made, item.dtype))


def _stacked(target: Target, key: str, stack: _Stack, kind: str) -> Item:
    """Parameters of all layers, of all experts, or of both as one tensor with further first axes."""
    first = target.item(stack.rows[0][0], kind)
    axes = stack.shape
    shape = (*axes, *first.shape)
    size = (*(1,) * len(axes), *first.shape)
    zero = (0,) * len(size)
    parts, tensors = [], {}
    for at, name in stack.indices():
        item = target.item(name, kind)
        parts.append(Part(Key(name), shape, (*at, *zero[len(at) :]), size, size, zero, tuple(range(len(size)))))
        tensors[Key(name)] = replace(item.tensor, key=Key(name))
    native = Native(key, shape, tuple(parts), (first.shape,) * len(parts))
    made = remade(tensors, from_hub([native]))[Key(key)].tensor
    own = Key(key, kind, "stacked")
    target.made[own] = replace(made, key=own)
    item = Item(own, target.made[own], first.dtype)
    target.items[own, first.dtype.name] = item
    return item


def _extra_states(target: Target, stacks: Mapping[str, _Stack]) -> Iterator[str]:
    """Keys of the empty _extra_state of each linear layer, without which the real loader stops."""
    for key, stack in stacks.items():
        found = re.fullmatch(r"(.+\.linear_\w+)\.weight", key)
        for at, _ in stack.indices() if found else ():
            yield f"{found[1]}._extra_state/shard_{_dotted(at)}_{_dotted(stack.shape)}"  # type: ignore[index]
    stacked = {n for stack in stacks.values() for row in stack.rows for n in row}
    yield from predicted.extra_states({n: i.shape for n, i in target.weights.items()})
    for name in target.weights:
        found = re.fullmatch(r"(.+\.linear_\w+)\.weight", _key(name, target))
        if found is not None and name not in stacked and not name.startswith(predicted.PREFIX):
            yield f"{found[1]}._extra_state/shard_0_1"


def _dotted(at: tuple[int, ...]) -> str:
    return ".".join(map(str, at))


def _random(target: Target) -> Iterator[Named]:
    """Ranks' random states. Under expert parallelism each data-parallel rank has its own.

    Source: core_v0.16.1, megatron/training/checkpointing.py, get_rng_state.
    """
    facts = target.facts
    replicas = (facts.dp or 1) * max(1, facts.number("context_parallel_size", 1)) if facts.ep > 1 else 1
    axes = (facts.pp, facts.tp, replicas)
    for pp, tp, dp in product(*map(range, axes)):
        states = target.random_state(pp, tp, dp, dp % facts.ep)
        if states is None:
            continue
        shown = 2 if facts.ep == 1 else 3
        where, whole = (".".join(map(str, at[:shown])) for at in ((pp, tp, dp), axes))
        name = f"rng_state/shard_{where}_{whole}"
        yield Named(name, (name,), None, [states])


def _common(target: Target, made: TorchTree, *, is_stacked: bool) -> dict[str, Tree]:
    """common.pt: all that is no tensor.

    Keys of single layers are said in content_metadata, by which the loader makes its own, whatever the run's flags.
    Source: core_v0.16.1, training/checkpointing.py, load_checkpoint; core/transformer/transformer_block.py,
    sharded_state_dict (non_homogeneous_layers).
    """
    facts, groups = target.facts, target.groups
    rest = common(target)
    root: dict[str, Tree] = {
        "args": runargs.namespace(facts, target.content.source),
        "checkpoint_version": 3.0,
        "iteration": rest["iteration"],
    }
    content: dict[str, Tree] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not is_stacked:
        content["non_homogeneous_layers"] = True
    if groups is not None:
        apart = facts.ep > 1
        parts = [_part(target, families, made) for families in groups.chained()]
        root["optimizer"] = dict(enumerate(parts)) if apart else parts[0]
        root["opt_param_scheduler"] = rest["opt_param_scheduler"]
        if target.distributed:
            kind = {
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
            content = {**kind, **content}
    root["num_floating_point_operations_so_far"] = rest["num_floating_point_operations_so_far"]
    root["content_metadata"] = content
    return root


def _part(target: Target, families: list[Sort], made: TorchTree) -> Tree:
    groups = target.groups
    assert groups is not None
    listed = []
    for fam in families:
        settings = dict(groups.of[fam])
        if groups.step is not None and target.distributed:
            settings["step"] = int(groups.step)
        listed.append(settings)
    scaler = {} if target.scaler is None else {SCALER: made.value(target.scaler)}
    if target.distributed:
        return {"optimizer": {"param_groups": listed}, **scaler, "param_state_sharding_type": "fully_reshardable"}
    state = {"common_step": made.array(step_array(groups.step))} if groups.step is not None else {}
    inner = {"state": state, "param_groups": listed}
    halves = any(target.dtype(n, "weight").name != "float32" for n in target.parameters)
    return {"optimizer": inner, **scaler} if halves else inner


__all__ = ["files"]
