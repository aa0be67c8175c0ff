"""The lines of the report on a Megatron result: mesh, vocabulary, scheduler, counters, random state. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import part_of
from ckptctl.formats.megatron import runargs, schedule, seeds
from ckptctl.formats.megatron.found import SCALER
from ckptctl.formats.target import Line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.write import Target
    from ckptctl.formats.target import Choices

OWN_VALUES = (SCALER, "num_floating_point_operations_so_far", "opt_param_scheduler", "iteration")


def lines_of(
    target: Target, choices: Choices, form: str, true: int, padded: int, common: Mapping[str, Tree]
) -> list[Line]:
    """Every line besides those of the groups. common is what all its files have; true and padded count rows."""
    facts = target.facts
    mesh = f"tp {facts.tp}, pp {facts.pp}, vpp {facts.vpp}, ep {facts.ep}, dp {choices.dp}"
    how = (
        "no optimizer"
        if target.groups is None
        else "distributed optimizer"
        if target.distributed
        else "plain optimizer"
    )
    layers = "the Transformer Engine's" if target.fused else "local"
    lines = [Line("layout", "written", f"{form}, {mesh}, {how}, names of {layers} layers (--layer-spec)")]
    if facts.pp == 1 and facts.vpp > 1:
        lines.append(
            Line("chunks", "written", f"{facts.vpp} on one stage: Megatron runs chunks with --pp above 1 only")
        )
    lines += _model_lines(target.content.source.facts.config)
    if runargs.is_old_grouped(runargs.source_args(target.content.source)):
        lines.append(Line("experts", "written", "a matrix each: GroupedMLP's single matrices are not written"))
    have = next((t.shape[0] for k, t in target.content.source.padding.items() if k.kind == "weight"), 0)
    rows = f"{true} rows padded to {padded} (a multiple of {runargs.divisor(target.content.source, choices)} x tp)"
    if padded > true or have:
        kept = min(have, padded - true) if target.padding else 0
        fate = "carried" if have == padded - true else "dropped" if have > kept else "filled"
        detail = f"{rows}: {kept} as the source has them"
        if have > kept:
            detail += f", {have - kept} trained rows let go: the loss over the padded vocabulary changes"
            detail += "" if target.padding or padded == true else " (--keep-padding-rows keeps those that fit)"
        if padded - true > kept:
            detail += f", {padded - true - kept} of zeros"
        lines.append(Line("vocabulary padding", fate, detail))
    if choices.like is not None:
        lines.append(Line("args", "written", f"over them those of the run of --like, {choices.like.where}"))
    if target.groups is not None:
        lines += _scheduler_lines(target, common["opt_param_scheduler"])
    if target.content.source.format != "megatron" and target.step is not None:
        lines.append(Line("counters", "written", f"iteration {target.step}, {_samples_said(target)}"))
    if SCALER in target.content.values or (target.groups is not None and facts.flag("fp16")):
        lines.append(_scaler_line(target))
    values = target.content.values
    dropped = [n for n in values if part_of(n) in ("rng", "other") and n not in OWN_VALUES]
    dropped = [n for n in dropped if n not in facts.args or facts.args[n] != values[n]]
    if dropped:
        lines.append(Line("other values", "dropped", f"{', '.join(dropped)}: they have no place in what is written"))
    lines.append(_random_line(target))
    return lines


def _model_lines(config: Mapping[str, Any] | None) -> list[Line]:
    """What Megatron's models, or args, cannot say of the config's: weights are right, and what is computed is not.

    Source: Megatron-LM core_v0.16.1, core/transformer/transformer_layer.py (no parallel residual), training/
    checkpointing.py, load_args_from_checkpoint (which args are taken from a checkpoint).
    """
    config = config or {}
    out = []
    if config.get("model_type") == "gpt_neox" and config.get("use_parallel_residual", True):
        out.append(Line("model", "written", "weights only: Megatron has no parallel residual, so it computes another"))
    ropes = config.get("rope_scaling") or config.get("rope_parameters")
    kind = ropes.get("rope_type", ropes.get("type")) if isinstance(ropes, dict) else None
    if kind not in (None, "default"):
        out.append(Line("rotary scaling", "dropped", f"{kind}: Megatron's runs take it from their flags alone"))
    return out


def _random_line(target: Target) -> Line:
    has = "rng_state" in target.content.source.native
    if target.random == "kept":
        return Line("random state", "carried", "the mesh is the same")
    if target.random == "seeded":
        why = "the source's is of the ranks of another mesh" if has else "the source has none of Megatron's ranks"
        seed = seeds.seed_of(target.facts)
        return Line("random state", "written", f"seeded from {seed} as Megatron does at a run's start: {why}")
    if has:
        return Line("random state", "dropped", "no run goes on from weights alone: load with --no-load-rng")
    return Line("random state", "absent", "the source has none: load with --no-load-rng")


def _scaler_line(target: Target) -> Line:
    if target.groups is None:
        return Line("loss scale", "dropped", "it goes with the optimizer")
    if target.scaler is not None:
        return Line("loss scale", "carried", "with its counters")
    if not target.facts.flag("fp16"):
        return Line("loss scale", "dropped", "only a float16 run has one")
    return Line("loss scale", "absent", "the source has none of Megatron's: the run begins with its own")


def _samples_said(target: Target) -> str:
    samples = target.facts.number("consumed_train_samples", 0)
    if not samples:
        return "samples 0: the source does not count them, nor does --like say a batch"
    counted = runargs.samples_of(target.content.source, None, target.step)
    return f"{samples} samples" + ("" if counted else ": its steps in batches of the run of --like")


def _scheduler_lines(target: Target, written: Tree) -> list[Line]:
    """What becomes of the scheduler, and whether the learning rate goes on where the source is."""
    if target.constants is None:
        if "opt_param_scheduler" in target.content.values:
            return [Line("scheduler", "carried", "opt_param_scheduler")]
        detail = "a constant one: resume with --override-opt_param-scheduler, or give the run with --like"
        return [Line("scheduler", "written", detail)]
    samples = written["num_steps"]
    lines = [Line("scheduler", "written", f"the curve of --like, at sample {samples}")]
    now = schedule.lr_at(written, samples)
    assert target.groups is not None
    for sort, settings in target.groups.of.items():
        before = settings["lr"]
        if now is not None and not sort.decoupled and abs(now - before) > 1e-9 * max(now, before):
            lines.append(
                Line(
                    "learning rate", "converted", f"it goes on with {now:g} by that curve, the source was at {before:g}"
                )
            )
            break
    return lines
