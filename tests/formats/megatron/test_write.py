"""Megatron checkpoints as written: every value against the digests of the run, for many meshes and both forms."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from ckptctl.core.tensor import Key
from ckptctl.formats.megatron.buffers import buffer
from ckptctl.formats.megatron.facts import Facts, layout_counts
from ckptctl.operations.naming import as_hub
from ckptctl.operations.opening import Reading, open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.formats.megatron.test_read import CLASSIC, DIST, TIED, digest, truth_of
from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused

MIXTRAL, GPT2, FULL = "megatron/mixtral_legacy_ep2", "megatron/gpt2_legacy_tp2pp1", "megatron/legacy_tp2pp2_distopt_dp2"
MESHES = [
    (TIED, "torch", {"tp": 1, "pp": 1}),
    (TIED, "torch", {"tp": 2, "pp": 4}),
    (TIED, "torch", {"tp": 1, "pp": 2, "vpp": 2}),
    (TIED, "torch_dist", {"tp": 2, "pp": 1, "dp": 2, "optimizer": "distributed"}),
    (TIED, "torch", {"tp": 2, "pp": 2, "dp": 3, "optimizer": "distributed"}),
    (CLASSIC, "torch", {"tp": 1, "pp": 4}),
    (CLASSIC, "torch", {"tp": 1, "pp": 1, "optimizer": "plain"}),
    (CLASSIC, "torch_dist", {"tp": 2, "pp": 2}),
    (CLASSIC, "torch_dist", {"tp": 2, "pp": 2, "optimizer": "plain"}),
    (CLASSIC, "torch", {"tp": 2, "pp": 1, "layer-spec": "te"}),
    (DIST, "torch", {"tp": 2, "pp": 2}),
    (DIST, "torch_dist", {"tp": 1, "pp": 1, "vpp": 1}),
    (FULL, "torch", {"tp": 1, "pp": 2, "vpp": 2, "dp": 4}),
    (MIXTRAL, "torch", {"tp": 2, "ep": 1}),
    (MIXTRAL, "torch", {"ep": 4, "dp": 4, "optimizer": "distributed"}),
    (MIXTRAL, "torch", {"tp": 2, "pp": 2, "ep": 2, "layer-spec": "te"}),
    (MIXTRAL, "torch_dist", {"ep": 2, "pp": 4}),
    (GPT2, "torch_dist", {"tp": 4}),
    (GPT2, "torch", {"tp": 1, "pp": 4}),
]


def flags(mesh):
    return [w for k, v in mesh.items() for w in (f"--{k}", str(v))]


@pytest.mark.parametrize(("name", "form", "mesh"), MESHES, ids=lambda v: str(v).replace("megatron/", ""))
def test_resharded_tensors_are_those_of_the_run(name, form, mesh, tmp_path):
    config = truth_config(name)
    out = tmp_path / "out"
    good("reshard", ckpt(name), out, *flags(mesh), "--megatron-format", form, "--model-config", config)
    told = document("inspect", out, "--model-config", config)
    assert told["variant"] == {"torch": "classic"}.get(form, form)
    axes = {k: v for k, v in mesh.items() if k in told["layout"]}
    assert {k: told["layout"][k] for k in axes} == axes
    checkpoint = as_hub(open_checkpoint(out, Reading(config))[0], "megatron")
    want = truth_of(name)
    with TensorReader(checkpoint) as reader:
        for section, kind in (("model", "weight"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            keys = [k for k in checkpoint.tensors if k.kind == kind]
            masters = {k.name: Key(k.name, "master") for k in keys if kind == "weight"}
            found = {k.name: digest(reader, m if (m := masters.get(k.name)) in checkpoint.tensors else k) for k in keys}
            assert found == {n: t for n, t in want[section].items() if n in found}
            assert set(want[section]) - set(found) <= {"lm_head.weight"}
    assert {v for (_, kind), v in checkpoint.optimizer.scalars.items() if kind == "step"} == {3}
    same = command("diff", ckpt(name), out, "--optimizer", "--model-config", config, "--json")
    unlike = {d["kind"] for d in same.json["differences"]}
    assert unlike <= ({"group"} if "optimizer" in mesh else set()), same.json["differences"][:3]


@pytest.mark.parametrize("name", ["hf/llama-single", "hf/gpt2-single", "hf/qwen2-single", "hf/mixtral-single"])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_hugging_face_to_megatron_and_back_gives_equal_bytes(name, form, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    good("convert", ckpt(name), there, "--to", "megatron", "--megatron-format", form, "--tp", "2", "--pp", "2")
    assert (there / "latest_checkpointed_iteration.txt").read_text() == "release"
    good("convert", there, back, "--to", "hf", "--model-config", ckpt(name) / "config.json")
    assert document("diff", ckpt(name), back)["equal"]


def test_padding_rows_are_kept_where_the_padded_size_is_the_same(tmp_path):
    config = truth_config(TIED)
    good("reshard", ckpt(TIED), tmp_path / "out", "--tp", "2", "--pp", "1", "--model-config", config)
    rows = []
    for path in (ckpt(TIED), tmp_path / "out"):
        checkpoint = open_checkpoint(path, Reading(config))[0]
        held = type(checkpoint)(
            **{f: getattr(checkpoint, f) for f in checkpoint.__dataclass_fields__} | {"tensors": checkpoint.padding}
        )
        with TensorReader(held) as reader:
            rows.append({k: hashlib.sha256(reader.array(k).tobytes()).hexdigest() for k in checkpoint.padding})
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3


@pytest.mark.parametrize(
    ("form", "more", "kept", "fate", "said"),
    [
        ("torch", (), 0, "dropped", ": 0 as the source has them, 13 trained rows let go"),
        ("torch_dist", (), 0, "dropped", ": 0 as the source has them, 13 trained rows let go"),
        ("torch", ("--keep-padding-rows",), 13, "filled", ": 13 as the source has them, 112 of zeros"),
        ("torch_dist", ("--keep-padding-rows",), 13, "filled", ": 13 as the source has them, 112 of zeros"),
    ],
)
def test_rows_that_pad_a_vocabulary_of_another_size(form, more, kept, fate, said, tmp_path):
    config = truth_config(TIED)
    out = tmp_path / "out"
    words = ("--tp", "2", "--vocab-divisor", "128", "--model-config", config, "--megatron-format", form, *more)
    done = document("reshard", ckpt(TIED), out, *words)
    line = next(x for x in done["fidelity"] if x["part"] == "vocabulary padding")
    assert line["fate"] == fate
    assert line["detail"].startswith(f"131 rows padded to 256 (a multiple of 128 x tp){said}")
    checkpoint = open_checkpoint(out, Reading(config))[0]
    key = Key("embedding.word_embeddings.weight", "weight", "padding")
    held = type(checkpoint)(
        **{f: getattr(checkpoint, f) for f in checkpoint.__dataclass_fields__} | {"tensors": checkpoint.padding}
    )
    with TensorReader(held) as reader:
        rows = np.ascontiguousarray(reader.array(key)).view(np.uint8).reshape(125, -1)
    assert rows[:13].any() == bool(kept)
    assert not rows[kept:].any()


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tp": 3}, "--tp 3 does not divide the 4 attention heads"),
        ({"pp": 3}, "--pp 3 does not divide the 4 layers"),
        ({"pp": 2, "vpp": 3}, "--pp 2 --vpp 3 does not divide the 4 layers"),
        ({"ep": 2}, "--ep 2 does not divide the 0 experts"),
    ],
)
def test_a_mesh_that_does_not_divide_says_what_would(mesh, words, tmp_path):
    error = refused("reshard", ckpt(TIED), tmp_path / "out", *flags(mesh), "--model-config", truth_config(TIED))
    assert words in error["what"]
    assert error["code"] == "mesh-does-not-divide"
    assert error["fix"]
    assert not (tmp_path / "out").exists()


def test_random_state_is_kept_for_the_same_mesh_alone(tmp_path):
    fates = {}
    for name, words in {"same": (), "other": ("--tp", "1")}.items():
        done = document("reshard", ckpt(TIED), tmp_path / name, *words, "--model-config", truth_config(TIED))
        fates[name] = next(x["fate"] for x in done["fidelity"] if x["part"] == "random state")
    assert fates == {"same": "carried", "other": "written"}


def test_training_state_without_names_of_a_family_is_refused(tmp_path):
    config = tmp_path / "config.json"
    text = json.loads((truth_config(TIED) / "config.json").read_text())
    config.write_text(json.dumps({**text, "model_type": "gemma2"}))
    error = refused("convert", ckpt(TIED), tmp_path / "out", "--to", "hf", "--no-optimizer", "--model-config", config)
    assert error["exit_code"] == 3


# ---- arithmetic by hand ---------------------------------------------------------------------------------------------


def test_buffers_by_hand():
    # Reverse order, each from a multiple of 64; a bucket closes at 150 elements, its end is padded to 128.
    placed = buffer([("a", 10, False), ("b", 100, False), ("c", 65, False)], 2, 150)
    assert {n: (s.bucket, s.start) for n, s in placed.slots.items()} == {"c": (0, 0), "b": (0, 128), "a": (1, 0)}
    assert (placed.unpadded, placed.padded) == ((228, 10), (256, 128))
    assert (placed.joined("a"), placed.in_run("a"), placed.numel, placed.is_shifted) == (228, 256, 238, True)


def test_a_shared_embedding_has_a_bucket_of_its_own():
    placed = buffer([("embedding", 130, True), ("norm", 10, False)], 1, None)
    # The bucket before it is closed at the embedding's aligned start.
    assert (placed.unpadded, placed.padded) == ((64, 130), (128, 256))
    assert placed.slots["embedding"].bucket == 1


PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("args", "firsts"),
    [
        ({PP: 2}, {(0, 0): 0, (1, 0): 4}),
        ({PP: 2, VPP: 2}, {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}),
        ({PP: 3, "decoder_first_pipeline_num_layers": 2}, {(0, 0): 0, (1, 0): 2, (2, 0): 5}),
        ({PP: 3, "decoder_last_pipeline_num_layers": 2}, {(0, 0): 0, (1, 0): 3, (2, 0): 6}),
        ({PP: 2, "pipeline_model_parallel_layout": "Ettt|(t)*5L"}, {(0, 0): 0, (1, 0): 3}),
    ],
)  # fmt: skip
def test_first_layers_by_hand(args, firsts):
    facts = Facts({"num_layers": 8, **args})
    assert {at: facts.first_layer(*at) for at in firsts} == firsts


def test_a_pipeline_that_counts_the_embedding_as_a_layer():
    facts = Facts({"num_layers": 7, "pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True})
    assert [facts.first_layer(p, 0) for p in (0, 1)] == [0, 3]


def test_layouts_of_pipelines_as_text():
    assert layout_counts("E|(t|)*3,m|m||L", "") == [0, 1, 1, 1, 0, 0, 0, 0]
    assert layout_counts("Ettt|(tt|)*2,m|L", "") == [3, 2, 2, 0, 0]


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize(("spec", "said"), [("te", "transformer_engine"), ("local", "local")])
def test_args_say_whose_layers_the_names_are(spec, said, form, tmp_path):
    out = tmp_path / "out"
    good("reshard", ckpt(CLASSIC), out, "--layer-spec", spec, "--megatron-format", form)
    assert open_checkpoint(out)[0].native["args"].state["transformer_impl"] == said


def test_by_way_of_another_format_all_but_the_padding_rows_come_back_and_those_are_reported(tmp_path):
    given = ("--model-config", truth_config(TIED))
    away = document("convert", ckpt(TIED), tmp_path / "a.pt", "--to", "torch", *given)
    line = next(x for x in away["fidelity"] if x["part"] == "vocabulary padding")
    assert (line["fate"], "13 rows" in line["detail"]) == ("dropped", True)
    to = ("--to", "megatron", "--megatron-format", "torch", "--tp", "2", "--pp", "2", "--vocab-divisor", "8")
    back = document("convert", tmp_path / "a.pt", tmp_path / "b", *to, *given)
    line = next(x for x in back["fidelity"] if x["part"] == "vocabulary padding")
    assert (line["fate"], "13 of zeros" in line["detail"]) == ("filled", True)
    assert document("diff", ckpt(TIED), tmp_path / "b", "--optimizer", *given)["equal"]


def test_a_fused_adam_s_groups_have_torchs_settings_in_a_dcp(tmp_path):
    """torch.distributed.checkpoint loads by the live optimizer's template, and stops where a setting is missing."""
    name = "megatron/legacy_tp2pp2_distopt_dp2"
    document("convert", ckpt(name), tmp_path / "out", "--to", "dcp", "--model-config", truth_config(name))
    groups = open_checkpoint(tmp_path / "out")[0].optimizer.groups
    # what a group of torch 2.13.0's AdamW has besides params
    own = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable"}
    own |= {"fused", "decoupled_weight_decay"}
    assert all(own <= set(g.options) for g in groups)
    assert {g.options["decoupled_weight_decay"] for g in groups} == {True}
    assert document("diff", ckpt(name), tmp_path / "out", "--optimizer", "--model-config", truth_config(name))["equal"]


def test_the_loader_is_told_of_keys_of_single_layers(tmp_path):
    """Real Megatron 0.16.1 makes its own keys by content_metadata, whatever the run's flags are."""
    config = truth_config("megatron/dist_tp2pp2")
    apart = tmp_path / "apart"
    good("reshard", ckpt("megatron/dist_tp2pp2_layernames"), apart, "--tp", "1", "--model-config", config)
    good("reshard", ckpt("megatron/dist_tp2pp2"), tmp_path / "stacked", "--tp", "1", "--model-config", config)
    told = {p.name: open_checkpoint(p)[0].native["content_metadata"] for p in (apart, tmp_path / "stacked")}
    assert told["apart"]["non_homogeneous_layers"] is True
    assert "non_homogeneous_layers" not in told["stacked"]
