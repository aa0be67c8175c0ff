"""Many pieces refined at once are what each alone is refined to."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.tensor import Key, Piece, PieceTable, Source, dense_strides
from ckptctl.core.view import interval_boxes, refinement
from ckptctl.plan.columns import interval_columns, refined_rows, strides_of
from ckptctl.plan.index import SourceIndex
from tests.support.bruteforce import addresses, elements, numbers, tensor
from tests.support.geometry import NUMELS, boxes, pieces, views


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), st.data())
def test_intervals_are_the_same_boxes_as_one_at_a_time(factors, data):
    total = math.prod(factors)
    rows = data.draw(st.lists(st.integers(0, total - 1), max_size=5))
    sizes = [data.draw(st.integers(1, total - lo)) for lo in rows]
    of, lo, size, offset = interval_columns(np.array(rows, np.int64), np.array(sizes, np.int64), factors)
    found = sorted(zip(of.tolist(), map(tuple, lo.tolist()), map(tuple, size.tolist()), strict=True))
    want = [
        (row, *box) for row, (a, n) in enumerate(zip(rows, sizes, strict=True)) for box in interval_boxes(a, n, factors)
    ]
    assert found == sorted(want)
    first = [int(numbers(factors, a, n).flat[0]) for _, a, n in zip(of, lo.tolist(), size.tolist(), strict=True)]
    assert offset.tolist() == [f - rows[row] for f, row in zip(first, of.tolist(), strict=True)]


@st.composite
def tables_and_views(draw):
    numel = draw(st.sampled_from(NUMELS))
    view, other = draw(views(numel)), draw(views(numel))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        lo, size = draw(boxes(view, least=draw(st.integers(0, 1))))
        start = draw(st.integers(0, 999))
        rows.append(Piece(view, lo, size, draw(st.integers(0, 9)), start, dense_strides(size, 4)))
    return rows, refinement(view, other)


@pytest.mark.parametrize("packed", [True, False])
@given(case=tables_and_views())
def test_refined_rows_hold_the_same_elements_at_the_same_bytes(packed, case):
    rows, fine = case
    if fine is None:
        return
    t = PieceTable.of(rows, 4)
    if packed:
        t = PieceTable(t.view, 4, t.lo, t.size, t.source, t.start, None)
    assert strides_of(t, slice(None)).tolist() == [list(p.strides) for p in rows]
    found = list(refined_rows(t, slice(None), fine))
    assert all(p.view == fine for p in found)
    held = sorted((p.source, *pair) for p in found for pair in elements(p).items())
    assert held == sorted((p.source, *pair) for p in rows for pair in elements(p).items())


@settings(max_examples=200)
@given(tables_and_views(), st.data())
def test_the_index_finds_every_element_that_a_box_of_any_view_wants(case, data):
    rows, _ = case
    numel = math.prod(rows[0].view)
    wanted = data.draw(pieces(numel, item=4))
    index = SourceIndex({Key("t"): tensor(Key("t"), BY_NAME["float32"], (numel,), rows)}, [Source("s")] * 10)
    in_target = elements(wanted)
    want = sorted((in_target[n], p.source, byte) for p in rows for n, byte in elements(p).items() if n in in_target)
    got = []
    for hit in index.hits(Key("t"), wanted, 4):
        to, at = addresses(hit.dst, hit.size, hit.dst_strides), addresses(hit.src, hit.size, hit.src_strides)
        got += [(a, hit.source, b) for a, b in zip(to.ravel().tolist(), at.ravel().tolist(), strict=True)]
    assert sorted(got) == want
