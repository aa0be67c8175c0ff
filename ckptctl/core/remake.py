"""Tensors made of boxes of others: one naming's tensors from another's, with their states. Pure; nothing is read.

A `Native` says which hub tensors one framework's tensor is made of (stacked experts, fused projections, heads in
another order). Read from left to right or the other way round that gives `Recipe`s, and `remade` follows them: for
every kind of state alike, by composing pieces when they are first asked for. Columns of pieces stay columns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.compose import compose
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key, Part, PieceTable, Tensor
from ckptctl.core.view import suffixes

if TYPE_CHECKING:
    from ckptctl.core.tensor import Ints

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Native:
    """A tensor as one naming has it, and the hub tensors that it is made of: its parts cover it once.

    hub has the whole shape of each hub tensor that a part names, in the order of parts.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    hub: tuple[Shape, ...]

    @staticmethod
    def renamed(name: str, hub: str, shape: Shape) -> Native:
        """One that is a hub tensor under another name."""
        return Native(name, shape, (whole(hub, shape),), (shape,))


def whole(hub: str, shape: Shape) -> Part:
    """The part that is a whole tensor, element for element."""
    zero = (0,) * len(shape)
    return Part(Key(hub), shape, zero, shape, shape, zero, tuple(range(len(shape))))


@dataclass(frozen=True, slots=True)
class Taken:
    """An old tensor (its name and shape), and the part of it that is a part of the new one (`Part.hub`)."""

    name: str
    shape: Shape
    part: Part


@dataclass(frozen=True, slots=True)
class Recipe:
    """A new tensor: name, shape, and what it takes of old ones."""

    name: str
    shape: Shape
    taken: tuple[Taken, ...]

    @property
    def is_rename(self) -> bool:
        """Whether it is one old tensor, element for element, in the same shape."""
        only = self.taken[0]
        return len(self.taken) == 1 and only.shape == self.shape and only.part == whole(self.name, self.shape)


def to_hub(natives: Sequence[Native]) -> list[Recipe]:
    """How the hub's tensors are made of those natives, in their order."""
    taken: dict[str, list[Taken]] = {}
    shapes: dict[str, Shape] = {}
    for n in natives:
        for part, shape in zip(n.parts, n.hub, strict=True):
            taken.setdefault(part.hub.name, []).append(Taken(n.name, n.shape, part))
            shapes[part.hub.name] = shape
    return [Recipe(name, shapes[name], tuple(t)) for name, t in taken.items()]


def from_hub(natives: Sequence[Native]) -> list[Recipe]:
    """How those natives are made of the hub's tensors."""
    return [
        Recipe(
            n.name,
            n.shape,
            tuple(
                Taken(part.hub.name, shape, inverse(part, n.name)) for part, shape in zip(n.parts, n.hub, strict=True)
            ),
        )
        for n in natives
    ]


def inverse(part: Part, native: str) -> Part:
    """The same box seen from the hub: hub and native change places."""
    size, axes = [0] * len(part.size), [0] * len(part.axes)
    for axis, to in enumerate(part.axes):
        size[to], axes[to] = part.size[axis], axis
    return Part(Key(native), part.hub_view, part.hub_lo, tuple(size), part.native_view, part.native_lo, tuple(axes))


class Composed(Sequence[PieceTable]):
    """Pieces of a tensor that is made of parts of others, composed when they are first asked for."""

    def __init__(self, sources: Sequence[tuple[Part, Sequence[PieceTable]]], itemsize: int) -> None:
        self._sources, self._itemsize = sources, itemsize
        self._tables: tuple[PieceTable, ...] | None = None
        self._lock = threading.Lock()

    def _made(self) -> tuple[PieceTable, ...]:
        with self._lock:
            if self._tables is None:
                self._tables = composed(self._sources, self._itemsize)
            return self._tables

    def __len__(self) -> int:
        return len(self._made())

    @overload
    def __getitem__(self, i: int) -> PieceTable: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PieceTable]: ...
    def __getitem__(self, i: int | slice) -> PieceTable | Sequence[PieceTable]:
        return self._made()[i]

    def __iter__(self) -> Iterator[PieceTable]:
        return iter(self._made())


