"""Weights and their masters in a result: each value once, and never a weight that is not its master."""

import numpy as np
import pytest

import ckptctl
from tests.formats.deepspeed.test_read import config_of, float32, said, source
from tests.support.commands import document, good, refused
from tests.support.saving import adamw, arange, torch_save

ZERO1, ZERO3 = "deepspeed/zero1-dp2-bf16", "deepspeed/zero3-dp2-bf16-qwen2-tied"


def kinds_of(path):
    return {k: v["tensors"] for k, v in document("inspect", path)["kinds"].items()}


@pytest.mark.real
@pytest.mark.parametrize("to", ["torch", "dcp", "accelerate"])
@pytest.mark.parametrize(
    ("name", "words"),
    [(ZERO1, ["--weights", "master"]), (ZERO3, ["--weights", "master"]), (ZERO3, ["--dtype", "float32"])],
)
def test_masters_that_are_the_weights_are_written_once(name, words, to, tmp_path):
    report = document("convert", source(name), tmp_path / "out", "--to", to, *words)
    assert "master" not in kinds_of(tmp_path / "out")
    with ckptctl.open(tmp_path / "out") as view:
        for n, t in said(name, "model").items():  # the run's own masters
            assert float32(view.state(view.checkpoint.ties.get(n, n), "weight")) == t
    assert [
        (line["fate"], "they are the weights" in line["detail"])
        for line in report["fidelity"]
        if line["part"] == "master"
    ] == [("carried", True)]


@pytest.mark.real
@pytest.mark.parametrize("words", [["--weights", "master", "--dtype", "bfloat16"], ["--dtype", "bfloat16"], []])
def test_masters_beside_rounded_weights_stay(words, tmp_path):
    good("convert", source(ZERO1), tmp_path / "out", "--to", "torch", *words)
    there = kinds_of(tmp_path / "out")
    assert there["master"] == there["weight"]


TARGETS = [
    ["deepspeed", "--zero-stage", "1"],
    ["deepspeed", "--zero-stage", "3"],
    ["deepspeed", "--universal"],
    ["megatron", "--megatron-format", "torch"],
    ["megatron", "--megatron-format", "torch_dist", "--dp", "2"],
]


@pytest.mark.real
@pytest.mark.parametrize("to", TARGETS, ids=" ".join)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cast_of_rounded_weights_is_refused_where_weights_are_their_masters(dtype, to, tmp_path):
    config = ["--model-config", config_of(ZERO1)]
    error = refused("convert", source(ZERO1), tmp_path / "out", "--to", *to, "--dtype", dtype, *config)
    assert error["code"] == "masters-differ"
    assert "--weights master" in error["fix"]
    assert not (tmp_path / "out").exists()
    good("convert", source(ZERO1), tmp_path / "out", "--to", *to, "--dtype", dtype, "--weights", "master", *config)
    good("convert", tmp_path / "out", tmp_path / "back", "--to", "torch", "--weights", "master", *config)
    with ckptctl.open(tmp_path / "back") as view:
        for n, t in said(ZERO1, "model").items():
            assert float32(view.state(n, "weight")) == t


@pytest.mark.real
def test_masters_beside_other_float32_weights_are_not_lost(tmp_path):
    """Of a float32 run Megatron keeps one value a weight: two that differ cannot both be it."""
    good("convert", source(ZERO1), tmp_path / "both", "--to", "torch", "--dtype", "float32")
    config = ["--model-config", config_of(ZERO1)]
    for to in TARGETS:
        assert refused("convert", tmp_path / "both", tmp_path / "out", "--to", *to, *config)["code"] == "masters-differ"


def test_what_has_no_masters_is_cast_as_asked(tmp_path):
    model = {"a.weight": arange(4, 3), "b.weight": arange(5)}
    path = torch_save(tmp_path / "run.pt", {"model": model, "optimizer": adamw(list(model), model)})
    good("convert", path, tmp_path / "out", "--to", "deepspeed", "--universal", "--dtype", "bfloat16")
    with ckptctl.open(tmp_path / "out") as view:
        for n, value in model.items():
            np.testing.assert_array_equal(view.state(n, "master").numpy(), value)
