"""Real megatron-core going on from what was written: how a pair is run, and the matrix that is run by hand.

    CKPTCTL_TORCH_PYTHON=python CKPTCTL_MEGATRON_SRC=Megatron-LM python -m tests.support.megatron_runs [words]

Words choose rows by parts of their names. The harness is ../shared/realruns/resume_megatron.py: ranks forked over gloo,
parameters NaN before the load, the run's own flags. Losses are compared with those of the source's own run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ckptctl.formats.megatron.model import EMBEDDING
from tests.support.checkpoints import FIXTURES, SHARED, torch_python
from tests.support.commands import good

HARNESS = SHARED.parent / "realruns" / "resume_megatron.py"


class Row(NamedTuple):
    """A source, the form and mesh of the result, and how its vocabulary is padded: to a multiple of divisor x tp.

    The source's padded size is kept, so that losses over the padded vocabulary are the source's own.
    """

    source: str
    form: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    optimizer: str = "plain"

    @property
    def name(self) -> str:
        """How it is told from others."""
        axes = "".join(f"{a}{n}" for a, n in self.mesh.items() if n > 1) or "one"
        return f"{self.source}>{self.form}-{axes}-{self.optimizer}"

    @property
    def mesh(self) -> dict[str, int]:
        """Its axes."""
        return {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "ep": self.ep, "dp": self.dp}


FULL, ONE, TIED, BF16 = "legacy_tp2pp2_distopt_dp2", "legacy_tp1pp1", "qwen2_legacy_tp2pp2_tied", "legacy_tp2pp1_bf16"
CLASSIC, DIST, ZERO = "torch", "torch_dist", "distributed"
SAMPLED = [
    Row(FULL, CLASSIC, tp=1, pp=2, vpp=2, dp=2, optimizer=ZERO),
    Row(TIED, DIST, tp=1, pp=4, optimizer=ZERO),
]
MATRIX = [
    *SAMPLED,
    Row(FULL, CLASSIC, optimizer=ZERO),
    Row(FULL, CLASSIC, tp=4),
    Row(FULL, CLASSIC, pp=4, dp=1, optimizer=ZERO),
    Row(FULL, CLASSIC, tp=2, dp=2, optimizer=ZERO),
    Row(FULL, DIST, dp=2, optimizer=ZERO),
    Row(FULL, DIST, tp=4, optimizer=ZERO),
    Row(FULL, DIST, pp=4),
    Row(FULL, DIST, pp=2, vpp=2, dp=2, optimizer=ZERO),
    Row("dist_tp2pp2_distopt_full_dp2", CLASSIC, tp=4, optimizer=ZERO),
    Row("dist_tp2pp2_distopt_dp_dp2", DIST, pp=4, optimizer=ZERO),
    Row("dist_tp2pp2_distopt_dpzero_dp2", CLASSIC),
    Row(ONE, CLASSIC, tp=2, pp=2),
    Row(ONE, DIST, tp=2, pp=2, dp=2, optimizer=ZERO),
    Row("dist_tp1pp2_vpp2", CLASSIC, tp=2, pp=2),
    Row("legacy_tp1pp2_vpp2_distopt_dp2", DIST, tp=2, pp=2, dp=2, optimizer=ZERO),
    Row("legacy_tp1pp1_distopt_dp2_buckets", DIST, tp=2, pp=2, optimizer=ZERO),
    Row(BF16, CLASSIC, pp=2),
    Row("legacy_tp2pp1_distopt_dp2_bf16", DIST, pp=2, dp=2, optimizer=ZERO),
    Row("dist_tp2pp1_distopt_full_dp2_bf16", CLASSIC, pp=4, optimizer=ZERO),
    Row(TIED, CLASSIC),
    Row(TIED, CLASSIC, pp=2, vpp=2, dp=2, optimizer=ZERO),
    Row("qwen2_dist_narrow_tp1pp2_tied_distopt_full_dp2", CLASSIC, tp=2, pp=2),
    Row("gpt2_legacy_tp2pp1", CLASSIC, tp=4),
    Row("gpt2_legacy_tp2pp1", DIST, tp=4, optimizer=ZERO),
    Row("qwen3_legacy_tp2pp1", DIST, pp=4),
    Row("mixtral_legacy_ep2", CLASSIC),
    Row("mixtral_legacy_ep2", CLASSIC, ep=4, dp=4),
    Row("mixtral_legacy_ep2", DIST, ep=4, dp=4, optimizer=ZERO),
    Row("mixtral_dist_ep2", DIST),
    Row("mixtral_dist_ep2_distopt_full", CLASSIC, tp=2, ep=2, dp=2, optimizer=ZERO),
    Row("mixtral_dist_ep2", CLASSIC, tp=2, pp=2),
    Row("mixtral_dist_ep2_distopt_full", DIST, pp=2, ep=2, dp=2, optimizer=ZERO),
]


def folder_of(name: str) -> Path:
    """Where a sample lies: in the repository, or beside it."""
    inside = FIXTURES / "megatron" / name
    return inside if inside.exists() else SHARED / "megatron" / name


def why_not() -> str:
    """Why no real run can be made here, "" where it can."""
    source = os.environ.get("CKPTCTL_MEGATRON_SRC", "")
    if not HARNESS.is_file():
        return "needs ../shared/realruns"
    if not Path(source, "megatron", "training").is_dir():
        return "needs a checkout of Megatron-LM at core_v0.16.1, named in CKPTCTL_MEGATRON_SRC"
    python = torch_python()
    words = [python or "", "-c", "import megatron.core, transformers, six"]
    if python is None or subprocess.run(words, capture_output=True, check=False).returncode:
        return "needs a Python with torch and megatron-core, named in CKPTCTL_TORCH_PYTHON"
    return ""


def gaps_of(row: Row, work: Path) -> dict[str, Any]:
    """Reshards, lets the real Megatron load and train on, and gives the harness's report."""
    source = folder_of(row.source)
    truth = json.loads((source / "truth" / "losses.json").read_text())
    padded = int(truth["padded_vocab_size"])
    assert padded % row.tp == 0, f"{EMBEDDING} of {padded} rows"
    flags = [w for axis, n in row.mesh.items() for w in (f"--{axis}", str(n))]
    flags += ["--megatron-format", row.form, "--optimizer", row.optimizer, "--vocab-divisor", str(padded // row.tp)]
    good("reshard", source, work / "out", *flags, "--model-config", source / "truth", "--overwrite")
    mesh = {**row.mesh, "vpp": 0}
    if row.vpp > 1:
        config = json.loads((source / "truth" / "config.json").read_text())
        mesh["vpp"] = (config.get("num_hidden_layers") or config["n_layer"]) // (row.pp * row.vpp)
    words: list[Any] = ["--family", truth["family"], "--dtype", truth["dtype"], "--optimizer", row.optimizer, "--rng"]
    words += ["--expect", source / "truth" / "losses.json", "--dims", source / "truth" / "config.json"]
    words += [w for axis, n in mesh.items() for w in (f"--{axis}", n)]
    words += ["--vocab-divisor", padded // row.tp, "--atol", "2e-5" if truth["dtype"] == "fp32" else "2e-3"]
    flags = ["--micro-batch-size 1"] if row.dp > 2 and row.pp == 1 else []  # the batch is four rows
    flags += ["--sequence-parallel"] if truth["family"] == "mixtral" and row.tp > 1 and row.pp > 1 else []
    words += [f"--flags={' '.join(flags)}"] if flags else []
    return gone_on(work / "out", words)


def gone_on(out: Path, words: list[Any]) -> dict[str, Any]:
    """What the harness says of a run's folder; code is its exit code, error the end of what it wrote."""
    command = [torch_python(), HARNESS, "--megatron-src", os.environ["CKPTCTL_MEGATRON_SRC"], "--load", out, *words]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=out.parent)
    text = done.stdout[done.stdout.find('{"') :]
    report = json.loads(text) if text else {"ok": False}
    return {"code": done.returncode, "error": done.stderr[-1500:], **report}


def main() -> int:
    """Runs the matrix, a line a row."""
    reason = why_not()
    if reason:
        print(reason, file=sys.stderr)  # noqa: T201
        return 2
    failed = 0
    for row in MATRIX:
        if len(sys.argv) > 1 and not any(word in row.name for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as work:
            report = gaps_of(row, Path(work))
        ok = bool(report["ok"]) and report["code"] == 0
        failed += not ok
        shown = {k: float(f"{v:.2g}") for k, v in report.get("gaps", {}).items()}
        print("holds" if ok else "FAILS", row.name, shown or report["error"][-600:], flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
