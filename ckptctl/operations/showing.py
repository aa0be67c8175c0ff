"""show: one tensor's values and statistics, or a value of the training state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.errors import Unrecognised, Unsupported, Usage
from ckptctl.core.sizes import parse_size
from ckptctl.core.tensor import Key, Tensor
from ckptctl.operations.opening import Reading, open_checkpoint, require_safe
from ckptctl.operations.state_values import plain
from ckptctl.operations.tensors import TensorReader, typed

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.checkpoint import Checkpoint

SHOWN_ELEMENTS = 1000
"""How many elements are printed whole; more are shortened, as NumPy does."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A basic NumPy index as a box and a step.

    Lo and size cover it, steps pick inside, axes of integers are dropped.
    """

    lo: tuple[int, ...]
    size: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: tuple[int, ...]


def select(index: object, shape: tuple[int, ...]) -> Selection:
    """A basic index (integers, slices, Ellipsis) of a shape. IndexError as NumPy raises it; only positive steps."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts.count(Ellipsis) > 1:
        raise IndexError("an index can have only one ellipsis")
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    if len(parts) != len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} axes, {len(parts)} are indexed")
    lo, size, steps, dropped = [], [], [], []
    for axis, (part, n) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            if part.step is not None and part.step < 1:
                raise IndexError("steps must be positive")
            start, stop, step = part.indices(n)
            lo.append(start)
            size.append(max(0, stop - start))
            steps.append(step)
        elif isinstance(part, (int, np.integer)):
            at = int(part) + (n if part < 0 else 0)
            if not 0 <= at < n:
                raise IndexError(f"index {part} is out of bounds for axis {axis} with size {n}")
            lo.append(at)
            size.append(1)
            steps.append(1)
            dropped.append(axis)
        else:
            raise IndexError("only integers, slices and ... are indices here")
    return Selection(tuple(lo), tuple(size), tuple(steps), tuple(dropped))


def selected(reader: TensorReader, key: Key, index: object) -> npt.NDArray[Any]:
    """The elements of a basic index; reads the box that covers them."""
    chosen = select(index, reader.checkpoint.tensors[key].shape)
    array = reader.array(key, chosen.lo, chosen.size)
    return array[tuple(0 if a in chosen.dropped else slice(None, None, s) for a, s in enumerate(chosen.steps))]


def parse_index(text: str) -> object:
    """A --slice as an index: '0:4, :8', '3', '...'. Usage for anything else."""
    parts: list[object] = []
    for raw in text.strip().strip("[]").split(","):
        word = raw.strip()
        try:
            if word == "...":
                parts.append(Ellipsis)
            elif ":" in word:
                parts.append(slice(*(int(w) if w.strip() else None for w in word.split(":"))))
            else:
                parts.append(int(word))
        except (ValueError, TypeError) as err:
            raise Usage(f"--slice {text!r}: {word!r} is no index", fix="write it as in NumPy: '0:4, :8'") from err
    return tuple(parts)


def show(
    path: Path | str,
    name: str,
    reading: Reading | None = None,
    *,
    kind: str = "weight",
    selection: str = "",
    stats: bool = False,
    npy: Path | str | None = None,
    memory: str = "512MiB",
) -> dict[str, Any]:
    """One tensor (schema ckptctl.show/1): its values, or with stats its statistics; or the value of that name."""
    checkpoint, _ = open_checkpoint(path, reading)
    require_safe(checkpoint)
    key = Key(name, kind)
    if key not in checkpoint.tensors:
        value = _value(checkpoint, name)
        if value is not None:
            return {"schema": "ckptctl.show/1", "name": name, "value": value[0]}
        raise Unrecognised(
            f"there is no {kind} called {name}",
            where=checkpoint.root,
            why=_near(checkpoint, name),
            fix="see the names with `ckptctl ls`",
        )
    tensor = checkpoint.tensors[key]
    if tensor.why_unsupported:
        raise Unsupported(f"{name} cannot be read", why=tensor.why_unsupported)
    budget = parse_size(memory, "--memory")
    document: dict[str, Any] = {
        "schema": "ckptctl.show/1",
        "name": name,
        "kind": kind,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shown),
        "slice": selection,
    }
    with TensorReader(checkpoint, budget // 4) as reader:
        if stats:
            document["stats"] = (
                statistics(reader, key) if not selection else _statistics_of([_chosen(reader, key, selection, budget)])
            )
        if npy is not None:
            array = _chosen(reader, key, selection, budget)
            np.save(
                npy,
                array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}"),
                allow_pickle=False,
            )
            document["npy"] = str(npy)
        elif not stats:
            document |= _printed(reader, key, tensor, selection, budget)
    return document


