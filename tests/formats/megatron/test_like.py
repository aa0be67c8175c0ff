"""--like: what a result takes from the run that it is for, against what real runs saved."""

from __future__ import annotations

import json

import pytest

from ckptctl.formats.megatron import like, schedule
from ckptctl.operations.opening import open_checkpoint
from tests.formats.megatron.test_read import CLASSIC, DIST, TIED
from tests.support.bruteforce import torch_tree
from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import ckptctl, document, refused

TORCH = "torch/fsdp2_dp2_dcp"
FLAGS = """#!/bin/bash
torchrun pretrain_gpt.py --train-iters 6 --global-batch-size 4 \\
    --lr 1e-3 --min-lr=1e-3 --lr-decay-style constant --weight-decay 0.1 --make-vocab-size-divisible-by 8 \\
    --disable-bias-linear --no-bias-swiglu-fusion --tensor-model-parallel-size 2 --seed 77
"""
LINES = """---
train_iters: 6
global-batch-size: 4   # samples
lr: 0.001
min_lr: 1.0e-3
lr_decay_style: "constant"
weight_decay: 0.1
make_vocab_size_divisible_by: 8
add_bias_linear: false
tensor_model_parallel_size: 2
seed: 77
"""
BRIDGE = """_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.LlamaModelProvider
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 8
  num_query_groups: 4
  ffn_hidden_size: 96
  tensor_model_parallel_size: 2
  make_vocab_size_divisible_by: 8
train:
  train_iters: 6
  global_batch_size: 4
optimizer:
  lr: 0.001
  min_lr: 0.001
  weight_decay: 0.1
scheduler:
  lr_decay_style: constant
rng:
  seed: 77
"""
JSON = {"--lr": 0.001, "min-lr": 0.001, "train_iters": 6, "global_batch_size": 4, "lr_decay_style": "constant"}
JSON |= {"weight_decay": 0.1, "make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2, "seed": 77}
REAL = {
    "max_lr": 0.001, "lr_warmup_steps": 0, "num_steps": 12, "lr_decay_style": "constant", "lr_decay_steps": 24,
    "min_lr": 0.001, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 24,
}  # fmt: skip
"""What a real run of 6 iterations of 4 samples saved after the third: legacy_tp2pp2_distopt_dp2."""


def root_of(out):
    return torch_tree(
        min(out.glob("iter_*/mp_rank_*/model_optim_rng.pt"), default=None) or next(out.glob("iter_*/common.pt"))
    )


@pytest.mark.parametrize("name", [CLASSIC, TIED, DIST])
def test_constants_of_args_are_those_that_the_run_saved(name):
    checkpoint = open_checkpoint(ckpt(name))[0]
    constants = schedule.constants_of(checkpoint.native["args"].state)
    assert checkpoint.values["opt_param_scheduler"] == REAL
    assert schedule.saved(constants, 12) == REAL
    assert list(schedule.saved(constants, 12)) == list(REAL)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", FLAGS),
        ("args.yaml", LINES),
        ("args.json", json.dumps(JSON)),
        ("run_config.yaml", BRIDGE),
        ("sections.yaml", BRIDGE.replace("model:", "language_model:")),
    ],
)
def test_a_file_of_arguments_gives_schedule_and_mesh(name, text, tmp_path):
    file, out = tmp_path / name, tmp_path / "out"
    file.write_text(text)
    words = ("--to", "megatron", "--like", file, "--megatron-format", "torch", "--model-config", truth_config(TORCH))
    done = document("convert", ckpt(TORCH), out, *words)
    root = root_of(out)
    assert root["opt_param_scheduler"] == REAL
    args = root["args"].state
    assert args["consumed_train_samples"] == 12
    assert args["padded_vocab_size"] == 144
    assert args["seed"] == 77
    assert document("inspect", out)["layout"]["tp"] == 2
    parts = {x["part"]: x["detail"] for x in done["fidelity"]}
    assert parts["scheduler"] == "the curve of --like, at sample 12"
    assert parts["counters"] == "iteration 3, 12 samples: its steps in batches of the run of --like"
    assert "seeded from 77" in parts["random state"]
    assert "learning rate" not in parts


def test_a_checkpoint_of_the_run_gives_all_that_no_flag_says(tmp_path):
    out, name = tmp_path / "out", "megatron/legacy_tp2pp2_distopt_dp2"
    config = truth_config(name)
    good_words = ("--to", "dcp", "--model-config", config)
    document("convert", ckpt(name), tmp_path / "dcp", *good_words)
    words = ("--to", "megatron", "--like", ckpt(name), "--model-config", config)
    document("convert", tmp_path / "dcp", out, *words)
    told = document("inspect", out)
    assert told["variant"] == "classic"
    assert {k: told["layout"][k] for k in ("tp", "pp", "dp")} == {"tp": 2, "pp": 2, "dp": 2}
    assert len(list(out.glob("iter_0000003/mp_rank_*/distrib_optim.pt"))) == 4
    ours = root_of(out)
    theirs = torch_tree(min(ckpt(name).glob("**/mp_rank_*/model_optim_rng.pt")))
    assert ours["opt_param_scheduler"] == theirs["opt_param_scheduler"]
    for key in ("lr", "train_iters", "global_batch_size", "padded_vocab_size", "transformer_impl", "seed"):
        assert ours["args"].state[key] == theirs["args"].state[key], key
    groups = [
        [
            {k: g[k] for k in ("max_lr", "min_lr", "lr", "wd_mult", "weight_decay")}
            for g in r["optimizer"]["optimizer"]["param_groups"]
        ]
        for r in (ours, theirs)
    ]
    assert groups[0] == groups[1]


