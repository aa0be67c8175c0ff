"""Accelerate's folders: to the runs' truth, there and back, several models."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from ckptctl.core.values import Global, Record
from tests.support.checkpoints import ckpt, truth
from tests.support.commands import document, good, refused
from tests.support.format_suite import tree_bytes, weights_in
from tests.support.plain import torch_tree
from tests.support.saving import adamw, arange, torch_save

SHARDED, FULL = "torch/accelerate_fsdp2", "torch/accelerate_fsdp2_full"


@pytest.mark.parametrize("name", [SHARDED, FULL])
def test_weights_and_moments_are_the_run_s(name, tmp_path):
    found = document("inspect", ckpt(name))
    assert (found["format"], found["state"]["scheduler"], found["state"]["rng"]) == ("accelerate", "present", "present")
    assert found["step"] == 3
    good("convert", ckpt(name), tmp_path / "hf", "--to", "hf", "--no-optimizer")
    assert weights_in(tmp_path / "hf", "hf") == truth(name)["model"]
    good("convert", ckpt(name), tmp_path / "t", "--to", "torch")
    states = torch_tree(tmp_path / "t")["optimizer"]["state"]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {n: e[kind].truth for n, e in states.items()} == truth(name)[kind]


@pytest.mark.parametrize("name", [SHARDED, FULL])
def test_it_is_written_and_read_again(name, tmp_path):
    good("convert", ckpt(name), tmp_path / "two", "--to", "accelerate", "--dp", "2")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
        "optimizer_0", "pytorch_model_fsdp_0", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin",
    ]  # fmt: skip
    assert document("diff", ckpt(name), tmp_path / "two", "--optimizer", "--state")["equal"]


def test_reshard_keeps_names_and_other_files(tmp_path):
    report = document("reshard", ckpt(SHARDED), tmp_path / "three", "--dp", "3")
    assert {"part": "random state", "fate": "dropped"}.items() <= report["fidelity"][-1].items()
    assert (tmp_path / "three" / "scheduler.bin").read_bytes() == (ckpt(SHARDED) / "scheduler.bin").read_bytes()
    assert document("diff", ckpt(SHARDED), tmp_path / "three", "--optimizer")["equal"]
    good("reshard", tmp_path / "three", tmp_path / "two", "--dp", "2")
    good("reshard", ckpt(SHARDED), tmp_path / "same")
    for part in ("optimizer_0", "pytorch_model_fsdp_0"):
        assert tree_bytes(tmp_path / "two" / part) == tree_bytes(tmp_path / "same" / part)
    assert refused("reshard", ckpt(FULL), tmp_path / "no", "--dp", "2")["code"] == "unsupported"


def plain(folder, *models):
    folder.mkdir()
    for i, model in enumerate(models):
        ending = f"_{i}" if i else ""
        torch_save(folder / f"pytorch_model{ending}.bin", model)
        names = list(model)
        torch_save(folder / f"optimizer{ending}.bin", adamw(list(range(len(names))), dict(enumerate(model.values()))))
        torch_save(folder / f"scheduler{ending}.bin", {"last_epoch": i})
    torch_save(folder / "random_states_0.pkl", {"step": 5, "torch_manual_seed": np.arange(8, dtype=np.uint8)})
    torch_save(folder / "custom_checkpoint_0.pkl", {"mine": arange(2)})
    torch_save(folder / "scaler.pt", {"scale": 2.0})
    return folder


def test_a_folder_without_fsdp_keeps_every_part(tmp_path):
    model = {"a.w": arange(2, 3), "a.b": arange(3)}
    path = plain(tmp_path / "run", model)
    good("convert", path, tmp_path / "out", "--to", "accelerate")
    for name in ("scheduler.bin", "scaler.pt"):
        assert torch_tree(tmp_path / "out" / name) == torch_tree(path / name)
    assert torch_tree(tmp_path / "out" / "custom_checkpoint_0.pkl")["mine"].data == arange(2).tobytes()
    assert torch_tree(tmp_path / "out" / "random_states_0.pkl")["step"] == 5
    assert document("diff", path, tmp_path / "out", "--optimizer", "--state")["equal"]


def test_an_optimizer_beside_weights_is_never_passed_over(tmp_path):
    path = plain(tmp_path / "run", {"a.w": arange(2, 3)})
    (path / "random_states_0.pkl").unlink()
    assert document("inspect", path)["format"] == "accelerate"
    assert refused("convert", path, tmp_path / "hf", "--to", "hf")["code"] == "state-not-carried"
    good("convert", path, tmp_path / "t", "--to", "torch")
    assert sorted(torch_tree(tmp_path / "t")["optimizer"]["state"]["a.w"]) == ["exp_avg", "exp_avg_sq", "step"]


def test_two_models_stand_side_by_side_and_one_can_be_taken(tmp_path):
    one, two = {"w": arange(2, 3)}, {"w": arange(4, start=9), "v": arange(1)}
    path = plain(tmp_path / "run", one, two)
    names = [t["name"] for t in document("ls", path, "--kind", "weight")["tensors"]]
    assert names == ["model_0.w", "model_1.w", "model_1.v"]
    assert [g["optimizer"] for g in document("inspect", path)["groups"]] == [0, 1]
    error = refused("convert", path, tmp_path / "hf", "--to", "hf", "--no-optimizer")
    assert (error["code"], "--module" in error["fix"]) == ("several-models", True)
    good("convert", path, tmp_path / "hf", "--to", "hf", "--no-optimizer", "--module", "model_1")
    assert sorted(weights_in(tmp_path / "hf", "hf")) == ["v", "w"]
    refused("convert", path, tmp_path / "a", "--to", "accelerate")
    good("convert", path, tmp_path / "t", "--to", "torch")
    assert [g["params"] for g in torch_tree(tmp_path / "t")["optimizer"]["param_groups"]] == [
        ["model_0.w"], ["model_1.w", "model_1.v"],
    ]  # fmt: skip


def test_values_without_a_place_are_kept_beside(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a": arange(2)}, "ema": {"a": arange(2, start=3)}, "step": 9})
    good("convert", path, tmp_path / "out", "--to", "accelerate")
    kept = torch_tree(tmp_path / "out" / "other_values.bin")
    assert (kept["step"], kept["ema"]["a"].data) == (9, arange(2, start=3).tobytes())


def test_files_of_single_ranks_are_refused(tmp_path):
    torch_save(tmp_path / "pytorch_model_fsdp_0_rank0.bin", {"a": arange(2)})
    assert refused("inspect", tmp_path, code=3)["code"] == "unsupported"


def optimizer_folder(tmp_path, **more):
    """A folder with one model and its optimizer, which has more entries beside state and param_groups."""
    path = plain(tmp_path / "run", {"a.w": arange(2, 3), "a.b": arange(3)})
    torch_save(path / "optimizer.bin", {**adamw([0, 1], {0: arange(2, 3), 1: arange(3)}), **more})
    return path


def test_groups_of_flat_keys_are_said_to_be_put_together(tmp_path):
    source = ckpt("torch/fsdp2_dp2_flatoptim_dcp")
    shutil.copytree(source, tmp_path / "run" / "optimizer_0")

    def groups(path, out):
        lines = document("convert", path, tmp_path / out, "--to", "torch")["fidelity"]
        return next(line["detail"] for line in lines if line["part"] == "param groups")

    told = groups(source, "a")
    assert "put together by equal settings" in told
    assert groups(tmp_path / "run", "b") == told


def test_slices_of_one_rank_in_an_optimizer_s_file_are_refused(tmp_path):
    verl = ckpt("torch/verl_fsdp2")
    shapes = {t["name"]: t["shape"] for t in document("ls", verl, "--kind", "weight")["tensors"]}
    torch_save(tmp_path / "pytorch_model.bin", {n: np.zeros(shape, np.float32) for n, shape in shapes.items()})
    shutil.copy(verl / "optim_world_size_2_rank_0.pt", tmp_path / "optimizer.bin")
    error = refused("inspect", tmp_path)
    assert ("DTensor" in error["what"], error["where"]) == (True, "optimizer.bin")


def test_what_stands_beside_an_optimizer_s_state_is_carried_tensors_too(tmp_path):
    path = optimizer_folder(tmp_path, extra={"t": arange(3, start=7), "n": 4})
    good("convert", path, tmp_path / "t", "--to", "torch")
    extra = torch_tree(tmp_path / "t")["optimizer"]["extra"]
    assert (extra["t"].data, extra["n"]) == (arange(3, start=7).tobytes(), 4)


def test_several_optimizers_with_entries_of_their_own_are_refused(tmp_path):
    path = plain(tmp_path / "run", {"w": arange(2, 3)}, {"v": arange(1)})
    torch_save(path / "optimizer_1.bin", {**adamw([0], {0: arange(1)}), "extra": 1})
    assert "extra" in refused("inspect", path)["what"]


def test_names_that_no_checkpoint_holds_are_told_of_an_optimizer_s_file(tmp_path):
    path = optimizer_folder(tmp_path, extra=Record(Global("my.module", "Thing"), ()))
    assert "my.module.Thing" in document("inspect", path)["unknown_globals"]
