"""Writes golden/*.json: what Transformers itself says of the parameters of small models. Run by hand, with torch.

    python tests/names/make_golden.py

Models are built on the meta device; only names on disk need one with values, saved and read back.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MLA = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 5,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
FALCON = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6}
GPT2 = {"vocab_size": 11, "n_embd": 6, "n_layer": 3, "n_head": 2, "n_positions": 7}
NEOX = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "pad_token_id")}
QMOE = {"num_experts": 3, "moe_intermediate_size": 5}
WIDE = {"hidden_size": 9, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "num_hidden_layers": 1}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {**SMALL, **WIDE}),
    ("mistral", SMALL),
    ("mistral", {**SMALL, **WIDE}),
    ("qwen2", SMALL),
    ("qwen2", {**SMALL, "tie_word_embeddings": True, "num_hidden_layers": 1}),
    ("qwen3", SMALL),
    ("qwen3", {**SMALL, **WIDE, "attention_bias": True, "tie_word_embeddings": True}),
    ("gemma2", SMALL),
    ("gemma2", {**SMALL, **WIDE, "attention_bias": True, "tie_word_embeddings": False}),
    ("gemma3_text", SMALL),
    ("gemma3_text", {**SMALL, **WIDE, "attention_bias": True}),
    ("olmo2", SMALL),
    ("olmo2", {**SMALL, "attention_bias": True, "tie_word_embeddings": True}),
    ("phi3", SMALL),
    ("phi3", {**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("mixtral", {**SMALL, "num_local_experts": 3}),
    ("mixtral", {**SMALL, **WIDE, "num_local_experts": 1, "tie_word_embeddings": True}),
    ("qwen2_moe", {**SMALL, **QMOE, "shared_expert_intermediate_size": 6}),
    ("qwen2_moe", {**SMALL, **QMOE, "mlp_only_layers": [1], "qkv_bias": False, "num_hidden_layers": 3}),
    ("qwen2_moe", {**SMALL, **QMOE, "decoder_sparse_step": 2, "tie_word_embeddings": True, "num_hidden_layers": 3}),
    ("qwen3_moe", {**SMALL, **QMOE}),
    ("qwen3_moe", {**SMALL, **QMOE, "mlp_only_layers": [0], "attention_bias": True, "head_dim": 6}),
    ("qwen3_moe", {**SMALL, **QMOE, "decoder_sparse_step": 2, "num_hidden_layers": 3}),
    ("deepseek_v3", {**SMALL, **MLA, "q_lora_rank": 3, "first_k_dense_replace": 1, "n_shared_experts": 2}),
    ("deepseek_v3", {**SMALL, **MLA, "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True}),
    ("deepseek_v3", {**SMALL, **MLA, "q_lora_rank": 3, "first_k_dense_replace": 5, "tie_word_embeddings": True}),
    ("deepseek_v3", {**SMALL, **MLA, "q_lora_rank": 3, "first_k_dense_replace": 1, "attention_bias": True}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "multi_query": False, "bias": True, "parallel_attn": False, "alibi": True}),
    ("falcon", {**FALCON, "tie_word_embeddings": False, "ffn_hidden_size": 5, "num_ln_in_parallel_attn": 2}),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 5, "tie_word_embeddings": False}),
    ("gpt_neox", NEOX),
    ("gpt_neox", {**NEOX, "attention_bias": False, "tie_word_embeddings": True}),
]


def described(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One model as Transformers builds, numbers and saves it."""
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config)
    named = {n: list(p.shape) for n, p in model.named_parameters()}
    decays = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    aliases = {n for n, p in model.named_parameters(remove_duplicate=False)} - set(named)
    disk: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                disk[name] = list(file.get_slice(name).get_shape())
    return {
        "config": written,
        "settings": {"model_type": model_type, **settings},
        "parameters": named,
        "not_decayed": [n for n in named if n not in decays],
        "buffers": [n for n in model.state_dict() if n not in named and n not in aliases],
        "disk": disk,
    }


if __name__ == "__main__":
    place = Path(__file__).parent / "golden"
    made: dict[str, list[dict[str, Any]]] = {}
    for model_type, settings in CONFIGS:
        made.setdefault(model_type, []).append(described(model_type, settings))
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(made))  # noqa: T201
    else:
        for model_type, models in made.items():
            lines = ",\n".join(json.dumps(m) for m in models)
            (place / f"{model_type}.json").write_text(f"[\n{lines}\n]\n")
