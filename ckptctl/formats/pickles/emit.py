"""Value trees into pickles: protocol 2 only, which torch reads by its weights-only loader. Imports nothing.

Every object is written as CPython's own pickler writes it, entry of the memo for entry, so a file of torch.save read
and written again is the same bytes. The same tree gives the same bytes.
Source: CPython 3.13, Lib/pickle.py, Modules/_pickle.c; torch 2.13, torch/_tensor.py, _reduce_ex_internal;
torch/_utils.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any

from ckptctl.core.errors import Unsupported
from ckptctl.core.values import Global, OrderedPairs, Record, Storage, TensorRef, Tree
from ckptctl.formats.pickles.arrays import numpy_record
from ckptctl.formats.pickles.nodes import NumpyArray, PersistentId, SizeTuple

_BATCH = 1000
_DONE = object()
Steps = Generator[Tree, None, Any]

ORDERED_DICT = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
_SIZE = Global("torch", "Size")
_TENSOR = Global("torch", "Tensor")
_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_PARAMETER_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")


class StorageKeys:
    """Numbers storages in the order in which a pickle first names them, as torch.save does: the `persistent` of dump.

    order lists them: the storage order[k] has key str(k), and its bytes belong into the record `data/k`.
    """

    def __init__(self) -> None:
        self.order: list[Storage] = []
        self._keys: dict[int, str] = {}

    def __call__(self, storage: Storage) -> Tree:
        """The persistent id of a storage."""
        key = self._keys.get(id(storage))
        if key is None:
            key = self._keys[id(storage)] = str(len(self.order))
            self.order.append(storage)
        return ("storage", storage_class(storage), key, storage.location, storage.numel)


def storage_class(storage: Storage) -> Global:
    """The class that a torch pickle names for a storage. Unsupported for a dtype without one (it needs None)."""
    if storage.dtype is None:
        return Global("torch.storage", "UntypedStorage")
    if not storage.dtype.storage:
        raise Unsupported(f"torch has no storage class for {storage.dtype.name}", why=f"storage {storage.key}")
    return Global("torch", storage.dtype.storage)


def dump(tree: Tree, persistent: Callable[[Storage], Tree] | None = None) -> bytes:
    """The pickle of a value tree, protocol 2. persistent gives the persistent id of each Storage, as it is met.

    Identity is kept: an object at two places is written once, cycles included. Raises Unsupported for what is no tree.
    """
    return _Writer(persistent).run(tree)


class _Writer:
    def __init__(self, persistent: Callable[[Storage], Tree] | None) -> None:
        self.persistent = persistent
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[int, tuple[int, Tree]] = {}  # by identity; holds the object, so that the identity stays its own
        self.globals: dict[Global, int] = {}
        self.count = 0
        self.open: dict[int, int] = {}
        self.dtypes: dict[str, Record] = {}
        self.writers: dict[type, Callable[[Any], Steps]] = {
            tuple: self._tuple,
            list: self._list,
            dict: self._dict,
            OrderedPairs: self._ordered,
            SizeTuple: self._size,
            set: self._set,
            frozenset: self._set,
            bytes: self._bytes,
            bytearray: self._bytearray,
            complex: self._complex,
            Global: self._nested_global,
            Record: self._record,
            TensorRef: self._tensor,
            Storage: self._storage,
            PersistentId: self._persistent_id,
            NumpyArray: self._numpy,
        }

    def run(self, tree: Tree) -> bytes:
        steps = [s] if (s := self.begin(tree)) else []
        while steps:
            child = next(steps[-1], _DONE)
            if child is _DONE:
                steps.pop()
            elif (deeper := self.begin(child)) is not None:
                steps.append(deeper)
        self.out += b"."
        return bytes(self.out)

    def begin(self, obj: Tree) -> Steps | None:
        """Writes an atom or a reference at once; anything else as steps, each of which is a child to write."""
        kind = type(obj)
        if obj is None or kind is bool:
            self.out += b"N" if obj is None else b"\x88" if obj else b"\x89"
        elif kind is int:
            self._int(obj)
        elif kind is float:
            self.out += b"G" + struct.pack(">d", obj)
        elif (seen := self.memo.get(id(obj))) is not None:
            self._get(seen[0])
        elif kind is str:
            raw = obj.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(raw)) + raw
            self._put(obj)
        elif kind is tuple and not obj:
            self.out += b")"
        elif kind is Global and (index := self.globals.get(obj)) is not None:
            self._get(index)
        elif kind is Global and "." not in obj.name:
            self.out += f"c{obj.module}\n{obj.name}\n".encode()
            self.globals[obj] = self.count
            self._put(obj)
        elif kind in self.writers:
            opened = self.open[id(obj)] = self.open.get(id(obj), 0) + 1
            if opened > 2:
                raise Unsupported(f"a {kind.__name__} that contains itself cannot be pickled")
            return self.writers[kind](obj)
        else:
            raise Unsupported(f"a value of type {kind.__name__} cannot be pickled without its class")
        return None

    def _get(self, index: int) -> None:
        self.out += bytes((0x68, index)) if index < 256 else b"j" + struct.pack("<I", index)

    def _put(self, obj: Tree) -> None:
        index = self.count
        self.out += bytes((0x71, index)) if index < 256 else b"r" + struct.pack("<I", index)
        self.memo[id(obj)] = (index, obj)
        self.count += 1

    def _int(self, n: int) -> None:
        if 0 <= n < 256:
            self.out += bytes((0x4B, n))
        elif 0 <= n < 65536:
            self.out += b"M" + struct.pack("<H", n)
        elif -(2**31) <= n < 2**31:
            self.out += b"J" + struct.pack("<i", n)
        else:
            size = (n.bit_length() >> 3) + 1
            raw = n.to_bytes(size, "little", signed=True)
            if n < 0 and size > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
                raw = raw[:-1]
            self.out += (bytes((0x8A, len(raw))) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw

    def _again(self, obj: Tree, drop: bytes) -> bool:
        """Whether writing obj's parts wrote obj itself (a cycle): then the stack is cleared, and obj fetched."""
        self.open[id(obj)] -= 1
        if (seen := self.memo.get(id(obj))) is None:
            return False
        self.out += drop
        self._get(seen[0])
        return True

    def _tuple(self, obj: tuple[Tree, ...]) -> Steps:
        short = len(obj) <= 3
        if not short:
            self.out += b"("
        yield from obj
        if not self._again(obj, b"0" * len(obj) if short else b"1"):
            self.out += (b"\x85", b"\x86", b"\x87")[len(obj) - 1] if short else b"t"
            self._put(obj)

    def _list(self, obj: list[Tree]) -> Steps:
        self.out += b"]"
        self._put(obj)
        if len(obj) == 1:
            yield obj[0]
            self.out += b"a"
            return
        for first in range(0, len(obj), _BATCH):
            self.out += b"("
            yield from obj[first : first + _BATCH]
            self.out += b"e"

    def _dict(self, obj: dict[Tree, Tree]) -> Steps:
        self.out += b"}"
        self._put(obj)
        if len(obj) == 1:
            for pair in obj.items():
                yield from pair
            self.out += b"s"
            return
        rows = iter(obj.items())
        for _ in range(0, len(obj), _BATCH):
            self.out += b"("
            for pair in islice(rows, _BATCH):
                yield from pair
            self.out += b"u"

    def _pairs(self, rows: Sequence[tuple[Tree, Tree]]) -> Steps:
        """Pairs of an object that is no plain dict: a last one alone is set alone."""
        for first in range(0, len(rows), _BATCH):
            batch = rows[first : first + _BATCH]
            self.out += b"(" if len(batch) > 1 else b""
            for pair in batch:
                yield from pair
            self.out += b"u" if len(batch) > 1 else b"s"

    def _call(self, obj: Tree, func: Tree, args: tuple[Tree, ...], code: bytes = b"R") -> Steps:
        """Obj as func(*args). The steps' value tells whether a cycle had written all of it already."""
        yield func
        yield args
        if self._again(obj, b"00"):
            return True
        self.out += code
        self._put(obj)
        return False

    def _ordered(self, obj: OrderedPairs) -> Steps:
        yield from self._call(obj, ORDERED_DICT, ())  # no arguments, so no cycle through them
        yield from self._pairs(list(obj.items()))
        if obj.attributes is not None:
            yield obj.attributes
            self.out += b"b"

    def _size(self, obj: SizeTuple) -> Steps:
        return self._call(obj, _SIZE, (tuple(obj),))

    def _set(self, obj: set[Tree] | frozenset[Tree]) -> Steps:
        return self._call(obj, Global("__builtin__", type(obj).__name__), (sorted(obj, key=_order),))

    def _bytes(self, obj: bytes) -> Steps:
        # CPython writes b"" as __builtin__.bytes(), which torch's weights-only loader refuses; this it reads.
        return self._call(obj, _ENCODE, (str(obj, "latin-1"), "latin1"))

    def _bytearray(self, obj: bytearray) -> Steps:
        return self._call(obj, Global("__builtin__", "bytearray"), (bytes(obj),) if obj else ())

    def _complex(self, obj: complex) -> Steps:
        return self._call(obj, Global("__builtin__", "complex"), (obj.real, obj.imag))

    def _nested_global(self, obj: Global) -> Steps:
        """A class inside a class: protocol 2 has no name for it, CPython's pickler looks it up by getattr."""
        owner, _, name = obj.name.rpartition(".")
        yield from self._call(obj, Global("__builtin__", "getattr"), (Global(obj.module, owner), name))
        self.globals[obj] = self.count - 1

    def _record(self, obj: Record) -> Steps:
        if obj.how == "newobj_ex":
            head = self._call(obj, Global("copyreg", "__newobj_ex__"), (obj.func, obj.args, obj.kwargs))
        else:
            head = self._call(obj, obj.func, obj.args, b"\x81" if obj.how == "newobj" else b"R")
        if (yield from head):
            return
        for first in range(0, len(obj.items), _BATCH):
            batch = obj.items[first : first + _BATCH]
            self.out += b"(" if len(batch) > 1 else b""
            yield from batch
            self.out += b"e" if len(batch) > 1 else b"a"
        yield from self._pairs(obj.pairs)
        if obj.has_state:
            yield obj.state
            self.out += b"b"

    def _tensor(self, obj: TensorRef) -> Steps:
        func, args = tensor_call(obj)
        return self._call(obj, func, args)

    def _storage(self, obj: Storage) -> Steps:
        if self.persistent is None:
            raise Unsupported("a tensor cannot stand in a pickle without a place for its bytes")
        yield self.persistent(obj)
        self._persisted(obj)

    def _persistent_id(self, obj: PersistentId) -> Steps:
        yield obj.pid
        self._persisted(obj)

    def _persisted(self, obj: Tree) -> None:
        self.open[id(obj)] -= 1
        self.out += b"Q"

    def _numpy(self, obj: NumpyArray) -> Steps:
        record = numpy_record(obj, self.dtypes)
        yield from self._call(obj, record.func, record.args)
        if record.has_state:
            yield record.state
            self.out += b"b"


