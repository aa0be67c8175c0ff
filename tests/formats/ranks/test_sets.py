"""Ranks' files made by hand: every way to cut, meshes of several torch versions, and what must be refused."""

from __future__ import annotations

import numpy as np
import pytest

import ckptctl
from ckptctl.core.errors import CkptError
from ckptctl.formats.ranks.files import rank_files
from tests.support.commands import document, good, refused
from tests.support.saving import Strided, adamw, arange
from tests.support.slices import (
    dtensor,
    line,
    mesh,
    old_mesh,
    replicate,
    rows,
    save_ranks,
    shard,
    sharded,
    strided,
    thing,
)


def read(folder, name="w", kind="weight"):
    with ckptctl.open(folder) as view:
        return (view[name] if kind == "weight" else view.state(name, kind)).numpy().copy()


def code(folder):
    with pytest.raises(CkptError) as caught:
        read(folder)
    return caught.value.code


def on_rows(array, world, on=line, **more):
    """By rank: the array cut on axis 0."""
    return lambda r: {"w": dtensor(rows(array, world, r), array.shape, [shard(0)], on(r, world), **more)}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(5, 3), (1,), (2, 2, 2), (12,), (0, 3)])
def test_rows_over_ranks_some_of_them_without_any(world, shape, tmp_path):
    array = arange(*shape)
    got = read(save_ranks(tmp_path / "set", world, on_rows(array, world)))
    assert (got.shape, got.tobytes()) == (shape, array.tobytes())


def test_columns_and_bits_of_nan(tmp_path):
    array = np.array([[0x7FC00001, 0x80000000, 1], [0xFF800000, 0x7F800001, 2]], np.uint32).view(np.float32)
    cuts = [np.ascontiguousarray(array[:, :2]), np.ascontiguousarray(array[:, 2:])]
    folder = save_ranks(tmp_path / "set", 2, lambda r: {"w": dtensor(cuts[r], (2, 3), [shard(1)], line(r, 2))})
    assert read(folder).tobytes() == array.tobytes()


def test_fsdp_over_tp_with_odd_rows(tmp_path):
    array = arange(9, 2)  # TP: 5 and 4 rows; FSDP over 4: 2, 2, 1, 0 and 1, 1, 1, 1
    by_tp = [array[:5], array[5:]]

    def tree(r):
        dp, tp = divmod(r, 2)
        on = mesh(r, (4, 2), (2, 1), list(range(8)))
        return {"w": dtensor(rows(by_tp[tp], 4, dp), (9, 2), [strided(0, 2), shard(0)], on)}

    assert read(save_ranks(tmp_path / "set", 8, tree)).tobytes() == array.tobytes()


def test_tp_on_columns_and_fsdp_on_rows_with_some_tensors_on_one_axis_of_the_mesh(tmp_path):
    array, norm = arange(5, 6), arange(5)

    def tree(r):
        dp, tp = divmod(r, 2)
        local = np.ascontiguousarray(rows(array, 2, dp)[:, 3 * tp : 3 * tp + 3])
        on, own = mesh(r, (2, 2), (2, 1), [0, 1, 2, 3]), mesh(r, (2,), (2,), [0, 1, 2, 3])
        return {
            "w": dtensor(local, (5, 6), [shard(0), shard(1)], on),
            "norm": dtensor(rows(norm, 2, dp), (5,), [shard(0)], own),
        }

    folder = save_ranks(tmp_path / "set", 4, tree)
    assert read(folder).tobytes() == array.tobytes()
    assert read(folder, "norm").tobytes() == norm.tobytes()


def hybrid(array, other=None):
    """HSDP on 2 x 2 ranks; rank 3 may hold something else."""

    def tree(r):
        local = rows(array if other is None or r != 3 else other, 2, r % 2)
        return {"w": dtensor(local, array.shape, [replicate(), shard(0)], mesh(r, (2, 2), (2, 1), [0, 1, 2, 3]))}

    return tree


def test_replicas_that_agree_and_replicas_that_differ(tmp_path):
    array = arange(5, 2)
    assert read(save_ranks(tmp_path / "good", 4, hybrid(array))).tobytes() == array.tobytes()
    other = array.copy()
    other[4, 1] = -1
    assert code(save_ranks(tmp_path / "bad", 4, hybrid(array, other))) == "replica-mismatch"


def test_replicas_without_checksums_are_compared_by_value(tmp_path):
    array = arange(4, 2)

    def tree(other):
        def of(r):
            whole = arange(6, 2, start=7) if other and r == 1 else np.concatenate([array, array[:2]])
            return {"w": dtensor_of(Strided(whole, 0, (4, 2), (2, 1)), (4, 2), r)}

        return of

    def dtensor_of(view, shape, r):
        return dtensor(view, shape, [replicate()], line(r, 2), dtype="float32")

    assert read(save_ranks(tmp_path / "good", 2, tree(False))).tobytes() == array.tobytes()
    assert code(save_ranks(tmp_path / "bad", 2, tree(True))) == "replica-mismatch"


