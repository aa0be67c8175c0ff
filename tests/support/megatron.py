"""Layout arithmetic of Megatron's classic checkpoints, for the prototypes: which bytes hold what. Llama only.

Pure but for `read`: facts in, boxes and offsets out. Sources are Megatron-LM core_v0.16.1 unless another is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.compose import compose
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, Region
from ckptctl.core.tensor import Key, Part, Piece, Source, Tensor, dense_strides
from ckptctl.core.values import TensorRef
from tests.support.bruteforce import tables, torch_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ckptctl.core.output import Segment
    from ckptctl.core.values import Tree

F32 = BY_NAME["float32"]
STATES = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Kind -> its key in distrib_optim.pt."""
ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements. Source: core/distributed/param_and_grad_buffer.py."""


@dataclass(frozen=True)
class Facts:
    """What decides the layout, by the names that `args` of a Megatron file uses. All but vocab are in the file."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    vocab: int
    """True rows of the vocabulary: in no file for certain."""
    tp: int
    pp: int
    vpp: int
    dp: int
    bucket_numel: int | None
    """Elements at which a bucket closes; None where buckets are never split."""
    busbw: bool = False


def facts_of(args: Mapping[str, Tree], vocab: int) -> Facts:
    """The facts in a file's argparse.Namespace.

    Source: arguments.py, validate_args; core/distributed/distributed_data_parallel.py, DistributedDataParallel.__init__
    (default bucket size, and none without overlap_grad_reduce).
    """
    vpp, dp = args["virtual_pipeline_model_parallel_size"] or 1, args["data_parallel_size"]
    bucket = (args["ddp_bucket_size"] or max(40_000_000, 1_000_000 * dp)) if args["overlap_grad_reduce"] else None
    heads = args["num_attention_heads"]
    return Facts(
        args["num_layers"], args["hidden_size"], args["ffn_hidden_size"], heads,
        args["num_query_groups"] if args["group_query_attention"] else heads, args["kv_channels"],
        args["padded_vocab_size"], vocab, args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"],
        vpp, dp, bucket, args["ddp_pad_buckets_for_high_nccl_busbw"],
    )  # fmt: skip


