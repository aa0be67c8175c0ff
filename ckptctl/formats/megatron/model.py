"""Names and geometry of Megatron's parameters: which box of which whole tensor a rank's tensor is. Pure.

Inside this package every checkpoint has one naming, whatever its files say: megatron-core's local layers, with global
numbers of layers and experts, whole over tensor-parallel ranks; gated projections are [gate; up], query, key and value
rows go by query group. Source: Megatron-LM core_v0.16.1, core/models/gpt, core/transformer, core/tensor_parallel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.tensor import dense_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Shape = tuple[int, ...]
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = (EMBEDDING, HEAD)

# Source: core_v0.16.1, core/models/gpt/gpt_layer_specs.py (sharded_state_dict_keys_map), and the TE modules' names.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Source: core_v0.16.1 and older, megatron/legacy/model/language_model.py, transformer.py.
_LEGACY = (
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.(?:encoder|transformer)\.final_(?:norm|layernorm)\.", "decoder.final_layernorm."),
    (r"^language_model\.(?:encoder|transformer)\.layers\.", "decoder.layers."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"^word_embeddings_for_head\.|^word_embeddings\.", "output_layer."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(?:norm|layernorm)\.", ".pre_mlp_layernorm."),
    (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
)
# The axis that tensor-parallel ranks cut, by the end of a name; None: every rank has all of it.
_CUTS: tuple[tuple[str, int | None], ...] = (
    (r"embedding\.(?:position|tokentype)_embeddings\.weight", None),
    (r"embedding\.word_embeddings\.weight|output_layer\.(?:weight|bias)", 0),
    (r"self_attention\.linear_(?:qkv|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)", 0),
    (r"linear_fc1\.(?:weight|bias)", 0),
    (r"mtp\.layers\.\d+\.eh_proj\.(?:weight|bias)", 0),
    (r"(?:self_attention\.linear_proj|linear_fc2)\.weight", 1),
    (r"(?:self_attention\.linear_proj|linear_fc2)\.bias", None),
    (r"(?:\w*layernorm|\w*norm)\.(?:weight|bias)", None),
    (r"mlp\.router\.(?:weight|bias|expert_bias|local_tokens_per_expert)|shared_experts\.gate_weight", None),
)
LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
"""A name, or a key of torch_dist, of one layer; (number, the rest)."""
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(?:experts\.)?linear_(fc[12])\.(weight|bias)(\d{1,6})")
# Order of registration inside a layer; what is not here follows in its own order.
_ORDER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.q_layernorm", "self_attention.kv_layernorm",
    "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.router", "mlp.experts",
    "mlp.shared_experts",
)  # fmt: skip
BUFFERS = ("router.expert_bias", "router.local_tokens_per_expert")
"""Ends of names that are no parameters."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's tensor, or a part of it, in a whole tensor: the box (lo, size) of view of the tensor name of shape.

    Element lo + x is element offset + sum(strides * x) of the rank's own packed tensor. cut: ranks have different
    boxes; otherwise each has all of it. is_expert: over expert-parallel ranks each has other tensors.
    """

    name: str
    shape: Shape
    view: Shape
    lo: Shape
    size: Shape
    strides: Shape
    offset: int
    cut: bool
    is_expert: bool


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank's chunk stands: its tensor- and expert-parallel ranks, sizes, and its first layer and expert."""

    tp_rank: int
    tp: int
    first_layer: int
    first_expert: int
    where: str
    version: float = 3.0
    """checkpoint_version, which says the order of rows of query, key and value."""
    heads: int = 0
    """Attention heads; 0 where no version needs them."""
    expert_tp_rank: int = -1
    expert_tp: int = 0
    """Rank and size within an expert; 0 where they are the rest's."""
    experts: int = 0
    """Experts of the rank."""

    def cut(self, name: str) -> tuple[int, int]:
        """Tensor-parallel rank and size of a parameter."""
        if self.expert_tp and is_expert(name):
            return self.expert_tp_rank, self.expert_tp
        return self.tp_rank, self.tp


