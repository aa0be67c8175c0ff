"""Safetensors headers: real and broken files, the reference reader as judge, and hostile bytes."""

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.formats import jsonscan
from ckptctl.formats.bytesource import FileBytes, HeldBytes
from ckptctl.formats.st.header import read_header, severity

FIXTURES = Path(__file__).parents[3] / "fixtures" / "checkpoints"
BROKEN = FIXTURES / "broken"
MORE_TELLING = {"html-instead.safetensors": "html-page", "zero-bytes.safetensors": "empty-file"}


def cases():
    if not (BROKEN / "expect.json").is_file():
        return [pytest.param("", None, marks=pytest.mark.skip(reason="fixtures/checkpoints/broken is not there"))]
    expect = json.loads((BROKEN / "expect.json").read_text())
    return [(name, case) for name, case in expect.items() if name.endswith(".safetensors")]


def make(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def problems(source):
    got = []
    read_header(source, got)
    return got


def found(raw):
    return [p.code for p in problems(HeldBytes(raw, "x.safetensors"))]


@pytest.mark.parametrize(("name", "case"), cases())
def test_each_broken_file_gives_just_its_findings(name, case):
    with FileBytes(BROKEN / case["path"], name=name) as source:
        got = problems(source)
        want = {(MORE_TELLING.get(name, f["kind"]), f["severity"]) for f in case["findings"]}
        assert {(p.code, severity(p)) for p in got} == want
        for finding in case["findings"]:
            assert any(finding.get("at", "") in p.where for p in got)
        if any(f["severity"] == "error" for f in case["findings"]):
            with pytest.raises(Damaged) as caught:
                read_header(source)
            assert caught.value.code in {code for code, _ in want}
            assert caught.value.where.startswith(name)
        else:
            assert read_header(source).data_start >= 8


def test_real_files_are_read_as_the_reference_reads_them():
    paths = sorted(p for p in FIXTURES.rglob("*.safetensors") if "broken" not in p.parts)
    if not paths:
        pytest.skip("fixtures/checkpoints has no safetensors files")
    for path in paths:
        with FileBytes(path) as source:
            header = read_header(source)
        assert {w.code for w in header.warnings} <= {"data-not-aligned"}
        raw = path.read_bytes()
        reference = safetensors.deserialize(raw)
        assert {name for name, _ in reference} == set(header.entries)
        for name, info in reference:
            entry = header.entries[name]
            assert (entry.dtype.safetensors, list(entry.shape)) == (info["dtype"], info["shape"])
            assert raw[entry.start_byte : entry.start_byte + entry.nbytes] == info["data"]
        with safetensors.safe_open(path, "np") as opened:
            assert (opened.metadata() or {}) == header.metadata


ENTRY = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"\\u0061":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            "duplicate-name",
        ),
        (
            b'{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            "duplicate-name",
        ),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "bad-entry"),
        (b'{"a":{"dtype":"U8","shape":[true,2],"data_offsets":[0,2]}}', "bad-shape"),
        (b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', "bad-shape"),
        (b'{"a":{"dtype":"U8","shape":[2e0],"data_offsets":[0,2]}}', "bad-shape"),
        (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,2]}}', "bad-shape"),
        (b'{"a":{"dtype":"U8","shape":null,"data_offsets":[0,2]}}', "bad-shape"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,2]}}', "header-not-json"),
        (b'{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}', "header-not-json"),
        (b'{"a":{"dtype":"U8","shape":[2,],"data_offsets":[0,2]}}', "header-not-json"),
        (b"{'a':1}", "header-not-json"),
        (b'{"a\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "header-not-json"),
        (b'{"a\n":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "header-not-json"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', "header-not-json"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},}', "header-not-json"),
        (b"", "header-not-json"),
        (b'"text"', "header-not-an-object"),
        (b'{"a":{"dtype":7,"shape":[2],"data_offsets":[0,2]}}', "unknown-dtype"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}", "bad-offsets"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,2]}}', "size-overflow"),
        (b'{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]}}', "size-overflow"),
        (b'{"a":{"dtype":"U8","shape":[1099511627776,1099511627776,0],"data_offsets":[0,2]}}', "size-overflow"),
        (b'{"a":{"dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,2]}}', "size-overflow"),
        (b'{"a":[1,2]}', "bad-entry"),
        (b'{"a":7}', "bad-entry"),
        (b'{"a":{"shape":[2],"data_offsets":[0,2],"dtype":"U8","x":' + b"[" * 200 + b"]" * 200 + b"}}", "bad-entry"),
        (b'{"a":' + b"[" * 100_000, "bad-entry"),
        (b'{"a":{"data_offsets":[0,2]}}', "missing-field"),
        (b'{"__metadata__":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "metadata-not-strings"),
    ],
)
def test_what_json_readers_let_pass_has_its_own_code(text, code):
    raw = make(text, b"ab")
    assert code in found(raw)
    with pytest.raises(Damaged) as caught:
        read_header(HeldBytes(raw, "x"))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":[{"x":null}]}}     ',
            ["unknown-field", "data-not-aligned"],
        ),
        (b'{"__metadata__":null,"a":{"data_offsets":[0,2],"shape": [ 2 ] ,"dtype":"U8"}}   ', []),
        (
            b'{"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            ["duplicate-metadata-key", "data-not-aligned"],
        ),
    ],
)
def test_what_the_reference_reads_is_read_with_a_warning(text, codes):
    raw = make(text, b"ab")
    assert safetensors.deserialize(raw)
    found_codes = [c for c in found(raw) if c in codes or c != "data-not-aligned"]
    assert found_codes == [c for c in codes if c in found(raw)]
    assert read_header(HeldBytes(raw, "x")).entries["a"].nbytes == 2


