"""DeepSpeed checkpoints of every kind: values against the live run's own, and each damage by its own error."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import ckptctl
from ckptctl.formats.deepspeed import opened
from ckptctl.operations import Reading, masters, open_checkpoint
from tests.support.checkpoints import FIXTURES, digest, layouts, shared, truth, truth_config
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused

EVERY = layouts("deepspeed", everything=True)
RENAMED = {"model.layers.2.weight": "model.norm.weight", "model.layers.3.weight": "lm_head.weight"}
"""The pipelines' truth was written by a script for four blocks; these have two, then the norm and the head."""


def folder(name):
    return FIXTURES / name if (FIXTURES / name).exists() else shared(name)


def source(name):
    inner = sorted(folder(name).glob("checkpoint-*"))
    return inner[-1] if inner else folder(name)


def said(name, section):
    tensors = truth(folder(name))[section]
    return {RENAMED.get(n, n) if "pipe" in name else n: t for n, t in tensors.items()}


def config_of(name):
    return truth_config(name) if (folder(name) / "truth" / "config.json").exists() else None


def facts(name):
    return json.loads((folder(name) / "truth" / "losses.json").read_text())


def float32(tensor):
    array = tensor.numpy().astype(np.float32)
    return digest("F32", tensor.shape, np.ascontiguousarray(array).tobytes())


def view_of(name):
    config = config_of(name)
    return ckptctl.open(source(name), model_config=config) if config else ckptctl.open(source(name))


@pytest.mark.real
@pytest.mark.parametrize("name", EVERY)
def test_masters_and_moments_are_the_live_run_s(name):
    with view_of(name) as view:
        there = {(t.name, t.kind) for t in view.tensors()}
        for section, kind in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            want = said(name, section)
            assert {n for n, k in there if k == kind} == set(want)
            for n, t in want.items():
                assert float32(view.state(n, kind)) == t, f"{n} {kind}"
        ties = view.checkpoint.ties
        excluded = facts(name)["spec"].get("keep_frozen") is False
        frozen = tuple(facts(name)["spec"].get("freeze", ()))
        for n, t in said(name, "model").items():
            if excluded and n.startswith(frozen):
                assert (n, "weight") not in there
                continue
            owner = ties.get(n, n)
            kind = "master" if (owner, "master") in there else "weight"
            assert float32(view.state(owner, kind)) == t, n


@pytest.mark.real
@pytest.mark.parametrize("name", EVERY)
def test_weights_have_the_run_s_type_and_are_the_masters_rounded(name):
    want = {"bf16": "bfloat16", "fp16": "float16"}.get(facts(name)["spec"].get("dtype"), "float32")
    with view_of(name) as view:
        for n, weight in view.items():
            assert weight.dtype == want
            owner = view.checkpoint.ties.get(n, n)
            if ("master", owner) in {(t.kind, t.name) for t in view.tensors()}:
                master = view.state(owner, "master").numpy()
                assert (weight.numpy() == master.astype(weight.numpy().dtype)).all(), n


@pytest.mark.real
@pytest.mark.parametrize("name", EVERY)
def test_inspect_says_layout_step_groups_and_ties(name):
    config = config_of(name)
    words = ["--model-config", config] if config else []
    got = document("inspect", source(name), *words)
    spec = facts(name)["spec"]
    assert got["format"] == "deepspeed"
    assert got["step"] == 3
    assert got["ties"] == facts(name).get("ties", {})
    for group, want in zip(got["groups"], facts(name)["param_groups"], strict=True):
        if "elastic" not in name:
            assert group["settings"]["lr"] == want["lr"]
            assert group["settings"]["weight_decay"] == want["weight_decay"]
    if spec.get("kind") == "universal":
        assert got["variant"] == "universal"
        assert got["layout"]["dp"] is None
    else:
        assert (got["layout"]["dp"], got["layout"]["zero_stage"]) == (spec["dp"], spec["stage"])
        assert (got["layout"]["pp"], got["layout"]["ep"]) == (spec.get("pp", 1), spec.get("ep", 1))


@pytest.mark.real
def test_steps_are_the_optimizer_s_own_counter():
    with ckptctl.open(source("deepspeed/zero0-dp2-bf16")) as view:  # its wrapper takes one step before the first
        assert {float(t.numpy()) for t in view.tensors() if t.kind == "step"} == {4.0}
        assert view.step == 3


@pytest.mark.real
def test_a_step_s_folder_is_read_as_the_run_s_folder_is():
    a, b = source("deepspeed/zero1-dp2-bf16"), source("deepspeed/zero1-dp2-bf16") / "global_step3"
    assert document("diff", a, b, "--optimizer", "--state")["equal"] is True


@pytest.mark.real
def test_a_trainer_s_folder_gives_its_scheduler_and_random_state():
    got = document("inspect", source("deepspeed/hf-trainer-zero3-dp2-bf16"))
    assert got["state"]["scheduler"] == got["state"]["rng"] == "present"
    assert got["config"] == "config.json"


# ---- damage ---------------------------------------------------------------------------------------------------------


