"""Rates of later steps: those that the real schedulers give, or none where no file says the curve."""

from __future__ import annotations

import pytest

from ckptctl.core.checkpoint import Checkpoint
from ckptctl.operations.verify.schedule import rates
from tests.support.checkpoints import needs_torch


def checkpoint(values, step=3):
    return Checkpoint("torch", "", "x", (), {}, values=values, step=step)


def of(values, steps, settings, step=3):
    found, notes = rates(checkpoint(values, step), steps)
    return [r(settings) for r in found], notes


@needs_torch
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("MultiStepLR", {"milestones": [4, 6], "gamma": 0.1}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("ConstantLR", {"factor": 0.5, "total_iters": 5}),
        ("LinearLR", {"start_factor": 0.25, "total_iters": 6}),
        ("CosineAnnealingLR", {"T_max": 6, "eta_min": 1e-5}),
    ],
)
def test_torch_s_schedulers_go_on_as_torch_s_own(name, arguments):
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    state = {k: dict(v) if k == "milestones" else v for k, v in scheduler.state_dict().items()}
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    want = []
    for _ in range(6):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    found, notes = of({"scheduler": state}, 6, {"lr": group["lr"], "group": group})
    assert found == pytest.approx(want, rel=1e-12)
    assert notes == []


def test_a_lambda_s_curve_is_in_no_file():
    state = {"base_lrs": [0.1], "last_epoch": 3, "_step_count": 4, "_last_lr": [0.1], "lr_lambdas": [None]}
    found, notes = of({"scheduler": state}, 2, {"lr": 0.05})
    assert found == [0.05, 0.05]
    assert "--lr" in notes[0]


def test_megatron_s_cosine_counts_samples():
    """Global batch 4; 8 samples of warmup, 40 of decay, from 1e-3 to 1e-4: by hand at 12 + 4k samples."""
    import math

    state = {
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_steps": 8,
        "num_steps": 12,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 40,
    }
    found, _ = of({"opt_param_scheduler": state}, 3, {"lr": 9.9e-4, "group": {"max_lr": 1e-3, "min_lr": 1e-4}})
    want = [9.9e-4] + [1e-4 + 9e-4 * 0.5 * (math.cos(math.pi * (12 + 4 * k - 8) / 32) + 1) for k in (1, 2)]
    assert found == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "state",
    [
        {"last_epoch": "x"},
        {"lr_decay_style": 3},
        {"last_batch_iteration": None},
        [],
        7,
        {"last_epoch": 1, "T_max": "a"},
    ],
)
def test_states_that_say_nothing_leave_the_rate(state):
    assert of({"scheduler": state}, 2, {"lr": 0.5})[0] == [0.5, 0.5]


def test_given_rates_are_taken_and_the_last_goes_on():
    found, _ = rates(checkpoint({}), 4, (0.1, 0.2))
    assert [r({"lr": 9.0}) for r in found] == [0.1, 0.2, 0.2, 0.2]
