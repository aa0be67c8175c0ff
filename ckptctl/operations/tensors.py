"""Reading tensor values.

Any box of any tensor, whatever pieces hold it, by the planner and the executor's own reading.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.output import Region
from ckptctl.core.tensor import with_operands
from ckptctl.execute.reader import Reader
from ckptctl.formats.datafiles import DataFiles
from ckptctl.operations.runs import in_order, runs_of
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Key, Tensor
    from ckptctl.formats.bytesource import FileBytes
    from ckptctl.operations.runs import Run

CHUNK_NBYTES = 8 << 20
Bytes = npt.NDArray[np.uint8]
_KNOWN = 1 << 10
"""Tensors whose runs are kept."""


class TensorReader:
    """Values of a checkpoint's tensors, read when asked for. Use as a context, or close it.

    memory_nbytes bounds what it holds besides the arrays that it gives out.
    """

    def __init__(self, checkpoint: Checkpoint, memory_nbytes: int = 256 << 20) -> None:
        self.checkpoint = checkpoint
        casts = {Cast(t.held.name, t.dtype.name) for t in checkpoint.tensors.values() if t.cast_from is not None}
        self._plan = Plan((), SourceIndex(with_operands(checkpoint.tensors), checkpoint.sources), frozenset(casts))
        self._reader = Reader(checkpoint.sources, Path(checkpoint.root), memory_nbytes)
        self._runs: dict[Key, tuple[tuple[Run, ...] | None, bool]] = {}
        paths = list(dict.fromkeys(s.path for s in checkpoint.sources))
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._files = DataFiles(Path(checkpoint.root), paths)

    def box(self, key: Key, lo: tuple[int, ...], size: tuple[int, ...]) -> Bytes:
        """The elements of a box as bytes, packed row-major. Damaged where the source does not hold all of them."""
        tensor = self.checkpoint.tensors[key]
        return self._region(Region(key, tensor.dtype, tensor.shape, lo, size))

    def run(self, key: Key, start: int, stop: int) -> Bytes:
        """Elements [start, stop) of the flattened tensor as bytes."""
        tensor = self.checkpoint.tensors[key]
        return self._region(Region(key, tensor.dtype, (tensor.numel,), (start,), (stop - start,)))

    def blocks(self, key: Key, start: int, stop: int, buffer: Bytes) -> Iterator[tuple[int, Bytes]]:
        """(first element, bytes) of elements [start, stop), in order, as many at a time as buffer has room for.

        Where the tensor lies in long runs the bytes are in buffer, and gone with the next ones.
        """
        item = self.checkpoint.tensors[key].dtype.itemsize
        room = len(buffer) // item
        runs = self.in_order(key)
        if runs is None:
            many = room * max(1, CHUNK_NBYTES // 2 // (room * item))
            for first in range(start, stop, many):
                data = self.run(key, first, min(stop, first + many))
                for at in range(0, len(data), room * item):
                    yield first + at // item, data[at : at + room * item]
            return
        number = bisect_right(runs, start, key=attrgetter("first")) - 1
        file: FileBytes | None = None
        base = 0
        for first in range(start, stop, room):
            n, done = min(room, stop - first), 0
            filled = buffer[: n * item]
            while done < n:
                run = runs[number]
                if file is None:
                    file, base = self._opened(run)
                skip = first + done - run.first
                take = min(n - done, run.numel - skip)
                file.into(base + skip * item, filled[done * item : (done + take) * item].data)
                done += take
                if skip + take == run.numel:
                    number, file = number + 1, None
            yield first, filled

    def unordered(self, key: Key, buffer: Bytes) -> Iterator[Bytes]:
        """All elements of a tensor that is_unordered(), in no order: bytes in buffer, as many as it has room for."""
        item = self.checkpoint.tensors[key].dtype.itemsize
        room = len(buffer) // item * item
        for run in self._runs_of(key)[0] or ():
            file, base = self._opened(run)
            for at in range(0, run.numel * item, room):
                filled = buffer[: min(room, run.numel * item - at)]
                file.into(base + at, filled.data)
                yield filled

    def is_unordered(self, key: Key) -> bool:
        """Whether a tensor lies in long runs that are no runs of the flattened tensor."""
        runs, ordered = self._runs_of(key)
        return runs is not None and not ordered

    def in_order(self, key: Key) -> tuple[Run, ...] | None:
        """The runs that give the flattened tensor from its first element on; None where it lies otherwise."""
        runs, ordered = self._runs_of(key)
        return runs if ordered else None

    def _runs_of(self, key: Key) -> tuple[tuple[Run, ...] | None, bool]:
        """A tensor's runs, none where they are no plain bytes of their files; and whether they are in order."""
        found = self._runs.get(key)
        if found is None:
            tensor = self.checkpoint.tensors[key]
            runs = runs_of(tensor)
            if runs is not None and not all(self._is_plain(r, tensor.dtype.itemsize) for r in runs):
                runs = None
            if len(self._runs) >= _KNOWN:
                self._runs.clear()
            found = self._runs[key] = (runs, in_order(runs, tensor.numel))
        return found

    def _is_plain(self, run: Run, item: int) -> bool:
        source = self.checkpoint.sources[run.source]
        stop = source.start + run.start + run.numel * item
        return not source.codec and run.start >= 0 and (source.stop is None or stop <= source.stop)

    def _opened(self, run: Run) -> tuple[FileBytes, int]:
        """The file of a run, and its first byte there."""
        source = self.checkpoint.sources[run.source]
        return self._files.get(self._numbers[source.path]), source.start + run.start

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
        self._files.close()

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
