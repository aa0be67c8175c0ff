"""Trainer folders made of other checkpoints: numbers, states, counters; and what is refused."""

import json

import pytest

from tests.support.checkpoints import ckpt, digests, fixture, run_torch, truth, truth_config
from tests.support.commands import document, good, refused
from tests.support.plain import torch_tree

DCP = "torch/fsdp2_dp2_dcp"


def decays(name):
    """A Trainer's rule for these models, by hand: matrices decay."""
    return "norm" not in name and "bias" not in name


def order(layers):
    """named_parameters() of a llama, by hand."""
    names = ["model.embed_tokens.weight"]
    for i in range(layers):
        at = f"model.layers.{i}."
        names += [f"{at}self_attn.{x}_proj.weight" for x in "qkvo"]
        names += [f"{at}mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
        names += [f"{at}input_layernorm.weight", f"{at}post_attention_layernorm.weight"]
    return [*names, "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("name", [DCP, "torch/fsdp2_dp4_dcp", "torch/fsdp2_dp2_flatoptim_dcp", "torch/plain_zip"])
def test_each_number_has_the_moments_of_the_parameter_that_a_trainer_gives_it(name, tmp_path):
    good("convert", ckpt(name), tmp_path / "out", "--to", "trainer", "--model-config", truth_config(name))
    names = order(json.loads((truth_config(name) / "config.json").read_text())["num_hidden_layers"])
    groups = [[n for n in names if decays(n)], [n for n in names if not decays(n)]]
    tree = torch_tree(tmp_path / "out" / "optimizer.pt")
    numbered = [n for g in groups for n in g]
    assert [g["params"] for g in tree["param_groups"]] == [
        list(range(len(groups[0]))),
        list(range(len(groups[0]), len(names))),
    ]
    assert [g["weight_decay"] for g in tree["param_groups"]] == [0.1, 0.0]
    for kind in ("exp_avg", "exp_avg_sq"):
        got = {numbered[i]: t[kind].truth for i, t in tree["state"].items()}
        assert got == truth(name)[kind]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert (state["global_step"], state["log_history"]) == (3, [])
    schedule = torch_tree(tmp_path / "out" / "scheduler.pt")
    assert (schedule["last_epoch"], schedule["base_lrs"], schedule["lr_lambdas"]) == (3, [0.001] * 2, [None] * 2)


def test_random_states_of_one_process_are_carried_and_those_of_more_are_not(tmp_path):
    fates = {}
    for name in ("torch/plain_zip", "torch/fsdp2_dp4_dcp"):
        words = ["--to", "trainer", "--model-config", truth_config(name)]
        report = document("convert", ckpt(name), tmp_path / name, *words)["fidelity"]
        fates[name] = [(x["fate"], "4 ranks" in x["detail"]) for x in report if x["part"] == "random state"]
    assert fates == {"torch/plain_zip": [("carried", False)], "torch/fsdp2_dp4_dcp": [("dropped", True)]}
    assert set(torch_tree(tmp_path / "torch/plain_zip" / "rng_state.pth")) == {"python", "numpy", "cpu"}
    assert not (tmp_path / "torch/fsdp2_dp4_dcp" / "rng_state.pth").exists()


def test_without_a_config_the_order_is_not_known(tmp_path):
    error = refused("convert", ckpt(DCP), tmp_path / "out", "--to", "trainer")
    assert (error["code"], "--model-config" in error["fix"]) == ("param-order", True)
    assert not (tmp_path / "out").exists()


def test_weights_alone_are_for_hf(tmp_path):
    for words in ([ckpt("hf/llama-single")], [ckpt("torch/trainer"), "--no-optimizer"]):
        error = refused("convert", words[0], tmp_path / "out", "--to", "trainer", *words[1:])
        assert (error["code"], "hf" in error["fix"]) == ("state-not-carried", True)


def test_bf16_keeps_its_bits_and_files_are_cut_to_size(tmp_path):
    name = "torch/fsdp2_dp2_bf16_dcp"
    words = ["--to", "trainer", "--model-config", truth_config(name), "--max-shard-size", "20KB"]
    good("convert", ckpt(name), tmp_path / "out", *words)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    tree = torch_tree(tmp_path / "out" / "optimizer.pt")
    assert {t["exp_avg"].truth.dtype for t in tree["state"].values()} == {"BF16"}
    assert document("diff", tmp_path / "out", ckpt(name), "--optimizer")["equal"]


TORCH = """
import sys, torch
o = torch.load(sys.argv[1], weights_only=False)
{}
torch.save(o, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ("o['optimizer']['param_groups'][0]['lr'] = 1.0", "", ""),
        (
            "g = o['optimizer']['param_groups']; g.append(dict(g[0], lr=1.0, params=[g[0]['params'].pop()]))",
            "param-groups",
            "lr",
        ),
        ("[v.pop('step') for v in o['optimizer']['state'].values()]", "step", "model.embed_tokens.weight"),
        ("o['ema'] = {'w': torch.ones(3)}", "state-not-carried", "ema"),
    ],
)
def test_what_a_trainer_would_lose_or_mistake_is_refused_by_name(change, code, word, tmp_path):
    run_torch(TORCH.format(change), ckpt("torch/plain_zip"), tmp_path / "t.pt")
    words = [
        "convert",
        tmp_path / "t.pt",
        tmp_path / "out",
        "--to",
        "trainer",
        "--model-config",
        truth_config("torch/plain_zip"),
    ]
    if not code:
        good(*words)
        assert [g["lr"] for g in torch_tree(tmp_path / "out" / "optimizer.pt")["param_groups"]] == [1.0, 0.001]
        return
    error = refused(*words)
    assert error["code"] == code, error
    assert word in f"{error['what']} {error['why']}"


def test_stacked_experts_have_names_in_memory_and_come_apart_again(tmp_path):
    source = fixture("hf/mixtral-trainer")
    good("convert", source, tmp_path / "a", "--to", "trainer")
    stacked = digests(tmp_path / "a")
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    facts = json.loads((source / "truth.json").read_text())
    names, tree = facts["param_index_to_name"], torch_tree(tmp_path / "a" / "optimizer.pt")
    got = {f"{names[str(i)]}.{k}": t.truth.sha256 for i, entry in tree["state"].items() for k, t in entry.items()}
    assert got == {k: v["sha256"] for k, v in facts["optimizer"].items()}
    good("convert", tmp_path / "a", tmp_path / "b", "--to", "trainer", "--names", "disk")
    assert digests(tmp_path / "b") == digests(source)
    assert len(torch_tree(tmp_path / "b" / "optimizer.pt")["state"]) == 41
    good("convert", tmp_path / "b", tmp_path / "c", "--to", "trainer", "--names", "module5")
    assert digests(tmp_path / "c") == stacked
    assert document("diff", tmp_path / "c", source, "--optimizer", "--state")["equal"]
    good("convert", tmp_path / "a", tmp_path / "hf", "--to", "hf", "--no-optimizer")
    assert digests(tmp_path / "hf") == digests(source)


@pytest.mark.parametrize(("version", "joined"), [("4.57.1", False), ("5.0.0", True), (None, True)])
def test_names_in_memory_are_those_of_the_run_s_transformers(version, joined, tmp_path):
    """A source with an expert a tensor, and nothing that says how the model had them."""
    source = fixture("hf/mixtral-trainer")
    good("convert", source, tmp_path / "dcp", "--to", "dcp", "--names", "disk")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "transformers_version": version}))
    good("convert", tmp_path / "dcp", tmp_path / "out", "--to", "trainer", "--model-config", tmp_path / "config.json")
    assert ("model.layers.0.mlp.experts.gate_up_proj" in digests(tmp_path / "out")) is joined
    assert document("diff", tmp_path / "out", source, "--optimizer")["equal"]


@pytest.mark.parametrize("name", ["torch/accelerate_fsdp2", "torch/accelerate_fsdp2_full", "torch/lightning_ckpt"])
def test_other_frameworks_folders_become_a_trainers_at_their_step(name, tmp_path):
    good("convert", ckpt(name), tmp_path / "out", "--to", "trainer", "--model-config", truth_config(name))
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.parametrize("name", ["torch/lightning_ckpt", "torch/lightning_fsdp2_dir"])
def test_what_a_trainer_has_no_place_for_goes_along(name, tmp_path):
    good("convert", ckpt(name), tmp_path / "out", "--to", "trainer", "--model-config", truth_config(name))
    good("convert", tmp_path / "out", tmp_path / "back.pt", "--to", "torch")
    tree = torch_tree(tmp_path / "back.pt")
    assert {"callbacks", "loops", "hyper_parameters", "pytorch-lightning_version"} <= tree.keys()
    assert tree["global_step"] == 3