def composed(sources: Sequence[tuple[Part, Sequence[PieceTable]]], itemsize: int) -> tuple[PieceTable, ...]:
    """The pieces that parts of other tensors' pieces are: one table for each view that the parts have."""
    found: dict[Shape, list[PieceTable]] = {}
    for part, tables in sources:
        rows = found.setdefault(part.hub_view, [])
        for table in tables:
            pieces = [p for row in _near(table, part) for p in compose(part, table[row])]
            if pieces:
                rows.append(PieceTable.of(pieces, itemsize))
    return tuple(_joined(view, tables, itemsize) for view, tables in found.items())


def _near(table: PieceTable, part: Part) -> list[int]:
    """Rows of a table whose range of elements, counted in the flattened tensor, meets the part's: others share none."""
    if not table.view or not part.native_view:
        return list(range(len(table)))
    full = np.flatnonzero((table.size > 0).all(axis=1))
    weights = np.array(suffixes(table.view), np.int64)
    first = table.lo[full] @ weights
    last = first + (table.size[full] - 1) @ weights
    steps = suffixes(part.native_view)
    low = sum(i * s for i, s in zip(part.native_lo, steps, strict=True))
    high = low + sum((n - 1) * s for n, s in zip(part.size, steps, strict=True))
    rows: list[int] = full[(first <= high) & (last >= low)].tolist()
    return rows


def _joined(view: Shape, tables: Sequence[PieceTable], itemsize: int) -> PieceTable:
    if len(tables) == 1:
        return tables[0]
    empty: Ints = np.empty((0, len(view)), np.int64)
    lo, size, strides = (np.concatenate([empty, *(getattr(t, c) for t in tables)]) for c in ("lo", "size", "strides"))
    source = np.concatenate([np.empty(0, np.int32), *(t.source for t in tables)])
    start = np.concatenate([np.empty(0, np.int64), *(t.start for t in tables)])
    return PieceTable(view, itemsize, lo, size, source, start, strides)


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor after `remade`.

    olds are the keys that it was made of. unchanged: it is its one old tensor under another name, or the same. equal:
    olds whose values must be equal, since only the first is taken (the step of stacked experts).
    """

    tensor: Tensor
    olds: tuple[Key, ...]
    unchanged: bool
    equal: bool = False


def remade(tensors: Mapping[Key, Tensor], recipes: Sequence[Recipe]) -> dict[Key, Made]:
    """Tensors under new names: each recipe for every kind that its old tensors have, the rest as they are.

    A new tensor stands where the first that it was made of stood. Raises Damaged where a shape is not the recipe's or
    a part is missing; Unsupported for a state that is not elementwise, for types that differ within one new tensor, and
    where two tensors would have one name.
    """
    by_old: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        for name in dict.fromkeys(t.name for t in recipe.taken):
            by_old.setdefault(name, []).append(recipe)
    out: dict[Key, Made] = {}
    for key, tensor in tensors.items():
        if key.name not in by_old:
            _put(out, key, Made(tensor, (key,), unchanged=True))
            continue
        for recipe in by_old[key.name]:
            new = Key(recipe.name, key.kind, key.part)
            if new not in out or key not in out[new].olds:
                _put(out, new, _one(recipe, key, tensors))
    return out


def _put(out: dict[Key, Made], key: Key, made: Made) -> None:
    if key in out:
        raise Unsupported(
            f"two tensors would both be called {key.name} ({key.kind})",
            why=f"they are {out[key].olds[0].name} and {made.olds[0].name}",
            code="duplicate-name",
        )
    out[key] = made


def _one(recipe: Recipe, key: Key, tensors: Mapping[Key, Tensor]) -> Made:
    """One new tensor of one kind."""
    new = Key(recipe.name, key.kind, key.part)
    olds = tuple(Key(t.name, key.kind, key.part) for t in recipe.taken)
    missing = [k.name for k in olds if k not in tensors]
    if missing:
        raise _missing(new, missing[0], len(olds) - len(missing), len(olds))
    first = tensors[olds[0]]
    if recipe.is_rename:
        if key.kind in WEIGHTS and first.shown != recipe.shape:
            raise _shape(olds[0], first, recipe.taken[0].shape)
        return Made(replace(first, key=new), olds, unchanged=True)
    if all(_is_scalar(tensors[k], t.shape) for k, t in zip(olds, recipe.taken, strict=True)):
        return Made(replace(first, key=new), tuple(dict.fromkeys(olds)), unchanged=True, equal=len(set(olds)) > 1)
    for old, taken in zip(olds, recipe.taken, strict=True):
        tensor = tensors[old]
        if tensor.shown != taken.shape or tensor.logical is not None:
            raise _shape(old, tensor, taken.shape)
        if (tensor.dtype.name, tensor.held.name) != (first.dtype.name, first.held.name):
            raise Unsupported(
                f"{recipe.name} ({key.kind}) would be of two types",
                why=f"{olds[0].name} is {_types(first)}, {old.name} {_types(tensor)}",
                fix="convert them to one type first (--dtype)",
            )
        if tensor.made is not None:
            raise Unsupported(
                f"{recipe.name} ({key.kind}) cannot be put together: {old.name} is merged with an adapter on the way",
                fix="merge it first, by a conversion to hf, and convert the result",
            )
    why = next((tensors[k].why_unsupported for k in olds if tensors[k].why_unsupported), "")
    trains = {tensors[k].trainable for k in olds}
    sources = [(t.part, tensors[k].pieces) for k, t in zip(olds, recipe.taken, strict=True)]
    pieces = Composed(sources, first.held.itemsize)
    trainable = trains.pop() if len(trains) == 1 else None
    cast_from = first.cast_from
    made = Tensor(new, first.dtype, recipe.shape, pieces, trainable=trainable, why_unsupported=why, cast_from=cast_from)
    return Made(made, tuple(dict.fromkeys(olds)), unchanged=False)


def _types(tensor: Tensor) -> str:
    """A tensor's type, and the one that it is stored in where that is another."""
    return tensor.dtype.name if tensor.cast_from is None else f"{tensor.dtype.name} stored as {tensor.cast_from.name}"