def test_a_curve_that_is_elsewhere_is_told(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(FLAGS.replace("--min-lr=1e-3 --lr-decay-style constant", "--min-lr 0 --lr-decay-style linear"))
    words = ("--to", "megatron", "--like", file, "--model-config", truth_config(TORCH))
    done = document("convert", ckpt(TORCH), tmp_path / "out", *words)
    line = next(x for x in done["fidelity"] if x["part"] == "learning rate")
    assert line["fate"] == "converted"
    assert line["detail"] == "it goes on with 0.0005 by that curve, the source was at 0.001"


def test_reshard_takes_it_too_and_keeps_how_far_the_run_is(tmp_path):
    file, out = tmp_path / "args.yaml", tmp_path / "out"
    file.write_text("lr: 0.002\nmin_lr: 0.002\nlr_decay_style: constant\ntrain_iters: 100\nglobal_batch_size: 8\n")
    document("reshard", ckpt(TIED), out, "--like", file)
    root = root_of(out)
    assert (root["opt_param_scheduler"]["num_steps"], root["opt_param_scheduler"]["lr_decay_steps"]) == (12, 800)
    assert root["opt_param_scheduler"]["max_lr"] == 0.002
    assert root["args"].state["consumed_train_samples"] == 12
    assert root["iteration"] == 3


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("--num-layers 9", "num_layers 9, the model 4", "like-differs"),
        ("--bf16", "bf16 True, and the weights are float32", "like-differs"),
        ("model:\n  lr: 1\n", "does not say num_layers", "args-missing"),
        ("lr: 1\n   min_lr: 1\n", "no YAML that is read here", "yaml"),
        ("{not json", "no JSON", "damaged"),
        ("", "holds no arguments", "damaged"),
        ("--tensor-model-parallel-size 3", "--tp 3 does not divide", "mesh-does-not-divide"),
        ("--num-layers-per-virtual-pipeline-stage 1", "needs num_layers", "missing-fact"),
        ("--seed 0", "seed in args is 0", "args-damaged"),
    ],
)
def test_a_run_of_something_else_is_refused(text, words, code, tmp_path):
    file = tmp_path / "args"
    file.write_text(text)
    flags = ("--to", "megatron", "--like", file, "--model-config", truth_config(TORCH))
    error = refused("convert", ckpt(TORCH), tmp_path / "out", *flags)
    assert (error["code"], words in error["what"]) == (code, True), error
    assert not (tmp_path / "out").exists()


def test_places_where_no_run_is(tmp_path):
    flags = ("--to", "megatron", "--model-config", truth_config(TORCH), "--like")
    assert refused("convert", ckpt(TORCH), tmp_path / "a", *flags, tmp_path / "none")["code"] == "missing-file"
    assert refused("convert", ckpt(TORCH), tmp_path / "a", *flags, tmp_path)["code"] == "unrecognised"
    assert ckptctl("convert", ckpt(TORCH), tmp_path / "a", "--to", "torch", "--like", tmp_path, "--json").code == 2


def test_values_of_flags_by_hand():
    assert like._flags("--a 1 --b-c=x --no-d --e 1 2 --f '3 4' --no-load-rng --g -1e-2", "") == {
        "a": 1, "b_c": "x", "d": False, "e": [1, 2], "f": "3 4", "no_load_rng": True, "g": -0.01,
    }  # fmt: skip


def test_chunks_of_one_stage_are_told(tmp_path):
    """Megatron's own arguments refuse them: core_v0.16.1, training/arguments.py, validate_args."""
    done = document("reshard", ckpt(TIED), tmp_path / "out", "--pp", "1", "--vpp", "2")
    assert next(x["detail"] for x in done["fidelity"] if x["part"] == "chunks") == (
        "2 on one stage: Megatron runs chunks with --pp above 1 only"
    )


@pytest.mark.parametrize(
    ("style", "at", "rate"),
    [("constant", 99, 8.0), ("linear", 40, 6.0), ("cosine", 60, 4.0), ("linear", 101, 0.0), ("linear", 10, None)],
)
def test_rates_by_hand(style, at, rate):
    constants = {"max_lr": 8.0, "min_lr": 0.0, "lr_warmup_steps": 20, "lr_decay_steps": 100, "lr_decay_style": style}
    got = schedule.lr_at(constants, at)
    assert got == pytest.approx(rate) if rate is not None else got is None


def test_a_trainers_length_is_the_schedules():
    name = "torch/trainer"
    source = open_checkpoint(ckpt(name))[0]
    assert schedule.length_of(source) == 24
