"""Families against what Transformers says: golden lists that it made once, and the installed one where there is any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ckptctl import names
from ckptctl.core.errors import Damaged
from tests.support.checkpoints import ckpt, layouts, run_torch, safetensors_of

GOLDEN = Path(__file__).parent / "golden"
MAKER = Path(__file__).with_name("make_golden.py")
MODELS = [m for f in sorted(GOLDEN.glob("*.json")) for m in json.loads(f.read_text())]


def label(model):
    return " ".join(f"{k}={v}" for k, v in model["settings"].items() if k not in ("vocab_size", "pad_token_id"))


def of(model, key="config") -> names.Family:
    found = names.family(model[key])
    assert found is not None
    return found


def said(parameters) -> list[tuple[str, list[int]]]:
    return [(p.name, list(p.shape)) for p in parameters]


def test_every_family_has_a_golden_list():
    assert {names.family(m["config"]).name for m in MODELS} == set(names.known())
    assert len(names.known()) >= 15


@pytest.mark.parametrize("key", ["config", "settings"])
@pytest.mark.parametrize("model", MODELS, ids=label)
def test_parameters_are_transformers_own_in_its_order(model, key):
    found = of(model, key)
    assert said(found.parameters()) == list(model["parameters"].items())
    assert [p.name for p in found.parameters() if not p.decays] == model["not_decayed"]
    assert [p.name for p in found.buffers()] == model["buffers"]


@pytest.mark.parametrize("model", MODELS, ids=label)
def test_names_on_disk_are_those_that_save_pretrained_writes(model):
    found = of(model)
    assert dict(said([*found.parameters("disk"), *found.buffers("disk")])) == model["disk"]


@pytest.mark.parametrize("model", MODELS, ids=label)
def test_what_is_stacked_names_tensors_on_disk_once_with_as_many_elements(model):
    found = of(model)
    disk = {p.name: p.shape for p in found.parameters("disk")}
    taken = []
    for p in found.parameters():
        parts = [n for expert in p.stacks for n in expert] or [p.disk]
        assert math.prod(p.shape) == sum(math.prod(disk[n]) for n in parts)
        taken += parts
    assert sorted(taken) == sorted(disk)


@pytest.mark.parametrize("model", MODELS, ids=label)
def test_transformers_4_has_the_same_parameters_as_the_files_in_an_order_of_its_own(model):
    found = of(model)
    assert sorted(said(found.parameters("module4"))) == sorted(said(found.parameters("disk")))


def test_transformers_4_numbers_experts_one_by_one():
    """Transformers 4.57.1, models/mixtral and models/qwen3_moe: gate, then each expert's matrices as they are made."""
    mixtral = names.family({"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2})
    order = [p.name.removeprefix("model.layers.0.") for p in mixtral.parameters("module4")]
    at = order.index("self_attn.o_proj.weight") + 1
    moe = "block_sparse_moe."
    assert order[at : at + 7] == [
        f"{moe}gate.weight",
        *(f"{moe}experts.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w2", "w3")),
    ]
    qwen = names.family({"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 1})
    order = [p.name.removeprefix("model.layers.0.mlp.") for p in qwen.parameters("module4")]
    assert order[7:11] == ["gate.weight", *(f"experts.0.{w}_proj.weight" for w in ("gate", "up", "down"))]


def test_an_absent_key_means_the_default_and_null_what_the_class_makes_of_it():
    mistral = {"model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 16}
    k = "model.layers.0.self_attn.k_proj.weight"

    def shape(config):
        return {p.name: p.shape for p in names.family(config).parameters()}[k]

    assert shape(mistral) == (8 * 4, 64)
    assert shape({**mistral, "num_key_value_heads": None}) == (16 * 4, 64)
    assert shape({**mistral, "num_key_value_heads": 2}) == (2 * 4, 64)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "t5"},
        {"model_type": ["llama"]},
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "llama", "architectures": ["LlamaModel"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {"model_type": "gpt2", "add_cross_attention": True},
    ],
)
def test_models_with_other_parameters_are_no_family(config):
    assert names.family(config) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": "64"},
        {"hidden_size": 64.0},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**40},
    ],
)
def test_numbers_that_make_no_model_are_damage(wrong):
    with pytest.raises(Damaged) as caught:
        names.family({"model_type": "llama", **wrong}).parameters()
    assert "llama" in caught.value.what
    assert caught.value.why


def test_layers_of_multi_token_prediction_are_extras_on_disk():
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "num_nextn_predict_layers": 1, "n_routed_experts": 2}
    found = names.family(config)
    extras = {p.name: p.shape for p in found.extras()}
    assert extras["model.layers.4.eh_proj.weight"] == (7168, 2 * 7168)
    assert "model.layers.4.mlp.experts.1.down_proj.weight" in extras
    assert not any(".4." in p.name for p in found.parameters("disk") if "layers.4" in p.name)
    assert names.family({"model_type": "deepseek_v3"}).extras() == ()


@pytest.mark.real
@pytest.mark.parametrize("name", [n for n in layouts("hf", everything=True) if n.endswith("-single")])
def test_real_folders_hold_the_parameters_of_their_config(name):
    folder = ckpt(name)
    found = names.family(json.loads((folder / "config.json").read_text()))
    assert found is not None
    held = {n: s for f in folder.glob("*.safetensors") for n, _, s, _ in safetensors_of(f)}
    assert {p.name: p.shape for p in (*found.parameters("disk"), *found.buffers("disk"))} == held


def test_golden_lists_are_what_the_installed_transformers_says():
    script = "try:\n    import transformers\n    print(transformers.__version__)\nexcept ImportError:\n    print(0)"
    if run_torch(script).split(".")[0] != "5":
        pytest.skip("needs transformers 5 beside torch")
    run = f"import runpy, sys\nsys.argv = ['x', '--print']\nrunpy.run_path({str(MAKER)!r}, run_name='__main__')"
    made = [m for models in json.loads(run_torch(run).splitlines()[-1]).values() for m in models]
    for model in made:
        same = next(m for m in MODELS if m["settings"] == model["settings"])
        for part in ("parameters", "not_decayed", "buffers", "disk"):
            assert model[part] == same[part], model["settings"]