def _chosen(reader: TensorReader, key: Key, selection: str, budget: int) -> npt.NDArray[Any]:
    tensor = reader.checkpoint.tensors[key]
    index = parse_index(selection) if selection else ()
    try:
        box = select(index, tensor.shape)
    except IndexError as err:
        raise Usage(
            f"--slice {selection!r} does not fit {key.name}", why=f"{err}; its shape is {tensor.shape}"
        ) from err
    nbytes = math.prod(box.size) * tensor.dtype.itemsize
    if nbytes > budget:
        raise Usage(
            f"{nbytes} bytes of {key.name} are more than --memory allows ({budget})",
            fix="take a --slice, or raise --memory",
        )
    return selected(reader, key, index)


def _printed(reader: TensorReader, key: Key, tensor: Tensor, selection: str, budget: int) -> dict[str, Any]:
    """Text as NumPy prints it, and the values themselves where there are few.

    A large tensor is read at its corners only.
    """
    if not selection and tensor.numel > SHOWN_ELEMENTS:
        edge = tuple(slice(0, min(n, 8)) for n in tensor.shape)
        array = selected(reader, key, edge)
        return {"text": f"{_text(array)}\n(the first {' x '.join(map(str, array.shape))}; take a --slice for others)"}
    array = _chosen(reader, key, selection, budget)
    out: dict[str, Any] = {"text": _text(array)}
    if array.size <= SHOWN_ELEMENTS:
        out["values"] = _listed(array)
    return out


def _text(array: npt.NDArray[Any]) -> str:
    wide = array.astype(np.float32) if array.dtype.kind not in "biufc" else array
    return np.array2string(wide, threshold=SHOWN_ELEMENTS, separator=", ")


def _listed(array: npt.NDArray[Any]) -> Any:
    wide = array.astype(np.float32) if array.dtype.kind not in "biufc" else array
    return np.asarray(wide if wide.dtype.kind != "c" else wide.astype(str)).tolist()


def statistics(reader: TensorReader, key: Key) -> dict[str, Any]:
    """Statistics of a whole tensor, read once in bounded memory."""
    tensor = reader.checkpoint.tensors[key]
    return _statistics_of(typed(data, tensor) for _, data in reader.chunks(key))


def _statistics_of(chunks: Any) -> dict[str, Any]:
    count = nan = inf = zero = 0
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    for chunk in chunks:
        values = np.asarray(chunk).reshape(-1)
        wide = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
        finite = wide[np.isfinite(wide)]
        count += wide.size
        nan += int(np.isnan(wide).sum())
        inf += int(np.isinf(wide).sum())
        zero += int((wide == 0).sum())
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            total += float(finite.sum())
            squares += float((finite * finite).sum())
    good = count - nan - inf
    return {
        "elements": count,
        "min": low if good else None,
        "max": high if good else None,
        "mean": total / good if good else None,
        "norm": math.sqrt(squares),
        "nan": nan,
        "inf": inf,
        "zero": zero,
    }


def _value(checkpoint: Checkpoint, name: str) -> tuple[Any] | None:
    """A value by name, or by a dotted path inside one; wrapped, since None is a value."""
    if name in ("param_groups", "groups") and checkpoint.optimizer is not None:
        return (
            [
                {**{k: plain(v) for k, v in g.options.items()}, "params": list(g.params)}
                for g in checkpoint.optimizer.groups
            ],
        )
    at: Any = checkpoint.values
    rest = name
    while rest:
        if not isinstance(at, Mapping):
            return None
        found = next(
            (k for k in sorted(map(str, at), key=len, reverse=True) if rest == k or rest.startswith(k + ".")), None
        )
        if found is None:
            return None
        at = next(v for k, v in at.items() if str(k) == found)
        rest = rest[len(found) + 1 :]
    return (plain(at),)


def _near(checkpoint: Checkpoint, name: str) -> str:
    """What may have been meant: the same name under other kinds, or names alike."""
    from difflib import get_close_matches

    kinds = [k.kind for k in checkpoint.tensors if k.name == name]
    if kinds:
        return f"it is there as {', '.join(kinds)} (--kind)"
    close = get_close_matches(name, [*dict.fromkeys(k.name for k in checkpoint.tensors), *checkpoint.values], 3)
    return f"near to it: {', '.join(close)}" if close else f"there are {len(checkpoint.tensors)} tensors"
