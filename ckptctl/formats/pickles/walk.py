"""Walks over value trees, without recursion and through cycles: each object once, with its first path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.values import Global, OrderedPairs, Record, Storage, TensorRef, Tree
from ckptctl.formats.pickles.nodes import NumpyArray, PersistentId, show

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple["Path", Tree] | None
"""A path as a chain: (the path of the parent, the key below it); None is the root."""

_LEAVES = frozenset({str, bytes, int, float, bool, complex, bytearray, Global, NumpyArray, type(None)})
_PLAIN_KEYS = {str, int}


def walk(tree: Tree, *, storages: bool = True) -> Iterator[tuple[Path, Tree]]:
    """Every node that is no plain scalar or text, parents first, in the tree's own order, each object once.

    storages: those of tensors too, each after its first tensor.
    """
    seen: set[int] = set()
    keep: list[Tree] = []  # nodes made on the way (pairs of a record) must live as long as their identity is in seen
    todo: list[tuple[Path, Tree]] = [(None, tree)]
    leaves = _LEAVES
    while todo:
        path, node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        kind = type(node)
        if kind is Storage:
            continue
        if kind is TensorRef:  # most nodes of most files
            if node.attributes is not None:
                todo.append(((path, ""), node.attributes))
            if storages:
                todo.append(((path, ""), node.storage))
            continue
        pairs = node.items() if kind is dict and {*map(type, node)} <= _PLAIN_KEYS else _children(node)
        below = [(key, child) for key, child in pairs if type(child) not in leaves and id(child) not in seen]
        if kind is Record:
            keep.extend(child for _, child in below)
        below.reverse()
        todo.extend([((path, key), child) for key, child in below])


def path_text(path: Path) -> str:
    """A path as people write it: keys joined by dots; "" for the root."""
    parts = []
    while path is not None:
        parent, key = path
        path = parent
        parts.append(key if type(key) is str else show(key, 40))
    return ".".join(part for part in reversed(parts) if part)


def _children(node: Tree) -> Iterator[tuple[Tree, Tree]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if isinstance(key, (tuple, frozenset, Record)):
                yield "", key
            yield key, value
        if isinstance(node, OrderedPairs) and node.attributes is not None:
            yield "", node.attributes
    elif isinstance(node, (list, tuple, set, frozenset)):
        yield from enumerate(node)
    elif isinstance(node, Record):
        yield "", node.func
        if node.args:
            yield "", node.args
        yield "", node.kwargs
        if node.items:
            yield "", node.items
        for key, value in node.pairs:
            yield "", key
            yield key, value
        yield "", node.state
    elif isinstance(node, TensorRef):
        yield "", node.storage
        yield "", node.attributes
    elif isinstance(node, PersistentId):
        yield "", node.pid
    elif not isinstance(node, Storage):
        return
