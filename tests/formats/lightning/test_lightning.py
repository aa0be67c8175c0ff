"""Lightning's files and folders: to the runs' truth, there and back, several modules and optimizers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.checkpoints import SHARED, ckpt, truth
from tests.support.commands import document, good, refused
from tests.support.format_suite import weights_in
from tests.support.plain import torch_tree
from tests.support.saving import adamw, arange, torch_save

REAL = ["torch/lightning_ckpt", "torch/lightning_fsdp2_dir"]


def real(name):
    if name not in REAL[:1] and not (SHARED / name).exists():
        pytest.skip(f"needs {SHARED / name}")
    return ckpt(name)


def saved(path, model, *optimizers, **more):
    """A .ckpt as Lightning lays it out."""
    tree = {"epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.6", "state_dict": model}
    return torch_save(path, {**tree, "optimizer_states": list(optimizers), "lr_schedulers": [], **more})


@pytest.mark.real
@pytest.mark.parametrize("name", REAL)
def test_weights_and_moments_are_the_run_s(name, tmp_path):
    found = document("inspect", real(name))
    assert (found["format"], found["step"], found["state"]["scheduler"]) == ("lightning", 3, "present")
    assert [g["parameters"] for g in found["groups"]] == [16, 5]
    good("convert", real(name), tmp_path / "hf", "--to", "hf", "--no-optimizer")
    assert weights_in(tmp_path / "hf", "hf") == truth(name)["model"]
    good("convert", real(name), tmp_path / "t", "--to", "torch")
    states = torch_tree(tmp_path / "t")["optimizer"]["state"]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {n: e[kind].truth for n, e in states.items()} == truth(name)[kind]


@pytest.mark.real
def test_a_file_is_written_again_as_it_was(tmp_path):
    source = real(REAL[0])
    good("convert", source, tmp_path / "x.ckpt", "--to", "lightning")
    was, now = torch_tree(source), torch_tree(tmp_path / "x.ckpt")
    assert {n: t.data for n, t in now["state_dict"].items()} == {n: t.data for n, t in was["state_dict"].items()}
    assert next(iter(now["state_dict"])) == "net.model.embed_tokens.weight"
    for name in ("loops", "lr_schedulers", "epoch", "global_step", "pytorch-lightning_version", "hyper_parameters"):
        assert now[name] == was[name]
    one, other = now["optimizer_states"][0], was["optimizer_states"][0]
    assert one["param_groups"] == other["param_groups"]
    assert {i: e["exp_avg"].data for i, e in one["state"].items()} == {
        i: e["exp_avg"].data for i, e in other["state"].items()
    }


@pytest.mark.real
def test_a_folder_is_cut_anew_and_written_from_a_file(tmp_path):
    source = real(REAL[1])
    good("reshard", source, tmp_path / "three", "--dp", "3")
    assert (tmp_path / "three" / "meta.pt").read_bytes() == (source / "meta.pt").read_bytes()
    assert document("inspect", tmp_path / "three")["layout"]["world_size"] == 3
    assert document("diff", source, tmp_path / "three", "--optimizer", "--state")["equal"]
    good("convert", real(REAL[0]), tmp_path / "two", "--to", "lightning", "--dp", "2")
    assert document("inspect", tmp_path / "two")["variant"] == "sharded"
    assert document("diff", real(REAL[0]), tmp_path / "two", "--optimizer", "--state")["equal"]
    refused("reshard", real(REAL[0]), tmp_path / "no", "--dp", "2")


def test_the_attribute_of_a_new_file_is_asked_for(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a.w": arange(2)}, "step": 4})
    error = refused("convert", path, tmp_path / "out.ckpt", "--to", "lightning")
    assert (error["code"], "--module-prefix" in error["fix"]) == ("module-prefix", True)
    good("convert", path, tmp_path / "out.ckpt", "--to", "lightning", "--module-prefix", "net.inner")
    made = torch_tree(tmp_path / "out.ckpt")
    assert (list(made["state_dict"]), made["global_step"], made["step"]) == (["net.inner.a.w"], 4, 4)
    done = made["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    assert done == {"ready": 4, "completed": 4}
    good("convert", path, tmp_path / "bare.ckpt", "--to", "lightning", "--module-prefix", "")
    assert list(torch_tree(tmp_path / "bare.ckpt")["state_dict"]) == ["a.w"]


GAN = {"g.w": arange(2, 3), "g.b": arange(3, start=9), "d.w": arange(4, 3, start=20), "d.b": arange(5, start=60)}


def test_two_optimizers_join_and_part_again(tmp_path):
    one = adamw([1, 0], {0: GAN["g.w"], 1: GAN["g.b"]})
    one["param_groups"][0]["params"] = [0, 1]
    two = adamw([0, 1], {0: GAN["d.w"], 1: GAN["d.b"]}, lr=0.5)
    path = saved(tmp_path / "x.ckpt", GAN, one, two)
    found = document("inspect", path)
    assert [(g["parameters"], g["optimizer"]) for g in found["groups"]] == [(2, 0), (2, 1)]
    assert any("--module takes one" in w for w in found["warnings"])
    good("convert", path, tmp_path / "t", "--to", "torch")
    tree = torch_tree(tmp_path / "t")["optimizer"]
    assert [g["params"] for g in tree["param_groups"]] == [["g.w", "g.b"], ["d.w", "d.b"]]
    assert [g["lr"] for g in tree["param_groups"]][1] == 0.5
    good("convert", path, tmp_path / "again.ckpt", "--to", "lightning")
    again = torch_tree(tmp_path / "again.ckpt")["optimizer_states"]
    assert [sorted(o["state"]) for o in again] == [[0, 1], [0, 1]]
    was = torch_tree(path)["optimizer_states"]
    for a, b in zip(again, was, strict=True):
        assert {i: e["exp_avg"].data for i, e in a["state"].items()} == {
            i: e["exp_avg"].data for i, e in b["state"].items()
        }
    good("convert", path, tmp_path / "d", "--to", "torch", "--module", "d")
    only = torch_tree(tmp_path / "d")
    assert (list(only["model"]), only["optimizer"]["param_groups"][0]["params"]) == (["w", "b"], ["w", "b"])
    assert refused("inspect", path, "--module", "x", code=2)["code"] == "usage"
    good("convert", path, tmp_path / "dir", "--to", "lightning", "--dp", "2")
    assert document("diff", path, tmp_path / "dir", "--optimizer")["equal"]


def test_an_attribute_stays_where_it_is_wanted(tmp_path):
    path = saved(tmp_path / "x.ckpt", {"net.a": arange(2)}, adamw([0], {0: arange(2)}))
    assert [t["name"] for t in document("ls", path)["tensors"] if t["kind"] == "weight"] == ["a"]
    kept = document("ls", path, "--module", "")["tensors"]
    assert [t["name"] for t in kept if t["kind"] == "weight"] == ["net.a"]


def test_a_gradient_scaler_and_classes_among_callbacks_are_carried(tmp_path):
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 7}
    path = saved(tmp_path / "x.ckpt", {"net.a": arange(2)}, MixedPrecision=scaler, callbacks={"best": arange()})
    good("convert", path, tmp_path / "y.ckpt", "--to", "lightning")
    made = torch_tree(tmp_path / "y.ckpt")
    assert made["MixedPrecision"] == scaler
    assert made["callbacks"]["best"].data == np.float32(0).tobytes()
