"""Runs: which bytes a tensor's elements are, in order or not; what is read by them is what the planner reads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.tensor import Key, Piece, PieceTable, Tensor
from ckptctl.operations.checks.values import _FLOATS, Seen
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.runs import Run, in_order, runs_of
from ckptctl.operations.tensors import TensorReader
from ckptctl.operations.turns import PART_NBYTES, Part, in_turn, parts_of
from tests.support.checkpoints import ckpt

F32 = BY_NAME["float32"]


def tensor(shape, *pieces, view=None):
    """pieces: (lo, size, source, start, strides)."""
    rows = [Piece(view or shape, lo, size, source, start, strides) for lo, size, source, start, strides in pieces]
    return Tensor(Key("w"), F32, shape, (PieceTable.of(rows, 4),) if rows else ())


def test_row_shards_are_in_order_whatever_file_comes_first():
    t = tensor((5, 3), ((3, 0), (2, 3), 0, 40, (12, 4)), ((0, 0), (3, 3), 1, 8, (12, 4)))
    assert runs_of(t) == (Run(0, 9, 1, 8), Run(9, 6, 0, 40))
    assert in_order(runs_of(t), 15)


def test_column_shards_are_all_there_in_another_order():
    t = tensor((4, 6), ((0, 0), (4, 3), 0, 0, (12, 4)), ((0, 3), (4, 3), 1, 0, (12, 4)))
    assert [r.first for r in runs_of(t)] == [-1, -1]
    assert not in_order(runs_of(t), 24)


def test_one_row_of_columns_is_a_run():
    t = tensor((1, 6), ((0, 0), (1, 4), 0, 0, (16, 4)), ((0, 4), (1, 2), 1, 0, (8, 4)))
    assert [r.first for r in runs_of(t)] == [0, 4]


@pytest.mark.parametrize(
    "t",
    [
        tensor((2, 3), ((0, 0), (2, 3), 0, 0, (4, 8))),  # transposed
        tensor((2, 3), ((0, 0), (2, 3), 0, 0, (16, 4))),  # rows with something between them
        tensor((256, 4), *(((i, 0), (1, 4), 0, 32 * i, (16, 4)) for i in range(256))),  # many short ones
    ],
)
def test_what_lies_otherwise_is_left_to_the_planner(t):
    assert runs_of(t) is None


def test_no_element_and_no_axis():
    assert runs_of(tensor((), ((), (), 2, 12, ()))) == (Run(0, 1, 2, 12),)
    assert runs_of(tensor((0, 3), ((0, 0), (0, 3), 0, 0, (12, 4)))) == ()


@pytest.mark.parametrize(
    "name",
    ["torch/fsdp2_tp2x2_dcp", "torch/fsdp2_dp4_dcp", "deepspeed/zero3-dp2-bf16-qwen2-tied", "torch/verl_fsdp2",
     "hf/qwen2-trainer", "torch/plain_legacy", "megatron/dist_tp1pp2_vpp2"],
)  # fmt: skip
def test_blocks_are_what_the_planner_reads(name):
    try:
        path = ckpt(name)
    except FileNotFoundError:
        pytest.skip("not among the fixtures")
    checkpoint, _ = open_checkpoint(path)
    buffer = np.empty(1000, np.uint8)
    straight = 0
    with TensorReader(checkpoint) as reader:
        for key, t in list(checkpoint.tensors.items())[::5]:
            if t.why_unsupported or t.made:
                continue
            straight += reader.in_order(key) is not None
            for start, stop in ((0, t.numel), (t.numel // 3, t.numel - t.numel // 5)):
                want = reader.run(key, start, stop).tobytes()
                parts = [(at, data.tobytes()) for at, data in reader.blocks(key, start, stop, buffer)]
                assert b"".join(data for _, data in parts) == want
                assert [at for at, _ in parts] == list(range(start, stop, 1000 // t.dtype.itemsize))[: len(parts)]
            if reader.is_unordered(key):
                whole = b"".join(d.tobytes() for d in reader.unordered(key, buffer))
                bits = np.dtype(f"u{t.dtype.itemsize}")
                both = (np.sort(np.frombuffer(x, bits)) for x in (whole, reader.run(key, 0, t.numel).tobytes()))
                assert np.array_equal(*both)
    assert straight


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1.5, -3.0, 240.0, np.nan, np.inf, -np.inf, 1e15, 1.01e15, -2e15, 3e30]


@pytest.mark.parametrize("name", sorted(_FLOATS))
@pytest.mark.parametrize("seed", range(12))
def test_what_is_seen_is_what_floats_say(name, seed):
    rng = np.random.default_rng(seed)
    kind = BY_NAME[name].numpy
    values = rng.standard_normal(rng.integers(1, 90)) * 0.02
    if seed % 3 == 0:
        values = np.full_like(values, rng.choice(SPECIAL))
    elif seed % 3 == 1:
        values[rng.integers(0, len(values), 3)] = rng.choice(SPECIAL, 3)
    with np.errstate(all="ignore"):
        data = values.astype(np.float64).astype(kind)
        wide = data.astype(np.float64)
    seen, cut = Seen(), int(rng.integers(0, len(data)))
    for start, part in ((0, data[:cut]), (cut, data[cut:])):
        one = Seen()
        if len(part):
            one.take(part.view(np.uint8), _FLOATS[name], start)
            seen.add(one)
    odd, finite = ~np.isfinite(wide), np.abs(wide[np.isfinite(wide)])
    bits = data.view(f"u{kind.itemsize}")
    assert seen.count == len(data)
    assert (seen.nans, seen.infinities) == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    assert seen.first_odd == (int(odd.argmax()) if odd.any() else -1)
    assert seen.is_zero == (not wide.any())
    assert seen.is_constant == bool((bits == bits[0]).all())
    if not odd.any():
        assert seen.is_negative == bool((wide < 0).any())
    is_absurd = seen.largest >= _FLOATS[name].absurd
    assert is_absurd == bool((finite > 1e15).any())
    if is_absurd:
        assert np.array([seen.largest], f"u{kind.itemsize}").view(kind).astype(np.float64)[0] == finite.max()


def test_parts_cover_every_element_once():
    big = Tensor(Key("big"), F32, (PART_NBYTES // 4 + 1,), ())
    tensors = {t.key: t for t in (big, Tensor(Key("empty"), F32, (0, 3), ()), Tensor(Key("one"), F32, (), ()))}
    parts = list(parts_of(tensors, tensors))
    assert [(p.key.name, p.start, p.stop, p.is_last) for p in parts] == [
        ("big", 0, PART_NBYTES // 4, False), ("big", PART_NBYTES // 4, PART_NBYTES // 4 + 1, True),
        ("empty", 0, 0, True), ("one", 0, 1, True),
    ]  # fmt: skip


def test_results_come_in_order_and_an_error_ends_it():
    parts = [Part(Key(str(i)), 0, 1, PART_NBYTES, True) for i in range(200)]
    threads = set()

    def work(part):
        threads.add(threading.get_ident())
        time.sleep(0.001 * (int(part.key.name) % 3))
        if part.key.name == "150":
            raise ValueError("150")
        return int(part.key.name)

    got = []
    with ThreadPoolExecutor(3) as pool, pytest.raises(ValueError, match="150"):
        got.extend(number for _, number in in_turn(pool, work, parts))
    with ThreadPoolExecutor(3) as pool:
        assert [n for _, n in in_turn(pool, work, parts[:150])] == list(range(150))
    assert len(threads) > 1
