"""Layout arithmetic of DeepSpeed's ZeRO partitions: slots, sub-groups, and the pieces of parameters in flat tensors.

Pure. Elements are counted, but for starts in files, which are bytes. A *slot* is what one rank has of something,
padding included.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptctl.core.tensor import PieceTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptctl.core.tensor import Ints

Shape = tuple[int, ...]

ALIGNMENT = 2
"""Elements that a rank's slot of a flat group of ZeRO-1/2 is a multiple of.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (nccl_start_alignment_factor).
"""


class Flat(NamedTuple):
    """One rank's flat tensor: the file it lies in (a number of the checkpoint's sources), first byte, elements."""

    source: int
    start: int
    numel: int


def group_slot(numel: int, dp: int, alignment: int = ALIGNMENT) -> int:
    """Elements of one rank's piece of a flat group of ZeRO-1/2: the group is padded to a multiple of alignment * dp."""
    return -(-numel // (alignment * dp)) * alignment


def param_slot(numel: int, dp: int) -> int:
    """Elements that each rank has of one parameter under ZeRO-3, padding included.

    Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py, zero3_partitioned_param_info.
    """
    return -(-numel // dp)


def sub_groups(numels: Sequence[int], dp: int, sub_group_numel: int) -> list[list[int]]:
    """A param group of ZeRO-3 in sub-groups, as positions: each closes once its slots reach the size, or overshoot it.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    out: list[list[int]] = []
    size = 0
    for position, numel in enumerate(numels):
        if not out or size >= sub_group_numel:
            out.append([])
            size = 0
        out[-1].append(position)
        size += param_slot(numel, dp)
    return out


def runs_of(numels: Iterable[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(position, first, stop) of elements [start, stop) of tensors laid end to end; bounds are each one's own."""
    at = 0
    for position, numel in enumerate(numels):
        low, high = max(start, at), min(stop, at + numel)
        if low < high:
            yield position, low - at, high - at
        at += numel


def starts_of(shapes: Iterable[Shape], paddings: Sequence[int] = ()) -> tuple[list[int], int]:
    """The first element of each parameter laid end to end, each followed by its padding; and one past the last."""
    out, at = [], 0
    for number, shape in enumerate(shapes):
        out.append(at)
        at += math.prod(shape) + (paddings[number] if paddings else 0)
    return out, at


def columns(flats: Sequence[Flat]) -> tuple[Ints, Ints]:
    """Sources and first bytes of the ranks' flat tensors."""
    return np.array([f.source for f in flats], np.int64), np.array([f.start for f in flats], np.int64)


def joined_table(numel: int, at: int, slot: int, flats: tuple[Ints, Ints], itemsize: int) -> PieceTable:
    """The pieces of a parameter that lies at elements [at, at + numel) of a group cut in slots, one a rank (ZeRO-1/2).

    Ranks are those of flats (see columns), which must reach to the parameter's end.
    """
    if not numel:
        return PieceTable.whole((0,), itemsize, 0, 0)
    first, last = at // slot, (at + numel - 1) // slot
    ranks = np.arange(first, last + 1, dtype=np.int64)
    low = np.maximum(ranks * slot, at)
    high = np.minimum((ranks + 1) * slot, at + numel)
    source, start = flats
    return PieceTable(
        (numel,),
        itemsize,
        (low - at)[:, None],
        (high - low)[:, None],
        source[ranks].astype(np.int32),
        start[ranks] + (low - ranks * slot) * itemsize,
    )


def slotted_table(numel: int, at: int, dp: int, flats: tuple[Ints, Ints], itemsize: int) -> PieceTable:
    """The pieces of a parameter of which each rank has its own slot, at element `at` of the rank's tensor (ZeRO-3)."""
    if not numel:
        return PieceTable.whole((0,), itemsize, 0, 0)
    slot = param_slot(numel, dp)
    ranks = np.arange(-(-numel // slot), dtype=np.int64)
    low = ranks * slot
    source, start = flats
    return PieceTable(
        (numel,),
        itemsize,
        low[:, None],
        np.minimum(slot, numel - low)[:, None],
        source[ranks].astype(np.int32),
        start[ranks] + at * itemsize,
    )
