"""validate of a run's folder with --step: the one step, whole or not, and nothing beside it."""

from __future__ import annotations

import shutil

import pytest

from ckptctl.operations import Reading, Validation, validate
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