def test_meshes_as_torch_before_2_9_kept_them(tmp_path):
    array = arange(5, 2)
    with_place = on_rows(array, 2, lambda r, w: old_mesh([r], list(range(w))))
    by_name = on_rows(array, 2, lambda r, w: old_mesh(None, list(range(w))))
    assert read(save_ranks(tmp_path / "a", 2, with_place)).tobytes() == array.tobytes()
    assert read(save_ranks(tmp_path / "b", 2, by_name)).tobytes() == array.tobytes()
    wrong = on_rows(array, 2, lambda r, w: old_mesh([5], list(range(w))))
    assert code(save_ranks(tmp_path / "c", 2, wrong)) == "placement-damaged"


def test_two_plain_shards_of_one_axis_are_taken_only_with_their_order(tmp_path):
    array = arange(8, 1)

    def tree(order, first):
        def of(r):
            axes = divmod(r, 2)
            a, b = axes if first == 0 else axes[::-1]
            local = rows(rows(array, 2, a), 2, b)
            on = mesh(r, (2, 2), (2, 1), [0, 1, 2, 3])
            return {"w": dtensor(local, (8, 1), [shard(0), shard(0)], on, order=order)}

        return of

    assert code(save_ranks(tmp_path / "unknown", 4, tree(None, 0))) == "placement-order"
    left = save_ranks(tmp_path / "left", 4, tree(((0, (0, 1)),), 0))
    right = save_ranks(tmp_path / "right", 4, tree(((0, (1, 0)),), 1))
    assert read(left).tobytes() == read(right).tobytes() == array.tobytes()
    assert code(save_ranks(tmp_path / "wrong", 4, tree(((0, (0, 2)),), 0))) == "placement-damaged"


def test_sharded_tensors_by_their_own_offsets(tmp_path):
    array = arange(5, 2)
    every = [([0, 0], [3, 2]), ([3, 0], [2, 2])]
    parts = [array[:3], array[3:]]

    def tree(r):
        return {"w": sharded([(every[r][0], np.ascontiguousarray(parts[r]))], (5, 2), every, r)}

    assert read(save_ranks(tmp_path / "set", 2, tree)).tobytes() == array.tobytes()
    lost = lambda r: {"w": sharded([], (5, 2), every, r)} if r else tree(r)  # noqa: E731
    assert code(save_ranks(tmp_path / "lost", 2, lost)) == "tensor-incomplete"
    outside = lambda r: {"w": sharded([([4, 0], np.ascontiguousarray(parts[r]))], (5, 2), every, r)}  # noqa: E731
    assert code(save_ranks(tmp_path / "outside", 2, outside)) == "placement-damaged"


def test_plain_tensors_beside_slices_are_copies_and_compared(tmp_path):
    array, buffer = arange(4, 2), arange(3)

    def tree(r, last=2.0):
        inv = buffer.copy()
        inv[2] = last
        return {**on_rows(array, 2)(r), "inv_freq": inv}

    folder = save_ranks(tmp_path / "set", 2, tree)
    assert read(folder, "inv_freq").tobytes() == buffer.tobytes()
    bad = save_ranks(tmp_path / "bad", 2, lambda r: tree(r, 2.0 + r))
    assert code(bad) == "replica-mismatch"


def test_nothing_but_plain_tensors_is_never_decided_by_value(tmp_path):
    same = save_ranks(tmp_path / "same", 2, lambda _: {"norm": np.ones(4, np.float32)})
    assert refused("inspect", same)["code"] == "ranks-plain"
    one = save_ranks(tmp_path / "one", 1, lambda _: {"w": np.ones(4, np.float32)})
    assert read(one).tobytes() == np.ones(4, np.float32).tobytes()


def adam(array, world, r, step=3.0):
    entry = {
        k: dtensor(rows(array + i, world, r), array.shape, [shard(0)], line(r, world))
        for i, k in enumerate(("exp_avg", "exp_avg_sq"))
    }
    entry["step"] = np.array(step, np.float32)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}
    return {"state": {0: entry}, "param_groups": [group]}


def trained(array, world, r, **more):
    return {"model": on_rows(array, world)(r), "optimizer": adam(array, world, r), "epoch": 2} | more


