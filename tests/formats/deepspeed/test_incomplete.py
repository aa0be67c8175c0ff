"""What is said of a run's folder whose pointer, names or files do not say what they should, though all can be read."""

from __future__ import annotations

import shutil

import pytest

import ckptctl
from tests.formats.deepspeed.test_read import copied, stopped
from tests.support.checkpoints import ckpt
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused

ONE, THREE = "deepspeed/zero1-dp2-bf16", "deepspeed/zero3-dp2-bf16-qwen2-tied"


@pytest.mark.real
@pytest.mark.parametrize(
    "held", [b"", b"\0\xff\x93" * 40, b"x" * 5000, b"one\ntwo"], ids=["none", "binary", "long", "two"]
)
def test_a_tracker_that_names_no_step_is_an_error(held, tmp_path):
    path = copied(ONE, tmp_path)
    (path / "latest").write_bytes(held)
    for error in (refused("inspect", path), stopped(path, tmp_path)):
        assert error["code"] == "tracker-names-missing-step"
        assert ("is empty" if not held else f"has {len(held)} bytes") in error["what"]
        assert "global_step3" in error["why"]
    done = command("validate", path, "--json")
    assert done.code == 1
    found = [f for f in done.json["findings"] if f["kind"] == "tracker-names-missing-step"]
    assert len(found) == 1
    assert "latest names no step" in found[0]["what"]
    good("inspect", path, "--step", "3")


@pytest.mark.real
def test_a_tracker_among_steps_that_names_none_is_told_once(tmp_path):
    path = copied(ONE, tmp_path)
    shutil.copytree(path / "global_step3", path / "global_step9")
    (path / "latest").write_bytes(b"")
    done = command("validate", path, "--json")
    assert done.code == 1
    assert [f["kind"] for f in done.json["findings"]].count("tracker-names-missing-step") == 1


@pytest.mark.real
def test_a_folder_under_another_step_s_name_is_told(tmp_path):
    """Without a pointer the newest step is taken by its folder's name, which its files contradict."""
    path = copied(ONE, tmp_path)
    (path / "latest").unlink()
    shutil.copytree(path / "global_step3", path / "global_step7")
    said = "the folder is called global_step7, and its files are of step 3"
    assert said in document("inspect", path)["warnings"]
    assert said in document("convert", path, tmp_path / "out", "--to", "torch")["warnings"]
    assert said in [f["what"] for f in document("validate", path)["findings"]]
    assert not document("inspect", path, "--step", "3")["warnings"]


@pytest.mark.real
def test_a_rank_s_model_file_that_is_not_there_keeps_a_run_from_going_on(tmp_path):
    """At stage 3 one model-states file is enough to read the whole, and each rank loads its own."""
    path = copied(THREE, tmp_path)
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    (path / "global_step3" / name).unlink()
    shown = document("inspect", path)
    assert (shown["resumable"], shown["why"]) == (False, f"global_step3/{name} is not there")
    assert any(w.startswith(f"{name} is not there") for w in shown["warnings"])
    done = command("validate", path, "--json")
    assert done.code == 1
    assert [(f["kind"], f["where"]["file"]) for f in done.json["findings"] if f["severity"] == "error"] == [
        ("missing-file", f"global_step3/{name}")
    ]
    assert done.json["checkpoints"][0]["resumable"]["answer"] is False
    told = document("convert", path, tmp_path / "out", "--to", "torch")["warnings"]
    assert any(w.startswith(f"{name} is not there") for w in told)


@pytest.mark.real
def test_any_rank_s_model_file_is_enough_to_read(tmp_path):
    path = copied("deepspeed/hf-trainer-zero3-dp2-bf16", tmp_path) / "checkpoint-3"
    good("convert", path, tmp_path / "whole", "--to", "torch")
    (path / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    good("convert", path, tmp_path / "less", "--to", "torch")
    assert document("diff", tmp_path / "whole", tmp_path / "less", "--optimizer")["equal"]


@pytest.mark.real
def test_without_the_first_rank_s_model_file_ties_are_unknown(tmp_path):
    """It alone lists them: the others' place for the head would be left out, and its weights with it."""
    path = copied(THREE, tmp_path)
    (path / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    error = stopped(path, tmp_path)
    assert error["code"] == "missing-file"
    assert "lm_head.weight" in error["what"]
    assert "zero_pp_rank_0_mp_rank_00_model_states.pt" in error["fix"]


@pytest.mark.real
@pytest.mark.parametrize("kind", ["exp_avg", "master"])
def test_a_byte_that_changed_is_told_by_the_file_s_checksums(kind, tmp_path):
    """Nothing beside a moment, or a master of stage 3, contradicts it."""
    path = copied(THREE, tmp_path)
    good("reshard", path, tmp_path / "whole", "--dp", "3", "--verify-checksums")
    with ckptctl.open(path) as view:
        table = view.checkpoint.tensors[("model.norm.weight", kind, "")].pieces[0]
        file = path / view.checkpoint.sources[int(table.source[0])].path
    data = bytearray(file.read_bytes())
    data[int(table.start[0])] ^= 1
    file.write_bytes(data)
    for words in (["convert", "--to", "torch"], ["reshard", "--dp", "3"], ["strip"]):
        error = refused(words[0], path, tmp_path / "out", *words[1:], "--verify-checksums")
        assert error["code"] == "checksum-mismatch"
        assert file.name in error["where"]
        assert not (tmp_path / "out").exists()


@pytest.mark.real
def test_what_has_no_checksums_is_not_taken_for_compared(tmp_path):
    error = refused("convert", ckpt("hf/llama-single"), tmp_path / "out", "--to", "torch", "--verify-checksums")
    assert "no file of the source has checksums" in error["what"]
