"""What a target is to hold, free of any format, and what a writer gives back. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.output import OutputFile, Region

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Checkpoint, Optimizer
    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Key, Source, Tensor
    from ckptctl.core.values import Tree


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of the target: which source tensor it is, and its type there."""

    key: Key
    tensor: Tensor
    dtype: DType
    module: str = ""
    """Of a quantized weight's tensors the module that they make together: never cut, and kept side by side."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as it is moved."""
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the target."""
        return self.dtype.nbytes(self.tensor.shape)

    def region(self, *, crc: bool = False) -> Region:
        """All of it."""
        return Region(self.key, self.dtype, self.shape, (0,) * len(self.shape), self.shape, crc=crc)

    def rows(self, start: int, stop: int, *, crc: bool = False) -> Region:
        """Rows [start, stop) of axis 0."""
        lo, size = (start, *(0,) * (len(self.shape) - 1)), (stop - start, *self.shape[1:])
        return self.box(lo, size, crc=crc)

    def box(self, lo: tuple[int, ...], size: tuple[int, ...], *, crc: bool = False) -> Region:
        """The elements lo <= i < lo + size, axis by axis."""
        return Region(self.key, self.dtype, self.shape, lo, size, crc=crc)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the fidelity report: a part of the training state, what became of it, and how or why.

    fate is "carried" (bit for bit), "converted", "filled", "dropped", "absent" (not in the source) or "written" (made
    new).
    """

    part: str
    fate: str
    detail: str = ""


@dataclass(frozen=True)
class Content:
    """What the target holds: weights by name (aliases included), states by (name, kind), groups, values.

    ties maps alias to owner; collapsed are those aliases that a target with ties leaves out.
    """

    source: Checkpoint
    weights: Mapping[str, Item]
    states: Mapping[tuple[str, str], Item] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    values: Mapping[str, Tree] = field(default_factory=dict)
    model_values: Mapping[str, Tree] = field(default_factory=dict)
    held: Mapping[tuple[str, str], Item] = field(default_factory=dict)
    """Tensors that stand among the values, by (name, kind)."""
    ties: Mapping[str, str] = field(default_factory=dict)
    collapsed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Target:
    """What a target can hold and which flags it takes: what is decided before its writer is imported.

    holds_state: moments, masters, scheduler, random state and counters have a place. holds_averages: averaged weights
    (kind ema) have one. is_folder_of_weights: its weights
    are a Hugging Face folder, so that a tie of the config is stored once and nothing but tensors stands among the
    weights. flags are names of Conversion's fields that are for this target (others are wrong usage); reshards are
    those of them that `reshard` changes, none where the format has no layout; own_names: it keeps names, being DCPs.
    called: what messages call it.
    """

    called: str
    holds_state: bool = True
    holds_averages: bool = False
    is_folder_of_weights: bool = False
    one_step: bool = False
    """It counts updates of the optimizer once for all parameters."""
    one_step_a_group: bool = False
    """Whether a param group has one step for all its parameters."""
    flags: frozenset[str] = frozenset()
    reshards: frozenset[str] = frozenset()
    naming: str = ""
    """The naming of its tensors: disk, torchtitan, ...; "" where --names chooses."""
    in_memory: bool = False
    """Its tensors are loaded into a model as they are named: a name that only files have is no default for them."""
    own_names: bool = False
    own_groups: bool = False
    """Which parameters decay is decided by the run's own flags, whatever the source's groups did."""
    torch_groups: bool = False
    """Its param groups are torch's, with every setting that torch's optimizer has in one."""
    rounds_masters: bool = False
    """Its weights are its float32 masters in the weights' type: a loader takes whichever of the two it likes."""
    parts_apart: bool = False
    """Whether weights may lie in files of their own, which mean the same without the others."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user chose for the target, with the documented defaults."""

    max_shard_nbytes: int = 5_000_000_000
    dp: int = 1
    tp: int = 1
    index_keys: bool = False
    bare: bool = False
    own_names: bool = False
    """Keep the source's own item names (reshard of a DCP folder)."""
    sharded: bool = False
    """Whether a number of ranks was asked for, where that decides what is written."""
    module_prefix: str | None = None
    """The attribute of an outer module under which the target's loader looks for the model."""
    zero_stage: int = 2
    universal: bool = False
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    megatron_format: str | None = None
    optimizer: str | None = None
    """plain or distributed; None: the source's, else by dp."""
    vocab_divisor: int | None = None
    keep_padding_rows: bool = False
    layer_spec: str | None = None
    like: Any = None
    """The run that the result is for, as the target's format reads it; None where none was given."""
    weights_alone: bool = False
    """No optimizer goes with the weights, nor is one to be made: a loader takes the model and nothing else."""
    param_order: tuple[str, ...] = ()
    """The names of the optimizer's parameters in its order, where the user gives them."""
    order_flag: str = "--param-order"
    """By which flag."""
    updates: int | None = None
    """How often the optimizer updated every parameter alike, for targets that say it once."""


@dataclass(frozen=True)
class Written:
    """A writer's answer.

    The files, whether they lie in a folder, report lines, and tensors and sources beyond the source's own.
    """

    files: tuple[OutputFile, ...]
    folder: bool
    lines: tuple[Line, ...] = ()
    tensors: Mapping[Key, Tensor] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    variant: str = ""
    casts: frozenset[tuple[str, str]] = frozenset()
    """Casts that the target itself asks for, by (source, target) type."""
    decided: frozenset[str] = frozenset()
    """Parts of the report about which the writer's lines stand alone: what it made of them was not known before."""
