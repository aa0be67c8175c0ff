"""verify says not equal, and where, for each mistake that a conversion could make; and equal for what is right."""

from __future__ import annotations

import json

import pytest

from tests.operations.verify.made import converted, reading_of, state_file, verified
from tests.support.checkpoints import ckpt, needs_torch
from tests.support.commands import ckptctl

pytestmark = needs_torch
LAYOUT = "torch/plain_legacy"
TIED = "hf/qwen2-trainer"
UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return state_file(converted(LAYOUT, tmp_path_factory.mktemp("right") / "out"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return state_file(converted(TIED, tmp_path_factory.mktemp("tied") / "out"))


def changed(source, folder, change):
    """A copy of a torch file with a change made by torch itself."""
    import torch

    state = torch.load(source, weights_only=True)  # noqa: TID251
    change(state)
    torch.save(state, folder / "changed.pt")
    return folder / "changed.pt"


def element(state):
    state["model"][UP][3, 5] += 1e-3


def row_that_no_token_uses(state):
    state["model"]["model.embed_tokens.weight"][130, 1] *= 1.0000001


def last_bit(state):
    import torch

    state["model"][Q].view(-1)[-1:].view(torch.int32)[0] ^= 1


def moment(state):
    state["optimizer"]["state"][UP]["exp_avg"][0, 0] += 1e-6


def second_moment(state):
    state["optimizer"]["state"][UP]["exp_avg_sq"][0, 0] *= 1.01


def swapped(state):
    a, b = (state["optimizer"]["state"][f"model.layers.{n}.mlp.up_proj.weight"] for n in (0, 1))
    a["exp_avg"], b["exp_avg"] = b["exp_avg"], a["exp_avg"]


def swapped_kinds(state):
    a = state["optimizer"]["state"][UP]
    a["exp_avg"], a["exp_avg_sq"] = a["exp_avg_sq"], a["exp_avg"].abs()


def step(state):
    for entry in state["optimizer"]["state"].values():
        entry["step"] += 1


def step_of_one(state):
    state["optimizer"]["state"][UP]["step"] -= 1


def decay(state):
    state["optimizer"]["param_groups"][0]["weight_decay"] = 0.0


def rate(state):
    for group in state["optimizer"]["param_groups"]:
        group["lr"] *= 1.001


def beta(state):
    state["optimizer"]["param_groups"][1]["betas"] = (0.9, 0.999)


def epsilon(state):
    state["optimizer"]["param_groups"][0]["eps"] = 1e-6


def coupled(state):
    state["optimizer"]["param_groups"][0]["decoupled_weight_decay"] = False


def moved_between_groups(state):
    groups = state["optimizer"]["param_groups"]
    groups[1]["params"].append(groups[0]["params"].pop())


def moment_lost(state):
    del state["optimizer"]["state"][UP]["exp_avg"]


def largest_lost(state):
    state["optimizer"]["param_groups"][0]["amsgrad"] = True


def state_lost(state):
    del state["optimizer"]["state"][UP]


def optimizer_lost(state):
    del state["optimizer"]


MISTAKES = {
    element: (UP, {"weight", "updated weight"}),
    row_that_no_token_uses: ("model.embed_tokens.weight", {"weight", "updated weight"}),
    last_bit: (Q, {"weight", "updated weight"}),
    moment: (UP, {"exp_avg", "updated exp_avg"}),
    second_moment: (UP, {"exp_avg_sq", "updated exp_avg_sq"}),
    swapped: ("model.layers.0.mlp.up_proj.weight", {"exp_avg", "updated weight"}),
    swapped_kinds: (UP, {"exp_avg", "exp_avg_sq", "updated weight"}),
    step: ("model.embed_tokens.weight", {"step", "updated weight"}),
    step_of_one: (UP, {"step", "updated weight"}),
    decay: ("model.embed_tokens.weight", {"group", "updated weight"}),
    rate: ("model.embed_tokens.weight", {"group", "updated weight", "lr"}),
    beta: ("model.layers.0.input_layernorm.weight", {"group", "updated weight"}),
    epsilon: ("model.embed_tokens.weight", {"group"}),
    coupled: ("model.embed_tokens.weight", {"group", "updated exp_avg"}),
    moved_between_groups: ("lm_head.weight", {"group", "updated weight"}),
    moment_lost: (UP, {"exp_avg"}),
    largest_lost: ("model.embed_tokens.weight", {"max_exp_avg_sq", "group"}),
    state_lost: (UP, {"exp_avg", "exp_avg_sq", "step"}),
    optimizer_lost: ("model.embed_tokens.weight", {"exp_avg", "exp_avg_sq", "group"}),
}


@pytest.mark.parametrize("change", MISTAKES, ids=lambda c: c.__name__)
def test_a_mistake_is_found_and_named(change, right, tmp_path):
    found = verified(right, changed(right, tmp_path, change), LAYOUT)
    name, kinds = MISTAKES[change]
    assert found["equal"] is False
    assert found["cause"]["name"] == name
    assert found["first"] is not None
    assert kinds <= {d["kind"] for d in found["differences"]}


def test_what_was_not_changed_is_not_named(right, tmp_path):
    found = verified(right, changed(right, tmp_path, moment), LAYOUT)
    assert {d["name"] for d in found["differences"]} == {UP}
    assert found["first"]["name"] == UP


def test_a_rewritten_file_is_equal(right, tmp_path):
    found = verified(right, changed(right, tmp_path, lambda state: None), LAYOUT, steps=2)
    assert found["equal"] is True
    assert found["tolerance"]["mode"] == "bits"
    assert found["compared"]["updated weight"] == 21


def frozen(state):
    del state["optimizer"]["state"][UP]
    for group in state["optimizer"]["param_groups"]:
        group["params"] = [p for p in group["params"] if p != UP]


def test_what_is_frozen_is_looked_at_before_and_after_the_step(right, tmp_path):
    source = changed(right, tmp_path, frozen)
    found = verified(source, source, LAYOUT)
    assert (found["equal"], found["parameters"]) == (True, 20)
    assert found["compared"]["weight"] == found["compared"]["updated weight"] == 21

    (tmp_path / "b").mkdir()
    other = verified(source, changed(source, tmp_path / "b", element), LAYOUT)
    assert (other["equal"], other["cause"]["name"]) == (False, UP)


def of_another_model(state):
    import torch

    state["model"]["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)


def test_weights_that_the_config_s_model_has_no_place_for_are_told(right, tmp_path):
    """Biases of another family's projections: no step computes with them, so no loss is the run's."""
    source = changed(right, tmp_path, of_another_model)
    found = verified(source, None, LAYOUT)
    assert found["equal"] is False
    (check,) = (c for c in found["checks"] if c["ok"] is False)
    assert (check["name"], "q_proj.bias" in check["detail"]) == ("every weight has its place in the model", True)
    both = verified(source, source, LAYOUT)
    assert both["equal"] is True
    assert any("1 weights" in n and "no step has them" in n for n in both["notes"])


def test_the_source_and_its_conversion_are_equal(right):
    assert verified(ckpt(LAYOUT), right, LAYOUT)["equal"] is True


@pytest.mark.parametrize(
    ("file", "key", "kind"),
    [("scheduler.pt", "last_epoch", "schedule"), ("trainer_state.json", "global_step", "run step")],
)
def test_a_run_that_is_elsewhere_in_its_schedule_is_found(file, key, kind, tmp_path):
    """No step shows it: the rate of the next one is in the param groups."""
    import shutil

    import torch

    source, copy = ckpt(TIED), tmp_path / "copy"
    shutil.copytree(source, copy)
    if file.endswith(".json"):
        state = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(state | {key: state[key] + 1}))
    else:
        state = torch.load(copy / file, weights_only=True)  # noqa: TID251
        torch.save(state | {key: state[key] + 1}, copy / file)
    found = verified(source, copy)
    assert found["equal"] is False
    assert [d["kind"] for d in found["differences"]] == [kind]


def head_untied(state):
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"].clone()
    state["model"]["lm_head.weight"][0, 0] += 1e-3


def head_a_copy(state):
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"].clone()


def test_tied_copies_that_differ_are_found(tied, tmp_path):
    found = verified(ckpt(TIED), changed(tied, tmp_path, head_untied))
    assert found["equal"] is False
    assert [d["what"] for d in found["differences"]] == ["untied"]
    assert found["cause"]["name"] == "lm_head.weight"


def test_tied_copies_that_are_equal_are_one(tied, tmp_path):
    assert verified(ckpt(TIED), changed(tied, tmp_path, head_a_copy))["equal"] is True


def test_masters_that_are_wrong_under_right_weights_are_found(tmp_path):
    """A 16-bit run: the weights of both sides have the same bits, one master is a little off."""
    layout = "deepspeed/zero1-dp2-bf16"
    out = state_file(converted(layout, tmp_path / "out", weights="master", dtype="float32"))

    def off(state):
        state["model"][UP][0, 0] *= 1.0001  # rounds to the same bfloat16

    found = verified(ckpt(layout), changed(out, tmp_path, off), layout)
    assert found["equal"] is False
    assert {d["kind"] for d in found["differences"]} >= {"master"}
    assert "weight" not in {d["kind"] for d in found["differences"]}
    assert verified(ckpt(layout), out, layout)["equal"] is True


def test_the_exit_code_is_the_answer(right, tmp_path):
    wrong = changed(right, tmp_path, decay)
    config = ["--model-config", str(reading_of(LAYOUT).model_config)]
    same = ckptctl("verify", str(right), str(right), "--batch-size", "1", "--seq-len", "8", *config)
    assert same.code == 0, same
    assert "equal: bit for bit" in same.out
    other = ckptctl("verify", str(right), str(wrong), "--batch-size", "1", "--seq-len", "8", *config)
    assert other.code == 1, other
    assert "weight_decay: 0.1 and 0.0" in other.out
    assert "the first parameter whose update differs: model.embed_tokens.weight" in other.out
    as_json = json.loads(ckptctl("verify", str(right), "--batch-size", "1", "--seq-len", "8", "--json", *config).out)
    assert as_json["schema"] == "ckptctl.verify/1"
    assert all(c["ok"] for c in as_json["checks"])
