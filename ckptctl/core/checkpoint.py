"""A checkpoint as everything else sees it: tensors, values, groups, ties, facts. Frozen; no file is open here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.tensor import Key, Source, Tensor
    from ckptctl.core.values import Tree

PathKey = str | int


@dataclass(frozen=True, slots=True)
class File:
    """A file of the checkpoint.

    Path relative to its folder, bytes, and what it is ("data", "index", "config", "extra", ...; "own": what only the
    source's own format has a place for).
    """

    path: str
    nbytes: int
    role: str = "data"


@dataclass(frozen=True, slots=True)
class Group:
    """A param group.

    The names it lists, in the optimizer's order, and its settings as the file has them (lr, betas, ...).
    """

    params: tuple[str, ...]
    options: Mapping[str, Tree]
    owner: int = 0
    """Which optimizer it is of, where a checkpoint has several: they are kept as one, over different parameters."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer's state besides its tensors (which are tensors of the checkpoint, by kind).

    scalars holds what is no tensor in a parameter's state, by (name, kind): an integer step, None, ... order_known says
    whether the order of
    groups and of names inside comes from the file (flat keys lose it). keyed is how the source keys state: "names" or
    "integers".
    """

    groups: tuple[Group, ...]
    scalars: Mapping[tuple[str, str], Tree] = field(default_factory=dict)
    order_known: bool = True
    keyed: str = "names"
    options: Mapping[str, Tree] = field(default_factory=dict)
    """What stands in the optimizer's dict beside state and param_groups."""
    unnamed: str = ""
    """Why parameters have no names but numbers (`#0`, `#1`, ...); "" where they have."""
    namespace: str = ""
    """Whose names the source's optimizer had for the model: module5, module4 or disk; "" where nothing tells."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides layouts and is in no tensor.

    The model's config as data, and where it comes from ("" where there is none).
    """

    config: Mapping[str, Any] | None = None
    config_text: bytes = b""
    origin: str = ""

    @property
    def family(self) -> str:
        """config.json's model_type, "" where unknown."""
        return str((self.config or {}).get("model_type") or "")

    @staticmethod
    def of(config: Mapping[str, Any], origin: str) -> Facts:
        """Facts of a config that is data already, such as one found inside a torch file."""
        return Facts(config, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(), origin)


@dataclass(frozen=True, slots=True)
class Entry:
    """One named item as the source keeps it: its flat name, the path it came from, and a tensor's key or a value."""

    name: str
    path: tuple[PathKey, ...]
    key: Key | None = None
    value: Tree = None
    folder: str = ""
    """The folder inside the checkpoint whose item it is, where it has several."""


@dataclass(frozen=True, slots=True)
class UnsafeGlobal:
    """A global that would run code, and the file whose pickle names it."""

    file: str
    name: str
    why: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that was read from headers and metadata. root is the folder (or the one file) on disk.

    tensors has an entry for every name; ties maps an alias to the name that owns the bytes. values are the rest of the
    training
    state by name: "scheduler", "rng", "step", ... entries keep the source's own item list where its format can be
    written back under
    its own names (DCP).
    """

    format: str
    variant: str
    root: str
    sources: tuple[Source, ...]
    tensors: Mapping[Key, Tensor]
    optimizer: Optimizer | None = None
    values: Mapping[str, Tree] = field(default_factory=dict)
    model_values: Mapping[str, Tree] = field(default_factory=dict)
    """Entries of the model's dict that are no tensors (`_extra_state`), by name."""
    ties: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    layout: Mapping[str, int | None] = field(default_factory=dict)
    step: int | None = None
    files: tuple[File, ...] = ()
    extras: tuple[str, ...] = ()
    """Files to carry unchanged into a Hugging Face folder."""
    extras_root: str = ""
    """The folder that extras lie in, relative to root: no part of their names in a target."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Free text entries of safetensors headers, kept when rewriting."""
    entries: Sequence[Entry] = ()
    unsafe: tuple[UnsafeGlobal, ...] = ()
    unknown_globals: tuple[str, ...] = ()
    unsupported: tuple[tuple[str, str], ...] = ()
    """(what, why) of parts whose values cannot be moved."""
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Files that are not there, without which no run goes on, though everything can be read without them."""
    quantized: str = ""
    """The quantization method where weights are packed: such tensors are copied byte for byte."""
    model_path: tuple[PathKey, ...] = ()
    """The keys under which a torch file has the model's dict; () where the file is that dict, or is no torch file."""
    module: str = ""
    """The attribute of an outer module that held the model: it stood before every name, and is left out of them."""
    modules: tuple[str, ...] = ()
    """Models that stand side by side, each under its name and a dot. () where there is one model."""
    key_map: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(new name, the names it was made of) where a key map gave the names."""
    damaged_state: str = ""
    """Why the optimizer's state is not that of the parameters it is named after; "" where nothing says so."""
    gap_reason: str = "headers and metadata"
    rounded_masters: bool = False
    """Whether the format promises that a weight is its master, rounded: what tells a wrong order of flat tensors."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else the format says of itself, for inspect: versions, loss scale, padding, experts. Plain data."""
    naming: str = ""
    """Whose names the tensors have where their format has its own ("megatron"); "" where the names themselves tell."""
    padding: Mapping[Key, Tensor] = field(default_factory=dict)
    """Rows after the true vocabulary, by the key of the tensor that they follow, with part "padding"."""
    native: Mapping[str, Tree] = field(default_factory=dict)
    """What only the format's own writer takes (args, ranks' random state), by name."""

    def of_kind(self, *kinds: str) -> dict[Key, Tensor]:
        """Tensors of those kinds, in order."""
        return {k: t for k, t in self.tensors.items() if k.kind in kinds}

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """PEFT's adapter_config.json as data, whatever format carries it; None where this is no adapter."""
        config = self.values.get(ADAPTER)
        return config if isinstance(config, dict) and isinstance(config.get("peft_type"), str) else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in order of first appearance."""
        return tuple(dict.fromkeys(k.kind for k in self.tensors))


def part_of(name: str) -> str:
    """Which part of the training state a value is, by its top-level name: scheduler, rng, counters or other.

    The names are those that training scripts and libraries use; what has none of them is "other" and is carried all the
    same.
    """
    for part, names in PARTS.items():
        if name in names:
            return part
    return "other"


PARTS: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "scheduler",
        "lr_scheduler",
        "lr_schedulers",
        "schedulers",
        "sched",
        "scheduler_state_dict",
        "lr_scheduler_state_dict",
        "opt_param_scheduler",
    ),
    "rng": ("rng", "rng_state", "rng_states", "random_state", "random_states"),
    "counters": (
        "step",
        "global_step",
        "global_steps",
        "iteration",
        "iter",
        "epoch",
        "epochs",
        "train_state",
        "trainer_state",
        "num_updates",
        "samples",
        "tokens",
        "global_samples",
        "skipped_steps",
        "loops",
        "num_floating_point_operations_so_far",
    ),
}
ADAPTER = "adapter_config"
"""Name of the value that says what an adapter's tensors mean: PEFT's adapter_config.json as data."""
STEP_NAMES = ("step", "global_step", "global_steps", "iteration", "iter", "num_updates")

WEIGHTS = ("weight", "buffer")
"""Kinds that a weights-only target holds."""
MASTER = "master"
EMA = "ema"
"""Averaged weights, by the model's names: no state of an optimizer."""
OTHER = "other"
"""Kind of tensors that stand among the values of a training state, too large to be read as values."""


def is_state(key: Key) -> bool:
    """Whether a tensor is training state rather than weights."""
    return key.kind not in WEIGHTS
