"""What people and programs see, held against golden files. `--update-golden` writes them anew; review the diff."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ckptctl.report import text
from tests.support.checkpoints import ROOT
from tests.support.commands import ckptctl
from tests.support.saving import adamw, arange, dcp_save, hf_save, torch_save

GOLDEN = Path(__file__).parent / "golden"
REAL = "fixtures/checkpoints"
LLAMA = f"{REAL}/torch/fsdp2_dp2_dcp/truth"


@pytest.fixture
def golden(request, tmp_path):
    """Compares text with a golden file, folders of this run and what changes from run to run taken out."""

    def compare(name, found):
        found = found.replace(str(tmp_path), "TMP").replace(str(ROOT), "ROOT")
        found = re.sub(r"in [0-9.]+ s \(.*?/s\)", "in S s (R/s)", found)
        found = re.sub(
            r'"(seconds|version|space_free_bytes|index_memory_bytes|read_bytes)": [^,\n]+', r'"\1": "..."', found
        )
        found = re.sub(r"needed, .* free", "needed, F free", found)
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            GOLDEN.mkdir(exist_ok=True)
            file.write_text(found)
        assert file.exists(), f"{name} is not there: run pytest tests/report --update-golden"
        assert found == file.read_text(), f"{name} differs: if that is right, run pytest tests/report --update-golden"

    return compare


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Small checkpoints of every kind, and the repository as the current folder."""
    monkeypatch.chdir(ROOT)
    weight = arange(4, 3)
    model = {
        "embed.weight": weight,
        "norm.weight": arange(3),
        "head.weight": weight,
        "step_size": arange(1, dtype=np.int64),
    }
    optimizer = adamw(["embed.weight", "norm.weight"], {"embed.weight": weight, "norm.weight": arange(3)})
    torch_save(tmp_path / "run.pt", {"model": model, "optimizer": optimizer, "scheduler": {"last_epoch": 3}, "step": 3})
    other = {**model, "norm.weight": arange(3, start=1), "new": arange(2)}
    torch_save(tmp_path / "other.pt", {"model": other})
    dcp_save(tmp_path / "dcp", {("model", "w"): weight, ("step",): 5})
    hf_save(tmp_path / "hf", {"w": weight}, {"model_type": "llama", "dtype": "float32"})
    torch_save(tmp_path / "odd\x1b[31m.pt", {"w\x1b[31m\u202e": arange(2)})
    return tmp_path


CASES = {
    "inspect-torch": ["inspect", "TMP/run.pt", "--tensors"],
    "inspect-dcp": ["inspect", "TMP/dcp"],
    "inspect-real-dcp": ["inspect", f"{REAL}/torch/fsdp2_dp4_dcp/ckpt"],
    "inspect-real-hf": ["inspect", f"{REAL}/hf/qwen2-extras"],
    "inspect-unsafe": ["inspect", f"{REAL}/broken/bin-runs-code"],
    "inspect-odd-names": ["inspect", "TMP/odd\x1b[31m.pt", "--tensors"],
    "ls": ["ls", "TMP/run.pt"],
    "ls-glob": ["ls", f"{REAL}/torch/fsdp2_tp2x2_dcp/ckpt", "*.layers.0.mlp.*", "--kind", "weight"],
    "show": ["show", "TMP/run.pt", "embed.weight", "--slice", "1:3, ::2"],
    "show-stats": ["show", "TMP/run.pt", "embed.weight", "--stats"],
    "show-large": ["show", f"{REAL}/hf/llama-single", "lm_head.weight"],
    "show-value": ["show", "TMP/run.pt", "param_groups"],
    "convert-dry-run": ["convert", "TMP/run.pt", "TMP/out", "--to", "dcp", "--dp", "2", "--dry-run"],
    "convert-hf": [
        "convert",
        "TMP/run.pt",
        "TMP/out",
        "--to",
        "hf",
        "--no-optimizer",
        "--dtype",
        "bfloat16",
        "--verbose",
    ],
    "convert-real": [
        "convert",
        f"{REAL}/torch/fsdp2_dp2_dcp/ckpt",
        "TMP/out",
        "--to",
        "hf",
        "--no-optimizer",
        "--model-config",
        LLAMA,
    ],
    "convert-refused": ["convert", "TMP/run.pt", "TMP/out", "--to", "hf"],
    "reshard": ["reshard", "TMP/dcp", "TMP/out", "--dp", "3"],
    "diff-equal": ["diff", "TMP/run.pt", "TMP/run.pt", "--optimizer", "--state"],
    "diff": ["diff", "TMP/run.pt", "TMP/other.pt", "--optimizer"],
    "usage": ["convert", "TMP/run.pt", "TMP/out", "--to", "gguf"],
    "usage-parser": ["convert", "TMP/run.pt"],
    "missing": ["inspect", "TMP/none"],
}


@pytest.mark.parametrize("case", CASES)
def test_text_is_as_reviewed(case, made, golden):
    words = [w.replace("TMP", str(made)) for w in CASES[case]]
    done = ckptctl(*words)
    parts = [f"exit code {done.code}", "--- stdout", done.out.rstrip("\n"), "--- stderr", done.err.rstrip("\n")]
    golden(f"{case}.txt", "\n".join(parts).rstrip() + "\n")


@pytest.mark.parametrize("case", CASES)
def test_json_is_as_reviewed(case, made, golden):
    words = [w.replace("TMP", str(made)) for w in CASES[case]]
    done = ckptctl(*words, "--json")
    golden(f"{case}.json", json.dumps(done.json, indent=1) + "\n")


def test_no_golden_file_is_left_over():
    assert {p.name for p in GOLDEN.iterdir()} == {f"{case}.{kind}" for case in CASES for kind in ("txt", "json")}


@pytest.mark.parametrize(
    ("n", "want"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3072.0 TiB"),
        (None, "?"),
    ],
)
def test_bytes_as_people_read_them(n, want):
    assert text.nbytes(n) == want


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
        ({"a": (1.5, float("inf"))}, None),
        ("\ud800\u00e9", None),
    ],
)
def test_documents_are_ascii_and_valid(value, want):
    made = text.json_text(value)
    assert made.isascii()
    json.loads(made, parse_constant=lambda word: pytest.fail(word))
    assert want in (None, made)
