"""What is written as DeepSpeed: files by rank, values as in the source, and what has no place."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import ckptctl
from ckptctl.formats.deepspeed.opened import Pile
from tests.formats.deepspeed.test_read import config_of, source
from tests.support.checkpoints import digest, digests, fixture
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.plain import torch_tree
from tests.support.saving import adamw, arange, torch_save

MOST = "deepspeed/zero1-dp2-bf16"
NAMES = [
    "deepspeed/zero0-dp2-bf16",
    "deepspeed/zero1-dp2-bf16",
    "deepspeed/zero3-dp2-bf16-qwen2-tied",
    "deepspeed/pipe-pp2-dp2-zero1-bf16",
    "deepspeed/universal-zero1-dp2-bf16-fp32acc",
]
TARGETS = [
    ["--zero-stage", "1", "--dp", "4"],
    ["--zero-stage", "2", "--dp", "3"],
    ["--zero-stage", "3", "--dp", "2"],
    ["--zero-stage", "3", "--dp", "37"],
    ["--zero-stage", "0", "--dp", "2"],
    ["--universal"],
]


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", TARGETS, ids=" ".join)
def test_every_layout_holds_the_very_same_state(name, words, tmp_path):
    config = config_of(name)
    model = ["--model-config", config] if config else []
    good("reshard", source(name), tmp_path / "out", *words, *model)
    found = document("diff", source(name), tmp_path / "out", "--optimizer", *model)
    assert found["equal"] is True, found["differences"][:3]
    got = document("inspect", tmp_path / "out")
    if "--universal" not in words:
        assert (got["layout"]["zero_stage"], got["layout"]["dp"]) == (int(words[1]), int(words[3]))
        assert (tmp_path / "out" / "latest").read_text() == "global_step3"
        shards = 0 if words[1] == "0" else int(words[3])
        assert len(list((tmp_path / "out" / "global_step3").glob("*optim_states.pt"))) == shards


@pytest.mark.real
def test_slots_are_those_that_deepspeed_computes(tmp_path):
    good("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "out", "--zero-stage", "2", "--dp", "3")
    with ckptctl.open(tmp_path / "out") as view:
        numel = sum(math.prod(t.shape) for t in view.tensors() if t.kind == "master")
        slot = -(-numel // 6) * 2  # each rank's piece is a multiple of two elements
        assert view.checkpoint.about["padding"]["exp_avg"] == 3 * slot - numel
        assert view.checkpoint.about["padding"]["master"] == 0


@pytest.mark.real
def test_what_a_run_goes_on_with_is_carried(tmp_path):
    a = source("deepspeed/zero1-dp2-bf16")
    good("reshard", a, tmp_path / "out", "--zero-stage", "3", "--dp", "4")
    with ckptctl.open(a) as old, ckptctl.open(tmp_path / "out") as new:
        assert new.checkpoint.values["lr_scheduler"] == {"last_batch_iteration": 2}
        assert new.checkpoint.values["global_samples"] == old.checkpoint.values["global_samples"]
        scaler = new.checkpoint.values["deepspeed"]["loss_scaler"]
        assert scaler == old.checkpoint.values["deepspeed"]["loss_scaler"]
        config = new.checkpoint.values["deepspeed"]["ds_config"]
        assert config["zero_optimization"]["stage"] == 3


@pytest.mark.real
def test_parameters_that_were_dealt_in_turn_are_written_in_the_optimizer_s_order(tmp_path):
    name = "deepspeed/zero2-dp2-bf16-roundrobin"
    report = document("reshard", source(name), tmp_path / "a", "--zero-stage", "1", "--dp", "3")
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    block = [*attention, *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down"))]
    matrices = [f"model.layers.{i}.{n}" for i in range(4) for n in block]
    for path in (source(name), tmp_path / "a"):  # make_deepspeed's decay_groups: matrices as the model lists them
        assert groups_of(path)[0] == ["model.embed_tokens.weight", *matrices, "lm_head.weight"]
    with ckptctl.open(tmp_path / "a") as view:
        zero = view.checkpoint.values["deepspeed"]["ds_config"]["zero_optimization"]
    assert zero["round_robin_gradients"] is False
    assert [line["fate"] for line in report["fidelity"] if line["part"] == "round_robin_gradients"] == ["dropped"]


@pytest.mark.real
def test_without_settings_of_groups_the_form_is_one_whose_loader_keeps_the_run_s_own(tmp_path):
    """Elastic files have no param groups; their loader takes states alone, if the step is beside them."""
    name = "deepspeed/zero1-dp2-fp32-elastic"
    report = document("reshard", source(name), tmp_path / "a", "--zero-stage", "2", "--dp", "3")
    assert document("diff", source(name), tmp_path / "a", "--optimizer")["equal"] is True
    assert any("elastic" in w for w in document("inspect", tmp_path / "a")["warnings"])
    data = (tmp_path / "a" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
    assert b"base_optimizer_state_step" in data
    assert b"param_groups" not in data
    assert any(line["part"] == "settings of param groups" for line in report["fidelity"])


@pytest.mark.real
def test_state_without_groups_gets_the_family_s_usual_ones(tmp_path):
    name = "torch/dcp_safetensors"
    words = ["--model-config", config_of(name), "--to", "deepspeed"]
    good("convert", source(name) / "ckpt", tmp_path / "a", *words)
    decaying, others = groups_of(tmp_path / "a")
    assert all(n.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")) for n in decaying)
    assert all(n.endswith("norm.weight") for n in others)


def scaler(path):
    with ckptctl.open(path) as view:
        return view.checkpoint.values["deepspeed"].get("loss_scaler")


@pytest.mark.real
def test_a_whole_optimizer_s_dynamic_loss_scale_stays_dynamic(tmp_path):
    good("reshard", source("deepspeed/zero0-dp1-fp16"), tmp_path / "a", "--zero-stage", "2", "--dp", "2")
    # The same run's at stage 2, as DeepSpeed itself has it after as many steps.
    assert scaler(tmp_path / "a") == scaler(source("deepspeed/zero2-dp2-fp16"))


@pytest.mark.real
@pytest.mark.parametrize("words", [["--zero-stage", "1"], ["--zero-stage", "2"], ["--universal"]], ids=" ".join)
@pytest.mark.parametrize(
    ("name", "clip"), [("deepspeed/zero0-dp2-bf16", None), ("deepspeed/zero3-dp2-bf16-qwen2-tied", None), (MOST, 0.0)]
)
def test_clipping_is_the_source_s_or_the_configuration_s(name, clip, words, tmp_path):
    """A file's clip_grad goes before the configuration of the run that loads it: one that is made up turns it off."""
    good("reshard", source(name), tmp_path / "a", *words)
    with ckptctl.open(tmp_path / "a") as view:
        assert view.checkpoint.values["deepspeed"].get("clip_grad") == clip


