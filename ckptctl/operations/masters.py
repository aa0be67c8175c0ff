"""Weights and their float32 masters: where a format promises that one is the other rounded, samples are compared.

Flat tensors have no names in them: an order that is not the run's gives each parameter another's numbers, of the right
shape and count. A look at a few thousand elements of each finds that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.checkpoint import MASTER
from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.tensor import Key
from ckptctl.core.values import as_number
from ckptctl.formats.pickles.nodes import show
from ckptctl.operations.tensors import TensorReader, scalar, typed

if TYPE_CHECKING:
    from ckptctl.core.tensor import Tensor
    from ckptctl.execute import Budget
    from ckptctl.formats.target import Content, Item, Target

SAMPLE_NUMEL = 4096
"""Elements that are compared at the beginning, and at the end, of each parameter."""
PIECE_NUMEL = 512
"""Elements that are compared at the beginning of each piece of a master that is cut over ranks."""
MOST_PIECES = 64
"""Pieces of a parameter that are compared at most, spread over all of them."""
MOST = 2000
"""Parameters that are compared at most, spread over all of them."""


def require_rounded_masters(content: Content, budget: Budget, target: Target) -> None:
    """Damaged, naming the parameter, where a weight is not its master in the weight's type.

    Unsupported where it would not be so in a target that makes its weights of its masters: a cast to another type
    rounds the weights, which are rounded already, or widens them.
    """
    source = content.source
    if source.rounded_masters:
        _require_rounded(content, budget)
    if target.rounds_masters:
        _require_one_value(content, budget, target)


def _require_one_value(content: Content, budget: Budget, target: Target) -> None:
    pairs = []
    for (name, kind), master in content.states.items():
        weight = content.weights.get(name)
        if kind != MASTER or weight is None or weight.key == master.key or weight.tensor.cast_from is not None:
            continue
        if weight.tensor.numel and weight.shape == master.shape and weight.dtype.is_float:
            pairs.append((name, weight, master))
    with TensorReader(content.source, budget.memory_nbytes // 4) as reader:
        for name, weight, master in pairs[:: max(1, -(-len(pairs) // MOST))]:
            as_written = weight.dtype.numpy
            for start, stop in _spans(weight.tensor.numel):
                with np.errstate(invalid="ignore", over="ignore"):
                    a, b = (
                        typed(reader.run(i.key, start, stop), i.tensor).astype(as_written) for i in (weight, master)
                    )
                unlike = (a != b) & ~(np.isnan(a) & np.isnan(b))
                if unlike.any():
                    at = int(unlike.argmax())
                    raise Unsupported(
                        f"{name} would not be its master in {weight.dtype.name}",
                        where=content.source.root,
                        why=f"element {start + at} is {a[at]} by the weight, which is {weight.tensor.dtype.name} in "
                        f"the source, {b[at]} by the master: {target.called} has one of them, or both alike",
                        fix="--weights master makes the weights of the masters; --no-optimizer takes the weights alone",
                        code="masters-differ",
                    )


def _spans(numel: int, master: Tensor | None = None) -> list[tuple[int, int]]:
    """Elements that are compared: at the beginning and at the end, and where a rank's piece of the master begins.

    Ranks' files under each other's names give a parameter that goes over all of them its pieces in another order.
    """
    spans = {(0, min(numel, SAMPLE_NUMEL)), (max(0, numel - SAMPLE_NUMEL), numel)}
    for table in master.pieces if master is not None else ():
        if table.view == (numel,) and len(table) > 1:
            rows = range(0, len(table), max(1, -(-len(table) // MOST_PIECES)))
            starts = [(int(table.lo[r, 0]), int(table.size[r, 0])) for r in rows]
            spans |= {(at, at + min(size, PIECE_NUMEL)) for at, size in starts if size}
    return sorted(spans)


def _require_rounded(content: Content, budget: Budget) -> None:
    source = content.source
    used = {k[0] for k in content.states} | {n for n, item in content.weights.items() if item.key.kind == MASTER}
    pairs = []
    for name in dict.fromkeys(used):
        weight, master = source.tensors.get(Key(name)), source.tensors.get(Key(name, MASTER))
        if weight is not None and master is not None and weight.cast_from is None and weight.numel:
            pairs.append((weight, master))
    pairs = pairs[:: max(1, -(-len(pairs) // MOST))]
    if not pairs:
        return
    with TensorReader(source, budget.memory_nbytes // 4) as reader:
        for weight, master in pairs:
            for start, stop in _spans(weight.numel, master):
                stored = typed(reader.run(weight.key, start, stop), weight)
                with np.errstate(invalid="ignore", over="ignore"):
                    rounded = typed(reader.run(master.key, start, stop), master).astype(stored.dtype)
                unlike = (stored != rounded) & ~(np.isnan(stored) & np.isnan(rounded))
                if unlike.any():
                    at = int(unlike.argmax())
                    raise Damaged(
                        f"{weight.key.name} is not its float32 master rounded to {weight.dtype.name}",
                        where=source.root,
                        why=f"element {start + at} is {stored[at]} in the model, {rounded[at]} by the master: the "
                        "order of the flat groups is another one, the files are of two saves, or the weights were "
                        "changed apart from the optimizer",
                        fix="`--weights model --no-optimizer` takes the weights alone; copy the step again, from one "
                        "save",
                        code="masters-differ",
                    )


def require_equal_steps(content: Content, budget: Budget) -> None:
    """Unsupported where two parameters of a group count different steps: the target has one for both.

    The same holds for any other state that is one number beside a parameter (NAdam's mu_product).
    """
    if content.optimizer is None:
        return
    items: dict[str, dict[str, Item]] = {}
    shapes = {n: i.shape for n, i in content.weights.items()}
    for (name, kind), item in content.states.items():
        if kind == "step" or (item.shape in ((), (1,)) and item.shape != shapes.get(name, ())):
            items.setdefault(name, {})[kind] = item
    values: dict[str, dict[str, object]] = {}
    for (name, kind), value in content.optimizer.scalars.items():
        values.setdefault(name, {})[kind] = as_number(value)
    with TensorReader(content.source, budget.memory_nbytes // 4) as reader:
        for number, group in enumerate(content.optimizer.groups):
            first: dict[str, tuple[str, object]] = {}
            for name in group.params:
                own = {kind: scalar(reader, item.key) for kind, item in items.get(name, {}).items()}
                for kind, value in {**values.get(name, {}), **own}.items():
                    known, other = first.setdefault(kind, (name, value))
                    if value != other and repr(value) != repr(other):  # a NaN is one value, too
                        raise _unlike(content, number, kind, (known, other), (name, value))


def _unlike(
    content: Content, number: int, kind: str, first: tuple[str, object], other: tuple[str, object]
) -> Unsupported:
    is_step = kind == "step"
    a, b = (show(v) for _, v in (first, other))
    return Unsupported(
        f"param group {number} has parameters at different steps"
        if is_step
        else f"param group {number} has parameters of different {kind}",
        where=content.source.root,
        why=f"{first[0]} is at {a}, {other[0]} at {b}: the target has one step a group"
        if is_step
        else f"it is {a} of {first[0]}, {b} of {other[0]}: the target has one a group",
        fix="--no-optimizer lets the state go",
        code="steps-differ" if is_step else "unsupported",
    )


def count_of_updates(content: Content, budget: Budget, *, required: bool = True) -> int | None:
    """How often the optimizer updated every parameter; None where nothing says it.

    Where counts differ, Unsupported if one is required, else None.
    """
    if content.optimizer is None or not content.states:
        return None
    first: tuple[str, object] | None = None
    with TensorReader(content.source, budget.memory_nbytes // 4) as reader:
        steps = {n: scalar(reader, i.key) for (n, kind), i in content.states.items() if kind == "step"}
    scalars = content.optimizer.scalars
    steps |= {n: as_number(v) for (n, kind), v in scalars.items() if kind == "step" and n not in steps}
    for name, step in steps.items():
        first = first or (name, step)
        if step != first[1] and not required:
            return None
        if step != first[1]:
            raise Unsupported(
                "parameters were updated a different number of times",
                where=content.source.root,
                why=f"{first[0]} is at {first[1]!r}, {name} at {step!r}: the target has one count for all",
                fix="--no-optimizer lets the state go",
                code="steps-differ",
            )
    return None if first is None or not isinstance(first[1], (int, float)) else int(first[1])
