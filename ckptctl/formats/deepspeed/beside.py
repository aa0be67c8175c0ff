"""What the Transformers Trainer and Accelerate put beside a DeepSpeed step: scheduler, random state and the like."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import File
from ckptctl.core.errors import Unrecognised
from ckptctl.formats.accelerate.parts import parts_of
from ckptctl.formats.bytesource import read_whole

if TYPE_CHECKING:
    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.build import Build

_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_JSON_LIMIT = 256 << 20


def read_beside(build: Build) -> None:
    """Adds the values of the files beside the step's folder. Only where a tracker stands there: it is the run's own."""
    root = build.files.root
    if not build.files.tag:
        return
    if not (root / "trainer_state.json").is_file():
        _accelerate(build)
        return
    if (root / "scheduler.pt").is_file():
        with build.pile.open("scheduler.pt") as opened:
            build.values["scheduler"] = opened.value("scheduler", opened.root)
    states: dict[int, Tree] = {}
    for file in sorted(root.iterdir()):
        m = _RNG.fullmatch(file.name)
        if m:
            with build.pile.open(file.name) as opened:
                states[int(m[1] or 0)] = opened.value(f"rng_state.{m[1] or 0}", opened.root)
    if states:
        build.values["rng_state"] = {n: states[n] for n in sorted(states)}
    size = (root / "trainer_state.json").stat().st_size
    build.pile.files["trainer_state.json"] = File("trainer_state.json", size, "extra")
    try:
        text = read_whole(root / "trainer_state.json").decode("utf-8") if size <= _JSON_LIMIT else ""
        state = json.loads(text)
    except (Unrecognised, ValueError, RecursionError):
        build.warnings.append("trainer_state.json cannot be read")
        return
    if isinstance(state, dict):
        build.values["trainer_state"] = state


def _accelerate(build: Build) -> None:
    """What Accelerate's save_state puts there: schedulers that are not DeepSpeed's, random states, samplers, scaler.

    Source: accelerate 1.15.0, accelerator.py, save_state; checkpointing.py, save_accelerator_state.
    """
    parts = parts_of(build.files.root)
    named = {f"scheduler_{i}": name for i, name in parts.schedulers.items()}
    named |= {f"random_states_{rank}": name for rank, name in parts.random.items()} | parts.values
    trees: dict[str, Tree] = {}
    for value, name in named.items():
        with build.pile.open(name) as opened:
            trees[value] = opened.value(value, opened.root)
    plans = [trees[f"scheduler_{i}"] for i in parts.schedulers]
    if plans:
        build.values.update({"scheduler": plans[0]} if len(plans) == 1 else {"schedulers": plans})
    if parts.random:
        build.values["random_states"] = {str(rank): trees[f"random_states_{rank}"] for rank in parts.random}
    build.values.update({value: trees[value] for value in parts.values})
