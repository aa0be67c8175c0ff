"""Names of the files in Accelerate's folders. Looks at names only.

Source: accelerate 1.15.0, utils/constants.py; checkpointing.py, save_accelerator_state; utils/fsdp_utils.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
OTHER_VALUES = "other_values.bin"
"""A file of this program: values that Accelerate has no place for. Accelerate passes it over."""
_MODELS = re.compile(
    r"(?:pytorch_model_fsdp_(\d+)|(?:pytorch_model_fsdp|pytorch_model|model)(?:_(\d+))?\.(?:bin|safetensors))"
)
_OPTIMIZERS = re.compile(r"optimizer_(\d+)|optimizer(?:_(\d+))?\.bin")
_SCHEDULERS = re.compile(r"scheduler(?:_(\d+))?\.bin")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_VALUES = re.compile(r"((?:sampler|dl_state_dict)(?:_\d+)?)\.bin|(custom_checkpoint_\d+)\.pkl|(scaler)\.pt")
_RANK = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin|optimizer(?:_\d+)?_rank\d+\.bin")


@dataclass
class Parts:
    """What lies in a folder: names by number, values by the name that they have here."""

    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    schedulers: dict[int, str] = field(default_factory=dict)
    random: dict[int, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    of_ranks: list[str] = field(default_factory=list)
    twice: list[tuple[str, str]] = field(default_factory=list)


def parts_of(folder: Path) -> Parts:
    """The parts, each kind in order of its numbers."""
    out = Parts()
    for path in sorted(folder.iterdir()):
        name = path.name
        if path.is_dir() != bool(re.fullmatch(r"(?:pytorch_model_fsdp|optimizer)_\d+", name)):
            continue
        for pattern, into in (
            (_MODELS, out.models),
            (_OPTIMIZERS, out.optimizers),
            (_SCHEDULERS, out.schedulers),
            (_RANDOM, out.random),
        ):
            m = pattern.fullmatch(name)
            if m:
                number = next((int(g) for g in m.groups() if g), 0)
                if number in into:
                    out.twice.append((into[number], name))
                into[number] = name
        m = _VALUES.fullmatch(name)
        if m:
            out.values[next(g for g in m.groups() if g)] = name
        if _RANK.fullmatch(name):
            out.of_ranks.append(name)
    for kind in (out.models, out.optimizers, out.schedulers, out.random):
        ordered = dict(sorted(kind.items()))
        kind.clear()
        kind.update(ordered)
    return out


def file_of(name: str) -> str:
    """The file in which a value of that name lies, "" where Accelerate has none."""
    ending = ".pt" if name == "scaler" else ".pkl" if name.startswith("custom_checkpoint_") else ".bin"
    return name + ending if _VALUES.fullmatch(name + ending) else ""
