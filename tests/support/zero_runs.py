"""DeepSpeed checkpoints made by hand: ZeRO-2 and 3 over any number of ranks, with one flat group. No DeepSpeed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.values import OrderedPairs
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.support.torchfiles import stored, torch_zip, v2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    Params = dict[str, npt.NDArray[np.float32]]
    Tweak = Callable[[dict[str, Any], "Saved"], None]


class Saved:
    """A torch file while it is made."""

    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}

    def tensor(self, values: Any) -> Any:
        """A float32 tensor over a storage of its own."""
        array = np.asarray(values, np.float32)
        key = str(len(self.storages))
        self.storages[key] = array.tobytes()
        steps = tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
        return v2(stored(key, array.size), 0, array.shape, steps)

    def half(self, values: Any) -> Any:
        """A float16 tensor over a storage of its own."""
        array = np.asarray(values, np.float16)
        key = str(len(self.storages))
        self.storages[key] = array.tobytes()
        steps = tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
        return v2(stored(key, array.size, "HalfStorage"), 0, array.shape, steps)

    def save(self, path: Path, tree: Any) -> None:
        """The file, its archive named as torch names it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(torch_zip(tree, self.storages, root=path.stem))


def numbers(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Random values."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def write_model(path: Path, params: Params, dp: int, **more: Any) -> None:
    """A model-states file. Arguments are further entries, or others than the usual ones."""
    made = Saved()
    tree = {
        "module": OrderedPairs({n: made.tensor(p) for n, p in params.items()}),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedPairs({n: SizeTuple(p.shape) for n, p in params.items()})],
        "frozen_param_shapes": OrderedPairs(),
        "shared_params": {},
        "frozen_param_fragments": OrderedPairs(),
        "global_steps": 3,
        "global_samples": 24,
        "skipped_steps": 0,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
        **more,
    }
    made.save(path, tree)


def write_shards(folder: Path, params: Params, dp: int, *, mp: int = 0, prefix: str = "", **tweaks: Tweak) -> None:
    """The ranks' files of ZeRO-2: float32 weights and one moment, which is twice the weights.

    tweaks: by rank (r0, r1, ...), what is done to a rank's optimizer_state_dict.
    """
    flat = np.concatenate([p.reshape(-1) for p in params.values()])
    slot = -(-len(flat) // (2 * dp)) * 2
    padded = np.concatenate([flat, np.zeros(slot * dp - len(flat), np.float32)])
    for rank in range(dp):
        made = Saved()
        mine = slice(rank * slot, (rank + 1) * slot)
        tree: dict[str, Any] = {
            "base_optimizer_state": {
                "state": {0: {"step": made.tensor(3.0), "exp_avg": made.tensor(2 * padded[mine])}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
            },
            "single_partition_of_fp32_groups": [made.tensor(flat[mine])],
            "zero_stage": 2,
            "partition_count": [dp],
            "ds_version": "0.19.8",
        }
        for at, tweak in tweaks.items():
            if at in (f"r{rank}", "every"):
                tweak(tree, made)
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        made.save(folder / name, {"optimizer_state_dict": tree})


def write_run(
    folder: Path, params: Params, dp: int = 2, *, model: dict[str, Any] | None = None, **tweaks: Tweak
) -> None:
    """A run of ZeRO-2 at step 3. model has further entries of its model-states file."""
    write_model(folder / "mp_rank_00_model_states.pt", params, dp, **(model or {}))
    write_shards(folder, params, dp, **tweaks)
