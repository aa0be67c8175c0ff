"""Strided boxes against NumPy's own indexing, and how much of a source is read for them."""

import random

import numpy as np
import pytest

from ckptctl.core.view import unit_slices
from ckptctl.execute.scatter import parts, place
from ckptctl.plan.steps import Move


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


def read_nbytes(move, limit):
    return sum(map(stretch, parts(move, limit)))


@pytest.mark.parametrize(
    ("size", "strides", "times"),
    [
        ((1000, 2048), (1 << 20, 2), 1),  # rows of 4 KiB, a megabyte apart
        ((1000,), (1 << 17,), 1),  # one column of a very wide matrix
        ((1000,), (4000,), 4000 / 2),  # gaps within a page: one stretch
        ((1000, 1024), (16384, 2), 8.001),  # runs of 2 KiB, 14 KiB apart: a gap of seven times
        ((1000, 1024), (32768, 2), 1),  # runs of 2 KiB, 30 KiB apart: fifteen times, not read along
        ((4, 50, 2048), (1 << 30, 1 << 20, 2), 1),
        ((500, 500), (2, 1 << 17), 1),  # turned: short rows of the source
    ],
)
def test_far_gaps_are_not_read(size, strides, times):
    move = Move(0, 0, 0, size, strides, (2,) * len(size), 2, 2)
    assert read_nbytes(move, 16 << 20) <= move.numel * 2 * times


def test_parts_of_a_regular_box_rise():
    move = Move(0, 0, 0, (300, 40, 6), (2, 100_000, 700), (9, 9, 9), 2, 2)
    starts = [p.src for p in parts(move, 1 << 16)]
    assert starts == sorted(starts)
    assert len(starts) > 1
