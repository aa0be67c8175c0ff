"""PEFT adapters: read, shown, and carried through every format with their configuration."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import ckptctl
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.formats.hf.adapter import adapted
from tests.support.checkpoints import fixture, shared, truth
from tests.support.commands import document, good, refused
from tests.support.format_suite import all_digests
from tests.support.saving import arange, torch_save

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "base"}
P = "base_model.model."


def adapter_save(folder, tensors, **config):
    """An adapter's folder as PEFT writes one."""
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def factors(module, rank, rows, columns, dtype=np.float32):
    a = arange(rank, columns, dtype=dtype)
    return {f"{P}{module}.lora_A.weight": a, f"{P}{module}.lora_B.weight": arange(rows, rank, dtype=dtype, start=7)}


def sample(name):
    path = fixture("hf/llama-lora") if name == "llama-lora" else shared(f"hf/{name}")
    return path / "adapter"


@pytest.mark.parametrize("name", ["llama-lora", "qwen2-lora-tied"])
def test_a_real_adapter_is_shown_with_its_settings(name):
    found = document("inspect", sample(name))
    config = json.loads((sample(name) / "adapter_config.json").read_text())
    assert (found["format"], found["variant"], found["layout"]["dp"]) == ("hf", "adapter safetensors", None)
    told = found["adapter"]
    assert (told["type"], told["rank"], told["alpha"], told["base"]) == ("LORA", 4, 8, "base")
    assert told["target_modules"] == sorted(config["target_modules"])
    assert told["modules_to_save"] == (config["modules_to_save"] or [])
    with ckptctl.open(sample(name)) as view:
        assert {k[0]: t for k, t in all_digests(view).items()} == truth(sample(name))["model"]


@pytest.mark.parametrize("name", ["llama-lora", "qwen2-lora-tied"])
@pytest.mark.parametrize("way", [["hf"], ["torch"], ["dcp", "--dp", "3"]])
def test_an_adapter_comes_back_byte_for_byte_from_every_format(name, way, tmp_path):
    out = tmp_path / ("a.pt" if way[0] == "torch" else "a")
    good("convert", sample(name), out, "--to", *way)
    good("convert", out, tmp_path / "back", "--to", "hf")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (sample(name) / file).read_bytes()
    assert document("diff", sample(name), out)["equal"]
    assert document("inspect", out)["adapter"]["rank"] == 4


def test_a_bin_adapter_is_read_and_written_as_safetensors(tmp_path):
    tensors = factors("layer.q_proj", 2, 6, 4)
    folder = adapter_save(tmp_path / "a", tensors)
    (folder / "adapter_model.safetensors").unlink()
    torch_save(folder / "adapter_model.bin", tensors)
    good("convert", folder, tmp_path / "out", "--to", "hf")
    got = safetensors.numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {n: a.tobytes() for n, a in got.items()} == {n: a.tobytes() for n, a in tensors.items()}


def test_an_adapter_is_one_file_whatever_the_shard_size(tmp_path):
    folder = adapter_save(tmp_path / "a", factors("layer.q_proj", 2, 60, 40))
    good("convert", folder, tmp_path / "out", "--to", "hf", "--max-shard-size", "100")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_ranks_that_contradict_each_other_are_a_warning(tmp_path):
    tensors = {**factors("x.q_proj", 4, 6, 8)}
    tensors[f"{P}x.q_proj.lora_B.weight"] = arange(6, 2)
    found = document("inspect", adapter_save(tmp_path / "a", tensors, r=4))
    assert any("lora_A has rank 4, lora_B has rank 2" in w for w in found["warnings"])


def test_a_model_and_an_adapter_in_one_folder_are_refused(tmp_path):
    shutil.copytree(fixture("hf/llama-lora") / "base", tmp_path / "both")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(fixture("hf/llama-lora") / "adapter" / file, tmp_path / "both")
    error = refused("inspect", tmp_path / "both")
    assert error["code"] == "model-and-adapter"
    assert "model.safetensors" in error["why"]


def test_an_adapter_without_weights_names_what_is_missing(tmp_path):
    folder = adapter_save(tmp_path / "a", factors("x", 2, 3, 4))
    (folder / "adapter_model.safetensors").unlink()
    assert refused("inspect", folder)["code"] == "adapter-missing"
    with pytest.raises(MissingFile):
        ckptctl.open(folder)


@pytest.mark.parametrize("text", ["{}", '{"peft_type": 3}', "[]", "{"])
def test_a_configuration_that_is_none_is_damage(text, tmp_path):
    folder = adapter_save(tmp_path / "a", factors("x", 2, 3, 4))
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises((Damaged, Unsupported)):
        ckptctl.open(folder)


def test_names_say_what_each_tensor_is_for():
    found = adapted(
        [
            P + "m.q.lora_A.weight", P + "m.q.lora_B.weight", P + "m.e.lora_embedding_A", P + "m.e.lora_embedding_B",
            P + "m.v.lora_A.default.weight", P + "m.v.lora_B.default.weight", P + "lm_head.weight",
            P + "m.e.base_layer.weight", P + "score.modules_to_save.default.weight",
            P + "m.q.lora_magnitude_vector", "m.k.weight",
        ]
    )  # fmt: skip
    assert {m: (f.first, f.second, f.embedding) for m, f in found.factors.items()} == {
        "m.q": (P + "m.q.lora_A.weight", P + "m.q.lora_B.weight", False),
        "m.v": (P + "m.v.lora_A.default.weight", P + "m.v.lora_B.default.weight", False),
        "m.e": (P + "m.e.lora_embedding_A", P + "m.e.lora_embedding_B", True),
    }
    assert found.whole == {
        "lm_head.weight": P + "lm_head.weight",
        "m.e.weight": P + "m.e.base_layer.weight",
        "score.weight": P + "score.modules_to_save.default.weight",
    }
    assert found.other == (P + "m.q.lora_magnitude_vector", "m.k.weight")


@pytest.mark.parametrize(
    "names", [[P + "m.lora_A.weight"], [P + "m.lora_A.a.weight", P + "m.lora_A.b.weight", P + "m.lora_B.a.weight"]]
)
def test_factors_that_are_not_two_are_damage(names):
    with pytest.raises(Damaged):
        adapted(names)
