"""Views and boxes, against NumPy's own indexing."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.view import flat, groups, interval_boxes, meet, refinement, run_boxes, run_of, suffixes, unit_slices
from tests.support.bruteforce import numbers
from tests.support.geometry import NUMELS, boxes, views

numels = st.sampled_from(NUMELS)


@st.composite
def two_views(draw):
    numel = draw(numels)
    return draw(views(numel)), draw(views(numel))


@given(two_views())
def test_a_refinement_splits_the_axes_of_both_views(pair):
    fine = refinement(*pair)
    products = {math.prod(v[i:]) for v in pair for i in range(len(v) + 1)}
    if fine is None:
        ordered = sorted(products)
        assert any(b % a for a, b in pairwise(ordered))
        return
    assert 1 not in fine
    assert {math.prod(fine[i:]) for i in range(len(fine) + 1)} == products  # the coarsest: no step that neither has
    for view in pair:
        split = groups(view, fine)
        assert [math.prod(g) for g in split] == list(view)
        assert tuple(n for g in split for n in g) == fine


def test_views_whose_steps_do_not_divide_have_no_refinement():
    assert refinement((2, 3), (3, 2)) is None
    assert refinement((4, 6), (24,)) == (4, 6)
    assert refinement((2, 12), (6, 4)) == (2, 3, 4)
    assert refinement((), (1, 1)) == ()


def test_views_of_different_tensors_are_refused():
    with pytest.raises(ValueError, match="differ in elements"):
        refinement((2, 3), (7,))


def test_groups_of_views_that_do_not_refine_are_refused():
    with pytest.raises(ValueError, match="does not refine"):
        groups((2, 3), (3, 2))


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_an_interval_is_at_most_2k_minus_1_boxes_that_hold_its_elements_in_order(factors, data):
    total = math.prod(factors)
    lo = data.draw(st.integers(0, total - 1))
    size = data.draw(st.integers(1, total - lo))
    found = interval_boxes(lo, size, factors)
    assert len(found) <= max(1, 2 * len(factors) - 1)
    held = [n for box in found for n in numbers(factors, *box).ravel().tolist()]
    assert held == list(range(lo, lo + size))


def test_the_bound_of_2k_minus_1_boxes_is_reached():
    assert len(interval_boxes(1, 25, (3, 3, 3))) == 5
    assert interval_boxes(3, 0, (2, 3)) == []
    assert interval_boxes(3, -1, (2, 3)) == []


@given(numels.flatmap(views), st.data())
def test_a_run_of_the_flattened_tensor_is_the_boxes_of_its_view(view, data):
    total = math.prod(view)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    held = [n for box in run_boxes(start, stop, view) for n in numbers(view, *box).ravel().tolist()]
    assert held == list(range(start, stop))


@given(numels.flatmap(views), st.data())
def test_run_of_tells_exactly_the_boxes_that_are_one_run(view, data):
    lo, size = data.draw(boxes(view, least=0))
    held = numbers(view, lo, size).ravel()
    one_run = bool((np.diff(held) == 1).all())
    found = run_of(view, lo, size)
    if not len(held):
        assert found == (0, 0)
    elif one_run:
        assert found == (held[0], len(held))
    else:
        assert found is None


@given(numels.flatmap(views), st.data())
def test_two_boxes_meet_in_the_elements_both_hold(view, data):
    a, b = data.draw(boxes(view)), data.draw(boxes(view))
    both = meet(a, b)
    common = set(numbers(view, *a).ravel().tolist()) & set(numbers(view, *b).ravel().tolist())
    assert (set() if both is None else set(numbers(view, *both).ravel().tolist())) == common


@given(numels.flatmap(views))
def test_suffixes_and_flat_are_row_major_order(view):
    assert suffixes(view) == tuple(s // 8 for s in np.zeros(view, np.float64).strides)
    indices = list(unit_slices(view))
    assert [flat(i, view) for i in indices] == list(range(math.prod(view)))
    assert indices == list(np.ndindex(*view)) if view else indices == [()]
