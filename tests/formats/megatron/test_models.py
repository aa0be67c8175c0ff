"""What is written, against real megatron-core models: names, order and shapes of every rank of every family."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.formats.megatron.test_families import CONFIGS, made
from tests.support import checkpoints
from tests.support.checkpoints import torch_python
from tests.support.commands import good

MESHES = {
    "tp2pp2": ("--tp", "2", "--pp", "2", "--megatron-format", "torch"),
    "vpp2": ("--tp", "4", "--pp", "2", "--vpp", "2", "--megatron-format", "torch"),
    "dist": ("--tp", "2", "--pp", "2", "--megatron-format", "torch_dist"),
    "ep2": ("--tp", "2", "--ep", "2", "--dp", "2", "--megatron-format", "torch"),
    "dist-ep4": ("--ep", "4", "--dp", "4", "--megatron-format", "torch_dist"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_real_models(name, tmp_path):
    python = torch_python()
    if python is None or subprocess.run([python, "-c", "import megatron.core"], capture_output=True).returncode:
        pytest.skip("needs a Python with torch and megatron-core in CKPTCTL_TORCH_PYTHON")
    source, _ = made(tmp_path, name)
    folders = []
    for mesh, words in MESHES.items():
        if "ep" in mesh and "moe" not in name and name not in ("mixtral", "deepseek_v3"):
            continue
        if name == "deepseek_v3" and words[:2] == ("--tp", "4"):
            words = ("--tp", "2", *words[2:])  # local layers cut latent attention's down projections
        to = tmp_path / mesh
        # local layers: the Transformer Engine's are built on a GPU alone
        given = ("--vocab-divisor", "4", "--layer-spec", "local")
        good("convert", source, to, "--to", "megatron", *words, *given)
        folders.append(to / "release")
    script = Path(checkpoints.__file__).with_name("mcore_model.py")
    done = subprocess.run(
        [python, script, *folders],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(x.removeprefix("MODEL ")) for x in done.stdout.splitlines() if x.startswith("MODEL ")]
    assert {Path(f["folder"]).parent.name: f["differences"] for f in found} == {f.parent.name: [] for f in folders}
