"""Sizes and conditions of naming files: whole numbers, comparisons and choices over a config. Nothing else can be said.

An expression is parsed by the standard library's grammar and walked; what is not listed here is refused, and nothing is
ever evaluated by Python itself.
"""

from __future__ import annotations

import ast
import operator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LARGEST = 1 << 62
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class NoNumber(ValueError):
    """An expression needs a number that the config does not have, or has as something else."""


@lru_cache(maxsize=4096)
def parsed(text: str) -> ast.expr:
    """The tree of an expression. ValueError where it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as err:
        raise ValueError(f"{text!r} is no expression") from err


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """What an expression says over those names; a name that is not there is None.

    given(a, b, ...) is the first that is not None; either(key, where_null, where_absent) tells a key that is null from
    one that is not there. Raises NoNumber where a number is needed and there is none, ValueError for what is no
    expression.
    """
    return _value(parsed(text), names)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, (int, str)):
            return value
        case ast.Name(name):
            return names.get(name)
        case ast.List(items):
            return [_value(i, names) for i in items]
        case ast.IfExp(test, body, orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, names)
        case ast.BoolOp(op, values):
            wanted = isinstance(op, ast.Or)
            return any(_value(v, names) for v in values) if wanted else all(_value(v, names) for v in values)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return _bounded(_ARITHMETIC[type(op)], _number(left, names), _number(right, names))
        case ast.Compare(left, [op], [right]):
            return _compared(left, op, right, names)
        case ast.Call(ast.Name("given"), args, []):
            return next((v for v in (_value(a, names) for a in args) if v is not None), None)
        case ast.Call(ast.Name("either"), [ast.Name(key), null, absent], []):
            found = names.get(key)
            return found if found is not None else _value(null if key in names else absent, names)
        case _:
            raise ValueError(f"{ast.unparse(node)} is not understood")


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr, names: Mapping[str, Any]) -> bool:
    if type(op) in _ORDER:
        return _ORDER[type(op)](_number(left, names), _number(right, names))
    a, b = _value(left, names), _value(right, names)
    if isinstance(op, (ast.In, ast.NotIn)):
        if not isinstance(b, list):
            raise NoNumber(f"{ast.unparse(right)} is {b!r}, not a list")
        return (a in b) is isinstance(op, ast.In)
    if isinstance(op, (ast.Eq, ast.NotEq)):
        return bool(a == b) is isinstance(op, ast.Eq)
    raise ValueError(f"{type(op).__name__} is not understood")


def _number(node: ast.expr, names: Mapping[str, Any]) -> int:
    found = _value(node, names)
    if type(found) is not int:
        raise NoNumber(f"{ast.unparse(node)} is {found!r}, not a whole number")
    return found


def _bounded(op: Callable[[int, int], int], a: int, b: int) -> int:
    try:
        found = op(a, b)
    except ZeroDivisionError as err:
        raise NoNumber(f"{a} is divided by zero") from err
    if abs(found) > LARGEST:
        raise NoNumber(f"{found} is too large")
    return found