def copied(name, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(folder(name), path, ignore=shutil.ignore_patterns("truth"))
    return path


def stopped(path, tmp_path, *words):
    out = tmp_path / "out"
    error = refused("convert", path, out, "--to", "torch", *words)
    assert not out.exists()
    return error


@pytest.mark.real
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(rank, tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    file = next((path / "global_step3").glob(f"*zero_pp_rank_{rank}_*optim*"))
    file.unlink()
    error = stopped(path, tmp_path)
    assert error["code"] == "missing-file"
    assert f"rank {rank} of 2" in error["what"]


@pytest.mark.real
def test_a_tracker_that_names_a_missing_step_is_an_error(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    (path / "latest").write_text("global_step9")
    for words in (["inspect", path], ["ls", path]):
        error = refused(*words)
        assert error["code"] == "tracker-names-missing-step"
        assert "global_step9" in error["what"]
        assert "global_step3" in error["why"]


@pytest.mark.real
def test_a_tracker_that_leads_outside_is_refused(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    (path / "latest").write_text("../elsewhere")
    assert refused("inspect", path)["code"] == "path-escapes"


@pytest.mark.real
def test_the_tracker_decides_among_steps(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    shutil.copytree(path / "global_step3", path / "global_step8")
    assert "global_step3" in document("inspect", path)["recognised"]
    (path / "latest").write_text("global_step8")
    assert "global_step8" in document("inspect", path)["recognised"]
    assert document("inspect", path, "--step", "3")["path"].endswith("global_step3")


@pytest.mark.real
def test_files_of_more_ranks_than_the_run_had_are_left_aside_with_a_word(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    shutil.copy(
        path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", path / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    )
    assert any("left over" in w for w in document("inspect", path)["warnings"])


@pytest.mark.real
def test_two_files_of_one_rank_are_an_error(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    shutil.copy(
        path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    )
    assert refused("inspect", path)["code"] == "stale-file"


@pytest.mark.real
def test_a_rank_of_another_save_is_an_error(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    other = source("deepspeed/zero2-dp2-bf16-frozen-excluded") / "global_step3"
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, path / name)
    assert stopped(path, tmp_path)["code"] == "mixed-saves"


@pytest.mark.real
def test_swapped_rank_files_are_told(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    a, b = (path / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    a.rename(path / "aside")
    b.rename(a)
    (path / "aside").rename(b)
    error = stopped(path, tmp_path)
    assert error["code"] == "mixed-saves"
    assert "rank 0 holds the piece of rank 1" in error["what"]


@pytest.mark.real
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("is_swap", [True, False])
def test_another_rank_s_file_is_told_at_stage_three(is_swap, is_ours, tmp_path):
    """Nothing in the pickle says whose it is, and no weights lie beside it: the archive's own name tells."""
    if is_ours:
        good("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "ours", "--dp", "2", "--zero-stage", "3")
        path = tmp_path / "ours" / "global_step3"
    else:
        path = copied("deepspeed/zero3-dp2-bf16", tmp_path) / "global_step3"
    a, b = (path / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    kept = a.read_bytes()
    if is_swap:
        a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    error = stopped(path, tmp_path)
    assert error["code"] == "mixed-saves"
    assert f"rank {int(not is_swap)} holds the piece of rank {int(is_swap)}" in error["what"]


@pytest.mark.real
def test_ranks_inside_one_parameter_are_told_by_its_weights(tmp_path, monkeypatch):
    """Both ranks hold as much of the embedding and nothing else: only the weights say which of them is whose."""
    monkeypatch.setattr(masters, "SAMPLE_NUMEL", 16)
    monkeypatch.setattr(opened, "_require_own_name", lambda *_: None)  # as of files whose archives have no names
    good("reshard", source("deepspeed/zero1-dp2-bf16"), tmp_path / "many", "--dp", "30")
    path = tmp_path / "many" / "global_step3"
    a, b = (path / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (1, 2))
    good("inspect", path)
    a.rename(path / "aside")
    b.rename(a)
    (path / "aside").rename(b)
    error = stopped(path, tmp_path)
    assert error["code"] == "masters-differ"
    assert "model.embed_tokens.weight" in error["what"]


@pytest.mark.real
def test_another_pipeline_stage_s_optimizer_is_told(tmp_path):
    path = copied("deepspeed/pipe-pp2-dp2-zero1-bf16", tmp_path) / "global_step3"
    a, b = (path / f"bf16_zero_pp_rank_0_mp_rank_0{r}_optim_states.pt" for r in (0, 1))
    a.rename(path / "aside")
    b.rename(a)
    (path / "aside").rename(b)
    error = stopped(path, tmp_path)
    assert error["code"] in ("mixed-saves", "zero-layout")


@pytest.mark.real
@pytest.mark.parametrize("lost", ["exp_avg.pt", "fp32.pt", "step.pt", ""])
def test_a_missing_file_of_a_universal_folder_is_named(lost, tmp_path):
    path = copied("deepspeed/universal-zero1-dp2-bf16-fp32acc", tmp_path)
    place = path / (path / "latest_universal").read_text() / "zero" / "model.norm.weight"
    if lost:
        (place / lost).unlink()
    else:
        shutil.rmtree(place)
    error = stopped(path, tmp_path)
    assert error["code"] == "missing-file"
    assert f"model.norm.weight/{lost or 'fp32.pt'}" in error["what"]


@pytest.mark.real
def test_frozen_weights_are_named(tmp_path):
    said = command("inspect", source("deepspeed/zero2-dp4-bf16-groups-frozen")).out
    assert "frozen: 2 weights: model.embed_tokens.weight, model.layers.0.input_layernorm.weight" in said


@pytest.mark.real
def test_ranks_of_different_steps_are_an_error(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    with ckptctl.open(path) as view:
        tensors = view.checkpoint.tensors
        at = next(int(t.pieces[0].start[0]) for k, t in tensors.items() if k.kind == "step")
    file = path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    assert np.frombuffer(data[at : at + 4], np.float32)[0] == 3
    data[at : at + 4] = np.float32(2).tobytes()
    file.write_bytes(data)
    error = stopped(path, tmp_path)
    assert error["code"] == "mixed-saves"
    assert "different steps" in error["why"]


@pytest.mark.real
def test_a_short_flat_group_is_an_error_with_both_lengths(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path) / "global_step3"
    file = path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with ckptctl.open(path) as view:
        numel = sum(t.numel for k, t in view.checkpoint.tensors.items() if k.kind == "master")
    slot = -(-numel // 4) * 2
    data = file.read_bytes()
    long, short = b"K" if slot < 256 else b"M" if slot < 1 << 16 else b"J", slot - 2
    width = {b"K": 1, b"M": 2, b"J": 4}[long]
    old = long + slot.to_bytes(width, "little") + b"\x85"
    assert old in data
    file.write_bytes(data.replace(old, long + short.to_bytes(width, "little") + b"\x85", 1))
    error = stopped(path, tmp_path)
    assert error["code"] == "zero-layout"
    assert f"{short} elements" in error["what"]


@pytest.mark.real
def test_a_missing_expert_and_a_missing_layer_are_named(tmp_path):
    path = copied("deepspeed/moe-ep2-dp4-zero2-bf16", tmp_path)
    (path / "global_step3" / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    error = stopped(path, tmp_path)
    assert error["code"] == "missing-file"
    assert "expert 2" in error["what"]


@pytest.mark.real
def test_weights_that_are_not_the_rounded_masters_stop_a_conversion(tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    file = path / "global_step3" / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    with ckptctl.open(path) as view:
        table = view.checkpoint.tensors[("model.norm.weight", "weight", "")].pieces[0]
        at = int(table.start[0])
    data[at] ^= 1
    file.write_bytes(data)
    error = stopped(path, tmp_path)
    assert error["code"] == "masters-differ"
    assert "model.norm.weight" in error["what"]
    good("convert", path, tmp_path / "weights", "--to", "hf", "--no-optimizer")


@pytest.mark.real
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_file_that_ends_early_is_damage_and_no_traceback(file, tmp_path):
    path = copied("deepspeed/zero1-dp2-bf16", tmp_path)
    file = path / "global_step3" / file
    file.write_bytes(file.read_bytes()[:-5000])
    error = stopped(path, tmp_path)
    assert file.name in f"{error['what']} {error['where']}"
    assert command("inspect", path, "--json").code == 3


# ---- what a conversion gives ----------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("name", [n for n in EVERY if (FIXTURES / n).exists()])
def test_a_conversion_to_dcp_and_back_to_torch_keeps_everything(name, tmp_path):
    config = config_of(name)
    words = ["--model-config", config] if config else []
    good("convert", source(name), tmp_path / "dcp", "--to", "dcp", *words)
    good("convert", tmp_path / "dcp", tmp_path / "state.pt", "--to", "torch", *words)
    assert document("diff", source(name), tmp_path / "state.pt", "--optimizer", *words)["equal"] is True


@pytest.mark.real
def test_only_masters_are_stored_at_stage_three_and_weights_are_cast(tmp_path):
    name = "deepspeed/zero3-dp2-bf16-qwen2-tied"
    report = document("convert", source(name), tmp_path / "a", "--to", "hf", "--no-optimizer")
    weights = next(line for line in report["fidelity"] if line["part"] == "weights")
    assert weights["fate"] == "converted"
    assert "float32 -> bfloat16" in weights["detail"]
    with open_source(name) as view:
        want = view.state("model.norm.weight", "master").numpy()
    with ckptctl.open(tmp_path / "a") as made:
        got = made["model.norm.weight"].numpy()
    assert got.dtype.name == "bfloat16"
    assert (got == want.astype(got.dtype)).all()


def open_source(name):
    return ckptctl.open(source(name))


def test_a_pipeline_without_a_config_keeps_its_own_names():
    checkpoint, _ = open_checkpoint(source("deepspeed/pipe-pp2-dp2-zero1-bf16"), Reading())
    assert any(k.name == "1.self_attn.q_proj.weight" for k in checkpoint.tensors)
    assert any("--model-config" in w for w in checkpoint.warnings)
