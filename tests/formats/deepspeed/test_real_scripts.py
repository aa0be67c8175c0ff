"""DeepSpeed's own converters give the same bytes, wherever they are right. Where they are not is a list with causes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.formats.deepspeed.test_read import EVERY, source
from tests.support.checkpoints import FIXTURES, safetensors_of, torch_python
from tests.support.commands import good

SCRIPT = Path(__file__).parents[2] / "support" / "deepspeed_scripts.py"
FULL = bool(os.environ.get("CKPTCTL_FULL"))
NAMES = [n for n in EVERY if "universal" not in n and (FULL or (FIXTURES / n).exists())]

FP32 = {
    "zero0": "fails: knows no stage 0",
    "moe": "fails: takes experts' files for model files",
    "pipe": "fails: knows no pipelines",
    "fp32acc": "fails: knows no BF16_Optimizer",
    "tied": "fails: safetensors refuse the tied tensors it gives them",
    "zero1-dp2-fp32-frozen": "leaves frozen parameters out",
}
"""What zero_to_fp32 does otherwise, by a part of the layout's name."""
UNIVERSAL = {
    "zero0": "fails: knows no stage 0",
    "pipe-pp2-dp1-fp32": "fails: knows no stage 0",
    "elastic": "fails: knows no elastic checkpoints",
    "roundrobin": "wrong: goes by slice mappings that do not fit the flat groups",
    "zero2-dp2-fp32-qwen2-tied": "writes the alias too, with the rounded weight",
}
"""What ds_to_universal does otherwise."""


def real(jobs: list[list[str]], tmp_path: Path) -> list:
    python = torch_python()
    if python is None:
        pytest.skip("needs a Python with torch: install it, or name one in CKPTCTL_TORCH_PYTHON")
    if subprocess.run([python, "-c", "import deepspeed"], capture_output=True, check=False).returncode:
        pytest.skip("needs deepspeed beside torch")
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    words = [python, str(SCRIPT), str(tmp_path / "jobs.json"), str(tmp_path / "results.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((tmp_path / "results.json").read_text())


def cause(name: str, exceptions: dict[str, str]) -> str:
    return next((why for part, why in exceptions.items() if part in name), "")


def tensors(path: Path) -> dict:
    return {
        n: (dtype, shape, hashlib.sha256(data).hexdigest())
        for file in sorted(path.glob("*.safetensors"))
        for n, dtype, shape, data in safetensors_of(file)
    }


@pytest.mark.real
def test_float32_weights_are_those_of_zero_to_fp32(tmp_path):
    words = ["--to", "hf", "--dtype", "float32", "--weights", "master", "--no-optimizer", "--bare"]
    for number, name in enumerate(NAMES):
        good("convert", source(name), tmp_path / f"{number}.ours", *words)
    said = real([["fp32", str(source(n)), str(tmp_path / f"{i}.real")] for i, n in enumerate(NAMES)], tmp_path)
    for number, (name, error) in enumerate(zip(NAMES, said, strict=True)):
        why = cause(name, FP32)
        if why.startswith("fails"):
            assert error, f"{name}: {why}, and it did not"
            continue
        assert not error, f"{name}: {error}"
        theirs, ours = tensors(tmp_path / f"{number}.real"), tensors(tmp_path / f"{number}.ours")
        assert {n: ours.get(n) for n in theirs} == theirs, name
        assert bool(set(ours) - set(theirs)) == bool(why), name


@pytest.mark.real
def test_universal_folders_are_those_of_ds_to_universal(tmp_path):
    jobs = []
    names = [n for n in NAMES if "moe" not in n]  # experts have no universal form
    for number, name in enumerate(names):
        tag = (source(name) / "latest").read_text()
        good("convert", source(name), tmp_path / f"{number}.ours", "--to", "deepspeed", "--universal")
        theirs, ours = (str(tmp_path / f"{number}.{side}" / f"{tag}_universal") for side in ("real", "ours"))
        jobs += [["universal", str(source(name) / tag), theirs], ["digests", theirs], ["digests", ours]]
    said = real(jobs, tmp_path)
    for name, error, theirs, ours in zip(names, said[::3], said[1::3], said[2::3], strict=True):
        why = cause(name, UNIVERSAL)
        if why.startswith("fails"):
            assert error, f"{name}: {why}, and it did not"
            continue
        assert not error, f"{name}: {error}"
        same = {n: ours.get(n) for n in theirs} == theirs
        assert same is not bool(why), f"{name}: {why or 'differs'}"
        # Of stage 3 it writes neither steps nor frozen parameters.
        more = {n for n in ours if n not in theirs}
        trained = {n.rpartition(" ")[0] for n in theirs}
        assert all(n.endswith(" step") or n.rpartition(" ")[0] not in trained for n in more), name
        assert not more or "zero3" in name, name
