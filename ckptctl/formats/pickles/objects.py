"""What a pickle's names, calls and states become in a tree. Reads no opcode: `build` does, and asks here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptctl.core.values import Global, OrderedPairs, Record, TensorRef, Tree
from ckptctl.formats.pickles.calls import Call, check_key
from ckptctl.formats.pickles.danger import calls_plain_attribute, is_inert_getattr

Finish = Callable[[Record, Tree], Tree]

_GETATTR = frozenset({"builtins.getattr", "__builtin__.getattr"})
_NEWOBJ = frozenset({"copyreg.__newobj__", "copy_reg.__newobj__"})
_NEWOBJ_EX = frozenset({"copyreg.__newobj_ex__", "copy_reg.__newobj_ex__"})
_SHARED_SIZES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """An instance of a known class that waits for its state and is in no memo: one stands for all."""

    cls: Global
    make: Callable[[Tree], Tree]


class Objects:
    """The globals of one pickle, and what calling them gives."""

    def __init__(
        self, calls: Mapping[str, Call], finish: Mapping[str, Finish], known: Mapping[str, Callable[[Tree], Tree]]
    ) -> None:
        self.names, self.finish, self.known = calls, finish, known
        self.globals: Counter[Global] = Counter()
        self.risky_getattr = 0
        self.interned: dict[tuple[str, str], Global] = {}
        # What a Global means to this machine, by its identity: interned Globals live as long as the machine does.
        self.calls: dict[int, Call] = {}
        self.finishers: dict[int, Finish] = {}
        self.makers: dict[int, Callable[[Tree], Tree]] = {}
        self.fresh: dict[int, Fresh] = {}
        self.how: dict[int, str] = {}
        self.sizes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def reduce(self, func: Tree, args: Tree) -> Tree:
        """func(*args): evaluated where a call of ours stands for it, else a Record."""
        if not isinstance(args, tuple):
            raise TypeError(f"the arguments of a call are a {type(args).__name__}")
        call = self.calls.get(id(func))
        made = NotImplemented if call is None else call(args)
        return self._record(func, args) if made is NotImplemented else made

    def _record(self, func: Tree, args: tuple[Tree, ...]) -> Record:
        how = self.how.get(id(func), "reduce")
        if how == "newobj" and args:
            return Record(args[0], tuple(args[1:]), "newobj")
        if how == "newobj_ex" and len(args) == 3 and isinstance(args[1], tuple) and isinstance(args[2], dict):
            return Record(args[0], args[1], "newobj_ex", args[2])
        if how == "getattr" and not is_inert_getattr(args):
            self.risky_getattr += 1
        if isinstance(func, Record) and calls_plain_attribute(func):
            self.risky_getattr += 1
        return Record(func, args)

    def build(self, record: Record, state: Tree) -> Tree:
        """The record with its state, or what a finisher puts in its place."""
        finish = self.finishers.get(id(record.func))
        if finish is not None:
            made = finish(record, state)
            if made is not NotImplemented:
                return made
        if record.has_state:
            if not (type(record.state) is dict and type(state) is dict):
                raise ValueError("an object is given its state twice")
            state = {**record.state, **state}
        record.state, record.has_state = state, True
        return record

    def intern(self, module: Tree, name: Tree) -> Global:
        """The one Global of that name in this pickle, counted. TypeError where the name is no text."""
        if type(module) is not str or type(name) is not str:
            raise TypeError("the name of a global is no text")
        made = self.interned.get((module, name))
        if made is None:
            made = self.interned[module, name] = Global(module, name)
            dotted = str(made)
            if dotted in self.names:
                self.calls[id(made)] = (
                    self._shared_size if self.known and dotted == "torch.Size" else self.names[dotted]
                )
            if dotted in self.finish:
                self.finishers[id(made)] = self.finish[dotted]
            if dotted in self.known:
                self.makers[id(made)] = self.known[dotted]
                self.fresh[id(made)] = Fresh(made, self.known[dotted])
            for how, names in (("newobj", _NEWOBJ), ("newobj_ex", _NEWOBJ_EX), ("getattr", _GETATTR)):
                if dotted in names:
                    self.how[id(made)] = how
        self.globals[made] += 1
        return made

    def _shared_size(self, args: tuple[Tree, ...]) -> Tree:
        """torch.Size as a plain tuple, equal ones shared."""
        size = args[0] if len(args) == 1 else ()
        if type(size) is not tuple:
            return NotImplemented
        for n in size:
            if type(n) is not int:
                return NotImplemented
        if len(self.sizes) >= _SHARED_SIZES:
            self.sizes.clear()  # most sizes recur soon or never
        return self.sizes.setdefault(size, size)


def put_state(top: Tree, state: Tree) -> None:
    """State on what is no Record: attributes of an ordered dict or a tensor. TypeError for anything else."""
    if not isinstance(top, (OrderedPairs, TensorRef)):
        raise TypeError(f"puts state on a {type(top).__name__}")
    top.attributes = state


def set_items(target: Tree, items: list[Tree]) -> None:
    """Pairs of items (key, value, key, value, ...) into a dict or a Record."""
    if len(items) % 2:
        raise ValueError("a key without a value")
    if isinstance(target, dict):
        for i in range(0, len(items), 2):
            key = items[i]
            if type(key) is not str:
                check_key(key)
            target[key] = items[i + 1]
    elif type(target) is Record:
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))
    else:
        raise TypeError(f"puts items into a {type(target).__name__}")


def memoized(index: int, dense: int, scattered: set[int]) -> int:
    """Counts one more memo entry; gives the new dense."""
    if index > dense:
        scattered.add(index)
    elif index == dense:
        dense += 1
        while dense in scattered:
            scattered.remove(dense)
            dense += 1
    return dense


def append(target: Tree, items: list[Tree] | tuple[Tree, ...]) -> None:
    """Items into a list or a Record. TypeError for anything else."""
    if type(target) is list:
        target.extend(items)
    elif type(target) is Record:
        target.items.extend(items)
    else:
        raise TypeError(f"appends to a {type(target).__name__}")
