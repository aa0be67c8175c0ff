"""Tensors made of boxes of others, element by element against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.core.checkpoint import Group, Optimizer
from ckptctl.core.compose import compose
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.regroup import regrouped
from ckptctl.core.remake import Native, composed, from_hub, inverse, remade, to_hub
from ckptctl.core.tensor import Key, Part, PieceTable, Tensor
from tests.support.bruteforce import elements, tables, tensor
from tests.support.geometry import NUMELS, parts, pieces, views

F32 = BY_NAME["float32"]


@st.composite
def part_and_pieces(draw):
    numel = draw(st.sampled_from(NUMELS))
    return draw(parts(numel)), draw(st.lists(pieces(numel), min_size=1, max_size=4))


@given(part_and_pieces())
def test_tables_compose_as_their_pieces_do_one_by_one(case):
    part, found = case
    want = sorted(b for p in found for c in compose(part, p) for b in elements(c).items())
    got = sorted(b for t in composed([(part, tables(found, 4))], 4) for p in t for b in elements(p).items())
    assert got == want


@given(st.sampled_from(NUMELS).flatmap(parts))
def test_a_part_seen_from_the_other_side_twice_is_itself(part):
    back = inverse(inverse(part, "native"), part.hub.name)
    assert replace(back, hub=part.hub) == part


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> Native:
    """A hub tensor of that view with its axes in another order."""
    hub = tuple(shape[order.index(i)] for i in range(len(shape)))
    zero = (0,) * len(shape)
    return Native("n", shape, (Part(Key("h"), shape, zero, shape, hub, zero, order),), (hub,))


@given(st.data())
def test_any_order_of_axes_is_numpy_s_transpose_whatever_pieces_hold_it(data):
    shape = data.draw(st.sampled_from(NUMELS).flatmap(views).filter(bool))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    native = permuted(shape, order)
    values = np.arange(int(np.prod(shape))).reshape(shape)
    rows = data.draw(st.integers(1, 3))
    cut = [c for c in np.array_split(np.arange(values.size), rows) if len(c)]
    held = tensor(Key("n"), F32, shape, [flat_piece(values.size, c[0], len(c)) for c in cut])
    made = remade({Key("n"): held}, to_hub([native]))[Key("h")].tensor
    want = values.transpose(np.argsort(order))
    assert made.shape == want.shape
    assert read(made) == (want.ravel() * 4).tolist()
    again = remade({Key("h"): made}, from_hub([native]))[Key("n")].tensor
    assert read(again) == (values.ravel() * 4).tolist()


def flat_piece(total, start, count):
    from ckptctl.core.tensor import Piece

    return Piece((total,), (int(start),), (int(count),), 0, int(start) * 4, (4,))


def read(made: Tensor) -> list[int]:
    """The byte of each element in order; every element once."""
    found = [b for t in made.pieces for p in t for b in elements(p).items()]
    assert len(dict(found)) == len(found) == made.numel
    return [byte for _, byte in sorted(found)]


def stacked(experts=3, rows=2, columns=5) -> Native:
    view, size = (experts, 2, rows, columns), (1, 1, rows, columns)
    made = tuple(
        Part(Key(f"{e}.{w}"), view, (e, s, 0, 0), size, size, (0,) * 4, (0, 1, 2, 3))
        for e in range(experts)
        for s, w in enumerate(("gate", "up"))
    )
    return Native("fused", (experts, 2 * rows, columns), made, ((rows, columns),) * len(made))


def whole(name, shape, kind="weight", at=0, dtype=F32) -> Tensor:
    return Tensor(Key(name, kind), dtype, shape, (PieceTable.whole(shape, dtype.itemsize, 0, at),))


def test_experts_come_apart_with_every_kind_of_state_and_steps_go_to_each():
    kinds = ("weight", "exp_avg", "master")
    held = {Key("fused", k): whole("fused", (3, 4, 5), k, i * 1000) for i, k in enumerate(kinds)}
    held |= {Key("fused", "step"): whole("fused", (), "step", 9000), Key("x"): whole("x", (7,))}
    made = remade(held, to_hub([stacked()]))
    names = [f"{e}.{w}" for e in range(3) for w in ("gate", "up")]
    assert [k.name for k in made if k.kind == "weight"] == [*names, "x"]
    values = np.arange(60).reshape(3, 4, 5) * 4
    for i, kind in enumerate(kinds):
        assert read(made[Key("2.up", kind)].tensor) == (values[2, 2:].ravel() + i * 1000).tolist()
    for name in names:
        step = made[Key(name, "step")]
        assert (step.tensor.shape, step.unchanged, step.equal) == ((), True, False)


def test_experts_are_put_together_with_the_step_that_all_must_have():
    native = stacked(2, 1, 3)
    held = {Key(p.hub.name): whole(p.hub.name, (1, 3), at=i * 100) for i, p in enumerate(native.parts)}
    held |= {Key(p.hub.name, "step"): whole(p.hub.name, (), "step", i) for i, p in enumerate(native.parts)}
    made = remade(held, from_hub([native]))
    assert list(made) == [Key("fused"), Key("fused", "step")]
    assert read(made[Key("fused")].tensor) == [b for i in range(4) for b in (i * 100, i * 100 + 4, i * 100 + 8)]
    assert made[Key("fused", "step")].equal
    assert len(made[Key("fused", "step")].olds) == 4


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda h: h.pop(Key("1.up")), Damaged, "1.up is not there"),
        (lambda h: h.update({Key("1.up"): whole("1.up", (2, 5))}), Damaged, "should be (2, 3)"),
        (lambda h: h.update({Key("1.up"): whole("1.up", (2, 3), dtype=BY_NAME["bfloat16"])}), Unsupported, "two types"),
        (lambda h: h.update({Key("1.up", "m"): whole("1.up", (2, 3), "m")}), Unsupported, "0.gate has none"),
        (lambda h: h.update({Key(n, "m"): whole(n, (2,), "m") for n in names(2)}), Unsupported, "does not follow"),
        (lambda h: h.update({Key("fused"): whole("fused", (1,))}), Unsupported, "both be called fused"),
    ],
)
def test_what_cannot_be_put_together_is_refused_by_name(change, error, word):
    held = {Key(n): whole(n, (2, 3)) for n in names(2)}
    change(held)
    with pytest.raises(error) as caught:
        remade(held, from_hub([stacked(2, 2, 3)]))
    assert word in caught.value.what


def names(experts):
    return [f"{e}.{w}" for e in range(experts) for w in ("gate", "up")]


def test_a_state_of_one_number_is_a_scalar_only_where_its_parameter_is_larger():
    native = Native(
        "n", (2,), tuple(Part(Key(h), (2,), (i,), (1,), (1,), (0,), (0,)) for i, h in enumerate("ab")), ((1,), (1,))
    )
    held = {Key(h, k): whole(h, (1,), k, i * 8) for i, h in enumerate("ab") for k in ("weight", "exp_avg")}
    made = remade(held, from_hub([native]))
    assert read(made[Key("n", "exp_avg")].tensor) == [0, 8]


def test_a_renamed_tensor_keeps_its_pieces_and_any_state():
    held = {Key("a"): whole("a", (4, 6)), Key("a", "row_sum"): whole("a", (4,), "row_sum")}
    made = remade(held, to_hub([Native.renamed("a", "b", (4, 6))]))
    assert made[Key("b")].tensor.pieces is held[Key("a")].pieces
    assert made[Key("b", "row_sum")].tensor.shape == (4,)


def test_names_may_change_places():
    held = {Key("a"): whole("a", (2,)), Key("b"): whole("b", (2,), at=100)}
    made = remade(held, to_hub([Native.renamed("a", "b", (2,)), Native.renamed("b", "a", (2,))]))
    assert read(made[Key("a")].tensor) == [100, 104]
    assert read(made[Key("b")].tensor) == [0, 4]


def test_groups_keep_their_order_and_list_parts_in_place():
    optimizer = Optimizer((Group(("x", "fused", "y"), {"lr": 1}), Group(("z",), {})), {("fused", "count"): 3})
    found = regrouped(optimizer, to_hub([stacked(2)]))
    assert [g.params for g in found.groups] == [("x", *names(2), "y"), ("z",)]
    assert found.scalars == {(n, "count"): 3 for n in names(2)}
    back = regrouped(found, from_hub([stacked(2)]))
    assert back == optimizer


def test_parts_in_several_groups_or_with_other_scalars_make_no_parameter():
    apart = Optimizer((Group(tuple(names(2)[:3]), {}), Group(("1.up",), {})))
    with pytest.raises(Unsupported, match="not in one param group"):
        regrouped(apart, from_hub([stacked(2)]))
    other = Optimizer((), {(n, "count"): i == 3 for i, n in enumerate(names(2))})
    with pytest.raises(Unsupported, match="count is not the same"):
        regrouped(other, from_hub([stacked(2)]))


def test_weights_stored_as_masters_are_put_together_as_what_is_stored():
    bf16 = BY_NAME["bfloat16"]
    parts_ = {Key(n): replace(whole(n, (2, 5), at=40 * i), dtype=bf16, cast_from=F32) for i, n in enumerate(names(3))}
    made = remade(parts_, from_hub([stacked()]))[Key("fused")].tensor
    assert (made.dtype, made.held) == (bf16, F32)
    assert sorted(p.start for t in made.pieces for p in t) == [40 * i for i in range(6)]
    assert {s for t in made.pieces for p in t for s in p.strides[-1:]} == {4}
    mixed = {**parts_, Key("0.gate"): replace(parts_[Key("0.gate")], cast_from=None)}
    with pytest.raises(Unsupported, match="would be of two types"):
        remade(mixed, from_hub([stacked()]))
