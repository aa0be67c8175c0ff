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


@pytest.fixture(scope="module")
def real():
    """Answers, for iterations' folders, how each differs from the real models: one process for all of them."""
    python = torch_python()
    found = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ('torch', 'megatron.core'))))"
    if python is None or subprocess.run([python, "-c", found], capture_output=True).returncode:
        pytest.skip("needs a Python with torch and megatron-core in CKPTCTL_TORCH_PYTHON")
    script = Path(checkpoints.__file__).with_name("mcore_model.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([python, script], env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as process:

        def differences(folder):
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            line = next((x for x in process.stdout if x.startswith("MODEL ")), "")
            assert line, "the process ended: its error is above"
            answer = json.loads(line.removeprefix("MODEL "))
            assert answer["folder"] == str(folder)
            return answer["differences"]

        yield differences
        process.stdin.close()


@pytest.mark.real
@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_real_models(name, real, tmp_path):
    source, _ = made(tmp_path, name)
    for mesh, words in MESHES.items():
        if "ep" in mesh and "moe" not in name and name not in ("mixtral", "deepseek_v3"):
            continue
        if name == "deepseek_v3" and words[:2] == ("--tp", "4"):
            words = ("--tp", "2", *words[2:])  # local layers cut latent attention's down projections
        # local layers: the Transformer Engine's are built on a GPU alone
        given = ("--vocab-divisor", "4", "--layer-spec", "local")
        good("convert", source, tmp_path / mesh, "--to", "megatron", *words, *given)
        assert real(tmp_path / mesh / "release") == [], mesh
