"""Index files: real and broken ones, what Transformers writes, and how huggingface_hub splits."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.errors import CkptError, Damaged, Unsafe, Unsupported
from ckptctl.formats.hf import index as module
from ckptctl.formats.hf.index import index_bytes, read_index, severity, shard_names, split
from ckptctl.formats.paths import why_outside

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"
GOOD = {
    "metadata": {"total_size": 8},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def put(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def problems(path):
    got = []
    read_index(path, problems=got)
    return got


def codes(path):
    return [p.code for p in problems(path)]


@pytest.mark.parametrize("layout", ["hf/llama-sharded", "hf/llama-fp16-variant"])
def test_an_index_of_transformers_is_written_again_byte_for_byte(layout):
    path = next((FIXTURES / layout).glob("*.index*.json"), None)
    if path is None:
        pytest.skip(f"fixtures/checkpoints/{layout} is not there")
    index = read_index(path)
    assert index.warnings == ()
    assert set(index.files) == {p.name for p in path.parent.glob("*.safetensors")}
    total = index.total_size
    assert index_bytes(index.weight_map, total, index.metadata["total_parameters"]) == path.read_bytes()
    assert index.check_total(total) is None
    assert index.check_total(total - 4).code == "total-size-mismatch"


@pytest.mark.parametrize(
    ("case", "code", "at"),
    [
        ("index-not-json", "index-not-json", ""),
        ("index-duplicate-key", "duplicate-name", "model.norm.weight"),
        ("index-path-escapes", "path-escapes", "model.norm.weight"),
        ("index-absolute-path", "path-escapes", "model.norm.weight"),
    ],
)
def test_each_broken_index_gives_its_error(case, code, at):
    path = FIXTURES / "broken" / case / "model.safetensors.index.json"
    if not path.is_file():
        pytest.skip("fixtures/checkpoints/broken is not there")
    with pytest.raises(CkptError) as caught:
        read_index(path)
    assert caught.value.code == code
    assert at in caught.value.where
    assert isinstance(caught.value, Unsafe if code == "path-escapes" else Damaged)


def test_an_index_without_metadata_is_read_with_a_warning():
    path = FIXTURES / "broken" / "index-no-metadata" / "model.safetensors.index.json"
    if not path.is_file():
        pytest.skip("fixtures/checkpoints/broken is not there")
    index = read_index(path)
    assert [w.code for w in index.warnings] == ["total-size-missing"]
    assert index.total_size is None
    assert len(index.files) == 3


@pytest.mark.parametrize(
    ("value", "total", "warning"),
    [
        (8, 8, None),
        (8.0, 8, None),
        (0.535400390625, 561_408, None),  # MiB, as ColossalAI counts
        (0.3, None, "total-size-mismatch"),
        ("8", None, "total-size-mismatch"),
        (True, None, "total-size-mismatch"),
        (-1, None, "total-size-mismatch"),
        (None, None, "total-size-missing"),
        ([], None, "total-size-mismatch"),
    ],
)
def test_an_odd_total_size_is_a_warning(tmp_path, value, total, warning):
    index = read_index(put(tmp_path, GOOD | {"metadata": {"total_size": value, "param_groups": "x.bin"}}))
    assert index.total_size == total
    assert [w.code for w in index.warnings] == ([warning] if warning else [])
    assert all(severity(w) == "warning" for w in index.warnings)
    assert index.metadata["param_groups"] == "x.bin"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "index-not-json"),
        (b"[1]", "index-not-json"),
        (b"\xff", "index-not-json"),
        (b'{"weight_map":{}}x', "index-not-json"),
        (b'{"metadata":{"total_size":1}}', "index-no-weight-map"),
        (b'{"weight_map":[]}', "index-no-weight-map"),
        (b'{"weight_map":{"a":1}}', "index-no-weight-map"),
        (b'{"weight_map":{},"weight_map":{}}', "duplicate-name"),
        (b'{"weight_map":{"a":"x","\\u0061":"y"}}', "duplicate-name"),
        (b'{"metadata":{"total_size":' + b"9" * 5000 + b'},"weight_map":{}}', "index-not-json"),
        (b'{"x":' + b"[" * 100_000, "bad-entry"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "lfs-pointer"),
        (b'{"weight_map":{"a":"x"},"metadata":{"total_size":1e999}}', "total-size-mismatch"),
        (b'{"weight_map":{},"metadata":[]}', "total-size-missing"),
        (b'{"weight_map":{},"metadata":NaN}', "index-not-json"),
        (b'{"weight_map":{"a":"\\ud800"}}', "index-not-json"),
    ],
)
def test_damaged_indexes_have_codes(tmp_path, content, code):
    assert code in codes(put(tmp_path, content))


def test_a_huge_index_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_INDEX_LIMIT", 10)
    with pytest.raises(Unsupported):
        read_index(put(tmp_path, GOOD))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "sub/model-00001.safetensors", "a b.safetensors", "..weights", "größe.bin"]
)
def test_names_inside_the_folder(name):
    assert why_outside(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "..",
        ".",
        "./x",
        "a//b",
        "a/",
        "C:\\x",
        "C:x",
        "a\\..\\b",
        "a\0b",
        "~/x",
        "a\nb",
    ],
)
def test_names_that_may_lead_outside(tmp_path, name):
    assert why_outside(name)
    assert codes(put(tmp_path, GOOD | {"weight_map": {"t": name}})) == ["path-escapes"]


def test_shard_names_and_index_text():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2, "model.fp16") == [
        "model.fp16-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
    ]
    assert (
        index_bytes({"b": "y", "a": "x"}, 7)
        == b'{\n  "metadata": {\n    "total_size": 7\n  },\n  "weight_map": {\n    "a": "x",\n    "b": "y"\n  }\n}\n'
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=25), st.integers(1, 40))
def test_files_are_split_as_huggingface_hub_splits_them(sizes, limit):
    base = pytest.importorskip("huggingface_hub.serialization._base")
    tensors = {f"t{i}": size for i, size in enumerate(sizes)}
    got = split(tensors.items(), limit)
    names = shard_names(len(got)) if got else []
    want = base.split_state_dict_into_shards_factory(
        tensors, get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    assert dict(zip(names, got, strict=True)) == want.filename_to_tensors


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="0"):
        split([("a", 1)], 0)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), max_size=4))
def test_any_bytes_give_only_our_errors(tmp_path_factory, junk, edits):
    raw = bytearray(json.dumps(GOOD).encode())
    for at, value in edits:
        raw[at % len(raw)] = value
    path = tmp_path_factory.mktemp("i") / "index.json"
    for content in (bytes(raw), junk, b'{"weight_map":' + junk, b'{"metadata":' + junk):
        path.write_bytes(content)
        for problem in problems(path):
            assert problem.code
        with contextlib.suppress(CkptError):
            assert all(not why_outside(f) for f in read_index(path).files)