def local_name(name: str) -> str:
    """A name in the package's naming, layers and experts still numbered from the rank's own first.

    Source for the wrappers: megatron/training/utils.py, unwrap_model; NeMo's `model.`.
    """
    while name.startswith(("module.", "model.")):
        name = name.partition(".")[2]
    for pattern, plain in _LEGACY:
        name = re.sub(pattern, plain, name)
    layer = LAYER.fullmatch(name)
    if layer is None:
        return name
    tail = layer[2]
    for fused, apart in _FUSED_NORMS.items():
        if tail.startswith(fused):
            tail = apart + tail[len(fused) :]
    grouped = _GROUPED.fullmatch(tail)
    if grouped is not None:
        tail = f"mlp.experts.local_experts.{grouped[3]}.linear_{grouped[1]}.{grouped[2]}"
    return f"decoder.layers.{layer[1]}.{tail}"


def is_fused(name: str) -> bool:
    """Whether a name is of the Transformer Engine's layers, which hold the norm before a projection."""
    return any(f in name for f in _FUSED_NORMS) or _GROUPED.search(name) is not None


def cut_axis(name: str) -> int | str | None:
    """The axis that tensor-parallel ranks cut, None where each has all, "" where it is not known."""
    for pattern, axis in _CUTS:
        if re.search(rf"(?:^|\.)(?:{pattern})$", name):
            return axis
    return ""


def decays(name: str, shape: Shape, *, norms: bool = False) -> bool:
    """Whether weight decay is usual; norms: for those of queries and keys, too. Source: core/optimizer/__init__.py."""
    if norms and re.search(r"self_attention\.[qk]_layernorm\.", name):
        return True
    return len(shape) > 1 and not name.endswith(".bias")


def is_expert(name: str) -> bool:
    """Whether expert-parallel ranks have different ones."""
    return ".mlp.experts." in name


def is_buffer(name: str) -> bool:
    """Whether it is no parameter."""
    return name.endswith(BUFFERS)


def expert_of(name: str) -> int:
    """The number of the expert that a name is of; -1 where it is of none."""
    found = _EXPERT.fullmatch(tail_of(name))
    return int(found[1]) if found else -1


def counted_from(name: str, first_layer: int, first_expert: int) -> str:
    """A whole name as a rank's file has it: layers and experts counted from the rank's first."""
    layer = layer_of(name)
    if layer is None:
        return name
    tail, expert = tail_of(name), expert_of(name)
    grouped = _GROUPED.fullmatch(tail)
    if expert >= 0:
        tail = tail.replace(f"local_experts.{expert}.", f"local_experts.{expert - first_expert}.", 1)
    elif grouped is not None:
        tail = f"{tail.removesuffix(grouped[3])}{int(grouped[3]) - first_expert}"
    return f"decoder.layers.{layer - first_layer}.{tail}"


def fused_name(name: str, *, grouped: bool = True) -> str:
    """A name as the Transformer Engine's layers have it: norms are in the projections after them."""
    layer, tail = layer_of(name), tail_of(name)
    if layer is None:
        return name
    for fused, apart in _FUSED_NORMS.items():
        if tail.startswith(apart):
            tail = fused + tail[len(apart) :]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.(weight|bias)", tail)
    if expert is not None and grouped:
        tail = f"mlp.experts.linear_{expert[2]}.{expert[3]}{expert[1]}"
    return f"decoder.layers.{layer}.{tail}"


def layer_of(name: str) -> int | None:
    """The layer that a name is of."""
    found = LAYER.fullmatch(name)
    return int(found[1]) if found else None


def tail_of(name: str) -> str:
    """A name within its layer; the name itself outside layers."""
    found = LAYER.fullmatch(name)
    return found[2] if found else name


def order_grouped(name: str) -> tuple[int, int, int, int, int]:
    """As order_fused where a layer's experts are grouped: all first projections go before the second ones.

    Source: core_v0.16.1, core/transformer/moe/experts.py, TEGroupedMLP.
    """
    place, layer, module, expert, within = order_fused(name)
    if expert_of(name) < 0:
        return place, layer, module, 0, within
    return place, layer, module, within // 2, 2 * expert + within % 2


def order_of(*, fused: bool, grouped: bool) -> Callable[[str], tuple[int, int, int, int, int]]:
    """The order of names for local layers, or the Transformer Engine's with experts grouped or not."""
    return (order_grouped if grouped else order_fused) if fused else order


def order_fused(name: str) -> tuple[int, int, int, int, int]:
    """As order, for the Transformer Engine's layers: the norm is in the projection after it, before its weight."""
    place, layer, module, expert, within = order(name)
    if tail_of(name).startswith("input_layernorm."):
        return place, layer, _ORDER.index("self_attention.linear_qkv"), expert, within - 10
    return place, layer, module, expert, within


