"""A classic Megatron checkpoint with a distributed optimizer -> ZeRO-2 at another dp, and back, on real files.

What is shown: buckets, tensor and pipeline cuts, fused QKV and gate/up, and vocabulary padding are all pieces of one
geometry. The result is put together again by DeepSpeed's published rule, in NumPy, and compared with the run's truth.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ckptctl.core.compose import compose
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, Piece, PieceTable, Source, Tensor, dense_strides
from ckptctl.plan.check import check, require_whole
from ckptctl.plan.gangs import gangs
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Cast
from tests.support import megatron, zero
from tests.support.bruteforce import elements, run, tensor
from tests.support.checkpoints import FIXTURES, SHARED, digest, safetensors_of, truth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.dtype import DType

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]
LAYOUT = "legacy_tp2pp2_distopt_dp2"
MORE = ["legacy_tp1pp1_distopt_dp2_buckets", "legacy_tp1pp2_vpp2_distopt_dp2", "legacy_tp2pp1_distopt_dp2_bf16"]
KINDS = {"master": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
SECTION = {"master": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
DP = 3


def folder_of(layout: str) -> Path:
    inside, beside = FIXTURES / "megatron" / layout, SHARED / "megatron" / layout
    if not inside.exists() and not beside.exists():
        pytest.skip(f"needs megatron/{layout} in ../shared/checkpoints, which is not part of the repository")
    return inside if inside.exists() else beside


def opened(folder: Path) -> tuple[megatron.Read, list[bytes]]:
    vocab = json.loads((folder / "truth" / "config.json").read_text())["vocab_size"]
    found = megatron.read(folder / "iter_0000003", vocab)
    return found, [Path(s.path).read_bytes() for s in found.sources]


def hugging_face_order(layers: int) -> list[str]:
    """named_parameters() of LlamaForCausalLM. Source: Transformers 5.24.0, models/llama/modeling_llama.py."""
    tails = [
        *(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
        "post_attention_layernorm",
    ]  # fmt: skip
    inner = [f"model.layers.{i}.{t}.weight" for i in range(layers) for t in tails]
    return ["model.embed_tokens.weight", *inner, "model.norm.weight", "lm_head.weight"]


def groups_of(found: megatron.Read, decay: str) -> list[list[zero.Param]]:
    """All parameters in one group, or those with decay apart from the rest, as the Trainer does."""
    shapes = megatron.hub_shapes(found.facts)
    params = [zero.Param(n, shapes[n, ""]) for n in hugging_face_order(found.facts.num_layers)]
    if decay == "one group":
        return [params]
    return [[p for p in params if len(p.shape) > 1], [p for p in params if len(p.shape) == 1]]


def reassembled(
    files: dict[str, bytes], state: str, groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]], dp: int
) -> dict[str, np.ndarray]:
    """Tensors of ZeRO-1/2 pieces by the published rule: join the ranks' pieces, then cut at the parameters' sizes.

    Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py, _zero2_merge_trainable_params.
    """
    out = {}
    for g, params in enumerate(groups):
        pieces = [np.frombuffer(files[f"{rank}/{state}/{g}"], "<f4") for rank in range(dp)]
        full = np.concatenate(pieces)
        at = 0
        for name, shape in params:
            numel = math.prod(shape)
            out[name] = full[at : at + numel].reshape(shape)
            at += numel
        # Its sanity check: what is left over is padding, less than the alignment of all ranks together.
        align = 2 * dp
        assert math.ceil(at / align) * align == math.ceil(len(full) / align) * align
        assert not full[at:].view(np.uint32).any()
        if state != "master":
            assert {len(p) for p in pieces} == {math.ceil(at / align) * 2}
    return out


def to_zero2(found: megatron.Read, groups: list[list[zero.Param]], extent_nbytes: int = 1 << 20) -> Plan:
    index = SourceIndex(found.tensors, found.sources)
    return Plan(zero.zero2(groups, DP, KINDS), index, extent_nbytes=extent_nbytes)


@pytest.mark.real
@pytest.mark.parametrize("decay", ["one group", "decay apart"])
@pytest.mark.parametrize("layout", [LAYOUT, *MORE])
def test_megatron_to_zero2_dp3_equals_the_truth(layout, decay):
    folder = folder_of(layout)
    found, sources = opened(folder)
    groups = groups_of(found, decay)
    plan = to_zero2(found, groups)
    require_whole(plan.index, found.tensors)
    assert not check(plan).casts
    files = dict(zip([f.path for f in plan.files], run(plan, sources), strict=True))
    want = truth(folder)
    for state, section in SECTION.items():
        got = reassembled(files, state, [[(p.name, p.shape) for p in g] for g in groups], DP)
        assert {n: digest("F32", v.shape, v.tobytes()) for n, v in got.items()} == want[section]


@pytest.mark.real
@pytest.mark.parametrize("nbytes", [1000, 4096, 1 << 26])
def test_extents_of_any_size_give_the_same_bytes(nbytes):
    found, sources = opened(folder_of(LAYOUT))
    groups = groups_of(found, "decay apart")
    plan = to_zero2(found, groups, nbytes)
    totals = check(plan)
    assert sorted(e for g in gangs(plan, totals, 4 * nbytes) for e in g) == sorted(plan.extents())
    assert run(plan, sources) == run(to_zero2(found, groups), sources)


@pytest.mark.real
@pytest.mark.parametrize("layout", [LAYOUT, *MORE])
def test_weights_and_padding_rows_equal_the_truth(layout):
    folder = folder_of(layout)
    found, sources = opened(folder)
    keys = [k for k in found.tensors if k.kind == "weight" or k.part]
    index = SourceIndex(found.tensors, found.sources)
    files = tuple(OutputFile("", lambda k=k: [whole(found.tensors[k])]) for k in keys)
    want = truth(folder)
    for key, data in zip(keys, run(Plan(files, index), sources), strict=True):
        tensor = found.tensors[key]
        got = digest(tensor.dtype.safetensors, tensor.shape, data)
        if key.part and key.kind != "weight":
            assert got == want["vocabulary_padding"][f"{SECTION[key.kind]}.{key.name}"]
        elif not key.part:
            assert got == want.get("model_bf16", want["model"])[key.name]


def whole(tensor: Tensor, dtype: DType | None = None) -> Region:
    return Region(tensor.key, dtype or tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)


@pytest.mark.real
def test_masters_rounded_to_bf16_are_the_weights_of_a_bf16_run():
    folder = folder_of("legacy_tp2pp1_distopt_dp2_bf16")
    found, sources = opened(folder)
    keys = [k for k in found.tensors if k.kind == "master" and not k.part]
    files = tuple(OutputFile("", lambda k=k: [whole(found.tensors[k], BF16)]) for k in keys)
    index = SourceIndex(found.tensors, found.sources)
    with pytest.raises(Unsupported, match="no cast was asked for"):
        check(Plan(files, index))
    plan = Plan(files, index, casts=frozenset({Cast("float32", "bfloat16")}))
    want = truth(folder)["model_bf16"]
    got = dict(zip(keys, run(plan, sources), strict=True))
    assert {k.name: digest("BF16", found.tensors[k].shape, data) for k, data in got.items()} == want


@pytest.mark.real
@pytest.mark.parametrize("layout", [LAYOUT, *MORE])
def test_replicas_over_tensor_parallel_ranks_are_equal(layout):
    found, sources = opened(folder_of(layout))
    norms = {k for k in found.tensors if k.name.endswith("norm.weight")}
    for key, held in found.tensors.items():
        assert len(held.replicas) == (found.facts.tp - 1 if key in norms else 0)
        for tables in held.replicas:
            (table,), (own,) = tables, held.pieces
            values = [
                b"".join(sources[p.source][at : at + table.itemsize] for p in t for at in elements(p).values())
                for t in (table, own)
            ]
            assert values[0] == values[1]


def index_of_zero2(plan: Plan, found: megatron.Read) -> SourceIndex:
    """The written partitions as a source: every region is a piece. Rows of padding, which they lack, stay in place."""
    pieces: dict[Key, list[Piece]] = {}
    for number, file in enumerate(plan.files):
        for segment, start in zip(file.segments, file.starts, strict=False):
            if isinstance(segment, Region):
                piece = Piece(segment.view, segment.lo, segment.size, number, start, (F32.itemsize,))
                pieces.setdefault(segment.key, []).append(piece)
    tensors = {
        k: Tensor(k, F32, found.tensors[k].shape, (PieceTable.of(rows, F32.itemsize),)) for k, rows in pieces.items()
    }
    shift = len(plan.files)
    for key, held in found.tensors.items():
        if key.part:
            moved = [dataclasses.replace(t, source=t.source + np.int32(shift)) for t in held.pieces]
            tensors[key] = Tensor(key, F32, held.shape, moved)
    return SourceIndex(tensors, [*(Source(f.path) for f in plan.files), *found.sources])


@pytest.mark.real
@pytest.mark.parametrize("layout", [LAYOUT, *MORE])
def test_the_way_back_restores_every_buffer_bit_by_bit(layout):
    """Alignment gaps, too. Megatron's buffers are the target here: tensor-parallel boxes, QKV by group, buckets."""
    found, sources = opened(folder_of(layout))
    there = to_zero2(found, groups_of(found, "decay apart"))
    written = run(there, sources)
    places = list(found.buffers)
    files = tuple(
        OutputFile("/".join(map(str, p)), lambda p=p: tuple(megatron.buffer_segments(*p, found.facts))) for p in places
    )
    back = Plan(files, index_of_zero2(there, found), extent_nbytes=10_000)
    require_whole(back.index, back.index.tensors)
    for (pp_rank, chunk, tp_rank, kind), got in zip(places, run(back, [*written, *sources]), strict=True):
        ref = found.buffers[pp_rank, chunk, tp_rank, kind]
        data = sources[found.file_of[pp_rank, tp_rank]]
        start = ref.storage.start_byte + ref.offset * 4
        assert hashlib.sha256(got).hexdigest() == hashlib.sha256(data[start : start + ref.numel * 4]).hexdigest()