def _is_scalar(tensor: Tensor, parameter: Shape) -> bool:
    """Whether it is one number for the whole parameter, as Adam's step is: every part has it then."""
    kind = tensor.key.kind
    return kind == "step" or (kind not in WEIGHTS and tensor.shape in ((), (1,)) and tensor.shape != parameter)


def _missing(new: Key, name: str, have: int, of: int) -> Damaged | Unsupported:
    if new.kind not in WEIGHTS:
        return Unsupported(
            f"the optimizer's {new.kind} of {new.name} cannot be put together: {name} has none",
            why=f"{have} of {of} parts have one; what the optimizer never updated has no state",
            fix="keep the source's names (--names disk), or let the optimizer go with --no-optimizer",
            code="part-missing",
        )
    return Damaged(
        f"{new.name} cannot be put together: {name} is not there",
        why=f"{have} of {of} parts are there",
        fix="take all of its parts or none (--only, --exclude); check the config with --model-config",
        code="part-missing",
    )


def _shape(old: Key, tensor: Tensor, wanted: Shape) -> Damaged | Unsupported:
    if old.kind not in WEIGHTS:
        return Unsupported(
            f"the optimizer's {old.kind} of {old.name} is {tensor.dtype.name} {tensor.shown}: it does not follow the "
            f"parameter, which is {wanted}",
            fix="leave the optimizer out with --no-optimizer, or keep the source's names",
        )
    return Damaged(
        f"{old.name} is {tensor.shown}, and should be {wanted}",
        why="so say the config and the naming of its family",
        fix="check the config (--model-config)",
        code="config-shape-mismatch",
    )
