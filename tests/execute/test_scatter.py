"""Strided boxes against NumPy's own indexing, and how much of a source is read for them."""

import random

import numpy as np
import pytest

from ckptctl.core.tensor import dense_strides
from ckptctl.core.view import unit_slices
from ckptctl.execute.gather import gather
from ckptctl.execute.scatter import parts, place
from ckptctl.plan.steps import Extent, Move


def boxes(move):
    """{destination byte: source byte} of every byte of a move, one by one."""
    out = {}
    for index in unit_slices(move.size):
        a = move.src + sum(i * s for i, s in zip(index, move.src_strides, strict=True))
        b = move.dst + sum(i * s for i, s in zip(index, move.dst_strides, strict=True))
        out.update({b + k: a + k for k in range(move.item)})
    return out


def stretch(move):
    return sum((n - 1) * s for n, s in zip(move.size, move.src_strides, strict=True)) + move.item


def random_move(rng, largest=6):
    """A box with nested strides on either side, each in its own order of axes."""
    k = rng.randint(0, 4)
    item = rng.choice([1, 2, 3, 4, 8, 16])
    size = tuple(rng.randint(1, largest) for _ in range(k))

    def strides():
        order, step, out = list(range(k)), item, [0] * k
        rng.shuffle(order)
        for axis in order:
            out[axis] = step
            step = step * size[axis] + rng.choice([0, 0, item, rng.randint(0, 9)])
        return tuple(out)

    return Move(rng.randint(0, 9), 0, rng.randint(0, 9), size, strides(), strides(), item, item)


@pytest.mark.parametrize("seed", range(300))
def test_every_byte_goes_where_the_strides_say(seed):
    rng = random.Random(seed)
    move = random_move(rng)
    wanted = boxes(move)
    window = np.frombuffer(rng.randbytes(move.src + stretch(move)), np.uint8)
    out = np.full(max(wanted, default=0) + 40, 77, np.uint8)
    expected = out.copy()
    for to, at in wanted.items():
        expected[to] = window[at]
    place(move, window[2:] if move.src >= 2 else window, 2 if move.src >= 2 else 0, out, 0)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(700, 33), (33, 700), (3, 520, 40), (8, 8), (1, 9)])
def test_transposes(item, shape):
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (*shape, item), np.uint8)
    k = len(shape)
    src = tuple(s for s in source.strides[:k])
    turned = np.ascontiguousarray(np.swapaxes(source, k - 2, k - 1))
    size = turned.shape[:k]
    src = (*src[: k - 2], src[k - 1], src[k - 2])
    out = np.zeros(turned.size + 1, np.uint8)
    place(Move(1, 0, 0, size, src, turned.strides[:k], item, item), source.reshape(-1), 0, out, 0)
    np.testing.assert_array_equal(out[1:], turned.reshape(-1))


def test_a_source_stride_of_zero_repeats():
    out = np.zeros(12, np.uint8)
    place(Move(0, 0, 1, (3, 2), (0, 2), (4, 2), 2, 2), np.arange(9, dtype=np.uint8), 0, out, 0)
    assert out.tolist() == [1, 2, 3, 4] * 3


def test_a_move_that_leaves_the_window_raises():
    for window, out in ((5, 6), (6, 5)):
        with pytest.raises((ValueError, TypeError)):
            place(Move(0, 0, 0, (2,), (4,), (4,), 2, 2), np.zeros(window, np.uint8), 0, np.zeros(out, np.uint8), 0)


@pytest.mark.parametrize("seed", range(300))
def test_parts_are_the_move_and_fit_the_limit(seed):
    rng = random.Random(seed)
    move = random_move(rng)
    limit = rng.choice([16, 40, 200, 10_000])
    found = {}
    for part in parts(move, limit):
        assert stretch(part) <= limit or not part.size
        more = boxes(part)
        assert not found.keys() & more.keys()
        found.update(more)
    assert found == boxes(move)


