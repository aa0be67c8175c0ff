"""Meetings and compose, element by element against NumPy; and the layouts that they are for, written down by hand."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptctl.core.compose import compose, flat_runs, joined, meetings, refined
from ckptctl.core.tensor import Key, Part, Piece, dense_strides
from ckptctl.core.view import refinement
from tests.support.bruteforce import addresses, elements, numbers
from tests.support.geometry import NUMELS, boxes, parts, pieces, views

numels = st.sampled_from(NUMELS)


@st.composite
def two_pieces(draw):
    numel = draw(numels)
    return draw(pieces(numel)), draw(pieces(numel))


@st.composite
def part_and_piece(draw):
    numel = draw(numels)
    return draw(parts(numel)), draw(pieces(numel))


def native_to_hub(part: Part) -> dict[int, int]:
    """Native element number -> hub element number, by NumPy's transpose."""
    native = numbers(part.native_view, part.native_lo, part.size)
    order = sorted(range(len(part.axes)), key=lambda i: part.axes[i])
    hub_size = tuple(part.size[i] for i in order)
    hub = numbers(part.hub_view, part.hub_lo, hub_size)
    return dict(zip(native.transpose(order).ravel().tolist(), hub.ravel().tolist(), strict=True))


@given(two_pieces())
def test_pieces_meet_in_exactly_the_elements_both_hold(pair):
    a, b = pair
    in_a, in_b = elements(a), elements(b)
    want = sorted((in_a[n], in_b[n]) for n in in_a.keys() & in_b.keys())
    got = []
    for m in meetings(a, b):
        left, right = addresses(m.a_start, m.size, m.a_strides), addresses(m.b_start, m.size, m.b_strides)
        got += zip(left.ravel().tolist(), right.ravel().tolist(), strict=True)
    assert sorted(got) == want


@given(part_and_piece())
def test_compose_gives_each_hub_element_of_a_piece_once_at_its_byte(pair):
    part, piece = pair
    held, to_hub = elements(piece), native_to_hub(part)
    want = {to_hub[n]: byte for n, byte in held.items() if n in to_hub}
    found = compose(part, piece)
    got: dict[int, int] = {}
    for p in found:
        assert (p.view, p.source) == (part.hub_view, piece.source)
        assert 0 not in p.size
        of_p = elements(p)
        assert not of_p.keys() & got.keys()
        got |= of_p
    assert got == want


@given(numels.flatmap(pieces))
def test_flat_runs_hold_what_the_piece_holds(piece):
    got: dict[int, int] = {}
    for run in flat_runs(piece):
        assert len(run.view) == 1
        got |= elements(run)
    assert got == elements(piece)


@given(two_pieces())
def test_a_refined_piece_holds_the_same_elements_at_the_same_bytes(pair):
    piece, other = pair
    fine = refinement(piece.view, other.view)
    if fine is None:
        return
    got: dict[int, int] = {}
    for box in refined(piece, fine):
        got |= elements(Piece(fine, *box.box, piece.source, box.start, box.strides))
    assert got == elements(piece)
    assert len(refined(piece, fine)) <= np.prod([max(1, 2 * len(fine) - 1) for _ in piece.view])


@given(numels.flatmap(views), st.data())
def test_joining_axes_changes_no_pair_of_bytes(view, data):
    _, size = data.draw(boxes(view))
    left = data.draw(st.permutations(dense_strides(size, 2)))
    right = data.draw(st.sampled_from([list(dense_strides(size, 1)), left]))
    n, a, b = joined(size, tuple(left), tuple(right))
    assert 1 not in n
    assert addresses(0, n, a).ravel().tolist() == addresses(0, size, left).ravel().tolist()
    assert addresses(0, n, b).ravel().tolist() == addresses(0, size, right).ravel().tolist()


def test_a_dense_box_joins_to_one_run():
    assert joined((3, 1, 4), (8, 8, 2), (16, 16, 4)) == ((12,), (2,), (4,))
    assert joined((3, 4), (8, 2), (64, 4)) == ((3, 4), (8, 2), (64, 4))
    assert joined((1, 1), (5, 5), (7, 7)) == ((), (), ())


def test_pieces_without_elements_meet_nothing():
    none = Piece((6,), (2,), (0,), 0, 0, (1,))
    whole = Piece((2, 3), (0, 0), (2, 3), 0, 0, (3, 1))
    assert meetings(none, whole) == meetings(whole, none) == []
    empty = Piece((0, 3), (0, 0), (0, 3), 0, 0, (3, 1))
    assert meetings(empty, empty) == []
    assert compose(Part(Key("h"), (0, 3), (0, 0), (0, 3), (0, 3), (0, 0), (0, 1)), empty) == []


def test_scalars_meet_and_compose():
    scalar = Piece((), (), (), 0, 7, ())
    as_row = Piece((1, 1), (0, 0), (1, 1), 0, 9, (4, 4))
    (m,) = meetings(scalar, as_row)
    assert (m.size, m.a_start, m.b_start) == ((), 7, 9)
    assert compose(Part(Key("h"), (), (), (), (), (), ()), scalar) == [scalar]
    assert [p.start for p in compose(Part(Key("h"), (1,), (0,), (1,), (1,), (0,), (0,)), scalar)] == [7]


