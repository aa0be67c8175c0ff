"""What the run's arguments say of a layout, and which layers each chunk of a pipeline holds. Pure; reads no file.

Source for names and defaults: Megatron-LM core_v0.16.1, megatron/training/arguments.py, validate_args.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.values import Record, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_RANKS = 1 << 20
MOST_LAYERS = 100_000
_OLD_DECAY = "apply_wd_to_qk_layernorm"
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def of_namespace(tree: Tree, where: str) -> Facts:
    """The facts of a pickled argparse.Namespace; no facts where there is none. Damaged for anything else."""
    if tree is None:
        return Facts({}, where)
    if isinstance(tree, Record) and tree.cls in NAMESPACES and isinstance(tree.state, dict):
        return Facts(tree.state, where)
    if isinstance(tree, dict):
        return Facts(tree, where)
    raise Damaged("args is no namespace", where=where, why=f"it is a {type(tree).__name__}", code="args-damaged")


@dataclass(frozen=True)
class Facts:
    """The arguments of a run by name, and the questions that a layout asks of them."""

    args: Mapping[str, Any]
    where: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the user's config.json says; used where args are silent."""

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number. MissingFact where it is not there and has no default; Damaged where it is something else."""
        value = self.args.get(name)
        if value is None:
            if default is None:
                raise MissingFact(
                    f"{name} is not in the checkpoint's args",
                    where=self.where,
                    why="it decides where the tensors lie",
                    fix="take a checkpoint whose args are whole",
                    code="args-missing",
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 48:
            raise Damaged(f"{name} in args is {value!r}, no size", where=self.where, code="args-damaged")
        return value

    def optional(self, name: str) -> int | None:
        """A whole number, None where it is not set."""
        return None if self.args.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Whether it is set."""
        return bool(self.args.get(name))

    @property
    def tp(self) -> int:
        """Tensor-parallel size. Before version 3.0 it was called model_parallel_size."""
        old = self.number("model_parallel_size", 1)
        return max(1, self.number("tensor_model_parallel_size", old))

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return max(1, self.number("pipeline_model_parallel_size", 1))

    @property
    def vpp(self) -> int:
        """Chunks of layers a stage. A layout says it where nothing else does: it has a stage for each."""
        layout = self.args.get("pipeline_model_parallel_layout")
        if layout is not None and self.args.get("virtual_pipeline_model_parallel_size") is None:
            return max(1, len(layout_counts(layout, self.where)) // self.pp)
        return max(1, self.number("virtual_pipeline_model_parallel_size", 1))

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return max(1, self.number("expert_model_parallel_size", 1))

    @property
    def etp(self) -> int:
        """Tensor-parallel size of experts: the rest's where nothing else is said."""
        return self.number("expert_tensor_parallel_size", self.tp) or self.tp if self.experts else self.tp

    @property
    def dp(self) -> int | None:
        """Data-parallel size, None where nothing says it."""
        return self.optional("data_parallel_size")

    @property
    def experts(self) -> int:
        """Experts of a layer, 0 where there are none."""
        return self.number("num_experts", 0)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        if "untie_embeddings_and_output_weights" in self.args:
            return not self.flag("untie_embeddings_and_output_weights")
        return False

    @property
    def decays_norms(self) -> bool:
        """Whether norms of queries and keys decay: those that are modules of their own, which latent attention lacks.

        Source: core_v0.16.1, megatron/training/arguments.py, --apply-wd-to-qk-layernorm, and what it was called before.
        """
        said = self.flag("apply_wd_to_qk_layernorm") or self.args.get("no_weight_decay_cond_type") == _OLD_DECAY
        return said and not self.flag("multi_latent_attention")

    @property
    def true_vocabulary(self) -> int | None:
        """Rows of the vocabulary that are tokens: the user's config, or args where they say it; None where unknown.

        NullTokenizer counts its end token apart. Source: megatron/training/tokenizer/tokenizer.py.
        """
        given = self.given.get("vocab_size")
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return given
        size = self.optional("vocab_size")
        return size + 1 if size is not None and self.args.get("tokenizer_type") == "NullTokenizer" else None

    def require_known(self) -> None:
        """Damaged for meshes and models that nobody runs."""
        ranks, layers = self.tp * self.pp * self.vpp * self.ep, self.number("num_layers", 0)
        if ranks > MOST_RANKS or layers > MOST_LAYERS or self.experts > MOST_LAYERS:
            raise Damaged(
                f"args say {ranks} ranks and chunks, {layers} layers, {self.experts} experts",
                where=self.where,
                code="args-damaged",
            )

    def bucket_numel(self, dp: int) -> int | None:
        """Elements at which a bucket of the distributed optimizer closes; None where buckets are not split.

        Source: core_v0.16.1, core/distributed/distributed_data_parallel.py, DistributedDataParallel.__init__;
        training/training.py, get_model.
        """
        if not self.flag("overlap_grad_reduce") or self.flag("overlap_param_gather_with_optimizer_step"):
            return None
        if self.args.get("ddp_num_buckets") is not None:
            raise Unsupported("--ddp-num-buckets decides the optimizer's buckets, which is not read", where=self.where)
        size = self.optional("ddp_bucket_size")
        return size if size is not None else max(40_000_000, 1_000_000 * dp)

    def require_whole_stages(self) -> None:
        """Damaged where what args say of stages does not give every layer to one, which Megatron refuses, too.

        Source: core_v0.16.1, core/transformer/transformer_config.py, __post_init__.
        """
        layers, chunks = self.number("num_layers"), self.pp * self.vpp
        layout = self.args.get("pipeline_model_parallel_layout")
        ends = [n for n in ("decoder_first", "decoder_last") if self.optional(f"{n}_pipeline_num_layers") is not None]
        if self.pp == 1:
            return
        if layout is not None:
            counts = layout_counts(layout, self.where)
            fits = sum(counts) == layers and len(counts) == chunks
            said = f"a layout with {', '.join(map(str, counts))} layers"
        elif ends:
            own = [self.number(f"{n}_pipeline_num_layers") for n in ends]
            rest, stages = layers - sum(own), self.pp - len(ends)
            even = rest == 0 if stages == 0 else rest > 0 and rest % (stages * self.vpp) == 0
            fits = even and all(n % self.vpp == 0 for n in own)
            said = ", ".join(f"{n}_pipeline_num_layers {k}" for n, k in zip(ends, own, strict=True))
        else:
            more = sum(self.flag(f"account_for_{n}_in_pipeline_split") for n in ("embedding", "loss"))
            fits, said = (layers + more) % chunks == 0, f"places for {more} more, embedding or loss"
        parts = f" of {self.vpp} chunks" if self.vpp > 1 else ""
        if not fits:
            raise Damaged(
                f"{layers} layers do not come out even in {self.pp} stages{parts}",
                where=self.where,
                why=f"args say {said}",
                fix="give the flags of a run that there is, or another --pp or --vpp, which divides the layers",
                code="mesh-does-not-divide",
            )

    def first_layer(self, pp_rank: int, chunk: int) -> int:
        """The global number of the first layer of a chunk of a stage.

        Source: core_v0.16.1, core/transformer/transformer_layer.py, get_transformer_layer_offset.
        """
        if self.pp == 1:
            return 0
        layout = self.args.get("pipeline_model_parallel_layout")
        if layout is not None:
            counts = layout_counts(layout, self.where)
            return sum(counts[: chunk * self.pp + pp_rank])
        first = self.optional("decoder_first_pipeline_num_layers")
        last = self.optional("decoder_last_pipeline_num_layers")
        if first is not None or last is not None:
            return self._uneven(pp_rank, chunk, first, last)
        more = [n for n in ("embedding", "loss") if self.flag(f"account_for_{n}_in_pipeline_split")]
        slots = self.number("num_layers") + len(more)
        per_chunk = slots // self.pp // self.vpp
        before = chunk * (slots // self.vpp) + pp_rank * per_chunk
        return before - (1 if "embedding" in more and (pp_rank, chunk) != (0, 0) else 0)

    def _uneven(self, pp_rank: int, chunk: int, first: int | None, last: int | None) -> int:
        """The first layer where the first or last stage has a number of layers of its own."""
        stages = self.pp - (first is not None) - (last is not None)
        middle = self.number("num_layers") - (first or 0) - (last or 0)
        heads, tails, between = (first or 0) // self.vpp, (last or 0) // self.vpp, middle // self.vpp
        start = chunk * (heads + between + tails)
        if pp_rank == 0:
            return start
        before = pp_rank - (first is not None)
        return start + heads + before * (between // stages if stages > 0 else 0)


def layout_counts(text: Tree, where: str) -> list[int]:
    """Decoder layers of each stage of a --pipeline-model-parallel-layout such as "E|(t|)*3,m|m||L", in order.

    Source: core_v0.16.1, core/transformer/pipeline_parallel_layer_layout.py, parse_str_to_list.
    """
    if isinstance(text, Record) and isinstance(text.state, dict):
        text = text.state.get("input_data", text.state.get("layout"))
    if isinstance(text, (list, tuple)):
        return [sum(str(x).rpartition(".")[2] in ("t", "decoder") for x in stage) for stage in text]
    if not isinstance(text, str) or len(text) > 100_000:
        raise Unsupported("the pipeline's layout is not understood", where=where, why=f"it is {type(text).__name__}")
    plain = text.replace(",", "").replace(" ", "")
    for _ in range(20):
        wide = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
        wide = re.sub(r"([A-Za-z|])\*(\d{1,4})", lambda m: m[1] * int(m[2]), wide)
        if wide == plain or len(wide) > 100_000:
            break
        plain = wide
    if not re.fullmatch(r"[EtmL|]*", plain):
        raise Unsupported(f"the pipeline's layout {text[:60]!r} is not understood", where=where)
    return [stage.count("t") for stage in plain.split("|")]
