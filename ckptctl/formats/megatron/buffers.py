"""Where the distributed optimizer keeps each parameter in its flat buffers, as facts and shapes say. Pure.

Source: Megatron-LM core_v0.16.1, core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer.__init__;
core/optimizer/distrib_optimizer.py, get_parameter_state_dp_zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.formats.megatron import model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.groups import Param

STATE_KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Names of a buffer's states in files -> kinds."""

ALIGNMENT = 64
"""A parameter starts at a multiple of this many elements."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: its bucket, and its first element counted from the bucket's start."""

    bucket: int
    start: int
    numel: int


@dataclass(frozen=True)
class Buffer:
    """One buffer: the slot of each parameter by name, and the elements of each bucket without and with its padding."""

    slots: dict[str, Slot]
    unpadded: tuple[int, ...]
    padded: tuple[int, ...]

    def joined(self, name: str) -> int:
        """The parameter's first element where buckets are joined without padding, as in distrib_optim.pt."""
        slot = self.slots[name]
        return sum(self.unpadded[: slot.bucket]) + slot.start

    def in_run(self, name: str) -> int:
        """The parameter's first element in the run's own buffer, padding and all."""
        slot = self.slots[name]
        return sum(self.padded[: slot.bucket]) + slot.start

    @property
    def numel(self) -> int:
        """Elements of the joined buckets."""
        return sum(self.unpadded)

    @property
    def is_shifted(self) -> bool:
        """Whether a padded bucket is followed by another: fully_reshardable files of 0.15 to 0.19 are then wrong."""
        return any(a != b for a, b in zip(self.unpadded[:-1], self.padded[:-1], strict=True))


def buffer(
    params: Sequence[tuple[str, int, bool]], dp: int, bucket_numel: int | None, *, busbw: bool = False
) -> Buffer:
    """The buffer of parameters (name, elements, whether it is a shared embedding) in named_parameters() order.

    They go in reverse, each from a multiple of 64. A bucket closes once it has bucket_numel elements, and a shared
    embedding has one to itself; a bucket's end is padded to a multiple of lcm(dp, 128).
    """
    divisor = math.lcm(dp, 128, 1 << 16) if busbw else math.lcm(dp, 128)
    slots: dict[str, Slot] = {}
    unpadded: list[int] = []
    padded: list[int] = []
    at = first = 0
    is_open = False

    def close(stop: int) -> int:
        nonlocal first
        end = -(-stop // divisor) * divisor
        unpadded.append(stop - first)
        padded.append(end - first)
        first = end
        return end

    for name, numel, shared in reversed(params):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        if shared and is_open:
            at = close(at)
        slots[name] = Slot(len(unpadded), at - first, numel)
        at += numel
        is_open = True
        if shared or (bucket_numel is not None and at - first >= bucket_numel):
            at = close(at)
            is_open = False
    if is_open:
        close(at)
    return Buffer(slots, tuple(unpadded), tuple(padded))


def slot_name(param: Param) -> str:
    """What a parameter's slot is called: chunks of a rank have the same local names."""
    return f"{param.chunk}:{param.name}"


def laid_out(params: list[Param], pp_rank: int, facts: Facts) -> Buffer:
    """The buffer of a chunk's parameters. Only the first chunk of the first stage is split in buckets.

    Source: core_v0.16.1, core/distributed/distributed_data_parallel.py (`disable_bucketing or pp_rank > 0`).
    """
    dp = max(1, facts.number("data_parallel_size", 1)) * max(1, facts.number("context_parallel_size", 1))
    limit = facts.bucket_numel(dp)  # of all parameters, experts or not, by the ranks of the rest
    shared = facts.tied and facts.pp > 1
    if params and model.is_expert(params[0].name) and facts.ep > 1:
        dp = max(1, dp * facts.tp // (facts.ep * facts.etp))
    sizes = [(slot_name(p), math.prod(p.shape), shared and p.name in model.VOCABULARY) for p in params]
    first = all(p.chunk == 0 for p in params) and pp_rank == 0
    busbw = facts.flag("ddp_pad_buckets_for_high_nccl_busbw")
    return buffer(sizes, dp, limit if first else None, busbw=busbw)
