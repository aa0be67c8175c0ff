"""The args of the run that a result is for: its mesh and sizes, over the source's own or the model's config. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.core.values import Global, Record, Tree
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.facts import NAMESPACES, Facts, of_namespace
from ckptctl.formats.pickles.nodes import show
from ckptctl.names import family, megatron_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.formats.megatron.like import Like
    from ckptctl.formats.target import Choices

DEFAULT_DIVISOR = 128
"""--make-vocab-size-divisible-by. Source: Megatron-LM core_v0.16.1, megatron/training/arguments.py."""
_TYPES = (("bf16", "bfloat16"), ("fp16", "float16"))
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)

_PROGRESS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "iteration")
"""How far a run is: never another's."""
_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups",
    "group_query_attention", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_shared_expert_intermediate_size", "swiglu", "normalization", "layernorm_epsilon", "norm_epsilon",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "position_embedding_type", "rotary_base", "rotary_percent",
    "untie_embeddings_and_output_weights",
)  # fmt: skip
"""What two runs of one model have alike."""


def source_args(source: Checkpoint) -> dict[str, Any]:
    """The args of a Megatron source; {} for others."""
    return dict(of_namespace(source.native.get("args"), source.root).args)


def base_args(source: Checkpoint, like: Like | None = None) -> dict[str, Any]:
    """The args that a result begins with: the source's where it is Megatron's, else what its config says.

    Over them those of the run that it is for. MissingFact where nothing says the model; Unsupported where that run is
    of another one.
    """
    own = _own_args(source)
    if like is None:
        return own
    for name in _MODEL:
        ours, theirs = own.get(name), like.args.get(name)
        if ours is None or theirs is None or ours == theirs:
            continue
        if name == "num_query_groups" and not (
            own.get("group_query_attention") and like.args.get("group_query_attention")
        ):
            continue
        raise Unsupported(
            f"--like: its run has {name} {show(theirs)}, the model {show(ours)}",
            where=like.where,
            why="args that a result takes from another run must be of the same model",
            fix="give a checkpoint or a file of arguments of a run of this model",
            code="like-differs",
        )
    begun = {} if like.is_whole and not source_args(source) else own
    return {**begun, **like.args, **{k: own[k] for k in _PROGRESS if k in own}}


def _own_args(source: Checkpoint) -> dict[str, Any]:
    own = source_args(source)
    if own:
        return own
    known = None if source.facts.config is None else family(source.facts.config)
    if known is None:
        raise MissingFact(
            "the model's config is needed for Megatron's args",
            where=source.root,
            why="they say layers, heads, normalization and the like",
            fix="give the model's config.json with --model-config",
            code="model-config",
        )
    return megatron_arguments(known)


def target_facts(
    source: Checkpoint,
    choices: Choices,
    padded: int,
    *,
    distributed: bool,
    form: str,
    spec: str,
    dtype: str,
    step: int | None,
) -> Facts:
    """The args of the result's run. Unsupported, saying what would do, where the mesh does not divide the model."""
    like = choices.like
    args = base_args(source, like)
    _require_type(like, dtype)
    before = Facts(args, source.root)
    tp, pp, vpp, ep = choices.tp, choices.pp, choices.vpp, choices.ep
    _require_divides(before, tp, ep)
    layers = before.number("num_layers")
    uneven = (pp, vpp) == (before.pp, before.vpp) and any(args.get(k) for k in _UNEVEN)
    if uneven:
        before.require_whole_stages()
    else:
        args.update({k: False if k.startswith("account") else None for k in _UNEVEN})
        if layers % (pp * vpp):
            fits = [n for n in range(1, layers + 1) if layers % (n * vpp) == 0]
            raise Unsupported(
                f"--pp {pp}{f' --vpp {vpp}' if vpp > 1 else ''} does not divide the {layers} layers",
                why=f"each of {pp * vpp} chunks has as many",
                fix=f"--pp {', '.join(map(str, fits)) or 1} would do" + (f" with --vpp {vpp}" if vpp > 1 else ""),
                code="mesh-does-not-divide",
            )
    cp = max(1, before.number("context_parallel_size", 1))
    args.update(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        transformer_pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_per_virtual_pipeline_stage=layers // (pp * vpp) if vpp > 1 and not uneven else None,
        num_virtual_stages_per_pipeline_rank=None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp if before.experts else args.get("expert_tensor_parallel_size", tp),
        context_parallel_size=cp,
        data_parallel_size=choices.dp,
        world_size=tp * pp * choices.dp * cp,
        padded_vocab_size=padded,
        use_distributed_optimizer=distributed,
        ckpt_format=form,
        make_vocab_size_divisible_by=divisor(source, choices),
    )
    if tp == 1:
        args["sequence_parallel"] = False
    if step is not None:
        args["iteration"] = step
    if not source_args(source):
        args.update(
            consumed_train_samples=samples_of(source, like, step),
            consumed_valid_samples=0,
            skipped_train_samples=0,
            rank=0,
        )
    if not source_args(source) or any(bool(args.get(flag)) != (dtype == name) for flag, name in _TYPES):
        args.update({flag: dtype == name for flag, name in _TYPES}, params_dtype=Global("torch", dtype))
    if choices.layer_spec or not source_args(source):
        args["transformer_impl"] = "transformer_engine" if spec == "te" else "local"
    if before.experts:
        # One matrix an expert: TEGroupedMLP, or SequentialMLP, whose names the result has.
        args["moe_grouped_gemm"] = spec == "te" and bool(args.get("moe_grouped_gemm", True))
        args["moe_use_legacy_grouped_gemm"] = False
    return Facts(args, "the result's args", source.facts.config or {})


