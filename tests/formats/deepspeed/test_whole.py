"""An optimizer that is not partitioned: float32 weights that do not fit its groups are refused, never left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.core.checkpoint import MASTER, Group
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key
from ckptctl.core.values import Storage, TensorRef
from ckptctl.formats.bytesource import HeldBytes
from ckptctl.formats.deepspeed.opened import Opened, Pile
from ckptctl.formats.deepspeed.whole import joined_experts, of_optimizer
from ckptctl.formats.deepspeed.zero import Native

SHAPES = {"a": (2, 3), "b": (4,)}


def tensor(*shape):
    strides = (3, 1) if len(shape) == 2 else (1,)
    return TensorRef(
        Storage("0", BY_NAME["float32"], 6, start_byte=0, nbytes=24), BY_NAME["float32"], 0, shape, strides
    )


def masters_of(fp32_groups, experts=None, key="fp32_groups"):
    groups = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2, "moe": experts is not None}]
    state = {i: {"exp_avg": tensor(*shape)} for i, shape in enumerate(SHAPES.values())}
    tree = {"optimizer_state_dict": {"state": state, "param_groups": groups}, key: fp32_groups}
    file = Opened("file", 0, tree, HeldBytes(b"", "file"), Pile(Path()))
    shapes = SHAPES if experts is None else {"a": SHAPES["a"]}
    native, _ = of_optimizer(file, tree, shapes, (), experts)
    return {k.name for k in native.tensors if k.kind == MASTER}


@pytest.mark.parametrize("experts", [None, {"b": (4,)}])
def test_every_group_has_its_float32_weights(experts):
    assert masters_of([[tensor(2, 3)], [tensor(4)]], experts) == {"a", "b"}
    assert masters_of(None, experts) == set()


WRONG = {
    "a group short": [[tensor(2, 3)]],
    "a group too many": [[tensor(2, 3)], [tensor(4)], []],
    "no list": {0: [tensor(2, 3)]},
    "no list in it": [[tensor(2, 3)], tensor(4)],
    "a weight short": [[tensor(2, 3)], []],
    "no tensor": [[tensor(2, 3)], [None]],
    "another shape": [[tensor(2, 3)], [tensor(3)]],
}


@pytest.mark.parametrize("experts", [None, {"b": (4,)}])
@pytest.mark.parametrize("groups", WRONG.values(), ids=WRONG)
def test_float32_weights_that_do_not_fit_the_groups_are_refused(groups, experts):
    with pytest.raises(Damaged):
        masters_of(groups, experts)


def test_expert_ranks_of_different_groups_are_refused():
    one, two = Native(groups=[Group(("a",), {})]), Native(groups=[Group(("a",), {}), Group(("b",), {})])
    one.tensors[Key("a", MASTER)] = two.tensors[Key("a", MASTER)] = None
    with pytest.raises(Damaged, match="groups"):
        joined_experts([one, two], "here")
