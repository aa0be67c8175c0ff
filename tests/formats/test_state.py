"""State dicts as scripts and wrappers leave them: names, averages, optimizers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder, nested, torch_tree
from tests.support.saving import adamw, arange, torch_save


def names(path):
    return [t["name"] for t in document("ls", path)["tensors"] if t["kind"] == "weight"]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (["module.a", "module.b.w"], ["a", "b.w"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        (["_orig_mod.a", "_orig_mod.b"], ["a", "b"]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"]),
        (["layers.0._checkpoint_wrapped_module.w", "head.w"], ["layers.0.w", "head.w"]),
        (["_fsdp_wrapped_module.l.0._fsdp_wrapped_module._orig_mod.w", "_fsdp_wrapped_module.n"], ["l.0.w", "n"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["module", "module.b"], ["module", "module.b"]),
        (["n_averaged", "module.a"], ["n_averaged", "module.a"]),
        (["my_orig_mod.a", "x_orig_mod"], ["my_orig_mod.a", "x_orig_mod"]),
        (["_fsdp_wrapped_module._flat_param", "a"], ["_fsdp_wrapped_module._flat_param", "a"]),
    ],
)
def test_words_of_wrappers_leave_names_where_they_are_wrappers(given, want, tmp_path):
    model = {n: arange(2, start=i) for i, n in enumerate(given)}
    tree = {"model": model, "optimizer": adamw(given, model)}
    path = torch_save(tmp_path / "x.pt", tree)
    assert names(path) == want
    good("convert", path, tmp_path / "t", "--to", "torch")
    made = torch_tree(tmp_path / "t")
    assert {n: t.data for n, t in made["model"].items()} == {
        w: model[g].tobytes() for g, w in zip(given, want, strict=True)
    }
    assert made["optimizer"]["param_groups"][0]["params"] == want
    assert sorted(made["optimizer"]["state"]) == sorted(want)


def test_names_that_would_meet_are_refused(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"a._orig_mod.w": arange(1), "a.w": arange(2)})
    assert refused("inspect", path)["code"] == "duplicate-name"


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_averaged_weights_are_tensors_of_their_own_kind(to, tmp_path):
    model, averaged = {"a": arange(2, 3), "b": arange(3)}, {"module.a": arange(2, 3, start=50), "module.b": arange(3)}
    tree = {"model": model, "optimizer": adamw(["a", "b"], model), "ema_state_dict": averaged}
    path = torch_save(tmp_path / "x.pt", tree)
    assert document("inspect", path)["kinds"]["ema"]["tensors"] == 2
    assert refused("convert", path, tmp_path / "out", "--to", "hf")["code"] == "state-not-carried"
    good("convert", path, tmp_path / "out", "--to", to)
    made = torch_tree(tmp_path / "out") if to == "torch" else nested(dcp_folder(tmp_path / "out"))
    assert {n: t.data for n, t in made["ema"].items()} == {n[7:]: v.tobytes() for n, v in averaged.items()}
    optimizer = made["optimizer" if to == "torch" else "optim"]
    assert sorted(optimizer["state"]["a"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert document("diff", path, tmp_path / "out", "--optimizer")["equal"]
    assert document("convert", path, tmp_path / "n", "--to", "torch", "--only", "a", "--trainable-only")


def test_an_average_of_other_names_or_shapes_stays_a_value(tmp_path):
    for averaged in ({"c": arange(2)}, {"a": arange(3)}, {"a": arange(2), "n": 3}):
        path = torch_save(tmp_path / "x.pt", {"model": {"a": arange(2)}, "ema": averaged})
        assert "ema" not in document("inspect", path)["kinds"]
        good("convert", path, tmp_path / "out", "--to", "torch", "--overwrite")
        assert list(torch_tree(tmp_path / "out")["ema"]) == list(averaged)


def test_momentum_that_is_not_there_yet_stays_none(tmp_path):
    model = {"a": arange(2), "b": arange(3)}
    state = {0: {"momentum_buffer": arange(2, start=5)}, 1: {"momentum_buffer": None}}
    groups = [{"lr": 0.1, "momentum": 0.9, "params": [0, 1]}]
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": {"state": state, "param_groups": groups}})
    for to, key in (("torch", "optimizer"), ("dcp", "optim")):
        good("convert", path, tmp_path / to, "--to", to)
        made = torch_tree(tmp_path / to) if to == "torch" else nested(dcp_folder(tmp_path / to))
        got = made[key]["state"]
        assert got["a"]["momentum_buffer"].data == np.array([5, 6], np.float32).tobytes()
        assert got["b"]["momentum_buffer"] is None
        assert made[key]["param_groups"][0] == {"lr": 0.1, "momentum": 0.9, "params": ["a", "b"]}


def test_a_parameter_in_two_optimizers_is_named(tmp_path):
    model = {"a": arange(2), "b": arange(3)}
    both = [adamw(["a"], {"a": model["a"]}), adamw(["b", "a"], model)]
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizers": both})
    assert "a is in two optimizers" in refused("convert", path, tmp_path / "out", "--to", "torch")["what"]
