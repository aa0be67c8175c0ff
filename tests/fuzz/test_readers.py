"""Damaged real files through all that reads: a clear error or a result, never a crash, a hang, or much memory.

Each round damages one file of a real checkpoint (bits, cuts, blocks copied or zeroed, large numbers, other words) and
lets a child process inspect, convert and compare it. The child has 3 GiB of address space and a minute a round.
CKPTCTL_FUZZ_SECONDS sets how long (default: 20 s where CI is set, else 5); CKPTCTL_FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from tests.support.checkpoints import ROOT, fixture

SOURCES = (
    "torch/plain_zip", "torch/plain_legacy", "torch/fsdp2_dp4_dcp", "torch/dcp_zstd", "torch/fsdp2_dp2_flatoptim_dcp",
    "hf/llama-sharded", "hf/qwen2-bin", "hf/qwen2-bin-prezip", "hf/llama-bin-sharded", "hf/qwen2-extras",
)  # fmt: skip
CHILD = ROOT / "tests" / "fuzz" / "child.py"


def seconds() -> float:
    return float(os.environ.get("CKPTCTL_FUZZ_SECONDS") or (20 if os.environ.get("CI") else 5))


def test_damaged_files_never_crash_hang_or_run(tmp_path):
    seed = int(os.environ.get("CKPTCTL_FUZZ_SEED") or random.SystemRandom().randrange(1 << 32))
    until = time.monotonic() + seconds()
    sources = [str(fixture(s)) for s in SOURCES]
    rounds = 0
    while time.monotonic() < until:
        left = max(1.0, until - time.monotonic())
        command = [sys.executable, str(CHILD), str(seed), str(rounds), str(min(left, 30.0)), str(tmp_path), *sources]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
        if done.returncode:
            pytest.fail(
                f"CKPTCTL_FUZZ_SEED={seed}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        rounds += int(done.stdout.split()[-1])
    assert rounds > 0
    assert not list(tmp_path.rglob("ckptctl-pickle-ran"))
