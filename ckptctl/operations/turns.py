"""Work on parts of tensors by several threads, whose results come in order. Which work is the caller's."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckptctl.core.tensor import Key, Tensor

_Told = TypeVar("_Told")
PART_NBYTES = 16 << 20
"""Bytes that a thread takes at once: a part of one tensor, or several tensors."""
_AHEAD = 64
"""Lots that wait for a thread."""
_MANY = 256


class Weighed(Protocol):
    """A piece of work that knows how many bytes it reads."""

    @property
    def nbytes(self) -> int:
        """Bytes."""


_Item = TypeVar("_Item", bound=Weighed)


class Part(NamedTuple):
    """Elements [start, stop) of a tensor; is_last where no more of it come."""

    key: Key
    start: int
    stop: int
    nbytes: int
    is_last: bool


def parts_of(tensors: Mapping[Key, Tensor], keys: Iterable[Key]) -> Iterator[Part]:
    """Every element of the tensors, in order; a tensor without elements has one part."""
    for key in keys:
        numel, item = tensors[key].numel, tensors[key].dtype.itemsize
        step = max(1, PART_NBYTES // item)
        for start in range(0, max(1, numel), step):
            stop = min(numel, start + step)
            yield Part(key, start, stop, (stop - start) * item, stop == numel)


def in_turn(
    pool: ThreadPoolExecutor, work: Callable[[_Item], _Told], parts: Iterable[_Item]
) -> Iterator[tuple[_Item, _Told]]:
    """Each part with what work made of it, in order. Small ones go to a thread together; only some wait at a time."""
    waiting: deque[Future[list[tuple[_Item, _Told]]]] = deque()

    def done(lot: list[_Item]) -> list[tuple[_Item, _Told]]:
        return [(part, work(part)) for part in lot]

    try:
        for lot in _lots(parts):
            waiting.append(pool.submit(done, lot))
            if len(waiting) >= _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _lots(parts: Iterable[_Item]) -> Iterator[list[_Item]]:
    lot: list[_Item] = []
    nbytes = 0
    for part in parts:
        if lot and (nbytes + part.nbytes > PART_NBYTES or len(lot) >= _MANY):
            yield lot
            lot, nbytes = [], 0
        lot.append(part)
        nbytes += part.nbytes
    if lot:
        yield lot