def is_old_grouped(args: Mapping[str, Any]) -> bool:
    """Whether experts are GroupedMLP's: all of a rank in one matrix.

    Source: core_v0.16.1, core/models/backends.py, LocalSpecProvider.grouped_mlp_modules;
    core/extensions/transformer_engine_spec_provider.py.
    """
    local = args.get("transformer_impl", "transformer_engine") == "local"
    return (
        bool(args.get("moe_grouped_gemm"))
        and bool(args.get("num_experts"))
        and (local or bool(args.get("moe_use_legacy_grouped_gemm")))
    )


def samples_of(source: Checkpoint, like: Like | None, step: int | None) -> int:
    """Samples that the run has seen: the source's count, else its steps in batches of the run that the result is for.

    0 where nothing says it.
    """
    own = source_args(source)
    if own:
        return Facts(own, source.root).number("consumed_train_samples", 0)
    for name in ("consumed_train_samples", "global_samples"):
        value = source.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    batch = Facts(like.args, like.where).number("global_batch_size", 0) if like is not None else 0
    return (step or 0) * batch


def _require_type(like: Like | None, dtype: str) -> None:
    """Unsupported where the run that the result is for trains in another type than the weights have."""
    said = {} if like is None else like.args
    for flag, name in _TYPES:
        if flag in said and bool(said[flag]) != (dtype == name):
            assert like is not None
            raise Unsupported(
                f"--like: its run has {flag} {bool(said[flag])}, and the weights are {dtype}",
                where=like.where,
                fix=f"add --dtype {name if said[flag] else 'float32'}, or give the arguments of a run in {dtype}",
                code="like-differs",
            )


def _require_divides(facts: Facts, tp: int, ep: int) -> None:
    """Unsupported where heads, groups, widths or experts do not divide, saying what would do.

    Fewer query groups than ranks are well where they divide the ranks: rows of query, key and value are then cut
    evenly all the same, and the run gathers them. Source: core_v0.16.1, core/transformer/attention.py,
    SelfAttention.get_query_key_value_tensors; transformer_config.py, __post_init__.
    """
    heads = facts.number("num_attention_heads", 0)
    grouped, latent = facts.flag("group_query_attention"), facts.flag("multi_latent_attention")
    groups = 0 if latent else facts.number("num_query_groups", 0) if grouped else heads
    head = facts.number("kv_channels", 0)
    sizes = {
        "attention heads": heads,
        "rows of query, key and value": (heads + 2 * groups) * head,
        "columns of the feed-forward": facts.number("ffn_hidden_size", 0),
        "columns of the shared experts": facts.number("moe_shared_expert_intermediate_size", 0),
        "columns of an expert": facts.number("moe_ffn_hidden_size", 0) if facts.experts else 0,
    }

    def would(n: int) -> bool:
        return all(not size or size % n == 0 for size in sizes.values()) and _shares(groups, n)

    fix = f"--tp {', '.join(str(n) for n in range(1, max(heads, 1) + 1) if would(n))} would do"
    for what, size in sizes.items():
        if size and size % tp:
            raise Unsupported(
                f"--tp {tp} does not divide the {size} {what}",
                why="every tensor-parallel rank has as many",
                fix=fix,
                code="mesh-does-not-divide",
            )
    if not _shares(groups, tp):
        raise Unsupported(
            f"--tp {tp} is neither a divisor nor a multiple of the {groups} query groups",
            why="a rank has whole groups, or a group has whole ranks",
            fix=fix,
            code="mesh-does-not-divide",
        )
    if ep > 1 and (not facts.experts or facts.experts % ep):
        fits = ", ".join(str(n) for n in range(1, facts.experts + 1) if facts.experts % n == 0)
        raise Unsupported(
            f"--ep {ep} does not divide the {facts.experts} experts",
            fix=f"--ep {fits} would do" if facts.experts else "leave --ep out: the model has no experts",
            code="mesh-does-not-divide",
        )


def _shares(groups: int, tp: int) -> bool:
    return not groups or groups % tp == 0 or tp % groups == 0


def divisor(source: Checkpoint, choices: Choices) -> int:
    """--vocab-divisor, else the source's own, else Megatron's default."""
    return choices.vocab_divisor or Facts(source_args(source)).number("make_vocab_size_divisible_by", DEFAULT_DIVISOR)


def padded_vocabulary(source: Checkpoint, choices: Choices, true: int) -> int:
    """Rows of the vocabulary in the result: a multiple of the divisor times tp.

    Source: Megatron-LM core_v0.16.1, megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding.
    """
    unit = divisor(source, choices) * choices.tp
    padded = -(-true // unit) * unit
    is_known = Facts(source_args(source), given=source.facts.config or {}).true_vocabulary is not None
    if not is_known and padded != true:
        raise MissingFact(
            f"how many of the vocabulary's {true} rows are padding is in no file",
            where=source.root,
            why=f"for --tp {choices.tp} they are padded anew, to a multiple of {unit}",
            fix="give the model's config.json with --model-config",
            code="model-config",
        )
    return padded


def namespace(facts: Facts, source: Checkpoint, **own: Tree) -> Record:
    """The args as a pickled argparse.Namespace, with what is a rank's own."""
    given = source.native.get("args")
    func = given.func if isinstance(given, Record) and given.cls in NAMESPACES else Global("argparse", "Namespace")
    how = given.how if isinstance(given, Record) else "newobj"
    return Record(func, (), how, state={**facts.args, **own}, has_state=True)


def tied_of(weights: Mapping[str, object], ties: Mapping[str, str]) -> bool:
    """Whether the head is the embedding: it is left out, or an alias."""
    return model.HEAD not in weights or ties.get(model.HEAD) == model.EMBEDDING
