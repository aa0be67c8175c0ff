"""What lies in a Trainer folder: which files are whose, and those that are read whole. No tensor data is read here.

Source: transformers 5.24.0, trainer.py, _save_checkpoint, _save_optimizer_and_scheduler, _save_rng_state,
_load_optimizer_and_scheduler; trainer_callback.py, TrainerState.save_to_json.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.bytesource import FileBytes

if TYPE_CHECKING:
    from pathlib import Path

OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
OTHER_VALUES = "other_values.bin"
"""A file of this program: values that a Trainer has no place for. The Trainer passes it over."""
RNG = re.compile(r"rng_state(?:_([0-9]{1,6}))?\.pth")
_FSDP = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0", "optimizer.bin")
_STATE_LIMIT = 256 << 20


def rng_name(rank: int | None) -> str:
    """The random states' file: one without a number where the run had one process, else one a rank."""
    return "rng_state.pth" if rank is None else f"rng_state_{rank}.pth"


def rng_files(path: Path) -> dict[int | None, str]:
    """Files of random states by rank; None is that of a run with one process."""
    found = {p.name: m for p in path.iterdir() if (m := RNG.fullmatch(p.name)) and p.is_file()}
    ranks = {int(m[1]) if m[1] else None: name for name, m in found.items()}
    return dict(sorted(ranks.items(), key=lambda item: -1 if item[0] is None else item[0]))


def sharded_by_fsdp(path: Path) -> str:
    """The file or folder of Accelerate's that shows a save under FSDP, "" where there is none.

    Source: accelerate 1.15.0, utils/fsdp_utils.py, save_fsdp_model, save_fsdp_optimizer.
    """
    return next((name for name in _FSDP if (path / name).exists()), "")


def read_state(path: Path) -> dict[str, Any]:
    """trainer_state.json as data. Damaged where it is no JSON object with a whole number `global_step`."""
    with FileBytes(path, name=path.name) as source:
        if source.nbytes > _STATE_LIMIT:
            raise Unsupported(f"the file has {source.nbytes} bytes, more than {_STATE_LIMIT}", where=path.name)
        text = source.read(0, source.nbytes)
    try:
        state = json.loads(text.decode())
    except (ValueError, RecursionError) as err:
        why = str(err)[:200] or "it is nested too deep"
        raise Damaged("the file is no JSON", where=path.name, why=why, code="trainer-state") from err
    step = state.get("global_step") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise Damaged(
            "the file is no state of a Trainer",
            where=path.name,
            why=f"its global_step is {step!r}" if isinstance(state, dict) else f"it is a {type(state).__name__}",
            fix="copy it again; the Trainer writes it last, so that an interrupted save lacks it",
            code="trainer-state",
        )
    return state


def state_bytes(state: dict[str, Any]) -> bytes:
    """trainer_state.json as the Trainer writes it."""
    return (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()
