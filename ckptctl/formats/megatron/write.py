"""Megatron checkpoints as output files: the classic ranks' folders, or torch_dist, in a run's folder with its tracker.

What is decided here once for both: mesh, args, vocabulary, groups. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import StateNotCarried, Unsupported, Usage
from ckptctl.core.output import Fill, OutputFile, Put, Region
from ckptctl.core.tensor import Key
from ckptctl.formats.megatron import model, predicted, runargs, schedule, seeds, stages, state, told
from ckptctl.formats.megatron.found import SCALER
from ckptctl.formats.megatron.read import TRACKER
from ckptctl.formats.target import Choices, Content, Item, Line, Written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Tensor
    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.model import Shape

MOMENTS = ("exp_avg", "exp_avg_sq")
F32 = BY_NAME["float32"]
ZEROS = "rows that pad the vocabulary"


@dataclass(frozen=True)
class Target:
    """A result that is decided: what it holds under Megatron's names, and how it is to be cut."""

    content: Content
    facts: Facts
    folder: str
    step: int | None
    weights: Mapping[str, Item]
    shapes: Mapping[str, Shape]
    """Whole shapes by name, the vocabulary's padded."""
    tied: bool
    fused: bool
    distributed: bool
    groups: state.Groups | None
    padding: Mapping[Key, Tensor]
    constants: Mapping[str, Tree] | None = None
    """Of the schedule that goes on, where it is that of another run than the source's."""
    random: str = ""
    """What becomes of ranks' random states: kept, seeded, or nothing."""
    made: dict[Key, Tensor] = field(default_factory=dict)
    items: dict[tuple[Key, str], Item] = field(default_factory=dict)
    """What is written under another type than the content says."""

    def random_state(self, pp_rank: int, tp_rank: int, third: int, ep_rank: int) -> Tree:
        """The random state of a rank, None for none. third: its data-parallel rank, or in classic files its ep_rank."""
        if self.random == "seeded":
            return seeds.seeded(self.facts, tp_rank, pp_rank, ep_rank)
        found = self.content.source.native.get("rng_state")
        return found.get((pp_rank, tp_rank, third)) if self.random == "kept" and isinstance(found, dict) else None

    @property
    def scaler(self) -> Mapping[str, Tree] | None:
        """The loss scale that a float16 run goes on with; None for other runs, and where the source has none."""
        found = self.content.values.get(SCALER)
        is_own = isinstance(found, dict) and {"scale", "growth_tracker"} <= set(found)
        return found if is_own and isinstance(found, dict) and self.facts.flag("fp16") else None

    @property
    def parameters(self) -> list[str]:
        """Weights that are trained, in order of registration."""
        return [n for n in self.weights if not model.is_buffer(n)]

    @property
    def grouped(self) -> bool:
        """Whether a layer's experts are one module (TEGroupedMLP)."""
        return self.fused and bool(self.facts.args.get("moe_grouped_gemm", True))

    def fused_key(self, name: str) -> str:
        """A name as the Transformer Engine's layers have it: which norms are in the projections after them.

        Source: core_v0.16.1, core/models/gpt/gpt_layer_specs.py, get_gpt_layer_with_transformer_engine_spec.
        """
        tail = model.tail_of(name)
        if tail.startswith(("input_layernorm.", "self_attention.q_layernorm.", "self_attention.kv_layernorm.")):
            is_latent = f"{name.partition(tail)[0]}self_attention.linear_kv_up_proj.weight" in self.weights
            return name if is_latent == tail.startswith("input_layernorm.") else model.fused_name(name)
        if tail.startswith("pre_mlp_layernorm.") and f"{name.partition(tail)[0]}mlp.router.weight" in self.weights:
            return name
        return model.fused_name(name, grouped=self.grouped)

    def item(self, name: str, kind: str) -> Item:
        """A weight or a state of it; masters and moments in float32, as Megatron keeps them."""
        if kind == "weight":
            return self.weights[name]
        found = self.content.states.get((name, kind))
        if found is None and kind == "master":
            found = self.weights[name]
        if found is None:
            raise Unsupported(
                f"{name} has no {kind}",
                why="Megatron's optimizer has one of every parameter",
                fix="take the weights alone with --no-optimizer",
                code="part-missing",
            )
        if found.tensor.shape != self.weights[name].tensor.shape:
            raise Unsupported(
                f"{kind} of {name} has shape {found.tensor.shape}, the parameter {self.weights[name].tensor.shape}",
                fix="take the weights alone with --no-optimizer",
            )
        wide = replace(found, dtype=F32) if found.dtype.is_float else found
        if wide.dtype.name != wide.tensor.held.name:
            self.items[wide.key, wide.dtype.name] = wide
        return wide

    def rows(self, name: str, kind: str, start: int, stop: int) -> list[Region | Fill]:
        """Rows [start, stop) of a padded vocabulary's tensor: the true ones, the source's padding, zeros."""
        item = self.item(name, kind)
        true, rest = item.shape[0], item.shape[1:]
        out: list[Region | Fill] = []
        if start < true:
            out.append(item.rows(start, min(stop, true)))
        padding = self.padding.get(Key(name, item.key.kind, "padding"))
        have = true + (padding.shape[0] if padding is not None else 0)
        first, last = max(start, true), min(stop, have)
        if padding is not None and first < last:
            own = Item(Key(name, item.key.kind, "padding"), padding, item.dtype)
            self.made[own.key] = padding
            if own.dtype.name != padding.held.name:
                self.items[own.key, own.dtype.name] = own
            out.append(own.rows(first - true, last - true))
        first = max(start, have)
        if first < stop:
            nbytes = item.dtype.nbytes((stop - first, *rest))
            out.append(Fill(nbytes, b"\0" * item.dtype.itemsize, ZEROS))
        return out

    def part(self, name: str, kind: str, tp_rank: int, local: Mapping[str, Shape]) -> list[Region | Fill]:
        """A rank's part of a parameter, or of a state of it. The head of a tied model is its embedding."""
        whole = model.EMBEDDING if name == model.HEAD and self.tied else name
        if whole in model.VOCABULARY:
            rows = local[name][0]
            return self.rows(whole, kind, tp_rank * rows, (tp_rank + 1) * rows)
        item, place = self.item(name, kind), stages.place(name, local, tp_rank, self.facts.tp)
        return [Region(item.key, item.dtype, place.view, place.lo, place.size)]

    def dtype(self, name: str, kind: str) -> DType:
        """The type of a parameter or of a state of it in the result."""
        return self.item(model.EMBEDDING if name == model.HEAD and self.tied else name, kind).dtype


