"""Namings end to end: torchtitan's heads, stacked experts, on real folders and folders made by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.checkpoints import ckpt, digest, fixture, truth
from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder
from tests.support.saving import Chunk, adamw, arange, dcp_save, hf_save

TITAN = "torch/torchtitan_dcp"
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 5, "hidden_size": 4,
           "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
           "num_local_experts": 3}  # fmt: skip


def config_of(name):
    return fixture(name) / "truth" / "config.json"


def sections(folder):
    """Section -> name -> digest, of a DCP with the keys that convert writes."""
    items = dcp_folder(folder).items
    out = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, value in items.items():
        part, _, rest = name.partition(".")
        if part == "model":
            out["model"][rest] = value
        elif rest.startswith("state.") and rest.rpartition(".")[2] in out:
            out[rest.rpartition(".")[2]][rest[6:].rpartition(".")[0]] = value
    return {s: {n: digest("F32", v.shape, v.data) for n, v in d.items()} for s, d in out.items()}


def test_torchtitan_is_told_by_its_names_and_inspected_without_a_config():
    found = document("inspect", ckpt(TITAN))
    assert (found["format"], found["variant"], found["step"]) == ("dcp", "torchtitan", 3)
    assert found["layout"]["world_size"] == 2
    assert found["state"]["scheduler"] == found["state"]["counters"] == "present"


@pytest.mark.parametrize("dp", [1, 3])
def test_torchtitan_s_heads_are_turned_for_weights_and_moments_alike(tmp_path, dp):
    good("convert", ckpt(TITAN), tmp_path / "o", "--to", "dcp", "--dp", dp, "--model-config", config_of(TITAN))
    assert sections(tmp_path / "o") == truth(TITAN)


def test_without_heads_torchtitan_is_refused_and_nothing_written(tmp_path):
    error = refused("convert", ckpt(TITAN), tmp_path / "o", "--to", "hf", "--no-optimizer")
    assert (error["code"], "--model-config" in error["fix"]) == ("model-config", True)
    assert list(tmp_path.iterdir()) == []


def test_heads_that_do_not_fit_are_refused(tmp_path):
    config = json.loads(config_of(TITAN).read_text()) | {"num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("convert", ckpt(TITAN), tmp_path / "o", "--to", "dcp", "--model-config", tmp_path)


def test_reshard_keeps_torchtitan_s_own_names_and_needs_no_config(tmp_path):
    good("reshard", ckpt(TITAN), tmp_path / "o", "--dp", "3")
    a, b = dcp_folder(ckpt(TITAN)), dcp_folder(tmp_path / "o")
    assert a.paths == b.paths
    assert {n: v.data for n, v in a.items.items() if hasattr(v, "data")} == {
        n: v.data for n, v in b.items.items() if hasattr(v, "data")
    }


def test_torchtitan_comes_back_as_it_was(tmp_path):
    """Its names, its flat keys and paths, its rows, its values: those of the folder that the run wrote."""
    options = ["--model-config", config_of(TITAN)]
    good("convert", ckpt(TITAN), tmp_path / "hub", "--to", "dcp", *options)
    good("convert", tmp_path / "hub", tmp_path / "o", "--to", "torchtitan", "--dp", "2", *options)
    a, b = dcp_folder(ckpt(TITAN)), dcp_folder(tmp_path / "o" / "step-3")
    assert a.paths == b.paths
    for name, value in a.items.items():
        assert getattr(value, "data", value) == getattr(b.items[name], "data", b.items[name]), name
    boxes = [{n: [c[1:] for c in rows] for n, rows in x.chunks.items()} for x in (a, b)]
    assert boxes[0] == boxes[1]


def test_rows_are_turned_within_each_head_by_hand(tmp_path):
    """Two heads of width 4: rows 0 1 2 3 of a half-split head are 0 2 1 3 of an interleaved one."""
    config = {"model_type": "llama", "vocab_size": 3, "hidden_size": 8, "intermediate_size": 5, "num_hidden_layers": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    at = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": arange(3, 8), f"{at}self_attn.q_proj.weight": arange(8, 8),
        f"{at}self_attn.k_proj.weight": arange(4, 8), f"{at}self_attn.v_proj.weight": arange(4, 8),
        f"{at}self_attn.o_proj.weight": arange(8, 8), f"{at}mlp.gate_proj.weight": arange(5, 8),
        f"{at}mlp.up_proj.weight": arange(5, 8), f"{at}mlp.down_proj.weight": arange(8, 5),
        f"{at}input_layernorm.weight": arange(8), f"{at}post_attention_layernorm.weight": arange(8),
        "model.norm.weight": arange(8), "lm_head.weight": arange(3, 8),
    }  # fmt: skip
    hf_save(tmp_path / "hf", weights, config)
    good("convert", tmp_path / "hf", tmp_path / "o", "--to", "torchtitan")
    items = dcp_folder(tmp_path / "o" / "step-0").items
    q = np.frombuffer(items["layers.0.attention.qkv_linear.wq.weight"].data, "<f4").reshape(8, 8)
    assert q[:, 0].tolist() == [8 * r for r in (0, 2, 1, 3, 4, 6, 5, 7)]
    k = np.frombuffer(items["layers.0.attention.qkv_linear.wk.weight"].data, "<f4").reshape(4, 8)
    assert k[:, 0].tolist() == [8 * r for r in (0, 2, 1, 3)]
    v = np.frombuffer(items["layers.0.attention.qkv_linear.wv.weight"].data, "<f4").reshape(4, 8)
    assert v[:, 0].tolist() == [8 * r for r in (0, 1, 2, 3)]
    assert len(items) == 12
    good("convert", tmp_path / "o", tmp_path / "back", "--to", "hf", "--model-config", tmp_path / "hf")
    assert document("diff", tmp_path / "hf", tmp_path / "back")["equal"]


@pytest.mark.parametrize("name", ["hf/gpt2-single", "hf/llama-lora"])
def test_other_families_have_no_torchtitan_names(tmp_path, name):
    refused("convert", ckpt(name), tmp_path / "o", "--to", "torchtitan")


# ---- stacked experts ------------------------------------------------------------------------------------------------


def mixtral():
    """A module's tensors under Transformers 5's names, and by hand under the files' names."""
    at = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (5, 4), f"{at}self_attn.q_proj.weight": (4, 4),
              f"{at}self_attn.k_proj.weight": (2, 4), f"{at}self_attn.v_proj.weight": (2, 4),
              f"{at}self_attn.o_proj.weight": (4, 4), f"{at}mlp.gate.weight": (3, 4),
              f"{at}mlp.experts.gate_up_proj": (3, 6, 4), f"{at}mlp.experts.down_proj": (3, 4, 3),
              f"{at}input_layernorm.weight": (4,), f"{at}post_attention_layernorm.weight": (4,),
              "model.norm.weight": (4,), "lm_head.weight": (5, 4)}  # fmt: skip
    return {n: arange(*s, start=100 * i) for i, (n, s) in enumerate(shapes.items())}


