"""Real megatron-core models of a checkpoint's args, against what its files hold. Run by a Python with megatron-core.

    python mcore_model.py ITERATION_FOLDER ...        without folders, those that come on standard input, a line each

For every rank the real GPTModel is built under a process group that only pretends, and its state dict is compared with
the rank's file (classic) or its sharded state dict with the index (torch_dist). One JSON line a folder: differences.
Not imported by tests: it needs torch and megatron.
"""

# ruff: noqa: E402, I001, TID251, TID253, T201 (it is a script of its own for another Python, and trusts its files)

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path

sys.path.pop(0)  # beside this file lies another megatron.py
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.cuda.current_device = lambda: "cpu"
torch.cuda.device_count = lambda: 1
torch.Tensor.cuda = lambda self, *a, **k: self
stub = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
stub.enable_batch_invariant_mode = lambda *a, **k: None
stub.is_batch_invariant_mode_enabled = lambda *a, **k: False
sys.modules[stub.__name__] = stub

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import multi_latent_attention as latent_attention
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron.core.transformer.dot_product_attention import DotProductAttention

# Latent attention is built with the Transformer Engine's attention alone, which has no parameters either.
_init = DotProductAttention.__init__
DotProductAttention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **k: _init(self, *a, **k)

latent_attention.HAVE_TE = False  # stand-ins otherwise

RENAMED = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}
TAKEN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "swiglu", "num_experts",
    "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_router_enable_expert_bias", "moe_router_score_function", "moe_grouped_gemm",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax", "moe_use_legacy_grouped_gemm",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
OLD = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}


def config_of(args):
    """The run's TransformerConfig, as core_transformer_config_from_args makes it."""
    latent = getattr(args, "multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    given = {}
    for name in TAKEN:
        value = getattr(args, OLD.get(name, name), None)
        to = RENAMED.get(name, name)
        if value is not None and to in kind.__dataclass_fields__:
            given[to] = value
    given["pipeline_dtype"] = torch.float32
    if not getattr(args, "group_query_attention", False):
        given.pop("num_query_groups", None)
    if not latent:
        given.pop("q_lora_rank", None)
    else:
        given["q_lora_rank"] = getattr(args, "q_lora_rank", None)
        given["rope_type"] = "rope"
    return kind(
        **given, use_cpu_initialization=True, perform_initialization=False, transformer_impl="local",
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip


def models(args, rank: int, world: int):
    """The model chunks of one rank."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            pp,
            vpp,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        config = config_of(args)
        for chunk in range(vpp or 1):
            stage = chunk if vpp else None
            if vpp:
                mpu.set_virtual_pipeline_model_parallel_rank(chunk)
            first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
            last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
            mtp = None
            if config.num_moe_experts:
                spec = get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, normalization=args.normalization, vp_stage=stage
                )
            else:
                spec = get_gpt_layer_local_spec(
                    qk_layernorm=args.qk_layernorm,
                    multi_latent_attention=config.multi_latent_attention,
                    normalization=args.normalization,
                )
            if config.mtp_num_layers:
                layers = get_gpt_decoder_layer_specs(
                    config, use_transformer_engine=False, normalization=args.normalization, vp_stage=stage
                )
                mtp = get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=False, vp_stage=stage)
            yield GPTModel(
                config,
                spec,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                mtp_block_spec=mtp,
                vp_stage=stage,
            )
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def shapes(state) -> dict[str, list[int] | None]:
    """Names and shapes of a state dict, None for what is no tensor."""
    return {k: list(v.shape) if isinstance(v, torch.Tensor) else None for k, v in state.items()}


def differences(real: dict, ours: dict) -> list[str]:
    """What one has and the other has not, or in another shape; order, too."""
    out = [f"missing {k} {v}" for k, v in real.items() if k not in ours]
    out += [f"unexpected {k} {v}" for k, v in ours.items() if k not in real]
    out += [f"{k} {ours[k]} not {v}" for k, v in real.items() if k in ours and ours[k] != v]
    if not out and list(real) != list(ours):
        out = ["order"]
    return out


def classic(folder: Path) -> list[str]:
    """Differences of every rank."""
    out = []
    for file in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        held = torch.load(file, weights_only=False, map_location="cpu")
        args = held["args"]
        world = args.world_size
        for chunk, model in enumerate(models(args, args.rank, world)):
            key = "model" if not args.virtual_pipeline_model_parallel_size else f"model{chunk}"
            real = shapes(model.state_dict_for_save_checkpoint())
            # Not kept by converters: counts of tokens of the step.
            real = {k: v for k, v in real.items() if not k.endswith("local_tokens_per_expert")}
            ours = shapes(held[key])
            out += [f"{file.parent.name} {key}: {d}" for d in differences(real, ours)]
    return out


def torch_dist(folder: Path) -> list[str]:
    """Differences of the keys and global shapes of all ranks together."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from torch.distributed.checkpoint import FileSystemReader

    args = torch.load(folder / "common.pt", weights_only=False)["args"]
    real: dict[str, list[int] | None] = {}
    for rank in range(args.world_size):
        for model in models_with_groups(args, rank):
            for value in nested_values(model):
                if isinstance(value, ShardedTensorFactory):
                    value = value.build()
                for one in nested_values({"x": value}) if isinstance(value, (dict, list)) else [value]:
                    if isinstance(one, ShardedTensor):
                        real[one.key] = list(one.global_shape)
                    elif isinstance(one, ShardedObject):
                        real[one.unique_key] = None
    index = FileSystemReader(folder).read_metadata().state_dict_metadata
    ours = {k: list(v.size) if hasattr(v, "size") else None for k, v in index.items()}
    ours = {k: v for k, v in ours.items() if not k.startswith(("optimizer.", "rng_state"))}
    real = {k: v for k, v in real.items() if "local_tokens_per_expert" not in k}
    return [d for d in differences(real, ours) if d != "order"]


def models_with_groups(args, rank):
    """Sharded state dicts: they need the groups while they are made."""
    gen = models(args, rank, args.world_size)
    homogeneous = not isinstance(getattr(args, "moe_layer_freq", 1), list)
    for model in gen:
        yield model.sharded_state_dict(metadata={"non_homogeneous_layers": not homogeneous})


def main() -> None:
    """One line of JSON a folder. Loading torch and Megatron takes far longer than a folder does."""
    for name in sys.argv[1:] or sys.stdin:
        folder = Path(name.rstrip("\n"))
        found = torch_dist(folder) if (folder / ".metadata").is_file() else classic(folder)
        print("MODEL " + json.dumps({"folder": str(folder), "differences": found}), flush=True)


if __name__ == "__main__":
    main()
