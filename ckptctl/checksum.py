"""CRC-32 as zip archives have it, of bytes and of joined pieces: below formats and execute, which both want it.

Uses isal (about 15 GB/s) where it is installed, zlib else.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320
"""Source: PKWARE APPNOTE 6.3.10, 4.4.7; bits reversed."""


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2) modulo the CRC's, bits reversed (bit 31 is x^0)."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _combine_slowly(crc_a: int, crc_b: int, len_b: int) -> int:
    """combine() without isal: multiplies by x^(8 * len_b), by squaring."""
    power, factor, n = 1 << 31, 1 << 23, len_b
    while n:
        if n & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        n >>= 1
    return _multiply(power, crc_a) ^ crc_b


_crc32: Callable[..., int]
_combine: Callable[[int, int, int], int]
try:
    from isal import isal_zlib

    _crc32, _combine = isal_zlib.crc32, isal_zlib.crc32_combine
except ImportError:  # no wheel for this platform: the same numbers, slower
    _crc32, _combine = zlib.crc32, _combine_slowly


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """The CRC-32 of data, or of what value is the CRC-32 of followed by data."""
    return _crc32(data, value)


def combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """The CRC-32 of A followed by B, from the checksums of both and B's length in bytes. Time grows with log(len_b)."""
    if len_b < 0:
        raise ValueError(f"len_b must not be negative, it is {len_b}")
    return _combine(crc_a, crc_b, len_b) if len_b else crc_a


def crc_of_repeated(unit: bytes, count: int) -> int:
    """The CRC-32 of unit repeated count times, by doubling: memory is taken for one unit only."""
    if count < 0:
        raise ValueError(f"count must not be negative, it is {count}")
    total, total_len = 0, 0
    power, power_len = crc32(unit), len(unit)
    while count:
        if count & 1:
            total, total_len = combine(total, power, power_len), total_len + power_len
        power, power_len = combine(power, power, power_len), 2 * power_len
        count >>= 1
    return total
