"""Plans, run by brute force, give the bytes that NumPy gives."""

import struct
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.output import Fill, Late, OutputFile, Put, Region
from ckptctl.core.tensor import Key, Piece, PieceTable, Source, Tensor
from ckptctl.plan.check import check, require_whole
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan, extents_of, segments_in
from ckptctl.plan.steps import Cast, Extent, Move
from tests.support.bruteforce import alone, run, tensor
from tests.support.naming import conversions, source_of, target_of, written

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]


@settings(max_examples=200)
@given(conversions())
def test_any_layout_to_any_other_gives_its_bytes(case):
    model, dtype, hub, a, b, nbytes = case
    index = source_of(a, model, dtype)
    require_whole(index, index.tensors)
    plan = Plan(target_of(b, dtype), index, extent_nbytes=nbytes)
    assert run(plan, written(a, hub)) == written(b, hub)


@settings(max_examples=50)
@given(conversions())
def test_there_and_back_again_restores_every_byte(case):
    model, dtype, hub, a, b, nbytes = case
    there = run(Plan(target_of(b, dtype), source_of(a, model, dtype), extent_nbytes=nbytes), written(a, hub))
    back = run(Plan(target_of(a, dtype), source_of(b, model, dtype), extent_nbytes=nbytes), there)
    assert back == written(a, hub)


@settings(max_examples=50)
@given(conversions(), st.integers(0, 1000))
def test_an_extent_alone_gives_its_bytes(case, which):
    """No step depends on another extent: an extent is a job of its own."""
    model, dtype, hub, a, b, nbytes = case
    plan = Plan(target_of(b, dtype), source_of(a, model, dtype), extent_nbytes=nbytes)
    extents = list(plan.extents())
    if extents:
        e = extents[which % len(extents)]
        assert alone(plan, e, written(a, hub)) == written(b, hub)[e.file][e.start : e.stop]


@settings(max_examples=50)
@given(conversions())
def test_the_totals_count_what_is_moved(case):
    model, dtype, _, a, b, nbytes = case
    plan = Plan(target_of(b, dtype), source_of(a, model, dtype), extent_nbytes=nbytes)
    totals = check(plan)
    assert totals.written_nbytes == sum(f.nbytes for f in plan.files)
    assert totals.read_nbytes == sum(r.nbytes for f in plan.files for r in f.segments if isinstance(r, Region))
    steps = [s for e in plan.extents() for s in plan.extent(e) if isinstance(s, Move)]
    assert (totals.moves, totals.strided) == (len(steps), sum(not s.is_run for s in steps))
    assert sum(totals.fills.values()) == sum(s.nbytes for f in plan.files for s in f.segments if isinstance(s, Fill))


def test_totals_count_fills_by_reason():
    segments = [Fill(5, b"ab", "alignment"), Fill(3, b"\0", "padding"), Put(b"xyz"), Fill(4, b"\0", "alignment")]
    totals = check(Plan((OutputFile("f", lambda: segments),), SourceIndex({}, [])))
    assert totals.fills == {"alignment": 9, "padding": 3}
    assert (totals.extents, totals.written_nbytes, totals.largest_extent, totals.moves) == (1, 15, 15, 0)


@st.composite
def files_of_segments(draw):
    late = st.integers(1, 9).map(lambda n: Late(n, (), lambda crcs, n=n: b"L" * n))
    region = st.integers(0, 5).map(lambda n: Region(Key("t"), F32, (5,), (0,), (n,)))
    one = st.one_of(st.binary(max_size=9).map(Put), st.integers(0, 9).map(lambda n: Fill(n, b"ab", "")), late, region)
    return draw(st.lists(one, max_size=6)), draw(st.integers(1, 20))


@given(files_of_segments())
def test_extents_tile_a_file_and_cut_no_element_and_no_late_bytes(case):
    segments, largest = case
    file = OutputFile("f", lambda: segments)
    extents = list(extents_of(0, file, largest))
    assert [e.start for e in extents] == [0, *(e.stop for e in extents)][: len(extents)]
    assert (extents[-1].stop if extents else 0) == file.nbytes
    index = SourceIndex({Key("t"): Tensor(Key("t"), F32, (5,), (PieceTable.whole((5,), 4, 0, 0),))}, [Source("s")])
    plan = Plan((file,), index, extent_nbytes=largest)
    want = b"".join(_content(s) for s in segments)
    assert run(plan, [struct.pack("<5f", 1, 2, 3, 4, 5)]) == [want]
    for e in extents:
        within = segments_in(file, e.start, e.stop)
        assert sum(stop - start for _, start, stop in within) == e.stop - e.start
        for number, start, stop in within:
            first, last = file.starts[number], file.starts[number + 1]
            if isinstance(segments[number], Late):
                assert (start, stop) == (first, last)
            if isinstance(segments[number], Region):
                assert (start - first) % 4 == (stop - first) % 4 == 0
        # Only a single element or a whole late segment may be longer than the largest extent.
        if e.stop - e.start > largest:
            assert len(within) == 1 or e.stop - e.start < largest + 4
            assert e.stop - e.start <= max(4, 9, largest)


