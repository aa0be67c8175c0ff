"""The learning rates of steps after the next one, from a scheduler's saved state. Pure.

The next step's rate is in the param groups: every framework sets it there before it saves. What follows is known where
the state says the curve, or a config beside it does; else the rate stays as it is, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptctl.formats.schedule import schedulers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.checkpoint import Checkpoint

Rate = Callable[[Mapping[str, Any]], float]
"""A step's learning rate, of a parameter's settings (`lr`, and under `group` all of its group's)."""


def rates(checkpoint: Checkpoint, steps: int, given: Sequence[float] = ()) -> tuple[list[Rate], list[str]]:
    """One rate a step, and what is to be said of them. given are the user's, for all groups alike."""
    if given:
        return [_constant(float(given[min(k, len(given) - 1)])) for k in range(steps)], []
    found: list[Rate] = [_own]
    if steps == 1:
        return found, []
    curve = _curve(checkpoint)
    if curve is None:
        said = "no schedule" if not schedulers(checkpoint.values)[0] else "the schedule's curve is in no file"
        return [_own] * steps, [f"the learning rate stays as it is after the first step: {said}; --lr gives others"]
    return found + [curve(k) for k in range(1, steps)], []


def _own(settings: Mapping[str, Any]) -> float:
    return float(settings["lr"])


def _constant(rate: float) -> Rate:
    return lambda settings: rate


def _curve(checkpoint: Checkpoint) -> Callable[[int], Rate] | None:
    """The rate k steps after the next one."""
    states, _ = schedulers(checkpoint.values)
    state = states[0] if len(states) == 1 and isinstance(states[0], Mapping) else None
    if state is None:
        return None
    if "lr_decay_style" in state:
        return _megatron(state, checkpoint)
    if set(state) >= {"last_batch_iteration"}:
        return _deepspeed(state, checkpoint)
    if "last_epoch" in state:
        return _torch(state)
    return None


def _torch(state: Mapping[str, Any]) -> Callable[[int], Rate] | None:
    """Source: torch 2.13.0, optim/lr_scheduler.py: what get_lr of each class multiplies the last rate by."""
    last, gamma = state["last_epoch"], state.get("gamma")
    if not isinstance(last, int):
        return None
    factor: Callable[[int], float]
    if isinstance(state.get("step_size"), int) and isinstance(gamma, (int, float)):
        factor = lambda e: gamma if e % state["step_size"] == 0 else 1.0  # noqa: E731
    elif isinstance(state.get("milestones"), Mapping) and isinstance(gamma, (int, float)):
        factor = lambda e: gamma ** state["milestones"].get(e, 0)  # noqa: E731
    elif isinstance(state.get("T_max"), int) and isinstance(state.get("eta_min"), (int, float)):
        return _cosine(state, last)
    elif isinstance(state.get("start_factor"), (int, float)) and isinstance(state.get("total_iters"), int):
        start, stop, total = state["start_factor"], state["end_factor"], state["total_iters"]
        factor = lambda e: (  # noqa: E731
            1.0 if e > total else 1.0 + (stop - start) / (total * start + (e - 1) * (stop - start))
        )
    elif isinstance(state.get("factor"), (int, float)) and isinstance(state.get("total_iters"), int):
        factor = lambda e: 1.0 / state["factor"] if e == state["total_iters"] else 1.0  # noqa: E731
    elif isinstance(gamma, (int, float)) and set(state).isdisjoint(("step_size", "milestones", "base_lr", "max_lrs")):
        factor = lambda e: gamma  # noqa: E731
    else:
        return None

    def after(k: int) -> Rate:
        product = math.prod(factor(last + i) for i in range(1, k + 1))
        return lambda settings: float(settings["lr"]) * product

    return after


def _cosine(state: Mapping[str, Any], last: int) -> Callable[[int], Rate]:
    total, low = state["T_max"], float(state["eta_min"])

    def after(k: int) -> Rate:
        def rate(settings: Mapping[str, Any]) -> float:
            value = float(settings["lr"])
            for e in range(last + 1, last + k + 1):
                if (e - 1 - total) % (2 * total) == 0:
                    base = float(settings["group"].get("initial_lr", state["base_lrs"][0]))
                    value += (base - low) * (1 - math.cos(math.pi / total)) / 2
                else:
                    value = (1 + math.cos(math.pi * e / total)) / (1 + math.cos(math.pi * (e - 1) / total)) * (
                        value - low
                    ) + low
            return value

        return rate

    return after


def _deepspeed(state: Mapping[str, Any], checkpoint: Checkpoint) -> Callable[[int], Rate] | None:
    """Its schedulers keep their count alone; the curve is in the run's configuration, which its files hold.

    Source: DeepSpeed 0.19.8, runtime/lr_schedules.py, WarmupLR, WarmupDecayLR.
    """
    own = checkpoint.values.get("deepspeed")
    config = own.get("ds_config") if isinstance(own, Mapping) else None
    wanted = config.get("scheduler") if isinstance(config, Mapping) else None
    if not isinstance(wanted, Mapping) or wanted.get("type") not in ("WarmupLR", "WarmupDecayLR"):
        return None
    params = wanted.get("params")
    p: Mapping[str, Any] = params if isinstance(params, Mapping) else {}
    low, high = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", 0.001)
    warmup, total, last = (
        max(2, p.get("warmup_num_steps", 1000)),
        p.get("total_num_steps"),
        state["last_batch_iteration"],
    )
    numbers = (low, high, warmup, last, 0 if wanted["type"] == "WarmupLR" else total)
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers):
        return None

    stop: Any = total

    def gamma(e: int) -> float:
        if e < warmup:
            return e / warmup if p.get("warmup_type") == "linear" else math.log(e + 1) / math.log(warmup)
        if wanted["type"] == "WarmupLR":
            return 1.0
        return max(0.0, float(stop - e) / float(max(1.0, stop - warmup)))

    return lambda k: _constant(low + (high - low) * gamma(last + k))


def _megatron(state: Mapping[str, Any], checkpoint: Checkpoint) -> Callable[[int], Rate] | None:
    """Counts samples: a step adds the global batch.

    Source: Megatron-LM core_v0.16.1, core/optimizer_param_scheduler.py.
    """
    style, done, warmup = state.get("lr_decay_style"), state.get("num_steps"), state.get("lr_warmup_steps")
    decay, step = state.get("lr_decay_steps"), checkpoint.step
    if (
        not isinstance(done, int)
        or not isinstance(warmup, int)
        or not isinstance(decay, int)
        or not step
        or done % step
    ):
        return None
    if style not in ("constant", "linear", "cosine", "inverse-square-root"):
        return None
    each: int = done // step
    end: int = decay

    def after(k: int) -> Rate:
        def rate(settings: Mapping[str, Any]) -> float:
            group = settings.get("group", {})
            high = float(group.get("max_lr", state.get("max_lr", settings["lr"])))
            low = float(group.get("min_lr", state.get("min_lr", 0.0)))
            at = done + k * each
            if 0 < at <= warmup:
                return high * float(at) / float(warmup)
            if style == "constant":
                return high
            if at > end:
                return low
            if style == "inverse-square-root":
                return max(low, high * math.sqrt(max(warmup, 1)) / math.sqrt(max(at, 1)))
            ratio = (at - warmup) / (end - warmup)
            return low + (high - low) * (1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0))

        return rate

    return after
