"""The few calls of a pickle that are evaluated, by our code: containers, numbers, bytes, OrderedDict, torch.Size.

Each takes the call's arguments and gives a tree, or NotImplemented where they are not the plain ones that a pickler
writes (the call then stays a Record). Nothing named by a file is ever imported or called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptctl.core.values import OrderedPairs, Tree
from ckptctl.formats.pickles.nodes import SizeTuple

Call = Callable[[tuple[Tree, ...]], Tree]

MAX_KEY_NODES, MAX_KEY_DEPTH = 4096, 64


def check_key(key: Tree) -> None:
    """Refuses what cannot be hashed in bounded time and depth: ValueError; what cannot be hashed at all: TypeError.

    A tuple of tuples that shares parts can take 2**depth steps to hash; a deep one overflows the interpreter's stack.
    """
    if type(key) is str or type(key) is int:
        return
    todo, seen = [(key, 0)], 0
    while todo:
        node, depth = todo.pop()
        if isinstance(node, (list, dict, set, bytearray)):
            raise TypeError(f"a {type(node).__name__} as a dictionary's key or in a set")
        if isinstance(node, tuple):
            seen += len(node)
            if seen > MAX_KEY_NODES or depth > MAX_KEY_DEPTH:
                raise ValueError("a key of too many nested tuples")
            todo.extend((item, depth + 1) for item in node)


def _plain(*types: type) -> Callable[[Tree], bool]:
    return lambda value: type(value) in types


_sequence = _plain(list, tuple, SizeTuple, set, frozenset)
_number = _plain(int, float, bool)


def _container(make: Callable[..., Any], hashes: bool) -> Call:
    def call(args: tuple[Tree, ...]) -> Tree:
        if not args:
            return make()
        if len(args) != 1 or not _sequence(args[0]):
            return NotImplemented
        if hashes:
            for item in args[0]:
                check_key(item)
        return make(args[0])

    return call


def _pairs(make: Callable[..., Any]) -> Call:
    def call(args: tuple[Tree, ...]) -> Tree:
        if not args:
            return make()
        if len(args) != 1:
            return NotImplemented
        rows = list(args[0].items()) if type(args[0]) is dict else args[0]
        if type(rows) not in (list, tuple) or not all(type(row) in (list, tuple) and len(row) == 2 for row in rows):
            return NotImplemented
        for key, _ in rows:
            check_key(key)
        return make(rows)

    return call


def _scalar(make: Callable[..., Any], accepts: Callable[[Tree], bool]) -> Call:
    return lambda args: make(*args) if len(args) <= 1 and all(map(accepts, args)) else NotImplemented


def _complex(args: tuple[Tree, ...]) -> Tree:
    return complex(*args) if len(args) <= 2 and all(map(_number, args)) else NotImplemented


def _bytearray(args: tuple[Tree, ...]) -> Tree:
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin-1", "latin1"):
        return bytearray(args[0], "latin-1")
    return bytearray(*args) if not args or (len(args) == 1 and type(args[0]) is bytes) else NotImplemented


def _encode(args: tuple[Tree, ...]) -> Tree:
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
    return NotImplemented


def _size(args: tuple[Tree, ...]) -> Tree:
    if not args:
        return SizeTuple()
    plain = len(args) == 1 and type(args[0]) in (tuple, list, SizeTuple) and all(type(n) is int for n in args[0])
    return SizeTuple(args[0]) if plain else NotImplemented


_BUILTINS: dict[str, Call] = {
    "set": _container(set, True),
    "frozenset": _container(frozenset, True),
    "list": _container(list, False),
    "tuple": _container(tuple, False),
    "dict": _pairs(dict),
    "bytearray": _bytearray,
    "complex": _complex,
    "int": _scalar(int, _number),
    "float": _scalar(float, _number),
    "bool": _scalar(bool, _number),
    "str": _scalar(str, _plain(str)),
    "bytes": _scalar(bytes, _plain(bytes)),
}

CALLS: Mapping[str, Call] = {
    **{f"{module}.{name}": call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
    "collections.OrderedDict": _pairs(OrderedPairs),
    "_codecs.encode": _encode,
    "torch.Size": _size,
}
"""By the dotted name a pickle gives. Source for bytes of protocol 2: CPython 3.13, Lib/pickle.py, save_bytes."""
