"""What verify needs is named, with the line that installs it; what it cannot do is refused before torch is asked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.operations.verify.made import reading_of
from tests.support.checkpoints import ROOT, ckpt, needs_torch
from tests.support.commands import ckptctl


def test_without_torch_the_install_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = ckptctl("verify", ckpt("torch/plain_legacy"), "--json")
    assert done.code == 3
    assert done.error["code"] == "needs-install"
    assert "pip install 'ckptctl[verify]'" in done.error["fix"]


def test_a_core_package_that_is_not_there_is_no_bug_of_ours():
    """In a process of its own: what is imported once, stays."""
    script = (
        "import sys\nsys.modules['xxhash'] = None\nfrom ckptctl.cli.main import run\n"
        f"sys.exit(run(['verify', {str(ckpt('torch/plain_legacy'))!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "needs-install"
    assert "xxhash" in error["what"]
    assert "pip install 'ckptctl[verify]'" in error["fix"]


@needs_torch
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--device", "tpu"), 2, "no such device"),
        (("--device", "cuda:99"), 3, "GPUs"),
        (("--dtype", "int8"), 2, "no such type"),
        (("--memory", "1KiB"), 2, "too little"),
        (("--layers", "9"), 2, "has 2 layers"),
        (("--layers", "0"), 2, "has 2 layers"),
        (("--vocabulary", "padded"), 2, "rows of padding"),
        (("--vocabulary", "some"), 2, "no such choice"),
        (("--lr", "fast"), 2, "--lr"),
        (("--lr", "-1"), 2, "--lr"),
        (("--batch", "nowhere.npz"), 3, "there is no file"),
        (("--data", "nowhere.jsonl"), 2, "--tokenizer"),
        (("--no-model", "--layers", "1"), 2, "--no-model"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_what_makes_no_sense_is_refused(flags, code, says):
    done = ckptctl(
        "verify", ckpt("torch/plain_legacy"), "--model-config", reading_of("torch/plain_legacy").model_config, *flags
    )
    assert done.code == code, done
    assert says in done.err


@needs_torch
@pytest.mark.parametrize(
    ("layout", "code"),
    [
        ("deepspeed/moe-ep2-dp4-zero2-bf16", "model-config"),
        ("deepspeed/zero2-dp2-bf16-frozen-excluded", "weights-missing"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_reason(layout, code):
    config = reading_of(layout).model_config
    done = ckptctl("verify", ckpt(layout), "--json", *(["--model-config", config] if config else []))
    assert done.code == 3
    assert done.error["code"] == code
