"""What lies at a path: run folders with steps, folders in folders, formats that are forced, configs that are given."""

import json
import shutil

import pytest

from ckptctl.operations.opening import steps_of
from tests.support.checkpoints import ckpt
from tests.support.commands import document, good, refused
from tests.support.saving import adamw, arange, dcp_save, hf_save, torch_save


def step(path, number):
    return dcp_save(path, {("model", "w"): arange(2, start=number), ("step",): number})


@pytest.fixture
def run(tmp_path):
    """A run's folder: three steps, the newest without its metadata, as an interrupted save leaves it."""
    for number in (1, 2, 10):
        step(tmp_path / "run" / f"step-{number}", number)
    (tmp_path / "run" / "step-10" / ".metadata").unlink()
    (tmp_path / "run" / "config.yaml").write_text("lr: 1")
    return tmp_path / "run"


def test_the_newest_complete_step_is_taken_and_shown(run):
    found = document("inspect", run)
    assert found["step"] == 2
    assert found["path"].endswith("step-2")


@pytest.mark.parametrize(("wanted", "number"), [("1", 1), ("2", 2), ("latest", 2)])
def test_a_step_can_be_named(run, wanted, number, tmp_path):
    assert document("inspect", run, "--step", wanted)["step"] == number
    assert document("show", run, "w", "--step", wanted)["values"] == [number, number + 1]
    report = document("convert", run, tmp_path / "out", "--to", "torch", "--step", wanted)
    assert report["source"]["step"] == number


def test_a_step_that_is_not_there_is_told_with_those_that_are(run):
    for wanted in ("3", "x", "-1"):
        error = refused("inspect", run, f"--step={wanted}")
        assert "1, 2, 10" in error["why"]


def test_one_checkpoint_has_no_steps(run):
    refused("inspect", run / "step-1", "--step", "1", code=2)
    assert document("inspect", run / "step-1", "--step", "latest")["step"] == 1


@pytest.mark.parametrize(
    "pattern", ["step-{}", "step_{}", "checkpoint-{}", "checkpoint_{}", "global_step{}", "iter_{:07}", "step{}", "{}"]
)
def test_how_runs_name_their_steps(pattern, tmp_path):
    for number in (9, 10):
        step(tmp_path / pattern.format(number), number)
    (tmp_path / "step-old").mkdir()
    assert sorted(steps_of(tmp_path)) == [9, 10]
    if pattern != "iter_{:07}":  # which looks like Megatron's
        assert document("inspect", tmp_path)["step"] == 10


def test_the_only_checkpoint_below_is_found(tmp_path):
    step(tmp_path / "run" / "a" / "b", 5)
    found = document("inspect", tmp_path / "run")
    assert found["step"] == 5
    assert "in a/b" in found["recognised"]
    torch_save(tmp_path / "model.pt", {"w": arange(2)}).rename(tmp_path / "run2.pt")
    (tmp_path / "files").mkdir()
    shutil.copy(tmp_path / "run2.pt", tmp_path / "files" / "last.pt")
    assert document("inspect", tmp_path / "files")["format"] == "torch"


def test_a_step_inside_of_a_run_is_no_second_checkpoint(tmp_path):
    """A Trainer's output folder holds the run's folder (by its pointer), and that the step's own."""
    shutil.copytree(ckpt("deepspeed/zero1-dp2-bf16"), tmp_path / "run" / "checkpoint-3")
    (tmp_path / "run" / "logs").mkdir()
    found = document("inspect", tmp_path / "run")
    assert found["step"] == 3
    assert found["path"].endswith("checkpoint-3")
    shutil.copytree(tmp_path / "run" / "checkpoint-3", tmp_path / "run" / "other")
    assert refused("inspect", tmp_path / "run")["why"] == "checkpoint-3, other"


def test_several_are_listed_and_none_is_guessed(tmp_path):
    for name in ("a", "b"):
        hf_save(tmp_path / "run" / name, {"w": arange(2)})
    error = refused("inspect", tmp_path / "run")
    assert (error["code"], error["why"]) == ("unrecognised", "a, b")


def test_the_metadata_file_and_the_index_stand_for_their_folder(tmp_path):
    folder = step(tmp_path / "run", 4)
    assert document("inspect", folder / ".metadata")["step"] == 4
    index = ckpt("hf/llama-sharded") / "model.safetensors.index.json"
    assert document("inspect", index)["kinds"]["weight"]["tensors"] == 39


