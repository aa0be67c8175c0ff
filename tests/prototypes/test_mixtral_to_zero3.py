"""A Mixtral Trainer folder -> ZeRO-3 at dp 3, on real files: weights lie by expert, the optimizer has them fused.

The optimizer numbers its parameters; which number is which name is taken from the truth, for it is a naming map that
gives it in the product. What is shown is that one geometry serves either naming on either side.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ckptctl.core.compose import compose
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.tensor import Key, Part, Piece, Source, Tensor
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.st.header import read_header
from ckptctl.plan.check import check, require_whole
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from tests.support import zero
from tests.support.bruteforce import dense, run, tables, torch_tree
from tests.support.checkpoints import digest, fixture

if TYPE_CHECKING:
    from collections.abc import Sequence

F32 = BY_NAME["float32"]
DP = 3
KINDS = {"master": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What the partitions hold, and the kind that it is taken from: in a float32 run the weights are the masters."""
FOLDER = "hf/mixtral-trainer"


def truth() -> dict:
    return json.loads((fixture(FOLDER) / "truth.json").read_text())


def config() -> dict:
    return json.loads((fixture(FOLDER) / "config.json").read_text())


def parts_of(module: str, kind: str, c: dict) -> tuple[Part, ...]:
    """A parameter of Transformers 5's module as tensors of the files: experts stacked there, gate (w1) above up (w3).

    Source: Transformers 5.24.0, models/mixtral/modeling_mixtral.py, MixtralExperts; conversion_mapping.py.
    """
    e, f, h = c["num_local_experts"], c["intermediate_size"], c["hidden_size"]
    head, _, tail = module.partition(".mlp.")
    disk = f"{head}.block_sparse_moe."
    if tail == "experts.gate_up_proj":
        view, size = (e, 2, f, h), (1, 1, f, h)
        return tuple(
            Part(Key(f"{disk}experts.{i}.{w}.weight", kind), view, (i, s, 0, 0), size, size, (0,) * 4, (0, 1, 2, 3))
            for i in range(e)
            for s, w in enumerate(("w1", "w3"))
        )
    if tail == "experts.down_proj":
        view, size = (e, h, f), (1, h, f)
        return tuple(
            Part(Key(f"{disk}experts.{i}.w2.weight", kind), view, (i, 0, 0), size, size, (0,) * 3, (0, 1, 2))
            for i in range(e)
        )
    name = f"{disk}gate.weight" if tail == "gate.weight" else module
    shape = module_shape(module, c)
    return (Part(Key(name, kind), shape, (0,) * len(shape), shape, shape, (0,) * len(shape), tuple(range(len(shape)))),)


def module_shape(module: str, c: dict) -> tuple[int, ...]:
    """The shape of a module parameter, from the configuration."""
    e, f, h = c["num_local_experts"], c["intermediate_size"], c["hidden_size"]
    q, d = c["num_attention_heads"], h // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * d
    tails = {
        "embed_tokens.weight": (c["vocab_size"], h), "lm_head.weight": (c["vocab_size"], h),
        "q_proj.weight": (q * d, h), "k_proj.weight": (kv, h), "v_proj.weight": (kv, h), "o_proj.weight": (h, q * d),
        "gate.weight": (e, h), "experts.gate_up_proj": (e, 2 * f, h), "experts.down_proj": (e, h, f),
    }  # fmt: skip
    return next((shape for tail, shape in tails.items() if module.endswith(tail)), (h,))


def source() -> tuple[SourceIndex, list[bytes]]:
    """Weights from model.safetensors, moments from optimizer.pt: both as tensors of the files' (finest) naming."""
    folder, c = fixture(FOLDER), config()
    with FileBytes(folder / "model.safetensors") as file:
        header = read_header(file)
    state = torch_tree(folder / "optimizer.pt")["state"]
    pieces: dict[Key, list[Piece]] = defaultdict(list)
    shapes = {}
    for name, entry in header.entries.items():
        shapes[name] = entry.shape
        pieces[Key(name)].append(dense(entry.shape, 4, 0, entry.start_byte))
    for number, module in truth()["param_index_to_name"].items():
        for kind in ("exp_avg", "exp_avg_sq"):
            ref = state[int(number)][kind]
            assert ref.shape == module_shape(module, c)
            assert ref.dtype == F32
            strides = tuple(s * 4 for s in ref.stride)
            start = ref.storage.start_byte + ref.offset * 4
            native = Piece(ref.shape, (0,) * len(ref.shape), ref.shape, 1, start, strides)
            for part in parts_of(module, kind, c):
                pieces[part.hub] += compose(part, native)
    tensors = {k: Tensor(k, F32, shapes[k.name], tables(rows, 4)) for k, rows in pieces.items()}
    files = ["model.safetensors", "optimizer.pt"]
    return SourceIndex(tensors, [Source(f) for f in files]), [Path(folder / f).read_bytes() for f in files]


def groups_of(naming: str) -> list[list[zero.Param]]:
    """The run's two groups in the optimizer's order, under the module's naming or the files'."""
    found, c = truth(), config()
    names = found["param_index_to_name"]
    modules = [[names[str(i)] for i in g["params"]] for g in found["param_groups"]]
    if naming == "fused":
        return [
            [zero.Param(m, module_shape(m, c), lambda kind, m=m: parts_of(m, kind, c)) for m in group]
            for group in modules
        ]
    disk = {n: tuple(t["shape"]) for n, t in found["tensors"].items()}
    return [
        [zero.Param(p.hub.name, disk[p.hub.name]) for m in group for p in parts_of(m, "weight", c)] for group in modules
    ]


