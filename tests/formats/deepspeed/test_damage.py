"""Files of several saves, left over, lost or renamed, and values that no run of DeepSpeed's own has: each is told."""

from __future__ import annotations

import shutil

import pytest

import ckptctl
from ckptctl.core.values import Global, OrderedPairs, Record
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.formats.deepspeed.test_read import copied, stopped
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.zero_runs import Saved, numbers, write_model, write_run, write_shards

PARAMS = {"a.weight": numbers(5, 3), "a.bias": numbers(5), "b.weight": numbers(2, 5)}


def state(path):
    """Every tensor's values."""
    with ckptctl.open(path) as view:
        return {(t.name, t.kind): t.numpy().tolist() for t in view.tensors()}


def test_the_hand_made_run_is_one(tmp_path):
    write_run(tmp_path / "run", PARAMS, dp=3)
    held = state(tmp_path / "run")
    for name, values in PARAMS.items():
        assert held[name, "weight"] == held[name, "master"] == values.tolist()
        assert held[name, "exp_avg"] == (2 * values).tolist()
    good("reshard", tmp_path / "run", tmp_path / "three", "--dp", "2", "--zero-stage", "3")
    assert state(tmp_path / "three") == held


def other_lr(tree, made):
    tree["base_optimizer_state"]["param_groups"][0]["lr"] = 0.2


def other_decay(tree, made):
    tree["base_optimizer_state"]["param_groups"][0]["betas"] = (0.9, 0.99)


def stepless(tree, made):
    tree["base_optimizer_state"]["state"][0].pop("step")


def stepless_other_lr(tree, made):
    stepless(tree, made)
    other_lr(tree, made)


@pytest.mark.parametrize(
    ("tweaks", "what"),
    [
        ({"r2": other_decay}, "betas of param group 0"),
        ({"r0": stepless, "r1": stepless, "r2": stepless_other_lr}, "lr of param group 0"),
    ],
)
def test_ranks_of_different_settings_are_of_different_runs(tweaks, what, tmp_path):
    write_run(tmp_path / "run", PARAMS, dp=3, **tweaks)
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "mixed-saves"
    assert what in error["what"]


def test_learning_rates_of_each_rank_s_own_are_told(tmp_path):
    """A scheduler that goes by a rank's own loss (ReduceLROnPlateau): steps and weights say that it is one save."""
    write_run(tmp_path / "run", PARAMS, dp=3, r2=other_lr)
    assert state(tmp_path / "run")["a.bias", "master"] == PARAMS["a.bias"].tolist()
    said = document("inspect", tmp_path / "run")
    assert any("0.1 in zero_pp_rank_0" in w and "0.2 in zero_pp_rank_2" in w for w in said["warnings"])


def test_ranks_of_runs_in_different_types_are_told_by_their_names(tmp_path):
    write_run(tmp_path / "run", PARAMS, dp=2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "run" / name).rename(tmp_path / "run" / f"bf16_{name}")
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "mixed-saves"
    assert "different types" in error["what"]


def test_a_number_in_a_file_s_name_takes_no_memory(tmp_path):
    write_run(tmp_path / "run", PARAMS, dp=1)
    shutil.copy(tmp_path / "run/mp_rank_00_model_states.pt", tmp_path / "run/mp_rank_99999999999999_model_states.pt")
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "missing-file"
    assert "model-parallel rank 1 of" in error["what"]


@pytest.mark.real
def test_swapped_model_files_of_stage_three_are_told(tmp_path):
    """They have each rank's part of the frozen parameters, of which there is no other copy."""
    path = copied("deepspeed/zero3-dp2-bf16-subgroups-frozen", tmp_path) / "global_step3"
    a, b = (path / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in (0, 1))
    a.rename(path / "aside")
    b.rename(a)
    (path / "aside").rename(b)
    error = stopped(path, tmp_path)
    assert error["code"] == "mixed-saves"
    assert "model-states file of rank 0 holds the piece of rank 1" in error["what"]


@pytest.mark.real
@pytest.mark.parametrize("source", ["zero2-dp2-bf16", "zero3-dp2-bf16"])
def test_model_files_of_another_stage_are_left_aside_with_a_word(source, tmp_path):
    path = copied(f"deepspeed/{source}", tmp_path) / "global_step3"
    held = state(path)
    other = copied(f"deepspeed/zero{5 - int(source[4])}-dp2-bf16", tmp_path / "other") / "global_step3"
    for file in other.glob("*model_states.pt"):
        shutil.copy(file, path)
    assert state(path) == held
    assert any("another ZeRO stage" in w for w in document("inspect", path)["warnings"])


