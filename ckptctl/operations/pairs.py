"""Pairs of tensors read side by side: how far their values are apart. Both sides are read once, in bounded memory.

Which tensors are compared, and what a difference is called, is `comparing`'s.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.operations.measuring import Measure
from ckptctl.operations.tensors import Bytes, TensorReader, typed
from ckptctl.operations.turns import in_turn, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import ThreadPoolExecutor

    from ckptctl.core.tensor import Key, Tensor

WIDE = {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
"""What a float type is widened to, exactly, to be compared with another."""
_BLOCK_NBYTES = 1 << 22
"""Bytes of each side at a time: fewer have threads wait for each other."""
Name = tuple[str, str]


class _Both(NamedTuple):
    """Elements [start, stop) of two tensors."""

    name: Name
    start: int
    stop: int
    nbytes: int
    is_last: bool


class Pairs:
    """Tensors of two checkpoints that have one shape, and one type or two that widen, by the names they have here."""

    def __init__(
        self,
        left: TensorReader,
        right: TensorReader,
        pairs: Mapping[Name, tuple[Key, Key]],
        rtol: float,
        atol: float,
        stats: bool,
    ) -> None:
        self.left, self.right, self.pairs = left, right, pairs
        self.rtol, self.atol, self.stats = rtol, atol, stats
        self._own = threading.local()

    def measured(self, pool: ThreadPoolExecutor) -> Iterator[Measure]:
        """What is measured of each pair, in their order."""
        whole = Measure()
        for part, measure in in_turn(pool, self._part, self._parts()):
            whole.join(measure)
            if part.is_last:
                yield whole
                whole = Measure()

    def _parts(self) -> Iterator[_Both]:
        for name, (a, _) in self.pairs.items():
            for part in parts_of(self.left.checkpoint.tensors, (a,)):
                yield _Both(name, part.start, part.stop, 2 * part.nbytes, part.is_last)

    def _part(self, part: _Both) -> Measure:
        a, b = self.pairs[part.name]
        x, y = self.left.checkpoint.tensors[a], self.right.checkpoint.tensors[b]
        wide = ""
        if x.dtype.name != y.dtype.name:
            wide = "float64" if "float64" in (x.dtype.name, y.dtype.name) else "float32"
        is_packed = x.dtype.numpy.itemsize != x.dtype.itemsize  # no NumPy type has these bits
        measure = Measure()
        room = max(1, _BLOCK_NBYTES // max(x.dtype.itemsize, y.dtype.itemsize))
        mine, theirs = self._buffers()
        got = self.left.blocks(a, part.start, part.stop, mine[: room * x.dtype.itemsize])
        other = self.right.blocks(b, part.start, part.stop, theirs[: room * y.dtype.itemsize])
        for (start, p), (_, q) in zip(got, other, strict=True):
            if wide:
                p, q = _widened(p, x, wide), _widened(q, y, wide)
            alike = _same(p, q)
            if alike and not self.stats:
                continue
            u, v = ((s.view(wide) if wide else s if is_packed else typed(s, x)) for s in (p, q))
            if not alike:
                measure.differ(start, u, v, self.rtol, self.atol)
            if self.stats and not is_packed and u.dtype.kind != "c":
                measure.norms(u, v)
        return measure

    def _buffers(self) -> tuple[Bytes, Bytes]:
        """A thread's own two."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = (np.empty(_BLOCK_NBYTES, np.uint8), np.empty(_BLOCK_NBYTES, np.uint8))
        made: tuple[Bytes, Bytes] = self._own.buffers
        return made


def _same(a: Bytes, b: Bytes) -> bool:
    """Whether two runs have the same bytes, eight at a time where they can be."""
    if a.nbytes % 8 == 0 and a.flags.aligned and b.flags.aligned:
        return bool((a.view(np.uint64) == b.view(np.uint64)).all())
    return bool(np.array_equal(a, b))


def _widened(data: Any, tensor: Tensor, wide: str) -> Any:
    with np.errstate(invalid="ignore"):  # a signalling NaN is no fault of the comparison
        return typed(data, tensor).astype(wide).view(np.uint8)
