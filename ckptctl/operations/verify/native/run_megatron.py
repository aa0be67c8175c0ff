"""A Megatron checkpoint loaded by Megatron-LM's own load_checkpoint, trained by its schedules, and saved again.

What the run holds is told by what it saves: after the load, and after the steps; the reader of the format reads both.
Source: Megatron-LM core_v0.16.1, megatron/training (arguments.py, checkpointing.py, initialize.py, training.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from . import megatron_cpu
from .rank import Story, run

TAKEN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups",
    "group_query_attention", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent",
    "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor",
    "rotary_scaling_factor", "rope_type", "mscale", "mscale_all_dim", "no_rope_freq", "use_rotary_position_embeddings",
    "add_position_embedding", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "norm_epsilon",
    "swiglu", "glu_linear_offset", "activation_func_clamp_value", "squared_relu", "quick_geglu", "openai_gelu",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "apply_layernorm_1p", "qk_l2_norm", "attention_output_gate",
    "softmax_type", "untie_embeddings_and_output_weights", "apply_residual_connection_post_layernorm",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_pre_softmax",
    "moe_router_score_function", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_grouped_gemm",
    "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "moe_router_dtype", "moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy", "moe_apply_probs_on_input", "moe_latent_size", "moe_token_dispatcher_type",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "context_parallel_size", "sequence_parallel", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "transformer_impl", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "make_vocab_size_divisible_by", "use_distributed_optimizer",
    "overlap_grad_reduce", "ddp_bucket_size", "bf16", "accumulate_allreduce_grads_in_fp32", "lr", "min_lr",
    "lr_decay_style", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "init_method_std", "window_size",
    "window_attn_skip_freq", "mtp_num_layers", "attention_softmax_in_fp32", "apply_query_key_layer_scaling",
    "apply_wd_to_qk_layernorm", "fp32_residual_connection", "mtp_loss_scaling_factor",
    "dist_ckpt_optim_fully_reshardable",
)  # fmt: skip
"""Arguments that a run takes over from the checkpoint's own; all others are the steps' and the machine's."""
ALSO = {
    "layernorm_epsilon": "norm_epsilon",
    "norm_epsilon": "layernorm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""What another version calls an argument: 0.16 makes some of the fields of TransformerConfig, under their names."""


def steps(job: dict[str, Any], story: Story) -> None:
    """Load, save, step, save."""
    import torch

    plan = job["megatron"]
    if job["device"] == "cpu":
        megatron_cpu.before_import()
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()
    import megatron.training.training

    if job["device"] == "cpu":
        megatron_cpu.after_import()
    live = Live(job)
    iteration = live.load()
    story.told |= {"framework": "Megatron-LM", "version": live.version, "unset": live.unset()}
    live.save(Path(job["folder"]) / "before", iteration)
    start = time.perf_counter()
    for number, batch in enumerate(job["batches"]):
        torch.manual_seed(job["seed"] + number)
        rates = job["rates"][number] if number < len(job["rates"]) else []
        loss, lr = live.step(batch, rates)
        story.told["losses"].append(loss)
        story.told["lr"].append(lr)
        story.told["finite"] = story.told["finite"] and math.isfinite(loss)
    story.seconds = time.perf_counter() - start
    live.save(Path(job["folder"]) / "after", iteration + len(job["batches"]))
    story.told["saved"] = plan["fused"]


class Live:
    """The model chunks, the optimizer and the scheduler of one rank, made by the real code."""

    def __init__(self, job: dict[str, Any]) -> None:
        import megatron.core
        import megatron.core.optimizer as optimizers
        from megatron.core.enums import ModelType
        from megatron.training import get_args, training
        from megatron.training.initialize import initialize_megatron

        self.job, self.plan = job, job["megatron"]
        self.version = str(getattr(megatron.core, "__version__", ""))
        sys.argv = ["pretrain_gpt.py", *self._flags()]
        if self.plan["fused"] and job["device"] == "cpu":
            import megatron.core.optimizer.distrib_optimizer as distributed

            optimizers.Adam = distributed.Adam = megatron_cpu.fused_like()
            optimizers.USING_PYTORCH_OPTIMIZER, distributed.HAVE_APEX_OR_TE = False, True
        initialize_megatron(args_defaults={}, allow_no_cuda=job["device"] == "cpu")
        self.args = get_args()
        self.args.model_type = kind = ModelType.encoder_or_decoder
        kept, self.args.load = self.args.load, None  # the load is a step of its own, whose failure is told as such
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(self._build, kind)
        self.args.load = kept

    def _flags(self) -> list[str]:
        """The checkpoint's arguments as flags, by the parser's own description of them, and those of this run."""
        from megatron.training.arguments import add_megatron_arguments

        saved = self.plan["args"]
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        out: list[str] = []
        done = set()
        for action in parser._actions:  # noqa: SLF001 (argparse tells its flags nowhere else)
            name = action.dest
            value = saved.get(name, saved.get(ALSO.get(name, "")))
            if name not in TAKEN or name in done or value is None or not action.option_strings:
                continue
            if action.const is not None and action.nargs == 0:
                if value == action.const and value != action.default:
                    out.append(action.option_strings[0])
                    done.add(name)
            elif value != action.default:
                values = value if isinstance(value, list) else [value]
                out += [action.option_strings[0], *map(str, values)]
                done.add(name)
        return out + self._own_flags()

    def _own_flags(self) -> list[str]:
        job, plan = self.job, self.plan
        rows, columns = len(job["batches"][0]["input_ids"]), len(job["batches"][0]["input_ids"][0])
        self.micro_batches = plan["pp"] if plan["vpp"] > 1 else 1
        flags: list[Any] = [
            "--micro-batch-size", rows, "--global-batch-size", rows * plan["dp"] * self.micro_batches,
            "--seq-length", columns, "--train-iters", 1 << 20, "--seed", job["seed"], "--clip-grad", job["clip"],
            "--attention-dropout", 0, "--hidden-dropout", 0, "--tokenizer-type", "NullTokenizer",
            "--vocab-size", plan["vocabulary"] - 1, "--ckpt-format", plan["format"], "--load", plan["load"],
            "--save-interval", 1 << 20, "--eval-iters", 0, "--eval-interval", 1 << 20, "--log-interval", 1 << 20,
            "--no-load-rng", "--no-save-rng", "--use-checkpoint-opt_param-scheduler", "--no-one-logger",
            "--logging-level", 40, "--no-check-for-nan-in-loss-and-grad", "--exit-on-missing-checkpoint",
            "--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--no-bias-swiglu-fusion",
            "--no-bias-gelu-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion",
            "--no-persist-layer-norm", "--no-async-tensor-model-parallel-allreduce",
        ]  # fmt: skip
        if job["device"] == "cpu":
            flags += ["--use-cpu-initialization", "--distributed-backend", "gloo"]
        if plan["vpp"] > 1:
            flags += ["--num-layers-per-virtual-pipeline-stage", plan["layers"] // plan["pp"] // plan["vpp"]]
        if plan["iteration"] is not None:
            flags += ["--ckpt-step", plan["iteration"]]
        return [str(f) for f in flags]

    def _build(self, pre_process: bool = True, post_process: bool = True, **more: Any) -> Any:
        import torch
        from gpt_builders import gpt_builder

        net = gpt_builder(self.args, pre_process, post_process, **more)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(math.nan)  # whatever the load leaves out shows
        return net

    def load(self) -> int:
        """The real load. The iteration that it says."""
        import torch
        from megatron.training.checkpointing import load_checkpoint

        with torch.no_grad():
            iteration, _ = load_checkpoint(self.model, self.optimizer, self.scheduler, strict=True)
        return int(iteration)

    def unset(self) -> list[str]:
        """Parameters of this rank that the load gave no value."""
        named = [x for chunk in self.model for x in chunk.named_parameters()]
        return [n for n, p in named if p.numel() and bool(p.isnan().all())]

    def save(self, folder: Path, iteration: int) -> None:
        """The real save."""
        import torch.distributed as dist
        from megatron.training.checkpointing import save_checkpoint

        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        self.args.save, self.args.iteration = str(folder), iteration
        save_checkpoint(iteration, self.model, self.optimizer, self.scheduler, 0)
        dist.barrier()

    def step(self, batch: dict[str, Any], rates: list[float]) -> tuple[float, list[float]]:
        """(loss, learning rates) of one step: every data-parallel rank takes the whole batch."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        tensors = {k: torch.tensor(v, dtype=torch.int64, device=self.job["device"]) for k, v in batch.items()}
        config = get_model_config(self.model[0])
        config.finalize_model_grads_func = finalize_model_grads
        config.deallocate_pipeline_outputs = False  # gloo sends from the memory itself
        config.grad_scale_func = self.optimizer.scale_loss
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        groups = self.optimizer.param_groups
        for group in groups if len(rates) == 1 else []:
            group["lr"] = rates[0]
        said = sorted({float(g["lr"]) for g in groups if g["params"]}, reverse=True)
        given = [iter([tensors] * self.micro_batches) for _ in self.model]
        several = len(self.model) > 1
        got = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=given if several else given[0],
            model=self.model if several else self.model[0], num_microbatches=self.micro_batches,
            seq_length=tensors["input_ids"].shape[1], micro_batch_size=tensors["input_ids"].shape[0],
            forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        total = torch.zeros(2, dtype=torch.float64, device=self.job["device"])
        if got and parallel_state.get_tensor_model_parallel_rank() == 0:
            total += torch.tensor([sum(float(x["loss"]) for x in got), len(got)], device=total.device)
        dist.all_reduce(total)
        return float(total[0] / total[1]), said

    def _forward(self, data: Any, model: Any) -> Any:
        """Logits of the whole vocabulary."""
        import torch

        batch = next(data)
        ids = batch["input_ids"]
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return model(ids, places, None, labels=None), lambda out: self._loss(out, batch["labels"])

    def _loss(self, out: Any, labels: Any) -> Any:
        """Over as many rows of the vocabulary as verify's own steps take: all, or those that are tokens."""
        import torch
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits = gather_from_tensor_model_parallel_region(out)[..., : self.plan["counted"]].float()
        wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(*wanted, ignore_index=-100)
        return loss, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    run(steps)
