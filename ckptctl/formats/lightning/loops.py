"""Progress counters of Lightning's loops, for a run that was not Lightning's. Data only.

Source: lightning 2.6.6, pytorch/loops/progress.py, fit_loop.py, training_epoch_loop.py; loop.py: absent counters keep
their defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.core.values import Tree


def loops_at(step: int, epoch: int) -> dict[str, Tree]:
    """Counters after step updates, at the start of an epoch: where in its data a run was is in no file."""
    batches = _counted(step, "ready", "completed", "started", "processed")
    epochs = {"ready": epoch + 1, "completed": epoch, "started": epoch + 1, "processed": epoch}
    fit: dict[str, Tree] = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": _counted(step, "ready", "completed"),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": _counted(step, "ready", "completed"),
                "zero_grad": _counted(step, "ready", "completed", "started"),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _counted(step, "ready", "completed"),
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
    }
    nothing: dict[str, Tree] = {"state_dict": {}}
    return {"fit_loop": fit, **{f"{name}_loop": dict(nothing) for name in ("validate", "test", "predict")}}


def _counted(n: int, *events: str) -> dict[str, Tree]:
    return {"total": dict.fromkeys(events, n), "current": dict.fromkeys(events, 0)}
