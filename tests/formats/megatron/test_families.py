"""Every family of names/megatron.toml: Hugging Face to Megatron and back, and where rows lie.

Weights are made here, from the shapes that real Transformers gives the family's models (tests/names).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptctl.core.tensor import Key
from ckptctl.names import family
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.support.commands import document, good, refused

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
CONFIGS = {
    "llama": BASE,
    "llama-bias": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": BASE,
    "qwen2": {**BASE, "tie_word_embeddings": True},
    "qwen3": BASE,
    "qwen3_moe": {**BASE, **MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
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


LAYOUTS = [
    ("torch", ("--tp", "2", "--pp", "2")),
    ("torch", ("--pp", "2", "--vpp", "2", "--layer-spec", "te")),
    ("torch_dist", ("--tp", "2", "--vocab-divisor", "8")),
]


@pytest.mark.parametrize(("form", "words"), LAYOUTS, ids=["tp2pp2", "vpp-te", "dist"])
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_gives_equal_bytes(name, form, words, tmp_path):
    source, _ = made(tmp_path, name)
    if name == "llama-bias":
        words = (*words, "--vocab-divisor", "4")
    good("convert", source, tmp_path / "there", "--to", "megatron", "--megatron-format", form, *words)
    good("convert", tmp_path / "there", tmp_path / "back", "--to", "hf", "--model-config", source)
    answer = document("diff", source, tmp_path / "back")
    assert answer["equal"], answer["differences"][:3]


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
