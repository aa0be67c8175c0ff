"""The pass over opcodes: stops where pickletools stops, refuses what is cut or unknown, takes no memory for claims."""

import pickle
import pickletools
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.pickles.build import load, load_until_broken
from ckptctl.formats.pickles.opcodes import OPCODES
from ckptctl.formats.pickles.scan import Truncated, scan
from tests.support.unpickle import read_or_refuse

SAMPLE = [1, -1, 300, 2**40, 2**70, 1.5, "text", "t" * 300, b"bytes", b"b" * 300, bytearray(b"x"), None, True]
SAMPLE += [(), (1,), (1, 2), (1, 2, 3, 4), {"a": [SAMPLE]}, {1}, frozenset({2}), SAMPLE]


def test_the_table_of_opcodes_is_cpythons():
    theirs = {ord(op.code): op for op in pickletools.opcodes}
    assert {code: op.name for code, op in OPCODES.items()} == {code: op.name for code, op in theirs.items()}
    counted = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    for code, op in OPCODES.items():
        argument = theirs[code].arg
        size = argument.n if argument else 0
        if size == pickletools.UP_TO_NEWLINE:
            assert (op.operand, op.counted) == (-2 if op.name in ("GLOBAL", "INST") else -1, 0), op
        else:
            assert (op.operand, op.counted) == (counted.get(size, size), counted.get(size, 0)), op


@pytest.mark.parametrize("protocol", range(6))
def test_it_stops_at_stop_and_keeps_every_memo_id_that_is_read(protocol):
    data = pickle.dumps(SAMPLE, protocol)
    found = scan(data + b"more", "f")
    assert found.stop == len(data)
    assert found.protocol == (protocol if protocol >= 2 else 0)
    reads = {arg for op, arg, _ in pickletools.genops(data) if "GET" in op.name}
    assert reads
    assert reads <= found.read


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_cut_anywhere_is_truncated(protocol):
    data = pickle.dumps(SAMPLE, protocol)
    for n in range(len(data)):
        with pytest.raises(Truncated):
            scan(data[:n], "f")
        with pytest.raises(Truncated):
            load(data[:n], "f")
        load_until_broken(data[:n], "f")


def test_it_starts_anywhere():
    data = pickle.dumps(SAMPLE, 4)
    assert scan(b"???" + data, "f", 3) == scan(data, "f")._replace(start=3, stop=len(data) + 3)
    assert scan(memoryview(data), "f").stop == len(data)


@pytest.mark.parametrize("code", [c for c in range(256) if c not in OPCODES])
def test_a_byte_that_is_no_opcode_is_named_with_its_place(code):
    with pytest.raises(Damaged, match=f"byte {code:#04x} is no pickle opcode") as err:
        scan(b"\x80\x02N" + bytes([code]) + b".", "weights.bin")
    assert (err.value.where, err.value.why) == ("weights.bin", "at byte 3")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x82\x01.", "EXT1"),
        (b"\x83\x01\x00.", "EXT2"),
        (b"\x84\x01\x00\x00\x00.", "EXT4"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"N\x98.", "READONLY_BUFFER"),
    ],
)
def test_opcodes_that_no_file_alone_can_answer_are_named(data, name):
    with pytest.raises(Unsupported, match=name):
        scan(b"\x80\x05" + data, "f")


def test_a_newer_protocol_is_named():
    with pytest.raises(Unsupported, match="protocol 6"):
        scan(b"\x80\x06N.", "f")


@pytest.mark.parametrize(
    "claim",
    [
        b"B\xff\xff\xff\xff",
        b"X\xff\xff\xff\xff",
        b"\x8e" + b"\xff" * 8,
        b"\x8d" + b"\xff" * 8,
        b"\x96" + b"\xff" * 7 + b"\x7f",
        b"\x8b\xff\xff\xff\x7f",
    ],
)
def test_claimed_lengths_take_no_memory(claim):
    tracemalloc.start()
    with pytest.raises(Truncated):
        scan(b"\x80\x05" + claim + b"x" * 100, "f")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_huge_memo_id_takes_no_memory():
    tracemalloc.start()
    found = scan(b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7f\x86.", "f")
    assert len(found.read) < 10
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_pickle_or_a_clear_error(data):
    read_or_refuse(lambda: scan(b"\x80\x04" + data, "f"), "f")


@pytest.mark.bench
def test_sixty_million_opcodes_take_seconds():
    data = b"\x80\x04N" + b")0" * 30_000_000 + b"."
    begin = time.process_time()
    assert scan(data, "f").stop == len(data)
    assert time.process_time() - begin < 60_000_000 * 0.15e-6