class Counted:
    """A source of numbered 2-byte elements, any size, that counts what is read."""

    def __init__(self):
        self.nbytes = self.calls = 0

    def read(self, _, start, views, nbytes):
        self.nbytes += nbytes
        self.calls += 1
        for view in views:
            at = np.arange(start, start + len(view))
            view[:] = (at // 2 >> 8 * (at % 2)).astype(np.uint8).data
            start += len(view)


def gathered(source, *moves):
    """The elements that moves put in one buffer of 2-byte elements each, by a gang of as many extents."""
    sizes = [m.numel * 2 for m in moves]
    gang = [(Extent(i, 0, n), [m]) for i, (n, m) in enumerate(zip(sizes, moves, strict=True))]
    return [f.data.view("<u2") for f in gather(source, gang, 1 << 20, lambda: None)]


def elements(move):
    at = np.zeros(move.size, np.int64) + move.src
    for axis, (n, stride) in enumerate(zip(move.size, move.src_strides, strict=True)):
        at += (np.arange(n) * stride).reshape([-1 if i == axis else 1 for i in range(len(move.size))])
    return (at.reshape(-1) // 2).astype("<u2")


@pytest.mark.parametrize(
    ("size", "strides", "times", "calls"),
    [
        ((1000, 2048), (1 << 20, 2), 1, 1000),  # rows of 4 KiB, a megabyte apart
        ((1000,), (1 << 17,), 1, 1000),  # one column of a very wide matrix
        ((1000,), (4000,), 2000, 8),  # gaps within a page: by windows
        ((1000, 1024), (16384, 2), 8.001, 32),  # runs of 2 KiB, 14 KiB apart: seven times, read along
        ((1000, 1024), (32768, 2), 1, 1000),  # runs of 2 KiB, 30 KiB apart: fifteen times, picked out
        ((4, 50, 2048), (1 << 30, 1 << 20, 2), 1, 200),
        ((500, 500), (2, 1 << 17), 1, 500),  # turned: short rows of the source
        ((3, 500, 500), (1 << 26, 2, 1 << 17), 1, 1500),
        ((1, 2, 1 << 20), (1, 1 << 30, 2), 1, 2),  # runs longer than the window
    ],
)
def test_far_gaps_are_not_read(size, strides, times, calls):
    move = Move(0, 0, 0, size, strides, dense_strides(size, 2), 2, 2)
    source = Counted()
    np.testing.assert_array_equal(gathered(source, move)[0], elements(move))
    assert source.nbytes <= move.numel * 2 * times
    assert source.calls <= calls + 4


@pytest.mark.parametrize("count", [1, 16])
def test_what_is_sparse_alone_may_be_dense_for_a_gang(count):
    """Columns of a matrix with rows of 32 KiB, each 2 KiB wide, turned on the way."""
    width, rows = 1024, 600
    moves = [Move(0, 0, c * width * 2, (width, rows), (2, 16 * width * 2), (rows * 2, 2), 2, 2) for c in range(count)]
    source = Counted()
    for found, move in zip(gathered(source, *moves), moves, strict=True):
        np.testing.assert_array_equal(found, elements(move))
    whole = 16 * width * rows * 2
    assert source.nbytes == (whole if count == 16 else whole * count / 16)
    assert source.calls == (rows * count if count == 1 else -(-whole // (1 << 20)))


def random_box(rng):
    """A move with far gaps between some of its axes."""
    move = random_move(rng)
    order = sorted(range(len(move.size)), key=lambda i: move.src_strides[i])
    strides, more = list(move.src_strides), 1
    for i in order:
        more *= rng.choice([1, 1, 100, 10_000])
        strides[i] *= more
    return move._replace(src_strides=tuple(strides))


@pytest.mark.parametrize("seed", range(200))
def test_any_box_by_any_way(seed):
    rng = random.Random(seed)
    move = random_box(rng)
    move = move._replace(
        item=2, dst_item=2, src_strides=tuple(s * 2 for s in move.src_strides), dst=0, src=move.src * 2
    )
    move = move._replace(dst_strides=dense_strides(move.size, 2))
    if move.is_run:
        return
    gang = [(Extent(0, 0, move.numel * 2), [move])]
    found = gather(Counted(), gang, rng.choice([64, 1000, 1 << 16]), lambda: None)[0].data.view("<u2")
    np.testing.assert_array_equal(found, elements(move))


def test_parts_of_a_regular_box_rise():
    move = Move(0, 0, 0, (300, 40, 6), (2, 100_000, 700), (9, 9, 9), 2, 2)
    starts = [p.src for p in parts(move, 1 << 16)]
    assert starts == sorted(starts)
    assert len(starts) > 1
