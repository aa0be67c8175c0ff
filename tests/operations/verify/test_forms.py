"""In which type two sides' states are compared: rounded where the narrower has a master, widened else."""

from __future__ import annotations

import pytest

from ckptctl.core.checkpoint import Checkpoint
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.tensor import InOnePlace, Key, Tensor
from ckptctl.operations.verify.forms import alone, together
from ckptctl.operations.verify.sides import Side


def side(ties=None, **tensors):
    """Tensors by kind: (dtype, shape) of the one parameter `w`."""
    made = {}
    for name, (dtype, shape) in tensors.items():
        key = Key("w", name) if "__" not in name else Key(*name.split("__"))
        made[key] = Tensor(key, BY_NAME[dtype], shape, InOnePlace(shape, BY_NAME[dtype].itemsize, 0, 0))
    return Side("x", Checkpoint("torch", "", "x", (), made, ties=ties or {}), "")


def forms(a, b, **more):
    left, right, unlike = together(a, b, ({}, {}), None, **more)
    return (
        {k: (key.kind, form) for (_, k), (key, form) in left.taken.items()},
        {k: (key.kind, form) for (_, k), (key, form) in right.taken.items()},
        [(u.kind, u.what) for u in unlike],
    )


F32, BF16, F16 = (("float32", (2, 3)), ("bfloat16", (2, 3)), ("float16", (2, 3)))


@pytest.mark.parametrize(
    ("a", "b", "left", "right"),
    [
        (side(weight=F32), side(weight=F32), {"weight": ("weight", "float32")}, {"weight": ("weight", "float32")}),
        (
            side(weight=BF16, master=F32),
            side(weight=F32),
            {"weight": ("weight", "bfloat16"), "master": ("master", "float32")},
            {"weight": ("weight", "bfloat16"), "master": ("weight", "float32")},
        ),
        (side(weight=BF16), side(weight=F32), {"weight": ("weight", "float32")}, {"weight": ("weight", "float32")}),
        (
            side(weight=BF16),
            side(weight=BF16, master=F32),
            {"weight": ("weight", "bfloat16"), "master": ("weight", "float32")},
            {"weight": ("weight", "bfloat16"), "master": ("master", "float32")},
        ),
        (side(weight=BF16), side(weight=F16), {"weight": ("weight", "float32")}, {"weight": ("weight", "float32")}),
        (
            side(weight=F32, exp_avg=BF16),
            side(weight=F32, exp_avg=F32),
            {"weight": ("weight", "float32"), "exp_avg": ("exp_avg", "float32")},
            {"weight": ("weight", "float32"), "exp_avg": ("exp_avg", "float32")},
        ),
    ],
)
def test_forms(a, b, left, right):
    assert forms(a, b) == (left, right, [])


def test_what_headers_show_is_told():
    assert forms(side(weight=F32, exp_avg=F32), side(weight=F32))[2] == [("exp_avg", "only-in-a")]
    assert forms(side(weight=F32), side(weight=("float32", (3, 2))))[2] == [("weight", "shape")]
    assert forms(side(weight=F32), side(weight=("int8", (2, 3))))[2] == [("weight", "dtype")]


def test_rounded_weights_are_compared_in_the_narrower_type():
    left, right, _ = forms(side(weight=F32), side(weight=BF16), rounded=True)
    assert left["weight"][1] == right["weight"][1] == "bfloat16"


def test_a_second_name_stands_for_the_first():
    a = side(head__weight=F32)
    found = alone(a, {"head": "w"}, None)
    assert list(found.taken) == [("w", "weight")]
