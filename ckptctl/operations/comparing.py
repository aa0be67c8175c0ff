"""diff: two checkpoints by value, whatever their formats and layouts.

Both sides are read streaming, in bounded memory: once, and tensors that one side alone has for their digests.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.checkpoint import MASTER, OTHER, WEIGHTS, Checkpoint, is_state
from ckptctl.core.errors import Unsupported, Usage
from ckptctl.core.globs import matches
from ckptctl.core.sizes import parse_size
from ckptctl.core.tensor import Key, Tensor
from ckptctl.names import head_and_embedding, is_tied
from ckptctl.operations.comparing_state import compare_optimizers, compare_values
from ckptctl.operations.conversion import WEIGHT_CHOICES
from ckptctl.operations.differences import Found
from ckptctl.operations.elsewhere import reads_hub
from ckptctl.operations.measuring import stats_of
from ckptctl.operations.namesakes import renamed
from ckptctl.operations.naming import under_one_naming
from ckptctl.operations.opening import (
    Reading,
    open_checkpoint,
    require_names,
    require_plain,
    require_safe,
    require_tensors,
)
from ckptctl.operations.pairs import WIDE, Pairs
from ckptctl.operations.tensors import TensorReader, typed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ckptctl.operations.measuring import Measure

Document = dict[str, Any]
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. weights alone by default."""

    weights: str = "model"
    optimizer: bool = False
    state: bool = False
    ignore_dtype: bool = False
    only: tuple[str, ...] = ()
    rtol: float = 0.0
    atol: float = 0.0
    stats: bool = False
    """Norms and cosines of every tensor and layer: all elements are computed with, not only those that differ."""


class State(NamedTuple):
    """Progress of a comparison, as progress bars take it."""

    done_nbytes: int
    total_nbytes: int


