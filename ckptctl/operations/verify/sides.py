"""A checkpoint that is to be verified: its tensors under the model's own names, and how each parameter is trained.

Headers and metadata alone are read; torch is not needed here.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import EMA, MASTER, OTHER, WEIGHTS, Checkpoint
from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.remake import from_hub
from ckptctl.core.tensor import Key
from ckptctl.core.values import as_number
from ckptctl.operations.naming import as_hub, naming_of, natives_of, renamed
from ckptctl.operations.opening import (
    open_checkpoint,
    placeholders,
    require_names,
    require_plain,
    require_safe,
    require_tensors,
)
from ckptctl.operations.state_values import plain
from ckptctl.operations.tensors import TensorReader, scalar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckptctl.core.tensor import Tensor
    from ckptctl.operations.opening import Reading

NO_STATE = frozenset({*WEIGHTS, MASTER, EMA, OTHER, "step", "file"})
"""Kinds that are no moments."""


@dataclass(frozen=True)
class Side:
    """One checkpoint. names says whose names its tensors have: "" the source's own, else a naming of `names/`."""

    path: str
    checkpoint: Checkpoint
    evidence: str
    names: str = ""
    steps: Mapping[str, float] = field(default_factory=dict)
    """How often each parameter was updated, by name."""
    others: Mapping[str, dict[str, Any]] | None = None
    """Settings that are taken in place of its own groups'."""
    padding_rows: int = 0
    """Rows after the true vocabulary that are trained too."""

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json as data."""
        return self.checkpoint.facts.config

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The param group's settings of each parameter that one lists, as plain data."""
        optimizer = self.checkpoint.optimizer
        if optimizer is None:
            return {}
        if self.others is not None:
            return dict(self.others)
        return {
            name: {k: plain(v) for k, v in group.options.items() if k != "params"}
            for group in optimizer.groups
            for name in group.params
        }

    @property
    def states(self) -> dict[str, tuple[str, ...]]:
        """The kinds of moments that each parameter has, in the checkpoint's order."""
        out: dict[str, list[str]] = {}
        for key in self.checkpoint.tensors:
            if key.kind not in NO_STATE and not key.part:
                out.setdefault(key.name, []).append(key.kind)
        return {name: tuple(kinds) for name, kinds in out.items()}

    @property
    def trains(self) -> bool:
        """Whether it has an optimizer to go on with: groups, or moments."""
        return bool(self.settings) or bool(self.states)

    def tensor(self, name: str, kind: str = "weight") -> Tensor | None:
        """The tensor of a parameter, a buffer where it is one; None where there is none."""
        kinds = WEIGHTS if kind == "weight" else (kind,)
        return next((t for k in kinds if (t := self.checkpoint.tensors.get(Key(name, k))) is not None), None)

    def key(self, name: str, kind: str = "weight") -> Key:
        """The key of that tensor. KeyError where there is none."""
        found = self.tensor(name, kind)
        if found is None:
            raise KeyError((name, kind))
        return found.key

    def padding_of(self, key: Key) -> Tensor | None:
        """The vocabulary's padding after that tensor, where this side takes it along."""
        return self.checkpoint.tensors.get(key._replace(part="padding")) if self.padding_rows else None

    def padded(self) -> Side | None:
        """The side with the vocabulary's padding, as Megatron trains; None where it has none, or not of every state."""
        padding = self.checkpoint.padding
        rows = {t.shape[0] for t in padding.values() if t.shape}
        names = {k.name for k in padding}
        whole = all(
            Key(name, kind, "padding") in padding
            for name in names
            for kind in ("weight", *self.states.get(name, ()), *([MASTER] if self.tensor(name, MASTER) else []))
        )
        size = (self.config or {}).get("vocab_size")
        if len(rows) != 1 or not whole or not isinstance(size, int):
            return None
        (count,) = rows
        facts = replace(self.checkpoint.facts, config={**(self.config or {}), "vocab_size": size + count})
        tensors = {**self.checkpoint.tensors, **{k: replace(t, key=k) for k, t in padding.items()}}
        return replace(self, checkpoint=replace(self.checkpoint, tensors=tensors, facts=facts), padding_rows=count)

    def under(self, wanted: Collection[str], ties: Mapping[str, str]) -> Side:
        """The same under a model's names. ties maps the model's second names to the parameter that they are.

        Tries the checkpoint's own names, then those that Transformers 5 and 4 give to what lies on disk.
        MissingFact, naming them, where weights of the model are in none of them.
        """
        least: list[str] | None = None
        hub: Checkpoint | None = None
        for names in ("", "disk", "module5", "module4"):
            if names == "" and (self.checkpoint.naming or naming_of(self.checkpoint) == "torchtitan"):
                continue
            if names and hub is None:
                if self.config is None:
                    break
                hub = as_hub(self.checkpoint, naming_of(self.checkpoint))
            found = self.checkpoint if not names or hub is None else _named(hub, names)
            if found is None:
                continue
            missing = _missing(found, wanted, ties)
            if not missing:
                return with_steps(replace(self, checkpoint=found, names=names))
            if least is None or len(missing) < len(least):
                least = missing
        raise MissingFact(
            f"{len(least or [])} of the model's {len(wanted)} weights are not in the checkpoint: "
            f"{', '.join((least or [])[:4])}",
            where=self.checkpoint.root,
            why="the config describes a model that has them",
            fix="check the config (--model-config), or give the names by --key-map",
            code="weights-missing",
        )