@pytest.mark.real
@pytest.mark.parametrize(("stage", "said"), [("2", None), ("3", "DynamicLossScaler")])
def test_float16_without_a_loss_scale_is_left_to_the_run(stage, said, tmp_path):
    a = source("torch/hsdp_2x2_dcp") / "ckpt"
    words = ["--model-config", config_of("torch/hsdp_2x2_dcp"), "--dtype", "float16", "--weights", "master"]
    good("convert", a, tmp_path / "a", "--to", "deepspeed", "--zero-stage", stage, *words)
    found = scaler(tmp_path / "a")
    assert found is None if said is None else found["class"].endswith(said)


MOE = "deepspeed/moe-ep2-dp4-zero2-bf16"


@pytest.mark.real
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (4, 4), (4, 2), (6, 2)])
def test_experts_are_cut_over_another_number_of_ranks(dp, ep, tmp_path):
    good("reshard", source(MOE), tmp_path / "out", "--dp", dp, "--ep", ep)
    found = document("diff", source(MOE), tmp_path / "out", "--optimizer")
    assert found["equal"] is True, found["differences"][:3]
    layout = document("inspect", tmp_path / "out")["layout"]
    assert (layout["dp"], layout["ep"]) == (dp, ep)
    files = sorted(p.name for p in (tmp_path / "out" / "global_step3").glob("layer_*"))
    assert files == [f"layer_{la}_expert_{e}_mp_rank_00_model_states.pt" for la in (0, 1) for e in range(4)]


