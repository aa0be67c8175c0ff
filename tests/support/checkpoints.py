"""Where the real checkpoints are, and what is true of them. The product never imports this.

- `fixture("torch/fsdp2_dp2_dcp")`: the folder of one layout: the checkpoint, its truth, how it was made
- `ckpt("torch/fsdp2_dp2_dcp")`: the checkpoint itself, as a user would name it
- `truth(folder)`: `{section: {name: (dtype, shape, sha256)}}`, taken from the run that made it
- `shared("deepspeed/zero2-dp2-bf16")`: a layout of the larger collection beside the repository, or skip
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures" / "checkpoints"
SHARED = ROOT.parent / "shared" / "checkpoints"
NOT_CHECKPOINT = {"truth", "truth.json", "info.json"}


class Truth(NamedTuple):
    """What a tensor must be: dtype as safetensors spells it, shape, SHA-256 of its little-endian row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def fixture(name: str) -> Path:
    """The folder of a layout in fixtures/checkpoints, by FRAMEWORK/LAYOUT. FileNotFoundError where there is none."""
    path = FIXTURES / name
    if not path.exists():
        raise FileNotFoundError(f"no fixture {name!r} in fixtures/checkpoints")
    return path


def ckpt(name: str) -> Path:
    """The checkpoint of a layout, by FRAMEWORK/LAYOUT, looked for in the repository, then beside it.

    Below `ckpt/`, a folder with one entry only is stepped into. Skips the test where the layout is in neither place.
    """
    folder = FIXTURES / name if (FIXTURES / name).exists() else shared(name)
    path = folder / "ckpt"
    if not path.exists():
        return folder
    while path.is_dir() and len(entries := sorted(path.iterdir())) == 1:
        path = entries[0]
    return path


def shared(name: str = "") -> Path:
    """A folder of the larger collection, `../shared/checkpoints`; skips the test where it is not there."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name or 'the collection'} in ../shared/checkpoints, which is not part of the repository")
    return path


def layouts(framework: str, *, everything: bool = False) -> list[str]:
    """FRAMEWORK/LAYOUT of each layout in the repository, and with everything of those beside it, too; sorted."""
    roots = [FIXTURES, SHARED] if everything else [FIXTURES]
    found = {p.name for root in roots for p in (root / framework).glob("*") if p.is_dir()}
    return [f"{framework}/{name}" for name in sorted(found)]


def truth(folder: str | Path) -> dict[str, dict[str, Truth]]:
    """Section -> name -> what is true, of a layout's folder (or its FRAMEWORK/LAYOUT).

    Sections are `model` (the full weights by Hugging Face name), `exp_avg`, `exp_avg_sq` and what else was recorded.
    """
    folder = folder if isinstance(folder, Path) else fixture(folder)
    if (folder / "truth.json").exists():
        found = json.loads((folder / "truth.json").read_text())
        sections = {"model": found["tensors"]}
    else:
        sections = json.loads((folder / "truth" / "tensors.json").read_text())
    return {
        section: {n: Truth(t["dtype"], tuple(t["shape"]), t["sha256"]) for n, t in tensors.items() if "sha256" in t}
        for section, tensors in sections.items()
    }


def truth_config(name: str) -> Path | None:
    """The folder to give as --model-config for a layout: its truth/, where that holds a config.json."""
    folder = FIXTURES / name if (FIXTURES / name).exists() else SHARED / name
    return folder / "truth" if (folder / "truth" / "config.json").exists() else None


def safetensors_of(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Name, dtype, shape and bytes of each tensor of one well-formed safetensors file, without any library."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    for name, entry in json.loads(blob[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = (8 + length + at for at in entry["data_offsets"])
            yield name, entry["dtype"], tuple(entry["shape"]), blob[start:stop]


def digests(*paths: Path) -> dict[str, Truth]:
    """Name -> dtype, shape and SHA-256 of every tensor of the safetensors files (or of the folders of them)."""
    files = [f for p in paths for f in (sorted(p.glob("*.safetensors")) if p.is_dir() else [p])]
    return {
        name: Truth(dtype, shape, hashlib.sha256(data).hexdigest())
        for file in files
        for name, dtype, shape, data in safetensors_of(file)
    }


def digest(dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Truth:
    """The Truth of bytes in hand."""
    return Truth(dtype, shape, hashlib.sha256(data).hexdigest())


@functools.cache
def torch_python() -> str | None:
    """A Python with torch: this one, or the one that CKPTCTL_TORCH_PYTHON names; None where there is none."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    other = os.environ.get("CKPTCTL_TORCH_PYTHON")
    if other and subprocess.run([other, "-c", "import torch"], capture_output=True).returncode == 0:
        return other
    return None


def run_torch(script: str, *arguments: str | Path) -> str:
    """Standard output of a script run by a Python with torch; skips where there is none, fails where it fails."""
    python = torch_python()
    if python is None:
        pytest.skip("needs a Python with torch: install it, or name one in CKPTCTL_TORCH_PYTHON")
    done = subprocess.run([python, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
