"""CRC-32 against the standard library's zlib."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl import checksum as crc


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums_are_those_of_the_joined_bytes(a, b):
    want = zlib.crc32(a + b)
    assert crc.crc32(b, crc.crc32(a)) == want
    assert crc.combine(zlib.crc32(a), zlib.crc32(b), len(b)) == want
    assert crc._combine_slowly(zlib.crc32(a), zlib.crc32(b), len(b)) == want


@pytest.mark.parametrize("n", [0, 1, 2**31 - 1, 2**31, 2**32, 2**33 + 7, 2**40])
def test_long_lengths_agree_with_and_without_isal(n):
    slow = crc._combine_slowly(0x12345678, 0x9ABCDEF0, n) if n else 0x12345678
    assert crc.combine(0x12345678, 0x9ABCDEF0 if n else 0, n) == slow


def test_the_slow_way_knows_the_checksum_of_many_zeros():
    zeros = zlib.crc32(bytes(5_000_000))
    assert crc._combine_slowly(zlib.crc32(bytes(2_000_000)), zlib.crc32(bytes(3_000_000)), 3_000_000) == zeros
    assert crc.crc_of_repeated(b"\0", 5_000_000) == zeros


@given(st.binary(max_size=9), st.integers(0, 70))
def test_a_repeated_unit(unit, count):
    assert crc.crc_of_repeated(unit, count) == zlib.crc32(unit * count)


def test_negative_lengths_are_refused():
    with pytest.raises(ValueError, match="-1"):
        crc.combine(1, 2, -1)
    with pytest.raises(ValueError, match="-2"):
        crc.crc_of_repeated(b"a", -2)
