"""What torch's pickles call, as data: persistent ids into Storage, rebuild functions into TensorRef. Reads no bytes.

A call whose arguments are not the plain ones stays a Record; `why_unsupported` says what such a Record is.
Source: torch 2.13, torch/_utils.py, torch/_tensor.py; torch/serialization.py, persistent_load of _load and
_legacy_load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_NAME, BY_STORAGE, DType
from ckptctl.core.errors import Damaged
from ckptctl.core.values import Global, Record, Storage, TensorRef, Tree
from ckptctl.formats.pickles.nodes import PersistentId, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.formats.pickles.calls import Call

# Storages of quantized tensors: carried as bytes, no dtype that anything else can use.
_QUANTIZED = {
    f"{name}Storage": DType(lower, bits, storage=f"{name}Storage")
    for name, lower, bits in (
        ("QInt8", "qint8", 8),
        ("QUInt8", "quint8", 8),
        ("QInt32", "qint32", 32),
        ("QUInt4x2", "quint4x2", 8),
        ("QUInt2x4", "quint2x4", 8),
    )
}
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.tensor.Tensor"})
SLICES = ("DTensor", "ShardedTensor")
"""Classes of torch.distributed whose instances hold one rank's part of a tensor."""
_REBUILD = "torch._utils._rebuild_"
_WHOLE = {int}


