"""Hugging Face folders: the conformance suite."""

from __future__ import annotations

import json
import zipfile

import pytest

from tests.support.checkpoints import fixture
from tests.support.format_suite import Fault, FormatSuite, Sample

SAMPLES = [
    Sample("hf/llama-single", variant="safetensors"),
    Sample("hf/llama-sharded", variant="safetensors"),
    Sample("hf/llama-bf16", variant="safetensors"),
    Sample("hf/llama-fp16-variant", variant="safetensors fp16"),
    Sample("hf/mixtral-single", variant="safetensors"),
    Sample("hf/gpt2-single", variant="safetensors"),
    Sample("hf/qwen2-single", variant="safetensors"),
    Sample("hf/qwen2-extras", variant="safetensors"),
    Sample("hf/llama-bin-sharded", variant="bin"),
    Sample("hf/qwen2-bin", variant="bin"),
    Sample("hf/qwen2-bin-prezip", variant="bin"),
    Sample("hf/gpt2-bin", variant="bin"),
    Sample("hf/llama-dcp-hf-4ranks", 4, "safetensors sharded"),
    Sample("hf/qwen3-dcp-hf-3ranks", 3, "safetensors sharded"),
]
SHARDED = "hf/llama-sharded"
FIRST = "model-00001-of-00006.safetensors"


def index(change):
    def damage(path):
        file = path / "model.safetensors.index.json"
        tree = json.loads(file.read_text())
        change(tree["weight_map"])
        file.write_text(json.dumps(tree))

    return damage


def cut(name, by):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:by])


def second(path):
    (path / "model.safetensors").write_bytes((path / FIRST).read_bytes())


FAULTS = [
    Fault("a file is missing", SHARDED, lambda p: (p / FIRST).unlink(), "shard-missing", FIRST),
    Fault("a file ends early", SHARDED, cut(FIRST, -10), "data-truncated", FIRST),
    Fault("a file is empty", SHARDED, cut(FIRST, 0), "empty-file", FIRST),
    Fault("a header is cut", SHARDED, cut(FIRST, 100), "header-truncated", FIRST),
    Fault(
        "the index names another file",
        SHARDED,
        index(lambda m: m.update({"lm_head.weight": FIRST})),
        "tensor-not-in-shard",
        "lm_head.weight",
    ),
    Fault(
        "the index lacks a tensor",
        SHARDED,
        index(lambda m: m.pop("lm_head.weight")),
        "tensor-not-in-index",
        "lm_head.weight",
    ),
    Fault(
        "the index names a tensor that is nowhere",
        SHARDED,
        index(lambda m: m.update({"extra": FIRST})),
        "tensor-not-in-shard",
        "extra",
    ),
    Fault(
        "the index leads outside",
        SHARDED,
        index(lambda m: m.update({"extra": "../x.safetensors"})),
        "path-escapes",
        "../x.safetensors",
    ),
    Fault("two sets of weights that differ", SHARDED, second, "two-sources", "model.safetensors"),
    Fault(
        "a .bin ends early", "hf/qwen2-bin", cut("pytorch_model.bin", -500), "archive-truncated", "pytorch_model.bin"
    ),
    Fault(
        "config.json is no JSON",
        "hf/llama-single",
        lambda p: (p / "config.json").write_text("{"),
        "config-not-json",
        "config.json",
    ),
]


class TestHf(FormatSuite):
    format = "hf"

    @pytest.fixture(params=SAMPLES, ids=lambda s: s.name.split("/")[1])
    def sample(self, request):
        return request.param

    @pytest.fixture(params=FAULTS, ids=str)
    def fault(self, request):
        return request.param

    def gaps(self, path):
        """A safetensors file's header; of a .bin everything but its storages."""
        out = {}
        for file in path.glob("*.safetensors"):
            out[file.name] = [(0, 8 + int.from_bytes(file.read_bytes()[:8], "little"))]
        for file in path.glob("*.bin"):
            data, at, runs = file.read_bytes(), 0, []
            if not zipfile.is_zipfile(file):
                return None
            with zipfile.ZipFile(file) as archive:
                for info in sorted(archive.infolist(), key=lambda i: i.header_offset):
                    if "/data/" in info.filename:
                        head = data[info.header_offset : info.header_offset + 30]
                        lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                        runs.append((at, info.header_offset + 30 + lengths))
                        at = runs[-1][1] + info.file_size
            out[file.name] = [*runs, (at, len(data))]
        return out


def test_the_samples_are_all_folders_of_the_repository():
    others = {"hf/llama-lora", "hf/mixtral-trainer", "hf/qwen2-trainer", "hf/mixtral-fused-names"}
    there = {f"hf/{p.name}" for p in fixture("hf").iterdir()} - others
    assert there == {s.name for s in SAMPLES}