def order(name: str) -> tuple[int, int, int, int, int]:
    """Sorts names as named_parameters() has them: by module in order of registration, weight before bias."""
    head = ("embedding.word", "embedding.position", "embedding.", "decoder.layers.", "decoder.", "mtp.", "output_layer")
    place = next((i for i, h in enumerate(head) if name.startswith(h)), len(head))
    layer, tail = layer_of(name) or 0, tail_of(name)
    module = max((i for i, m in enumerate(_ORDER) if tail.startswith(m + ".")), default=len(_ORDER), key=_depth)
    expert = _EXPERT.fullmatch(tail)
    last = expert[2] if expert else tail
    within = (2 if "linear_fc2" in last else 0) + (1 if last.endswith("bias") else 0) - ("gate_weight" in last)
    return place, layer, module, int(expert[1]) if expert else 0, within


def _depth(i: int) -> int:
    return len(_ORDER[i]) if i < len(_ORDER) else -1


def places(name: str, shape: Shape, spot: Spot, shapes: Mapping[str, Shape]) -> list[Place]:
    """Where a rank's tensor (under its local name) lies in whole tensors; shapes are those of the rank's others.

    Unsupported for a tensor of which it is not known how ranks cut it, where they do.
    """
    layer = LAYER.fullmatch(name)
    whole = name
    if layer is not None:
        tail, expert = layer[2], _EXPERT.fullmatch(layer[2])
        if re.fullmatch(r"mlp\.experts\.weight[12]", tail):
            return _old_grouped(name, shape, spot, shapes)
        if expert is not None:
            tail = f"mlp.experts.local_experts.{int(expert[1]) + spot.first_expert}.{expert[2]}"
        whole = f"decoder.layers.{int(layer[1]) + spot.first_layer}.{tail}"
    rank, tp = spot.cut(name)
    axis = _latent_cut(name, shape, shapes) if "_down_proj." in name else cut_axis(name)
    if isinstance(axis, str):
        axis = _unknown_cut(name, shape, spot)
    if axis is None:
        return [_dense(whole, shape, shape, (0,) * len(shape), shape, cut=False)]
    if len(shape) <= axis:
        raise Damaged(f"{name} has {len(shape)} axes", where=spot.where, code="shape")
    if is_gated(name, shape, shapes):
        half, rest = shape[0] // 2, shape[1:]
        view, lo = (2, half * tp, *rest), (0, half * rank, *(0,) * len(rest))
        return [_dense(whole, (shape[0] * tp, *rest), view, lo, (2, half, *rest), cut=True)]
    if spot.version < 2 and ".linear_qkv." in name:
        return [_old_qkv(whole, shape, spot)]
    full = (*shape[:axis], shape[axis] * tp, *shape[axis + 1 :])
    lo = tuple(shape[axis] * rank if a == axis else 0 for a in range(len(shape)))
    return [_dense(whole, full, full, lo, shape, cut=True)]


def _latent_cut(name: str, shape: Shape, shapes: Mapping[str, Shape]) -> int | str | None:
    """The axis of a latent attention's down projection: whole in the TE's layers, cut by rows in the local ones.

    What is whole has as many rows as the up projection has columns, or more (the rotary part of keys).
    Source: core_v0.16.1, core/transformer/multi_latent_attention.py, MLASelfAttention.__init__.
    """
    up = shapes.get(name.replace("_down_proj.", "_up_proj."))
    if up is None or len(up) != 2 or not shape:
        return ""
    return None if shape[0] >= up[1] else 0


def _dense(name: str, shape: Shape, view: Shape, lo: Shape, size: Shape, *, cut: bool) -> Place:
    return Place(name, shape, view, lo, size, dense_strides(size, 1), 0, cut, is_expert(name))


def is_gated(name: str, shape: Shape, shapes: Mapping[str, Shape]) -> bool:
    """Whether rows of a first projection are gate and up: it then has twice the rows of the second's columns.

    Raises Damaged where they are neither the same nor twice.
    """
    head, found, tail = name.rpartition("linear_fc1.")
    if not found:
        return False
    other = shapes.get(f"{head}linear_fc2.weight")
    if other is None or len(other) != 2 or not shape:
        raise Damaged(f"{head}linear_fc2.weight is not beside {name}", code="tensor-missing")
    if shape[0] not in (other[1], 2 * other[1]):
        raise Damaged(
            f"{name} has {shape[0]} rows, {head}linear_fc2.weight {other[1]} columns",
            why="rows are the columns, or twice as many where the projection is gated",
            code="shape",
        )
    return shape[0] == 2 * other[1] and tail in ("weight", "bias")