class Storages:
    """Turns persistent ids into Storage nodes, one for each key: use as `persistent` of pickles.load.

    views are storages inside others, by key: (the outer one, first element). Only streams before torch 1.6 have them.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.by_key: dict[str, Storage] = {}
        self.views: dict[str, tuple[Storage, int]] = {}

    def __call__(self, pid: Tree) -> Tree:
        """The Storage that a persistent id names; a PersistentId where it is of no kind that torch writes."""
        if not isinstance(pid, tuple) or not pid:
            return PersistentId(pid)
        if (
            pid[0] == "module" and len(pid) == 4
        ):  # a pickled nn.Module: (class, file, source text); the class says it all
            return pid[1]
        if pid[0] != "storage" or len(pid) not in (5, 6):
            return PersistentId(pid)
        _, cls, key, location, numel = pid[:5]
        key = str(key) if type(key) is int and 0 <= key < 2**64 else key
        if not isinstance(cls, Global) or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise Damaged(
                "a storage is described by the wrong types", where=self.where, why=show(pid), code="pickle-damaged"
            )
        known, dtype = storage_dtype(cls)
        if not known:
            return PersistentId(pid)
        if not 0 <= numel < 2**63:
            raise Damaged(
                f"storage {show(key)} has an impossible number of elements",
                where=self.where,
                why=show(numel),
                code="size-overflow",
            )
        storage = self.by_key.get(key)
        if storage is None:
            storage = self.by_key[key] = Storage(key, dtype, numel, location)
        elif (storage.dtype, storage.numel) != (dtype, numel):
            raise Damaged(
                f"storage {show(key)} is described in two ways",
                where=self.where,
                why=f"{storage.numel} elements of {_name(storage.dtype)}, and {numel} of {_name(dtype)}",
                code="storage-size-mismatch",
            )
        return storage if len(pid) == 5 or pid[5] is None else self._view(storage, pid[5])

    def _view(self, outer: Storage, view: Tree) -> Storage:
        plain = isinstance(view, tuple) and len(view) == 3 and type(view[1]) is int and type(view[2]) is int
        if not plain or not 0 <= view[1] <= view[1] + view[2] <= outer.numel:
            raise Damaged(
                f"a view of storage {show(outer.key)} is outside it",
                where=self.where,
                why=show(view),
                code="storage-size-mismatch",
            )
        key = f"{outer.key}/{show(view[0])}"
        if key not in self.views:
            inner = Storage(key, outer.dtype, view[2], outer.location)
            self.by_key[key], self.views[key] = inner, (outer, view[1])
        return self.by_key[key]


def storage_dtype(cls: Global) -> tuple[bool, DType | None]:
    """Whether a global is a storage class, and of what dtype (None: untyped, counted in bytes)."""
    if cls.name == "UntypedStorage":
        return True, None
    dtype = BY_STORAGE.get(cls.name) or _QUANTIZED.get(cls.name)
    known = dtype is not None and cls.module in ("torch", "torch.cuda", "torch.storage", "torch._C")
    return known, dtype if known else None


def _name(dtype: DType | None) -> str:
    return dtype.name if dtype else "bytes"


def _ints(value: Tree) -> bool:
    return isinstance(value, (tuple, list)) and {*map(type, value)} <= _WHOLE


def _tensor(args: tuple[Tree, ...], dtype: DType | None, metadata: Tree) -> Tree:
    """A TensorRef of (storage, offset, size, stride, requires_grad, hooks); NotImplemented for anything else."""
    storage, offset, size, stride, grad, hooks = args[:6]
    if not isinstance(storage, Storage) or not isinstance(grad, bool) or not isinstance(hooks, dict) or hooks:
        return NotImplemented
    marks = {} if metadata is None else metadata
    if not isinstance(marks, dict) or not set(marks) <= {"conj", "neg"} or dtype is None:
        return NotImplemented
    if type(offset) is not int or not _ints(size) or not _ints(stride):
        raise ValueError(f"a tensor with offset {show(offset)}, shape {show(size)}, strides {show(stride)}")
    conj, neg = bool(marks.get("conj")), bool(marks.get("neg"))
    return TensorRef(storage, dtype, offset, tuple(size), tuple(stride), grad, conj=conj, neg=neg)


def _v1(args: tuple[Tree, ...]) -> Tree:
    if len(args) != 4 or not isinstance(args[0], Storage):
        return NotImplemented
    return _tensor((*args, False, {}), args[0].dtype, None)


def _v2(args: tuple[Tree, ...]) -> Tree:
    if (
        len(args) not in (6, 7)
        or not isinstance(args[0], Storage)
        or (args[0].dtype and args[0].dtype.storage in _QUANTIZED)
    ):
        return NotImplemented
    return _tensor(args, args[0].dtype, args[6] if len(args) == 7 else None)


def _v3(args: tuple[Tree, ...]) -> Tree:
    if len(args) not in (7, 8) or not isinstance(args[6], Global) or args[6].module != "torch":
        return NotImplemented
    return _tensor(args, BY_NAME.get(args[6].name), args[7] if len(args) == 8 else None)


def _parameter(args: tuple[Tree, ...]) -> Tree:
    if len(args) not in (3, 4) or not isinstance(args[0], TensorRef) or not isinstance(args[1], bool) or args[2]:
        return NotImplemented
    data = args[0]
    if data.attributes is not None or data.parameter or data.requires_grad:
        return NotImplemented
    return TensorRef(
        data.storage,
        data.dtype,
        data.offset,
        data.shape,
        data.stride,
        args[1],
        True,
        data.conj,
        data.neg,
        args[3] if len(args) == 4 else None,
    )


def _from_type(args: tuple[Tree, ...]) -> Tree:
    """(function, type, its arguments, state): a plain tensor with attributes; NotImplemented for subclasses."""
    if (
        len(args) != 4
        or not isinstance(args[0], Global)
        or not isinstance(args[1], Global)
        or not isinstance(args[2], tuple)
    ):
        return NotImplemented
    call = REBUILD.get(str(args[0]))
    if str(args[1]) not in _TENSOR_TYPES or call not in (_v1, _v2, _v3):
        return NotImplemented
    made = call(args[2])
    if made is not NotImplemented:
        made.attributes = args[3]
    return made


REBUILD: Mapping[str, Call] = {
    f"{_REBUILD}tensor": _v1,
    f"{_REBUILD}tensor_v2": _v2,
    f"{_REBUILD}tensor_v3": _v3,
    f"{_REBUILD}parameter": _parameter,
    f"{_REBUILD}parameter_with_state": _parameter,
    **{
        f"{module}.{name}": _from_type
        for module in ("torch._tensor", "torch.tensor")
        for name in ("_rebuild_from_type", "_rebuild_from_type_v2")
    },
}

_WHY = {
    f"{_REBUILD}qtensor": "a quantized tensor",
    f"{_REBUILD}sparse_tensor": "a sparse tensor",
    f"{_REBUILD}sparse_csr_tensor": "a sparse tensor",
    f"{_REBUILD}nested_tensor": "a nested tensor",
    f"{_REBUILD}meta_tensor_no_storage": "a meta tensor, which has no data",
    f"{_REBUILD}device_tensor_from_numpy": "a tensor of another device, stored as a NumPy array",
    f"{_REBUILD}device_tensor_from_cpu_tensor": "a tensor of another device",
    f"{_REBUILD}xla_tensor": "a tensor of an XLA device, stored as a NumPy array",
}


def why_unsupported(record: Record) -> str:
    """What a Record is if it is a tensor whose elements cannot be moved; "" for others (DTensor, ShardedTensor)."""
    name = record.cls
    if name in _WHY:
        return _WHY[name]
    call = REBUILD.get(name)
    if call is None:
        return ""
    if (
        call is _from_type
        and len(record.args) == 4
        and isinstance(record.args[0], Global)
        and isinstance(record.args[1], Global)
    ):
        inner, kind = str(record.args[0]), record.args[1]
        if inner in _WHY:
            return _WHY[inner]
        return "" if kind.name in SLICES else f"a tensor of the class {kind}"
    if call is _parameter and record.args and isinstance(record.args[0], (Record, TensorRef)):
        return ""  # the tensor inside is looked at by itself
    return "a tensor that torch 2.13 would not write so"