@reads_hub(2)
def diff(
    a: Path | str,
    b: Path | str,
    what: Comparison | None = None,
    reading: Reading | None = None,
    *,
    memory: str = "512MiB",
    progress: Callable[[Any], None] | None = None,
) -> Document:
    """What differs between two checkpoints (schema ckptctl.diff/1): `equal`, and `differences` of name, kind and what.

    Exact: bits are compared, so a NaN equals itself and 0.0 is not -0.0; with ignore_dtype values are widened first,
    which is exact. With rtol or atol, floats a and b are equal where |a - b| <= atol + rtol * |b|.
    """
    what = what or Comparison()
    for flag, value in (("--rtol", what.rtol), ("--atol", what.atol)):
        if not 0 <= value < float("inf"):
            raise Usage(f"{flag} {value}: a tolerance is a number from 0 on")
    if what.weights not in WEIGHT_CHOICES:
        raise Usage(f"--weights {what.weights}: there is no such choice", fix=f"one of {', '.join(WEIGHT_CHOICES)}")
    # Both lead from A's names to B's.
    plain_reading = None if reading is None else replace(reading, key_map=None, layer_names=None)
    sides = [_opened(a, reading, what), _opened(b, plain_reading, what)]
    if sides[0].facts.config is None or sides[1].facts.config is None:
        facts = sides[0].facts if sides[0].facts.config is not None else sides[1].facts
        sides = [replace(s, facts=facts) for s in sides]
    sides = list(under_one_naming(*sides))
    budget = parse_size(memory, "--memory")
    found = Found()
    with TensorReader(sides[0], budget // 4) as left, TensorReader(sides[1], budget // 4) as right:
        _tensors(left, right, what, found, progress)
        if what.optimizer:
            compare_optimizers(left, right, what.only, found)
    if what.state:
        compare_values(sides[0], sides[1], found)
    document = {
        "schema": "ckptctl.diff/1",
        "a": {"path": sides[0].root, "format": sides[0].format},
        "b": {"path": sides[1].root, "format": sides[1].format},
        "equal": not found.differences,
        "compared": dict(found.compared),
        "differences": found.differences,
    }
    if what.state:
        document["state"] = found.state
    if what.rtol or what.atol:
        document["within_tolerance"] = found.within
    if what.stats:
        document["stats"] = stats_of(found.measured)
    return document


def _opened(path: Path | str, reading: Reading | None, what: Comparison) -> Checkpoint:
    checkpoint, _ = open_checkpoint(path, reading)
    require_safe(checkpoint)
    require_tensors(checkpoint)
    require_plain(checkpoint)
    if what.optimizer:
        require_names(checkpoint)
    return checkpoint


def _named(checkpoint: Checkpoint, what: Comparison) -> dict[tuple[str, str], Key]:
    """What one side has, by (name, kind), and which tensor that is.

    A head that the config ties stands for its embedding where it is absent.
    """
    out: dict[tuple[str, str], Key] = {}
    for key in checkpoint.tensors:
        if key.kind in WEIGHTS:
            master = Key(checkpoint.ties.get(key.name, key.name), MASTER)
            out[key.name, "weight"] = master if what.weights == "master" and master in checkpoint.tensors else key
        elif (what.state and key.kind == OTHER) or (
            what.optimizer and is_state(key) and key.kind not in ("step", OTHER, "file")
        ):
            out[key.name, key.kind] = key
    return {k: v for k, v in out.items() if not what.only or matches(k[0], what.only)}


def _tied(
    checkpoint: Checkpoint, mine: Mapping[tuple[str, str], Key], other: Mapping[tuple[str, str], Key]
) -> dict[tuple[str, str], Key]:
    """The head of a tied model where this side leaves it out and the other does not."""
    if checkpoint.facts.config is None or not is_tied(checkpoint.facts.config):
        return {}
    pair = head_and_embedding(name for name, _ in {**other, **mine})
    if pair is None or (pair[0], "weight") in mine or (pair[1], "weight") not in mine:
        return {}
    return {(pair[0], "weight"): mine[pair[1], "weight"]}


def _own_masters(
    checkpoint: Checkpoint, mine: Mapping[tuple[str, str], Key], other: Mapping[tuple[str, str], Key]
) -> dict[tuple[str, str], Key]:
    """A float32 weight stands for its master where this side keeps none and the other does: it is what is updated."""
    out = {}
    for name, kind in other:
        weight = mine.get((name, "weight"))
        if kind != MASTER or (name, kind) in mine or weight is None:
            continue
        if checkpoint.tensors[weight].dtype.name == "float32":
            out[name, kind] = weight
    return out


def _tensors(
    left: TensorReader, right: TensorReader, what: Comparison, found: Found, progress: Callable[[Any], None] | None
) -> None:
    a, b = _named(left.checkpoint, what), _named(right.checkpoint, what)
    for g in what.only:
        if not any(matches(name, (g,)) for name, _ in (*a, *b)):
            raise Usage(f"--only {g!r} matches no tensor of either", fix="see the names with `ckptctl ls`")
    a, b = {**a, **_tied(left.checkpoint, a, b)}, {**b, **_tied(right.checkpoint, b, a)}
    a, b = {**a, **_own_masters(left.checkpoint, a, b)}, {**b, **_own_masters(right.checkpoint, b, a)}
    total = sum(left.checkpoint.tensors[k].nbytes for k in a.values())
    done = 0
    gone = {n: k for n, k in a.items() if n not in b}
    new = {n: k for n, k in b.items() if n not in a}
    moved = renamed(left, gone, right, new)
    arrived = {(to, kind) for (_, kind), to in moved.items()}
    unlike = {n: _unlike(left, k, right, b[n], what) for n, k in a.items() if n in b}
    pairs = Pairs(
        left, right, {n: (a[n], b[n]) for n, why in unlike.items() if why is None}, what.rtol, what.atol, what.stats
    )
    with ThreadPoolExecutor(_THREADS) as pool:
        measured = pairs.measured(pool)
        for name in [*a, *new]:
            if name in moved:
                found.compared[name[1]] += 1
                found.add(*name, "renamed", f"{moved[name]} in b, with the same values", to=moved[name])
            if name in gone or name in new:
                if name not in moved and name not in arrived:
                    found.add(*name, "only-in-a" if name in a else "only-in-b")
                continue
            found.compared[name[1]] += 1
            why = unlike[name]
            if why is not None:
                found.add(*name, *why)
            else:
                _values(left, a[name], right, b[name], next(measured), name, what, found)
            done += left.checkpoint.tensors[a[name]].nbytes
            if progress is not None:
                progress(State(done, total))


def _unlike(left: TensorReader, a: Key, right: TensorReader, b: Key, what: Comparison) -> tuple[str, str] | None:
    """How two tensors of one name are unlike without a look at their values: shape or dtype, and both."""
    x, y = left.checkpoint.tensors[a], right.checkpoint.tensors[b]
    for side, tensor in ((left, x), (right, y)):
        # State that its writer put in wrong places is compared as it lies: a copy of such a folder is equal to it.
        if tensor.why_unsupported and tensor.why_unsupported != side.checkpoint.damaged_state:
            raise Unsupported(f"{a.name} cannot be compared", where=side.checkpoint.root, why=tensor.why_unsupported)
    if x.shown != y.shown:
        return "shape", f"{x.shown} and {y.shown}"
    if x.dtype.name != y.dtype.name and not (what.ignore_dtype and x.dtype.name in WIDE and y.dtype.name in WIDE):
        return "dtype", f"{x.dtype.name} and {y.dtype.name}"
    return None


def _values(
    left: TensorReader,
    a: Key,
    right: TensorReader,
    b: Key,
    measure: Measure,
    name: tuple[str, str],
    what: Comparison,
    found: Found,
) -> None:
    """What comparing the values of two tensors gave, as a difference where there is one."""
    tensor = left.checkpoint.tensors[a]
    found.within += measure.within
    if what.stats:
        found.measured[name] = measure
    if measure.differing:
        index, values = _first(left, a, right, b, measure.first)
        found.add(
            *name,
            "value",
            f"{measure.differing} of {tensor.numel} elements; the first at {index}: {values[0]} and {values[1]}",
            **_measured(measure, tensor, index, values),
        )


def _measured(measure: Measure, tensor: Tensor, index: list[int], values: list[Any]) -> Document:
    """What a difference says in numbers."""
    plain_values = [v.item() if hasattr(v, "item") else v for v in values]
    numbers = [v if isinstance(v, (bool, int, float)) else str(v) for v in plain_values]
    return {
        "elements": tensor.numel,
        "differing": measure.differing,
        "max_abs": measure.max_abs,
        "max_rel": measure.max_rel,
        "max_ulp": measure.max_ulp,
        "nan_on_one_side": measure.nans,
        "first": {"index": index, "a": numbers[0], "b": numbers[1]},
    }


def _first(left: TensorReader, a: Key, right: TensorReader, b: Key, element: int) -> tuple[list[int], list[Any]]:
    """The index of an element, and both sides' values."""
    tensor = left.checkpoint.tensors[a]
    index = [int(i) for i in np.unravel_index(element, tensor.shape)] if tensor.shape else []
    values = [typed(r.run(k, element, element + 1), r.checkpoint.tensors[k])[0] for r, k in ((left, a), (right, b))]
    return index, values
