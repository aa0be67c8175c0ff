"""The run of opcodes that torch writes for one tensor, read in one step: most of a file of many tensors is such runs.

Only where it comes to the same as opcode by opcode: nothing here decides what a call gives, and where a run is not
quite like this one, the machine reads it as any other.
Source: torch 2.13, torch/_tensor.py, _reduce_ex_internal; torch/serialization.py, persistent_id; CPython 3.13,
Lib/pickle.py, _Pickler, protocol 2.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.values import Tree

_GET, _PUT, _INT = rb"(?:h.|j.{4})", rb"(?:q.|r.{4})", rb"(?:K.|M..|J.{4})"
_INTS = rb"(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,8}t)" % ((_INT,) * 4)
_MATCH = re.compile(
    rb"\(\((%(get)b)(%(get)b)X(.)\0\0\0(\d{1,19})(%(put)b)(%(get)b)(%(int)b)(N?)t(%(put)b)Q"  # its storage
    rb"(%(int)b)(?:(%(ints)b)(%(put)b)(%(ints)b)(%(put)b)|\)\))([\x88\x89])"  # offset, shape, strides, requires_grad
    rb"(%(get)b)\)R(%(put)b)t(%(put)b)R(%(put)b)"  # its hooks, an empty OrderedDict
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.S,
).match


class Run(NamedTuple):
    """What the run is: the call's arguments, memo entries that it makes (nobody reads them), one past its last byte."""

    args: tuple[Tree, ...]
    puts: int
    stop: int


def tensor_at(
    data: bytes,
    at: int,
    memo: dict[int, Tree],
    dense: int,
    read: frozenset[int],
    call: Callable[[Tree, tuple[Tree, ...]], Tree],
    persistent: Callable[[Tree], Tree],
) -> Run | None:
    """The run at data[at:], None where there is none, or one that must be read opcode by opcode.

    dense is how many memo entries there are: those that the run makes must be the next ones, and in none of read.
    """
    found = _MATCH(data, at)
    if found is None:
        return None
    word, kind, length, key, p0, place, numel, none, p1, offset, shape, p2, strides, p3, grad, hooks, p4, p5, p6 = (
        found.groups()
    )
    puts = 5 if shape is None else 7
    ids = b"".join((p0, p1, p4, p5, p6) if shape is None else (p0, p1, p2, p3, p4, p5, p6))
    codes, numbers = _next_puts(dense, puts)
    if ids != codes or length[0] != len(key) or not read.isdisjoint(numbers):
        return None
    try:
        pid = (memo[_number(word)], memo[_number(kind)], key.decode(), memo[_number(place)], _number(numel))
        storage = persistent((*pid, None) if none else pid)
        sizes = ((), ()) if shape is None else (tuple(_numbers(shape)), tuple(_numbers(strides)))
        made = (storage, _number(offset), *sizes, grad == b"\x88", call(memo[_number(hooks)], ()))
    except (KeyError, TypeError, ValueError):  # opcode by opcode it is said at which byte
        return None
    return Run(made, puts, found.end())


@lru_cache(1 << 14)
def _next_puts(dense: int, puts: int) -> tuple[bytes, tuple[int, ...]]:
    """How memo entries are written that are the next ones after dense, one after the other, and their numbers."""
    numbers = tuple(range(dense, dense + puts))
    return b"".join(b"q%c" % n if n < 256 else b"r" + n.to_bytes(4, "little") for n in numbers), numbers


@lru_cache(1 << 12)
def _number(code: bytes) -> int:
    """The operand of BINGET, LONG_BINGET, BININT, BININT1 or BININT2."""
    return code[1] if len(code) == 2 else int.from_bytes(code[1:], "little", signed=code[0] == 0x4A)


@lru_cache(1 << 12)
def _numbers(codes: bytes) -> list[int]:
    """The whole numbers of a tuple's opcodes: a list, since each tuple of a pickle is an object of its own."""
    out, at = [], int(codes[0] == 0x28)
    while at < len(codes) - 1:
        stop = at + {0x4B: 2, 0x4D: 3, 0x4A: 5}[codes[at]]
        out.append(_number(codes[at:stop]))
        at = stop
    return out