def reassembled(
    files: dict[str, bytes], state: str, groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]], dp: int
) -> dict[str, np.ndarray]:
    """Tensors of ZeRO-3 pieces by the published rule: each parameter has a slot of ceil(numel / dp) in every rank.

    Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py, _zero3_merge_trainable_params.
    """
    out = {}
    for g, params in enumerate(groups):
        flats = [np.frombuffer(files[f"{rank}/{state}/{g}"], "<f4") for rank in range(dp)]
        at = 0
        for name, shape in params:
            numel = math.prod(shape)
            slot = math.ceil(numel / dp)
            out[name] = np.concatenate([flat[at : at + slot] for flat in flats])[:numel].reshape(shape)
            at += slot
        assert {len(flat) for flat in flats} == {at}
    return out


def per_expert(module: str, value: np.ndarray, c: dict) -> dict[str, np.ndarray]:
    """A module tensor cut to the files' tensors by plain slicing."""
    f = c["intermediate_size"]
    disk = module.partition(".mlp.")[0] + ".block_sparse_moe."
    if module.endswith("gate_up_proj"):
        found = {f"{disk}experts.{i}.w1.weight": v[:f] for i, v in enumerate(value)}
        return found | {f"{disk}experts.{i}.w3.weight": v[f:] for i, v in enumerate(value)}
    if module.endswith("experts.down_proj"):
        return {f"{disk}experts.{i}.w2.weight": v for i, v in enumerate(value)}
    return {module.replace(".mlp.gate.", ".block_sparse_moe.gate."): value}


def converted(groups: list[list[zero.Param]], nbytes: int = 1 << 20) -> dict[str, bytes]:
    index, sources = source()
    require_whole(index, index.tensors)
    plan = Plan(zero.zero3(groups, DP, KINDS), index, extent_nbytes=nbytes)
    totals = check(plan)
    assert totals.written_nbytes == totals.read_nbytes + totals.fills["parameter padding"]
    return dict(zip([f.path for f in plan.files], run(plan, sources), strict=True))


def fingerprint(value: np.ndarray) -> tuple:
    return digest("F32", value.shape, np.ascontiguousarray(value).tobytes())


def expected(entries: dict, suffix: str = "") -> dict[str, tuple]:
    return {
        n.removesuffix(suffix): (t["dtype"], tuple(t["shape"]), t["sha256"])
        for n, t in entries.items()
        if n.endswith(suffix)
    }


@pytest.mark.real
@pytest.mark.parametrize("nbytes", [500, 1 << 20])
@pytest.mark.parametrize("sub_group_numel", [None, 2000])
@pytest.mark.parametrize("naming", ["fused", "by expert"])
def test_trainer_folder_to_zero3_dp3_equals_the_truth(naming, sub_group_numel, nbytes):
    groups = groups_of(naming)
    if sub_group_numel is not None:
        groups = [s for g in groups for s in zero.sub_groups(g, DP, sub_group_numel)]
        assert len(groups) > 2
    files = converted(groups, nbytes)
    named, c, found = [[(p.name, p.shape) for p in g] for g in groups], config(), truth()

    weights = reassembled(files, "master", named, DP)
    by_file = weights
    if naming == "fused":
        by_file = {n: v for module, value in weights.items() for n, v in per_expert(module, value, c).items()}
    assert {n: fingerprint(v) for n, v in by_file.items()} == expected(found["tensors"])

    for kind in ("exp_avg", "exp_avg_sq"):
        moments = reassembled(files, kind, named, DP)
        if naming == "by expert":
            moments = fused(moments, found, c)
        assert {n: fingerprint(v) for n, v in moments.items()} == expected(found["optimizer"], f".{kind}")


def fused(by_file: dict[str, np.ndarray], found: dict, c: dict) -> dict[str, np.ndarray]:
    """The files' tensors stacked to module tensors by NumPy."""
    out = {}
    for module in found["param_index_to_name"].values():
        disk = module.partition(".mlp.")[0] + ".block_sparse_moe."
        experts = range(c["num_local_experts"])
        if module.endswith("gate_up_proj"):
            out[module] = np.stack(
                [np.concatenate([by_file[f"{disk}experts.{i}.{w}.weight"] for w in ("w1", "w3")]) for i in experts]
            )
        elif module.endswith("experts.down_proj"):
            out[module] = np.stack([by_file[f"{disk}experts.{i}.w2.weight"] for i in experts])
        else:
            out[module] = by_file[module.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
    return out


def test_sub_groups_close_once_they_are_full():
    params = [zero.Param(n, (k,)) for n, k in (("a", 10), ("b", 30), ("c", 3), ("d", 1))]
    # Pieces at dp 3: 4, 10, 1, 1.
    names = [[p.name for p in g] for g in zero.sub_groups(params, 3, 12)]
    assert names == [["a", "b"], ["c", "d"]]
    assert [[p.name for p in g] for g in zero.sub_groups(params, 3, 1)] == [["a"], ["b"], ["c"], ["d"]]
    assert zero.sub_groups([], 3, 12) == []


def test_flat_slots_by_hand():
    assert [zero.zero2_slot(n, 3) for n in (0, 1, 6, 7)] == [0, 2, 2, 4]
    assert [zero.zero3_slot(n, 3) for n in (0, 1, 6, 7)] == [0, 1, 2, 3]
    runs = zero.runs_of([zero.Param("a", (4,)), zero.Param("b", (0,)), zero.Param("c", (3, 2))], 2, 7)
    assert [(p.name, a, b) for p, a, b in runs] == [("a", 2, 4), ("c", 0, 3)]
