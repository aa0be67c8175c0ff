"""Optimizers of runs with other groups than most, loss scales, and what is not whole: small files made here.

Groups are as the real code makes them: core_v0.16.1, core/optimizer/__init__.py, get_standard_config_overrides; loss
scales as core/optimizer/grad_scaler.py, DynamicGradScaler.state_dict.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ckptctl.core.checkpoint import Group, Optimizer
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key
from ckptctl.core.values import Array
from ckptctl.formats.megatron import state, told
from ckptctl.formats.megatron.facts import of_namespace
from ckptctl.formats.megatron.found import Found
from ckptctl.operations.opening import open_checkpoint
from tests.support.bruteforce import torch_tree
from tests.support.commands import document, good, refused
from tests.support.saving import torch_save

HIDDEN, FFN, VOCAB, HEADS, LAYERS = 8, 12, 16, 4, 2
RNG = np.random.default_rng(5)
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS, "kv_channels": 2,
    "padded_vocab_size": VOCAB, "vocab_size": VOCAB - 1, "tokenizer_type": "NullTokenizer", "swiglu": True,
    "untie_embeddings_and_output_weights": True, "make_vocab_size_divisible_by": 4, "transformer_impl": "local",
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "data_parallel_size": 1, "decoupled_lr": None, "consumed_train_samples": 28, "qk_layernorm": True,
}  # fmt: skip


def layer(i):
    at = f"decoder.layers.{i}."
    return {
        f"{at}input_layernorm.weight": (HIDDEN,),
        f"{at}self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        f"{at}self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
        f"{at}self_attention.q_layernorm.weight": (2,),
        f"{at}self_attention.k_layernorm.weight": (2,),
        f"{at}pre_mlp_layernorm.weight": (HIDDEN,),
        f"{at}mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        f"{at}mlp.linear_fc2.weight": (HIDDEN, FFN),
    }


SHAPES = {EMBEDDING: (VOCAB, HIDDEN), **layer(0), **layer(1), "decoder.final_layernorm.weight": (HIDDEN,)}
SHAPES[HEAD] = (VOCAB, HIDDEN)
MODEL = {n: RNG.standard_normal(s, np.float32) for n, s in SHAPES.items()}
NORMS = [n for n, s in SHAPES.items() if len(s) == 1]
MATRICES = [n for n in SHAPES if n not in NORMS]


def group(names, first, *, wd_mult=1.0, lr=0.1, **more):
    plain = {"lr": lr, "max_lr": lr, "min_lr": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1 * wd_mult}
    own = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    ids = list(range(first, first + len(names)))
    return {**plain, **own, "default_config": True, "params": ids, **more}


def optimizer(*sets, **more):
    """The plain optimizer of named sets with settings; moments are the weights times 2 and 3."""
    groups, order = [], []
    for names, settings in sets:
        groups.append(group(names, len(order), **settings))
        order += names
    state = {
        i: {"step": np.array(7, np.float32), "exp_avg": 2 * MODEL[n], "exp_avg_sq": 3 * MODEL[n]}
        for i, n in enumerate(order)
    }
    return {"state": state, "param_groups": groups, **more}


def saved(tmp_path, tree, model=None, **said):
    """A run's folder of one rank; model's dict is `model`, or what replaces it."""
    folder = tmp_path / "run" / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    root = {"args": {**ARGS, **said}, "checkpoint_version": 3.0, "iteration": 7, **(model or {"model": MODEL})}
    torch_save(folder / "model_optim_rng.pt", {**root, "optimizer": tree} if tree else root)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    return tmp_path / "run"


NO_DECAY = (NORMS, {"wd_mult": 0.0})
DECOUPLED = [EMBEDDING, HEAD]
REST = [n for n in MATRICES if n not in DECOUPLED]
OWN_RATE = {"lr": 0.3, "default_config": False}


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("settings", [OWN_RATE, {"lr": 0.3, "is_decoupled_lr": True}], ids=["0.16", "before"])
def test_decoupled_learning_rates_stay_with_embedding_and_head(form, settings, tmp_path):
    run = saved(tmp_path, optimizer((REST, {}), (DECOUPLED, settings), NO_DECAY), decoupled_lr=0.3)
    out = tmp_path / "out"
    good("reshard", run, out, "--tp", "2", "--megatron-format", form)
    for path in (run, out):
        groups = open_checkpoint(path)[0].optimizer.groups
        assert [sorted(g.params) for g in groups] == [sorted(x) for x in (REST, DECOUPLED, NORMS)]
        assert [g.options["lr"] for g in groups] == [0.1, 0.3, 0.1]
        assert [g.options["max_lr"] for g in groups] == [0.1, 0.3, 0.1]


def test_a_run_of_decoupled_rates_gets_its_groups_from_another_s(tmp_path):
    (tmp_path / "flags").write_text("--decoupled-lr 0.3 --lr 0.2 --train-iters 9 --global-batch-size 4")
    run, out = saved(tmp_path, optimizer((MATRICES, {}), NO_DECAY)), tmp_path / "out"
    good("convert", run, out, "--to", "megatron", "--like", tmp_path / "flags")
    groups = open_checkpoint(out)[0].optimizer.groups
    assert [sorted(g.params) for g in groups] == [sorted(x) for x in (REST, DECOUPLED, NORMS)]
    assert [(g.options["max_lr"], g.options["default_config"]) for g in groups] == [
        (0.2, True),
        (0.3, False),
        (0.2, True),
    ]


@pytest.mark.parametrize("said", [{"decoupled_lr": 0.3}, {"data_parallel_size": 0, "context_parallel_size": 0}])
def test_args_that_the_groups_do_not_know_change_no_group(said, tmp_path):
    run, out = saved(tmp_path, optimizer((MATRICES, {}), NO_DECAY), **said), tmp_path / "out"
    good("reshard", run, out, "--optimizer", "distributed", "--megatron-format", "torch")
    assert [sorted(g.params) for g in open_checkpoint(out)[0].optimizer.groups] == [sorted(MATRICES), sorted(NORMS)]


def test_rates_of_groups_that_no_flag_explains_are_refused(tmp_path):
    run = saved(tmp_path, optimizer((REST, {}), (DECOUPLED, OWN_RATE), NO_DECAY))
    assert refused("inspect", run)["code"] == "optimizer-groups"


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    "said", [{"apply_wd_to_qk_layernorm": True}, {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}]
)
def test_norms_of_queries_and_keys_that_decay_stay_with_the_matrices(said, form, tmp_path):
    decayed = [n for n in SHAPES if n in MATRICES or "self_attention.q_layer" in n or "self_attention.k_layer" in n]
    rest = [n for n in SHAPES if n not in decayed]
    run = saved(tmp_path, optimizer((decayed, {}), (rest, {"wd_mult": 0.0})), **said)
    out = tmp_path / "out"
    good("reshard", run, out, "--tp", "2", "--pp", "2", "--megatron-format", form)
    for path in (run, out):
        groups = open_checkpoint(path)[0].optimizer.groups
        assert [(sorted(g.params), g.options["wd_mult"]) for g in groups] == [(sorted(decayed), 1), (sorted(rest), 0)]


@pytest.mark.parametrize("own", [True, False])
def test_bounds_of_another_scheduler_are_not_taken_for_megatron_s(own):
    """OneCycleLR keeps its bounds in the groups, where a run of Megatron would follow them instead of its flags."""
    rate = Array("float64", (), np.float64(0.1).tobytes())  # as a DCP of torch's capturable Adam has it
    options = {"lr": rate, "max_lr": 0.4, "min_lr": 1e-6, "weight_decay": 0.1, **({"wd_mult": 1.0} if own else {})}
    facts = of_namespace(None, "args")
    groups = state.groups_of(
        Optimizer((Group(("a",), options),)),
        {"a": (2, 2)},
        3,
        sorting=state.Sorting(False),
        facts=facts,
        distributed=True,
    )
    written = groups.of[state.Sort(decays=True, experts=False)]
    assert [written.get(k) for k in ("lr", "max_lr", "min_lr")] == ([0.1, 0.4, 1e-6] if own else [0.1, None, None])


# ---- loss scale -----------------------------------------------------------------------------------------------------

SCALE = {"scale": np.array([131072.0], np.float32), "growth_tracker": 1, "hysteresis_tracker": 2}
HALF = {n: a.astype(np.float16) for n, a in MODEL.items()}


def half_run(tmp_path, **said):
    plain = optimizer((MATRICES, {}), NO_DECAY)
    masters = [[HALF[n].astype(np.float32) for n in names] for names in (MATRICES, NORMS)]
    tree = {"optimizer": plain, "grad_scaler": SCALE, "fp32_from_fp16_params": masters}
    return saved(tmp_path, tree, {"model": HALF}, fp16=True, bf16=False, **said)


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_the_loss_scale_of_a_float16_run_goes_along(form, kind, tmp_path):
    out = tmp_path / "out"
    answer = good(
        "reshard", half_run(tmp_path), out, "--pp", "2", "--megatron-format", form, "--optimizer", kind, "--json"
    )
    assert {"part": "loss scale", "fate": "carried", "detail": "with its counters"} in answer.json["fidelity"]
    files = sorted(out.glob("iter_*/common.pt" if form == "torch_dist" else "iter_*/mp_rank_*/model_optim_rng.pt"))
    assert len(files) == (1 if form == "torch_dist" else 2)
    for file in files:
        scaler = torch_tree(file)["optimizer"]["grad_scaler"]
        assert {k: v for k, v in scaler.items() if k != "scale"} == {"growth_tracker": 1, "hysteresis_tracker": 2}
    assert document("inspect", out)["state_values"]["other"]["grad_scaler"] == {
        "scale": [131072.0], "growth_tracker": 1, "hysteresis_tracker": 2
    }  # fmt: skip


def test_a_result_of_another_type_has_no_loss_scale_and_says_its_type(tmp_path):
    out = tmp_path / "out"
    words = ("--to", "megatron", "--dtype", "bfloat16", "--weights", "master", "--megatron-format", "torch", "--json")
    answer = good("convert", half_run(tmp_path), out, *words)
    assert [x["fate"] for x in answer.json["fidelity"] if x["part"] == "loss scale"] == ["dropped"]
    root = torch_tree(next(out.glob("iter_*/mp_rank_00/model_optim_rng.pt")))
    args = root["args"].state
    assert (args["fp16"], args["bf16"], str(args["params_dtype"])) == (False, True, "torch.bfloat16")
    assert "grad_scaler" not in root["optimizer"]


def test_a_loss_scale_beside_weights_alone_is_said_to_be_dropped():
    values = SimpleNamespace(values={"grad_scaler": {"scale": 2.0}})
    line = told._scaler_line(SimpleNamespace(groups=None, content=values))
    assert (line.part, line.fate) == ("loss scale", "dropped")


def test_optimizers_of_one_rank_with_loss_scales_apart_are_no_damage():
    other = {**SCALE, "growth_tracker": 0}
    with pytest.raises(Unsupported, match="loss scales apart"):
        Found(of_namespace(None, "args"), "torch_dist").add_scaler(
            [{"grad_scaler": SCALE}, {"grad_scaler": other}], None
        )
    found = Found(of_namespace(None, "args"), "torch_dist")
    found.add_scaler([{"grad_scaler": SCALE}, {"grad_scaler": SCALE}], None)
    with pytest.raises(Damaged, match="ranks do not agree on the loss scale"):
        found.add_scaler([{"grad_scaler": other}], None)


# ---- what is not whole ----------------------------------------------------------------------------------------------


def test_settings_in_another_order_are_the_same():
    found = Found(of_namespace(None, "args"), "classic")
    found.add_group({"lr": 0.1, "wd_mult": 1.0}, ["a", "b"], 3, "one")
    found.add_group({"wd_mult": 1.0, "lr": 0.1}, ["b", "c"], 3, "two")
    assert [list(names) for _, names in found.groups] == [["a", "b", "c"]]
    with pytest.raises(Damaged, match="ranks do not agree on lr"):
        found.add_group({"wd_mult": 1.0, "lr": 0.2}, ["c"], 3, "three")


def test_a_parameter_with_one_moment_of_two_is_refused(tmp_path):
    tree = optimizer((MATRICES, {}), NO_DECAY)
    del tree["state"][3]["exp_avg_sq"]
    error = refused("inspect", saved(tmp_path, tree))
    assert (error["code"], error["what"]) == ("optimizer-damaged", f"{MATRICES[3]} has no exp_avg_sq")


def test_a_parameter_without_any_moment_was_not_trained(tmp_path):
    tree = optimizer((MATRICES, {}), NO_DECAY)
    del tree["state"][3]
    checkpoint = open_checkpoint(saved(tmp_path, tree))[0]
    assert {n for n in SHAPES if Key(n, "exp_avg") not in checkpoint.tensors} == {MATRICES[3]}


def test_masters_of_some_groups_only_are_refused(tmp_path):
    plain = optimizer((MATRICES, {}), NO_DECAY)
    tree = {"optimizer": plain, "fp32_from_fp16_params": [[MODEL[n] for n in MATRICES]]}
    error = refused("inspect", saved(tmp_path, tree, {"model": HALF}))
    assert error["what"] == "the optimizer has 2 groups, and float32 copies of 1"


@pytest.mark.parametrize("copies", [[5, None], [np.zeros(3, np.float32), []], {0: [], 1: []}, "ab"])
def test_float32_copies_of_another_form_are_refused(copies, tmp_path):
    tree = {"optimizer": optimizer((MATRICES, {}), NO_DECAY), "fp32_from_fp16_params": copies}
    assert refused("inspect", saved(tmp_path, tree, {"model": HALF}))["code"].startswith("optimizer-")


def test_a_head_of_its_own_beside_args_of_a_tied_model_is_no_embedding(tmp_path):
    model = {n: a for n, a in HALF.items() if n != EMBEDDING}
    matrices = [n for n in MATRICES if n in model]
    masters = [[HALF[n].astype(np.float32) for n in names] for names in (matrices, NORMS)]
    tree = {"optimizer": optimizer((matrices, {}), NO_DECAY), "fp32_from_fp16_params": masters}
    run = saved(tmp_path, tree, {"model": model}, untie_embeddings_and_output_weights=False)
    assert sorted(open_checkpoint(run)[0].optimizer.groups[0].params) == sorted(matrices)


def test_each_thing_of_an_optimizer_that_is_not_read_is_told_once(tmp_path):
    tree = {"optimizer": optimizer((MATRICES, {}), NO_DECAY), "step": 3, "tep": 4}
    run = saved(tmp_path, tree)
    told_of = [w for w in open_checkpoint(run)[0].warnings if "not read" in w]
    assert [w.rpartition(": ")[2] for w in told_of] == ["step, tep"]
    found = Found(of_namespace(None, "args"), "torch_dist")
    for rest in ({"ab": 1}, {"ab": 1, "a": 2}):
        found.add_scaler([rest], None)
    assert [w.rpartition(": ")[2] for w in found.warnings] == ["ab", "a"]


@pytest.mark.parametrize("what", ["absent", "beyond", "twice", "no number"])
def test_groups_that_do_not_number_the_states_are_refused(what, tmp_path):
    tree = optimizer((MATRICES, {}), NO_DECAY)
    if what == "absent":
        del tree["param_groups"][0]["params"]
    elif what == "beyond":
        tree["state"][999] = tree["state"][0]
    elif what == "no number":
        tree["param_groups"][0]["params"][0] = {}
    else:
        tree["param_groups"][1]["params"][0] = 0
    assert refused("inspect", saved(tmp_path, tree))["code"] == "optimizer-groups"


def test_chunks_that_args_do_not_tell_of_are_refused(tmp_path):
    late = {n: a for n, a in MODEL.items() if n in ("decoder.final_layernorm.weight", HEAD)}
    chunks = {"model0": {n: a for n, a in MODEL.items() if n not in late}, "model1": late}
    error = refused("inspect", saved(tmp_path, None, chunks))
    assert (error["code"], error["what"]) == ("args-missing", "a rank's file has model1, and args say 1 chunks a stage")


def test_two_names_of_one_parameter_are_refused(tmp_path):
    name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    error = refused("inspect", saved(tmp_path, None, {"model": {**MODEL, name: np.zeros(HIDDEN, np.float32)}}))
    assert error["code"] == "duplicate-tensor"


def test_what_is_no_tensor_among_the_weights_is_told_and_not_let_go(tmp_path):
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    run = saved(tmp_path, None, {"model": {**MODEL, name: 3.5}})
    assert name in document("inspect", run)["unsupported"][0]["what"]
    assert refused("reshard", run, tmp_path / "out")["code"] == "unsupported"


def two_ranks(tmp_path, *rates):
    """A run of two tensor-parallel ranks that hold one norm, each with a learning rate of its own."""
    run = saved(tmp_path, None, tensor_model_parallel_size=2)
    first = next(run.glob("iter_*/mp_rank_00"))
    for rank, lr in enumerate(rates):
        tree = optimizer((NORMS[:1], {"wd_mult": 0.0, "lr": lr}))
        model = {n: a for n, a in MODEL.items() if n == NORMS[0]}
        file = first.with_name(f"mp_rank_0{rank}") / "model_optim_rng.pt"
        file.parent.mkdir(exist_ok=True)
        said = {**ARGS, "tensor_model_parallel_size": 2, "num_layers": 1}
        root = {"args": said, "checkpoint_version": 3.0, "iteration": 7, "rng_state": [np.arange(rank, dtype=np.uint8)]}
        torch_save(file, {**root, "model": model, "optimizer": tree})
    return run


def test_ranks_whose_groups_have_other_settings_are_refused(tmp_path):
    error = refused("inspect", two_ranks(tmp_path, 0.1, 0.3))
    assert (error["code"], error["what"]) == (
        "ranks-differ", f"ranks do not agree on lr of the optimizer's group of {NORMS[0]}"
    )  # fmt: skip


def test_a_learning_rate_that_is_a_tensor_is_the_same_on_all_ranks(tmp_path):
    """A capturable Adam's. Each rank's lies at a place of its own in its file."""
    rate = np.array(0.25, np.float32)
    (group,) = open_checkpoint(two_ranks(tmp_path, rate, rate.copy()))[0].optimizer.groups
    assert group.options["lr"] == 0.25


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_settings_that_are_tensors_are_written_as_numbers(form, tmp_path):
    rate = {"lr": np.array(0.25, np.float32)}
    run, out = saved(tmp_path, optimizer((MATRICES, rate), (NORMS, {"wd_mult": 0.0, **rate}))), tmp_path / "out"
    good("reshard", run, out, "--megatron-format", form)
    assert [g.options["lr"] for g in open_checkpoint(out)[0].optimizer.groups] == [0.25, 0.25]
    file = next(out.glob("iter_*/common.pt" if form == "torch_dist" else "iter_*/mp_rank_*/model_optim_rng.pt"))
    scheduler = torch_tree(file)["opt_param_scheduler"]
    assert scheduler["max_lr"] == 0.25


def test_a_learning_rate_that_is_no_number_is_refused(tmp_path):
    run = saved(tmp_path, optimizer((MATRICES, {"lr": "fast"}), NO_DECAY))
    assert refused("reshard", run, tmp_path / "out")["code"] == "optimizer-groups"


@pytest.mark.parametrize("step", [np.zeros(0, np.float32), np.array(1j, np.complex64)])
def test_steps_of_no_element_or_no_real_number_are_no_internal_error(step, tmp_path):
    tree = optimizer((MATRICES, {}), NO_DECAY)
    for state_of_one in tree["state"].values():
        state_of_one["step"] = step
    document("inspect", saved(tmp_path, tree))


def test_a_folder_called_by_another_iteration_than_its_files_is_told(tmp_path):
    run = saved(tmp_path, None)
    assert not [w for w in document("inspect", run)["warnings"] if "iteration" in w]
    (run / "iter_0000007").rename(run / "iter_0000008")
    answer = document("inspect", run / "iter_0000008")
    assert (answer["step"], answer["warnings"][0][:40]) == (7, "iter_0000008 holds files of iteration 7:")


# ---- mesh -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|L",
            "a layout with 1, 1, 1, 0 layers",
        ),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|L", "a layout with 1, 1, 0 layers"),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1", "first_pipeline_num_layers 1"),
        (
            "--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split",
            "places for 1 more, embedding or loss",
        ),
    ],
)
def test_stages_of_a_run_that_do_not_give_every_layer_a_place_are_refused(flags, words, tmp_path):
    (tmp_path / "flags").write_text(f"{flags} --train-iters 9")
    run = saved(tmp_path, optimizer((MATRICES, {}), NO_DECAY))
    error = refused("convert", run, tmp_path / "out", "--to", "megatron", "--like", tmp_path / "flags")
    assert error["code"] == "mesh-does-not-divide"
    assert words in error["why"]


def test_a_layout_says_how_many_chunks_a_stage_has(tmp_path):
    (tmp_path / "flags").write_text("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t||tL")
    run, out = saved(tmp_path, optimizer((MATRICES, {}), NO_DECAY)), tmp_path / "out"
    good("convert", run, out, "--to", "megatron", "--like", tmp_path / "flags", "--megatron-format", "torch")
    answer = document("inspect", out)["layout"]
    assert (answer["pp"], answer["vpp"]) == (2, 2)
    roots = [torch_tree(f) for f in sorted(out.glob("iter_*/mp_rank_*/model_optim_rng.pt"))]
    held = [[sorted(n for n in root[f"model{c}"] if "linear_fc2.weight" in n) for c in (0, 1)] for root in roots]
    one = ["decoder.layers.0.mlp.linear_fc2.weight"]
    assert held == [[[], []], [one, one]]


@pytest.mark.parametrize(("dp", "fate"), [("2", "carried"), ("4", "written")])
def test_random_states_of_data_parallel_ranks_are_those_of_as_many(dp, fate, tmp_path):
    run = saved(tmp_path, optimizer((MATRICES, {}), NO_DECAY), data_parallel_random_init=True, data_parallel_size=2)
    file = next(run.glob("iter_*/mp_rank_00/model_optim_rng.pt"))
    tree = torch_tree(file)
    assert "rng_state" not in tree
    more = {"args": {**ARGS, "data_parallel_random_init": True, "data_parallel_size": 2}, "model": MODEL}
    states = [{"random_rng_state": (3, (i,), None)} for i in range(2)]
    head = {"checkpoint_version": 3.0, "iteration": 7, "optimizer": optimizer((MATRICES, {}), NO_DECAY)}
    torch_save(file, {**more, **head, "rng_state": states})
    answer = good("reshard", run, tmp_path / "out", "--dp", dp, "--optimizer", "plain", "--json").json["fidelity"]
    assert [x["fate"] for x in answer if x["part"] == "random state"] == [fate]
    root = torch_tree(next((tmp_path / "out").glob("iter_*/mp_rank_00/model_optim_rng.pt")))
    assert len(root["rng_state"]) == int(dp)


def test_random_states_of_old_files_are_kept_where_the_mesh_is_the_same(tmp_path):
    run = saved(tmp_path, None)
    file = next(run.glob("iter_*/mp_rank_00/model_optim_rng.pt"))
    names = ("np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
    old = {"random_rng_state": (3, (1, 2), None), **{n: np.arange(4, dtype=np.uint8) for n in names}}
    head = {"args": ARGS, "checkpoint_version": 3.0, "iteration": 7, "model": MODEL}
    torch_save(file, {**head, "optimizer": optimizer((MATRICES, {}), NO_DECAY), **old})
    answer = good("reshard", run, tmp_path / "out", "--json").json["fidelity"]
    assert [x["fate"] for x in answer if x["part"] in ("random state", "other values")] == ["carried"]
    root = torch_tree(next((tmp_path / "out").glob("iter_*/mp_rank_00/model_optim_rng.pt")))
    assert list(root["rng_state"][0]) == list(old)
    assert root["rng_state"][0]["random_rng_state"] == old["random_rng_state"]
