"""The check finds every hole and every overlap, and none where there is none."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key, Piece, PieceTable, Source, Tensor, dense_strides
from ckptctl.plan.check import held_by_source, require_whole, tiles
from ckptctl.plan.index import SourceIndex
from tests.support.bruteforce import numbers, tensor
from tests.support.geometry import NUMELS, views
from tests.support.naming import cut

F32 = BY_NAME["float32"]
KEY = Key("t")


def verdict(t: Tensor) -> str:
    return tiles(t, SourceIndex({KEY: t}, [Source("s")]).tables(KEY))


def pieces_of(boxes) -> list[Piece]:
    return [Piece(view, lo, size, 0, 0, dense_strides(size, 4)) for view, lo, size in boxes]


def times_held(pieces, numel) -> np.ndarray:
    count = np.zeros(numel, np.int64)
    for p in pieces:
        np.add.at(count, numbers(p.view, p.lo, p.size).ravel(), 1)
    return count


@st.composite
def tilings(draw):
    """A shape, its pieces over one view or several."""
    shape = draw(st.sampled_from(NUMELS).flatmap(views))
    return shape, pieces_of(draw(cut(shape)))


@settings(max_examples=100)
@given(tilings())
def test_good_tilings_pass(case):
    shape, pieces = case
    assert verdict(tensor(KEY, F32, shape, pieces)) == ""


def mutated(draw, pieces):
    """The pieces with one lost, doubled, moved, grown or shrunk; or two of these."""
    out = list(pieces)
    for _ in range(draw(st.integers(1, 2))):
        if not out:
            break
        at = draw(st.integers(0, len(out) - 1))
        p = out[at]
        what = draw(st.sampled_from(["lose", "double", "change"]))
        if what == "lose":
            del out[at]
        elif what == "double":
            out.append(p)
        elif p.view:
            axis = draw(st.integers(0, len(p.view) - 1))
            lo = draw(st.integers(0, p.view[axis]))
            size = draw(st.integers(0, p.view[axis] - lo))
            new_size = (*p.size[:axis], size, *p.size[axis + 1 :])
            out[at] = dataclasses.replace(
                p, lo=(*p.lo[:axis], lo, *p.lo[axis + 1 :]), size=new_size, strides=dense_strides(new_size, 4)
            )
    return out


@settings(max_examples=200)
@given(tilings(), st.data())
def test_every_hole_and_every_overlap_is_found(case, data):
    shape, pieces = case
    changed = mutated(data.draw, pieces)
    count = times_held(changed, int(np.prod(shape, dtype=int)))
    why = verdict(tensor(KEY, F32, shape, changed))
    assert (why == "") == bool((count == 1).all())
    if count.max(initial=0) > 1 and count.sum() == len(count):
        assert why == "two of its pieces hold the same elements"


@given(st.lists(tilings(), min_size=2, max_size=2), st.data())
def test_pieces_over_several_views_are_checked_together(cases, data):
    """Half of the elements from one tiling, the rest from another of the same tensor, as runs."""
    (shape, pieces), _ = cases
    numel = int(np.prod(shape, dtype=int))
    at = data.draw(st.integers(0, len(pieces)))
    kept = pieces[:at]
    held = times_held(kept, numel)
    runs = [Piece((numel,), (int(i),), (1,), 0, 0, (4,)) for i in np.flatnonzero(held == 0)]
    assert verdict(tensor(KEY, F32, shape, [*kept, *runs])) == ""
    if runs and kept and held.any():
        other = int(np.flatnonzero(held)[0])
        runs[0] = dataclasses.replace(runs[0], lo=(other,))
        assert verdict(tensor(KEY, F32, shape, [*kept, *runs])) != ""


@given(st.integers(2, 6), st.integers(2, 6), st.data())
def test_boxes_whose_intervals_cross_on_the_first_axis(rows, columns, data):
    """A pinwheel-like cut: left columns by one division of the rows, right columns by another."""
    at = data.draw(st.integers(1, columns - 1))
    cut_left, cut_right = data.draw(st.integers(1, rows - 1)), data.draw(st.integers(1, rows - 1))
    view = (rows, columns)
    boxes = [
        (view, (0, 0), (cut_left, at)), (view, (cut_left, 0), (rows - cut_left, at)),
        (view, (0, at), (cut_right, columns - at)), (view, (cut_right, at), (rows - cut_right, columns - at)),
    ]  # fmt: skip
    assert verdict(tensor(KEY, F32, view, pieces_of(boxes))) == ""
    boxes[0] = (view, (rows - cut_left, 0), (cut_left, at))  # as many elements, elsewhere
    pieces = pieces_of(boxes)
    good = bool((times_held(pieces, rows * columns) == 1).all())
    assert (verdict(tensor(KEY, F32, view, pieces)) == "") == good


def test_reasons_have_their_numbers():
    def of(*boxes, shape=(4,)):
        return verdict(tensor(KEY, F32, shape, pieces_of(boxes)))

    assert of(((4,), (0,), (3,))) == "its pieces hold 3 elements, its shape (4,) has 4"
    assert of(((4,), (0,), (4,)), ((4,), (1,), (2,))) == "its pieces hold 6 elements, its shape (4,) has 4"
    assert of(((4,), (0,), (2,)), ((4,), (1,), (2,))) == "two of its pieces hold the same elements"
    assert of(((5,), (0,), (4,))) == "a piece counts 5 elements in all, the tensor 4"
    assert of(((4,), (2,), (4,))) == "a piece goes past the tensor's shape (4,)"
    assert of(((2, 2), (0, 0), (1, 2)), ((4,), (1,), (2,))) == "two of its pieces hold the same elements"
    assert verdict(Tensor(KEY, F32, (4,), ())) == "its pieces hold 0 elements, its shape (4,) has 4"
    assert verdict(Tensor(KEY, F32, (0, 4), ())) == ""
    assert verdict(tensor(KEY, F32, (), [Piece((), (), (), 0, 0, ())])) == ""
    assert verdict(tensor(KEY, F32, (), [Piece((), (), (), 0, 0, ())] * 2)) != ""


def table(view, lo, size) -> PieceTable:
    n = len(lo)
    lo, size = np.array(lo, np.int64).reshape(n, len(view)), np.array(size, np.int64).reshape(n, len(view))
    return PieceTable(view, 4, lo, size, np.zeros(n, np.int32), np.zeros(n, np.int64), None)


@pytest.mark.parametrize(
    ("shape", "lo", "size"),
    [
        ((4,), [[-1]], [[4]]),
        ((4,), [[0], [6]], [[6], [-2]]),
        ((1 << 40, 1 << 40), [[0, 0]], [[1 << 32, 1 << 32]]),  # 2**64 elements: 0 in 64 bits
        ((1 << 32, 1 << 32), [[0, 0]], [[1 << 32, 0]]),
        ((1 << 62, 4), [[1 << 62, 0]], [[1 << 62, 4]]),  # lo + size is past 64 bits
    ],
)
def test_numbers_that_a_hostile_header_may_hold_are_refused(shape, lo, size):
    assert verdict(Tensor(KEY, F32, shape, (table(shape, lo, size),))) != ""


def test_the_error_names_the_tensor_and_both_numbers():
    t = tensor(Key("model.norm.weight", "exp_avg"), F32, (4,), pieces_of([((4,), (0,), (3,))]))
    with pytest.raises(Damaged, match=r"model.norm.weight \(exp_avg\) is not whole") as err:
        require_whole(SourceIndex({t.key: t}, [Source("s")]), [t.key])
    assert err.value.code == "tensor-incomplete"
    assert err.value.why == "its pieces hold 3 elements, its shape (4,) has 4"
    assert err.value.fix


def test_bytes_that_pieces_hold_are_counted_by_source():
    a = tensor(Key("a"), F32, (6,), [Piece((6,), (0,), (4,), 0, 0, (4,)), Piece((6,), (4,), (2,), 2, 0, (4,))])
    b = tensor(Key("b"), BY_NAME["bfloat16"], (), [Piece((), (), (), 2, 8, ())])
    assert held_by_source([*a.pieces, *b.pieces]) == {0: 16, 2: 10}
    assert held_by_source([]) == {}
