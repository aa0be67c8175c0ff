"""diff of the training state that is no tensor: steps, settings of param groups, scalars, and the values.

`comparing` has the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.checkpoint import part_of
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Unsupported
from ckptctl.core.globs import matches
from ckptctl.core.values import Array, Held, Record, as_number
from ckptctl.formats.torchgroups import completed
from ckptctl.operations.state_values import plain
from ckptctl.operations.tensors import scalar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.checkpoint import Checkpoint, Group
    from ckptctl.core.values import Tree
    from ckptctl.operations.differences import Found
    from ckptctl.operations.tensors import TensorReader

Document = dict[str, Any]
_SHOWN = 60
_DEEPEST = 200
"""Levels of values: none that a framework saves comes near. Python's own stack ends at 1,000."""
_MOST_VALUES = 5_000_000


def compare_optimizers(left: TensorReader, right: TensorReader, only: Sequence[str], found: Found) -> None:
    """Steps, settings and scalars of parameters whose names match only (all where it is empty)."""
    _steps(left, right, only, found)
    _groups(left.checkpoint, right.checkpoint, only, found)
    _scalars(left.checkpoint, right.checkpoint, only, found)


def _steps(left: TensorReader, right: TensorReader, only: Sequence[str], found: Found) -> None:
    a, b = (_step_numbers(r) for r in (left, right))
    for name in [*a, *(n for n in b if n not in a)]:
        if only and not matches(name, only):
            continue
        if name not in b or name not in a:
            found.add(name, "step", "only-in-a" if name in a else "only-in-b")
            continue
        found.compared["step"] += 1
        if a[name] != b[name]:
            found.add(name, "step", "value", f"{a[name]} and {b[name]}")


def _step_numbers(reader: TensorReader) -> dict[str, Any]:
    checkpoint = reader.checkpoint
    out = {k.name: scalar(reader, k) for k in checkpoint.tensors if k.kind == "step"}
    for (name, kind), value in (checkpoint.optimizer.scalars if checkpoint.optimizer else {}).items():
        if kind == "step":
            out[name] = as_number(value)
    return out


def _scalars(a: Checkpoint, b: Checkpoint, only: Sequence[str], found: Found) -> None:
    """What is no tensor in a parameter's state, and the optimizer's own keys beside its groups."""
    sides = []
    for side in (a, b):
        optimizer = side.optimizer
        items = {k: _comparable(v) for k, v in (optimizer.scalars if optimizer else {}).items() if k[1] != "step"}
        own = dict(_leaves(optimizer.options)) if optimizer else {}
        sides.append({**items, **{(name, "optimizer"): value for name, value in own.items()}})
    left, right = sides
    for name in [*left, *(n for n in right if n not in left)]:
        if only and not matches(name[0], only):
            continue
        if name not in right or name not in left:
            found.add(*name, "only-in-a" if name in left else "only-in-b")
            continue
        found.compared[name[1]] += 1
        if not _alike(left[name], right[name]):
            found.add(*name, "value", f"{str(left[name])[:60]} and {str(right[name])[:60]}")


def _groups(a: Checkpoint, b: Checkpoint, only: Sequence[str], found: Found) -> None:
    """Settings by parameter.

    The number and order of groups may differ between formats, what a parameter trains with may not.
    """
    left, right = _settings(a), _settings(b)
    if not left or not right:
        if left or right:
            found.add("param_groups", "group", "only-in-a" if left else "only-in-b")
        return
    for name in [*left, *(n for n in right if n not in left)]:
        if only and not matches(name, only):
            continue
        if name not in right or name not in left:
            found.add(name, "group", "only-in-a" if name in left else "only-in-b")
            continue
        found.compared["group settings"] += 1
        x, y = left[name], right[name]
        unlike = [
            f"{k}: {x.get(k, 'absent')} and {y.get(k, 'absent')}"
            for k in sorted({*x, *y})
            if not _alike(x.get(k, ...), y.get(k, ...))
        ]
        if unlike:
            found.add(name, "group", "value", "; ".join(unlike))