@pytest.mark.real
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("lost", ["layer_0_expert_3", "layer_1_expert_[0-9]"])
def test_the_last_expert_or_layer_of_experts_is_missed(lost, optimizer, tmp_path):
    """The other files do not tell, nor do the masters, which DeepSpeed does not load in their place."""
    path = copied("deepspeed/moe-ep2-dp4-zero2-bf16", tmp_path) / "global_step3"
    for file in [*path.glob(f"{lost}_*"), *([] if optimizer else path.glob("*optim_states.pt"))]:
        file.unlink()
    error = stopped(path, tmp_path)
    assert error["code"] == "missing-file"
    assert f"of MoE layer {lost[6]} is not there" in error["what"]


@pytest.mark.parametrize("config", ["ds.json", ["a"], {"zero_optimization": 3}, None])
def test_a_configuration_that_is_no_dict_stops_nothing(config, tmp_path):
    write_run(tmp_path / "run", PARAMS, model={"ds_config": config})
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3")
    assert state(tmp_path / "out") == state(tmp_path / "run")


def test_client_state_of_our_own_name_is_carried(tmp_path):
    write_run(tmp_path / "run", PARAMS, model={"deepspeed": {"mine": 1}, "seen": 5})
    for stage in ("1", "3"):
        good("reshard", tmp_path / "run", tmp_path / stage, "--dp", "3", "--zero-stage", stage)
        own = ckptctl.open(tmp_path / stage).values["deepspeed"]
        assert own["deepspeed"] == {"mine": 1}
        assert own["ds_version"] == "0.19.8"


def test_what_no_reader_can_read_is_not_intact(tmp_path):
    """Two files of one rank: a rule that only warns of one left over, where a reader goes on without it."""
    write_run(tmp_path / "run", PARAMS, dp=1)
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "run" / name, tmp_path / "run" / f"bf16_{name}")
    done = command("validate", tmp_path / "run", "--json")
    assert done.code == 1
    assert '"stale-file"' in done.out


def lone(tree, made, value=0.25):
    tree["base_optimizer_state"]["state"][0]["mu_product"] = made.tensor(value)
    tree["base_optimizer_state"]["state"][0]["beta"] = made.tensor([0.5])


@pytest.mark.parametrize("stage", ["0", "1", "3"])
def test_a_state_of_one_number_is_carried(stage, tmp_path):
    """NAdam's mu_product: 0-d beside every parameter, one of each flat group."""
    write_run(tmp_path / "run", PARAMS, dp=2, every=lone)
    held = state(tmp_path / "run")
    assert held["b.weight", "mu_product"] == 0.25
    assert held["a.bias", "beta"] == [0.5]
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3", "--zero-stage", stage)
    if stage == "0":  # whose weights are the masters, in float32
        held = {place: v for place, v in held.items() if place[1] != "master"}
    assert state(tmp_path / "out") == held


def test_a_state_of_one_number_that_differs_in_a_group_is_refused(tmp_path):
    write_run(tmp_path / "run", PARAMS, dp=2, every=lone)
    good("convert", tmp_path / "run", tmp_path / "t", "--to", "torch")
    error = refused("convert", tmp_path / "run", tmp_path / "u", "--to", "deepspeed", "--universal")
    assert "is one value of each parameter" in error["what"]


def test_tensor_parallel_ranks_of_different_steps_are_told(tmp_path):
    """Their slices would be joined, and one rank's step taken for both."""

    def later(tree, made):
        tree["base_optimizer_state"]["state"][0]["step"] = made.tensor(4.0)

    more = {"mp_world_size": 2, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    for mp in (0, 1):
        write_model(tmp_path / f"run/mp_rank_{mp:02d}_model_states.pt", PARAMS, 1, **more)
        write_shards(tmp_path / "run", PARAMS, 1, mp=mp)
    assert ckptctl.open(tmp_path / "run")["a.weight"].shape == (10, 3)
    write_shards(tmp_path / "run", PARAMS, 1, mp=1, every=later)
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "mixed-saves"
    assert "different steps" in error["what"]
    write_shards(tmp_path / "run", PARAMS, 1, mp=1, every=other_lr)
    assert "differ in settings" in stopped(tmp_path / "run", tmp_path)["what"]


def test_what_a_run_had_for_its_own_type_does_not_go_into_one_of_another(tmp_path):
    scaler = Record(
        Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        (),
        "newobj",
        state={"cur_scale": 65536.0, "dynamic": True},
        has_state=True,
    )

    def scaled(tree, made):
        tree |= {"loss_scaler": scaler, "dynamic_loss_scale": True}

    config = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "loss_scale": 0}}
    write_run(tmp_path / "run", PARAMS, dp=1, model={"ds_config": config}, every=scaled)
    report = document(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "deepspeed", "--dtype", "bfloat16", "--weights", "master"
    )
    own = ckptctl.open(tmp_path / "out").values["deepspeed"]
    assert own["ds_config"]["fp16"] == {"enabled": False, "loss_scale": 0}
    assert own["ds_config"]["bf16"] == {"enabled": True}
    assert own["loss_scaler"]["class"].endswith(".LossScaler")
    assert own["loss_scaler"]["cur_scale"] == 1.0
    assert "loss scale" in str(report)
    assert document("inspect", tmp_path / "out")["about"]["dtype"] == "bfloat16"


