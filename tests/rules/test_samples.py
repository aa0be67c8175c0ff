"""Every rule has a bad sample that it speaks about, and good ones that it is silent about.

Bad samples: the broken fixtures, those made here, and tests elsewhere that name the kind (checked to be so).
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckptctl.core.errors import CkptError
from ckptctl.formats.hf import config
from ckptctl.operations import Reading, Validation, validate
from ckptctl.operations.opening import read_config
from ckptctl.rules import rules
from tests.formats.megatron.test_damaged import replaced, set_number
from tests.support.checkpoints import FIXTURES, ROOT, ckpt, layouts, truth_config
from tests.support.saving import adamw, arange, torch_save
from tests.support.torchfiles import torch_zip

EXPECT = json.loads((FIXTURES / "broken" / "expect.json").read_text())
BROKEN = {f["kind"] for case in EXPECT.values() for f in case["findings"]}
LLAMA = FIXTURES / "hf" / "llama-single"
MEGATRON = "megatron/legacy_tp2pp2_distopt_dp2"


def copy(name, tmp_path):
    """A copy of a layout's folder, its truth left out."""
    source = ckpt(name)
    folder = tmp_path / "c"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("truth", "truth.json", "info.json"))
    return folder


def torch_tar(tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"pickle".ljust(257, b"\0") + b"ustar\0" + bytes(600))
    return tmp_path / "x.pt"


def nemo(tmp_path, monkeypatch):
    (tmp_path / "x.nemo").write_bytes(b"model".ljust(257, b"\0") + b"ustar\0" + bytes(600))
    return tmp_path / "x.nemo"


def opcode(tmp_path, monkeypatch):
    (tmp_path / "x.pt").write_bytes(b"\x80\x02\x82\x01.")  # EXT1
    return tmp_path / "x.pt"


def out_of_memory(tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("ckptctl.operations.checks.files._safetensors", full)
    return FIXTURES / "broken" / "ok-minimal.safetensors"


def directory_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.formats.zipdir._DIRECTORY_LIMIT", 10)
    return torch_save(tmp_path / "x.pt", {"w": arange(2)})


def pickle_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.formats.torchfile.read.PICKLE_LIMIT", 10)
    return torch_save(tmp_path / "x.pt", {"w": arange(2)})


def no_checksums(tmp_path, monkeypatch):
    data = bytearray(torch_zip({"a": 1}, {}))
    for magic, at in ((b"PK\3\4", 14), (b"PK\1\2", 16)):
        for found in re.finditer(re.escape(magic), bytes(data)):
            struct.pack_into("<I", data, found.start() + at, 0)
    (tmp_path / "x.pt").write_bytes(data)
    return tmp_path / "x.pt"


def several_variants(tmp_path, monkeypatch):
    for variant in ("fp16", "fp32"):
        safetensors.numpy.save_file({"w": arange(2)}, tmp_path / f"model.{variant}.safetensors")
    return tmp_path


def with_config(change):
    def made(tmp_path, monkeypatch):
        folder = tmp_path / "m"
        shutil.copytree(LLAMA, folder)
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **change}))
        return folder

    return made


