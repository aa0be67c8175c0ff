"""What a run of a few steps leaves to compare: numbers and digests, no tensor.

Made by `step`, and of real frameworks' runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trained:
    """One parameter (or buffer) through the steps.

    before and after are digests by what they are of: "weight", "master", "exp_avg", ...; before is of the state as
    loaded, after of that after the last step. samples are numbers of the state after it, by the same words: how far two
    runs are apart where their bits differ. settings are what decides its step; None where it is not trained.
    """

    name: str
    shape: tuple[int, ...]
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    gradient_norms: list[float | None] = field(default_factory=list)
    step_before: float | None = None
    step_after: float | None = None
    settings: dict[str, Any] | None = None
    update_rms: float | None = None
    """Root mean square of (weight before - after) of the last step, over its learning rate."""


@dataclass
class Record:
    """One run: its losses, one a step, and what became of each parameter, in the model's order.

    logits are digests of them; lr is each step's rate of each parameter's group, largest first where groups differ.
    """

    losses: list[float] = field(default_factory=list)
    logits: list[str] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    lr: list[list[float]] = field(default_factory=list)
    parameters: dict[str, Trained] = field(default_factory=dict)
    fresh_loss: float | None = None
    """The first batch's loss under weights drawn anew, where it was asked for."""
    finite: bool = True
    """Whether all logits and gradients are finite."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Seconds, bytes, peak memory."""
    notes: list[str] = field(default_factory=list)
    untied: list[tuple[str, str]] = field(default_factory=list)
    """(second name, parameter) of copies that the model holds once and the checkpoint twice, with other bytes."""
    incomplete: list[tuple[str, str]] = field(default_factory=list)
    """(parameter, kind) of state that its optimizer needs and that is not there beside the rest: no update is made."""
    left_out: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the model has no place for: their digests are compared all the same."""


SAMPLES = 512
"""Numbers kept of each tensor after the steps, spread evenly over it."""