class Native(NamedTuple):
    """One module tensor, whole over tensor-parallel ranks: a view of it, the axis of that view which ranks cut (None:
    each rank holds all of it), and the hub tensors it is made of."""

    name: str
    view: tuple[int, ...]
    axis: int | None
    parts: tuple[Part, ...]

    def box(self, tp_rank: int, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """lo and size of one rank's shard in view; its bytes are the box in row-major order.

        ValueError where tp does not divide the axis.
        """
        if self.axis is None:
            return (0,) * len(self.view), self.view
        n, rest = divmod(self.view[self.axis], tp)
        if rest:
            raise ValueError(f"tp={tp} does not divide {self.view[self.axis]} of {self.name}")
        lo = tuple(tp_rank * n if a == self.axis else 0 for a in range(len(self.view)))
        return lo, tuple(n if a == self.axis else size for a, size in enumerate(self.view))

    def shape(self, tp_rank: int, tp: int) -> tuple[int, ...]:
        """The shape of one rank's shard as the module has it."""
        _, size = self.box(tp_rank, tp)
        return size if len(size) == 1 else (math.prod(size[:-1]), size[-1])

    def of(self, kind: str) -> tuple[Part, ...]:
        """The parts of a state of the parameter."""
        return tuple(
            Part(p.hub._replace(kind=kind), p.native_view, p.native_lo, p.size, p.hub_view, p.hub_lo, p.axes)
            for p in self.parts
        )


def _part(name: str, view: tuple[int, ...], lo: tuple[int, ...], size: tuple[int, ...], part: str = "") -> Part:
    return Part(Key(name, part=part), view, lo, size, size, (0,) * len(size), tuple(range(len(size))))


def _same(name: str, hub: str, shape: tuple[int, ...], axis: int | None) -> Native:
    return Native(name, shape, axis, (_part(hub, shape, (0,) * len(shape), shape),))


def _vocabulary(name: str, hub: str, f: Facts) -> Native:
    """Rows are padded, then cut. Padding is trained like the rest: a hub tensor of its own.

    Source: training/tokenizer/tokenizer.py, _vocab_size_with_padding; core/tensor_parallel/layers.py.
    """
    view = (f.padded_vocab_size, f.hidden_size)
    rows = _part(hub, view, (0, 0), (f.vocab, f.hidden_size))
    if f.vocab == f.padded_vocab_size:
        return Native(name, view, 0, (rows,))
    padding = _part(hub, view, (f.vocab, 0), (f.padded_vocab_size - f.vocab, f.hidden_size), "padding")
    return Native(name, view, 0, (rows, padding))


def natives(f: Facts) -> dict[str, Native]:
    """Every module tensor of a Llama model by its name, with global layer numbers.

    QKV: for each query group its query heads, a key head, a value head. fc1: gate above up, each rank having a slice
    of both. linear_proj and linear_fc2 are cut on the input axis.
    Source: core/transformer/attention.py, SelfAttention.get_query_key_value_tensors; core/transformer/mlp.py,
    MLP.forward; core/tensor_parallel/layers.py, ColumnParallelLinear and RowParallelLinear.
    """
    h, ffn, g, d = f.hidden_size, f.ffn_hidden_size, f.num_query_groups, f.kv_channels
    m = f.num_attention_heads // g
    out = [_vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", f)]
    for layer in range(f.num_layers):
        to, hub = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv, up = (g, m + 2, d, h), (2, ffn, h)
        out += [
            _same(f"{to}input_layernorm.weight", f"{hub}input_layernorm.weight", (h,), None),
            _same(f"{to}self_attention.linear_proj.weight", f"{hub}self_attn.o_proj.weight", (h, g * m * d), 1),
            Native(
                f"{to}self_attention.linear_qkv.weight", qkv, 0,
                (
                    _part(f"{hub}self_attn.q_proj.weight", qkv, (0, 0, 0, 0), (g, m, d, h)),
                    _part(f"{hub}self_attn.k_proj.weight", qkv, (0, m, 0, 0), (g, 1, d, h)),
                    _part(f"{hub}self_attn.v_proj.weight", qkv, (0, m + 1, 0, 0), (g, 1, d, h)),
                ),
            ),
            _same(f"{to}pre_mlp_layernorm.weight", f"{hub}post_attention_layernorm.weight", (h,), None),
            Native(
                f"{to}mlp.linear_fc1.weight", up, 1,
                (
                    _part(f"{hub}mlp.gate_proj.weight", up, (0, 0, 0), (1, ffn, h)),
                    _part(f"{hub}mlp.up_proj.weight", up, (1, 0, 0), (1, ffn, h)),
                ),
            ),
            _same(f"{to}mlp.linear_fc2.weight", f"{hub}mlp.down_proj.weight", (h, ffn), 1),
        ]  # fmt: skip
    out.append(_same("decoder.final_layernorm.weight", "model.norm.weight", (h,), None))
    out.append(_vocabulary("output_layer.weight", "lm_head.weight", f))
    return {n.name: n for n in out}


def first_layer(pp_rank: int, chunk: int, f: Facts) -> int:
    """The global number of the first layer of a chunk; stages and chunks have equally many layers.

    Source: core/transformer/transformer_layer.py, get_transformer_layer_offset.
    """
    per_chunk = f.num_layers // (f.pp * f.vpp)
    return chunk * (f.num_layers // f.vpp) + pp_rank * per_chunk


def chunk_names(pp_rank: int, chunk: int, f: Facts) -> list[tuple[str, str]]:
    """(name in the file, name with the global layer) of one chunk's parameters, in named_parameters() order.

    Source: core/models/gpt/gpt_model.py, GPTModel.__init__; core/transformer/transformer_block.py: registration order.
    """
    per_chunk = f.num_layers // (f.pp * f.vpp)
    first = first_layer(pp_rank, chunk, f)
    out = ["embedding.word_embeddings.weight"] if pp_rank == 0 and chunk == 0 else []
    pairs = [(n, n) for n in out]
    for layer in range(per_chunk):
        for last in (
            "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv", "pre_mlp_layernorm",
            "mlp.linear_fc1", "mlp.linear_fc2",
        ):  # fmt: skip
            tail = f"{last}.weight"
            pairs.append((f"decoder.layers.{layer}.{tail}", f"decoder.layers.{first + layer}.{tail}"))
    if pp_rank == f.pp - 1 and chunk == f.vpp - 1:
        pairs += [(n, n) for n in ("decoder.final_layernorm.weight", "output_layer.weight")]
    return pairs


class Buffer(NamedTuple):
    """A flat buffer as distrib_optim.pt holds it: the first element of each parameter, and its length in elements."""

    start: dict[str, int]
    numel: int


def buffer(params: Sequence[tuple[str, int]], dp: int, bucket_numel: int | None, *, busbw: bool = False) -> Buffer:
    """Where each parameter (name, elements; in named_parameters() order) lies in its chunk's buffer.

    Parameters go in reverse order, each from a multiple of 64. A bucket closes once it has bucket_numel elements; its
    end is padded, and that padding is left out in the file, which shifts what follows.
    Source: core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer.__init__;
    core/optimizer/distrib_optimizer.py, get_parameter_state_dp_zero.
    """
    divisor = math.lcm(dp, 128, 1 << 16) if busbw else math.lcm(dp, 128)
    start: dict[str, int] = {}
    at = bucket_start = dropped = 0
    for name, numel in reversed(params):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        start[name] = at - dropped
        at += numel
        if bucket_numel is not None and at - bucket_start >= bucket_numel:
            bucket_start = -(-at // divisor) * divisor
            dropped += bucket_start - at
            at = bucket_start
    return Buffer(start, at - dropped)


def chunk_buffer(pp_rank: int, chunk: int, tp_rank: int, f: Facts) -> tuple[Buffer, list[tuple[str, Native]]]:
    """The buffer of one chunk of one rank, and its parameters by global name, in named_parameters() order.

    Only the first chunk of the first stage is split in buckets.
    Source: core/distributed/distributed_data_parallel.py (`disable_bucketing or pp_rank > 0`); training/training.py,
    get_model (disable_bucketing for later chunks).
    """
    whole = natives(f)
    members = [(name, whole[name]) for _, name in chunk_names(pp_rank, chunk, f)]
    params = [(name, math.prod(n.box(tp_rank, f.tp)[1])) for name, n in members]
    split = f.bucket_numel if pp_rank == 0 and chunk == 0 else None
    return buffer(params, f.dp, split, busbw=f.busbw), members


def buffer_segments(pp_rank: int, chunk: int, tp_rank: int, kind: str, f: Facts) -> Iterator[Segment]:
    """One state of one chunk of one rank as a target. Gaps are zeros."""
    placed, members = chunk_buffer(pp_rank, chunk, tp_rank, f)
    at = 0
    for name, native in sorted(members, key=lambda m: placed.start[m[0]]):
        start = placed.start[name]
        if start > at:
            yield Fill((start - at) * F32.itemsize, b"\0", "alignment")
        lo, size = native.box(tp_rank, f.tp)
        yield Region(Key(name, kind), F32, native.view, lo, size, native.of(kind))
        at = start + math.prod(size)
    if placed.numel > at:
        yield Fill((placed.numel - at) * F32.itemsize, b"\0", "alignment")


def rank_folder(tp_rank: int, pp_rank: int, pp: int) -> str:
    """Source: training/checkpointing.py, get_checkpoint_name (expert parallel size 1)."""
    return f"mp_rank_{tp_rank:02d}" if pp == 1 else f"mp_rank_{tp_rank:02d}_{pp_rank:03d}"


@dataclass
class Read:
    """A classic checkpoint: tensors by hub key, the files they lie in, and where each flat buffer is."""

    facts: Facts
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    buffers: dict[tuple[int, int, int, str], TensorRef] = field(default_factory=dict)
    """(pp_rank, chunk, tp_rank, kind) -> flat tensor."""
    file_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """(pp_rank, tp_rank) -> index of its distrib_optim.pt among sources."""


def read(step: Path, vocab: int) -> Read:
    """The weights, masters and moments of an iter_* folder with a distributed optimizer.

    AssertionError where names, shapes, sizes or offsets are not those that the arithmetic gives: offsets of weights are
    compared with those of the parameters' own storage, which the file holds as well.
    """
    first = torch_tree(min(step.glob("mp_rank_*/model_optim_rng.pt")))
    f = facts_of(first["args"].state, vocab)
    out = Read(f)
    pieces: dict[Key, list[Piece]] = defaultdict(list)
    replicas: dict[Key, list[Piece]] = defaultdict(list)
    dtypes = {}
    for pp_rank in range(f.pp):
        for tp_rank in range(f.tp):
            folder = step / rank_folder(tp_rank, pp_rank, f.pp)
            model, optim = (torch_tree(folder / name) for name in ("model_optim_rng.pt", "distrib_optim.pt"))
            n = len(out.sources)
            out.sources += [Source(str(folder / name)) for name in ("model_optim_rng.pt", "distrib_optim.pt")]
            out.file_of[pp_rank, tp_rank] = n + 1
            for chunk in range(f.vpp):
                held = model["model" if f.vpp == 1 else f"model{chunk}"]
                weights = {k: v for k, v in held.items() if isinstance(v, TensorRef)}
                placed, members = chunk_buffer(pp_rank, chunk, tp_rank, f)
                assert list(weights) == [local for local, _ in chunk_names(pp_rank, chunk, f)]
                (states,) = optim[chunk].values()
                assert states["numel_unpadded"] == placed.numel
                for (name, native), weight in zip(members, weights.values(), strict=True):
                    lo, size = native.box(tp_rank, f.tp)
                    assert weight.shape == native.shape(tp_rank, f.tp)
                    if f.bucket_numel is None:
                        assert weight.offset == placed.start[name]
                    into = replicas if native.axis is None and tp_rank else pieces
                    of_kind = {"weight": (n, weight, 0)}
                    of_kind |= {k: (n + 1, states[key], placed.start[name]) for k, key in STATES.items()}
                    for kind, (source, ref, offset) in of_kind.items():
                        item = ref.dtype.itemsize
                        start = ref.storage.start_byte + (ref.offset + offset) * item
                        piece = Piece(native.view, lo, size, source, start, dense_strides(size, item))
                        for part in native.of(kind):
                            into[part.hub] += compose(part, piece)
                            dtypes[part.hub] = ref.dtype
                for kind, key in STATES.items():
                    assert states[key].shape == (placed.numel,)
                    out.buffers[pp_rank, chunk, tp_rank, kind] = states[key]
    shapes = hub_shapes(f)
    for key, rows in pieces.items():
        item = dtypes[key].itemsize
        again = tuple(tables([p], item) for p in replicas[key])
        out.tensors[key] = Tensor(key, dtypes[key], shapes[key.name, key.part], tables(rows, item), again)
    return out


def hub_shapes(f: Facts) -> dict[tuple[str, str], tuple[int, ...]]:
    """(name, part) -> shape of every hub tensor."""
    out = {}
    for native in natives(f).values():
        for p in native.parts:
            shape = p.hub_view if len(p.hub_view) == 1 else (math.prod(p.hub_view[:-1]), p.hub_view[-1])
            out[p.hub.name, p.hub.part] = shape
    return out
