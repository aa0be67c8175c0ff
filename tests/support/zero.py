"""Layout arithmetic of DeepSpeed's ZeRO partitions, for the prototypes. Pure; no file format around the flat tensors.

`zero2` and `zero3` give output files, one for each rank, kind and group, each holding that rank's flat tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, OutputFile, Region
from ckptctl.core.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptctl.core.output import Segment
    from ckptctl.core.tensor import Part

F32 = BY_NAME["float32"]


class Param(NamedTuple):
    """One parameter of the run's module; parts (by kind) say how it is made of hub tensors, where it is none itself."""

    name: str
    shape: tuple[int, ...]
    parts: Callable[[str], tuple[Part, ...]] = lambda kind: ()

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def run(self, kind: str, start: int, stop: int) -> Region:
        """Its elements [start, stop) as float32."""
        return Region(Key(self.name, kind), F32, (self.numel,), (start,), (stop - start,), self.parts(kind))


def zero2_slot(numel: int, dp: int) -> int:
    """Elements of one rank's piece of a flat group of numel: the group is padded to a multiple of 2 * dp.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__
    (nccl_start_alignment_factor).
    """
    return -(-numel // (2 * dp)) * 2


def runs_of(params: Sequence[Param], start: int, stop: int) -> Iterator[tuple[Param, int, int]]:
    """(parameter, first, stop) of elements [start, stop) of parameters laid end to end; bounds are each one's own."""
    at = 0
    for p in params:
        low, high = max(start, at), min(stop, at + p.numel)
        if low < high:
            yield p, low - at, high - at
        at += p.numel


def zero2(groups: Sequence[Sequence[Param]], dp: int, kinds: dict[str, str]) -> tuple[OutputFile, ...]:
    """Files rank/kind/group of ZeRO-1 and ZeRO-2. kinds maps the name of a state to the kind that it is taken from.

    The float32 weights ("master") end with the data; moments have the whole piece, padded with zeros.
    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, state_dict, _get_groups_without_padding.
    """

    def segments(rank: int, state: str, kind: str, group: Sequence[Param]) -> Iterator[Segment]:
        slot = zero2_slot(sum(p.numel for p in group), dp)
        held = 0
        for p, start, stop in runs_of(group, rank * slot, (rank + 1) * slot):
            yield p.run(kind, start, stop)
            held += stop - start
        if state != "master":
            yield Fill((slot - held) * F32.itemsize, b"\0", "flat group padding")

    return _files(groups, dp, kinds, segments)


def zero3_slot(numel: int, dp: int) -> int:
    """Elements that each rank has of one parameter, padding included.

    Source: DeepSpeed 0.19.8, utils/zero_to_fp32.py, zero3_partitioned_param_info.
    """
    return -(-numel // dp)


def sub_groups(group: Sequence[Param], dp: int, sub_group_numel: int) -> list[list[Param]]:
    """A parameter group in sub-groups: each closes once its pieces have sub_group_numel elements, or overshoot it.

    Source: DeepSpeed 0.19.8, runtime/zero/stage3.py, _create_fp16_sub_groups.
    """
    out: list[list[Param]] = []
    size = 0
    for p in group:
        if not out or size >= sub_group_numel:
            out.append([])
            size = 0
        out[-1].append(p)
        size += zero3_slot(p.numel, dp)
    return out


def zero3(groups: Sequence[Sequence[Param]], dp: int, kinds: dict[str, str]) -> tuple[OutputFile, ...]:
    """Files rank/kind/sub-group of ZeRO-3: every parameter cut on its own, each piece padded to its slot.

    DeepSpeed leaves that padding undefined; here it is zeros.
    Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, _partition_param; stage3.py, _rigid_state_dict.
    """

    def segments(rank: int, state: str, kind: str, group: Sequence[Param]) -> Iterator[Segment]:
        for p in group:
            slot = zero3_slot(p.numel, dp)
            start, stop = min(p.numel, rank * slot), min(p.numel, (rank + 1) * slot)
            if start < stop:
                yield p.run(kind, start, stop)
            if stop - start < slot:
                yield Fill((slot - (stop - start)) * F32.itemsize, b"\0", "parameter padding")

    return _files(groups, dp, kinds, segments)


def _files(
    groups: Sequence[Sequence[Param]],
    dp: int,
    kinds: dict[str, str],
    segments: Callable[[int, str, str, Sequence[Param]], Iterator[Segment]],
) -> tuple[OutputFile, ...]:
    return tuple(
        OutputFile(f"{rank}/{state}/{g}", lambda a=(rank, state, kind, group): tuple(segments(*a)))
        for rank in range(dp)
        for state, kind in kinds.items()
        for g, group in enumerate(groups)
    )