@pytest.mark.real
def test_truth_files_agree_with_the_digests_compared_here():
    """The tensors that lie beside this layout have the digests that the other tests compare with."""
    folder = folder_of(LAYOUT)
    for section, found in truth(folder).items():
        path = folder / "truth" / f"{section}.safetensors"
        got = {name: digest(dtype, shape, data) for name, dtype, shape, data in safetensors_of(path)}
        assert got == found


def index_of_buffers(plan: Plan, found: megatron.Read, f: megatron.Facts) -> SourceIndex:
    """Written Megatron buffers as a source: their regions as pieces of hub tensors; replicated ones once."""
    pieces: dict[Key, list[Piece]] = {}
    whole_of = megatron.natives(f)
    for number, file in enumerate(plan.files):
        tp_rank = int(file.path.split("/")[2])
        for segment, start in zip(file.segments, file.starts, strict=False):
            if not isinstance(segment, Region) or (tp_rank and whole_of[segment.key.name].axis is None):
                continue
            strides = dense_strides(segment.size, F32.itemsize)
            native = Piece(segment.view, segment.lo, segment.size, number, start, strides)
            for part in segment.parts:
                pieces.setdefault(part.hub, []).extend(compose(part, native))
    tensors = {k: tensor(k, F32, found.tensors[k].shape, rows) for k, rows in pieces.items()}
    return SourceIndex(tensors, [Source(file.path) for file in plan.files])


