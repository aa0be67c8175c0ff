"""The machine that reads one pickle: its stacks, its memo, and a step for every opcode. See `build.load`.

It keeps its own stacks, so nesting costs no recursion, and forgets memo entries that nothing reads.
Source of the semantics: CPython 3.13, Lib/pickle.py, _Unpickler.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.core.values import Record, Tree
from ckptctl.formats.pickles.calls import Call, check_key
from ckptctl.formats.pickles.nodes import PersistentId, show
from ckptctl.formats.pickles.objects import Finish, Fresh, Objects, append, memoized, put_state, set_items
from ckptctl.formats.pickles.opcodes import OPCODES
from ckptctl.formats.pickles.scan import HIGHEST_PROTOCOL
from ckptctl.formats.pickles.tensors import tensor_at
from ckptctl.formats.pickles.text import COUNTED_BYTES, TEXT_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptctl.formats.pickles.scan import Scan

# Runs of opcodes that make up most of a large pickle of objects: one step where no GET reads their memo entries.
_FRESH = b")\x81\x94}\x94("
"""EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK: an instance whose state, a dict, follows."""
_SIZE = b"\x94\x85\x94R\x94"
"""MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE: a call with the tuple before it as the only argument, as of torch.Size."""


class Machine(Objects):
    """One pickle being read. at is the opcode's offset once something went wrong."""

    def __init__(
        self,
        data: bytes,
        where: str,
        found: Scan,
        persistent: Callable[[Tree], Tree] | None,
        calls: Mapping[str, Call],
        finish: Mapping[str, Finish],
        known: Mapping[str, Callable[[Tree], Tree]],
    ) -> None:
        self.data, self.where, self.found = data, where, found
        self.persistent = persistent or PersistentId
        super().__init__(calls, finish, known)

    def run(self) -> Tree:
        """The value that the pickle leaves. Damaged, saying at which byte, for what no pickler writes."""
        try:
            return self._run()
        except CkptError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, OverflowError, AttributeError, struct.error) as err:
            opcode = OPCODES.get(self.data[self.at]) if self.data else None
            name = opcode.name if opcode else "an opcode"
            why = str(err) or type(err).__name__
            if isinstance(err, IndexError):
                why = "it needs more on the stack than there is"
            elif isinstance(err, KeyError):
                why = f"it reads memo {show(err.args[0] if err.args else '')}, which was never written"
            raise Damaged(
                f"the pickle is damaged at {name}",
                where=self.where,
                why=f"at byte {self.at}: {why}",
                fix="copy the file again",
                code="pickle-damaged",
            ) from err
        except (MemoryError, RecursionError) as err:
            raise Damaged(
                "the pickle is too deep or too large to read",
                where=self.where,
                why=f"at byte {self.at}",
                code="pickle-damaged",
            ) from err

    def _run(self) -> Tree:
        data, at, read, never = self.data, self.found.start, self.found.read, self.found.stop - self.found.start
        stack: list[Tree] = []
        marks: list[list[Tree]] = []
        memo: dict[int, Tree] = {}
        aliases: dict[int, list[int]] = {}  # memo ids of records that may be replaced once they have their state
        # MEMOIZE numbers entries by how many there are: those below dense, and the scattered ones above.
        dense, scattered = 0, set[int]()
        tail: tuple[Tree, ...]
        waiting = 0  # how many Fresh stand for an object whose state has yet to come
        makers, fresh = self.makers, self.fresh
        u16, u32 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from
        i32, f64 = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from
        try:
            while True:
                op = data[at]
                if op == 0x94:  # MEMOIZE
                    index = dense + len(scattered)
                    dense += 1
                    if scattered and index >= dense:
                        dense = memoized(index, dense - 1, scattered)
                    if index in read:
                        top = stack[-1]
                        memo[index] = top
                        if type(top) is Record:
                            aliases.setdefault(id(top), []).append(index)
                    at += 1
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[u32(data, at + 1)[0]])
                    at += 5
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[at + 1]])
                    at += 2
                elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
                    index = data[at + 1] if op == 0x71 else u32(data, at + 1)[0]
                    if index == dense and not scattered:
                        dense += 1
                    else:
                        dense = memoized(index, dense, scattered)
                    if index in read or index >= never:
                        top = stack[-1]
                        memo[index] = top
                        if type(top) is Record:
                            aliases.setdefault(id(top), []).append(index)
                    at += 2 if op == 0x71 else 5
                elif op == 0x4B:  # BININT1
                    stack.append(data[at + 1])
                    at += 2
                elif op == 0x4D:  # BININT2
                    stack.append(u16(data, at + 1)[0])
                    at += 3
                elif op == 0x75:  # SETITEMS
                    items, stack = stack, marks.pop()
                    top = stack[-1]
                    if type(top) is dict and len(items) <= 8 and not len(items) % 2:
                        rows = iter(items)
                        for key in rows:
                            if type(key) is not str:
                                check_key(key)
                            top[key] = next(rows)
                    else:
                        set_items(top, items)
                    at += 1
                elif op == 0x62:  # BUILD
                    state = stack.pop()
                    top = stack[-1]
                    if type(top) is Fresh:
                        waiting -= 1
                        built = top.make(state)
                        stack[-1] = (
                            self.build(Record(top.cls, (), "newobj"), state) if built is NotImplemented else built
                        )
                    elif type(top) is Record:
                        maker = makers.get(id(top.func))
                        built = NotImplemented if maker is None else maker(state)
                        if built is NotImplemented:
                            built = self.build(top, state)
                        if built is not top:
                            stack[-1] = built
                            for index in aliases.pop(id(top), ()):
                                if memo.get(index) is top:
                                    memo[index] = built
                    else:
                        put_state(top, state)
                    at += 1
                elif op == 0x29:  # EMPTY_TUPLE
                    if data[at : at + 6] == _FRESH and not scattered and read.isdisjoint((dense, dense + 1)):
                        top = stack[-1]
                        blank = fresh.get(id(top))
                        waiting += blank is not None
                        stack[-1] = blank or Record(top, (), "newobj")
                        stack.append({})
                        marks.append(stack)
                        stack = []
                        dense += 2
                        at += 6
                    else:
                        stack.append(())
                        at += 1
                elif op == 0x86:  # TUPLE2
                    second = stack.pop()
                    tail = (stack.pop(), second)
                    if (
                        data[at + 1 : at + 6] == _SIZE
                        and not scattered
                        and read.isdisjoint((dense, dense + 1, dense + 2))
                    ):
                        stack[-1] = self.reduce(stack[-1], (tail,))
                        dense += 3
                        at += 6
                    else:
                        stack.append(tail)
                        at += 1
                elif op == 0x4A:  # BININT
                    stack.append(i32(data, at + 1)[0])
                    at += 5
                elif op == 0x8A:  # LONG1
                    first = at + 2
                    at = first + data[at + 1]
                    stack.append(int.from_bytes(data[first:at], "little", signed=True))
                elif op == 0x8C:  # SHORT_BINUNICODE
                    first = at + 2
                    stop = first + data[at + 1]
                    stack.append(str(data[first:stop], "utf-8", "surrogatepass"))
                    at = stop
                elif op == 0x85:  # TUPLE1
                    tail = (stack.pop(),)
                    if (
                        data[at + 1 : at + 6] == _SIZE
                        and not scattered
                        and read.isdisjoint((dense, dense + 1, dense + 2))
                    ):
                        stack[-1] = self.reduce(stack[-1], (tail,))
                        dense += 3
                        at += 6
                    else:
                        stack.append(tail)
                        at += 1
                elif op == 0x28:  # MARK
                    run = None
                    if data[at + 1] == 0x28 and not scattered and stack:
                        run = tensor_at(data, at, memo, dense, read, self.reduce, self.persistent)
                    if run is not None:
                        stack[-1] = self.reduce(stack[-1], run.args)
                        dense += run.puts
                        at = run.stop
                    else:
                        marks.append(stack)
                        stack = []
                        at += 1
                elif op == 0x58:  # BINUNICODE
                    first = at + 5
                    stop = first + u32(data, at + 1)[0]
                    stack.append(str(data[first:stop], "utf-8", "surrogatepass"))
                    at = stop
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self.reduce(stack[-1], args)
                    at += 1
                elif op == 0x81:  # NEWOBJ
                    args = stack.pop()
                    if not isinstance(args, tuple):
                        raise TypeError(f"the arguments of a class are a {type(args).__name__}")
                    stack[-1] = Record(stack[-1], args, "newobj")
                    at += 1
                elif op == 0x7D:  # EMPTY_DICT
                    stack.append({})
                    at += 1
                elif op == 0x4E:  # NONE
                    stack.append(None)
                    at += 1
                elif op == 0x88:  # NEWTRUE
                    stack.append(True)
                    at += 1
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                    at += 1
                elif op == 0x74:  # TUPLE
                    items, stack = stack, marks.pop()
                    stack.append(tuple(items))
                    at += 1
                elif op == 0x87:  # TUPLE3
                    third, second = stack.pop(), stack.pop()
                    stack[-1] = (stack[-1], second, third)
                    at += 1
                elif op == 0x5D:  # EMPTY_LIST
                    stack.append([])
                    at += 1
                elif op == 0x65:  # APPENDS
                    items, stack = stack, marks.pop()
                    append(stack[-1], items)
                    at += 1
                elif op == 0x61:  # APPEND
                    item = stack.pop()
                    append(stack[-1], (item,))
                    at += 1
                elif op == 0x73:  # SETITEM
                    value, key = stack.pop(), stack.pop()
                    set_items(stack[-1], [key, value])
                    at += 1
                elif op == 0x51:  # BINPERSID
                    stack[-1] = self.persistent(stack[-1])
                    at += 1
                elif op == 0x47:  # BINFLOAT
                    stack.append(f64(data, at + 1)[0])
                    at += 9
                elif op == 0x93:  # STACK_GLOBAL
                    name, module = stack.pop(), stack[-1]
                    stack[-1] = self.intern(module, name)
                    at += 1
                elif op == 0x63:  # GLOBAL
                    module, name, at = self._two_lines(at + 1)
                    stack.append(self.intern(module, name))
                elif op == 0x95:  # FRAME
                    at += 9
                elif op == 0x80:  # PROTO
                    if data[at + 1] > HIGHEST_PROTOCOL:
                        raise ValueError(f"protocol {data[at + 1]}")
                    at += 2
                elif op == 0x2E:  # STOP
                    if waiting:
                        raise ValueError("an object was never given its state")
                    return stack.pop()
                # From here on: rare ones.
                elif op == 0x8B:  # LONG4
                    first = at + 5
                    at = first + u32(data, at + 1)[0]
                    stack.append(int.from_bytes(data[first:at], "little", signed=True))
                elif op in COUNTED_BYTES:
                    operand = OPCODES[op].operand
                    first = at + 1 + operand
                    stop = first + int.from_bytes(data[at + 1 : first], "little")
                    stack.append(COUNTED_BYTES[op](data[first:stop]))
                    at = stop
                elif op in TEXT_VALUES:
                    line, after = self._line(at + 1)
                    stack.append(TEXT_VALUES[op](line))
                    at = after
                elif op == 0x67:  # GET
                    line, after = self._line(at + 1)
                    stack.append(memo[int(line)])
                    at = after
                elif op == 0x70:  # PUT
                    line, after = self._line(at + 1)
                    index = int(line)
                    if index < 0:
                        raise ValueError(f"memo {index}")
                    dense = memoized(index, dense, scattered)
                    memo[index] = stack[-1]
                    if type(stack[-1]) is Record:
                        aliases.setdefault(id(stack[-1]), []).append(index)
                    at = after
                elif op == 0x50:  # PERSID
                    line, after = self._line(at + 1)
                    stack.append(self.persistent(str(line, "ascii")))
                    at = after
                elif op == 0x6C:  # LIST
                    items, stack = stack, marks.pop()
                    stack.append(items)
                    at += 1
                elif op == 0x64:  # DICT
                    items, stack = stack, marks.pop()
                    stack.append({})
                    set_items(stack[-1], items)
                    at += 1
                elif op == 0x8F:  # EMPTY_SET
                    stack.append(set())
                    at += 1
                elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
                    items, stack = stack, marks.pop()
                    for item in items:
                        check_key(item)
                    if op == 0x91:
                        stack.append(frozenset(items))
                    elif type(stack[-1]) is set:
                        stack[-1].update(items)
                    else:
                        raise TypeError(f"adds to a {type(stack[-1]).__name__} as to a set")
                    at += 1
                elif op == 0x30:  # POP: a mark counts as a value
                    if stack:
                        stack.pop()
                    else:
                        stack = marks.pop()
                    at += 1
                elif op == 0x31:  # POP_MARK
                    stack = marks.pop()
                    at += 1
                elif op == 0x32:  # DUP
                    waiting += type(stack[-1]) is Fresh
                    stack.append(stack[-1])
                    at += 1
                elif op == 0x69:  # INST
                    module, name, after = self._two_lines(at + 1)
                    items, stack = stack, marks.pop()
                    stack.append(self.reduce(self.intern(module, name), tuple(items)))
                    at = after
                elif op == 0x6F:  # OBJ
                    items, stack = stack, marks.pop()
                    stack.append(self.reduce(items[0], tuple(items[1:])))
                    at += 1
                elif op == 0x92:  # NEWOBJ_EX
                    kwargs, args = stack.pop(), stack.pop()
                    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
                        raise TypeError("the arguments of a class are not a tuple and a dict")
                    stack[-1] = Record(stack[-1], args, "newobj_ex", kwargs)
                    at += 1
                else:
                    raise ValueError(f"the opcode {OPCODES[op].name} is not expected here")
        finally:
            self.at = min(at, len(data) - 1)

    def _line(self, start: int) -> tuple[bytes, int]:
        stop = self.data.index(b"\n", start)
        return self.data[start:stop], stop + 1

    def _two_lines(self, start: int) -> tuple[str, str, int]:
        module, after = self._line(start)
        name, after = self._line(after)
        return str(module, "utf-8"), str(name, "utf-8"), after
