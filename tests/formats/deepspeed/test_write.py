"""What is written as DeepSpeed: files by rank, values as in the source, and what has no place."""

from __future__ import annotations

import math

import pytest

import ckptctl
from tests.formats.deepspeed.test_read import config_of, source
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused

NAMES = [
    "deepspeed/zero0-dp2-bf16",
    "deepspeed/zero1-dp2-bf16",
    "deepspeed/zero3-dp2-bf16-qwen2-tied",
    "deepspeed/pipe-pp2-dp2-zero1-bf16",
    "deepspeed/universal-zero1-dp2-bf16-fp32acc",
]
TARGETS = [
    ["--zero-stage", "1", "--dp", "4"],
    ["--zero-stage", "2", "--dp", "3"],
    ["--zero-stage", "3", "--dp", "2"],
    ["--zero-stage", "3", "--dp", "37"],
    ["--universal"],
]


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", TARGETS, ids=" ".join)
def test_every_layout_holds_the_very_same_state(name, words, tmp_path):
    config = config_of(name)
    model = ["--model-config", config] if config else []
    good("reshard", source(name), tmp_path / "out", *words, *model)
    found = document("diff", source(name), tmp_path / "out", "--optimizer", *model)
    assert found["equal"] is True, found["differences"][:3]
    got = document("inspect", tmp_path / "out")
    if "--universal" not in words:
        assert (got["layout"]["zero_stage"], got["layout"]["dp"]) == (int(words[1]), int(words[3]))
        assert (tmp_path / "out" / "latest").read_text() == "global_step3"
        assert len(list((tmp_path / "out" / "global_step3").glob("*optim_states.pt"))) == int(words[3])


@pytest.mark.real
def test_slots_are_those_that_deepspeed_computes(tmp_path):
    good("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "out", "--zero-stage", "2", "--dp", "3")
    with ckptctl.open(tmp_path / "out") as view:
        numel = sum(math.prod(t.shape) for t in view.tensors() if t.kind == "master")
        slot = -(-numel // 6) * 2  # each rank's piece is a multiple of two elements
        assert view.checkpoint.about["padding"]["exp_avg"] == 3 * slot - numel
        assert view.checkpoint.about["padding"]["master"] == 0


@pytest.mark.real
def test_what_a_run_goes_on_with_is_carried(tmp_path):
    a = source("deepspeed/zero1-dp2-bf16")
    good("reshard", a, tmp_path / "out", "--zero-stage", "3", "--dp", "4")
    with ckptctl.open(a) as old, ckptctl.open(tmp_path / "out") as new:
        assert new.checkpoint.values["lr_scheduler"] == {"last_batch_iteration": 2}
        assert new.checkpoint.values["global_samples"] == old.checkpoint.values["global_samples"]
        scaler = new.checkpoint.values["deepspeed"]["loss_scaler"]
        assert scaler == old.checkpoint.values["deepspeed"]["loss_scaler"]
        config = new.checkpoint.values["deepspeed"]["ds_config"]
        assert config["zero_optimization"]["stage"] == 3


@pytest.mark.real
def test_experts_are_refused(tmp_path):
    error = refused("reshard", source("deepspeed/moe-ep2-dp4-zero2-bf16"), tmp_path / "out", "--dp", "2")
    assert error["code"] == "unsupported"
    assert not (tmp_path / "out").exists()


@pytest.mark.real
def test_a_stage_that_is_none_is_wrong_usage(tmp_path):
    done = command("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "out", "--zero-stage", "4")
    assert done.code == 2
    assert "--zero-stage 4" in done.err
