"""Experts as runs keep them: all of a rank in one matrix (GroupedMLP), and cut over fewer ranks than the rest.

Files are made here with NumPy from whole matrices, by what the real layers say of their own weights
(core/transformer/moe/experts.py: `weight1.view(num_local_experts, hidden, -1)`; parallel_state.py: expert groups).
"""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.core.tensor import Key
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.support.commands import document, good, refused
from tests.support.dcpfiles import Cut, plain_pickle, write_dcp
from tests.support.torchfiles import stored, torch_zip, v2

HIDDEN, FFN, EXPERTS, VOCAB, HEADS = 8, 12, 4, 16, 4
RNG = np.random.default_rng(3)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


GATE, UP, DOWN = ([normal(*s) for _ in range(EXPERTS)] for s in ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN)))
LAYER = "decoder.layers.0."
DENSE = {
    "embedding.word_embeddings.weight": (normal(VOCAB, HIDDEN), 0),
    f"{LAYER}input_layernorm.weight": (normal(HIDDEN), None),
    f"{LAYER}self_attention.linear_proj.weight": (normal(HIDDEN, HIDDEN), 1),
    f"{LAYER}self_attention.linear_qkv.weight": (normal(3 * HIDDEN, HIDDEN), 0),
    f"{LAYER}pre_mlp_layernorm.weight": (normal(HIDDEN), None),
    f"{LAYER}mlp.router.weight": (normal(EXPERTS, HIDDEN), None),
    "decoder.final_layernorm.weight": (normal(HIDDEN), None),
    "output_layer.weight": (normal(VOCAB, HIDDEN), 0),
}


def part(array, axis, rank, ranks):
    return array if axis is None else np.split(array, ranks, axis)[rank]


def dense(tp_rank, tp):
    return {n: part(a, axis, tp_rank, tp) for n, (a, axis) in DENSE.items()}


def first(e, rank, ranks):
    """An expert's first projection on a rank: its gate above its up."""
    return np.concatenate([part(x[e], 0, rank, ranks) for x in (GATE, UP)])


def sequential(local, rank, ranks):
    out = {}
    for i, e in enumerate(local):
        name = f"{LAYER}mlp.experts.local_experts.{i}.linear_fc"
        out |= {f"{name}1.weight": first(e, rank, ranks), f"{name}2.weight": part(DOWN[e], 1, rank, ranks)}
    return out


def grouped(local, rank, ranks):
    """Both matrices of GroupedMLP: (in, out) of each expert one after the other in memory."""
    one = np.stack([first(e, rank, ranks).T for e in local])
    two = np.stack([part(DOWN[e], 1, rank, ranks).T for e in local])
    return {
        f"{LAYER}mlp.experts.weight1": one.reshape(HIDDEN, -1),
        f"{LAYER}mlp.experts.weight2": two.reshape(-1, HIDDEN),
    }


def args(**more):
    return {
        "num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS, "kv_channels": 2,
        "num_experts": EXPERTS, "pipeline_model_parallel_size": 1, "padded_vocab_size": VOCAB, "vocab_size": VOCAB - 1,
        "tokenizer_type": "NullTokenizer", "untie_embeddings_and_output_weights": True, "swiglu": True,
        "make_vocab_size_divisible_by": 4, "transformer_impl": "local", **more,
    }  # fmt: skip