def test_a_path_that_is_not_there(tmp_path):
    for words in (["inspect"], ["ls"], ["show", "w"], ["convert", tmp_path / "o", "--to", "hf"], ["diff", tmp_path]):
        command, *rest = words
        error = refused(command, tmp_path / "none", *rest)
        assert (error["code"], "none" in error["what"]) == ("unrecognised", True)


def test_the_config_is_taken_from_a_file_or_a_folder(tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": False}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    path = torch_save(tmp_path / "x.pt", {"w": arange(2)})
    for number, given in enumerate((tmp_path / "c", tmp_path / "c" / "config.json")):
        good("convert", path, tmp_path / f"o{number}", "--to", "hf", "--model-config", given)
        assert json.loads((tmp_path / f"o{number}" / "config.json").read_text()) == config
    assert document("inspect", path, "--model-config", tmp_path / "c")["family"] == "llama"


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", "nul", "1" * 5000, "[" * 100_000])
def test_a_config_that_is_none_is_told(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    path = torch_save(tmp_path / "x.pt", {"w": arange(2)})
    assert refused("inspect", path, "--model-config", tmp_path / "config.json")["code"] == "config-not-json"
    assert refused("inspect", path, "--model-config", tmp_path / "none.json")["code"] == "missing-file"


@pytest.mark.parametrize(
    "value", [None, "llama", [], {"model_type": 3}, {"model_type": ["x"], "text_config": 1, "architectures": "x"}]
)
def test_configs_of_odd_shapes_do_no_harm(value, tmp_path):
    path = hf_save(
        tmp_path / "src",
        {"model.embed_tokens.weight": arange(2, 2), "lm_head.weight": arange(2, 2)},
        {
            "vocab_size": value,
            "hidden_size": value,
            "dtype": value,
            "tie_word_embeddings": value,
            "quantization_config": value,
        },
    )
    for to in ("hf", "torch"):
        good("convert", path, tmp_path / to, "--to", to)
    document("inspect", path)


def test_a_config_inside_a_torch_file_is_used(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 2, "vocab_size": 3}
    path = torch_save(tmp_path / "x.pt", {"model": {"transformer.wte.weight": arange(3, 2)}, "config": config})
    good("convert", path, tmp_path / "out", "--to", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_inspect_says_what_a_training_state_has(tmp_path):
    model = {"a": arange(2, 2), "b": arange(3), "frozen": arange(1)}
    trained = {n: v for n, v in model.items() if n != "frozen"}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(["a", "b"], trained), "step": 3})
    found = document("inspect", path, "--tensors")
    assert found["state"] == {
        "weights": "present", "masters": "absent", "moments": "partial", "steps": "partial", "groups": "present",
        "scheduler": "absent", "rng": "absent", "counters": "present",
    }  # fmt: skip
    assert found["frozen"] == ["frozen"]
    assert (found["resumable"], found["why"]) == (True, "weights, moments and groups are there; without scheduler, rng")
    assert found["kinds"]["weight"] == {"tensors": 3, "numel": 8, "bytes": 32, "dtypes": ["float32"]}
    assert {"name": "a", "kind": "weight", "dtype": "float32", "shape": [2, 2], "bytes": 16, "pieces": 1} in found[
        "tensors"
    ]
    assert found["groups"][0]["settings"]["betas"] == [0.9, 0.999]
    bare = torch_save(tmp_path / "y.pt", model)
    found = document("inspect", bare)
    assert (found["resumable"], found["why"]) == (False, "no moments, no groups")


def test_ls_lists_by_name_and_kind(tmp_path):
    model = {"a.weight": arange(2, 2), "b.weight": arange(3)}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(list(model), model)})

    def names(*words):
        return [(t["name"], t["kind"]) for t in document("ls", path, *words)["tensors"]]

    assert names("a.*", "--kind", "weight", "--kind", "exp_avg") == [("a.weight", "weight"), ("a.weight", "exp_avg")]
    assert names("*.weight", "--kind", "step") == [("a.weight", "step"), ("b.weight", "step")]
    assert names("none") == []


def test_pieces_are_counted_without_opening_data(tmp_path):
    shutil.copytree(ckpt("torch/fsdp2_tp2x2_dcp"), tmp_path / "src")
    tensors = {(t["name"], t["kind"]): t for t in document("ls", tmp_path / "src")["tensors"]}
    assert tensors["model.layers.0.mlp.up_proj.weight", "weight"]["pieces"] == 4