def test_columns_of_a_flat_run():
    # Elements 5 to 19 of a (6, 4) matrix in one run at byte 100, two bytes each, against its columns 1 and 2.
    run = Piece((24,), (5,), (14,), 0, 100, (2,))
    columns = Piece((6, 4), (0, 1), (6, 2), 1, 0, (4, 2))
    got = {
        (a, b)
        for m in meetings(run, columns)
        for a, b in zip(
            addresses(m.a_start, m.size, m.a_strides).ravel().tolist(),
            addresses(m.b_start, m.size, m.b_strides).ravel().tolist(),
            strict=True,
        )
    }
    assert got == {
        (100 + 2 * (4 * r + c - 5), 4 * r + 2 * (c - 1)) for r in range(6) for c in (1, 2) if 5 <= 4 * r + c < 19
    }


def test_a_dense_source_against_rows_that_do_not_nest_still_meets():
    # (2, 3) and (3, 2) have no common refinement: rows are taken one at a time.
    a = Piece((2, 3), (0, 1), (2, 2), 0, 0, (2, 1))
    b = Piece((3, 2), (1, 0), (2, 2), 0, 50, (2, 1))
    assert sum(np.prod(m.size, dtype=int) for m in meetings(a, b)) == len({1, 2, 4, 5} & {2, 3, 4, 5})


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("per_group", [1, 2, 3, 8])
def test_queries_keys_and_values_of_a_fused_tensor(groups, per_group):
    """Every ratio: multi-head (1 query a group), grouped, multi-query (1 group)."""
    d, h = 2, 3
    q = np.arange(groups * per_group * d * h).reshape(groups * per_group * d, h)
    k = 1000 + np.arange(groups * d * h).reshape(groups * d, h)
    v = 2000 + np.arange(groups * d * h).reshape(groups * d, h)
    fused = np.concatenate(
        [q.reshape(groups, per_group, d, h), k.reshape(groups, 1, d, h), v.reshape(groups, 1, d, h)], axis=1
    )
    view = (groups, per_group + 2, d, h)
    piece = Piece((fused.size // h, h), (0, 0), (fused.size // h, h), 0, 0, (h, 1))
    flat = fused.ravel()
    for at, n, hub in ((0, per_group, q), (per_group, 1, k), (per_group + 1, 1, v)):
        hub_view = (groups, n, d, h)
        part = Part(Key("hub"), view, (0, at, 0, 0), hub_view, hub_view, (0, 0, 0, 0), (0, 1, 2, 3))
        got = {number: flat[byte] for p in compose(part, piece) for number, byte in elements(p).items()}
        assert [got[i] for i in range(hub.size)] == hub.ravel().tolist()


def test_rotary_order_and_transposes_are_parts():
    heads, half, h = 2, 3, 4
    hub = np.arange(heads * 2 * half * h).reshape(heads, 2, half, h)
    native = hub.transpose(0, 2, 1, 3).ravel()  # interleaved: pairs side by side
    view = (heads, half, 2, h)
    part = Part(Key("hub"), view, (0, 0, 0, 0), view, (heads, 2, half, h), (0, 0, 0, 0), (0, 2, 1, 3))
    piece = Piece((hub.size,), (0,), (hub.size,), 0, 0, (1,))
    got = {n: native[byte] for p in compose(part, piece) for n, byte in elements(p).items()}
    assert [got[i] for i in range(hub.size)] == list(range(hub.size))
    conv1d = Part(Key("hub"), (5, 3), (0, 0), (5, 3), (3, 5), (0, 0), (1, 0))
    (turned,) = compose(conv1d, Piece((5, 3), (0, 0), (5, 3), 0, 0, (3, 1)))
    assert turned == Piece((3, 5), (0, 0), (3, 5), 0, 0, (1, 3))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
@example(3, 2, 1, 1)
def test_stacked_experts_give_each_expert_its_gate_and_up(experts, sub, width, hidden):
    hub = np.arange(experts * sub * width * hidden).reshape(experts, sub, width, hidden)
    turned = (
        hub.reshape(experts * sub, width, hidden).transpose(0, 2, 1).ravel()
    )  # (experts, hidden, sub * width) less sub
    piece = Piece((turned.size,), (0,), (turned.size,), 0, 0, (1,))
    view = (experts, sub, hidden, width)
    for e in range(experts):
        for s in range(sub):
            part = Part(
                Key("hub"), view, (e, s, 0, 0), (1, 1, hidden, width), (1, 1, width, hidden), (0,) * 4, (0, 1, 3, 2)
            )
            found = compose(part, piece)
            got = {n: turned[byte] for p in found for n, byte in elements(p).items()}
            assert [got[i] for i in range(width * hidden)] == hub[e, s].ravel().tolist()
