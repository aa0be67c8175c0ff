"""What a reader of Megatron's files has gathered, before names and vocabulary are seen to. Data; reads no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import MASTER, Group, Optimizer, UnsafeGlobal
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key
from ckptctl.core.values import Tree, as_number
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.collect import Whole
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.torchtensor import read_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptctl.core.tensor import Source, Tensor
    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.megatron.facts import Facts

SCALER = "grad_scaler"
"""The loss scale of a float16 run, in an optimizer's state and among values."""
_REST = (SCALER, "param_state_sharding_type")


@dataclass
class Found:
    """What the files of a checkpoint hold. groups are settings with the names that have them."""

    facts: Facts
    variant: str
    whole: Whole = field(default_factory=Whole)
    sources: list[Source] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    groups: list[tuple[dict[str, Tree], dict[str, None]]] = field(default_factory=list)
    steps: dict[str, Tree] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    native: dict[str, Tree] = field(default_factory=dict)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    fused: bool = False
    distributed: bool = False
    layer_keys: bool = False
    has_optimizer: bool = False
    stateless: int = 0
    """Ranks with an optimizer and without its moments."""
    layers: set[int] = field(default_factory=set)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    iteration: int | None = None
    warnings: list[str] = field(default_factory=list)
    damaged_state: str = ""
    weights_only: bool = False
    """The optimizer is passed over."""
    version: float = 0.0
    """checkpoint_version of files that do not say theirs."""
    unread: set[str] = field(default_factory=set)
    """What an optimizer holds that is told of as not read."""
    _known: dict[str, dict[str, None]] = field(default_factory=dict)
    """The names of each group by what its settings say."""

    @property
    def spec(self) -> str:
        """Whose layers the names are: te or local."""
        return "te" if self.fused else "local"

    def add_group(self, options: dict[str, Tree], names: Iterable[str], step: Tree, where: str) -> None:
        """Adds a param group of one file, with its count of updates: groups of equal settings are one.

        Settings that are tensors, such as a capturable Adam's learning rate, become numbers. Damaged where a parameter
        is in a group of other settings by another rank's file.
        """
        listed = dict.fromkeys(names)
        options = {k: as_number(v) for k, v in options.items()}
        text = repr(sorted(options.items(), key=lambda x: x[0]))  # settings say the same in any order
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = {}
            self.groups.append((options, known))
        for said, have in self.groups:
            twice = next((n for n in listed if n in have), None) if have is not known else None
            if twice is not None:
                unlike = sorted(k for k in {*said, *options} if repr(said.get(k)) != repr(options.get(k)))
                raise Damaged(
                    f"ranks do not agree on {unlike[0]} of the optimizer's group of {twice}",
                    where=where,
                    why=f"{show(options.get(unlike[0]))} here, {show(said.get(unlike[0]))} elsewhere",
                    fix="take all ranks' files from one save",
                    code="ranks-differ",
                )
        known.update(listed)
        if step is not None:
            for name in listed:
                self.add_step(name, step, where)

    def add_scaler(self, rest: Iterable[Mapping[str, Tree]], reader: ByteSource | None) -> None:
        """The loss scale of a float16 run, from what else optimizers of one file hold: all ranks have the same.

        reader: of the file that its tensors lie in, None where they are read.
        Source: Megatron-LM core_v0.16.1, core/optimizer/optimizer.py, MixedPrecisionOptimizer.state_dict.
        """
        where = "common.pt" if reader is None else reader.path
        here: list[Tree] = []
        for held in rest:
            scaler = held.get(SCALER)
            if reader is not None:
                scaler = read_leaves(scaler, reader)
            said = self.values.setdefault(SCALER, scaler) if scaler else scaler
            if scaler and repr(said) != repr(scaler):
                # Optimizers of one rank look at gradients of their own for what overflows.
                own = any(repr(x) == repr(said) for x in here)
                raise (Unsupported if own else Damaged)(
                    "the rank's optimizers have loss scales apart" if own else "ranks do not agree on the loss scale",
                    where=where,
                    why=f"{show(scaler)} here, {show(said)} elsewhere",
                    fix="take the weights alone with --no-optimizer" if own else "take all ranks' files from one save",
                    code="unsupported" if own else "ranks-differ",
                )
            here.append(scaler)
            unknown = [k for k in held if k not in (*_REST, *self.unread)]
            if unknown:
                self.warnings.append(f"{where}: of the optimizer these are not read: {', '.join(unknown)}")
                self.unread.update(unknown)

    def add_step(self, name: str, step: Tree, where: str) -> None:
        """A parameter's count of updates, which all files must say alike."""
        said = self.steps.setdefault(name, step)
        if said != step:
            raise Damaged(
                f"ranks do not agree on the optimizer's step of {name}",
                where=where,
                why=f"{step} here, {said} elsewhere",
                fix="take all ranks' files from one save",
                code="ranks-differ",
            )


def require_states(found: Found, where: str) -> None:
    """Damaged where a distributed optimizer lacks a state of some parameters: it has each kind of every one."""
    trained = {n for _, names in found.groups for n in names}
    for kind in sorted({k.kind for k in found.tensors} - {"weight"}):
        without = [n for n in trained if Key(n, kind) not in found.tensors]
        if kind == MASTER:  # of a float32 weight it is the weight
            without = [n for n in without if found.tensors[Key(n)].dtype.name != "float32"]
        if without:
            raise Damaged(
                f"{len(without)} parameters have no {kind}, others have: {min(without, key=model.order)}",
                where=where,
                why="the distributed optimizer has one of every parameter",
                fix="check that every rank's file is there and whole, or take the weights alone with --no-optimizer",
                code="optimizer-damaged",
            )


def require_parts(found: Found, where: str) -> None:
    """Damaged where a parameter has one state of its group's and not another, or moments and no master as others have.

    None at all is well: it was not trained.
    """
    have: dict[str, set[str]] = {}
    for key in found.tensors:
        have.setdefault(key.name, set()).add(key.kind)
    has_masters = any(MASTER in kinds for kinds in have.values())
    for _, names in found.groups:
        every = set().union(*(have.get(n, set()) for n in names)) - {"weight", MASTER}
        for name in names:
            kinds = have.get(name, set())
            want = set(every)
            if has_masters and found.tensors[Key(name)].dtype.name != "float32":
                want.add(MASTER)
            lacking = sorted(want - kinds)
            if lacking and kinds & every:
                raise Damaged(
                    f"{name} has no {lacking[0]}",
                    where=where,
                    why=f"it has {', '.join(sorted(kinds - {'weight'}))}, and others have all of them",
                    fix="check that every rank's file is whole, or take the weights alone with --no-optimizer",
                    code="optimizer-damaged",
                )


def number_of(value: Tree) -> Tree:
    """A count that was saved as a 0-d tensor, as the number that it is."""
    number = as_number(value)
    return int(number) if number is not value and isinstance(number, float) and number.is_integer() else number


def optimizer_of(found: Found, kinds: Mapping[str, set[str]]) -> Optimizer | None:
    """Groups and steps; kinds are the names that have each kind of state."""
    if not found.has_optimizer:
        return None
    stateful = set().union(*kinds.values(), set())
    groups = []
    for options, names in found.groups:
        groups.append(Group(tuple(sorted(names, key=model.order)), options))
    scalars = {(n, "step"): s for n, s in found.steps.items() if n in stateful}
    return Optimizer(tuple(groups), scalars, keyed="integers")