def _settings(checkpoint: Checkpoint) -> dict[str, Document]:
    optimizer, _ = completed(checkpoint.optimizer)  # what torch's Adam says, and a fused one takes for granted
    if optimizer is None:
        return {}
    out = {}
    for group in optimizer.groups:
        settings = {k: _comparable(v) for k, v in {**_implied(group), **group.options}.items()}
        out.update(dict.fromkeys(group.params, settings))
    return out


def _implied(group: Group) -> dict[str, Any]:
    """What torch's Adam does without a setting for it: it always corrects the moments' bias. A fused one is told so."""
    return {"bias_correction": True} if "amsgrad" in group.options else {}


def _alike(a: Any, b: Any) -> bool:
    """Equal numbers or texts; a flag is not a number, and NaN equals itself."""
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(v, b[k]) for k, v in a.items())
    return bool(a == b) or (a != a and b != b)


def compare_values(a: Checkpoint, b: Checkpoint, found: Found) -> None:
    """Scheduler, counters, random state and whatever else is carried, leaf by leaf, as a list and as a tree."""
    left, right = (dict(_paths({**c.values, "model": dict(c.model_values)})) for c in (a, b))
    for path in [*left, *(n for n in right if n not in left)]:
        part = part_of(path[0])
        name, place = ".".join(path), (part, *path)
        if path not in right or path not in left:
            what = "only-in-a" if path in left else "only-in-b"
            found.add(name, part, what, path=list(place))
            found.leaf(place, what, _short(left.get(path)), _short(right.get(path)))
            continue
        found.compared[part] += 1
        if _alike(left[path], right[path]):
            found.leaf(place)
        else:
            x, y = _short(left[path]), _short(right[path])
            found.add(name, part, "value", f"{x} and {y}", path=list(place))
            found.leaf(place, "value", x, y)


def _short(value: Any) -> Any:
    """A leaf for showing."""
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _leaves(tree: Mapping[Any, Tree]) -> list[tuple[str, Any]]:
    return [(".".join(path), value) for path, value in _paths(tree)]


def _paths(tree: Mapping[Any, Tree]) -> list[tuple[tuple[str, ...], Any]]:
    """(keys, leaf) of everything below a dict, in its order. Unsupported for what has no end."""
    out: list[tuple[tuple[str, ...], Any]] = []
    todo: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    left = [_MOST_VALUES]
    while todo:
        path, value = todo.pop()
        if isinstance(value, Mapping):
            if len(path) > _DEEPEST:
                raise _endless()
            todo += [((*path, str(k)), v) for k, v in list(value.items())[::-1]]
        else:
            out.append((path, _comparable(value, left)))
        _count(left)
    return out


def _endless() -> Unsupported:
    return Unsupported(
        "values beside the tensors are nested too deep, hold themselves, or are too many to compare",
        why=f"more than {_MOST_VALUES} of them, or {_DEEPEST} levels",
        fix="compare the tensors alone: --weights or --optimizer",
    )


def _count(left: list[int], n: int = 1) -> None:
    left[0] -= n
    if left[0] < 0:
        raise _endless()


def _comparable(value: Tree, left: list[int] | None = None, depth: int = 0) -> Any:
    """A leaf for comparing, all of it: arrays by their bytes, whatever library pickled them, objects by what made them.

    left: how many values may yet be looked at.
    """
    left = left if left is not None else [_MOST_VALUES]
    _count(left)
    if depth > _DEEPEST:
        raise _endless()

    def inner(v: Tree) -> Any:
        return _comparable(v, left, depth + 1)

    if isinstance(value, Array):
        kind = value.dtype if value.dtype in BY_NAME else np.dtype(value.dtype).name
        return ["array", kind, *value.shape, value.data.hex()]
    if isinstance(value, Held):
        return "a tensor"  # compared as one
    if isinstance(value, (list, tuple)):
        return [inner(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): inner(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((inner(v) for v in value), key=repr)
    if isinstance(value, Record):
        pairs = [[inner(k), inner(v)] for k, v in value.pairs]
        made = [inner(v) for v in (value.args, value.kwargs, value.state, value.items)]
        return ["object", value.cls or inner(value.func), *made, pairs]
    return bytes(value).hex() if isinstance(value, (bytes, bytearray)) else plain(value)
