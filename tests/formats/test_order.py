"""Numbers of parameters: those that the real model's optimizer has, whatever order the source lists names in."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import ckpt, truth, truth_config
from tests.support.commands import good, refused
from tests.support.plain import torch_tree
from tests.support.saving import adamw, arange, torch_save

NUMBERED = {"torch": ["--to", "torch", "--index-keys"], "lightning": ["--to", "lightning", "--module-prefix", "net"]}
LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYER = [*LAYER, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
LLAMA = [f"model.layers.{i}.{n}.weight" for i in range(2) for n in LAYER]
LLAMA = ["model.embed_tokens.weight", *LLAMA, "model.norm.weight", "lm_head.weight"]
"""What `LlamaForCausalLM.named_parameters()` lists of two layers (Transformers 5.24.0)."""


def outer_first(names):
    """As FSDP with flat parameters lists them: the root's own first, then each wrapped block's."""
    return sorted(names, key=lambda n: "." in n.removeprefix("model.") and ".layers." in n)


def numbered_states(path, to):
    """exp_avg by number, and the numbers of each group."""
    tree = torch_tree(path)
    optimizer = tree["optimizer"] if to == "torch" else tree["optimizer_states"][0]
    return optimizer["state"], [g["params"] for g in optimizer["param_groups"]]


def saved(path, names, listed, *, split=lambda _: 0):
    """A torch file whose state is keyed by name, in groups that list the names in another order."""
    model = {n: arange(4, 4, start=i) for i, n in enumerate(names)}
    optimizer = adamw(list(listed), model)
    (group,) = optimizer["param_groups"]
    parts = sorted({split(n) for n in names})
    optimizer["param_groups"] = [{**group, "params": [n for n in listed if split(n) == p]} for p in parts]
    return torch_save(path, {"model": model, "optimizer": optimizer}), model, optimizer


@pytest.mark.parametrize("to", NUMBERED)
@pytest.mark.parametrize("groups", [1, 2])
def test_numbers_count_the_family_s_modules_whatever_order_the_names_have(to, groups, tmp_path):
    def split(name):
        return int("norm" in name) if groups == 2 else 0

    listed = outer_first(LLAMA)
    assert listed != LLAMA
    path, _, optimizer = saved(tmp_path / "x.pt", LLAMA, listed, split=split)
    config = truth_config("torch/fsdp2_dp2_dcp")
    good("convert", path, tmp_path / "out", *NUMBERED[to], "--model-config", config)
    states, numbers = numbered_states(tmp_path / "out", to)
    wanted = [n for part in range(groups) for n in LLAMA if split(n) == part]
    assert [i for g in numbers for i in g] == list(range(len(LLAMA)))
    for i, name in enumerate(wanted):
        assert (states[i]["exp_avg"].numbers() == optimizer["state"][name]["exp_avg"]).all(), (i, name)


@pytest.mark.parametrize("words", [*NUMBERED.values(), ["--to", "deepspeed"]], ids=[*NUMBERED, "deepspeed"])
def test_an_unknown_model_s_groups_in_another_order_than_its_modules_need_one_given(words, tmp_path):
    names = ["stem", "blocks.0", "blocks.1", "head"]
    path, _, optimizer = saved(tmp_path / "x.pt", names, ["stem", "head", "blocks.0", "blocks.1"])
    error = refused("convert", path, tmp_path / "out", *words)
    assert error["code"] == "param-order"
    assert "otherwise" in error["why"]
    assert "--param-order" in error["fix"]
    order = tmp_path / "order.txt"
    order.write_text("\n".join(names))
    good("convert", path, tmp_path / "out", *words, "--param-order", order)
    if words[1] != "deepspeed":
        states, _ = numbered_states(tmp_path / "out", words[1])
        for i, name in enumerate(names):
            assert (states[i]["exp_avg"].numbers() == optimizer["state"][name]["exp_avg"]).all()


@pytest.mark.parametrize("to", NUMBERED)
def test_an_optimizer_s_own_numbers_are_kept_in_any_order(to, tmp_path):
    """Numbers in the source are the run's own: an optimizer that was given the modules backwards has them so."""
    model = {n: arange(i + 1, 2) for i, n in enumerate("abc")}
    backwards = dict(reversed(model.items()))
    tree = {"model": model, "optimizer": adamw([0, 1, 2], dict(enumerate(backwards.values())))}
    path, order = torch_save(tmp_path / "x.pt", tree), tmp_path / "order.txt"
    order.write_text("\n".join(backwards))
    good("convert", path, tmp_path / "out", *NUMBERED[to], "--param-order", order)
    states, numbers = numbered_states(tmp_path / "out", to)
    assert numbers == [[0, 1, 2]]
    assert [states[i]["exp_avg"].shape for i in range(3)] == [(3, 2), (2, 2), (1, 2)]


@pytest.mark.parametrize("to", NUMBERED)
def test_flat_keys_have_no_order_so_numbers_are_the_family_s_or_none(to, tmp_path):
    name = "torch/fsdp2_dp2_flatoptim_dcp"
    error = refused("convert", ckpt(name), tmp_path / "out", *NUMBERED[to])
    assert error["code"] == "param-order"
    good("convert", ckpt(name), tmp_path / "out", *NUMBERED[to], "--model-config", truth_config(name))
    states, numbers = numbered_states(tmp_path / "out", to)
    decayed, rest = ([n for n in LLAMA if ("norm" in n) == other] for other in (False, True))
    assert [len(g) for g in numbers] == [len(decayed), len(rest)] == [16, 5]
    assert [states[i]["exp_avg"].truth for i in range(21)] == [truth(name)["exp_avg"][n] for n in (*decayed, *rest)]


@pytest.mark.parametrize("words", [*NUMBERED.values(), ["--to", "deepspeed", "--zero-stage", "0"]], ids=lambda w: w[1])
@pytest.mark.parametrize("told", ["--param-order", "--model-config"])
def test_a_result_s_numbers_are_read_as_they_were_written(words, told, tmp_path):
    # Every parameter has the same shape, so that only the order of the model's dict tells numbers' names.
    names = sorted(LLAMA)
    path, _, optimizer = saved(tmp_path / "x.pt", names, LLAMA)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(LLAMA))
    said = order if told == "--param-order" else truth_config("torch/fsdp2_dp2_dcp")
    good("convert", path, tmp_path / "out", *words, told, said)
    back = tmp_path / "back.pt"
    good("convert", tmp_path / "out", back, "--to", "torch")
    states = torch_tree(back)["optimizer"]["state"]
    for name in LLAMA:
        ours = next(v for n, v in states.items() if n.removeprefix("net.") == name)
        assert (ours["exp_avg"].numbers() == optimizer["state"][name]["exp_avg"]).all(), name
