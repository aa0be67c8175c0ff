"""A million pieces: the index stays small, and the whole plan is checked in seconds. The timed ones are benches."""

import math
import time
import tracemalloc

import numpy as np
import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.plan.check import check, require_whole
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan

BF16 = BY_NAME["bfloat16"]
LAYOUTS = ("rows", "blocks", "runs")


def tensors_of(total: int, per: int, kind: str) -> dict[Key, Tensor]:
    """total pieces in tensors of per each, their columns in shuffled order, one source a piece."""
    rng = np.random.default_rng(0)
    out = {}
    shape = (per * 4, 64)
    for i in range(total // per):
        lo, size, view = _cut(per, kind, shape)
        order = rng.permutation(per)
        start = rng.integers(0, 1 << 40, per)
        source = np.arange(per, dtype=np.int32)
        table = PieceTable(view, 2, lo[order], size[order], source, start, None)
        out[Key(f"t{i}")] = Tensor(Key(f"t{i}"), BF16, shape, (table,))
    return out


def _cut(per: int, kind: str, shape: tuple[int, int]):
    if kind == "rows":
        lo = np.stack([np.arange(per) * 4, np.zeros(per, np.int64)], axis=1)
        return lo, np.tile(np.array([4, 64]), (per, 1)), shape
    if kind == "blocks":  # a 2-D mesh: four blocks side by side
        lo = np.stack([np.repeat(np.arange(per // 4) * 16, 4), np.tile(np.arange(4) * 16, per // 4)], axis=1)
        return lo, np.tile(np.array([16, 16]), (per, 1)), shape
    numel = math.prod(shape)  # runs that end anywhere
    bounds = np.sort(np.random.default_rng(1).choice(np.arange(1, numel), per - 1, replace=False))
    bounds = np.concatenate([[0], bounds, [numel]])
    return bounds[:-1, None].copy(), np.diff(bounds)[:, None].copy(), (numel,)


def plan_of(tensors: dict[Key, Tensor], columns: int = 64) -> Plan:
    """The first columns of every tensor (all, by default), one tensor after another."""
    regions = [Region(k, t.dtype, t.shape, (0, 0), (t.shape[0], columns)) for k, t in tensors.items()]
    n = max(len(t.pieces[0]) for t in tensors.values())
    return Plan((OutputFile("f", lambda: regions),), SourceIndex(tensors, [Source("s")] * n))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_hundred_thousand_pieces_are_checked(kind):
    tensors = tensors_of(100_000, 1000, kind)
    plan = plan_of(tensors)
    require_whole(plan.index, tensors)
    totals = check(plan)
    assert totals.written_nbytes == totals.read_nbytes == sum(t.nbytes for t in tensors.values())
    # As many moves as pieces, but for those that an extent's end cuts.
    assert 100_000 <= totals.moves <= 100_000 + 3 * totals.extents


@pytest.mark.parametrize("per", [1_000, 100_000])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_index_of_a_hundred_thousand_pieces_takes_at_most_15_mb(kind, per):
    tensors = tensors_of(100_000, per, kind)
    tracemalloc.start()
    try:
        plan = plan_of(tensors)
        require_whole(plan.index, tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.index.nbytes <= 15e6
    assert peak <= 3 * 15e6  # sorting and checking take temporary columns


@pytest.mark.parametrize("kind", LAYOUTS)
def test_columns_of_fifty_thousand_pieces_are_checked(kind):
    tensors = tensors_of(50_000, 1000, kind)
    totals = check(plan_of(tensors, columns=24))
    assert totals.read_nbytes == sum(t.nbytes for t in tensors.values()) * 24 // 64
    assert totals.moves >= 25_000


@pytest.mark.bench
@pytest.mark.parametrize("kind", LAYOUTS)
def test_columns_of_a_million_pieces_take_at_most_30_seconds(kind):
    plan = plan_of(tensors_of(1_000_000, 1_000, kind), columns=24)
    begun = time.process_time()
    check(plan)
    assert time.process_time() - begun <= 30


@pytest.mark.bench
@pytest.mark.parametrize("per", [1_000, 1_000_000])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_million_pieces_take_at_most_150_mb_and_30_seconds(kind, per):
    tensors = tensors_of(1_000_000, per, kind)
    plan = plan_of(tensors)
    begun = time.process_time()
    require_whole(plan.index, tensors)
    checked = time.process_time()
    totals = check(plan)
    done = time.process_time()
    assert totals.moves >= 1_000_000
    assert plan.index.nbytes <= 150e6
    assert checked - begun <= 30
    assert done - checked <= 30


@pytest.mark.bench
def test_the_index_of_a_million_pieces_is_what_it_says():
    tensors = tensors_of(1_000_000, 1_000, "blocks")
    tracemalloc.start()
    try:
        plan = plan_of(tensors)
        for key in tensors:
            plan.index.tables(key)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now <= 150e6
    assert peak <= 150e6