def test_a_cut_file_says_which_tensors_are_whole():
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
    }
    (problem,) = (p for p in problems(HeldBytes(make(header, b"12345"), "x")) if p.code == "data-truncated")
    assert "3 bytes are missing" in problem.what
    assert "1 of 2 tensors are whole" in problem.why
    assert problem.where == "x, b"


def test_a_zip_archive_under_this_name_is_named():
    (problem,) = problems(HeldBytes(b"PK\3\4" + bytes([0, 0, 8, 8]) + bytes(100), "x"))
    assert problem.code == "header-too-large"
    assert "zip" in problem.why


def test_a_large_hostile_header_takes_no_more_memory_than_itself(monkeypatch):
    monkeypatch.setattr(jsonscan, "_SKIP_LIMIT", 1 << 16)  # what is skipped is not kept, only time goes by
    n = 3_000_000
    for junk in (
        b"[" * n,
        b"[" + b"[]," * (n // 3),
        b'{"x":[' + b"0," * (n // 2),
        b'{"x":"' + b"y" * n,
        b"[" + b" " * n,
    ):
        raw = make(b'{"a":' + junk)
        source = HeldBytes(raw, "x")
        tracemalloc.start()
        got = problems(source)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert severity(got[0]) == "error"
        assert peak < len(raw) + 4_000_000


def test_problems_are_counted_no_further_than_200():
    header = {f"t{i}": {"dtype": "?", "shape": [], "data_offsets": [i, i + 1]} for i in range(1000)}
    assert len(problems(HeldBytes(make(header), "x"))) <= 402


def judged(raw):
    """Whether the reference takes a file."""
    try:
        safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return False
    return True


STRICTER = {"duplicate-name"}
"""Errors here that the reference lets pass: huggingface.md, safetensors, holes."""


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 260), st.sampled_from(b'0123456789-."{}[],:abFU\\ntrue \x00\xff')), max_size=4),
    st.integers(-3, 3),
)
def test_a_changed_file_is_taken_where_the_reference_takes_it(edits, cut):
    good = safetensors.numpy.save(
        {"a": np.arange(3, dtype=np.float32), "bb": np.zeros((2, 0)), "c": np.array(1, np.int8)}, {"k": "v"}
    )
    raw = bytearray(good)
    for at, value in edits:
        raw[at % len(raw)] = value
    raw = bytes(raw[: len(raw) + cut] if cut < 0 else raw + bytes(cut))
    source = HeldBytes(raw, "x")
    errors = [p for p in problems(source) if severity(p) == "error"]
    assert all(isinstance(p, CkptError) and p.what for p in errors)
    if {p.code for p in errors} <= STRICTER and errors:
        return
    assert (not errors) == judged(raw), [(p.code, p.why) for p in errors]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=20))
def test_any_bytes_give_only_our_errors(text, data):
    for raw in (text, make(text, data), make(b'{"a":' + text, data), make(b'{"a":{"shape":' + text + b"}}", data)):
        for problem in problems(HeldBytes(raw, "x")):
            assert problem.code
            assert problem.where.startswith("x")


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "__metadata__", "b"]),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["U8", "F4", "F32", "x"]) | TREES,
                "shape": st.lists(st.integers(-1, 3), max_size=3) | TREES,
                "data_offsets": st.lists(st.integers(-1, 9), min_size=1, max_size=3) | TREES,
            },
        )
        | TREES,
        max_size=3,
    ),
    st.integers(0, 12),
)
def test_any_json_is_judged_as_the_reference_judges_it(header, nbytes):
    raw = make(header, bytes(nbytes))
    errors = [p for p in problems(HeldBytes(raw, "x")) if severity(p) == "error"]
    assert (not errors) == judged(raw), [(p.code, p.why) for p in errors]
