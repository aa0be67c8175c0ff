"""Trainer folders: the conformance suite, and what `truth.json` says of the optimizer's numbers."""

from __future__ import annotations

import json

import pytest

import ckptctl
from tests.support.checkpoints import Truth, ckpt, fixture
from tests.support.commands import document, good
from tests.support.format_suite import Fault, FormatSuite, Sample, digest_of
from tests.support.plain import torch_tree

LLAMA, QWEN2 = "torch/trainer", "hf/qwen2-trainer"


def cut(name, by):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:by])


def text(name, data):
    return lambda path: (path / name).write_text(data)


FAULTS = [
    Fault("optimizer.pt ends early", LLAMA, cut("optimizer.pt", -500), "archive-truncated", "optimizer.pt"),
    Fault("scheduler.pt ends early", LLAMA, cut("scheduler.pt", -100), "archive-truncated", "scheduler.pt"),
    Fault("rng_state.pth ends early", LLAMA, cut("rng_state.pth", -100), "archive-truncated", "rng_state.pth"),
    Fault("the weights end early", LLAMA, cut("model.safetensors", -10), "data-truncated", "model.safetensors"),
    Fault("trainer_state.json is no JSON", LLAMA, text("trainer_state.json", "{"), "trainer-state"),
    Fault("trainer_state.json is a list", LLAMA, text("trainer_state.json", "[]"), "trainer-state", "list"),
    Fault("no step", LLAMA, text("trainer_state.json", '{"global_step": null}'), "trainer-state", "global_step"),
    Fault("a step that is no number", LLAMA, text("trainer_state.json", '{"global_step": true}'), "trainer-state"),
    Fault("a step below 0", LLAMA, text("trainer_state.json", '{"global_step": -1}'), "trainer-state", "-1"),
]


def told(path):
    """A torch file's tree, tensors by their digest."""

    def walk(at):
        if isinstance(at, dict):
            return [(k, walk(v)) for k, v in at.items()]
        return at.truth if hasattr(at, "truth") else repr(at)

    return walk(torch_tree(path))


class TestTrainer(FormatSuite):
    format = "trainer"
    targets = ("torch", "dcp", "trainer")

    @pytest.fixture(params=[LLAMA, QWEN2], ids=str)
    def sample(self, request):
        return Sample(request.param, 1, "safetensors")

    @pytest.fixture(params=FAULTS, ids=str)
    def fault(self, request):
        return request.param

    def gaps(self, path):
        return None

    def test_every_tensor_equals_the_run_s_truth(self, sample):
        if sample.name == LLAMA:
            super().test_every_tensor_equals_the_run_s_truth(sample)

    def test_there_and_back_gives_equal_bytes(self, sample, tmp_path):
        """What a Trainer wrote itself comes back: tensors, states and JSON; pickles are laid out anew once."""
        good("convert", sample.path, tmp_path / "a", "--to", "trainer")
        for to in ("torch", "dcp"):
            there, back = tmp_path / to, tmp_path / f"from-{to}"
            good("convert", tmp_path / "a", there, "--to", to)
            good("convert", there, back, "--to", "trainer", "--model-config", tmp_path / "a")
            for name in ("model.safetensors", "trainer_state.json", "config.json"):
                assert (back / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), (to, name)
            for name in ("optimizer.pt", "scheduler.pt"):
                assert told(back / name) == told(tmp_path / "a" / name), (to, name)
        assert (tmp_path / "a" / "trainer_state.json").read_bytes() == (sample.path / "trainer_state.json").read_bytes()
        assert (tmp_path / "a" / "training_args.bin").read_bytes() == (sample.path / "training_args.bin").read_bytes()


@pytest.mark.parametrize("name", ["hf/qwen2-trainer", "hf/mixtral-trainer"])
def test_each_number_of_the_optimizer_is_the_parameter_that_the_run_had(name):
    facts = json.loads((fixture(name) / "truth.json").read_text())
    want = {
        tuple(k.rsplit(".", 1)): Truth(v["dtype"], tuple(v["shape"]), v["sha256"])
        for k, v in facts["optimizer"].items()
    }
    with ckptctl.open(fixture(name)) as view:
        groups = view.checkpoint.optimizer.groups
        got = {(t.name, t.kind): digest_of(t) for t in view.tensors() if t.kind not in ("weight", "buffer")}
    assert got == want
    names = facts["param_index_to_name"]
    assert [list(g.params) for g in groups] == [[names[str(i)] for i in g["params"]] for g in facts["param_groups"]]
    for g, told in zip(groups, facts["param_groups"], strict=True):
        assert {k: list(v) if isinstance(v, tuple) else v for k, v in g.options.items()} == {
            k: v for k, v in told.items() if k != "params"
        }


def test_inspect_tells_step_state_and_groups():
    found = document("inspect", ckpt(LLAMA))
    assert (found["format"], found["step"], found["resumable"]) == ("trainer", 3, True)
    assert set(found["state"].values()) == {"present", "absent"}
    assert found["state"]["masters"] == "absent"
    assert found["warnings"] == []


def test_the_written_optimizer_has_the_numbers_of_the_one_that_was_read(tmp_path):
    good("convert", fixture(QWEN2), tmp_path / "out", "--to", "trainer")
    old, new = (torch_tree(p / "optimizer.pt") for p in (fixture(QWEN2), tmp_path / "out"))
    assert old["param_groups"] == new["param_groups"]
    assert list(old["state"]) == list(new["state"])
    for i, entry in old["state"].items():
        assert {k: t.truth for k, t in entry.items()} == {k: t.truth for k, t in new["state"][i].items()}
