"""How far two runs of elements are apart: counts, differences, ULPs, norms. Sums over parts; nothing is read here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAYER = re.compile(r"((?:[^.]+\.)*?\d+)\.(.+)")
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SLICE = 1 << 18
"""Elements that are widened at once: float64 copies of a part stay small."""


@dataclass
class Measure:
    """Sums over the parts of one tensor. first is the index of the first element that differs, in row-major order.

    max_abs and max_rel are over pairs of numbers; rel is |a - b| / max(|a|, |b|). max_ulp counts values of the type
    between the two, None where the type is no float. nans are pairs of which just one is a NaN. within counts elements
    that differ by no more than the tolerance, which are not in differing.
    """

    differing: int = 0
    within: int = 0
    first: int = -1
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int | None = None
    nans: int = 0
    square_a: float = 0.0
    square_b: float = 0.0
    square_difference: float = 0.0
    product: float = 0.0

    def differ(self, start: int, a: npt.NDArray[Any], b: npt.NDArray[Any], rtol: float, atol: float) -> None:
        """Elements from start on of both sides, of one type, of which some are not the same bits."""
        for at in range(0, len(a), _SLICE):
            self._part(start + at, a[at : at + _SLICE], b[at : at + _SLICE], rtol, atol)

    def _part(self, start: int, a: npt.NDArray[Any], b: npt.NDArray[Any], rtol: float, atol: float) -> None:
        unlike = _bytes(a) != _bytes(b)
        unlike = unlike if unlike.ndim == 1 else unlike.any(axis=1)
        places = np.flatnonzero(unlike)
        if not len(places):
            return
        a, b = a[places], b[places]
        numbers = is_float(a.dtype) or np.issubdtype(a.dtype, np.number)
        if numbers:
            places, a, b = self._far(places, a, b, rtol, atol)
        if not len(places):
            return
        self.differing += len(places)
        self.first = start + int(places[0]) if self.first < 0 else self.first
        if numbers:
            self._distances(a, b)

    def _far(
        self, places: npt.NDArray[np.intp], a: npt.NDArray[Any], b: npt.NDArray[Any], rtol: float, atol: float
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[Any], npt.NDArray[Any]]:
        """Those farther apart than atol + rtol * |b|; of floats alone, since integers are counts and indices."""
        if not (rtol or atol) or not is_float(a.dtype):
            return places, a, b
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = a.astype(np.float64), b.astype(np.float64)
            near = (np.abs(x - y) <= atol + rtol * np.abs(y)) | (x == y) | (np.isnan(x) & np.isnan(y))
            near &= ~(np.isinf(y) & (x != y))
        self.within += int(near.sum())
        return places[~near], a[~near], b[~near]

    def _distances(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        with np.errstate(all="ignore"):
            wide = np.complex128 if np.iscomplexobj(a) else np.float64
            x, y = a.astype(wide), b.astype(wide)
            nan = np.isnan(x) != np.isnan(y)
            self.nans += int(nan.sum())
            both = ~(np.isnan(x) | np.isnan(y))
            if is_float(a.dtype):
                self.max_ulp = max(self.max_ulp or 0, _ulps(a[both], b[both]))
            x, y = x[both], y[both]
            if not len(x):
                return
            apart = np.where(x == y, 0.0, np.abs(x - y))
            if a.dtype.kind in "iu":  # float64 has no room for the difference of large ones; unsigned bits wrap right
                high, low = (f(a, b).astype(np.uint64) for f in (np.maximum, np.minimum))
                apart = (high - low).astype(np.float64)
            larger = np.maximum(np.abs(x), np.abs(y))
            self.max_abs = max(self.max_abs, float(apart.max()))
            share = np.where(np.isinf(apart) & np.isinf(larger), 1.0, apart / np.where(larger > 0, larger, 1.0))
            self.max_rel = max(self.max_rel, float(share.max()))

    def norms(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        """Squares and the product of both sides, of all elements, in float64."""
        for at in range(0, len(a), _SLICE):
            with np.errstate(all="ignore"):
                x, y = (side[at : at + _SLICE].astype(np.float64) for side in (a, b))
                self.square_a += float(x @ x)
                self.square_b += float(y @ y)
                self.product += float(x @ y)
                z = x - y
                self.square_difference += float(z @ z)

    def join(self, later: Measure) -> None:
        """Adds what was measured of elements that come later."""
        self.differing += later.differing
        self.within += later.within
        self.first = later.first if self.first < 0 else self.first
        self.max_abs = max(self.max_abs, later.max_abs)
        self.max_rel = max(self.max_rel, later.max_rel)
        if later.max_ulp is not None:
            self.max_ulp = max(self.max_ulp or 0, later.max_ulp)
        self.nans += later.nans
        self.add(later)

    def add(self, other: Measure) -> None:
        """Another tensor's norms, for the sums of a layer."""
        self.square_a += other.square_a
        self.square_b += other.square_b
        self.square_difference += other.square_difference
        self.product += other.product

    @property
    def stats(self) -> dict[str, float]:
        """Norms of both and of their difference, and the cosine of their angle: 1 for equal ones, also of zeros."""
        scale = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        cosine = self.product / scale if scale else (1.0 if self.square_a == self.square_b else 0.0)
        return {
            "norm_a": math.sqrt(self.square_a),
            "norm_b": math.sqrt(self.square_b),
            "norm_difference": math.sqrt(self.square_difference),
            "cosine": max(-1.0, min(1.0, cosine)),
        }


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy's or ml_dtypes' type holds real floating point numbers."""
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name) or dtype.name.startswith("float8")


def _bytes(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Elements as bits that compare: one integer each where there is one of that size, else rows of bytes."""
    size = a.dtype.itemsize
    return a.view(_BITS[size]) if size in _BITS else a.view(np.uint8).reshape(len(a), size)


def _ulps(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """The most values of the type that lie between two numbers; -0.0 and 0.0 are 0 apart."""
    if not len(a):
        return 0
    bits = _BITS[a.dtype.itemsize]
    has_sign = "e8m0" not in a.dtype.name  # powers of two alone
    sign = bits(has_sign << (8 * a.dtype.itemsize - 1))
    x, y = a.view(bits), b.view(bits)
    m, n = ((v & ~sign).astype(np.uint64) for v in (x, y))
    alike = (x & sign) == (y & sign)
    return int(np.where(alike, np.maximum(m, n) - np.minimum(m, n), m + n).max())


def _head(name: str) -> tuple[str, str]:
    """(layer, module) of a name: up to its first number, and what comes after; no layer where there is no number."""
    found = _LAYER.match(name)
    return (found[1], found[2]) if found else ("", name)


def stats_of(measured: Mapping[tuple[str, str], Measure]) -> dict[str, Any]:
    """Norms and cosines: of every tensor, and of every layer and kind, whose sums are the tensors'."""
    layers: dict[tuple[str, str], Measure] = {}
    out = []
    for (name, kind), measure in measured.items():
        layer, module = _head(name)
        layers.setdefault((layer, kind), Measure()).add(measure)
        out.append({"name": name, "kind": kind, "layer": layer, "module": module, **measure.stats})
    sums = [{"layer": layer, "kind": kind, **m.stats} for (layer, kind), m in layers.items()]
    return {"layers": sums, "tensors": out}
