"""Tensors that several ranks hold: differing copies are an error until somebody says whose are taken."""

from __future__ import annotations

import shutil
import zipfile

import numpy as np
import pytest

import ckptctl
from ckptctl.core.errors import CkptError
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.torchfile.read import open_torch
from tests.formats.dcp.test_variants import rank_local
from tests.formats.ranks.test_sets import hybrid
from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder
from tests.support.saving import Strided, arange
from tests.support.slices import dtensor, line, replicate, save_ranks


def values(path, name="w", **how):
    with ckptctl.open(path, **how) as view:
        return view[name].numpy().copy(), list(view.checkpoint.warnings)


def test_copies_of_a_mesh(tmp_path):
    array = arange(5, 2)
    other = array.copy()
    other[4, 1] = -1  # rank 3's shard of the second copy
    folder = save_ranks(tmp_path / "set", 4, hybrid(array, other))
    error = refused("convert", folder, tmp_path / "out", "--to", "torch")
    assert error["code"] == "replica-mismatch"
    assert "--replica" in error["fix"]
    for which, want in (("first", array), ("last", other)):
        got, warnings = values(folder, replica=which)
        assert got.tobytes() == want.tobytes()
        assert any(f"the {which} rank's copy is taken" in w for w in warnings)
        done = good("convert", folder, tmp_path / which, "--to", "dcp", "--replica", which, "--json").json
        assert any("--replica" in w for w in done["warnings"])
        assert values(tmp_path / which)[0].tobytes() == want.tobytes()
    same = save_ranks(tmp_path / "same", 4, hybrid(array))
    assert values(same, replica="last")[0].tobytes() == array.tobytes()


def large(tmp_path, last):
    """Two ranks' copies of 2 MiB, views of larger storages: no checksum tells anything of them."""
    array = arange(1024, 512)
    other = array.copy()
    other[1000, 3] = last

    def tree(r):
        whole = np.concatenate([other if r else array, array[:2]])
        whole[-1, 0] = r
        view = Strided(whole, 0, (1024, 512), (512, 1))
        return {"w": dtensor(view, (1024, 512), [replicate()], line(r, 2), dtype="float32")}

    return save_ranks(tmp_path / "set", 2, tree), array, other


def test_large_copies_are_compared_where_that_is_asked_for(tmp_path):
    folder, array, other = large(tmp_path, -5)
    got, warnings = values(folder)
    assert got.tobytes() == array.tobytes()
    assert any("--verify-replicas" in w for w in warnings)
    with pytest.raises(CkptError) as caught:
        values(folder, verify_replicas=True)
    assert caught.value.code == "replica-mismatch"
    got, warnings = values(folder, verify_replicas=True, replica="last")
    assert got.tobytes() == other.tobytes()
    assert any("1 differ" in w for w in warnings)
    assert not any("not compared" in w for w in warnings)


def test_large_copies_that_agree_are_told(tmp_path):
    folder, array, _ = large(tmp_path, float(arange(1024, 512)[1000, 3]))
    got, warnings = values(folder, verify_replicas=True)
    assert got.tobytes() == array.tobytes()
    assert any("all copies of 1 tensors were compared, 0 differ" in w for w in warnings)
    found = document("inspect", folder, "--verify-replicas")
    assert any("0 differ" in w for w in found["warnings"])


def test_plain_tensors_of_ranks(tmp_path):
    def tree(r):
        step = np.array(3.0 + r, np.float32)
        return {"w": dtensor(arange(4, 2), (4, 2), [replicate()], line(r, 2)), "n": step}

    folder = save_ranks(tmp_path / "set", 2, tree)
    with pytest.raises(CkptError):
        values(folder)
    assert values(folder, "n", replica="last")[0] == 4.0


