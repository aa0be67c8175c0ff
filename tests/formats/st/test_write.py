"""Written safetensors files against the reference writer, byte for byte."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME, BY_SAFETENSORS
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import Put, Region
from ckptctl.core.tensor import Key
from ckptctl.formats.bytesource import HeldBytes
from ckptctl.formats.st.header import read_header
from ckptctl.formats.st.write import safetensors_segments

NUMPY = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "float16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
    "float64",
    "complex64",
]


def region(name, dtype, shape):
    return Region(Key(name), BY_NAME[dtype], shape, (0,) * len(shape), shape)


def written(tensors, metadata):
    """The file of name -> (dtype, shape, bytes), given in the dict's order."""
    segments = safetensors_segments([(n, region(n, d, s)) for n, (d, s, _) in tensors.items()], metadata)
    parts = [s.data if isinstance(s, Put) else tensors[s.key.name][2] for s in segments]
    assert [len(p) for p in parts] == [s.nbytes for s in segments]
    return b"".join(parts)


names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda n: n != "__metadata__")
arrays = st.tuples(st.sampled_from(NUMPY), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 255))
metadata = st.none() | st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.text(st.characters(codec="utf-8"), max_size=8),
    min_size=1,
    max_size=1,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, arrays, max_size=8), metadata)
def test_the_bytes_are_those_of_the_reference_writer(described, extra):
    live = {
        n: np.full(s, v % 2 if d == "bool" else v, dtype=d) if d != "int8" else np.full(s, v % 100, d)
        for n, (d, s, v) in described.items()
    }
    tensors = {n: (a.dtype.name, a.shape, a.tobytes()) for n, a in live.items()}
    assert written(tensors, extra) == safetensors.numpy.save(live, extra)


def test_all_dtypes_stand_in_the_reference_order(tmp_path):
    # One empty tensor of each dtype: the reference sorts them, this checks by its own file that it takes ours.
    tensors = {f"t.{d.safetensors}": (d.name, (2, 4), bytes(d.bits)) for d in BY_SAFETENSORS.values()}
    raw = written(tensors, {"format": "pt"})
    assert {n: (i["dtype"], i["shape"]) for n, i in safetensors.deserialize(raw)} == {
        f"t.{d}": (d, [2, 4]) for d in BY_SAFETENSORS
    }
    order = list(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
    assert order[0] == "__metadata__"
    assert [n[2:] for n in order[1:]] == [
        "U64",
        "I64",
        "F64",
        "C64",
        "F32",
        "U32",
        "I32",
        "BF16",
        "F16",
        "U16",
        "I16",
        "F8_E5M2FNUZ",
        "F8_E4M3FNUZ",
        "F8_E8M0",
        "F8_E4M3",
        "F8_E5M2",
        "I8",
        "U8",
        "F6_E3M2",
        "F6_E2M3",
        "F4",
        "BOOL",
    ]


@given(
    st.permutations(range(6)),
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))),
)
def test_the_result_does_not_depend_on_the_order_given_and_metadata_keeps_its_own(order, extra):
    tensors = {f"t{i}": ("float32" if i % 2 else "bfloat16", (i,), bytes(i * (4 if i % 2 else 2))) for i in order}
    raw = written(tensors, extra)
    assert raw == written(dict(sorted(tensors.items())), extra)
    header = read_header(HeldBytes(raw, "x"))
    assert list(header.metadata.items()) == list(extra.items())
    assert header.warnings == ()


@pytest.mark.parametrize("extra", [None, {}, {"format": "pt"}])
def test_a_file_without_tensors_is_read_by_the_reference(extra):
    # safetensors 0.8.0 itself writes no JSON for ({}, {}): `{},"__metadata__":{}}`.
    assert safetensors.deserialize(written({}, extra)) == []


def test_what_the_format_cannot_hold_is_refused():
    with pytest.raises(Unsupported) as caught:
        safetensors_segments([("x", region("x", "complex128", (2,)))])
    assert caught.value.code == "dtype-not-in-target"
    for twice in (["a", "a"], ["__metadata__"]):
        with pytest.raises(ValueError, match="name"):
            safetensors_segments([(n, region(n, "uint8", (1,))) for n in twice])