@pytest.mark.real
def test_experts_at_the_size_they_had_are_the_very_same_flat_tensors(tmp_path):
    good("reshard", source(MOE), tmp_path / "out")
    with ckptctl.open(source(MOE)) as old, ckptctl.open(tmp_path / "out") as new:
        a, b = old.checkpoint, new.checkpoint
        assert [(g.params, dict(g.options)) for g in a.optimizer.groups] == [
            (g.params, dict(g.options)) for g in b.optimizer.groups
        ]
        for key, tensor in a.tensors.items():  # cut at the same elements
            assert [(p.lo, p.size) for t in tensor.pieces for p in t] == [
                (p.lo, p.size) for t in b.tensors[key].pieces for p in t
            ], key


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dp", "3"], "--ep 2 does not divide --dp 3"),
        (["--dp", "3", "--ep", "3"], "--ep 3 does not divide blocks.0.moe"),
        (["--zero-stage", "3"], "ZeRO-3"),
        (["--universal"], "universal"),
    ],
)
def test_where_experts_have_no_place_is_said(words, said, tmp_path):
    error = refused("reshard", source(MOE), tmp_path / "out", *words)
    assert error["code"] == "unsupported"
    assert said in error["what"]
    assert not (tmp_path / "out").exists()


def groups_of(path):
    with ckptctl.open(path) as view:
        return [list(g.params) for g in view.checkpoint.optimizer.groups]


@pytest.mark.real
@pytest.mark.parametrize("name", ["torch/hsdp_2x2_dcp"])
def test_flat_groups_of_other_sources_are_in_the_order_that_a_real_run_has(name, tmp_path):
    good("convert", source(name) / "ckpt", tmp_path / "out", "--to", "deepspeed", "--model-config", config_of(name))
    every = groups_of(source("deepspeed/zero1-dp2-bf16"))[0]
    for group in groups_of(tmp_path / "out"):
        assert group == [n for n in every if n in group]


@pytest.mark.real
def test_without_a_family_the_order_is_the_user_s_or_there_is_none(tmp_path):
    a = source("torch/fsdp2_dp2_flatoptim_dcp") / "ckpt"
    error = refused("convert", a, tmp_path / "out", "--to", "deepspeed")
    assert error["code"] == "param-order"
    assert "--param-order" in error["fix"]
    good("convert", a, tmp_path / "universal", "--to", "deepspeed", "--universal")
    every = groups_of(source("deepspeed/zero1-dp2-bf16"))[0]
    order = tmp_path / "order.txt"
    order.write_text("\n".join(every))
    good("convert", a, tmp_path / "out", "--to", "deepspeed", "--param-order", order)
    for group in groups_of(tmp_path / "out"):
        assert group == [n for n in every if n in group]
    order.write_text("\n".join(every[1:]))
    error = refused("convert", a, tmp_path / "less", "--to", "deepspeed", "--param-order", order)
    assert every[0] in error["what"]


