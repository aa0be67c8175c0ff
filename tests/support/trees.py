"""Are two value trees the same? By structure, values and identity: one object in one is one object in the other."""

from __future__ import annotations

import struct
from typing import Any

from ckptctl.core.values import Global, OrderedPairs, Record, Storage, TensorRef
from ckptctl.formats.pickles.nodes import NumpyArray, PersistentId

ATOMS = (type(None), bool, int, str, Global)


def _parts(node: Any) -> list[tuple[str, Any]] | None:
    """Named parts of a node, each compared on its own; None for an atom."""
    if isinstance(node, dict):
        pairs = [
            (f"[{i}].{half}", part)
            for i, pair in enumerate(node.items())
            for half, part in zip("kv", pair, strict=True)
        ]
        return pairs + ([("attributes", node.attributes)] if isinstance(node, OrderedPairs) else [])
    if isinstance(node, (list, tuple)):
        return [(f"[{i}]", part) for i, part in enumerate(node)]
    if isinstance(node, Record):
        names = ("func", "args", "how", "kwargs", "state", "has_state", "items", "pairs")
        return [(name, getattr(node, name)) for name in names]
    if isinstance(node, Storage):
        return [("dtype", node.dtype.name if node.dtype else None), ("numel", node.numel), ("location", node.location)]
    if isinstance(node, TensorRef):
        names = ("storage", "offset", "shape", "stride", "requires_grad", "parameter", "conj", "neg", "attributes")
        return [(name, getattr(node, name)) for name in names] + [("dtype", node.dtype.name)]
    if isinstance(node, NumpyArray):
        return [(name, getattr(node, name)) for name in ("dtype", "shape", "data", "module", "fortran", "scalar")]
    if isinstance(node, PersistentId):
        return [("pid", node.pid)]
    return None


def difference(a: Any, b: Any) -> str:
    """Where two trees differ first; "" where they are the same. Storages are compared without their keys and places."""
    there: dict[int, Any] = {}
    back: dict[int, Any] = {}
    seen: set[tuple[int, int]] = set()
    todo: list[tuple[str, Any, Any]] = [("", a, b)]
    while todo:
        at, x, y = todo.pop()
        if type(x) is not type(y):
            return f"{at}: {type(x).__name__} and {type(y).__name__}"
        if isinstance(x, ATOMS):
            if x != y:
                return f"{at}: {x!r:.80} and {y!r:.80}"
            continue
        if isinstance(x, float):
            if struct.pack("<d", x) != struct.pack("<d", y):
                return f"{at}: {x!r} and {y!r}"
            continue
        if isinstance(x, complex):
            todo += [(at, x.real, y.real), (at, x.imag, y.imag)]
            continue
        # CPython has one object for each of (), b"", one-byte bytes and frozenset(): they say nothing.
        tells = not (isinstance(x, (tuple, frozenset)) and not x) and not (isinstance(x, bytes) and len(x) < 2)
        if tells and (there.setdefault(id(x), y) is not y or back.setdefault(id(y), x) is not x):
            return f"{at}: one object in one tree, two in the other"
        if (id(x), id(y)) in seen:
            continue
        seen.add((id(x), id(y)))
        if isinstance(x, (bytes, bytearray)):
            if x != y:
                return f"{at}: bytes differ"
            continue
        if isinstance(x, (set, frozenset)):
            plain = all(isinstance(item, (*ATOMS, float, tuple, bytes)) for item in x)
            if len(x) != len(y) or (plain and x != y):
                return f"{at}: sets differ"
            continue
        left, right = _parts(x), _parts(y)
        assert left is not None, f"{at}: a {type(x).__name__} in a tree"
        assert right is not None
        if [name for name, _ in left] != [name for name, _ in right]:
            return f"{at}: {len(left)} and {len(right)} parts"
        todo.extend((at + name, p, q) for (name, p), (_, q) in zip(reversed(left), reversed(right), strict=True))
    return ""
