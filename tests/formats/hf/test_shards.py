"""Slices of DCP's Hugging Face writer: joined, and refused where they are not whole as far as anything can tell."""

import json
import shutil

import pytest

from ckptctl.formats.hf.shards import model_shapes
from tests.support.checkpoints import ckpt, digests, truth
from tests.support.commands import document, good, refused

LLAMA = "hf/llama-dcp-hf-4ranks"


def shard(rank):
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A copy of four ranks' slices, to be damaged."""
    shutil.copytree(ckpt(LLAMA), tmp_path / "run")
    return tmp_path / "run"


def change(file, how):
    """Rewrite a header."""
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    how(header, info)
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + n :])


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shard_before_the_last_is_missed(rank, config, folder, tmp_path):
    (folder / shard(rank)).unlink()
    if not config:
        (folder / "config.json").unlink()
    error = refused("convert", folder, tmp_path / "out", "--to", "hf", *([] if config else ["--bare"]))
    assert error["code"] in ("tensor-incomplete", "shard-missing")
    assert not (tmp_path / "out").exists()


def test_the_last_shard_is_missed_by_the_config_alone(folder, tmp_path):
    """What three of four ranks have is a whole and smaller tensor, as far as the files tell: 99 of 131 rows."""
    (folder / shard(3)).unlink()
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert (error["code"], "(131, 32)" in error["why"]) == ("tensor-incomplete", True)
    config = (folder / "config.json").rename(tmp_path / "config.json")
    found = document("inspect", folder)
    assert any("could not be seen" in w for w in found["warnings"])
    assert refused("inspect", folder, "--model-config", config)["code"] == "tensor-incomplete"


def test_a_whole_folder_without_a_config_is_read_with_a_word(folder, tmp_path):
    (folder / "config.json").unlink()
    report = document("convert", folder, tmp_path / "out", "--to", "torch")
    assert any("could not be seen" in w for w in report["warnings"])


def test_with_the_config_there_is_nothing_to_warn_of(folder):
    assert document("inspect", folder)["warnings"] == []


def test_result_is_one_plain_folder(folder, tmp_path):
    good("convert", folder, tmp_path / "out", "--to", "hf")
    assert digests(tmp_path / "out") == truth(LLAMA)["model"]
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[:20_000]
    assert b"DCP_" not in header


def test_slices_that_overlap_are_refused(folder, tmp_path):
    def how(header, info):
        info["model.norm.weight"]["saved_offsets"] = [0]

    change(folder / shard(1), how)
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert (error["code"], "model.norm.weight" in error["what"]) == ("tensor-incomplete", True)


def test_slices_that_overlap_and_leave_a_hole_of_equal_size_are_refused(folder, tmp_path):
    """The volumes agree: only their boxes tell. A pipeline that looked at sizes alone would write old values."""

    def how(header, info):
        info["model.norm.weight"]["saved_offsets"] = [0]

    change(folder / shard(2), how)
    assert refused("convert", folder, tmp_path / "out", "--to", "hf")["code"] == "tensor-incomplete"


def test_a_file_without_offsets_is_refused(folder, tmp_path):
    data = (folder / shard(1)).read_bytes()
    (folder / shard(1)).write_bytes(data.replace(b"DCP_SHARDING_INFO", b"DCP_SHARDING_INFx"))
    assert refused("convert", folder, tmp_path / "out", "--to", "hf")["code"] == "dcp-sharding-info"


def test_shards_of_two_saves_are_refused(folder, tmp_path):
    shutil.copy(folder / shard(0), folder / "shard-00001-model-00002-of-00002.safetensors")
    assert refused("convert", folder, tmp_path / "out", "--to", "hf")["code"] == "dcp-sharding-info"


def test_one_rank_s_file_is_not_the_model(folder, tmp_path):
    error = refused("convert", folder / shard(0), tmp_path / "out", "--to", "torch")
    assert (error["code"], "one rank's slices" in error["what"]) == ("unsupported", True)


def test_shapes_are_those_of_the_family():
    config = json.loads((ckpt(LLAMA) / "config.json").read_text())
    want = {n: t.shape for n, t in truth(LLAMA)["model"].items()}
    assert model_shapes(config, want) == want
    assert model_shapes({"model_type": "nobody-knows"}, want) == {}
    assert model_shapes({**config, "num_hidden_layers": "two"}, want) == {}
