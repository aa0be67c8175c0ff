"""What lies in a folder, and which weights are taken."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckptctl.core.errors import CkptError, Damaged, MissingFact, MissingFile, Unrecognised, Unsafe
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.hf.config import config_dtype, quantization, read_config
from ckptctl.formats.hf.files import compare_sources, scan_folder
from ckptctl.formats.st.header import read_header
from ckptctl.formats.st.slices import slices

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"


def sample(name):
    path = FIXTURES / name
    if not path.is_dir():
        pytest.skip(f"fixtures/checkpoints/{name} is not there")
    return path


def weights(path, value=0.0, metadata=None):
    safetensors.numpy.save_file({"a": np.full(3, value, np.float32)}, path, metadata)


def index(folder, files, name="model.safetensors.index.json"):
    tree = {"metadata": {"total_size": 12}, "weight_map": {f"t{i}": f for i, f in enumerate(files)}}
    (folder / name).write_text(json.dumps(tree))


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "suffix", "variant", "index_name", "count"),
    [
        ("hf/llama-single", ".safetensors", "", "", 1),
        ("hf/llama-sharded", ".safetensors", "", "model.safetensors.index.json", 6),
        ("hf/llama-bin-sharded", ".bin", "", "pytorch_model.bin.index.json", 3),
        ("hf/llama-fp16-variant", ".safetensors", "fp16", "model.safetensors.index.fp16.json", 2),
        ("hf/qwen2-bin", ".bin", "", "", 1),
        ("hf/mixtral-trainer", ".safetensors", "", "", 1),
    ],
)
def test_real_folders(name, suffix, variant, index_name, count):
    folder = scan_folder(sample(name))
    chosen = folder.require_files()
    assert (chosen.suffix, chosen.variant, chosen.index, len(chosen.files)) == (suffix, variant, index_name, count)
    assert folder.warnings == ()
    assert folder.config["model_type"]


def test_the_files_to_carry_are_those_of_the_record():
    path = sample("hf/qwen2-extras")
    if not (path / "truth.json").is_file():
        pytest.skip("truth.json is not there")
    want = json.loads((path / "truth.json").read_text())["carry_unchanged"]
    assert sorted([*scan_folder(path).carried, "config.json"]) == sorted(want)


def test_scripts_and_templates_are_carried_and_trainer_files_are_not(tmp_path):
    touch(
        tmp_path,
        "modeling_x.py",
        "zero_to_fp32.py",
        "additional_chat_templates/rag.jinja",
        "tokenizer.model",
        "vocab.txt",
        "merges.txt",
    )
    touch(tmp_path, "training_args.bin", "optimizer.pt", "trainer_state.json", "model.safetensors", "LICENSE.txt")
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    want = {
        "modeling_x.py",
        "additional_chat_templates/rag.jinja",
        "tokenizer.model",
        "vocab.txt",
        "merges.txt",
        "LICENSE.txt",
    }
    assert set(scan_folder(tmp_path).carried) == want


def test_the_choice_is_that_of_transformers(tmp_path):
    names = ["pytorch_model.bin.index.json", "pytorch_model.bin", "model.safetensors.index.json", "model.safetensors"]
    weights(tmp_path / "s.safetensors")
    for name in names:
        if "index" in name:
            index(tmp_path, ["s.safetensors" if "model.s" in name else "s.bin"], name)
            touch(tmp_path, "s.bin")
        elif name.endswith("safetensors"):
            weights(tmp_path / name)
        else:
            touch(tmp_path, name)
        chosen = scan_folder(tmp_path).chosen
        assert name in (chosen.index, *chosen.files)
    (tmp_path / "config.json").write_text('{"transformers_weights": "s.safetensors"}')
    assert scan_folder(tmp_path).chosen.files == ("s.safetensors",)
    (tmp_path / "config.json").write_text('{"transformers_weights": "../s.safetensors"}')
    with pytest.raises(Unsafe):
        scan_folder(tmp_path)


def test_two_sources_are_told_and_compared(tmp_path):
    weights(tmp_path / "model.safetensors")
    weights(tmp_path / "model-00001-of-00001.safetensors")
    index(tmp_path, ["model-00001-of-00001.safetensors"])
    folder = scan_folder(tmp_path)
    assert [w.code for w in folder.warnings] == ["two-sources"]
    assert "not compared" in folder.warnings[0].why
    assert compare_sources(tmp_path, *folder.sets, values=True) is None
    weights(tmp_path / "model.safetensors", 1.0)
    assert "'a'" in compare_sources(tmp_path, *folder.sets, values=True).why
    safetensors.numpy.save_file({"b": np.zeros(2)}, tmp_path / "model.safetensors")
    assert "2 tensors" in scan_folder(tmp_path).warnings[0].why
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "empty" in scan_folder(tmp_path).warnings[0].why


def test_the_stale_single_file_sample():
    folder = scan_folder(sample("broken/stale-single-file-beside-index"))
    assert [w.code for w in folder.warnings] == ["two-sources"]
    assert compare_sources(folder.path, *folder.sets, values=True).code == "two-sources"


def test_missing_shards_are_named_with_what_they_held():
    folder = scan_folder(sample("broken/index-names-a-missing-file"))
    with pytest.raises(MissingFile) as caught:
        folder.require_files()
    assert caught.value.code == "shard-missing"
    assert "model-00002-of-00003.safetensors" in caught.value.what
    assert caught.value.why == "7 of 21 tensors were in it"


def test_a_left_over_shard_is_told():
    folder = scan_folder(sample("broken/tensor-in-two-shards"))
    assert folder.unreferenced == ("model-00004-of-00003.safetensors",)
    assert [w.code for w in folder.warnings] == ["unreferenced-shard"]


def test_numbered_files_without_an_index(tmp_path):
    touch(tmp_path, "weights-00001-of-00003.safetensors", "weights-00003-of-00003.safetensors", "training_args.bin")
    folder = scan_folder(tmp_path)
    assert folder.chosen.missing == ("weights-00002-of-00003.safetensors",)
    with pytest.raises(MissingFile):
        folder.require_files()


def test_files_of_any_name_without_an_index(tmp_path):
    touch(tmp_path, "one.safetensors", "two.safetensors", "optimizer.bin")
    assert scan_folder(tmp_path).chosen.files == ("one.safetensors", "two.safetensors")


def test_variants(tmp_path):
    weights(tmp_path / "model.bf16.safetensors")
    weights(tmp_path / "model.fp16.safetensors")
    with pytest.raises(MissingFact, match="bf16, fp16"):
        scan_folder(tmp_path).require_files()
    assert scan_folder(tmp_path, variant="fp16").chosen.files == ("model.fp16.safetensors",)
    assert scan_folder(tmp_path, variant="fp8").chosen is None
    weights(tmp_path / "model.safetensors")
    assert scan_folder(tmp_path).chosen.files == ("model.safetensors",)


def test_an_adapter_is_no_model():
    folder = scan_folder(sample("hf/llama-lora") / "adapter")
    assert folder.adapter == "adapter_model.safetensors"
    with pytest.raises(Unrecognised):
        folder.require_files()


def test_links_out_of_the_folder_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    weights(blobs / "sha")
    (snapshot / "model.safetensors").symlink_to("../blobs/sha")
    assert scan_folder(snapshot).require_files().files == ("model.safetensors",)


def test_slices_of_torchs_dcp_writer(tmp_path):
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    weights(path, metadata={"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [3]}}', "DCP_VERSION": "1.0"})
    folder = scan_folder(tmp_path)
    assert folder.dcp_shards == (path.name,)
    assert folder.chosen is None
    with FileBytes(path) as source:
        assert slices(read_header(source), "x") == {"a": (3,)}
    for bad in (
        "",
        "[]",
        "{}",
        '{"a": {}}',
        '{"a": {"saved_offsets": [1, 2]}}',
        '{"a": {"saved_offsets": [-1]}}',
        '{"a": {"saved_offsets": [true]}}',
        '{"a": {"saved_offsets": 3}}',
        "[" * 100_000,
    ):
        weights(path, metadata={"DCP_SHARDING_INFO": bad})
        with FileBytes(path) as source, pytest.raises(Damaged) as caught:
            slices(read_header(source), "x")
        assert caught.value.code == "dcp-sharding-info"
    weights(path)
    with FileBytes(path) as source:
        assert slices(read_header(source), "x") is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_config_that_is_no_json_object_is_damage(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Damaged) as caught:
        scan_folder(tmp_path)
    assert caught.value.code == "config-not-json"
    assert caught.value.where.endswith("config.json")


def test_config(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(MissingFile):
        read_config(path)
    path.write_text('{"torch_dtype": "torch.float16", "time_step_limit": [0.0, Infinity]}')
    assert config_dtype(read_config(path)) == "float16"
    assert config_dtype({"dtype": "bfloat16", "torch_dtype": "float32"}) == "bfloat16"
    assert config_dtype({}) == ""
    assert quantization({"quantization_config": {"quant_method": "gptq", "bits": 4}}).method == "gptq"
    assert quantization({"quantization_config": None}) is None


@pytest.mark.parametrize("path", ["nothing", "file"])
def test_no_folder_is_unrecognised(tmp_path, path):
    touch(tmp_path, "file")
    with pytest.raises(CkptError) as caught:
        scan_folder(tmp_path / path)
    assert isinstance(caught.value, Unrecognised)
