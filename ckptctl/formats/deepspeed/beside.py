"""What the Transformers Trainer and others put beside a DeepSpeed step: scheduler, random state, trainer_state.json."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import File
from ckptctl.core.errors import Unrecognised
from ckptctl.formats.bytesource import read_whole

if TYPE_CHECKING:
    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.build import Build

_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_JSON_LIMIT = 256 << 20


def read_beside(build: Build) -> None:
    """Adds the values of the files beside the step's folder. Only where a tracker stands there: it is the run's own."""
    root = build.files.root
    if not build.files.tag or not (root / "trainer_state.json").is_file():
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
