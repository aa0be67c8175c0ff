"""Casts against NumPy, ml_dtypes and exact arithmetic: every 16-bit value, and wider ones where rounding turns."""

import math
import random
import struct
from fractions import Fraction
from itertools import permutations

import ml_dtypes
import numpy as np
import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.execute import Budget, Job, job, run
from ckptctl.execute.cast import carrier, convert, require_casts
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Cast

TYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ALL16 = np.arange(1 << 16, dtype="<u2")


def cast(values, source, target):
    """Values (of the carrier type of source) by the code under test, as an array of the real type of target."""
    out = np.empty(values.shape, carrier(target))
    convert(out, values, Cast(source, target))
    return out.view(TYPES[target])


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def same(found, wanted):
    """Equal bit by bit, but for NaNs: those are NaNs of the same sign."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(bits(found)[~nan], bits(wanted)[~nan])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", TYPES)
def test_every_16_bit_value(source, target):
    with np.errstate(all="ignore"):
        wanted = ALL16.view(TYPES[source]).astype(np.float32).astype(TYPES[target])
    if source == target:
        np.testing.assert_array_equal(bits(cast(ALL16.view(carrier(source)), source, target)), ALL16)
    else:
        same(cast(ALL16.view(carrier(source)), source, target), wanted)


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_every_16_bit_number_comes_back_from_a_wider_type(source, wide):
    values = ALL16.view(carrier(source))
    back = cast(bits(cast(values, source, wide)).view(carrier(wide)), wide, source)
    with np.errstate(all="ignore"):
        nan = np.isnan(values.view(TYPES[source]))
    np.testing.assert_array_equal(bits(back)[~nan], ALL16[~nan])
    assert np.isnan(back[nan]).all()


def float32_values():
    """Random bits, NaNs with all kinds of payloads, and the neighbourhoods of every bfloat16 and its halfway points."""
    rng = np.random.default_rng(1)
    some = rng.integers(0, 1 << 32, 300_000, dtype=np.uint32)
    nans = np.uint32(0x7F800000) | np.uint32(1) << np.arange(23, dtype=np.uint32)
    more = np.array([0x7FFFFFFF, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF], np.uint32)
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    near = np.concatenate([high + np.uint32(d) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    positive = np.concatenate([some, nans, more, near])
    return np.concatenate([positive, positive ^ np.uint32(1 << 31)]).view("<f4")


def test_float32_to_bfloat16_is_bit_for_bit_that_of_ml_dtypes():
    values = float32_values()
    with np.errstate(all="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(cast(values, "float32", "bfloat16")), bits(wanted))


def test_float32_to_float16_is_that_of_numpy():
    values = float32_values()
    with np.errstate(all="ignore"):
        same(cast(values, "float32", "float16"), values.astype(np.float16))


def nearest(value, target):
    """The 16-bit number nearest to a float64, ties to even, by exact fractions; infinity beyond."""
    lattice = np.arange(0x7F80 if target == "bfloat16" else 0x7C00, dtype="<u2")
    floats = lattice.view(TYPES[target]).astype(np.float64)
    at = int(np.searchsorted(floats, abs(value)))
    step = Fraction(float(floats[-1])) - Fraction(float(floats[-2]))
    points = [(i, Fraction(float(floats[i]))) for i in (at - 1, at) if 0 <= i < len(floats)]
    if at == len(floats):
        points.append((at, Fraction(float(floats[-1])) + step))
    exact = abs(Fraction(value))
    best = min(points, key=lambda p: (abs(p[1] - exact), p[0] % 2))[0]
    return best | (0x8000 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_float64_is_rounded_once(target):
    rng = random.Random(1)
    values = [0.0, -0.0, 5e-324, -5e-324, 1e-46, 1e308, -1e308, 3.4028235677973366e38, 65519.999999999, 65520.0]
    top = 0x7F7F if target == "bfloat16" else 0x7BFF
    for _ in range(400):
        low = rng.randrange(top)
        a, b = (float(np.uint16(x).reshape(1).view(TYPES[target])[0]) for x in (low, low + 1))
        middle = (a + b) / 2
        # Just off the middle by less than a float32 can tell: rounding twice goes wrong here.
        values += [middle, math.nextafter(middle, 0), -math.nextafter(middle, math.inf), rng.uniform(a, b)]
    found = bits(cast(np.array(values), "float64", target)).tolist()
    assert found == [nearest(v, target) for v in values]


@pytest.mark.parametrize(("source", "target"), list(permutations(TYPES, 2)))
def test_special_values_keep_what_they_are(source, target):
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.0]).astype(TYPES[source])
    found = cast(bits(specials).view(carrier(source)), source, target).astype(np.float64)
    np.testing.assert_array_equal(found, specials.astype(np.float64))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(specials.astype(np.float64)))


@pytest.mark.parametrize("payload", [0x7FF0000000000001, 0x7FF0000020000000, 0x7FF8000000000000, 0xFFF0000000000001])
def test_float64_nans_stay_nans(payload):
    values = np.frombuffer(struct.pack("<Q", payload), "<f8")
    for target in ("float32", "float16", "bfloat16"):
        assert np.isnan(cast(values, "float64", target)).all()


def test_any_strides_and_more_than_a_block():
    rng = np.random.default_rng(1)
    values = rng.standard_normal((300, 5, 401)).astype("<f4")
    out = np.zeros((401, 5, 600), "<u2").transpose(2, 1, 0)[::2]
    convert(out, values, Cast("float32", "bfloat16"))
    np.testing.assert_array_equal(out, bits(values.astype(ml_dtypes.bfloat16)))


@pytest.mark.parametrize("name", ["int32", "float8_e4m3fn", "bool", "complex64"])
def test_what_is_no_float_is_refused(name):
    for rule in (Cast(name, "float32"), Cast("float32", name)):
        with pytest.raises(Unsupported, match=name):
            require_casts(frozenset([rule]))


@pytest.mark.parametrize("kind", ["runs", "turned", "rows"])
@pytest.mark.parametrize(
    ("source", "target"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")]
)
def test_jobs_that_cast(tmp_path, monkeypatch, kind, source, target):
    monkeypatch.setattr(job, "sizes_of", lambda *_: job.Sizes(1 << 20, 1000, 4000, 20000, 1 << 20, 0, 0))
    rng = np.random.default_rng(1)
    a, b = BY_NAME[source], BY_NAME[target]
    shape = (37, 91)
    values = rng.standard_normal(shape).astype(TYPES[source])
    pad = 3  # elements lie at odd bytes
    data = np.ascontiguousarray(values.T) if kind == "turned" else values
    (tmp_path / "source").write_bytes(b"x" * pad + data.tobytes())
    strides = (a.itemsize, a.itemsize * shape[0]) if kind == "turned" else None
    key = Key("t")
    tensor = Tensor(key, a, shape, (PieceTable.whole(shape, a.itemsize, 0, pad, strides),))
    lo, size = ((0, 5), (37, 80)) if kind == "rows" else ((0, 0), shape)
    region = Region(key, b, shape, lo, size, crc=True)
    casts = frozenset([Cast(source, target)])
    plan = Plan((OutputFile("", lambda: [region]),), SourceIndex({key: tensor}, [Source("")]), casts, 1500)
    run(Job(plan, check(plan), [Source("")], tmp_path / "source", tmp_path / "made", False), Budget(jobs=2))
    box = values[:, 5:85] if kind == "rows" else values
    assert (tmp_path / "made").read_bytes() == np.ascontiguousarray(box.astype(TYPES[target])).tobytes()
