"""A Trainer's counters and random states, from what the source has. Pure.

Source: transformers 5.24.0, trainer_callback.py, TrainerState; trainer.py, _load_rng_state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import PARTS
from ckptctl.core.errors import MissingFact
from ckptctl.core.values import Array, Held
from ckptctl.formats.target import Line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.values import Tree

TORCH_STATE_NBYTES = 5056
"""Bytes of torch's state of the CPU generator. Source: torch 2.13.0, aten/src/ATen/CPUGeneratorImpl.cpp."""
EVERY = 500
"""A Trainer's default of logging_steps, eval_steps and save_steps. It goes on with those of the file."""
NAMES: dict[str, tuple[str, ...]] = {
    "python": ("python", "random", "random_state", "py"),
    "numpy": ("numpy", "numpy_random_seed", "np"),
    "cpu": ("cpu", "torch", "torch_manual_seed", "torch_cpu"),
}
"""What the Trainer, verl, Accelerate and training scripts call the three random states."""


def trainer_state(source: Checkpoint, values: Mapping[str, Tree]) -> tuple[dict[str, Any], Line]:
    """What stands in trainer_state.json: the source's, where it was a Trainer's; else the step, and no history.

    MissingFact where no step is known: the Trainer would train on from the start.
    """
    known = values.get("trainer_state")
    if isinstance(known, dict) and isinstance(known.get("global_step"), int):
        return dict(known), Line("trainer_state.json", "carried", f"step {known['global_step']}, with its history")
    if source.step is None:
        raise MissingFact(
            "how many steps the run has made is in no file",
            where=source.root,
            why="a Trainer goes on from the step in trainer_state.json",
            fix="convert from a checkpoint of the run that has its step",
            code="step",
        )
    state: dict[str, Any] = {
        "best_global_step": None,
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": 0.0,
        "eval_steps": EVERY,
        "global_step": source.step,
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": [],
        "logging_steps": EVERY,
        "max_steps": 0,
        "num_input_tokens_seen": 0,
        "num_train_epochs": 0,
        "save_steps": EVERY,
        "stateful_callbacks": {},
        "total_flos": 0.0,
        "train_batch_size": 0,
        "trial_name": None,
        "trial_params": None,
    }
    detail = (
        f"step {source.step}, no history; logging, evaluating and saving every {EVERY} steps, which a Trainer "
        "takes from here; all else is by its arguments"
    )
    return state, Line("trainer_state.json", "written", detail)


def random_states(
    source: Checkpoint, values: Mapping[str, Tree]
) -> tuple[dict[int | None, Tree], tuple[str, ...], Line]:
    """Random states by rank (None: of a run with one process), the values they were made of, and what became of them.

    They are carried where the source has all three of one process, or a Trainer's of every rank: those of one rank mean
    nothing to a run of several.
    """
    ranks = values.get("rng_states")
    if isinstance(ranks, dict) and ranks and all(isinstance(r, int) and _three(s) for r, s in ranks.items()):
        states: dict[int | None, Tree] = dict(ranks)
        return states, ("rng_states",), Line("random state", "carried", f"of {len(ranks)} ranks")
    name = next((n for n in PARTS["rng"] if n in values), None)
    if name is None:
        return {}, (), Line("random state", "absent", "the Trainer goes on with its own")
    ranks_before = source.layout.get("world_size")
    if ranks_before not in (None, 1):
        why = f"the source ran on {ranks_before} ranks, and this folder is for one process"
        return {}, (name,), Line("random state", "dropped", f"{name}: {why}")
    found = _three(values[name])
    if found is None:
        why = "it lacks one of the states of Python, NumPy and torch as those write them, and a Trainer wants all three"
        return {}, (name,), Line("random state", "dropped", f"{name}: {why}")
    return {None: found}, (name,), Line("random state", "carried", name)


def _three(value: Tree) -> dict[str, Tree] | None:
    """The states of Python, NumPy and torch under the Trainer's names, with those of devices; None where one lacks."""
    if not isinstance(value, dict):
        return None
    found = {to: next((value[n] for n in names if n in value), None) for to, names in NAMES.items()}
    python, numpy, cpu = found["python"], found["numpy"], found["cpu"]
    if not (isinstance(python, tuple) and len(python) == 3 and isinstance(python[1], tuple) and len(python[1]) == 625):
        return None
    if not (isinstance(numpy, tuple) and len(numpy) == 5 and numpy[0] == "MT19937" and isinstance(numpy[1], Array)):
        return None
    if not isinstance(cpu, Array) or (cpu.kind, cpu.dtype, cpu.shape) != ("torch", "uint8", (TORCH_STATE_NBYTES,)):
        return None
    devices = {k: v for k, v in value.items() if k in ("cuda", "xla", "npu", "hpu", "mlu", "musa")}
    return None if any(isinstance(v, Held) for v in devices.values()) else {**found, **devices}
