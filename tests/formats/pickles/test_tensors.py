"""A tensor's opcodes in one step: whatever a pickle holds, it comes to the same as opcode by opcode."""

from __future__ import annotations

import random
import zipfile

import numpy as np
import pytest

from ckptctl.core.errors import CkptError
from ckptctl.formats.pickles import arrays, machine, tensors
from ckptctl.formats.pickles.build import load
from ckptctl.formats.torchfile.read import CALLS
from ckptctl.formats.torchfile.rebuild import Storages
from tests.support.checkpoints import ckpt
from tests.support.saving import arange, torch_save
from tests.support.trees import difference


def pickle_of(file):
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))


def read(data):
    """The tree and the names that were asked for, or the error's code."""
    storages = Storages("x")
    try:
        loaded = load(data, "x", persistent=storages, rebuild=CALLS, finish=arrays.FINISH)
    except CkptError as err:
        return err.code, None, None
    places = {key: (s.numel, s.dtype, s.location) for key, s in storages.by_key.items()}
    return loaded.tree, (loaded.globals, loaded.risky_getattr, loaded.stop), places


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    a = arange(3, 4)
    tree = {"a": a, "view": a[1:], "b": np.array(2, np.float32), "c": arange(5), "d": arange(2, 3, 4, 5), "e": [a, 7]}
    return pickle_of(torch_save(tmp_path_factory.mktemp("t") / "x.pt", tree))


def test_runs_are_taken(small, monkeypatch):
    taken = []
    real = tensors.tensor_at
    monkeypatch.setattr(machine, "tensor_at", lambda *a: taken.append(real(*a)) or taken[-1])
    read(small)
    assert sum(run is not None for run in taken) >= 3
    taken.clear()
    read(pickle_of(ckpt("torch/plain_zip")))
    assert sum(run is not None for run in taken) > 100


def test_every_changed_byte_comes_to_the_same(small, monkeypatch):
    draw = random.Random(7)
    changed = [small]
    for at in range(len(small)):
        news = (draw.randrange(256), small[at] ^ 1, small[(at + 7) % len(small)])
        changed += [small[:at] + bytes([new]) + small[at + 1 :] for new in news]
    quick = [read(data) for data in changed]
    monkeypatch.setattr(machine, "tensor_at", lambda *_: None)
    for data, (tree, names, places) in zip(changed, quick, strict=True):
        slow = read(data)
        assert (names, places) == slow[1:], data
        assert (tree == slow[0]) if names is None else difference(tree, slow[0]) == "", data