def write(content: Content, choices: Choices) -> Written:
    """The run's folder. Unsupported where the mesh does not divide the model; StateNotCarried for states it lacks."""
    from ckptctl.formats.megatron import classic_write, dist_write

    form = _form(content, choices)
    target, lines = _decided(content, choices, form)
    if form == "torch_dist":
        files, more = dist_write.files(target, choices)
    else:
        files, more = classic_write.files(target)
    tracker = target.folder if target.step is None else str(target.step)
    files.append(OutputFile(TRACKER, lambda: [Put(tracker.encode())]))
    told = [*lines, *more]
    return Written(
        tuple(files),
        True,
        tuple(told),
        {**target.made},
        casts=frozenset((i.tensor.held.name, i.dtype.name) for i in target.items.values()),
        decided=frozenset(line.part for line in told) | {"random state", "other values"},
    )


def _form(content: Content, choices: Choices) -> str:
    """--megatron-format, else the source's, else torch_dist."""
    if choices.megatron_format not in (None, "torch", "torch_dist"):
        raise Usage(
            f"--megatron-format {choices.megatron_format}: there is no such format", fix="one of torch, torch_dist"
        )
    own = {"classic": "torch", "torch_dist": "torch_dist"}.get(content.source.variant)
    return choices.megatron_format or (own if content.source.format == "megatron" else None) or "torch_dist"


