"""Which parts of a checkpoint stay when it is stripped, and the checkpoint without the others. Pure: nothing is read.

A part is a word (weights, masters, optimizer, averages, scheduler, rng, counters, other) or a glob over names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, MASTER, OTHER, WEIGHTS, Checkpoint, Entry, Optimizer, part_of
from ckptctl.core.errors import Usage
from ckptctl.core.globs import matches
from ckptctl.core.values import holds_array
from ckptctl.formats.target import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.tensor import Key

PARTS = ("weights", "masters", "optimizer", "averages", "scheduler", "rng", "counters", "other")
"""What --keep and --drop name. optimizer: moments, steps and groups, which mean nothing apart. other: values that no
other part has, and tensors among them."""
_ALSO = {"weight": "weights", "master": "masters", "moments": "optimizer", "ema": "averages"}
_KIND_PARTS = {**dict.fromkeys(WEIGHTS, "weights"), MASTER: "masters", EMA: "averages", OTHER: "other"}
_LABELS = {"rng": "random state", "other": "other values"}


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays: parts by word, and of the tensors those whose names pass. drop_globs are names that go."""

    parts: frozenset[str]
    globs: tuple[str, ...] = ()
    drop_globs: tuple[str, ...] = ()

    @property
    def weights_alone(self) -> bool:
        """Whether all weights stay and nothing else: what strip does by default."""
        return self.parts == {"weights"} and not self.globs and not self.drop_globs

    def name(self, name: str) -> bool:
        """Whether a tensor's name passes."""
        return (not self.globs or matches(name, self.globs)) and not matches(name, self.drop_globs)

    def tensor(self, key: Key) -> bool:
        """Whether a tensor stays. Those among the values have no parameter's name: globs are not for them."""
        part = _KIND_PARTS.get(key.kind, "optimizer")
        return part in self.parts and (part == "other" or self.name(key.name))


def kept(keep: Sequence[str], drop: Sequence[str]) -> Kept:
    """--keep and --drop as what stays: weights alone where neither is given.

    keep: weights and these parts; a glob takes only tensors that match. drop: everything but these. Usage where both
    are given, for a kind that does not stand alone, and for weights among what is to go.
    """
    if keep and drop:
        raise Usage("--keep and --drop contradict each other", fix="say what stays or what goes, not both")
    words = {_ALSO.get(w, w) for w in (*keep, *drop)}
    for word in words & {"exp_avg", "exp_avg_sq", "momentum", "momentum_buffer", "step", "groups", "param_groups"}:
        raise Usage(
            f"{word} does not stand alone",
            why="an optimizer that has lost a part of its state does not load",
            fix="name the part optimizer: moments, steps and groups together",
        )
    parts, globs = words & set(PARTS), tuple(w for w in (*keep, *drop) if _ALSO.get(w, w) not in PARTS)
    if not drop:
        return Kept(frozenset(parts | {"weights"}), globs)
    if "weights" in parts:
        raise Usage("--drop weights: the weights stay", why="nothing else means anything without them")
    return Kept(frozenset(set(PARTS) - parts), (), globs)


def without(source: Checkpoint, what: Kept) -> tuple[Checkpoint, list[Line]]:
    """The checkpoint as if it had been saved without what goes, and a line for each part that goes.

    Plain values that no part has stay with weights alone: a loader may need them, and they are small. Usage where a
    pattern matches nothing.
    """
    for glob in (*what.globs, *what.drop_globs):
        if not any(matches(k.name, (glob,)) for k in source.tensors):
            words = ", ".join(PARTS)
            raise Usage(f"{glob!r} matches no tensor", fix=f"a part ({words}), or a glob: see names with `ckptctl ls`")
    tensors = {k: t for k, t in source.tensors.items() if what.tensor(k)}
    gone: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for key, tensor in source.tensors.items():
        if key not in tensors and tensor.cast_from is None and not (key.kind in WEIGHTS and key.name in source.ties):
            gone[key.kind] += 1
            nbytes[key.kind] += tensor.nbytes
    lines = [Line(kind, "dropped", f"{n} tensors, {nbytes[kind]} bytes") for kind, n in gone.items()]
    optimizer = _optimizer(source.optimizer, what)
    if source.optimizer is not None and source.optimizer.groups and optimizer is None:
        lines.append(Line("param groups", "dropped", f"{len(source.optimizer.groups)} groups"))
    values = {n: v for n, v in source.values.items() if _stays(n, holds_array(v), what)}
    native = {n: v for n, v in source.native.items() if part_of(n) in ("other", *what.parts)}
    by_part: dict[str, list[str]] = {}
    for name in (*source.values, *source.native):
        if name not in values and name not in native:
            by_part.setdefault(part_of(name), []).append(name)
    lines += [Line(_LABELS.get(p, p), "dropped", ", ".join(names)) for p, names in by_part.items()]
    made = replace(
        source,
        tensors=tensors,
        optimizer=optimizer,
        values=values,
        native=native,
        model_values={n: v for n, v in source.model_values.items() if what.name(n)},
        ties={a: o for a, o in source.ties.items() if what.name(a) and what.name(o)},
        padding={k: t for k, t in source.padding.items() if what.tensor(k)},
        entries=tuple(e for e in source.entries if _entry_stays(e, source, tensors, optimizer, values)),
    )
    return made, lines


def _stays(name: str, has_array: bool, what: Kept) -> bool:
    """Whether a value stays. Among other values the plain ones do: loaders ask for settings and versions."""
    part = part_of(name)
    return part in what.parts or (part == "other" and not has_array)


def _optimizer(optimizer: Optimizer | None, what: Kept) -> Optimizer | None:
    if optimizer is None or "optimizer" not in what.parts:
        return None
    groups = tuple(replace(g, params=tuple(p for p in g.params if what.name(p))) for g in optimizer.groups)
    return replace(optimizer, groups=groups, scalars={k: v for k, v in optimizer.scalars.items() if what.name(k[0])})


def _entry_stays(
    entry: Entry, source: Checkpoint, tensors: object, optimizer: Optimizer | None, values: object
) -> bool:
    """Whether an item of a DCP stays: with its tensor, its value's part, or the optimizer that it is a setting of."""
    if entry.key is not None:
        return entry.key in tensors  # type: ignore[operator]
    top = str(entry.path[0]) if entry.path else entry.name
    for name in (top, entry.name):
        if name in source.values:
            return name in values  # type: ignore[operator]
    if any(entry.name == n or entry.name.endswith(f".{n}") for n in source.model_values):
        return True
    return optimizer is not None


__all__ = ["PARTS", "Kept", "kept", "without"]