def opened(path: Path | str, reading: Reading | None = None, *, optimizer: bool = True) -> Side:
    """A checkpoint that can be trained on from: safe to read, with tensors and names.

    Without optimizer its weights alone, whatever is wrong with its optimizer's state.
    """
    checkpoint, evidence = open_checkpoint(path, reading)
    require_safe(checkpoint)
    require_tensors(checkpoint)
    require_plain(checkpoint)
    if not optimizer:
        kept = {k: t for k, t in checkpoint.tensors.items() if k.kind in WEIGHTS}
        padding = {k: t for k, t in checkpoint.padding.items() if k.kind in WEIGHTS}
        checkpoint = replace(checkpoint, tensors=kept, padding=padding, optimizer=None, damaged_state="")
    require_names(checkpoint)
    if checkpoint.adapter is not None:
        raise Unsupported(
            "an adapter alone is no model that can be trained on",
            where=checkpoint.root,
            fix="merge it first: `ckptctl convert BASE OUT --to hf --merge-adapter ADAPTER`",
            code="adapter",
        )
    if checkpoint.quantized:
        raise Unsupported(
            f"weights packed by {checkpoint.quantized} are not trained on",
            where=checkpoint.root,
            fix="verify the checkpoint that they were made of",
            code="quantized",
        )
    if checkpoint.damaged_state:
        raise Damaged(
            "the optimizer's state is not that of the parameters it is named after",
            where=checkpoint.root,
            why=checkpoint.damaged_state,
            fix="--no-optimizer verifies the weights alone",
            code="damaged-state",
        )
    empty = placeholders(checkpoint)
    if empty:
        raise Damaged(
            f"{len(empty)} weights are placeholders without data: {empty[0]}",
            where=checkpoint.root,
            fix="verify the ZeRO checkpoint that has them",
            code="placeholders",
        )
    for tensor in checkpoint.tensors.values():
        if tensor.why_unsupported:
            raise Unsupported(
                f"{tensor.key.name} ({tensor.key.kind}) cannot be read",
                where=checkpoint.root,
                why=tensor.why_unsupported,
            )
    return Side(str(path), checkpoint, evidence.why)


def opened_both(a: Path | str, b: Path | str, reading: Reading | None = None, *, optimizer: bool = True) -> list[Side]:
    """Two checkpoints. One that has no config is read with the other's: a layout may not be understood without."""
    from ckptctl.operations.opening import Reading

    reading = reading or Reading()
    readings = [reading, replace(reading, key_map=None, layer_names=None)]
    try:
        sides = [opened(p, r, optimizer=optimizer) for p, r in zip((a, b), readings, strict=True)]
    except MissingFact as err:
        if err.code != "param-order" or reading.param_order is not None:
            raise
        return _ordered((a, b), readings, err)
    known = next((s.checkpoint.facts for s in sides if s.config is not None), None)
    if known is None or all(s.config is not None for s in sides):
        return sides
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_bytes(known.config_text)
        again = [replace(r, model_config=file) for r in readings]
        return [
            s if s.config is not None else opened(p, r, optimizer=optimizer)
            for s, p, r in zip(sides, (a, b), again, strict=True)
        ]