def test_padding_is_that_of_all_ranks(tmp_path):
    """30 elements over four ranks are 8 a rank: 2 of padding in a moment, of each tensor-parallel rank."""
    more = {"mp_world_size": 2, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    for mp in (0, 1):
        write_model(tmp_path / f"run/mp_rank_{mp:02d}_model_states.pt", PARAMS, 4, **more)
        write_shards(tmp_path / "run", PARAMS, 4, mp=mp)
    assert document("inspect", tmp_path / "run")["about"]["padding"] == {"master": 0, "exp_avg": 4}


def test_a_number_of_ranks_that_makes_no_stages_is_refused(tmp_path):
    more = {"mp_world_size": None, "checkpoint_parallel_dimensions": {"tp_degree": 2, "pp_degree": 2}}
    for mp in (0, 1, 2):
        write_model(tmp_path / f"run/mp_rank_{mp:02d}_model_states.pt", PARAMS, 1, **more)
        write_shards(tmp_path / "run", PARAMS, 1, mp=mp)
    assert stopped(tmp_path / "run", tmp_path)["code"] == "missing-file"


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"\x80\xff"])
def test_a_file_of_names_that_has_none_is_wrong_usage(content, tmp_path):
    """It was taken for no file at all: the order was the family's."""
    write_run(tmp_path / "run", PARAMS)
    (tmp_path / "order.txt").write_bytes(content)
    done = command(
        "convert", tmp_path / "run", tmp_path / "out", "--to", "torch", "--param-order", tmp_path / "order.txt"
    )
    assert done.code == 2
    assert not (tmp_path / "out").exists()


def test_a_tie_of_parameters_that_train_apart_is_not_believed(tmp_path):
    """DeepSpeed 0.9.0 wrote such ones: the first one's values were taken for all of its shape."""
    params = {"a": numbers(3, 2), "b": numbers(3, 2, seed=1)}
    write_run(tmp_path / "run", params, model={"shared_params": [("b", "a")]})
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3", "--zero-stage", "3")
    assert state(tmp_path / "out")["b", "weight"] == params["b"].tolist()
    said = document("inspect", tmp_path / "run")
    assert not said["ties"]
    assert any("0.9.0" in w for w in said["warnings"])


def test_a_weight_of_another_shape_than_the_list_of_shapes_is_damage(tmp_path):
    shapes = [OrderedPairs({n: SizeTuple(p.shape) for n, p in PARAMS.items()})]
    other = {n: p.reshape(-1) for n, p in PARAMS.items()}
    write_run(tmp_path / "run", other, model={"param_shapes": shapes})
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "zero-layout"
    assert "(15,)" in error["what"]
    assert "(5, 3)" in error["what"]


def test_a_weight_that_module_lacks_is_told(tmp_path):
    write_run(tmp_path / "run", PARAMS)
    less = {n: p for n, p in PARAMS.items() if n != "a.bias"}
    shapes = [OrderedPairs({n: SizeTuple(p.shape) for n, p in PARAMS.items()})]
    write_model(tmp_path / "run/mp_rank_00_model_states.pt", less, 2, param_shapes=shapes)
    assert state(tmp_path / "run")["a.bias", "weight"] == PARAMS["a.bias"].tolist()
    assert any("a.bias" in w for w in document("inspect", tmp_path / "run")["warnings"])


def test_an_optimizer_of_one_moment_is_whole(tmp_path):
    """Lion has betas and no eps; Adam that has an eps, and no second moment, is damaged."""

    def adam(tree, made):
        tree["base_optimizer_state"]["param_groups"][0]["eps"] = 1e-8

    write_run(tmp_path / "lion", PARAMS)
    assert command("validate", tmp_path / "lion", "--resumable").code == 0
    write_run(tmp_path / "adam", PARAMS, every=adam)
    assert command("validate", tmp_path / "adam").code == 1