def _is_distributed(content: Content, choices: Choices) -> bool:
    if choices.optimizer not in (None, "plain", "distributed"):
        raise Usage(f"--optimizer {choices.optimizer}: there is no such kind", fix="one of plain, distributed")
    if choices.optimizer is not None:
        return choices.optimizer == "distributed"
    form = content.source.native.get("form")
    if isinstance(form, dict) and content.source.format == "megatron" and content.source.optimizer is not None:
        return bool(form.get("distributed"))
    return choices.dp > 1


def _decided(content: Content, choices: Choices, form: str) -> tuple[Target, list[Line]]:
    source = content.source
    if choices.dp % choices.ep:
        raise Unsupported(
            f"--dp {choices.dp} is no multiple of --ep {choices.ep}",
            why="expert-parallel ranks are among the data-parallel ones",
            fix=f"--dp {choices.ep} would do",
            code="mesh-does-not-divide",
        )
    tied = runargs.tied_of(content.weights, content.ties)
    weights = {n: i for n, i in content.weights.items() if not (tied and n == model.HEAD)}
    weights = dict(sorted(weights.items(), key=lambda kv: model.order(kv[0])))
    if model.EMBEDDING not in weights:
        raise Unsupported(f"there is no {model.EMBEDDING}", fix="take the whole model", code="tensor-missing")
    true = weights[model.EMBEDDING].shape[0]
    padded = runargs.padded_vocabulary(source, choices, true)
    distributed = _is_distributed(content, choices)
    dtype = weights[model.EMBEDDING].dtype.name
    step = source.step if content.optimizer is not None or source.format == "megatron" else None
    spec = _spec(content, choices)
    facts = runargs.target_facts(
        source, choices, padded, distributed=distributed, form=form, spec=spec, dtype=dtype, step=step
    )
    facts.require_known()
    predicted.require_writable(weights, facts, form, source.variant)
    if tied == facts.flag("untie_embeddings_and_output_weights"):
        facts = replace(facts, args={**facts.args, "untie_embeddings_and_output_weights": not tied})
    shapes = {n: i.shape for n, i in weights.items()}
    for name in model.VOCABULARY:
        if name in shapes:
            shapes[name] = (padded, *shapes[name][1:])
    groups = None
    lines: list[Line] = []
    if content.optimizer is not None and content.states:
        _require_adam(content)
        parameters = {n: s for n, s in shapes.items() if not model.is_buffer(n)}
        constants = None if choices.like is None else choices.like.constants
        groups = state.groups_of(
            content.optimizer,
            parameters,
            choices.updates,
            sorting=state.sorting_of(facts, content.optimizer, choices.like, apart=choices.ep > 1),
            facts=facts,
            distributed=distributed,
            constants=constants,
        )
        lines += [Line("param groups", "converted", note) for note in groups.notes]
        if not groups.notes:
            lines.append(Line("param groups", "carried", f"{len(groups.of)} groups of {len(parameters)} parameters"))
    folder = "release" if step is None else f"iter_{step:07d}"
    random = _random(content, facts, has_state=groups is not None, step=step)
    if step is not None:
        facts = replace(
            facts, args={**facts.args, "no_save_optim": groups is None or None, "no_save_rng": not random or None}
        )
    target = Target(
        content,
        facts,
        folder,
        step,
        weights,
        shapes,
        tied,
        spec == "te",
        distributed,
        groups,
        _padding(source, padded - true, choices),
        None if choices.like is None else choices.like.constants,
        random,
    )
    return target, [*lines, *told.lines_of(target, choices, form, true, padded, common(target))]


