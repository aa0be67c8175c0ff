"""Boxes of ranks by placements: hand-written numbers, brute force over lists of rows, and torch's own arithmetic."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.formats.ranks.placing import Grid, Placement, box_of, chunk, cutting_order, grid_of
from tests.support.checkpoints import run_torch


def places(shape):
    return list(itertools.product(*map(range, shape)))


def parts(n, placements, sizes, dim=0):
    """By place on the mesh: (first, size) on the axis."""
    order = cutting_order(placements, sizes, dim)
    return {at: tuple(x[0] for x in box_of((n,), {dim: order}, Grid(sizes, at, ()))) for at in places(sizes)}


def test_parts_are_of_equal_size_rounded_up_and_late_ones_short_or_empty():
    assert [chunk(0, 10, 4, i) for i in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [chunk(0, 5, 4, i) for i in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [chunk(7, 9, 3, i) for i in range(3)] == [(7, 8), (8, 9), (9, 9)]
    assert [chunk(0, 0, 2, i) for i in range(2)] == [(0, 0), (0, 0)]


def test_fsdp_over_tp_on_one_axis_cuts_by_tp_first():
    """Measured on a real run: 131 rows on a 2 x 2 mesh lie at 0, 66, 33, 99 on ranks 0 to 3."""
    found = parts(131, [Placement(0, 2), Placement(0)], (2, 2))
    assert found == {(0, 0): (0, 33), (0, 1): (66, 33), (1, 0): (33, 33), (1, 1): (99, 32)}


def test_plain_shards_on_one_axis_cut_from_left_to_right():
    found = parts(10, [Placement(0), Placement(0)], (2, 3))
    assert list(found.values()) == [(0, 2), (2, 2), (4, 1), (5, 2), (7, 2), (9, 1)]


def test_three_axes_of_the_mesh_in_the_order_that_their_split_factors_tell():
    assert cutting_order([Placement(0, 2), Placement(0, 2), Placement(0)], (4, 3, 2), 0) == [2, 0, 1]
    assert cutting_order([Placement(0, 6), Placement(0, 2), Placement(0)], (4, 3, 2), 0) == [2, 1, 0]
    assert cutting_order([Placement(0), Placement(1), Placement()], (4, 3, 2), 1) == [1]


def test_a_split_factor_that_no_order_gives_has_none():
    assert cutting_order([Placement(0, 3), Placement(0)], (2, 2), 0) is None
    assert cutting_order([Placement(0, 2)], (2,), 0) is None


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_every_row_is_on_exactly_one_rank_of_axes_that_cut(n, sizes):
    for split in ([Placement(0)] * len(sizes), [Placement(0, math.prod(sizes[i + 1 :])) for i in range(len(sizes))]):
        if cutting_order(split, sizes, 0) is None:
            continue
        held = [row for first, size in parts(n, split, tuple(sizes)).values() for row in range(first, first + size)]
        assert sorted(held) == list(range(n))


def test_meshes_by_layout():
    ranks = list(range(8))
    grid = grid_of([((2,), (4,)), ((2,), (1,))], ranks, 5)  # axes 0 and 2 of a 2 x 2 x 2 mesh
    assert grid == Grid((2, 2), (1, 1), (0, 1, 4, 5))
    assert grid_of([((2,), (4,)), ((2,), (1,))], ranks, 6) == Grid((2, 2), (1, 0), (2, 3, 6, 7))
    assert grid_of([((2,), (2,))], [10, 20, 30, 40], 40) == Grid((2,), (1,), (20, 40))
    assert grid_of([((2, 2), (4, 1))], ranks, 6) == Grid((4,), (2,), (2, 3, 6, 7))  # two axes joined to one
    assert grid_of([((), ())], [3], 3) == Grid((1,), (0,), (3,))


@pytest.mark.parametrize(
    ("axes", "ranks", "rank"),
    [
        ([((2,), (1,))], [0, 1], 2),
        ([((0,), (1,))], [0, 1], 0),
        ([((-1,), (1,))], [0, 1], 0),
        ([((2,), (-1,))], [0, 1], 0),
        ([((2,), (0,))], [0, 1], 0),
        ([((1 << 60,), (1,))], [0, 1], 0),
        ([((2,), (7,))], [0, 1], 1),
        ([((2,), (1,)), ((2,), (1,))], [0, 1, 2, 3], 1),
    ],
)
def test_a_layout_that_is_no_mesh_of_the_ranks_gives_none(axes, ranks, rank):
    assert grid_of(axes, ranks, rank) is None


SCRIPT = """
import json, random, sys
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute
from torch.distributed.tensor.placement_types import Replicate, Shard
random.seed(1)
out = []
for _ in range(300):
    shape = [random.randint(1, 23) for _ in range(random.randint(1, 3))]
    sizes = [random.randint(1, 5) for _ in range(random.randint(1, 3))]
    dims = [random.choice([None, *range(len(shape))]) for _ in sizes]
    at = [random.randrange(n) for n in sizes]
    placed = [Replicate() if d is None else Shard(d) for d in dims]
    local, first = compute(tuple(shape), tuple(sizes), at, placed)
    out.append((shape, sizes, dims, at, list(local), list(first)))
print(json.dumps(out))
"""


def test_boxes_are_those_that_torch_computes():
    for shape, sizes, dims, at, local, first in json.loads(run_torch(SCRIPT)):
        placements = [Placement(d) for d in dims]
        orders = {d: cutting_order(placements, sizes, d) for d in dims if d is not None}
        lo, size = box_of(tuple(shape), orders, Grid(tuple(sizes), tuple(at), ()))
        assert list(size) == local
        assert 0 in local or list(lo) == first