@pytest.mark.real
def test_a_stage_that_is_none_is_wrong_usage(tmp_path):
    done = command("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "out", "--zero-stage", "4")
    assert done.code == 2
    assert "--zero-stage 4" in done.err


@pytest.mark.parametrize("words", [["--zero-stage", "2"], ["--zero-stage", "3"], ["--universal"]], ids=" ".join)
def test_a_parameter_without_elements_is_in_no_flat_group(words, tmp_path):
    """DeepSpeed's partitioned optimizer does not have it, and refuses a file that counts it."""
    params = {"a": arange(3, 2), "nothing": arange(0, 4), "b": arange(5)}
    torch_save(tmp_path / "s.pt", {"model": params, "optimizer": adamw(list(params), params)})
    good("convert", tmp_path / "s.pt", tmp_path / "a", "--to", "deepspeed", "--dp", "2", *words)
    (file, *_) = sorted((tmp_path / "a").glob("*/*_model_states.pt"))
    with Pile(file.parent).open(file.name) as opened:
        assert [n for g in opened.root["param_shapes"] for n in g] == ["a", "b"]
        assert list(opened.root["frozen_param_shapes"]) == ["nothing"]
    with ckptctl.open(tmp_path / "a") as view:
        assert view["nothing"].shape == (0, 4)
        assert (view.state("b", "exp_avg").numpy() == params["b"] + np.float32(0.5)).all()


# ---- stage 0 --------------------------------------------------------------------------------------------------------


def tree_of(path):
    """The pickle of a torch file as data, as a reader that knows no class sees it."""
    with Pile(path).open("global_step3/mp_rank_00_model_states.pt") as opened:
        return opened.root


@pytest.mark.real
def test_a_whole_optimizer_is_kept_by_numbers_in_the_order_of_the_groups(tmp_path):
    """Stage 0 as stock DeepSpeed has it: torch's state dict by parameter, with the wrapper's masters by group."""
    good("reshard", source("deepspeed/zero2-dp2-bf16-roundrobin"), tmp_path / "out", "--zero-stage", "0")
    own, found = tree_of(source("deepspeed/zero0-dp2-bf16")), tree_of(tmp_path / "out")
    assert list(found["optimizer"]) == list(own["optimizer"])
    assert found["param_shapes"] is None
    inner = found["optimizer"]["optimizer_state_dict"]
    assert list(inner["state"]) == list(range(39))
    assert list(inner["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
    decay, rest = inner["param_groups"]
    assert decay["params"] + rest["params"] == list(range(39))
    assert [len(g) for g in found["optimizer"]["fp32_groups"]] == [len(decay["params"]), len(rest["params"])]
    with ckptctl.open(source("deepspeed/zero2-dp2-bf16-roundrobin")) as view:
        names = [n for g in view.checkpoint.optimizer.groups for n in g.params]
        for number, name in enumerate(names):
            assert inner["state"][number]["exp_avg"].shape == view.state(name, "exp_avg").shape


@pytest.mark.real
def test_a_float32_run_has_no_wrapper(tmp_path):
    good("reshard", source("deepspeed/zero3-dp4-fp32"), tmp_path / "out", "--zero-stage", "0")
    assert list(tree_of(tmp_path / "out")["optimizer"]) == ["state", "param_groups"]


@pytest.mark.real
def test_a_dynamic_loss_scale_is_counted_by_the_wrapper(tmp_path):
    good("reshard", source("deepspeed/zero2-dp2-fp16"), tmp_path / "out", "--zero-stage", "0")
    own, found = tree_of(source("deepspeed/zero0-dp1-fp16"))["optimizer"], tree_of(tmp_path / "out")["optimizer"]
    counted = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    assert {k: found[k] for k in counted} == {k: own[k] for k in counted}


@pytest.mark.real
def test_stage_zero_stays_stage_zero(tmp_path):
    a = source("deepspeed/zero0-dp2-bf16")
    good("reshard", a, tmp_path / "out", "--dp", "4")
    got = document("inspect", tmp_path / "out")
    assert (got["layout"]["zero_stage"], got["layout"]["dp"]) == (0, 4)
    assert document("diff", a, tmp_path / "out", "--optimizer", "--state")["differences"] == []


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "words", "code"),
    [
        (MOE, ["--zero-stage", "0"], "unsupported"),
        ("deepspeed/zero1-dp2-fp32-elastic", ["--zero-stage", "0"], "unsupported"),
        ("deepspeed/zero2-dp4-bf16-groups-frozen", ["--zero-stage", "3", "--universal"], "universal-stage-3"),
        (MOST, ["--zero-stage", "0", "--universal"], "unsupported"),
    ],
)
def test_what_a_stage_has_no_form_for_is_refused(name, words, code, tmp_path):
    error = refused("reshard", source(name), tmp_path / "out", *words)
    assert error["code"] == code
    assert "--zero-stage" in error["fix"]
    assert not (tmp_path / "out").exists()


@pytest.mark.real
@pytest.mark.parametrize("words", [["--zero-stage", "2"], ["--zero-stage", "0"], ["--universal"]], ids=" ".join)
def test_numbers_that_mean_no_parameter_are_never_written_as_names(words, tmp_path):
    """With frozen parameters the numbers of stage 0 fit several orders: masters are nobody's weights then."""
    a = source("deepspeed/zero2-dp4-bf16-groups-frozen")
    good("reshard", a, tmp_path / "zero", "--zero-stage", "0")
    shown = document("inspect", tmp_path / "zero")
    assert shown["kinds"]["weight"]["tensors"] == 39
    error = refused("reshard", tmp_path / "zero", tmp_path / "out", *words)
    assert error["code"] == "param-order"
    assert "--param-order" in error["fix"]
    order = tmp_path / "order"
    order.write_text("\n".join(n for g in groups_of(a) for n in g))
    good("reshard", tmp_path / "zero", tmp_path / "out", *words, "--param-order", order)
    order_known = ["--param-order", order] if "0" in words else []
    assert document("diff", a, tmp_path / "out", "--optimizer", *order_known)["equal"]


def test_stage_zero_is_for_deepspeed_alone(tmp_path):
    done = command("convert", source(MOST), tmp_path / "out", "--to", "torch", "--zero-stage", "0")
    assert done.code == 2
    assert "--zero-stage is for --to deepspeed" in done.err


def held(path):
    """Name -> digest of the weights of a run's folder."""
    with ckptctl.open(path) as view:
        return {name: digest("F32", t.shape, t.numpy().tobytes()) for name, t in view.items()}


def test_files_names_become_those_of_the_model_that_loads_them(tmp_path):
    """DeepSpeed loads by the names of the model in memory; a Transformers 4 model has an expert a tensor there."""
    memory, files, config = fixture("hf/mixtral-fused-names"), tmp_path / "files", tmp_path / "config.json"
    good("convert", memory, files, "--to", "hf")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in digests(files)
    good("convert", files, tmp_path / "five", "--to", "deepspeed")
    assert held(tmp_path / "five") == digests(memory)
    good("convert", files, tmp_path / "asked", "--to", "deepspeed", "--names", "disk")
    assert held(tmp_path / "asked") == digests(files)
    said = json.loads((files / "config.json").read_text())
    config.write_text(json.dumps({**said, "transformers_version": "4.57.1"}))
    good("convert", files, tmp_path / "four", "--to", "deepspeed", "--model-config", config)
    assert held(tmp_path / "four") == digests(files)
    config.write_text(json.dumps(said))  # a run's own names are those of its memory already, whatever the config says
    good("convert", tmp_path / "asked", tmp_path / "run", "--to", "deepspeed", "--model-config", config)
    assert held(tmp_path / "run") == digests(files)


def test_a_parameter_without_gradient_has_no_state_at_stage_0_and_no_place_in_flat_tensors(tmp_path):
    """torch.optim makes a parameter's state at its first gradient."""
    weights = {n: np.arange(k, dtype=np.float32).reshape(s) for n, k, s in (("a", 6, (2, 3)), ("unused", 4, (4,)))}
    moments = {k: weights["a"] + i for i, k in enumerate(("exp_avg", "exp_avg_sq"), 1)}
    state = {"a": {"step": np.array(3, np.float32), **moments}}
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = {"state": state, "param_groups": [{**settings, "params": ["a", "unused"]}]}
    source = torch_save(tmp_path / "state.pt", {"model": weights, "optimizer": optimizer})
    good("convert", source, tmp_path / "out", "--to", "deepspeed", "--zero-stage", "0")
    tree = torch_tree(next((tmp_path / "out").rglob("mp_rank_00_model_states.pt")))
    assert [list(s) for s in tree["optimizer"]["state"].values()] == [["step", "exp_avg", "exp_avg_sq"]]
    assert [g["params"] for g in tree["optimizer"]["param_groups"]] == [[0, 1]]
    assert document("diff", source, tmp_path / "out", "--optimizer")["equal"]
    for stage in ("1", "2", "3"):
        error = refused("convert", source, tmp_path / stage, "--to", "deepspeed", "--zero-stage", stage, code=3)
        assert error["what"] == "unused has no exp_avg, and others of its param group have"
