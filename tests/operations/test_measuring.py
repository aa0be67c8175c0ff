"""Distances of elements, against numbers worked out by hand and by NumPy over whole arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ckptctl.operations.measuring import Measure


def measured(a, b, rtol=0.0, atol=0.0, parts=1):
    found = Measure()
    step = -(-len(a) // parts)
    for start in range(0, len(a), step):
        found.differ(start, a[start : start + step], b[start : start + step], rtol, atol)
        found.norms(a[start : start + step], b[start : start + step])
    return found


@pytest.mark.parametrize(
    ("dtype", "ulps"),
    [(np.float32, 1 << 23), (np.float16, 1 << 10), (ml_dtypes.bfloat16, 1 << 7), (np.float64, 1 << 52)],
)
def test_ulps_from_one_to_two_are_the_mantissa(dtype, ulps):
    found = measured(np.array([1, 5], dtype), np.array([2, 5], dtype))
    assert (found.differing, found.first, found.max_abs, found.max_rel, found.max_ulp) == (1, 0, 1.0, 0.5, ulps)


def test_ulps_over_zero_and_at_its_two_signs():
    tiny = np.float32(1e-45)
    assert measured(np.array([tiny]), np.array([-tiny])).max_ulp == 2
    zeros = measured(np.array([0.0], np.float32), np.array([-0.0], np.float32))
    assert (zeros.differing, zeros.max_ulp, zeros.max_abs) == (1, 0, 0.0)


def test_the_ends_of_float64_are_no_overflow():
    most = np.finfo(np.float64).max
    assert measured(np.array([most]), np.array([-most])).max_ulp == 2 * 0x7FEFFFFFFFFFFFFF


def test_nans_and_infinities():
    a = np.array([np.nan, np.inf, np.inf, np.nan], np.float32)
    b = np.array([1, -np.inf, 1, np.nan], np.float32)
    found = measured(a, b)
    assert (found.differing, found.nans, found.max_abs, found.max_rel) == (3, 1, np.inf, 1.0)


def test_integers_have_no_ulps_and_no_tolerance():
    found = measured(np.array([1, 2]), np.array([1, 4]), rtol=10)
    assert (found.differing, found.first, found.max_abs, found.max_ulp) == (1, 1, 2.0, None)
    assert measured(np.array([True, False]), np.array([True, True])).differing == 1


def test_a_tolerance_is_numpy_s():
    rng = np.random.default_rng(1)
    a = rng.normal(size=1000).astype(np.float32)
    b = (a * (1 + rng.normal(size=1000) * 1e-3)).astype(np.float32)
    a[:3], b[:3] = [np.nan, np.inf, 0.0], [np.nan, -np.inf, -0.0]
    found = measured(a, b, rtol=1e-3, atol=1e-5, parts=7)
    far = ~np.isclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-3, atol=1e-5, equal_nan=True)
    assert (found.differing, found.first) == (far.sum(), np.flatnonzero(far)[0])


@pytest.mark.parametrize("parts", [1, 3, 100])
def test_norms_and_cosine_are_those_of_the_whole(parts):
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 500)).astype(np.float32).astype(np.float64)
    stats = measured(a, b, parts=parts).stats
    want = {
        "norm_a": np.linalg.norm(a), "norm_b": np.linalg.norm(b), "norm_difference": np.linalg.norm(a - b),
        "cosine": a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    }  # fmt: skip
    assert stats == pytest.approx(want)
    assert measured(np.zeros(2), np.zeros(2)).stats["cosine"] == 1.0


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        (np.int64, 2**53, 2**53 + 1, 1.0),
        (np.int64, -(2**63), 2**63 - 1, float(2**64 - 1)),
        (np.uint64, 0, 2**64 - 1, float(2**64 - 1)),
        (np.int8, -128, 127, 255.0),
    ],
)
def test_integers_are_as_far_apart_as_they_are(dtype, a, b, apart):
    measure = Measure()
    measure._distances(np.array([a], dtype), np.array([b], dtype))
    assert measure.max_abs == apart


def test_neighbours_of_a_type_without_sign_are_one_apart():
    measure = Measure()
    x = np.array([0x7F, 0x80, 0x81], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    measure._distances(x[:-1], x[1:])
    assert measure.max_ulp == 1