def _padding(source: Checkpoint, room: int, choices: Choices) -> dict[Key, Tensor]:
    """The source's rows of padding that the result takes over: all where as many are wanted, else none unless asked.

    They count in the softmax of a vocabulary of their own size. In one of another size the rest is zeros, so that
    what a result holds depends on its own size alone, whichever format and mesh it came by.
    """
    alike = all(t.shape[0] == room for t in source.padding.values())
    return dict(source.padding) if alike or choices.keep_padding_rows else {}


def _random(content: Content, facts: Facts, *, has_state: bool, step: int | None) -> str:
    """What becomes of ranks' random states: kept where ranks are the source's, else seeded where a run goes on."""
    source = content.source
    if step is None or (source.optimizer is not None and content.optimizer is None):
        return ""
    own = source.layout
    alike = source.format == "megatron" and all(own.get(a) == getattr(facts, a) for a in ("tp", "pp", "ep"))
    form = {"torch": "classic"}.get(str(facts.args.get("ckpt_format")), "torch_dist")
    # Where data-parallel ranks begin apart each has a state of its own.
    several = facts.ep > 1 or facts.flag("data_parallel_random_init")
    alike = alike and (not several or own.get("dp") == facts.dp)
    alike = alike and (facts.ep == 1 or source.variant == form)
    if alike and source.native.get("rng_state"):
        return "kept"
    return "seeded" if has_state else ""


def _spec(content: Content, choices: Choices) -> str:
    """Whose layers' names the result has: --layer-spec, else the run's of --like, else the source's, else local.

    Latent attention is the Transformer Engine's: its local layers cannot be built. Source: core_v0.16.1,
    core/transformer/multi_latent_attention.py (k_channels, which DotProductAttention does not take).
    """
    if choices.layer_spec not in (None, "local", "te"):
        raise Usage(f"--layer-spec {choices.layer_spec}: there is no such spec", fix="one of local, te")
    if choices.layer_spec is not None:
        return choices.layer_spec
    impl = None if choices.like is None else choices.like.args.get("transformer_impl")
    if impl is not None:
        return "local" if impl == "local" else "te"
    if content.source.format != "megatron":
        latent = any(n.endswith("self_attention.linear_kv_up_proj.weight") for n in content.weights)
        return "te" if latent else "local"
    args, form = runargs.source_args(content.source), content.source.native.get("form")
    if content.source.variant != "classic":
        return "local" if args.get("transformer_impl") == "local" else "te"
    return str(form["layers"]) if isinstance(form, dict) else "local"


def _require_adam(content: Content) -> None:
    kinds = sorted({k for _, k in content.states} - {"master", "step", *MOMENTS})
    if kinds:
        raise StateNotCarried(
            f"Megatron's optimizer has no place for {', '.join(kinds)}",
            where=content.source.root,
            why="it is Adam: exp_avg and exp_avg_sq",
            fix="add --no-optimizer to let the optimizer's state go",
        )


def common(target: Target) -> dict[str, Tree]:
    """What every file's dict has besides model, optimizer and random state."""
    values = target.content.values
    out: dict[str, Tree] = {"checkpoint_version": 3.0, "iteration": target.step or 0}
    if target.groups is not None:
        out["opt_param_scheduler"] = _schedule(target, values.get("opt_param_scheduler"))
    out["num_floating_point_operations_so_far"] = values.get("num_floating_point_operations_so_far", 0)
    return out


def _schedule(target: Target, own: Tree) -> Tree:
    """The source's scheduler, or where it is on the curve of --like; for others one that stays where the source is."""
    samples = target.facts.number("consumed_train_samples", 0)
    before = own.get("num_steps") if isinstance(own, dict) else None
    if target.constants is not None:
        return schedule.saved(target.constants, before if type(before) is int else samples)
    if own:
        return own
    assert target.groups is not None
    groups = target.groups.of.values()
    lr, decay = float(next(iter(groups))["lr"]), max(float(g["weight_decay"]) for g in groups)
    total = schedule.length_of(target.content.source)
    return schedule.saved(schedule.constant(lr, decay, total or samples), samples)