@pytest.mark.parametrize("n", [3, 300_000])
def test_copies_of_ranks_that_saved_by_themselves(n, tmp_path):
    a, b = arange(n), arange(n, start=7)
    path = rank_local(tmp_path / "run", [{"w": (a, 0), "e": ("a", 0)}, {"w": (b, 0), "e": ("b", 0)}])
    assert "--replica" in refused("convert", path, tmp_path / "out", "--to", "torch")["fix"]
    for which, want in (("first", a), ("last", b)):
        good("convert", path, tmp_path / which, "--to", "dcp", "--replica", which)
        assert values(tmp_path / which)[0].tobytes() == want.tobytes()
        assert dcp_folder(tmp_path / which).items["model.e"] == ("a" if which == "first" else "b")


def changed(file, name, array):
    """Rewrite a torch file with other bytes in the storage of the tensor called name; its checksum is right."""
    with FileBytes(file) as reader:
        opened = open_torch(reader)
        key = opened.root["model"][name].storage.key
        root = opened.directory.root
    with zipfile.ZipFile(file) as old:
        records = {i.filename: old.read(i) for i in old.infolist()}
    assert len(records[f"{root}/data/{key}"]) == array.nbytes
    records[f"{root}/data/{key}"] = array.tobytes()
    with zipfile.ZipFile(file, "w") as new:
        for path, data in records.items():
            new.writestr(path, data)


def test_norms_of_tensor_parallel_ranks(tmp_path):
    name = "megatron/qwen2_legacy_tp2pp2_tied"
    shutil.copytree(ckpt(name), tmp_path / "run")
    config = truth_config(name)
    norm = "decoder.layers.1.input_layernorm.weight"
    hub = "model.layers.1.input_layernorm.weight"
    before, _ = values(tmp_path / "run", norm, model_config=config)
    other = before.copy()
    other.reshape(-1)[3] = 77
    (file,) = sorted((tmp_path / "run").rglob("mp_rank_01_000/model_optim_rng.pt"))
    changed(file, norm, other)
    error = refused(
        "convert", tmp_path / "run", tmp_path / "o", "--to", "hf", "--no-optimizer", "--model-config", config
    )
    assert error["code"] == "replicas-differ"
    assert "--replica" in error["fix"]
    _, warnings = values(tmp_path / "run", norm, model_config=config, replica="first", verify_replicas=True)
    assert any(w.startswith("--verify-replicas: ") and "1 tensors differ" in w for w in warnings)
    for which, want in (("first", before), ("last", other)):
        got, warnings = values(tmp_path / "run", norm, model_config=config, replica=which)
        assert got.tobytes() == want.tobytes()
        assert any(f"the {which} rank's copy is taken" in w for w in warnings)
        good(
            *("convert", tmp_path / "run", tmp_path / which, "--to", "hf", "--no-optimizer", "--model-config", config),
            *("--replica", which),
        )
        assert values(tmp_path / which, hub)[0].tobytes() == want.tobytes()


def test_a_choice_that_is_none_is_wrong_usage(tmp_path):
    folder = save_ranks(tmp_path / "set", 4, hybrid(arange(5, 2)))
    for line_ in (
        ["inspect", folder],
        ["validate", folder],
        ["diff", folder, folder],
        ["strip", folder, tmp_path / "o"],
    ):
        error = refused(*line_, "--replica", "third", code=2)
        assert "first" in error["fix"]


def test_where_nothing_has_copies_that_is_said():
    _, warnings = values(ckpt("hf/llama-single"), "lm_head.weight", verify_replicas=True)
    assert any("there are no copies but" in w for w in warnings)


def test_every_command_that_reads_takes_the_choice(tmp_path):
    array = arange(5, 2)
    other = array.copy()
    other[4, 1] = -1
    folder = save_ranks(tmp_path / "set", 4, hybrid(array, other))
    for line_ in (["inspect", folder], ["ls", folder], ["show", folder, "w"], ["diff", folder, folder]):
        assert refused(*line_)["code"] == "replica-mismatch"
        good(*line_, "--replica", "last")
