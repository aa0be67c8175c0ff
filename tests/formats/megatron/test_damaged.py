"""Damaged sets of real checkpoints, each with its own message: bytes of real files changed in place.

Missing ranks, ranks of other iterations, and replicas that differ are in test_read.
"""

from __future__ import annotations

import json
import pickletools
import shutil
import zipfile

import pytest

from ckptctl.core.errors import CkptError
from ckptctl.formats.megatron import classic, heads
from ckptctl.formats.megatron.facts import Facts
from ckptctl.operations.opening import Reading, open_checkpoint
from tests.formats.megatron.test_read import CLASSIC, DIST, TIED
from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused


def copied(name, tmp_path):
    return shutil.copytree(ckpt(name), tmp_path / "run")


def pickle_of(file):
    """A torch file's bytes, its pickle, and where that begins."""
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        found = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        text = archive.read(found)
    return data, text, bytes(data).index(text)


def set_number(file, key, old, new):
    """Changes a small number that args have under a key."""
    data, text, start = pickle_of(file)
    before, names = None, {}
    for op, value, at in pickletools.genops(text):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            names[value] = before
            continue
        if op.name == "BININT1" and before == key:
            assert data[start + at + 1] == old
            data[start + at + 1] = new
            file.write_bytes(data)
            return
        before = value if op.name == "BINUNICODE" else names.get(value) if "BINGET" in op.name else None
    raise AssertionError(f"{key} is not there")


def replaced(file, old, new):
    """Changes text of the same length in the pickle."""
    data, text, start = pickle_of(file)
    assert len(old) == len(new)
    assert old in text
    data[start : start + len(text)] = text.replace(old, new)
    file.write_bytes(data)


def refusal(path, name):
    with pytest.raises(CkptError) as caught:
        open_checkpoint(path, Reading(truth_config(name)))
    return caught.value


@pytest.mark.parametrize(
    ("key", "old", "new", "words"),
    [
        ("num_query_groups", 2, 4, "has 64 rows, and args say 96 rows"),
        ("num_query_groups", 2, 3, "args say 4 attention heads in 3 query groups"),
        ("kv_channels", 8, 4, "has 32 columns, and args say 16 columns"),
        ("num_attention_heads", 4, 2, "the config says 4 attention heads, the checkpoint's args 2"),
    ],
)
def test_heads_that_contradict_the_shapes_are_refused(key, old, new, words, tmp_path):
    run = copied(TIED, tmp_path)
    for file in run.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        set_number(file, key, old, new)
    error = refusal(run, TIED)
    assert (error.code, words in error.what) == ("heads-contradict", True), error.what


def test_heads_that_contradict_the_shapes_are_refused_in_torch_dist(tmp_path):
    run = copied(DIST, tmp_path)
    set_number(next(run.glob("iter_*/common.pt")), "num_query_groups", 2, 1)
    assert refusal(run, DIST).code == "heads-contradict"


def test_a_config_of_other_heads_is_refused(tmp_path):
    config = json.loads((truth_config(TIED) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    error = refused("inspect", ckpt(TIED), "--model-config", tmp_path)
    assert error["code"] == "heads-contradict"
    assert error["what"] == "the config says 8 attention heads, the checkpoint's args 4"


@pytest.mark.parametrize("name", [TIED, DIST])
def test_a_config_of_fewer_tokens_than_args_say_is_refused(name, tmp_path):
    config = json.loads((truth_config(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 130}))
    error = refused("inspect", ckpt(name), "--model-config", tmp_path)
    assert error["code"] == "config-shape-mismatch"
    assert error["what"] == "the config says a vocabulary of 130, the checkpoint's args one of 131"


def test_numbers_that_no_shape_tells_are_compared_with_args(tmp_path):
    config = json.loads((truth_config(DIST) / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e3}})
    )
    told = open_checkpoint(ckpt(DIST), Reading(tmp_path))[0].warnings
    assert (
        "the config says rms_norm_eps 1e-06, the checkpoint's args layernorm_epsilon 1e-05: is it this model's?" in told
    )
    assert "the config says rope_theta 5000.0, the checkpoint's args rotary_base 10000: is it this model's?" in told
    older = heads.unlike_config(Facts({"norm_epsilon": 1e-6}, "args", {"rms_norm_eps": 1e-5}))
    assert older == (
        "the config says rms_norm_eps 1e-05, the checkpoint's args norm_epsilon 1e-06: is it this model's?",
    )


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"num_key_value_heads": 1}, "config-shape-mismatch", "linear_qkv.weight is (64, 32), and should be (48, 32)"),
        ({"num_hidden_layers": 6}, "config-weights-missing", "weights than the checkpoint has: decoder.layers.4."),
        ({"num_hidden_layers": 2}, "names-unknown", "12 weights have names that Megatron's model has not"),
        ({"attention_bias": True}, "config-weights-missing", "8 more weights than the checkpoint has"),
        ({"intermediate_size": 64}, "config-shape-mismatch", "linear_fc1.weight is (96, 32), and should be (128, 32)"),
    ],
)
def test_a_config_of_another_model_is_refused_where_names_stay(changed, code, words, tmp_path):
    config = json.loads((truth_config(CLASSIC) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    given = ("--model-config", tmp_path)
    for call in (("reshard", ckpt(CLASSIC), tmp_path / "a", "--tp", "1"), ("convert", ckpt(CLASSIC), tmp_path / "b")):
        to = ("--to", "megatron") if call[0] == "convert" else ()
        error = refused(*call, *to, *given)
        assert (error["exit_code"], error["code"]) == (3, code)
        assert words in error["what"]
    error = refused("convert", ckpt(CLASSIC), tmp_path / "c", "--to", "hf", "--no-optimizer", *given)
    assert error["code"] == code


def test_a_config_of_a_family_without_names_is_told_where_names_stay(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 131}))
    told = document("reshard", ckpt(CLASSIC), tmp_path / "out", "--tp", "1", "--model-config", tmp_path)
    assert any("whether the config is of this model is not known" in w for w in told["warnings"])