def test_a_training_state_a_rank_with_the_model_and_the_optimizer_in_files_of_their_own(tmp_path):
    array = arange(5, 2)
    folder = save_ranks(tmp_path / "set", 2, lambda r: on_rows(array, 2)(r), "model_rank{}.pt")
    save_ranks(folder, 2, lambda r: adam(array, 2, r), "optim_rank{}.pt")
    save_ranks(folder, 2, lambda r: {"rng": {"seed": r}, "epoch": 2}, "rest-rank-{}.pt")
    assert read(folder, "w", "exp_avg_sq").tobytes() == (array + 1).tobytes()
    with ckptctl.open(folder) as view:
        assert (view.step, dict(view.values)) == (
            3,
            {"epoch": 2, "rng": {"rank_0": {"seed": 0}, "rank_1": {"seed": 1}}},
        )


@pytest.mark.parametrize(
    "second",
    [
        {"epoch": 3},
        {"lr_scheduler": {"last_epoch": 4}},
        {"optimizer": adam(arange(5, 2), 2, 1, step=4.0)},
        {"optimizer": {**adam(arange(5, 2), 2, 1), "param_groups": [{"lr": 0.2, "betas": (0.9, 0.99), "params": [0]}]}},
    ],
)
def test_ranks_of_two_steps(second, tmp_path):
    def tree(r):
        state = trained(arange(5, 2), 2, r, lr_scheduler={"last_epoch": 3})
        return state | second if r else state

    assert code(save_ranks(tmp_path / "set", 2, tree)) == "ranks-mixed"


def test_ranks_with_other_tensors_or_other_shapes(tmp_path):
    array = arange(4, 2)
    more = save_ranks(tmp_path / "a", 2, lambda r: {**on_rows(array, 2)(r), **({"b": arange(2)} if r else {})})
    shape = save_ranks(tmp_path / "b", 2, lambda r: on_rows(arange(4, 2 + r), 2)(r))
    dtype = save_ranks(tmp_path / "c", 2, lambda r: on_rows(array.astype(np.float64) if r else array, 2)(r))
    assert [code(p) for p in (more, shape, dtype)] == ["ranks-differ"] * 3


def test_gaps_and_missing_ends_of_a_set(tmp_path):
    array = arange(6, 2)
    gap = save_ranks(tmp_path / "gap", 3, on_rows(array, 3))
    (gap / "rank1.pt").unlink()
    end = save_ranks(tmp_path / "end", 3, on_rows(array, 3))
    (end / "rank2.pt").unlink()
    assert [code(p) for p in (gap, end)] == ["rank-missing"] * 2
    assert "rank 2" in refused("inspect", end)["what"]


@pytest.mark.parametrize(
    ("placements", "on", "expected"),
    [
        ([shard(-1)], line(0, 2), "placement-damaged"),
        ([shard(2)], line(0, 2), "placement-damaged"),
        ([shard(10**30)], line(0, 2), "placement-damaged"),
        ([shard("0")], line(0, 2), "placement-damaged"),
        ([shard(True)], line(0, 2), "placement-damaged"),
        ([strided(0, 0)], line(0, 2), "placement-damaged"),
        ([strided(0, 10**30)], line(0, 2), "placement-damaged"),
        ([strided(0, 2)], line(0, 2), "placement-order"),
        ([], line(0, 2), "placement-damaged"),
        ([shard(0), shard(0)], line(0, 2), "placement-damaged"),
        ([dtensor(arange(1), (1,), [], line(0, 1))], line(0, 2), "placement-damaged"),
        ([shard(0)], mesh("0", (2,), (1,), [0, 1]), "placement-damaged"),
        ([shard(0)], mesh(5, (2,), (1,), [0, 1]), "placement-damaged"),
        ([shard(0)], mesh(0, (-2,), (1,), [0, 1]), "placement-damaged"),
        ([shard(0)], mesh(0, (1 << 70,), (1,), [0, 1]), "placement-damaged"),
        ([shard(0)], mesh(0, (2,), (None,), [0, 1]), "placement-damaged"),
        ([shard(0)], mesh(0, (2,), (1,), [0, 0]), "placement-damaged"),
        ([shard(0)], mesh(0, (2,), (1,), [0, -1]), "placement-damaged"),
        ([shard(0)], mesh(0, (2,), (1,), []), "placement-damaged"),
        ([shard(0)], mesh(0, (4,), (1,), [0, 1, 2, 3]), "shard-shape-mismatch"),
        ([replicate()], line(0, 2), "shard-shape-mismatch"),
    ],
)
def test_hostile_placements_and_meshes(placements, on, expected, tmp_path):
    array = arange(4, 2)
    folder = save_ranks(tmp_path / "set", 2, lambda r: {"w": dtensor(rows(array, 2, r), (4, 2), placements, on)})
    assert code(folder) == expected


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, -2), "bad-shape"), ((1 << 40, 1 << 40), "size-overflow"), ("ab", "bad-shape")]
)
def test_hostile_shapes(shape, expected, tmp_path):
    folder = save_ranks(tmp_path / "set", 1, lambda r: {"w": dtensor(arange(4, 2), shape, [shard(0)], line(r, 1))})
    assert code(folder) == expected


