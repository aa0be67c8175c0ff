"""Real folders of ranks' files against the truth of the runs that wrote them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import ckptctl
from ckptctl.core.tensor import Key
from tests.support.checkpoints import ckpt, digest, fixture, truth, truth_config
from tests.support.commands import document, good, refused
from tests.support.format_suite import weights_in
from tests.support.plain import torch_tree

SETS = {
    "torch/verl_fsdp2": ("verl", 2),
    "torch/verl_fsdp2_tp2x2": ("verl", 4),
    "torch/verl_hsdp_2x2": ("verl", 4),
    "torch/verl_fsdp1": ("verl", 2),
    "torch/verl_fsdp1_odd": ("verl", 3),
    "torch/verl_fsdp1_orig": ("verl", 2),
    "torch/fsdp1_local": ("fsdp1", 2),
    "torch/fsdp1_local_odd": ("fsdp1", 3),
    "torch/fsdp1_local_flat": ("fsdp1", 2),
}
KINDS = {"model": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def config(name):
    return [] if "verl" in name else ["--model-config", truth_config(name)]


@pytest.mark.parametrize("name", SETS)
def test_every_tensor_is_the_run_s(name):
    with ckptctl.open(ckpt(name), model_config=truth_config(name)) as view:
        for section, kind in KINDS.items():
            for tensor, want in truth(name)[section].items():
                got = (view[tensor] if kind == "weight" else view.state(tensor, kind)).numpy()
                assert digest("F32", got.shape, np.ascontiguousarray(got).tobytes()) == want, (tensor, kind)
        listed = {n for g in view.checkpoint.optimizer.groups for n in g.params}
        assert listed == set(truth(name)["exp_avg"])
        steps = [view.state(n, "step") for n in listed]
        assert {s.numpy().item() for s in steps} == {3.0}


@pytest.mark.parametrize("name", SETS)
def test_inspect_tells_kind_and_world_size(name):
    found = document("inspect", ckpt(name), *config(name))
    variant, world = SETS[name]
    assert (found["format"], found["variant"], found["layout"]["world_size"]) == ("torch", variant, world)
    assert (found["step"], found["resumable"]) == (3, True)
    assert found["unsupported"] == []
    assert found["warnings"] == []


@pytest.mark.parametrize("name", ["torch/verl_fsdp2_tp2x2", "torch/verl_fsdp1_odd", "torch/fsdp1_local_odd"])
@pytest.mark.parametrize(("to", "result"), [("hf", "out"), ("dcp", "out"), ("torch", "out.pt")])
def test_conversions_hold_the_run_s_weights(name, to, result, tmp_path):
    more = ["--no-optimizer"] if to == "hf" else []
    good("convert", ckpt(name), tmp_path / result, "--to", to, *more, *config(name))
    assert weights_in(tmp_path / result, to) == truth(name)["model"]
    if to == "torch":
        state = torch_tree(tmp_path / result)["optimizer"]["state"]
        for kind in ("exp_avg", "exp_avg_sq"):
            assert {n: entry[kind].truth for n, entry in state.items()} == truth(name)[kind]


def test_flat_parameters_without_a_config_are_shown_and_not_moved(tmp_path):
    for name in ("torch/fsdp1_local", "torch/fsdp1_local_flat"):
        document("inspect", ckpt(name))
        error = refused("convert", ckpt(name), tmp_path / "out", "--to", "torch")
        assert "--model-config" in error["why"], error
    found = document("ls", ckpt("torch/fsdp1_local"))
    assert {t["name"]: t["shape"] for t in found["tensors"]}["model.embed_tokens.weight"] == [131 * 32]


def test_a_config_of_another_model_is_refused(tmp_path):
    settings = json.loads((truth_config("torch/fsdp1_local") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "intermediate_size": 40}))
    for name in ("torch/fsdp1_local", "torch/fsdp1_local_flat"):
        error = refused("inspect", ckpt(name), "--model-config", tmp_path)
        assert error["code"] == "wrapping"


def test_the_random_state_of_each_rank_is_kept():
    with ckptctl.open(ckpt("torch/verl_fsdp2")) as view:
        values = view.values
    assert list(values["rng"]) == ["rank_0", "rank_1"]
    assert set(values["rng"]["rank_1"]) == {"cpu", "numpy", "random"}
    assert values["lr_scheduler"]["last_epoch"] == 3


def test_replicas_are_told_and_the_tokenizer_s_place_is_no_part_of_the_names(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ckpt("torch/verl_hsdp_2x2"), source)
    (source / "huggingface" / "tokenizer.json").write_text("{}")
    with ckptctl.open(source) as view:
        tensor = view.checkpoint.tensors[Key("model.norm.weight")]
    assert (len(tensor.pieces[0]), len(tensor.replicas)) == (2, 1)
    good("convert", source, tmp_path / "out", "--to", "hf", "--no-optimizer")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "huggingface" / "config.json").read_bytes()


# ---- sets that are not whole, or not one ------------------------------------------------------------------------


@pytest.fixture
def verl(tmp_path):
    shutil.copytree(ckpt("torch/verl_fsdp2"), tmp_path / "set")
    return tmp_path / "set"


def test_a_missing_rank(verl):
    (verl / "model_world_size_2_rank_1.pt").unlink()
    assert refused("inspect", verl)["code"] == "rank-missing"


def test_a_missing_rank_of_the_optimizer_alone(verl):
    (verl / "optim_world_size_2_rank_0.pt").unlink()
    error = refused("inspect", verl)
    assert (error["code"], "optim of rank 0" in error["what"]) == ("rank-missing", True)


def test_weights_alone_are_enough(verl):
    for p in [*verl.glob("optim*"), *verl.glob("extra*")]:
        p.unlink()
    found = document("inspect", verl)
    assert (found["kinds"].keys(), found["resumable"]) == ({"weight"}, False)


def test_a_rank_too_many(verl):
    shutil.copy(verl / "model_world_size_2_rank_1.pt", verl / "model_world_size_2_rank_2.pt")
    assert refused("inspect", verl)["code"] == "ranks-mixed"


def test_two_world_sizes(verl):
    shutil.copy(verl / "model_world_size_2_rank_1.pt", verl / "model_world_size_4_rank_1.pt")
    error = refused("inspect", verl)
    assert (error["code"], "world sizes 2, 4" in error["why"]) == ("ranks-mixed", True)


def test_files_with_their_names_exchanged(verl):
    a, b = (verl / f"model_world_size_2_rank_{r}.pt" for r in (0, 1))
    a.rename(verl / "x")
    b.rename(a)
    (verl / "x").rename(b)
    assert refused("inspect", verl)["code"] == "ranks-differ"  # the optimizer's files say otherwise
    for p in verl.glob("optim*"):
        p.unlink()
    assert refused("inspect", verl)["code"] == "ranks-mixed"


def test_one_rank_s_file_under_two_names(verl):
    shutil.copy(verl / "model_world_size_2_rank_1.pt", verl / "model_world_size_2_rank_0.pt")
    for p in verl.glob("optim*"):
        p.unlink()
    assert refused("inspect", verl)["code"] == "ranks-mixed"


def test_a_world_size_that_the_run_s_own_file_contradicts(verl):
    (verl / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 3}')
    assert refused("inspect", verl)["code"] == "ranks-mixed"


def test_one_file_says_that_it_is_one_of_several(tmp_path):
    error = refused("convert", fixture("torch/fsdp1_local") / "ckpt" / "rank0.pt", tmp_path / "out", "--to", "torch")
    assert (error["code"], "2 ranks" in error["what"]) == ("rank-missing", True)