@pytest.mark.parametrize(("momentum", "goes_on"), [(0, True), (0.9, False)])
def test_an_optimizer_without_state_lacks_none(momentum, goes_on, tmp_path):
    """torch's SGD without momentum; other optimizers whose state is not there lack it."""

    def sgd(tree, made):
        settings = {"lr": 0.1, "momentum": momentum, "nesterov": False, "params": [0]}
        tree["base_optimizer_state"] = {"state": {}, "param_groups": [settings]}

    write_run(tmp_path / "run", PARAMS, every=sgd)
    assert document("inspect", tmp_path / "run")["resumable"] is goes_on
    assert (command("validate", tmp_path / "run", "--resumable").code == 0) is goes_on


def test_buffers_lack_no_state(tmp_path):
    more = {
        "buffer_names": ["gain"],
        "param_shapes": [OrderedPairs({n: SizeTuple(p.shape) for n, p in PARAMS.items()})],
    }
    write_run(tmp_path / "run", PARAMS)
    write_model(tmp_path / "run/mp_rank_00_model_states.pt", {**PARAMS, "gain": numbers(3)}, 2, **more)
    said = document("inspect", tmp_path / "run")
    assert said["state"]["masters"] == said["state"]["moments"] == "present"
    assert "state-absent-for-some" not in command("validate", tmp_path / "run", "--json").out


def test_what_accelerate_puts_beside_a_step_is_read(tmp_path):
    """Its save_state names the step's folder pytorch_model; scheduler and random states lie beside that."""
    write_run(tmp_path / "run/pytorch_model", PARAMS)
    (tmp_path / "run/latest").write_text("pytorch_model")
    for name, tree in {
        "scheduler.bin": {"last_epoch": 3},
        "random_states_0.pkl": {"step": 3},
        "random_states_1.pkl": {"step": 4},
        "sampler.bin": {"epoch": 1},
    }.items():
        Saved().save(tmp_path / "run" / name, tree)
    values = ckptctl.open(tmp_path / "run").values
    assert values["scheduler"] == {"last_epoch": 3}
    assert values["random_states"] == {"0": {"step": 3}, "1": {"step": 4}}
    assert values["sampler"] == {"epoch": 1}
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3")
    assert ckptctl.open(tmp_path / "out").values["random_states"] == values["random_states"]


def test_autoep_is_refused_by_its_name(tmp_path):
    write_run(tmp_path / "run", PARAMS, model={"ds_autoep_layers": [{"expert_key_prefix": "a"}]})
    assert "AutoEP" in stopped(tmp_path / "run", tmp_path)["what"]


def test_values_that_differ_between_model_parallel_ranks_are_told(tmp_path):
    more = {"mp_world_size": 2, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    for mp in (0, 1):
        own = {"random_rng_state": mp, "iteration": 3}
        write_model(tmp_path / f"run/mp_rank_{mp:02d}_model_states.pt", PARAMS, 1, **more, **own)
        write_shards(tmp_path / "run", PARAMS, 1, mp=mp)
    (said,) = [w for w in document("inspect", tmp_path / "run")["warnings"] if "different values" in w]
    assert "random_rng_state" in said
    assert "iteration" not in said


def test_values_by_names_of_a_model_file_s_own_parts_are_dropped_with_a_word(tmp_path):
    """Of a torch file, say: `optimizer: adamw` stood for the optimizer's state in the result."""
    made = Saved()
    tree = {"model": {n: made.tensor(p) for n, p in PARAMS.items()}, "num_experts": 4, "seen": 5}
    made.save(tmp_path / "t.pt", tree)
    words = ("--to", "deepspeed", "--param-order", tmp_path / "order.txt")
    (tmp_path / "order.txt").write_text("\n".join(PARAMS))
    report = document("convert", tmp_path / "t.pt", tmp_path / "out", *words)
    told = [(line["fate"], line["detail"]) for line in report["fidelity"] if line["part"] == "other values"]
    assert told[0] == ("carried", "seen")
    assert told[1][0] == "dropped"
    assert told[1][1].startswith("num_experts: ")
    values = ckptctl.open(tmp_path / "out").values
    assert values["seen"] == 5
    assert "num_experts" not in values


def test_a_list_of_names_of_another_model_is_refused(tmp_path):
    write_run(tmp_path / "run", PARAMS)
    (tmp_path / "order.txt").write_text("".join(f"{n}\n" for n in [*PARAMS, "other.weight"]))
    error = refused("reshard", tmp_path / "run", tmp_path / "out", "--dp", "1", "--param-order", tmp_path / "order.txt")
    assert error["code"] == "param-order"
    assert "other.weight" in error["what"]
