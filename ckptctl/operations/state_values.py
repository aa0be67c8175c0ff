"""Values for showing, as JSON has them: any of them, and the training state's as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import part_of
from ckptctl.core.values import Array, Record, Tree

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint

_MOST = 16
"""Items of a list that are shown; longer ones are counted."""
_MOST_KEYS = 400
_MOST_VALUES = 1_000_000
"""Lists, dicts and objects that are walked for showing."""


def state_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Part -> name -> the value as plain data. What is long is told by its length: `show` has all of it."""
    out: dict[str, Any] = {}
    for name, value in checkpoint.values.items():
        out.setdefault(part_of(name), {})[name] = shortened(plain(value))
    return out


def shortened(value: Any) -> Any:
    """Plain data with long lists counted, and dicts cut after their first keys."""
    if isinstance(value, dict):
        items = list(value.items())
        cut = {k: shortened(v) for k, v in items[:_MOST_KEYS]}
        return {**cut, "...": f"{len(items) - _MOST_KEYS} more"} if len(items) > _MOST_KEYS else cut
    if isinstance(value, list):
        return f"<list of {len(value)}>" if len(value) > _MOST else [shortened(v) for v in value]
    if isinstance(value, str) and len(value) > 400:
        return value[:400] + "..."
    return value


def plain(tree: Tree, depth: int = 0, left: list[int] | None = None) -> Any:
    """A value tree as JSON data, for showing: what JSON has no word for becomes text, and what has no end is cut.

    left: how many values may yet be shown (a dict that holds itself twice would be endless).
    """
    left = left if left is not None else [_MOST_VALUES]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Array):
        return _array(tree)
    left[0] -= 1
    if depth > 40 or left[0] < 0:
        return "..."
    if isinstance(tree, dict):
        return {str(k): plain(v, depth + 1, left) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(v, depth + 1, left) for v in tree]
    if isinstance(tree, (set, frozenset)):
        return sorted((plain(v, depth + 1, left) for v in tree), key=repr)
    if isinstance(tree, Record):
        return f"<{tree.cls or 'object'}>"
    return f"<{len(tree)} bytes>" if isinstance(tree, (bytes, bytearray)) else str(tree)


def _array(value: Array) -> Any:
    import numpy as np

    from ckptctl.core.dtype import BY_NAME

    if len(value.data) > 64:
        return f"<{value.dtype} array of shape {tuple(value.shape)}>"
    dtype = BY_NAME[value.dtype].numpy if value.dtype in BY_NAME else np.dtype(value.dtype)
    return np.frombuffer(value.data, dtype).astype(object).reshape(value.shape).tolist()