def _unknown_cut(name: str, shape: Shape, spot: Spot) -> int | None:
    """A tensor that is not in the table is whole where there is one rank."""
    if spot.tp == 1:
        return None
    raise Unsupported(
        f"how tensor-parallel ranks share {name} {shape} is not known here",
        where=spot.where,
        why="known are the parameters of GPT models with attention, latent attention, and experts",
        fix="with one tensor-parallel rank it is taken as it is",
        code="tensor-unknown",
    )


def _old_qkv(name: str, shape: Shape, spot: Spot) -> Place:
    """Rows of versions before 2.0: (3, heads, head) in version 0, (heads, head, 3) in 1.0.

    Source: megatron/training/checkpointing.py, fix_query_key_value_ordering.
    """
    if not spot.heads or spot.heads % spot.tp or shape[0] % (3 * (spot.heads // spot.tp)):
        raise MissingFact(
            f"the order of rows of {name} needs num_attention_heads, which args do not say",
            where=spot.where,
            why=f"the checkpoint is of version {spot.version}; {shape[0]} rows over {spot.tp} ranks",
            code="args-missing",
        )
    heads, rest = spot.heads // spot.tp, shape[1:]
    head = shape[0] // (3 * heads)
    inner = dense_strides(rest, 1)
    row = rest[0] if rest else 1
    three, by_head, by_row = (
        (heads * head * row, head * row, row) if spot.version < 1 else (row, head * 3 * row, 3 * row)
    )
    view = (spot.heads, 3, head, *rest)
    lo = (heads * spot.tp_rank, 0, 0, *(0,) * len(rest))
    size, strides = (heads, 3, head, *rest), (by_head, three, by_row, *inner)
    return Place(name, (shape[0] * spot.tp, *rest), view, lo, size, strides, 0, cut=True, is_expert=False)


def _old_grouped(name: str, shape: Shape, spot: Spot, shapes: Mapping[str, Shape]) -> list[Place]:
    """GroupedMLP's two tensors for all local experts: weight1 (h, n * rows), weight2 (n * columns, h), (in, out) each.

    The bytes of either are those of n matrices one after the other: (h, rows) and (columns, h); gated rows are the
    rank's gate, then its up. Source: core_v0.16.1, core/transformer/moe/experts.py, GroupedMLP.forward
    (`view(num_local_experts, h, -1)`), sharded_state_dict.
    """
    prefix, first = name.rpartition("weight")[0], name.endswith("weight1")
    other = shapes.get(f"{prefix}weight{2 if first else 1}")
    n, (rank, tp) = spot.experts, spot.cut(name)
    one, two = (shape, other) if first else (other, shape)
    if n < 1 or one is None or two is None or len(one) != 2 or len(two) != 2 or one[1] % n or two[0] % n:
        raise Damaged(
            f"{name} {shape} is not the matrices of {n} experts, beside it is {other}",
            where=spot.where,
            fix="check num_experts and expert_model_parallel_size in args",
            code="shape",
        )
    hidden, rows, columns = one[0], one[1] // n, two[0] // n
    if two[1] != hidden or rows not in (columns, 2 * columns):
        raise Damaged(
            f"{prefix}weight1 {one} and weight2 {two} are of no experts together", where=spot.where, code="shape"
        )
    layer = LAYER.fullmatch(name)
    head = f"decoder.layers.{int(layer[1]) + spot.first_layer if layer else 0}.mlp.experts.local_experts."
    gates = rows // columns
    out = []
    for e in range(n):
        called = f"{head}{spot.first_expert + e}.linear_fc{1 if first else 2}.weight"
        whole: Shape = (rows * tp, hidden) if first else (hidden, columns * tp)
        view: Shape = (gates, columns * tp, hidden) if first else whole
        lo: Shape = (0, columns * rank, 0) if first else (0, columns * rank)
        size: Shape = (gates, columns, hidden) if first else (hidden, columns)
        strides: Shape = (columns, 1, rows) if first else (1, hidden)
        at = e * hidden * (rows if first else columns)
        out.append(Place(called, whole, view, lo, size, strides, at, cut=True, is_expert=True))
    return out
