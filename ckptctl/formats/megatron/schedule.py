"""The opt_param_scheduler of a result: the curve of learning rate and weight decay, and where on it the run is. Pure.

num_steps and all *_steps count samples. Real Megatron compares the constants with its own flags when it loads, and
stops where they differ, unless the run has --override-opt_param-scheduler.
Source: Megatron-LM core_v0.16.1, megatron/core/optimizer_param_scheduler.py; training/training.py,
get_optimizer_param_scheduler.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.values import Tree

CONSTANTS = (
    "max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd", "end_wd", "wd_incr_style",
    "wd_incr_steps",
)  # fmt: skip
_OLD = {"start_lr": "max_lr", "warmup_iter": "lr_warmup_steps", "warmup_steps": "lr_warmup_steps"}
_OLD |= {"end_iter": "lr_decay_steps", "decay_steps": "lr_decay_steps", "decay_style": "lr_decay_style"}


def constants_of(args: Mapping[str, Any]) -> dict[str, Tree] | None:
    """The constants that a run with these args has; None where they do not say its length or learning rate.

    What args leave out has Megatron's default. Source for defaults: training/training_config.py, SchedulerConfig.
    """
    lr, iterations, batch = _number(args, "lr"), _number(args, "train_iters"), _number(args, "global_batch_size")
    samples = _number(args, "train_samples")
    if not lr or not ((iterations and batch) or samples):
        return None
    unit, by = (batch, "iters") if iterations and batch else (1, "samples")
    total = iterations * unit if iterations and batch else samples
    decay = _number(args, f"lr_decay_{by}")
    decay = total if decay is None else decay * unit
    fraction = _number(args, "lr_warmup_fraction")
    warmup = (_number(args, f"lr_warmup_{by}") or 0) * unit if fraction is None else fraction * decay
    weight = _number(args, "weight_decay")
    weight = 0.01 if weight is None else weight
    first, last = _number(args, "start_weight_decay"), _number(args, "end_weight_decay")
    return {
        "max_lr": float(lr),
        "lr_warmup_steps": warmup,
        "lr_decay_style": args.get("lr_decay_style") or "linear",
        "lr_decay_steps": decay,
        "min_lr": _number(args, "min_lr") or 0.0,
        "start_wd": weight if first is None else first,
        "end_wd": weight if last is None else last,
        "wd_incr_style": args.get("weight_decay_incr_style") or "constant",
        "wd_incr_steps": total,
    }


def constants_in(saved: Tree) -> dict[str, Tree] | None:
    """The constants of a saved scheduler, under today's names; None where it is none."""
    if not isinstance(saved, dict):
        return None
    named = {_OLD.get(str(k), str(k)): v for k, v in saved.items()}
    found = {k: named[k] for k in CONSTANTS if k in named}
    return found if {"max_lr", "lr_decay_steps", "lr_decay_style"} <= set(found) else None


def constant(lr: float, decay: float, total: int) -> dict[str, Tree]:
    """The constants of a curve that stays where it is, for a run of total samples."""
    return {
        "max_lr": lr,
        "lr_warmup_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": max(1, total),
        "min_lr": lr,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(1, total),
    }


def saved(constants: Mapping[str, Tree], samples: int) -> dict[str, Tree]:
    """The value of opt_param_scheduler, in Megatron's order of keys."""
    out = {**constants, "num_steps": samples}
    order = ("max_lr", "lr_warmup_steps", "num_steps")
    return {k: out[k] for k in dict.fromkeys((*order, *out)) if k in out}


def lr_at(constants: Mapping[str, Tree], samples: int) -> float | None:
    """The learning rate after a number of samples; None for curves that need more constants than the state has."""
    most, least = float(constants["max_lr"]), float(constants.get("min_lr", 0.0))
    warmup, total = float(constants.get("lr_warmup_steps", 0)), float(constants["lr_decay_steps"])
    style = constants["lr_decay_style"]
    if warmup > 0 and samples <= warmup:
        return None  # lr_warmup_init is not among them
    if style == "constant":
        return most
    if samples > total:
        return least
    done = (samples - warmup) / (total - warmup) if total > warmup else 1.0
    if style == "linear":
        return least + (most - least) * (1.0 - done)
    return least + (most - least) * 0.5 * (math.cos(math.pi * done) + 1.0) if style == "cosine" else None


def length_of(source: Checkpoint) -> int:
    """Samples of the whole run where the source's trainer counts them, 0 where not: its steps, batch and processes.

    A batch put together from several smaller ones is not in these files; Megatron's check of its constants finds it.
    """
    state = source.values.get("trainer_state")
    if not isinstance(state, dict):
        return 0
    sizes = [state.get("max_steps"), state.get("train_batch_size"), source.layout.get("world_size") or 1]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 40 for n in sizes):
        return 0
    return math.prod(n for n in sizes if isinstance(n, int))


def _number(args: Mapping[str, Any], name: str) -> Any:
    value = args.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return value if is_number else None
