"""Random states of a run's ranks as Megatron seeds them at its start, for meshes that no saved states fit. Pure.

Source: Megatron-LM core_v0.16.1, megatron/training/initialize.py, _set_random_seed;
megatron/core/tensor_parallel/random.py, model_parallel_cuda_manual_seed.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged
from ckptctl.core.values import Array
from ckptctl.formats.pickles.nodes import NumpyArray

if TYPE_CHECKING:
    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.facts import Facts

DEFAULT_SEED = 1234
"""--seed. Source: megatron/training/arguments.py."""
PER_STAGE, PER_REPLICA = 100, 10
TENSOR_PARALLEL, EXPERT_PARALLEL, PER_EXPERT_RANK = 2718, 1024, 100
WORDS = 624
"""Words of a Mersenne Twister's state."""


def seed_of(facts: Facts) -> int:
    """The run's --seed. Damaged for one that no generator takes."""
    seed = facts.number("seed", DEFAULT_SEED)
    if not 0 < seed < 1 << 31:
        raise Damaged(
            f"seed in args is {seed}", where=facts.where, why="it is above 0 and of 32 bits", code="args-damaged"
        )
    return seed


def seeded(facts: Facts, tp_rank: int, pp_rank: int, ep_rank: int) -> list[Tree]:
    """The value of rng_state of a rank: one state, or one for each data-parallel rank where they start apart."""
    apart = (facts.dp or 1) if facts.flag("data_parallel_random_init") else 1
    base = seed_of(facts) + PER_STAGE * pp_rank
    return [_state(base + PER_REPLICA * dp_rank, tp_rank, ep_rank) for dp_rank in range(apart)]


def _state(seed: int, tp_rank: int, ep_rank: int) -> dict[str, Tree]:
    """Each generator of one rank. Experts' tensor-parallel ranks are the rank's own."""
    name, keys, position, has_gauss, gauss = np.random.RandomState(seed).get_state(legacy=True)
    words = NumpyArray("<u4", (WORDS,), np.asarray(keys, "<u4").tobytes())
    trackers = {
        "data-parallel-rng": seed,
        "model-parallel-rng": seed + TENSOR_PARALLEL + tp_rank,
        "expert-parallel-rng": seed + EXPERT_PARALLEL + PER_EXPERT_RANK * ep_rank + tp_rank,
    }
    return {
        "random_rng_state": random.Random(seed).getstate(),  # noqa: S311
        "np_rng_state": (str(name), words, int(position), int(has_gauss), float(gauss)),
        "torch_rng_state": Array("uint8", (5056,), torch_state(seed)),
        "cuda_rng_state": _on_device(seed),
        "rng_tracker_states": {name: _on_device(n) for name, n in trackers.items()},
    }


def _on_device(seed: int) -> Array:
    """A CUDA generator that has drawn nothing: its seed, and how far it is.

    Source: torch 2.13.0, aten/src/ATen/cuda/CUDAGeneratorImpl.cpp.
    """
    return Array("uint8", (16,), struct.pack("<QQ", seed, 0))


def torch_state(seed: int) -> bytes:
    """What torch.get_rng_state() holds after torch.manual_seed(seed), 5056 bytes: a Mersenne Twister in 64-bit slots.

    Source: torch 2.13.0, aten/src/ATen/CPUGeneratorImpl.cpp (CPUGeneratorImplStateLegacy), core/MT19937RNGEngine.h.
    """
    words = [seed & 0xFFFFFFFF]
    for i in range(1, WORDS):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) & 0xFFFFFFFF)
    head = struct.pack("<QiiQ", seed, 1, 1, 0)  # seed, words left before the next turn, seeded, next word
    return head + np.array(words, "<u8").tobytes() + bytes(5056 - len(head) - 8 * WORDS)


__all__ = ["DEFAULT_SEED", "seed_of", "seeded", "torch_state"]
