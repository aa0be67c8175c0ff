"""Reading tensor values.

Any box of any tensor, whatever pieces hold it, by the planner and the executor's own reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Region
from ckptctl.core.tensor import with_operands
from ckptctl.core.values import Array, Tree
from ckptctl.execute.reader import Reader
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Key, Tensor

CHUNK_NBYTES = 8 << 20
Bytes = npt.NDArray[np.uint8]


class TensorReader:
    """Values of a checkpoint's tensors, read when asked for. Use as a context, or close it.

    memory_nbytes bounds what it holds besides the arrays that it gives out.
    """

    def __init__(self, checkpoint: Checkpoint, memory_nbytes: int = 256 << 20) -> None:
        self.checkpoint = checkpoint
        casts = {Cast(t.held.name, t.dtype.name) for t in checkpoint.tensors.values() if t.cast_from is not None}
        self._plan = Plan((), SourceIndex(with_operands(checkpoint.tensors), checkpoint.sources), frozenset(casts))
        self._reader = Reader(checkpoint.sources, Path(checkpoint.root), memory_nbytes)

    def box(self, key: Key, lo: tuple[int, ...], size: tuple[int, ...]) -> Bytes:
        """The elements of a box as bytes, packed row-major. Damaged where the source does not hold all of them."""
        tensor = self.checkpoint.tensors[key]
        return self._region(Region(key, tensor.dtype, tensor.shape, lo, size))

    def run(self, key: Key, start: int, stop: int) -> Bytes:
        """Elements [start, stop) of the flattened tensor as bytes."""
        tensor = self.checkpoint.tensors[key]
        return self._region(Region(key, tensor.dtype, (tensor.numel,), (start,), (stop - start,)))

    def _region(self, region: Region) -> Bytes:
        if not region.nbytes:
            return np.empty(0, np.uint8)
        return self._reader.read(self._plan.region(region, 0, 0, region.nbytes), region.nbytes)

    def chunks(self, key: Key, nbytes: int = CHUNK_NBYTES) -> Iterator[tuple[int, Bytes]]:
        """(first element, bytes) of the whole tensor in order, about nbytes at a time."""
        tensor = self.checkpoint.tensors[key]
        step = max(1, nbytes // tensor.dtype.itemsize)
        for start in range(0, tensor.numel, step):
            yield start, self.run(key, start, min(tensor.numel, start + step))

    def array(
        self, key: Key, lo: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> npt.NDArray[Any]:
        """A box (default: all) as a NumPy array of the tensor's type, ml_dtypes' where NumPy has none."""
        tensor = self.checkpoint.tensors[key]
        lo = (0,) * len(tensor.shape) if lo is None else lo
        size = tensor.shape if size is None else size
        return typed(self.box(key, lo, size), tensor).reshape(size)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def typed(data: Bytes, tensor: Tensor) -> npt.NDArray[Any]:
    """Bytes as elements of the tensor's type; as bytes where no NumPy type has these bits."""
    dtype = tensor.dtype.numpy
    return data.view(dtype) if dtype.itemsize == tensor.dtype.itemsize else data


def scalar(reader: TensorReader, key: Key) -> int | float | bytes:
    """The number of a one-element tensor, exactly; the bytes of one that has more, or less."""
    array = reader.array(key)
    number: int | float = array.reshape(-1)[0].item() if array.size == 1 else 0
    return number if array.size == 1 else array.tobytes()


def as_number(value: Tree) -> Tree:
    """A step among the values as a number, where it is one."""
    if isinstance(value, Array) and value.dtype in BY_NAME and len(value.data) == BY_NAME[value.dtype].itemsize:
        return np.frombuffer(value.data, BY_NAME[value.dtype].numpy)[0].item()
    return value
