"""The tests beside this one need torch: where this Python has none, they are run by one that has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.checkpoints import ROOT, torch_python


def test_these_tests_hold_in_a_python_that_has_torch():
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("this Python has torch: they are run here")
    python = torch_python()
    if python is None:
        pytest.skip("needs a Python with torch: install it, or name one in CKPTCTL_TORCH_PYTHON")
    paths = [str(ROOT), sysconfig.get_paths()["purelib"], os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    ready = subprocess.run(
        [python, "-c", "import numpy, torch, transformers, pytest, ml_dtypes"], env=env, capture_output=True
    )
    if ready.returncode:
        pytest.skip("the Python with torch is of another version, or has no Transformers")
    here = Path(__file__).parent
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here), "--ignore", __file__]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
