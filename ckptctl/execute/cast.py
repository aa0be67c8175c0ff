"""Changing float types: round to nearest, ties to even; overflow becomes infinity, NaN stays NaN.

NumPy only, block by block. bfloat16 is done on its bits: ml_dtypes' own casts hold the interpreter's lock, so threads
would wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.plan.steps import Cast

Array = npt.NDArray[Any]

_BLOCK = 1 << 16
"""Elements at a time: the passes over one block stay in a core's cache."""
_CARRIER = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""The NumPy type that arrays of each have here: bfloat16 travels as its bits."""


def carrier(name: str) -> np.dtype[Any]:
    """The NumPy type whose arrays `convert` takes for a dtype's name. Unsupported for what is no float."""
    if name not in _CARRIER:
        raise Unsupported(
            f"{name} cannot be cast",
            why="only float64, float32, float16 and bfloat16 are cast into each other",
            fix="leave out --dtype, or --exclude the tensor",
        )
    return np.dtype(_CARRIER[name])


def require_casts(casts: frozenset[Cast]) -> None:
    """Unsupported where one of them is not float to float."""
    for rule in casts:
        carrier(rule.source)
        carrier(rule.target)


def convert(target: Array, source: Array, rule: Cast) -> None:
    """Fill target with source's elements by the rule.

    Both have one shape, any strides, and the types that `carrier` names.
    """
    if source.size <= _BLOCK:
        # Infinities from large values are what a cast means, not a surprise.
        with np.errstate(all="ignore"):
            target[...] = _kernel(rule)(source)
        return
    axis = int(np.argmax(source.shape))
    half = source.shape[axis] // 2
    low, high = (slice(None),) * axis + (slice(None, half),), (slice(None),) * axis + (slice(half, None),)
    convert(target[low], source[low], rule)
    convert(target[high], source[high], rule)


def _kernel(rule: Cast) -> Callable[[Array], Array]:
    if rule.source == rule.target:
        return lambda x: x
    if rule.target == "bfloat16":
        if rule.source == "float64":
            return lambda x: _bfloat16_of_float32(_float32_to_odd(x))
        return lambda x: _bfloat16_of_float32(x.astype("<f4"))
    wanted = carrier(rule.target)
    if rule.source == "bfloat16":
        return lambda x: _float32_of_bfloat16(x).astype(wanted, copy=False)
    return lambda x: x.astype(wanted)


def _float32_of_bfloat16(bits: Array) -> Array:
    wide = bits.astype("<u4")
    wide <<= 16
    return wide.view("<f4")


def _bfloat16_of_float32(values: Array) -> Array:
    """Bits of the nearest bfloat16. A NaN becomes the quiet one of its sign."""
    bits = np.ascontiguousarray(values).view("<u4")
    out = bits >> np.uint32(16)
    out &= np.uint32(1)
    out += np.uint32(0x7FFF)
    out += bits
    out >>= np.uint32(16)
    narrow: Array = out.astype("<u2")
    nan = np.isnan(values)
    if nan.any():
        narrow[nan] = (bits[nan] >> np.uint32(16)).astype("<u2") & np.uint16(0x8000) | np.uint16(0x7FC0)
    return narrow


def _float32_to_odd(values: Array) -> Array:
    """float64 as float32, inexact values to the neighbour with an odd last bit: rounding that again is as if done once.

    Source: Boldo and Melquiond, "When double rounding is odd", 2005.
    """
    near = np.ascontiguousarray(values).astype("<f4")
    back = near.astype("<f8")
    bits = near.view("<u4")
    even = (back != values) & ~np.isnan(values) & (bits & np.uint32(1) == 0)
    beyond = np.abs(back) > np.abs(values)
    bits += (even & ~beyond).astype("<u4")
    bits -= (even & beyond).astype("<u4")
    return near