def _content(segment):
    if isinstance(segment, Put):
        return segment.data
    if isinstance(segment, Late):
        return b"L" * segment.nbytes
    if isinstance(segment, Fill):
        return (b"ab" * segment.nbytes)[: segment.nbytes]
    return struct.pack("<5f", 1, 2, 3, 4, 5)[: segment.nbytes]


def test_late_bytes_get_the_checksums_of_the_segments_they_name():
    seen = []

    def make(crcs):
        seen.append(list(crcs))
        return b"dir!"

    segments = [Put(b"head"), Late(4, (0, 2), make), Put(b"123456789")]
    plan = Plan((OutputFile("f", lambda: segments),), SourceIndex({}, []), extent_nbytes=3)
    assert run(plan, []) == [b"headdir!123456789"]
    assert seen == [[zlib.crc32(b"head"), 0xCBF43926]]  # the check value of CRC-32


# Casts


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9), st.sampled_from([3, 4, 64]))
def test_a_listed_cast_changes_type_and_nothing_else_does(bits, nbytes):
    source = np.array(bits, np.uint32)
    n = len(bits)
    index = SourceIndex({Key("t"): tensor(Key("t"), F32, (n,), [Piece((n,), (0,), (n,), 0, 0, (4,))])}, [Source("s")])
    file = OutputFile("f", lambda: [Put(b"x"), Region(Key("t"), BF16, (n,), (0,), (n,))])
    rule = Cast("float32", "bfloat16")
    with pytest.raises(Unsupported, match="no cast was asked for"):
        check(Plan((file,), index))
    with pytest.raises(Unsupported, match="float32 in the source and bfloat16 in the target"):
        check(Plan((file,), index, casts=frozenset({Cast("bfloat16", "float32")})))
    plan = Plan((file,), index, casts=frozenset({rule}), extent_nbytes=nbytes)
    with np.errstate(invalid="ignore", over="ignore"):
        want = b"x" + source.view(np.float32).astype(ml_dtypes.bfloat16).tobytes()
    assert run(plan, [source.tobytes()]) == [want]
    assert check(plan).casts == {"cast float32 -> bfloat16": n}


def test_a_listed_cast_leaves_equal_types_alone():
    index = SourceIndex({Key("t"): tensor(Key("t"), F32, (3,), [Piece((3,), (0,), (3,), 0, 0, (4,))])}, [Source("s")])
    plan = Plan(
        (OutputFile("f", lambda: [Region(Key("t"), F32, (3,), (0,), (3,))]),),
        index,
        casts=frozenset({Cast("float32", "bfloat16")}),
    )
    (move,) = plan.extent(Extent(0, 0, 12))
    assert isinstance(move, Move)
    assert move.rule is None
    assert move.is_run


# What is missing


def test_a_plan_that_names_an_absent_tensor_is_damaged():
    plan = Plan((OutputFile("f", lambda: [Region(Key("t", "exp_avg"), F32, (3,), (0,), (3,))]),), SourceIndex({}, []))
    with pytest.raises(Damaged, match=r"t \(exp_avg\)") as err:
        check(plan)
    assert err.value.code == "tensor-missing"


@settings(max_examples=50)
@given(conversions(), st.data())
def test_a_lost_piece_is_damaged_wherever_it_is_wanted(case, data):
    model, dtype, _, a, b, nbytes = case
    full = [i for i, (*_, box) in enumerate(a.boxes) if 0 not in box[2]]
    if not full:
        return
    lost = data.draw(st.sampled_from(full))
    index = source_of(_without(a, lost), model, dtype)
    plan = Plan(target_of(b, dtype), index, extent_nbytes=nbytes)
    with pytest.raises(Damaged, match="is not whole"):
        require_whole(index, index.tensors)
    with pytest.raises(Damaged, match="no piece holds some of its elements") as err:
        check(plan)
    assert err.value.code == "tensor-incomplete"


def _without(layout, number):
    return layout._replace(boxes=tuple(b for i, b in enumerate(layout.boxes) if i != number))


def test_a_piece_that_is_there_twice_is_damaged():
    twice = [Piece((4,), (0,), (4,), 0, 0, (4,)), Piece((4,), (1,), (2,), 0, 4, (4,))]
    index = SourceIndex({Key("t"): tensor(Key("t"), F32, (4,), twice)}, [Source("s")])
    plan = Plan((OutputFile("f", lambda: [Region(Key("t"), F32, (4,), (0,), (4,))]),), index)
    with pytest.raises(Damaged, match="two pieces hold the same elements"):
        check(plan)


def test_tensors_without_elements_have_no_bytes():
    index = SourceIndex({Key("t"): Tensor(Key("t"), F32, (0, 3), ())}, [])
    file = OutputFile("f", lambda: [Region(Key("t"), F32, (0, 3), (0, 0), (0, 3))])
    plan = Plan((file,), index)
    require_whole(index, index.tensors)
    assert list(plan.extents()) == []
    assert run(plan, []) == [b""]
    assert check(plan).shortest_run == 0
