"""What a conversion is asked to make: choices of the command line, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.errors import Usage
from ckptctl.formats import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.formats.target import Target

DTYPE_CHOICES = ("source", "float32", "bfloat16", "float16")
WEIGHT_CHOICES = ("model", "master")
NAME_CHOICES = ("module5", "module4", "disk")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion is to make. The defaults are those of the command line."""

    to: str
    dtype: str = "source"
    weights: str = "model"
    no_optimizer: bool = False
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    trainable_only: bool = False
    max_shard_size: str = "5GB"
    dp: int | None = None
    tp: int | None = None
    index_keys: bool = False
    bare: bool = False
    merge_adapter: tuple[str, ...] = ()
    """Folders of adapters that are merged into the weights, in order."""
    names: str | None = None
    module_prefix: str | None = None
    zero_stage: int | None = None
    universal: bool = False
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    megatron_format: str | None = None
    optimizer: str | None = None
    vocab_divisor: int | None = None
    keep_padding_rows: bool = False
    layer_spec: str | None = None
    like: Path | str | None = None
    """A checkpoint, or a file of arguments, of the run that the result is for."""

    @property
    def target(self) -> Target:
        """What the target can hold. Only once check_flags has seen that there is such a one."""
        return TARGETS[self.to]


LAYOUT_FLAGS = (
    "dp", "tp", "pp", "vpp", "ep", "megatron_format", "optimizer", "vocab_divisor", "keep_padding_rows",
    "layer_spec", "like", "index_keys",
    "bare", "names", "module_prefix", "zero_stage", "universal",
)  # fmt: skip
"""Fields of Conversion that are not for every target. max_shard_size has a default: it never contradicts."""


def is_given(wanted: Conversion, name: str) -> bool:
    """Whether a field says something: 0 does (a ZeRO stage)."""
    value = getattr(wanted, name)
    return bool(value) or (value == 0 and value is not False)


def check_flags(wanted: Conversion) -> None:
    """Usage for flags that do not exist or contradict each other."""
    if wanted.to not in TARGETS:
        raise Usage(f"--to {wanted.to}: there is no such target", fix=f"this version writes {', '.join(TARGETS)}")
    if wanted.dtype not in DTYPE_CHOICES:
        raise Usage(f"--dtype {wanted.dtype}: there is no such choice", fix=f"one of {', '.join(DTYPE_CHOICES)}")
    if wanted.weights not in WEIGHT_CHOICES:
        raise Usage(f"--weights {wanted.weights}: there is no such choice", fix=f"one of {', '.join(WEIGHT_CHOICES)}")
    if wanted.zero_stage not in (None, 0, 1, 2, 3):
        raise Usage(f"--zero-stage {wanted.zero_stage}: there is no such stage to write", fix="one of 0, 1, 2, 3")
    if wanted.names not in (None, *NAME_CHOICES):
        raise Usage(f"--names {wanted.names}: there is no such choice", fix=f"one of {', '.join(NAME_CHOICES)}")
    for name in LAYOUT_FLAGS:
        if is_given(wanted, name) and name not in wanted.target.flags:
            flag = f"--{name.replace('_', '-')}"
            takers = ", ".join(t for t, target in TARGETS.items() if name in target.flags)
            raise Usage(f"{flag} is for --to {takers}, not for --to {wanted.to}", fix=f"leave {flag} out")
