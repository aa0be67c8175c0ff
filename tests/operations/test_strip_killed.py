"""strip --in-place under kill -9: at any moment the old or the new stands there, whole; a second run ends the job."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from ckptctl.operations import Running, strip
from tests.support.checkpoints import ckpt
from tests.support.saving import adamw, arange, torch_save

CALLS = ("pwrite", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "link", "copy_file_range", "open")
"""What changes a disk, and some that do not: a kill before each of them."""


def content(path):
    """Every file at a path, by name, with its digest."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(f.relative_to(path.parent)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def in_a_child(work):
    """Runs work in a child process; its exit status. None where a signal ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def stripped(path, at=None, counted=None):
    """Strips path in place; at: killed before that call to the system. counted gets the number of calls."""
    seen = 0

    def watched(real):
        def call(*args, **kwargs):
            nonlocal seen
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))
    strip(path, None, in_place=True, yes=True, running=Running())
    if counted is not None:
        counted.write_text(str(seen))


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A run file with training state."""
    model = {f"l{i}.w": arange(40, 30) for i in range(4)}
    tree = {"model": model, "optimizer": adamw(list(model), model), "step": 3}
    return torch_save(tmp_path_factory.mktemp("run") / "run.pt", tree)


def copied(source, folder):
    """A copy, alone in a folder of its own."""
    folder.mkdir(parents=True)
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "run"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_before_any_call_the_old_or_the_new_is_there(kind, run_file, tmp_path):
    source = run_file if kind == "file" else ckpt("torch/fsdp2_dp2_dcp")
    path = copied(source, tmp_path / "whole")
    old = content(path)
    assert in_a_child(lambda: stripped(path, counted=tmp_path / "calls")) == 0
    new = content(path)
    assert new != old
    calls = int((tmp_path / "calls").read_text())
    points = sorted({*random.Random(5).sample(range(calls), 8), calls - 4, calls - 1})
    saw = set()
    for at in points:
        path = copied(source, tmp_path / str(at))
        assert in_a_child(lambda path=path, at=at: stripped(path, at=at)) is None
        found = content(path)
        assert found in (old, new), f"killed before call {at} of {calls}"
        saw.add(found == new)
        if found == old:  # what the first run left is no hindrance, and goes
            assert in_a_child(lambda path=path: stripped(path)) == 0
            assert content(path) == new
            assert [p.name for p in path.parent.iterdir()] == [path.name]
        shutil.rmtree(path.parent)
    assert saw == {False, True}


def test_killed_at_random_moments(tmp_path):
    source = ckpt("torch/fsdp2_dp2_dcp")
    path = copied(source, tmp_path / "whole")
    old = content(path)
    began = time.monotonic()
    assert in_a_child(lambda: stripped(path)) == 0
    took = time.monotonic() - began
    new, rng = content(path), random.Random(7)
    for number in range(5):
        path = copied(source, tmp_path / str(number))
        pid = os.fork()
        if not pid:
            try:
                stripped(path)
            finally:
                os._exit(0)
        time.sleep(rng.uniform(0, took))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert content(path) in (old, new)
        shutil.rmtree(path.parent)
