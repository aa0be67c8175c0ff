"""validate of a run's folder with --step: the one step, whole or not, and nothing beside it."""

from __future__ import annotations

import shutil

import pytest

from ckptctl.operations import Reading, Validation, inspect, validate
from tests.support.checkpoints import ckpt


@pytest.fixture
def trainer_run(tmp_path):
    """Two whole steps and, by number, a last one whose optimizer is cut."""
    source = ckpt("hf/qwen2-trainer")
    hidden = shutil.ignore_patterns("truth", "truth.json", "info.json")
    for step in (1, 2, 10):
        shutil.copytree(source, tmp_path / "run" / f"checkpoint-{step}", ignore=hidden)
    cut = tmp_path / "run" / "checkpoint-10" / "optimizer.pt"
    cut.write_bytes(cut.read_bytes()[:-5000])
    return tmp_path / "run"


def test_validate_of_the_latest_step_looks_at_that_one_alone(trainer_run):
    document = validate([trainer_run], Validation("header"), Reading(step="latest"))
    assert [row["path"] for row in document["checkpoints"]] == [str(trainer_run / "checkpoint-10")]
    assert not document["ok"]
    document = validate([trainer_run], Validation("structure"), Reading(step="2"))
    assert [row["path"] for row in document["checkpoints"]] == [str(trainer_run / "checkpoint-2")]
    assert document["ok"]
    assert document["checked"]["files"] == 8


def test_the_latest_step_is_not_passed_over_because_it_is_not_whole(trainer_run):
    (trainer_run / "checkpoint-10" / "trainer_state.json").unlink()
    document = validate([trainer_run], Validation("structure"), Reading(step="latest"))
    assert [row["path"] for row in document["checkpoints"]] == [str(trainer_run / "checkpoint-10")]


def test_the_latest_step_is_the_tracker_s(tmp_path):
    folder = shutil.copytree(ckpt("megatron/qwen2_legacy_tp2pp2_tied"), tmp_path / "run")
    shutil.copytree(folder / "iter_0000003", folder / "iter_0000009")
    next((folder / "iter_0000009").rglob("*.pt")).unlink()
    document = validate([folder], Validation("header"), Reading(step="latest"))
    assert [row["path"] for row in document["checkpoints"]] == [str(folder / "iter_0000003")]
    assert document["ok"]


@pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt"])
def test_no_run_goes_on_from_a_trainer_s_step_without_what_the_trainer_wants(name, trainer_run):
    """transformers 5.24: it stops without the one, and starts the optimizer anew, without a word, without the other."""
    step = trainer_run / "checkpoint-2"
    assert validate([step], Validation("structure", must_resume=True))["ok"]
    (step / name).unlink()
    found = validate([step], Validation("structure"))
    row = found["checkpoints"][0]["resumable"]
    assert row["answer"] is False
    assert row["why"].startswith(f"no {name}")
    assert "not-resumable" in [f["kind"] for f in found["findings"]]
    assert not validate([step], Validation("structure", must_resume=True))["ok"]
    assert inspect(step)["resumable"] is False
    whole = validate([trainer_run], Validation("structure"))
    assert whole["newest_resumable"] == str(trainer_run / "checkpoint-1")