def apart(module):
    out = {}
    for name, value in module.items():
        moe = name.split("mlp.")[0] + "block_sparse_moe."
        if name.endswith("gate_up_proj"):
            out |= {f"{moe}experts.{e}.w1.weight": v[:3] for e, v in enumerate(value)}
            out |= {f"{moe}experts.{e}.w3.weight": v[3:] for e, v in enumerate(value)}
        elif name.endswith("experts.down_proj"):
            out |= {f"{moe}experts.{e}.w2.weight": v for e, v in enumerate(value)}
        else:
            out[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = value
    return out


def saved(folder, weights, *, cut=None):
    """A DCP with AdamW's state by name, its config beside it."""
    items = {("model", n): v for n, v in weights.items()}
    optimizer = adamw(list(weights), weights)
    for n, entry in optimizer["state"].items():
        items |= {("optim", "state", n, k): v for k, v in entry.items()}
    for option, value in optimizer["param_groups"][0].items():
        items["optim", "param_groups", 0, option] = value
    dcp_save(folder, items, cut)
    (folder.parent / "config.json").write_text(json.dumps(MIXTRAL))
    return folder


def arrays(folder):
    return {n: (v.shape, v.data) for n, v in dcp_folder(folder).items.items() if hasattr(v, "data")}


def of(weights):
    """The same of arrays: flat names as convert writes them."""
    out = {}
    for n, v in weights.items():
        kinds = {"exp_avg": v + np.float32(0.5), "exp_avg_sq": v * np.float32(0.25), "step": np.array(3, np.float32)}
        out |= {f"model.{n}": v} | {f"optim.state.{n}.{k}": a for k, a in kinds.items()}
    return {n: (a.shape, np.ascontiguousarray(a).tobytes()) for n, a in out.items()}


CUTS = {
    "whole": None,
    "experts": [((0, 0, 0), (2, 6, 4)), ((2, 0, 0), (1, 6, 4)), ((3, 0, 0), (0, 6, 4))],
    "columns": [((0, 0, 0), (3, 6, 3)), ((0, 0, 3), (3, 6, 1))],
    "rows": [((0, 0, 0), (3, 2, 4)), ((0, 2, 0), (3, 2, 4)), ((0, 4, 0), (3, 2, 4))],
}


@pytest.mark.parametrize("cut", CUTS)
def test_stacked_experts_come_apart_whatever_cuts_them_with_all_states(tmp_path, cut):
    module = mixtral()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    chunks = [Chunk(f"__{i}_0.distcp", *c) for i, c in enumerate(CUTS[cut] or [])]
    cuts = {f"{p}{name}{s}": chunks for p, s in (("model.", ""), ("optim.state.", ".exp_avg"))} if chunks else None
    saved(tmp_path / "in", module, cut=cuts)
    words = ["--to", "dcp", "--model-config", tmp_path / "config.json"]
    good("convert", tmp_path / "in", tmp_path / "o", *words, "--names", "disk", "--dp", "2")
    assert arrays(tmp_path / "o") == of(apart(module))
    good("convert", tmp_path / "o", tmp_path / "back", *words, "--names", "module5", "--dp", "2")
    assert arrays(tmp_path / "back") == of(module)
    groups = dcp_folder(tmp_path / "back").items["optim.param_groups.0.params"]
    assert list(groups) == list(module)
    both = document("diff", tmp_path / "in", tmp_path / "o", "--optimizer", "--model-config", tmp_path / "config.json")
    assert both["equal"], both["differences"]


def test_names_stay_as_the_optimizer_has_them_unless_asked(tmp_path):
    saved(tmp_path / "a", mixtral())
    saved(tmp_path / "b", apart(mixtral()))
    for side, want in (("a", mixtral()), ("b", apart(mixtral()))):
        out = tmp_path / f"{side}2"
        good("convert", tmp_path / side, out, "--to", "dcp", "--model-config", tmp_path / "config.json")
        assert arrays(out) == of(want)


def test_a_hugging_face_folder_has_experts_one_by_one(tmp_path):
    saved(tmp_path / "in", mixtral())
    words = ["--to", "hf", "--no-optimizer", "--model-config", tmp_path / "config.json"]
    good("convert", tmp_path / "in", tmp_path / "o", *words)
    hf_save(tmp_path / "want", apart(mixtral()), MIXTRAL)
    assert document("diff", tmp_path / "o", tmp_path / "want")["equal"]
    assert {t["name"] for t in document("ls", tmp_path / "o")["tensors"]} == set(apart(mixtral()))


def test_steps_that_differ_make_no_stacked_parameter(tmp_path):
    weights = apart(mixtral())
    saved(tmp_path / "in", weights)
    tree = {("model", n): v for n, v in weights.items()}
    for i, (n, v) in enumerate(weights.items()):
        tree |= {("optim", "state", n, "exp_avg"): v, ("optim", "state", n, "step"): np.array(i, np.float32)}
    dcp_save(tmp_path / "odd", tree)
    words = ["--to", "dcp", "--names", "module5", "--model-config", tmp_path / "config.json"]
    error = refused("convert", tmp_path / "odd", tmp_path / "o", *words)
    assert error["code"] == "scalars-differ"


def test_expert_names_by_a_config_that_does_not_fit_are_refused(tmp_path):
    saved(tmp_path / "in", mixtral())
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": 2}))
    words = ["--to", "hf", "--no-optimizer", "--model-config", tmp_path / "config.json"]
    error = refused("convert", tmp_path / "in", tmp_path / "o", *words)
    assert error["code"] == "config-shape-mismatch"


def test_names_of_families_that_are_not_known_are_asked_for(tmp_path):
    saved(tmp_path / "in", mixtral())
    error = refused("convert", tmp_path / "in", tmp_path / "o", "--to", "dcp", "--names", "module5")
    assert error["code"] == "model-config"
    refused("convert", tmp_path / "in", tmp_path / "o", "--to", "dcp", "--names", "module6", code=2)
    refused("convert", tmp_path / "in", tmp_path / "o", "--to", "hf", "--names", "disk", code=2)


@pytest.mark.real
def test_the_real_folder_with_stacked_experts_becomes_the_files_names(tmp_path):
    name = "hf/mixtral-fused-names"
    good("convert", ckpt(name), tmp_path / "o", "--to", "hf")
    assert document("diff", ckpt(name), tmp_path / "o")["equal"]
    good("convert", tmp_path / "o", tmp_path / "d", "--to", "dcp", "--names", "module5")
    held = {n.removeprefix("model."): v for n, v in dcp_folder(tmp_path / "d").items.items() if hasattr(v, "data")}
    assert {n: digest("F32", v.shape, v.data) for n, v in held.items()} == truth(name)["model"]