def _ordered(paths: tuple[Path | str, Path | str], readings: Sequence[Reading], why: MissingFact) -> list[Side]:
    """Two checkpoints, of which one keys its optimizer by numbers: in the order of the other's groups.

    Else in that order with matrices before vectors, as a Trainer groups them. A wrong order cannot come out as equal:
    it gives parameters the moments of others.
    """
    sides: list[Side | None] = []
    for path, reading in zip(paths, readings, strict=True):
        try:
            sides.append(opened(path, reading))
        except MissingFact as err:
            if err.code != "param-order":
                raise
            sides.append(None)
    known = next((s for s in sides if s is not None), None)
    optimizer = None if known is None else known.checkpoint.optimizer
    if known is None or optimizer is None or not optimizer.groups:
        raise why
    listed = [name for group in optimizer.groups for name in group.params]
    shapes = {name: t.shape for name in listed if (t := known.tensor(name) or known.tensor(name, MASTER)) is not None}
    dealt = sorted(listed, key=lambda name: len(shapes.get(name, (1, 1))) < 2)
    orders = [listed] if dealt == listed else [listed, dealt]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "order.txt"
        for order in orders:
            file.write_text("".join(f"{name}\n" for name in order))
            try:
                return [
                    s if s is not None else opened(p, replace(r, param_order=file))
                    for s, p, r in zip(sides, paths, readings, strict=True)
                ]
            except MissingFact as err:
                if err.code != "param-order":
                    raise
    raise why


def with_config(sides: Sequence[Side]) -> list[Side]:
    """Sides with a config each: one without takes the other's. MissingFact where there is none at all."""
    found = next((s.checkpoint.facts for s in sides if s.config is not None), None)
    if found is None:
        raise MissingFact(
            "the model's config is needed to build the model",
            where=sides[0].checkpoint.root,
            fix="give its config.json with --model-config",
            code="model-config",
        )
    return [s if s.config is not None else replace(s, checkpoint=replace(s.checkpoint, facts=found)) for s in sides]


def _named(hub: Checkpoint, names: str) -> Checkpoint | None:
    """The hub's tensors under a naming of memory; None where the family has none of its own."""
    try:
        natives = natives_of(hub, names)
    except MissingFact:
        return None
    held = {k.name for k in hub.tensors}
    return renamed(hub, from_hub([n for n in natives if any(p.hub.name in held for p in n.parts)]))


def _missing(checkpoint: Checkpoint, wanted: Collection[str], ties: Mapping[str, str]) -> list[str]:
    """The model's weights that the checkpoint has under no name; a tied one may be there under its second."""
    held = {k.name for k in checkpoint.tensors if k.kind in WEIGHTS} | {
        k.name for k in checkpoint.tensors if k.kind == MASTER
    }
    second: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        second.setdefault(owner, []).append(alias)
    return [n for n in wanted if n not in held and not any(a in held for a in second.get(n, ()))]


def with_steps(side: Side) -> Side:
    """The side with each parameter's count of updates: a tensor, a scalar, or its group's."""
    checkpoint = side.checkpoint
    steps: dict[str, float] = {}
    if checkpoint.optimizer is not None:
        for group in checkpoint.optimizer.groups:
            own = as_number(group.options.get("step"))
            if isinstance(own, (int, float)) and not isinstance(own, bool):
                steps |= dict.fromkeys(group.params, float(own))
        for (name, kind), value in checkpoint.optimizer.scalars.items():
            number = as_number(value)
            if kind == "step" and isinstance(number, (int, float)):
                steps[name] = float(number)
    with TensorReader(checkpoint, 16 << 20) as reader:
        for key in checkpoint.tensors:
            if key.kind == "step":
                number = scalar(reader, key)
                if isinstance(number, (int, float)):
                    steps[key.name] = float(number)
    return replace(side, steps=steps)
