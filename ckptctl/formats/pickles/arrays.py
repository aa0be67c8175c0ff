"""NumPy arrays and scalars in pickles: into NumpyArray where the dtype is plain, and back. NumPy unpickles nothing.

Source: NumPy 2.3, numpy/_core/src/multiarray: methods.c, array_reduce, array_setstate; descriptor.c, arraydescr_reduce.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged
from ckptctl.core.values import Global, Record, Tree
from ckptctl.formats.pickles.nodes import NumpyArray, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.formats.pickles.calls import Call

_PLAIN = {
    f"{kind}{size}"
    for kind, sizes in (("b", "1"), ("i", "1248"), ("u", "1248"), ("f", "248"), ("c", "8"))
    for size in sizes
} | {"c16"}
_DTYPE, _NDARRAY = Global("numpy", "dtype"), Global("numpy", "ndarray")
_LITTLE, _NO_ORDER = (3, "<", None, None, None, -1, -1, 0), (3, "|", None, None, None, -1, -1, 0)
MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")


def _plain_dtype(node: Tree) -> str:
    """The text of a pickled dtype where it is a little-endian number or bool, e.g. "<f8"; "" for any other."""
    if not isinstance(node, Record) or node.func != _DTYPE or not node.has_state or len(node.args) != 3:
        return ""
    code, state = node.args[0], node.state
    if type(code) is not str or code not in _PLAIN:
        return ""
    return next((order + code for order, known in (("<", _LITTLE), ("|", _NO_ORDER)) if state == known), "")


def _finish_array(record: Record, state: Tree) -> Tree:
    """A pickled ndarray once its state is there: (version, shape, dtype, is_fortran, bytes)."""
    fresh = record.args == (_NDARRAY, (0,), b"b") and not record.has_state
    if not fresh or not isinstance(state, tuple) or len(state) != 5 or not isinstance(record.func, Global):
        return NotImplemented
    version, shape, dtype, fortran, data = state
    text = _plain_dtype(dtype)
    if version != 1 or not text or type(data) is not bytes or type(shape) is not tuple or type(fortran) is not bool:
        return NotImplemented
    if (
        len(shape) > 64
        or not all(type(n) is int and 0 <= n < 2**63 for n in shape)
        or math.prod(shape) * int(text[2:]) != len(data)
    ):
        raise ValueError(f"a NumPy array of {text} and shape {show(shape)} has {len(data)} bytes")
    if fortran:
        data = _reordered(data, text, shape[::-1]) if data else data
    return NumpyArray(text, shape, data, module=record.func.module, fortran=fortran)


def _reordered(data: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Row-major bytes of that shape, written with the axes reversed."""
    return np.frombuffer(data, dtype=f"V{int(dtype[2:])}").reshape(shape).T.tobytes()


def _scalar(module: str) -> Call:
    def call(args: tuple[Tree, ...]) -> Tree:
        if len(args) != 2 or type(args[1]) is not bytes or not (text := _plain_dtype(args[0])):
            return NotImplemented
        if len(args[1]) != int(text[2:]):
            raise Damaged(f"a NumPy scalar of {text} has {len(args[1])} bytes", code="pickle-damaged")
        return NumpyArray(text, (), args[1], module=module, scalar=True)

    return call


REBUILD: Mapping[str, Call] = {f"{module}.scalar": _scalar(module) for module in MODULES}
FINISH = {f"{module}._reconstruct": _finish_array for module in MODULES}


def numpy_record(array: NumpyArray, dtypes: dict[str, Record]) -> Record:
    """The call and state as which NumPy pickles an array. dtypes shares one dtype object among those of a pickle."""
    order, code = array.dtype[0], array.dtype[1:]
    if array.dtype not in dtypes:
        dtypes[array.dtype] = Record(
            _DTYPE, (code, False, True), state=_LITTLE if order == "<" else _NO_ORDER, has_state=True
        )
    dtype = dtypes[array.dtype]
    if array.scalar:
        return Record(Global(array.module, "scalar"), (dtype, array.data))
    data = _reordered(array.data, array.dtype, array.shape) if array.fortran and array.data else array.data
    state = (1, array.shape, dtype, array.fortran, data)
    args = (_NDARRAY, (0, *()), b"b")  # a tuple of its own for each array, as NumPy makes it
    return Record(Global(array.module, "_reconstruct"), args, state=state, has_state=True)