def tensor_call(tensor: TensorRef) -> tuple[Global, tuple[Tree, ...]]:
    """The call that torch writes for a tensor. Unsupported where the dtypes of tensor and storage contradict."""
    inner_grad = False if tensor.parameter else tensor.requires_grad
    head: tuple[Tree, ...] = (
        tensor.storage,
        tensor.offset,
        tuple(tensor.shape),
        tuple(tensor.stride),
        inner_grad,
        OrderedPairs(),
    )
    marks = {name: True for name, on in (("conj", tensor.conj), ("neg", tensor.neg)) if on}
    metadata: tuple[Tree, ...] = (marks,) if marks else ()
    if tensor.storage.dtype == tensor.dtype:
        func, args = _V2, head + metadata
    elif tensor.storage.dtype is None:
        func, args = _V3, (*head, Global("torch", tensor.dtype.name), *metadata)
    else:
        raise Unsupported(
            f"a tensor of {tensor.dtype.name} over a storage of {tensor.storage.dtype.name} cannot be pickled"
        )
    if not tensor.parameter:
        return (func, args) if tensor.attributes is None else (_FROM_TYPE, (func, _TENSOR, args, tensor.attributes))
    data = Record(func, args)
    if tensor.attributes is None:
        return _PARAMETER, (data, tensor.requires_grad, OrderedPairs())
    return _PARAMETER_WITH_STATE, (data, tensor.requires_grad, OrderedPairs(), tensor.attributes)


def _order(item: Tree) -> tuple[str, str]:
    """An order of a set's elements that does not depend on where they lie in memory, as far as that can be."""
    if isinstance(item, int):
        return (type(item).__name__, hex(item))
    plain = isinstance(item, (str, float, complex, bytes, Global)) or item is None
    return (type(item).__name__, repr(item) if plain else str(getattr(item, "func", "")))