def tensor_unexpected(tmp_path, monkeypatch):
    folder = tmp_path / "m"
    shutil.copytree(LLAMA, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file({**tensors, "mine": arange(2)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def state_without_weight(tmp_path, monkeypatch):
    model = {"a": arange(2, 3), "b": arange(4)}
    optimizer = adamw([*model, "gone"], {**model, "gone": arange(5)})
    return torch_save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})


def rank_file(tree):
    def made(tmp_path, monkeypatch):
        folder = tmp_path / "iter_0000003" / "mp_rank_00"
        folder.mkdir(parents=True)
        (folder / "model_optim_rng.pt").write_bytes(torch_zip(tree, {}))
        return folder.parent

    return made


def tracker(text):
    def made(tmp_path, monkeypatch):
        folder = copy(MEGATRON, tmp_path)
        root = next(p.parent for p in folder.rglob("mp_rank_00_000"))
        run = tmp_path / "run"
        run.mkdir()
        shutil.move(root, run / "iter_0000003")
        (run / "latest_checkpointed_iteration.txt").write_text(text)
        return run

    return made


def config_too_large(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_bytes(b"{" + b" " * (80 << 20) + b"}")
    read_config(tmp_path / "config.json", "config.json")


def config_missing(tmp_path, monkeypatch):
    config.read_config(tmp_path / "gone.json")


def state_misplaced(tmp_path, monkeypatch):
    return ckpt("megatron/dist_tp1pp1_distopt_full_dp2_buckets")


def in_rank_files(name, files, change):
    """A copy of a real checkpoint in which a change was made to each of some files."""

    def made(tmp_path, monkeypatch):
        folder = copy(name, tmp_path)
        found = sorted(folder.rglob(files))
        assert found
        for file in found:
            change(file)
        return next(p for p in (folder / "ckpt", folder) if p.is_dir())

    return made


def buffers_no_dict(file):
    file.write_bytes(torch_zip([3], {}))


MADE = {
    "torch-tar": torch_tar,
    "archive-damaged": nemo,
    "pickle-opcode": opcode,
    "out-of-memory": out_of_memory,
    "directory-too-large": directory_too_large,
    "pickle-too-large": pickle_too_large,
    "no-checksums": no_checksums,
    "several-variants": several_variants,
    "config-numbers": with_config({"hidden_size": "many"}),
    "tensor-unexpected": tensor_unexpected,
    "state-without-weight": state_without_weight,
    "tracker-damaged": tracker("\x07what"),
    "step-missing": tracker("9"),
    "state-misplaced": state_misplaced,
    "config-too-large": config_too_large,
    "config-missing": config_missing,
    "world-size": in_rank_files(
        "deepspeed/zero1-dp2-bf16", "mp_rank_*model_states.pt", lambda f: set_number(f, "dp_world_size", 2, 1)
    ),
    "dtype-mismatch": in_rank_files(
        "torch/verl_fsdp2", "model_world_size_*.pt", lambda f: replaced(f, b"torch\nfloat32", b"torch\nfloat64")
    ),
    "layers-missing": in_rank_files(MEGATRON, "model_optim_rng.pt", lambda f: set_number(f, "num_layers", 4, 6)),
    "optimizer-buffers": in_rank_files(
        MEGATRON, "distrib_optim.pt", lambda f: replaced(f, b"numel_unpadded", b"numel_unpaddex")
    ),
    "optimizer-damaged": in_rank_files(MEGATRON, "distrib_optim.pt", buffers_no_dict),
    "optimizer-unknown": in_rank_files(
        "megatron/qwen2_legacy_tp2pp2_tied",
        "model_optim_rng.pt",
        lambda f: replaced(f, b"param_groups", b"param_groupz"),
    ),
    "root-damaged": rank_file([1, 2]),
    "model-missing": rank_file({"iteration": 3, "args": {"hidden_size": 8}}),
}
"""kind -> (tmp_path, monkeypatch) -> a path that validate finds it in, or its reader's error."""


@functools.cache
def naming_tests(kind):
    """Test files that name a kind of finding."""
    word = re.compile(rf"""["'`]{re.escape(kind)}["'`]""")
    here = Path(__file__)
    return [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p != here and word.search(p.read_text())]


@pytest.mark.parametrize("kind", [r.kind for r in rules()])
def test_every_rule_has_a_bad_sample(kind):
    assert kind in BROKEN or kind in MADE or naming_tests(kind), (
        f"{kind}: put a bad sample into MADE, or test it elsewhere"
    )


@pytest.mark.parametrize("kind", sorted(MADE))
def test_the_bad_samples_are_found(kind, tmp_path, monkeypatch):
    try:
        path = MADE[kind](tmp_path, monkeypatch)
        found = {f["kind"] for f in validate([path], Validation("values"))["findings"]}
    except CkptError as err:
        found = {err.code}
    assert kind in found


@functools.cache
def good_kinds():
    """Kinds of what is found in every good sample and real checkpoint here, errors and warnings."""
    found = {}
    good = [FIXTURES / "broken" / name for name, case in EXPECT.items() if not case["findings"]]
    real = [n for framework in ("hf", "torch", "deepspeed", "megatron") for n in layouts(framework)]
    real.remove("hf/llama-lora")  # several checkpoints
    for name, path in [*((p.name, p) for p in good), *((n, ckpt(n)) for n in real)]:
        given = truth_config(name) if "/" in name else None
        reading = Reading(given) if given is not None else None
        for f in validate([path], Validation("values"), reading)["findings"]:
            if f["severity"] == "error":
                found.setdefault(f["kind"], []).append(name)
    return found


@pytest.mark.parametrize("kind", [r.kind for r in rules()])
def test_no_rule_calls_a_good_sample_wrong(kind):
    assert good_kinds().get(kind, []) == []


def test_a_zip_with_checksums_is_not_called_one_without(tmp_path):
    with zipfile.ZipFile(torch_save(tmp_path / "x.pt", {"w": np.ones(3, np.float32)})) as archive:
        assert any(i.CRC for i in archive.infolist())
    assert validate([tmp_path / "x.pt"], Validation("values"))["findings"] == []
