"""Which experts an expert-parallel rank has, and which piece of them a data-parallel rank holds: by hand."""

from __future__ import annotations

import pytest

from ckptctl.core.checkpoint import Group
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.deepspeed.teams import counts, expert_groups, team

A, B = "a.moe.deepspeed_moe.experts.deepspeed_experts.", "b.moe.deepspeed_moe.experts.deepspeed_experts."
NAMES = [f"{layer}{e}.{w}" for layer in (A, B) for e in range(4) for w in ("up", "down")]
HALVES = [n for r in (0, 1) for n in NAMES if int(n.split(".")[-2]) // 2 == r]
"""The order of a run over two expert-parallel ranks, one after the other."""


def test_a_dense_group_is_every_rank_s():
    assert team(["x", "y"], 4, 2, 3).names == ("x", "y")
    assert (team(["x"], 4, 2, 3).dp, team(["x"], 4, 2, 3).rank) == (4, 3)


def test_neighbours_have_different_experts_under_numbers_from_zero():
    (group,) = expert_groups([Group(tuple(HALVES), {"moe": True})], 4, 2)
    third = team(group.params, 4, 2, 3)
    assert third.names == tuple(f"{layer}{e}.{w}" for layer in (A, B) for e in (2, 3) for w in ("up", "down"))
    assert third.local == tuple(f"{layer}{e}.{w}" for layer in (A, B) for e in (0, 1) for w in ("up", "down"))
    assert (third.dp, third.rank) == (2, 1)
    assert team(group.params, 4, 2, 0).names[0] == f"{A}0.up"


def test_a_group_says_its_size():
    (group,) = expert_groups([Group(tuple(HALVES), {"moe": True, "lr": 1.0})], 4, 4)
    assert dict(group.options) == {"moe": True, "lr": 1.0, "name": "ep_size_4"}
    assert group.params == tuple(NAMES)


def test_a_group_made_new_has_experts_apart():
    dense, experts = expert_groups([Group(("x", *NAMES, "y"), {})], 2, 1)
    assert dense.params == ("x", "y")
    assert experts.params == tuple(NAMES)


def test_an_order_that_is_not_the_modules_is_refused():
    names = [n for n in NAMES if n.endswith("up")] + [n for n in NAMES if n.endswith("down")]
    with pytest.raises(MissingFact, match="another order"):
        expert_groups([Group(tuple(names), {"moe": True})], 2, 1)


def test_a_hole_in_the_experts_is_refused():
    with pytest.raises(Unsupported, match="not all of them"):
        counts([n for n in NAMES if not n.startswith(f"{A}1")])
