"""One record against what the checkpoint says of itself, and a band of sanity. Pure.

The band is wide on purpose: it finds weights in a wrong order, state of another model, a wrong scale, numbers that are
not finite. It is no proof of fidelity, which only a comparison of two checkpoints is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.verify.record import Record

Document = dict[str, Any]
DRAWN_LOSS = 3.0
"""With tokens drawn at random, how often a fresh model's loss a trained model's may be: it has learned other text."""
TEXT_LOSS = 1.05
"""The same for a batch of text."""
LARGEST_UPDATE = 10.0
"""Root mean square of one update over its learning rate: Adam's is about 1, and at most about 1 / sqrt(1 - beta2)."""


def checks(record: Record, checkpoint: Checkpoint, *, is_drawn: bool) -> list[Document]:
    """Each check: {name, ok, detail}. ok is None where there is nothing to compare with."""
    out = [
        _check(
            "numbers are finite", record.finite and all(map(math.isfinite, record.losses)), "logits, loss, gradients"
        )
    ]
    if record.fresh_loss is not None and record.losses:
        bound = (DRAWN_LOSS if is_drawn else TEXT_LOSS) * record.fresh_loss
        detail = f"{record.losses[0]:.6g}, a new model's {record.fresh_loss:.6g}, at most {bound:.6g}"
        detail += " (the tokens are drawn at random)" if is_drawn else ""
        out.append(_check("loss is in the band of a new model's", record.losses[0] <= bound, detail))
    norm = record.gradient_norms[0]
    out.append(_check("the gradient is there and finite", math.isfinite(norm) and norm > 0, f"norm {norm:.6g}"))
    if homeless := weights_left_out(record):
        detail = f"{len(homeless)} are not in the model of the config: {', '.join(homeless[:3])}"
        out.append(_check("every weight has its place in the model", False, detail))
    for alias, owner in record.untied:
        out.append(_check("tied weights are one", False, f"{alias} and {owner} have different bytes"))
    for name, kind in record.incomplete:
        out.append(_check("the optimizer's state is whole", False, f"{name} has other state and no {kind}"))
    sizes = [(p.update_rms, p.name) for p in record.parameters.values() if p.update_rms is not None]
    if sizes:
        worst = max(sizes, key=lambda s: s[0] if s[0] == s[0] else math.inf)
        out.append(
            _check(
                "updates are of the size of the learning rate",
                worst[0] <= LARGEST_UPDATE,
                f"largest {worst[0]:.3g} of it ({worst[1]}), at most {LARGEST_UPDATE:g}",
            )
        )
    return [*out, *_recorded(record, checkpoint)]


def weights_left_out(record: Record) -> list[str]:
    """Weights of the checkpoint that the model has no place for: by another config they would take part."""
    return [name for name, _, kind in (each.rpartition(" ") for each in record.left_out) if kind == "(weight)"]


def _recorded(record: Record, checkpoint: Checkpoint) -> list[Document]:
    """Counters and rates that the checkpoint has in two places."""
    out = []
    steps: set[float | None] = {
        p.step_before for p in record.parameters.values() if p.settings and p.step_before is not None
    }
    if checkpoint.step is not None and steps:
        skipped = checkpoint.values.get("skipped_steps", 0)
        expected = checkpoint.step - (skipped if isinstance(skipped, int) else 0)
        most = max(s for s in steps if s is not None)
        # DeepSpeed's stage 0 makes one step of zeros before the first, in 16-bit runs.
        # Source: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py, initialize_optimizer_states.
        own = checkpoint.format == "deepspeed" and checkpoint.layout.get("zero_stage") == 0
        ok = most == expected or (own and most == expected + 1)
        detail = f"{_few(steps)} updates, the run's step is {checkpoint.step}"
        out.append(_check("the optimizer's count is the run's step", ok, detail))
    state = checkpoint.values.get("trainer_state")
    history = state.get("log_history") if isinstance(state, Mapping) else None
    last = next(
        (h for h in reversed(history or []) if isinstance(h, Mapping) and isinstance(h.get("loss"), (int, float))), None
    )
    if last is not None:
        ok = math.isfinite(last["loss"])
        if record.fresh_loss is not None:
            ok = ok and last["loss"] <= DRAWN_LOSS * record.fresh_loss
        detail = f"{last['loss']:.6g} at step {last.get('step')}"
        detail += f", here {record.losses[0]:.6g} on another batch" if record.losses else ""
        out.append(_check("the loss that the run recorded", ok, detail))
    return out


def _few(steps: set[float | None]) -> str:
    return ", ".join(f"{s:g}" for s in sorted(s for s in steps if s is not None)[:4])


def _check(name: str, ok: bool | None, detail: str = "") -> Document:
    return {"name": name, "ok": ok, "detail": detail}
