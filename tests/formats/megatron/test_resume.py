"""Real megatron-core goes on from what was written, with the losses of the source's own run; two rows of the matrix.

All rows: tests/support/megatron_runs.py.
"""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import fixture
from tests.support.commands import good
from tests.support.megatron_runs import SAMPLED, folder_of, gaps_of, gone_on, why_not


@pytest.mark.real
@pytest.mark.parametrize("row", SAMPLED, ids=lambda row: row.name)
def test_real_megatron_goes_on_with_the_losses_of_the_source(row, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    if not folder_of(row.source).exists():
        pytest.skip(f"needs {row.source} in ../shared/checkpoints/megatron")
    report = gaps_of(row, tmp_path)
    assert report["code"] == 0, report["error"]
    assert {"eval", "train"} <= set(report["gaps"])
    assert max(report["gaps"].values()) <= 2e-5


@pytest.mark.real
def test_real_megatron_takes_up_a_run_of_fsdp_by_its_own_flags(tmp_path):
    """A vocabulary that needs no padding has the source's losses in training, too."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    source, flags = fixture("torch/fsdp2_dp2_dcp"), tmp_path / "flags"
    flags.write_text(
        "--train-iters 6 --global-batch-size 4 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.1 "
        "--make-vocab-size-divisible-by 131 --pipeline-model-parallel-size 2 --ckpt-format torch"
    )
    words = ("--to", "megatron", "--like", flags, "--model-config", source / "truth")
    good("convert", source / "ckpt", tmp_path / "out", *words)
    mesh = ["--tp", 1, "--pp", 2, "--optimizer", "plain", "--rng", "--vocab-divisor", 131]
    report = gone_on(tmp_path / "out", ["--family", "llama", "--dims", source / "truth" / "config.json", *mesh])
    assert report["code"] == 0, report["error"]
    want = json.loads((source / "truth" / "losses.json").read_text())["losses"]
    assert [report["train"][str(n)] for n in (4, 5, 6)] == pytest.approx(want[3:6], abs=2e-5)