@pytest.mark.parametrize("name", [CLASSIC, DIST])
def test_a_changed_byte_of_a_moment_is_told_by_its_checksum(name, tmp_path):
    """Nothing else contradicts a moment. Items of .distcp files are torch's zips, with checksums of their own."""
    run = copied(name, tmp_path)
    words = (run, tmp_path / "out", "--tp", "1", "--pp", "1", "--vpp", "1", "--verify-checksums")
    words += ("--model-config", truth_config(name))
    good("reshard", *words)
    source = open_checkpoint(run, Reading(truth_config(name)))[0]
    tensor = next(t for k, t in source.tensors.items() if k.kind == "exp_avg" and "linear_proj" in k.name)
    piece = next(p for table in tensor.pieces for p in table)
    file = next(run.glob("iter_*")) / source.sources[piece.source].path
    data = bytearray(file.read_bytes())
    data[piece.start + 5] ^= 1
    file.write_bytes(data)
    error = refused("reshard", *words, "--overwrite")
    assert (error["exit_code"], error["code"]) == (3, "checksum-mismatch")
    assert "CRC-32" in error["why"]
    if name == DIST:
        told = command("validate", run, "--checksums", "--json")
        kinds = {f["kind"]: f["where"] for f in told.json["findings"]}
        assert (told.code, kinds["checksum-mismatch"]["file"]) == (1, str(file.relative_to(run)))
        assert kinds["checksum-mismatch"]["tensor"].startswith("optimizer.state.exp_avg.decoder")
        assert "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight" in error["what"]


def test_a_tensor_that_nobody_knows_is_refused_where_ranks_would_cut_it(tmp_path):
    run = copied(TIED, tmp_path)
    for file in run.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        replaced(file, b"decoder.layers.1.pre_mlp_layernorm.weight", b"decoder.layers.1.pre_mlp_something.matrix")
    error = refusal(run, TIED)
    assert error.code == "tensor-unknown"
    assert "decoder.layers.1.pre_mlp_something.matrix" in error.what


def test_fp8_scales_are_told(tmp_path):
    run = copied(CLASSIC, tmp_path)
    file = run / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    data, text, start = pickle_of(file)
    name = b"decoder.layers.0.self_attention.linear_proj._extra_state"
    at = text.index(name) + len(name)
    none = next(p for op, _, p in pickletools.genops(text) if p >= at and op.name == "NONE")
    data[start + none] = 0x89  # False
    file.write_bytes(data)
    told = document("inspect", run, "--model-config", truth_config(CLASSIC))
    assert any("1 _extra_state entries (FP8 scales) are not read" in w for w in told["warnings"])


def test_a_stage_s_layers_twice_are_refused(tmp_path, monkeypatch):
    """Both stages' files are of the first: told by the ranks' numbers, by their data, and by sizes."""
    run = copied(TIED, tmp_path)
    for tp in (0, 1):
        file = "model_optim_rng.pt"
        shutil.copy(
            run / "iter_0000003" / f"mp_rank_0{tp}_000" / file, run / "iter_0000003" / f"mp_rank_0{tp}_001" / file
        )
    error = refusal(run, TIED)
    assert (error.exit_code, error.code) == (3, "ranks-differ")
    assert error.what == "two ranks' folders hold the same rank"
    monkeypatch.setattr(classic, "_require_own_places", lambda said: None)
    assert refusal(run, TIED).what == "two ranks' files hold the same data"
    monkeypatch.setattr(classic, "_require_own_data", lambda data: None)
    error = refusal(run, TIED)
    assert (error.exit_code, error.code) == (3, "ranks-differ")
    assert "9216 of 4608 elements over all ranks: some are there twice" in error.what


@pytest.mark.parametrize(
    "name", sorted(f"megatron/{p.parent.parent.name}" for p in ckpt("megatron").glob("*/truth/config.json"))
)
def test_real_configs_contradict_no_args(name):
    assert not [w for w in open_checkpoint(ckpt(name), Reading(truth_config(name)))[0].warnings if "is it this" in w]


def test_buffers_of_an_optimizer_that_common_pt_has_not_are_refused(tmp_path):
    name = "megatron/dist_tp2pp2_distopt_dp_dp2"
    run = copied(name, tmp_path)
    replaced(next(run.glob("iter_*/common.pt")), b"\x09\0\0\0optimizer", b"\x09\0\0\0optimizeq")
    assert refusal(run, name).code == "optimizer-damaged"
    good("convert", run, tmp_path / "out", "--to", "hf", "--no-optimizer", "--model-config", truth_config(name))
