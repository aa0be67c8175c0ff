"""What lies around Megatron's tensors: zarr arrays, Megatron-FSDP's DCP, Bridge and NeMo folders. Made by hand.

No run of those made the files here; their layout is what the sources named in the readers say.
"""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest

from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key
from ckptctl.formats.megatron import yamltext
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.formats.megatron.test_families import made
from tests.support.bruteforce import torch_tree
from tests.support.commands import document, good, refused
from tests.support.dcpfiles import Cut, plain_pickle, write_dcp

LAYERS, HIDDEN, HEADS, GROUPS, HEAD = 4, 16, 4, 2, 4


def qkv(q, k, v):
    """Rows by query group: its query heads, a key head, a value head."""
    rows = []
    for g in range(GROUPS):
        per = HEADS // GROUPS * HEAD
        rows += [q[g * per : (g + 1) * per], k[g * HEAD : (g + 1) * HEAD], v[g * HEAD : (g + 1) * HEAD]]
    return np.concatenate(rows)


def layer_of(w, n):
    """A llama layer's tensors as megatron-core names them, by NumPy."""
    hub = f"model.layers.{n}."
    q, k, v = (w[f"{hub}self_attn.{x}_proj.weight"] for x in "qkv")
    return {
        "self_attention.linear_qkv.layer_norm_weight": w[f"{hub}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": qkv(q, k, v),
        "self_attention.linear_proj.weight": w[f"{hub}self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": w[f"{hub}post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": np.concatenate([w[f"{hub}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        "mlp.linear_fc2.weight": w[f"{hub}mlp.down_proj.weight"],
    }


def padded(rows):
    return np.concatenate([rows, np.full((3, HIDDEN), 7, np.float32)])


def outer(w):
    return {
        "embedding.word_embeddings.weight": padded(w["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": w["model.norm.weight"],
        "output_layer.weight": padded(w["lm_head.weight"]),
    }


def stacked(w, prefix=""):
    """torch_dist's keys: layers under one."""
    layers = [layer_of(w, n) for n in range(LAYERS)]
    out = {f"{prefix}decoder.layers.{t}": np.stack([x[t] for x in layers]) for t in layers[0]}
    return {f"{prefix}{n}": a for n, a in outer(w).items()} | out


def require_source(path, source, tmp_path):
    """The folder is the Hugging Face one, byte for byte."""
    good("convert", path, tmp_path / "back", "--to", "hf", "--no-optimizer", "--model-config", source)
    answer = document("diff", source, tmp_path / "back")
    assert answer["equal"], answer["differences"][:3]


# ---- zarr -----------------------------------------------------------------------------------------------------------


def zarr(folder, arrays):
    for name, array in arrays.items():
        at = folder / name
        at.mkdir(parents=True)
        by = [2 if axis < 2 and n % 2 == 0 else 1 for axis, n in enumerate(array.shape)]
        chunk = [n // c for n, c in zip(array.shape, by, strict=True)]
        said = {"shape": array.shape, "chunks": chunk, "dtype": "<f4", "compressor": None, "fill_value": None}
        (at / ".zarray").write_text(json.dumps({**said, "filters": None, "order": "C", "zarr_format": 2}))
        for index in np.ndindex(*by):
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, chunk, strict=True))
            (at / ".".join(map(str, index))).write_bytes(np.ascontiguousarray(array[box]).tobytes())
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))


def zarr_run(tmp_path):
    source, w = made(tmp_path, "llama")
    run = tmp_path / "run" / "iter_0000009"
    tensors = stacked(w)
    for kind, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
        tensors |= {f"optimizer.state.{kind}.{n}": factor * a for n, a in stacked(w).items()}
    zarr(run, tensors)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "wd_mult": 1.0, "weight_decay": 0.1}
    groups = [group, {**group, "wd_mult": 0.0, "weight_decay": 0.0}]
    args = {"num_layers": LAYERS, "tensor_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    optimizer = {"state": {"common_step": 9}, "param_groups": groups}
    root = {"args": args, "checkpoint_version": 3.0, "iteration": 9, "optimizer": optimizer}
    (run / "common.pt").write_bytes(plain_pickle(root))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("9")
    (run / "rng_state").mkdir()
    (run / "rng_state" / "shard_0.1_1.2.pt").write_bytes(plain_pickle({"seed": 5}))
    return source, w, run


def test_zarr_arrays_are_read_with_their_moments(tmp_path):
    source, w, run = zarr_run(tmp_path)
    told = document("inspect", run.parent)
    assert (told["format"], told["variant"], told["step"], told["layout"]["tp"]) == ("megatron", "zarr", 9, 2)
    checkpoint = open_checkpoint(run)[0]
    key = "decoder.layers.2.mlp.linear_fc1.weight"
    with TensorReader(checkpoint) as reader:
        for kind, factor in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            want = factor * layer_of(w, 2)["mlp.linear_fc1.weight"]
            assert np.array_equal(reader.array(Key(key, kind)).view(np.float32).reshape(want.shape), want)
    assert checkpoint.native["rng_state"] == {(0, 1, 0): {"seed": 5}}
    require_source(run, source, tmp_path)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, "compressor blosc"),
        ({"filters": [{"id": "delta"}]}, "filters ['delta']"),
        ({"dtype": "<c8"}, "type '<c8'"),
        ({"order": "F"}, "order F"),
        ({"chunks": [0, 16]}, "in chunks of (0, 16)"),
        ({"chunks": [7, 16]}, "do not divide"),
        ({"shape": "all"}, "shape of"),
    ],
)
def test_zarr_of_another_kind_is_refused_by_name(said, words, tmp_path):
    _, _, run = zarr_run(tmp_path)
    file = run / "output_layer.weight" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    assert words in refused("inspect", run)["what"]


def test_a_zarr_chunk_that_is_missing_or_short_is_named(tmp_path):
    _, _, run = zarr_run(tmp_path)
    chunk = run / "output_layer.weight" / "1.1"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert "chunk 1.1 of output_layer.weight has" in refused("inspect", run)["what"]
    chunk.unlink()
    assert "chunk 1.1 of output_layer.weight is not there" in refused("inspect", run)["what"]


# ---- states as flat runs of parts (fully_sharded_model_space) --------------------------------------------------------


def flat_cut(array, grid):
    """A tensor in a grid of parts, each flat and cut at a third: as runs before 0.16 save states.

    Checked against files that megatron-core 0.14.0 itself saved from two ranks.
    """
    part = [n // g for n, g in zip(array.shape, grid, strict=True)]
    boxes = []
    for at in np.ndindex(*grid):
        box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, part, strict=True))
        row = array[box].reshape(-1)
        cut = len(row) // 3
        for start, stop in ((0, cut), (cut, len(row))):
            boxes.append(((*at, start), row[start:stop].reshape(*(1,) * len(grid), -1)))
    return Cut((*grid, int(np.prod(part))), boxes)


def test_states_as_flat_runs_of_parts_are_put_together(tmp_path):
    source, w = made(tmp_path, "llama")
    run = tmp_path / "iter_0000003"
    tensors = stacked(w)
    items = dict(tensors)
    for kind, factor in (("param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        for name, array in tensors.items():
            layers = array.shape[:1] if ".layers." in name else ()
            inner = array.shape[len(layers) :]
            axis = 1 if name.endswith(("linear_fc2.weight", "linear_proj.weight")) else 0
            grid = [(2 if a == axis and len(inner) > 1 else 1) for a in range(len(inner))]
            items[f"optimizer.state.{kind}.{name}"] = flat_cut(factor * array, (*layers, *grid))
    write_dcp(run, items, chunks=2)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "wd_mult": 1.0, "weight_decay": 0.1, "step": 3}
    groups = [group, {**group, "wd_mult": 0.0, "weight_decay": 0.0}]
    args = {"num_layers": LAYERS, "tensor_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    kind = "fully_sharded_model_space"
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind}
    (run / "common.pt").write_bytes(plain_pickle({"args": args, "iteration": 3, "optimizer": optimizer}))
    checkpoint = open_checkpoint(run)[0]
    with TensorReader(checkpoint) as reader:
        for tail in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight"):
            for kind, factor in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
                want = factor * layer_of(w, 2)[tail]
                found = reader.array(Key(f"decoder.layers.2.{tail}", kind)).view(np.float32)
                assert np.array_equal(found.reshape(want.shape), want), (tail, kind)
        want = 3 * outer(w)["embedding.word_embeddings.weight"]
        found = reader.array(Key("embedding.word_embeddings.weight", "exp_avg_sq")).view(np.float32)
        assert np.array_equal(found.reshape(want.shape), want)
    require_source(run, source, tmp_path)


# ---- halves under keys of their own, and Megatron-FSDP ---------------------------------------------------------------


def halved(tensors):
    """First projections as two keys: the gates and the ups."""
    out = {}
    for name, array in tensors.items():
        if name.endswith("linear_fc1.weight"):
            out[f"{name}_w"], out[f"{name}_v"] = np.split(array, 2, axis=array.ndim - 2)
        else:
            out[name] = array
    return out


def test_gates_and_ups_under_keys_of_their_own(tmp_path):
    source, w = made(tmp_path, "llama")
    run = tmp_path / "iter_0000001"
    tensors = {f"decoder.layers.{n}.{t}": a for n in range(LAYERS) for t, a in layer_of(w, n).items()} | outer(w)
    write_dcp(run, halved(tensors), chunks=2)
    (run / "common.pt").write_bytes(plain_pickle({"args": {"num_layers": LAYERS}, "iteration": 1}))
    require_source(run, source, tmp_path)


def fsdp_run(tmp_path, name="llama"):
    source, w = made(tmp_path, name)
    run = tmp_path / "run" / "iter_0000004"
    tensors = {f"decoder.layers.{n}.{t}": a for n in range(LAYERS) for t, a in layer_of(w, n).items()} | outer(w)
    tensors = halved(tensors)
    items = {f"model.module.{n}": a for n, a in tensors.items()}
    for n, a in tensors.items():
        state = f"optimizer.state.module.{n}"
        items |= {f"{state}.exp_avg": 2 * a, f"{state}.exp_avg_sq": 3 * a}
        whole = n.removesuffix("_w").removesuffix("_v")
        meta = f"optimizer.param_to_group_meta.module.{whole}"
        decays = a.ndim > 1
        said = {"lr": 0.1, "weight_decay": 0.1 * decays, "wd_mult": float(decays), "eps": 1e-8, "step": 4}
        items |= {f"{meta}.{k}": v for k, v in {**said, "betas": (0.9, 0.99)}.items()}
    args = {"num_layers": LAYERS, "data_parallel_size": 2, "untie_embeddings_and_output_weights": True}
    items |= {"args": args, "iteration": 4, "checkpoint_version": 3.0, "rng_state.(0, 0)": [{"seed": 1}]}
    items |= {"opt_param_scheduler.max_lr": 0.1, "opt_param_scheduler.num_steps": 64}
    write_dcp(run, items, chunks=2)
    return source, w, run


def test_megatron_fsdp_is_read_with_its_moments(tmp_path):
    source, w, run = fsdp_run(tmp_path)
    told = document("inspect", run)
    assert (told["format"], told["variant"], told["step"], told["layout"]["dp"]) == ("megatron", "fsdp_dtensor", 4, 2)
    checkpoint = open_checkpoint(run)[0]
    key = "decoder.layers.2.mlp.linear_fc1.weight"
    with TensorReader(checkpoint) as reader:
        for kind, factor in (("weight", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            want = factor * layer_of(w, 2)["mlp.linear_fc1.weight"]
            assert np.array_equal(reader.array(Key(key, kind)).view(np.float32).reshape(want.shape), want)
    assert {s for (_, kind), s in checkpoint.optimizer.scalars.items() if kind == "step"} == {4}
    decays = {g.options["weight_decay"] for g in checkpoint.optimizer.groups}
    assert decays == {0.1, 0.0}
    assert checkpoint.values["opt_param_scheduler"] == {"max_lr": 0.1, "num_steps": 64}
    require_source(run, source, tmp_path)


# ---- Bridge and NeMo 2 -----------------------------------------------------------------------------------------------

BRIDGE = """\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save: nowhere
  ckpt_step: null
model:
  _target_: megatron.bridge.models.llama.llama_provider.LlamaModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  gated_linear_unit: true
  hidden_size: 16
  kv_channels: 4
  layernorm_epsilon: 1.0e-06
  num_attention_heads: 4
  num_layers: 4   # of the decoder
  num_query_groups: 2
  pipeline_model_parallel_layout:
  - - embedding
    - decoder
  - [decoder, loss]
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  vocab_size: 37
ddp:
  overlap_grad_reduce: true
optimizer: {}
"""


def test_a_bridge_s_folder_is_read_with_the_facts_of_its_config(tmp_path):
    source, w = made(tmp_path, "llama")
    run = tmp_path / "run" / "iter_0000006"
    write_dcp(run, stacked(w), chunks=2)
    (run / "common.pt").write_bytes(plain_pickle({"checkpoint_version": 3.0}))
    (run / "run_config.yaml").write_text(BRIDGE)
    counts = {"step": np.array(6, np.float32), "consumed_train_samples": np.array(48, np.float32)}
    counts |= {"skipped_train_samples": np.array(2, np.float32), "floating_point_operations_so_far": np.array(9.0)}
    (run / "train_state.pt").write_bytes(plain_pickle(counts))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("6")
    told = document("inspect", tmp_path / "run")
    assert (told["format"], told["step"], told["layout"]["tp"]) == ("megatron", 6, 2)
    assert open_checkpoint(run)[0].values["consumed_train_samples"] == 48
    require_source(run, source, tmp_path)
    out = tmp_path / "out"
    good("reshard", run, out, "--megatron-format", "torch", "--model-config", source)
    root = torch_tree(next(out.glob("iter_0000006/mp_rank_00*/model_optim_rng.pt")))
    assert root["num_floating_point_operations_so_far"] == 9
    said = root["args"].state
    assert (said["consumed_train_samples"], said["skipped_train_samples"]) == (48, 2)


def test_a_nemo_2_folder_is_read_with_the_facts_of_its_context(tmp_path):
    source, w = made(tmp_path, "llama")
    write_dcp(tmp_path / "nemo" / "weights", stacked(w, "module."), chunks=2)
    (tmp_path / "nemo" / "weights" / "common.pt").write_bytes(plain_pickle({"global_step": 8, "epoch": 0}))
    (tmp_path / "nemo" / "context").mkdir()
    text = "_target_: nemo.collections.llm.LlamaModel\nconfig:\n  num_layers: 4\n  num_attention_heads: 4\n"
    (tmp_path / "nemo" / "context" / "model.yaml").write_text(text)
    told = document("inspect", tmp_path / "nemo")
    assert (told["format"], told["variant"], told["step"]) == ("megatron", "torch_dist", 8)
    require_source(tmp_path / "nemo", source, tmp_path)


# ---- NeMo 1 ----------------------------------------------------------------------------------------------------------

NEMO = """\
num_layers: 4
hidden_size: 16
ffn_hidden_size: 24
num_attention_heads: 4
num_query_groups: 2
activation: fast-swiglu
share_embeddings_and_output_weights: false
tensor_model_parallel_size: {tp}
pipeline_model_parallel_size: 1
tokenizer:
  library: sentencepiece
  model: nemo:abc.model
"""


def tar(path, files, mode="w"):
    with tarfile.open(path, mode) as out:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def cut(name, array, rank, tp):
    """A rank's part of a tensor, as megatron-core's layers are cut."""
    if name.endswith("linear_fc1.weight"):
        return np.concatenate([np.split(half, tp)[rank] for half in np.split(array, 2)])
    axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
    return array if "norm" in name else np.split(array, tp, axis)[rank]


def nemo(tmp_path, tp, mode="w"):
    source, w = made(tmp_path, "llama")
    whole = {f"decoder.layers.{n}.{t}": a for n in range(LAYERS) for t, a in layer_of(w, n).items()} | outer(w)
    files = {"model_config.yaml": NEMO.format(tp=tp).encode()}
    for rank in range(tp):
        folder = f"mp_rank_{rank:02d}/" if tp > 1 else ""
        held = {f"model.{n}": cut(n, a, rank, tp) for n, a in whole.items()}
        files[f"{folder}model_weights.ckpt"] = plain_pickle(held)
    tar(tmp_path / "model.nemo", files, mode)
    return source, tmp_path / "model.nemo", files


@pytest.mark.parametrize("tp", [1, 2])
def test_a_nemo_archive_is_read_in_place(tp, tmp_path):
    source, path, _ = nemo(tmp_path, tp)
    told = document("inspect", path)
    assert (told["format"], told["variant"], told["layout"]["tp"]) == ("megatron", "nemo", tp)
    require_source(path, source, tmp_path)


@pytest.mark.parametrize("kind", ["dcp", "zarr"])
def test_a_nemo_archive_of_distributed_weights_is_read_in_place(kind, tmp_path):
    source, w = made(tmp_path, "llama")
    folder = tmp_path / "weights"
    if kind == "dcp":
        write_dcp(folder, stacked(w, "model."), chunks=2)
    else:
        zarr(folder, stacked(w, "model."))
    (folder / "common.pt").write_bytes(plain_pickle({"sharded": 1}))
    files = {"model_config.yaml": NEMO.format(tp=2).encode()}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files[f"model_weights/{file.relative_to(folder).as_posix()}"] = file.read_bytes()
    tar(tmp_path / "model.nemo", files)
    require_source(tmp_path / "model.nemo", source, tmp_path)


def test_a_nemo_archive_that_is_compressed_or_lacks_parts_is_refused(tmp_path):
    _, path, files = nemo(tmp_path, 2, "w:gz")
    error = refused("inspect", path)
    assert "compressed with gzip" in error["what"]
    assert "gunzip" in error["fix"]
    tar(path, {n: d for n, d in files.items() if "mp_rank_01" not in n})
    assert "1 of 2 ranks are missing: mp_rank_01" in refused("inspect", path)["what"]
    tar(path, {n: d for n, d in files.items() if "config" not in n})
    assert "model_config.yaml is not in the archive" in refused("inspect", path)["what"]
    tar(path, files)
    path.write_bytes(path.read_bytes()[:9000])
    assert refused("inspect", path)["exit_code"] == 3


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (BRIDGE, None),
        ("a: 1\nb:\n- x\n- y: 2\n  z: [1, 2.5]\n", {"a": 1, "b": ["x", {"y": 2, "z": [1, 2.5]}]}),
        ("a: !!python/name:torch.float32 ''\nb: &x 3\n", {"a": "", "b": 3}),
        ("'a b': \"x: y\"\nc: it's\nd: ~\n", {"a b": "x: y", "c": "it's", "d": None}),
        ("a: |\n  one\n  two\nb: long words\n  that go on\n", {"a": "one\ntwo", "b": "long words that go on"}),
        ("a: []\nb: {}\nc: 1e-5\nd: 0x10\n", {"a": [], "b": {}, "c": 1e-5, "d": "0x10"}),
        ("", None),
    ],
)
def test_yaml_by_hand(text, want):
    found = yamltext.parsed(text, "here")
    if want is None and text:
        assert found["model"]["pipeline_model_parallel_layout"] == [["embedding", "decoder"], ["decoder", "loss"]]
        assert found["model"]["layernorm_epsilon"] == 1e-6
        assert found["model"]["num_layers"] == 4
    else:
        assert found == want


@pytest.mark.parametrize("text", ["a: 1\n   b: 2\n", "a:\n    b: 1\n  c: 2\n", "- 1\nb: 2\n", "x: " + "y" * 70000])
def test_yaml_that_is_none_is_damaged(text):
    with pytest.raises(Damaged):
        yamltext.parsed(text, "here")