def save(folder, said, model, *, moments=False):
    """A rank's file; moments: the plain optimizer's, weights times 2 and 3; matrices and norms are two groups."""
    storages: dict[str, bytes] = {}

    def tensor(array):
        array = np.ascontiguousarray(array, np.float32)
        key = str(len(storages))
        storages[key] = array.tobytes()
        return v2(stored(key, array.size), 0, array.shape, tuple(s // 4 for s in array.strides))

    root = {"args": said, "checkpoint_version": 3.0, "iteration": 7, "model": {n: tensor(a) for n, a in model.items()}}
    if moments:
        apart = said["expert_model_parallel_size"] > 1
        parts = (
            [[n for n in model if (".experts." in n) is which] for which in (False, True)] if apart else [list(model)]
        )
        root["optimizer"] = []
        for which, names in enumerate(parts):
            sets = [[n for n in names if model[n].ndim > 1], [n for n in names if model[n].ndim == 1]]
            listed = [n for s in sets for n in s]
            groups, at = [], 0
            for mult, s in zip((1.0, 0.0), sets, strict=True):
                if s:
                    ids = list(range(at, at := at + len(s)))
                    group = {"lr": 0.1, "wd_mult": mult, "is_expert_parallel": which == 1, "params": ids}
                    groups.append(group | {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1 * mult})
            state = {
                i: {"step": 7, "exp_avg": tensor(2 * model[n]), "exp_avg_sq": tensor(3 * model[n])}
                for i, n in enumerate(listed)
            }
            root["optimizer"].append({"state": state, "param_groups": groups})
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(torch_zip(root, storages))


def require_whole(path, *, moments=False):
    checkpoint = open_checkpoint(path)[0]
    want = {n: a for n, (a, _) in DENSE.items()}
    for e in range(EXPERTS):
        name = f"{LAYER}mlp.experts.local_experts.{e}.linear_fc"
        want |= {f"{name}1.weight": np.concatenate([GATE[e], UP[e]]), f"{name}2.weight": DOWN[e]}
    assert {k.name for k in checkpoint.tensors} == set(want)
    with TensorReader(checkpoint) as reader:
        for kind, factor in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)) if moments else (("weight", 1),):
            for name, array in want.items():
                found = reader.array(Key(name, kind)).view(np.float32).reshape(array.shape)
                assert np.array_equal(found, factor * array), (name, kind)
    return checkpoint


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_all_experts_of_a_rank_in_one_matrix_come_apart(tp, ep, tmp_path):
    said = args(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, moe_grouped_gemm=True, data_parallel_size=ep
    )
    run = tmp_path / "iter_0000007"
    for t in range(tp):
        for e in range(ep):
            local = range(e * EXPERTS // ep, (e + 1) * EXPERTS // ep)
            tail = f"_{e:03d}" if ep > 1 else ""
            save(run / f"mp_rank_{t:02d}{tail}", said, dense(t, tp) | grouped(local, t, tp), moments=True)
    require_whole(run, moments=True)
    # written again an expert is a matrix of its own, and the report says so
    answer = document("reshard", run, tmp_path / "out", "--tp", "1", "--ep", "1", "--dp", "1")
    assert any(x["part"] == "experts" and "a matrix each" in x["detail"] for x in answer["fidelity"])
    found = require_whole(tmp_path / "out", moments=True)
    assert found.native["args"].state["moe_grouped_gemm"] is False


def test_a_matrix_that_is_not_of_so_many_experts_is_refused(tmp_path):
    said = args(tensor_model_parallel_size=1, expert_model_parallel_size=1, moe_grouped_gemm=True) | {"num_experts": 5}
    save(tmp_path / "iter_0000007/mp_rank_00", said, dense(0, 1) | grouped(range(4), 0, 1))
    assert "is not the matrices of 5 experts" in refused("inspect", tmp_path / "iter_0000007")["what"]


def test_experts_cut_over_fewer_ranks_than_the_rest(tmp_path):
    """tp 4, expert tp 2, ep 4: ranks 0 to 7 of a stage write; each has tp rank r % 4, expert rank r % 2, ep r // 2."""
    said = args(
        tensor_model_parallel_size=4, expert_model_parallel_size=4, expert_tensor_parallel_size=2, data_parallel_size=2
    )
    run = tmp_path / "iter_0000007"
    for r in range(8):
        save(run / f"mp_rank_{r % 4:02d}_{r // 2:03d}", said, dense(r % 4, 4) | sequential([r // 2], r % 2, 2))
    require_whole(run)
    good("reshard", run, tmp_path / "out", "--tp", "2", "--ep", "2", "--dp", "2")
    found = require_whole(tmp_path / "out")
    assert found.native["args"].state["expert_tensor_parallel_size"] == 2
    (run / "mp_rank_02_003").rename(tmp_path / "gone")
    assert refused("inspect", run)["code"] == "ranks-missing"


def test_experts_cut_so_that_files_cannot_hold_all_are_refused(tmp_path):
    said = args(tensor_model_parallel_size=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    save(tmp_path / "iter_0000007/mp_rank_00_000", said, dense(0, 4) | sequential([0, 1], 0, 1))
    assert "these hold not all of the rest" in refused("inspect", tmp_path / "iter_0000007")["why"]


# ---- moments in buffers of torch_dist, experts apart -----------------------------------------------------------------

FIRST, LAST = list(DENSE)[:6], list(DENSE)[6:]
MATRICES = [f"{LAYER}mlp.experts.local_experts.{e}.linear_fc{i}.weight" for e in range(EXPERTS) for i in (1, 2)]
ORDER = [*FIRST, *MATRICES, *LAST]
"""Registration order of a layer of experts."""


def rank_s(name, rank, ranks):
    """A rank's part of a parameter by its whole name."""
    if name in DENSE:
        array, axis = DENSE[name]
        return part(array, axis, rank, ranks)
    e = int(name.split(".")[6])
    return first(e, rank, ranks) if "fc1" in name else part(DOWN[e], 1, rank, ranks)


def bucket(names, rank, ranks, factor):
    """A buffer's only bucket: parameters in reverse, each from a multiple of 64 elements; a chunk for each."""
    boxes, at = [], 0
    for name in [n for n in reversed(ORDER) if n in names]:
        boxes.append(((at,), factor * rank_s(name, rank, ranks).ravel()))
        stop = at + boxes[-1][1].size
        at = -(-stop // 64) * 64
        boxes.append(((stop,), np.zeros(at - stop, np.float32)))
    del boxes[-1]  # no gap after the last
    return Cut((boxes[-1][0][0] + boxes[-1][1].size,), [b for b in boxes if b[1].size])


def by_bucket(folder, tp, ep, etp):
    """torch_dist with dp_reshardable moments: an optimizer of the dense parameters, and one of the experts.

    The second's groups of ranks go by expert-parallel rank, then by tensor-parallel rank within an expert.
    """
    said = args(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        data_parallel_size=ep * etp, use_distributed_optimizer=True,
    )  # fmt: skip
    items = {n: rank_s(n, 0, 1) for n in DENSE}
    items |= {n.replace("local_experts", "experts"): rank_s(n, 0, 1) for n in MATRICES}
    per = EXPERTS // ep
    own = [[n for n in MATRICES if int(n.split(".")[6]) // per == e] for e in range(ep)]
    chained = [[(list(DENSE), t, tp) for t in range(tp)], [(names, t, etp) for names in own for t in range(etp)]]
    for number, groups in enumerate(chained):
        base = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "is_expert_parallel": number == 1, "step": 7}
        both = [base | {"wd_mult": m, "weight_decay": 0.1 * m} for m in ((1.0, 0.0) if number == 0 else (1.0,))]
        for group, (names, rank, ranks) in enumerate(groups):
            key = f"chained_{number}.optimizer.distributed.dp_group_idx_{group}"
            items[f"{key}.optimizer/shard_0_1"] = [{"param_groups": both}]
            for kind, factor in (("param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
                name = f"{key}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{kind}"
                items[name] = bucket(names, rank, ranks, factor)
    write_dcp(folder, items)
    kind = {"param_state_sharding_type": "dp_reshardable"}
    root = {"args": said, "checkpoint_version": 3.0, "iteration": 7, "optimizer": {0: kind, 1: kind}}
    (folder / "common.pt").write_bytes(plain_pickle(root))


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (2, 2, 2), (2, 4, 1), (1, 2, 2)])
def test_moments_of_experts_in_buffers_of_their_own(tp, ep, etp, tmp_path):
    by_bucket(tmp_path / "run", tp, ep, etp)
    require_whole(tmp_path / "run", moments=True)
    words = ("--tp", "2", "--ep", "1", "--dp", "1", "--megatron-format", "torch")
    good("reshard", tmp_path / "run", tmp_path / "out", *words)
    require_whole(tmp_path / "out", moments=True)


def test_buffers_of_ranks_that_args_have_not_are_refused(tmp_path):
    by_bucket(tmp_path / "run", 1, 4, 1)
    said = args(tensor_model_parallel_size=1, expert_model_parallel_size=2, use_distributed_optimizer=True)
    kind = {"param_state_sharding_type": "dp_reshardable"}
    root = {"args": said, "checkpoint_version": 3.0, "iteration": 7, "optimizer": {0: kind, 1: kind}}
    (tmp_path / "run" / "common.pt").write_bytes(plain_pickle(root))
    assert refused("inspect", tmp_path / "run")["code"] == "optimizer-buffers"
    # as the error says, the weights alone can be had
    answer = document("convert", tmp_path / "run", tmp_path / "out", "--to", "megatron", "--no-optimizer")
    assert any("the optimizer's state is dropped unread: a bucket of the optimizer" in w for w in answer["warnings"])
    assert not any(k.kind != "weight" for k in require_whole(tmp_path / "out").tensors)
    said |= {"expert_model_parallel_size": 1}
    (tmp_path / "run" / "common.pt").write_bytes(plain_pickle(root | {"args": said}))
    assert refused("inspect", tmp_path / "run")["code"] == "optimizer-buffers"


# ---- multi-token prediction ------------------------------------------------------------------------------------------

PREDICTED = {
    "mtp.layers.0.enorm.weight": (normal(HIDDEN), None),
    "mtp.layers.0.eh_proj.weight": (normal(HIDDEN, 2 * HIDDEN), 0),
    "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": (normal(HIDDEN, HIDDEN), 1),
    "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (normal(2 * FFN, HIDDEN), None),
    "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight": (normal(HIDDEN, FFN), 1),
    "mtp.layers.0.final_layernorm.weight": (normal(HIDDEN), None),
}


def predicted(rank, tp):
    out = {n: part(a, axis, rank, tp) for n, (a, axis) in PREDICTED.items()}
    name = "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"
    return out | {name: np.concatenate([part(h, 0, rank, tp) for h in np.split(PREDICTED[name][0], 2)])}


def test_layers_of_multi_token_prediction_are_kept_under_their_names(tmp_path):
    said = args(tensor_model_parallel_size=2, expert_model_parallel_size=1, data_parallel_size=1, mtp_num_layers=1)
    run = tmp_path / "iter_0000007"
    for t in range(2):
        held = dense(t, 2) | sequential(range(4), t, 2) | predicted(t, 2)
        save(run / f"mp_rank_{t:02d}", said, held, moments=True)
    good("reshard", run, tmp_path / "dist", "--tp", "1", "--megatron-format", "torch_dist")
    good("reshard", tmp_path / "dist", tmp_path / "back", "--tp", "2", "--megatron-format", "torch")
    for path in (run, tmp_path / "dist", tmp_path / "back"):
        with TensorReader(open_checkpoint(path)[0]) as reader:
            for kind, factor in (("weight", 1), ("exp_avg", 2)):
                for name, (array, _) in PREDICTED.items():
                    found = reader.array(Key(name, kind)).view(np.float32).reshape(array.shape)
                    assert np.array_equal(found, factor * array), (path, name)
    names = open_checkpoint(tmp_path / "dist")[0].tensors
    assert all(Key(n, "exp_avg_sq") in names for n in PREDICTED)
    error = refused("reshard", run, tmp_path / "no", "--ep", "2", "--dp", "2", "--megatron-format", "torch")
    assert "mtp" in error["fix"]


def test_layers_of_multi_token_prediction_on_several_stages_are_refused(tmp_path):
    said = args(tensor_model_parallel_size=1, expert_model_parallel_size=1) | {"pipeline_model_parallel_size": 2}
    for pp in range(2):
        save(tmp_path / f"iter_0000007/mp_rank_00_{pp:03d}", said, dense(0, 1) | predicted(0, 1))
    assert "multi-token prediction" in refused("inspect", tmp_path / "iter_0000007")["what"]


# ---- old versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("encoder", ["encoder", "transformer"])
def test_rows_of_query_key_and_value_in_every_version_and_names_of_old_models(version, encoder, tmp_path):
    """Version 0 has (3, heads, head) rows, 1.0 (heads, head, 3), later ones (heads, 3, head); on every rank."""
    head, tp = 2, 2
    whole = DENSE[f"{LAYER}self_attention.linear_qkv.weight"][0].reshape(HEADS, 3, head, HIDDEN)
    orders = {0: (1, 0, 2, 3), 1.0: (0, 2, 1, 3), 2.0: (0, 1, 2, 3), 3.0: (0, 1, 2, 3)}
    said = {**args(tensor_model_parallel_size=tp), "num_experts": None, "model_parallel_size": tp}
    del said["tensor_model_parallel_size"]
    old = "attention" if encoder == "transformer" else "self_attention"
    for rank in range(tp):
        rows = np.split(whole, tp)[rank].transpose(orders[version or 0]).reshape(-1, HIDDEN)
        names = {
            f"language_model.{encoder}.layers.0.{old}.query_key_value.weight": rows,
            f"language_model.{encoder}.layers.0.input_layernorm.weight": DENSE[f"{LAYER}input_layernorm.weight"][0],
            "language_model.embedding.word_embeddings.weight": dense(rank, tp)["embedding.word_embeddings.weight"],
            f"language_model.{encoder}.final_layernorm.weight": DENSE["decoder.final_layernorm.weight"][0],
        }
        root = {"args": said, "iteration": 7, "model": names}
        root |= {} if version is None else {"checkpoint_version": version}
        folder = tmp_path / f"iter_0000007/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        (folder / "model_optim_rng.pt").write_bytes(plain_pickle(root))
    checkpoint = open_checkpoint(tmp_path / "iter_0000007")[0]
    assert checkpoint.layout["tp"] == 2
    with TensorReader(checkpoint) as reader:
        for name in ("self_attention.linear_qkv.weight", "input_layernorm.weight"):
            want = DENSE[f"{LAYER}{name}"][0]
            found = reader.array(Key(f"{LAYER}{name}")).view(np.float32).reshape(want.shape)
            assert np.array_equal(found, want), name
