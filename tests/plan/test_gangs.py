"""Gangs cover each extent once, within the budget."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, Piece, Source
from ckptctl.plan.check import check
from ckptctl.plan.gangs import gangs, reread_factor
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Extent, Move
from tests.support.bruteforce import addresses, tensor
from tests.support.naming import conversions, source_of, target_of

F32 = BY_NAME["float32"]


@settings(max_examples=50)
@given(conversions(), st.sampled_from([1, 16, 64, 200, 1 << 20]))
def test_gangs_hold_each_extent_once_and_keep_to_the_budget(case, budget):
    model, dtype, _, a, b, nbytes = case
    plan = Plan(target_of(b, dtype), source_of(a, model, dtype), extent_nbytes=nbytes)
    totals = check(plan)
    found = list(gangs(plan, totals, budget))
    assert sorted(e for gang in found for e in gang) == sorted(plan.extents())
    for gang in found:
        assert len(gang) == 1 or sum(e.stop - e.start for e in gang) <= budget
    assert reread_factor(plan, totals, budget) >= 1.0
    assert reread_factor(plan, totals, 1 << 40) <= reread_factor(plan, totals, 1)


@settings(max_examples=50)
@given(conversions())
def test_spans_hold_every_byte_that_strided_moves_read(case):
    model, dtype, _, a, b, nbytes = case
    plan = Plan(target_of(b, dtype), source_of(a, model, dtype), extent_nbytes=nbytes)
    totals = check(plan)
    for extent in plan.extents():
        want: dict[int, tuple[int, int]] = {}
        for step in plan.extent(extent):
            if isinstance(step, Move) and not step.is_run:
                at = addresses(step.src, step.size, step.src_strides)
                low, high = want.get(step.source, (1 << 60, 0))
                want[step.source] = (min(low, int(at.min())), max(high, int(at.max()) + step.item))
        assert totals.spans.get(extent, {}) == want


def columns(ranks: int, rows: int = 8, width: int = 12) -> Plan:
    """A whole matrix as its columns, one file a rank: each reads the same stretch."""
    shape = (rows, width)
    whole = Piece(shape, (0, 0), shape, 0, 0, (width * 4, 4))
    index = SourceIndex({Key("t"): tensor(Key("t"), F32, shape, [whole])}, [Source("s")])
    w = width // ranks
    files = tuple(
        OutputFile(f"r{r}", lambda r=r: [Region(Key("t"), F32, shape, (0, r * w), (rows, w))]) for r in range(ranks)
    )
    return Plan(files, index)


def test_columns_of_one_matrix_are_gathered_together_where_the_budget_allows():
    plan = columns(4)
    totals = check(plan)
    size = 8 * 3 * 4
    assert [len(g) for g in gangs(plan, totals, 4 * size)] == [4]
    assert [len(g) for g in gangs(plan, totals, 2 * size)] == [2, 2]
    assert [len(g) for g in gangs(plan, totals, 1)] == [1, 1, 1, 1]
    assert reread_factor(plan, totals, 4 * size) == 1.0
    # Alone, each column of 3 reads from its first element to its last: 7 rows of 12 elements, and 3 more.
    assert reread_factor(plan, totals, 1) == 4 * (7 * 12 + 3) / (8 * 12)


def test_runs_go_alone():
    shape = (8, 12)
    whole = Piece(shape, (0, 0), shape, 0, 0, (48, 4))
    index = SourceIndex({Key("t"): tensor(Key("t"), F32, shape, [whole])}, [Source("s")])
    plan = Plan((OutputFile("f", lambda: [Region(Key("t"), F32, shape, (0, 0), shape)]),), index, extent_nbytes=100)
    totals = check(plan)
    assert totals.strided == 0
    assert list(gangs(plan, totals, 1 << 20)) == [(e,) for e in plan.extents()]
    assert next(plan.extents()) == Extent(0, 0, 100)
