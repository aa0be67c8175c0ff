"""Real megatron-core goes on from what was written, with the losses of the source's own run; two rows of the matrix.

All rows: tests/support/megatron_runs.py.
"""

from __future__ import annotations

import pytest

from tests.support.megatron_runs import SAMPLED, folder_of, gaps_of, why_not


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
