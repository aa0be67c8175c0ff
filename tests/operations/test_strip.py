"""strip: what stays is the run's, bit for bit, and loads; what goes is gone; in place nothing is ever half there."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.support.checkpoints import ckpt, run_torch, truth, truth_config
from tests.support.commands import ckptctl, document, good, refused
from tests.support.format_suite import weights_in
from tests.support.plain import dcp_folder, torch_tree
from tests.support.saving import adamw, arange, hf_save, torch_save

LAYOUTS = [
    "torch/accelerate_fsdp2", "torch/accelerate_fsdp2_full", "torch/dcp_rank_local", "torch/dcp_safetensors",
    "torch/fsdp1_local", "torch/fsdp2_tp2x2_dcp", "torch/lightning_ckpt", "torch/lightning_fsdp2_dir",
    "torch/plain_legacy", "torch/torchtitan_dcp", "torch/trainer", "torch/verl_hsdp_2x2", "hf/qwen2-trainer",
    "megatron/dist_tp1pp2_vpp2", "megatron/qwen2_legacy_tp2pp2_tied",
]  # fmt: skip


def config(name):
    found = truth_config(name)
    return () if found is None else ("--model-config", found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_weights_stay_and_nothing_else_does(name, tmp_path):
    out = tmp_path / "out"
    found = document("strip", ckpt(name), out, *config(name))
    assert found["saved"]["bytes"] == found["saved"]["before_bytes"] - found["saved"]["after_bytes"] > 0
    seen = document("inspect", out, *config(name))
    assert set(seen["kinds"]) <= {"weight", "buffer"}
    assert not seen["resumable"]
    before = document("inspect", ckpt(name), *config(name))
    one_file = before["variant"] in ("fsdp1", "fsdp full") or before["format"] == "trainer"
    assert one_file or seen["layout"] == before["layout"]
    assert seen["format"] == (before["format"] if before["format"] != "trainer" else "hf")
    good("convert", out, tmp_path / "hf", "--to", "hf", *config(name))
    got, want = weights_in(tmp_path / "hf", "hf"), truth(name)["model"]
    assert {n: want[n] for n in got} == got
    assert set(map(repr, want.values())) == set(map(repr, got.values()))  # a tied head has one name less


@pytest.mark.parametrize("name", ["deepspeed/zero1-dp2-bf16", "deepspeed/zero3-dp2-bf16-qwen2-tied"])
def test_deepspeed_keeps_what_it_loads_weights_from(name, tmp_path):
    good("strip", ckpt(name), tmp_path / "out")
    kinds = document("inspect", tmp_path / "out")["kinds"]
    assert set(kinds) == ({"weight"} if "zero1" in name else {"master"})
    assert document("diff", ckpt(name), tmp_path / "out")["equal"]


def run_file(folder, **more):
    model = {"a": arange(3, 2), "b": arange(4)}
    tree = {
        "model_state_dict": model,
        "optimizer": adamw(list(model), model),
        "scheduler": {"last_epoch": 2},
        "epoch": 1,
    }
    return torch_save(folder / "run.pt", {**tree, "note": "mine", **more})


def test_a_torch_file_keeps_its_own_key_and_plain_values(tmp_path):
    source = run_file(tmp_path, replay=arange(9))
    good("strip", source, tmp_path / "out.pt")
    tree = torch_tree(tmp_path / "out.pt")
    assert list(tree) == ["model_state_dict", "note"]
    assert tree["model_state_dict"]["a"].truth == torch_tree(source)["model_state_dict"]["a"].truth


def test_parts_by_name(tmp_path):
    source = run_file(tmp_path)
    good("strip", source, tmp_path / "keep.pt", "--keep", "optimizer", "--keep", "scheduler")
    assert set(torch_tree(tmp_path / "keep.pt")) == {"model_state_dict", "optimizer", "scheduler", "note"}
    good("strip", source, tmp_path / "drop.pt", "--drop", "scheduler")
    assert set(torch_tree(tmp_path / "drop.pt")) == {"model_state_dict", "optimizer", "epoch", "note"}
    assert document("diff", source, tmp_path / "drop.pt", "--optimizer")["equal"]


def test_tensors_by_glob_go_with_their_states(tmp_path):
    source = run_file(tmp_path)
    good("strip", source, tmp_path / "drop.pt", "--drop", "b*")
    tree = torch_tree(tmp_path / "drop.pt")
    assert list(tree["model_state_dict"]) == ["a"]
    assert list(tree["optimizer"]["state"]) == ["a"]
    assert [g["params"] for g in tree["optimizer"]["param_groups"]] == [["a"]]
    good("strip", source, tmp_path / "keep.pt", "--keep", "b")
    assert list(torch_tree(tmp_path / "keep.pt")["model_state_dict"]) == ["b"]


def test_items_of_a_dcp_keep_their_names(tmp_path):
    good("strip", ckpt("torch/fsdp2_dp4_dcp"), tmp_path / "out")
    before, after = dcp_folder(ckpt("torch/fsdp2_dp4_dcp")), dcp_folder(tmp_path / "out")
    assert set(after.items) == {n for n in before.items if n.startswith("model.")}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--keep", "rng", "--drop", "rng"), "usage"),
        (("--drop", "exp_avg"), "usage"),
        (("--drop", "weights"), "usage"),
        (("--drop", "no.such.*"), "usage"),
    ],
)
def test_what_makes_no_sense_is_refused(words, code, tmp_path):
    assert refused("strip", run_file(tmp_path), tmp_path / "out", *words, code=2)["code"] == code
    assert not (tmp_path / "out").exists()


def test_in_place_wants_a_yes_and_replaces_the_source(tmp_path):
    source = run_file(tmp_path)
    before = source.read_bytes()
    assert refused("strip", source, "--in-place", code=2)["code"] == "needs-yes"
    assert refused("strip", source, tmp_path / "x", "--in-place", "--yes", code=2)["code"] == "usage"
    good("strip", source, "--in-place", "--dry-run")
    assert source.read_bytes() == before
    want = torch_tree(source)["model_state_dict"]["a"].truth
    good("strip", source, "--in-place", "--yes")
    tree = torch_tree(source)
    assert (list(tree), tree["model_state_dict"]["a"].truth) == (["model_state_dict", "note"], want)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("name", ["torch/verl_fsdp2", "torch/fsdp2_dp2_dcp", "megatron/legacy_tp2pp2_distopt_dp2"])
def test_folders_in_place(name, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ckpt(name), folder)
    (folder / "truth").exists() and shutil.rmtree(folder / "truth")
    good("strip", folder, "--in-place", "--yes", *config(name))
    assert set(document("inspect", folder, *config(name))["kinds"]) == {"weight"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert document("diff", folder, ckpt(name), *config(name))["equal"]


def test_in_place_lets_nobody_in_who_was_kept_out(tmp_path):
    folder = shutil.copytree(ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    folder.chmod(0o700)
    good("strip", folder, "--in-place", "--yes")
    assert folder.stat().st_mode & 0o777 == 0o700
    file = torch_save(tmp_path / "x.pt", {"model": {"a": arange(2, 2)}, "step": 3})
    file.chmod(0o600)
    good("strip", file, "--in-place", "--yes")
    assert file.stat().st_mode & 0o777 == 0o600


def test_in_place_loses_no_file_of_another(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ckpt("torch/fsdp2_dp2_dcp"), folder)
    (folder / "notes.txt").write_text("mine")
    before = sorted(p.name for p in folder.iterdir())
    assert "notes.txt" in refused("strip", folder, "--in-place", "--yes")["why"]
    assert sorted(p.name for p in folder.iterdir()) == before


def test_a_folder_of_weights_is_carried_as_it_is(tmp_path):
    hf_save(tmp_path / "hf", {"w": arange(3)}, {"model_type": "llama"})
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    assert document("strip", tmp_path / "hf", tmp_path / "out")["saved"]["bytes"] == 0
    for file in (tmp_path / "hf").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_averages_and_held_tensors_go_by_default(tmp_path):
    model = {"w": arange(4)}
    torch_save(
        tmp_path / "a.pt", {"model": model, "ema": {"w": arange(4, start=3)}, "big": np.zeros(1 << 20, np.float32)}
    )
    found = document("strip", tmp_path / "a.pt", tmp_path / "b.pt")
    assert {"ema", "other"} <= {x["part"] for x in found["fidelity"] if x["fate"] == "dropped"}
    assert list(torch_tree(tmp_path / "b.pt")) == ["model"]
    good("strip", tmp_path / "a.pt", tmp_path / "c.pt", "--keep", "averages")
    assert set(torch_tree(tmp_path / "c.pt")) == {"model", "ema"}


def test_real_torch_loads_what_is_left(tmp_path):
    good("strip", ckpt("torch/plain_zip"), tmp_path / "w.pt")
    script = "import sys, torch; t = torch.load(sys.argv[1], weights_only=True); print(len(t['model']))"
    assert int(run_torch(script, tmp_path / "w.pt")) == len(truth("torch/plain_zip")["model"])


def test_help_names_both_ways():
    assert "--in-place" in ckptctl("strip", "--help").out


@pytest.mark.parametrize("name", ["hf/qwen2-trainer", "torch/fsdp2_dp2_dcp", "deepspeed/zero3-dp2-bf16-qwen2-tied"])
def test_a_glob_that_takes_everything_is_refused(name, tmp_path):
    error = refused("strip", ckpt(name), tmp_path / "out", "--drop", "*", code=2)
    assert error["what"] == "nothing would be left of the weights"
    assert error["why"] == "'*'"
    assert not (tmp_path / "out").exists()


def test_a_linked_folder_inside_is_not_lost_in_place(tmp_path):
    folder = shutil.copytree(ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "run", ignore=shutil.ignore_patterns("truth*"))
    (tmp_path / "notes").mkdir()
    (folder / "notes").symlink_to(tmp_path / "notes")
    error = refused("strip", folder, "--in-place", "--yes")
    assert (error["code"], error["why"]) == ("in-place", "notes")
    assert (folder / "notes").is_symlink()