@pytest.mark.real
@pytest.mark.parametrize(("tp", "pp"), [(4, 1), (1, 4), (1, 1)])
def test_megatron_to_megatron_at_another_mesh_to_zero2(tp, pp):
    """What Megatron itself cannot do with this file. Both namings are fused here, over tensor-parallel boxes."""
    folder = folder_of(LAYOUT)
    found, sources = opened(folder)
    f = dataclasses.replace(found.facts, tp=tp, pp=pp, dp=5)
    places = [(p, 0, t, kind) for p in range(pp) for t in range(tp) for kind in KINDS]
    files = tuple(
        OutputFile("/".join(map(str, place)), lambda place=place: tuple(megatron.buffer_segments(*place, f)))
        for place in places
    )
    between = Plan(files, SourceIndex(found.tensors, found.sources), extent_nbytes=5000)
    written = run(between, sources)
    index = index_of_buffers(between, found, f)
    require_whole(index, index.tensors)
    groups = groups_of(found, "one group")
    plan = Plan(zero.zero2(groups, DP, KINDS), index)
    out = dict(zip([file.path for file in plan.files], run(plan, written), strict=True))
    want = truth(folder)
    for state, section in SECTION.items():
        got = reassembled(out, state, [[(p.name, p.shape) for p in g] for g in groups], DP)
        assert {n: digest("F32", v.shape, v.tobytes()) for n, v in got.items()} == want[section]


# The buffer's rules, by hand


def test_parameters_lie_in_reverse_order_at_multiples_of_64():
    placed = megatron.buffer([("a", 100), ("b", 64), ("c", 10)], dp=2, bucket_numel=None)
    assert placed.start == {"c": 0, "b": 64, "a": 128}
    assert placed.numel == 228


def test_a_buckets_end_padding_is_left_out_of_the_file():
    # In memory: d at 0..100, bucket 1 ends at 100, padded to 128; c at 128..138, b at 192..256, a at 256..261.
    placed = megatron.buffer([("a", 5), ("b", 64), ("c", 10), ("d", 100)], dp=2, bucket_numel=100)
    assert placed.start == {"d": 0, "c": 100, "b": 164, "a": 228}
    assert placed.numel == 233


def test_padding_of_a_bucket_depends_on_dp_and_the_file_on_the_padding_alone():
    params = [("a", 5), ("b", 100)]
    assert megatron.buffer(params, dp=3, bucket_numel=100).start == {"b": 0, "a": 100}
    assert megatron.buffer(params, dp=2, bucket_numel=100, busbw=True).start == {"b": 0, "a": 100}


def test_chunks_of_virtual_stages_interleave():
    f = megatron.Facts(4, 8, 8, 2, 2, 4, 16, 11, tp=1, pp=2, vpp=2, dp=1, bucket_numel=None)
    assert [megatron.first_layer(p, c, f) for p in range(2) for c in range(2)] == [0, 2, 1, 3]