def test_partial_sums_and_unknown_placements(tmp_path):
    partial = thing("torch.distributed.tensor.placement_types.Partial", {"reduce_op": "sum"})
    odd = thing("torch.distributed.tensor.placement_types.Other", {})
    for name, p, expected in (("a", partial, "unsupported"), ("b", odd, "placement-damaged")):
        folder = save_ranks(tmp_path / name, 1, lambda r, p=p: {"w": dtensor(arange(4), (4,), [p], line(r, 1))})
        assert code(folder) == expected


def test_slices_outside_model_and_optimizer_are_refused(tmp_path):
    array = arange(4, 2)
    folder = save_ranks(tmp_path / "set", 2, lambda r: trained(array, 2, r, extra={"x": on_rows(array, 2)(r)["w"]}))
    error = refused("inspect", folder)
    assert (error["code"], "cut over ranks" in error["what"]) == ("unsupported", True)


def test_names_of_sets_of_other_frameworks_are_no_ranks_files(tmp_path):
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "frank0.pt", "ranks.pt"):
        (tmp_path / name).write_bytes(b"")
    assert rank_files(tmp_path) is None
    (tmp_path / "run-Rank_07.pth").write_bytes(b"")
    assert rank_files(tmp_path).parts == {"run-*": {7: "run-Rank_07.pth"}}


def test_many_ranks_cost_rows_and_no_objects(tmp_path):
    array = arange(300, 2)
    folder = save_ranks(tmp_path / "set", 150, on_rows(array, 150))
    found = document("inspect", folder)
    assert found["layout"]["world_size"] == 150
    assert read(folder).tobytes() == array.tobytes()


def test_flat_state_beside_weights_cut_in_columns_is_refused(tmp_path):
    """In the order of ranks columns are not the flattened parameter."""
    array = arange(2, 4)

    def tree(r):
        local = np.ascontiguousarray(array[:, 2 * r : 2 * r + 2])
        weight = dtensor(local, (2, 4), [shard(1)], line(r, 2))
        moments = {"exp_avg": local.ravel(), "step": np.array(1, np.float32)}
        return {"model": {"w": weight}, "optimizer": {**adamw([0], {}), "state": {0: moments}}}

    folder = save_ranks(tmp_path / "set", 2, tree)
    error = refused("inspect", folder)
    assert (error["code"], "axis 0" in error["why"]) == ("wrapping", True)


def test_flat_state_of_units_that_no_wrapping_gives_leaves_the_weights_readable(tmp_path):
    array = arange(4, 2)

    def tree(r):
        moments = {"exp_avg": arange(7, start=r), "step": np.array(1, np.float32)}
        return {"model": on_rows(array, 2)(r), "optimizer": {**adamw([0], {}), "state": {0: moments}}}

    folder = save_ranks(tmp_path / "set", 2, tree)
    assert read(folder).tobytes() == array.tobytes()
    error = refused("convert", folder, tmp_path / "out.pt", "--to", "torch")
    assert (error["code"], "no way to wrap" in error["why"]) == ("param-order", True)
    good("convert", folder, tmp_path / "out", "--to", "hf", "--no-optimizer")


def test_optimizer_state_that_is_plain_where_weights_are_cut_is_no_copy(tmp_path):
    """Equal values on every rank would pass for copies: zeros at the first step, for example."""
    array = arange(4, 2)

    def tree(r):
        moments = {"exp_avg": np.zeros((2, 2), np.float32), "step": np.array(1, np.float32)}
        return {"model": on_rows(array, 2)(r), "optimizer": {**adamw([0], {}), "state": {0: moments}}}

    folder = save_ranks(tmp_path / "set", 2, tree)
    assert refused("inspect", folder)["code"] == "ranks-plain"


def test_two_optimizers_stay_two(tmp_path):
    one, two = arange(4, 2), arange(6, 3, start=50)

    def tree(r):
        cut = {n: dtensor(rows(a, 2, r), a.shape, [shard(0)], line(r, 2)) for n, a in (("g.w", one), ("d.w", two))}
        each = [
            {"state": {n: {"exp_avg": cut[n], "step": 3}}, "param_groups": [{"params": [n], "lr": 0.5}]} for n in cut
        ]
        return {"model": cut, "optimizers": each}

    folder = save_ranks(tmp_path / "set", 2, tree)
    assert [g["optimizer"] for g in document("inspect", folder)["groups"]] == [0, 1]
