"""Every family of names/megatron.toml: Hugging Face to Megatron and back, and where rows lie.

Weights are made here, from the shapes that real Transformers gives the family's models (tests/names).
"""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptctl.core.tensor import Key
from ckptctl.core.values import OrderedPairs
from ckptctl.names import family
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.torchfiles import stored, torch_zip, v2

BASE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 1, "mlp_only_layers": [1]}
CONFIGS = {
    "llama": BASE,
    "llama-bias": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": BASE,
    "qwen2": {**BASE, "tie_word_embeddings": True},
    "qwen3": BASE,
    "qwen3_moe": {**BASE, **MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2_moe": {**BASE, **MOE, **SHARED},
    "mixtral": {**BASE, **MOE},
    "deepseek_v3": {
        **BASE,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {"n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 37, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {**BASE, "num_key_value_heads": 4, "layer_norm_eps": 1e-5},
    "gpt_neox-tied": {
        **BASE,
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "architectures": ["GPTNeoXForCausalLM"],
    },
}


def made(tmp_path, name):
    """A Hugging Face folder of that family with random weights, and the weights."""
    config = {"model_type": name, **CONFIGS[name]}
    known = family(config)
    rng = np.random.default_rng(len(name))
    weights = {
        p.name: rng.standard_normal(p.shape).astype(np.float32)
        for p in (*known.parameters("disk"), *known.buffers("disk"))
    }
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights


def with_moments(tmp_path, name):
    """The family's folder, and a torch file of its weights with Adam's moments by name."""
    folder, weights = made(tmp_path, name)
    rng = np.random.default_rng(7)
    storages: dict[str, bytes] = {}

    def tensor(array):
        key = str(len(storages))
        storages[key] = array.tobytes()
        steps = [s // 4 for s in array.strides]
        return v2(stored(key, array.size), 0, array.shape, tuple(steps))

    trained = [n for n in weights if not n.endswith("e_score_correction_bias")]
    state = {
        n: {
            "step": tensor(np.array(5, np.float32)),
            "exp_avg": tensor(rng.standard_normal(weights[n].shape, np.float32)),
            "exp_avg_sq": tensor(rng.random(weights[n].shape, np.float32)),
        }
        for n in trained
    }
    common = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"params": [n for n in trained if (weights[n].ndim > 1) is decays], "weight_decay": decay, **common}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    tree = {
        "model": OrderedPairs({n: tensor(w) for n, w in weights.items()}),
        "optimizer": {"state": state, "param_groups": groups},
        "step": 5,
    }
    file = tmp_path / "source.pt"
    file.write_bytes(torch_zip(tree, storages))
    return folder, file


LAYOUTS = {
    "plain": ("torch", ("--tp", "2", "--pp", "2", "--optimizer", "plain")),
    "te": ("torch", ("--pp", "2", "--vpp", "2", "--dp", "2", "--layer-spec", "te")),
    "zero1": ("torch", ("--tp", "2", "--dp", "3", "--optimizer", "distributed", "--layer-spec", "local")),
    "dist": ("torch_dist", ("--tp", "4", "--pp", "2", "--dp", "2")),
    "dist-te": ("torch_dist", ("--pp", "4", "--optimizer", "plain", "--layer-spec", "te")),
}
# Each family in two of the layouts, each layout with every kind of family.
CASES = [(name, list(LAYOUTS)[(i + j) % 5]) for i, name in enumerate(CONFIGS) if "tied" not in name for j in (0, 2)]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_there_and_back_gives_equal_bytes_with_moments(name, layout, tmp_path):
    config, source = with_moments(tmp_path, name)
    form, words = LAYOUTS[layout]
    there, back, again = tmp_path / "there", tmp_path / "back.pt", tmp_path / "again"
    given = ("--model-config", config)
    to = ("--to", "megatron", "--megatron-format", form, *words, "--vocab-divisor", "4", *given)
    good("convert", source, there, *to)
    good("convert", there, back, "--to", "torch", *given)
    answer = command("diff", source, back, "--optimizer", *given, "--json").json
    assert answer["compared"]["exp_avg"] > 30
    assert [d for d in answer["differences"] if d["kind"] != "group"] == []
    # and by way of the other names again: the bytes that Megatron's files had
    good("convert", back, again, *to)
    files = [f for f in sorted(there.rglob("*")) if f.name.endswith((".pt", ".distcp")) and f.name != "common.pt"]
    assert files
    for file in files:
        other = again / file.relative_to(there)
        same = file.read_bytes() == other.read_bytes() if file.suffix == ".distcp" else tensors(file) == tensors(other)
        assert same, file


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_tied_head_of_any_name_is_the_embedding(form, tmp_path):
    """Transformers writes the embedding alone, and reads it back as the head, which gpt_neox calls embed_out."""
    source, weights = made(tmp_path, "gpt_neox-tied")
    assert "embed_out.weight" not in weights
    there, back = tmp_path / "there", tmp_path / "back"
    good("convert", source, there, "--to", "megatron", "--megatron-format", form, "--pp", "2", "--vocab-divisor", "4")
    good("convert", there, back, "--to", "hf", "--model-config", source / "config.json")
    assert (back / "model.safetensors").stat().st_size > 0
    assert command("diff", source, back, "--json").json["equal"]
    named = [k.name for k in open_checkpoint(there)[0].tensors]
    assert "embedding.word_embeddings.weight" in named
    assert "output_layer.weight" not in named


def tensors(file):
    """The bytes of a torch file's storages."""
    with zipfile.ZipFile(file) as archive:
        return [archive.read(n) for n in archive.namelist() if "/data/" in n]


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_over_ranks_come_back(name, ep, tmp_path):
    source, _ = made(tmp_path, name)
    for form in ("torch", "torch_dist"):
        there, back = tmp_path / f"there-{form}", tmp_path / f"back-{form}"
        good("convert", source, there, "--to", "megatron", "--megatron-format", form, "--ep", str(ep), "--tp", "2")
        good("convert", there, back, "--to", "hf", "--model-config", source)
        assert document("diff", source, back)["equal"]


def test_rows_lie_as_megatron_has_them(tmp_path):
    source, w = made(tmp_path, "deepseek_v3")
    good("convert", source, tmp_path / "there", "--to", "megatron", "--tp", "2")
    checkpoint, _ = open_checkpoint(tmp_path / "there")
    layer, hub = "decoder.layers.2.", "model.layers.2."
    want = {
        f"{layer}self_attention.linear_q_up_proj.weight": w[f"{hub}self_attn.q_b_proj.weight"],
        f"{layer}self_attention.kv_layernorm.weight": w[f"{hub}self_attn.kv_a_layernorm.weight"],
        f"{layer}mlp.experts.local_experts.3.linear_fc1.weight": np.concatenate(
            [w[f"{hub}mlp.experts.3.{n}_proj.weight"] for n in ("gate", "up")]
        ),
        f"{layer}mlp.shared_experts.linear_fc2.weight": w[f"{hub}mlp.shared_experts.down_proj.weight"],
        f"{layer}mlp.router.expert_bias": w[f"{hub}mlp.gate.e_score_correction_bias"],
    }
    with TensorReader(checkpoint) as reader:
        found = {n: reader.array(Key(n)).view(np.float32).reshape(t.shape) for n, t in want.items()}
    assert all(np.array_equal(found[n], want[n]) for n in want)


def test_query_groups_of_llama_by_numpy(tmp_path):
    source, w = made(tmp_path, "llama")
    good("convert", source, tmp_path / "there", "--to", "megatron", "--tp", "2", "--megatron-format", "torch")
    checkpoint, _ = open_checkpoint(tmp_path / "there")
    q, k, v = (w[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    want = np.concatenate(
        [np.concatenate([q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]]) for g in (0, 1)]
    )
    key = Key("decoder.layers.1.self_attention.linear_qkv.weight")
    with TensorReader(checkpoint) as reader:
        assert np.array_equal(reader.array(key).view(np.float32).reshape(want.shape), want)


def test_a_family_that_megatron_has_not_is_refused(tmp_path):
    source, _ = made(tmp_path, "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "olmo2"}))
    error = refused("convert", source, tmp_path / "out", "--to", "megatron")
    assert error["exit_code"] == 3


def test_layers_of_multi_token_prediction_go_by_megatron_s_names_in_other_formats(tmp_path):
    source, weights = made(tmp_path, "mixtral")
    more = {
        "mtp.layers.0.enorm.weight": np.arange(16, dtype=np.float32),
        "mtp.layers.0.eh_proj.weight": np.arange(512, dtype=np.float32).reshape(16, 32),
    }
    save_file(weights | more, source / "model.safetensors", {"format": "pt"})
    good("convert", source, tmp_path / "there", "--to", "megatron", "--tp", "2", "--pp", "2")
    error = refused("convert", source, tmp_path / "no", "--to", "megatron", "--pp", "2", "--megatron-format", "torch")
    assert "multi-token prediction" in error["what"]
    back = document("convert", tmp_path / "there", tmp_path / "back", "--to", "hf", "--model-config", source)
    assert "mtp.layers.0.eh_proj.weight" in json.dumps(back)
    assert document("diff", source, tmp_path / "back")["equal"]


def test_layers_of_multi_token_prediction_of_hugging_face_are_refused_and_can_be_left_out(tmp_path):
    """DeepSeek-V3's own files have them after the model's layers."""
    source, weights = made(tmp_path, "deepseek_v3")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    more = {p.name: np.zeros(p.shape, np.float32) for p in family(config).extras()}
    assert {n.rpartition(".layers.4.")[0] for n in more} == {"model"}
    save_file(weights | more, source / "model.safetensors", {"format": "pt"})
    error = refused("convert", source, tmp_path / "no", "--to", "megatron")
    assert (error["exit_code"], error["code"]) == (3, "names-unknown")
    assert "multi-token prediction are not known for 32 weights" in error["what"]
    assert error["fix"] == "leave them out with --exclude 'model.layers.4.*'"
    good("convert", source, tmp_path / "out", "--to", "megatron", "--exclude", "model.layers.4.*")
    good("convert", tmp_path / "out", tmp_path / "back", "--to", "hf", "--model-config", source)
    answer = command("diff", source, tmp_path / "back", "--json")
    assert answer.code == 1
    assert {d["name"] for d in answer.json["differences"]} == set(more)


UNEVEN = [
    ("pipeline_model_parallel_size: 2\ndecoder_first_pipeline_num_layers: 1\n", [1, 3]),
    ("pipeline_model_parallel_size: 2\ndecoder_last_pipeline_num_layers: 1\n", [3, 1]),
    (
        "pipeline_model_parallel_size: 3\naccount_for_embedding_in_pipeline_split: true\n"
        "account_for_loss_in_pipeline_split: true\n",
        [1, 2, 1],
    ),
]


@pytest.mark.parametrize(("text", "layers"), UNEVEN)
def test_uneven_pipelines_are_written_as_the_run_has_them(text, layers, tmp_path):
    """Layers of each stage as the real models of those args have them."""
    source, _ = made(tmp_path, "llama")
    (tmp_path / "run.yaml").write_text(text)
    there = tmp_path / "there"
    good("convert", source, there, "--to", "megatron", "--megatron-format", "torch", "--like", tmp_path / "run.yaml")
    found = []
    for stage in range(len(layers)):
        with zipfile.ZipFile(there / f"release/mp_rank_00_{stage:03d}/model_optim_rng.pt") as archive:
            pickle = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
        found.append(pickle.count(b".input_layernorm.weight"))
    assert found == layers
    good("convert", there, tmp_path / "back", "--to", "hf", "--model-config", source)
    assert document("diff", source, tmp_path / "back")["equal"]


def test_a_tensor_that_ranks_do_not_divide_is_named_with_what_would(tmp_path):
    """14 rows of the down projection: local layers cut them, the Transformer Engine's do not."""
    source, _ = made(tmp_path, "deepseek_v3")
    words = ("--to", "megatron", "--tp", "4", "--megatron-format", "torch", "--layer-spec")
    error = refused("convert", source, tmp_path / "no", *words, "local")
    assert error["code"] == "mesh-does-not-divide"
    assert "linear_kv_down_proj.weight (14, 16)" in error["what"]
    assert error["fix"] == "--tp 1, 2, 7, 14 would do for it"
    good("convert", source, tmp_path / "out", *words, "te")
