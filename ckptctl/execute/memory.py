"""Memory of a job: buffers that go back to the system at once, and one budget shared by threads."""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from threading import Condition, Event
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

Bytes = npt.NDArray[np.uint8]

_OWN_PAGES = 256 << 10


def buffer(nbytes: int) -> Bytes:
    """An array of nbytes. Its pages are its own.

    Malloc would keep those of freed arrays for the thread that had them.
    """
    if nbytes < _OWN_PAGES:
        return np.empty(nbytes, np.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8)


def aligned(start: int, nbytes: int) -> Bytes:
    """An array of nbytes that lies in its page as byte start lies in a file's."""
    skip = start % mmap.PAGESIZE
    return buffer(nbytes + skip)[skip:]


class Stopped(Exception):
    """A thread was told to stop: somebody else has the reason."""


class Memory:
    """nbytes that threads may hold together.

    A request for more than all waits until nothing else is held, then is let through.
    """

    def __init__(self, nbytes: int, stop: Event) -> None:
        self._free, self._all = nbytes, nbytes
        self._stop = stop
        self._changed = Condition()

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Holds nbytes within the context. Raises Stopped where the job stops first.

        A thread must not hold two at a time.
        """
        want = min(nbytes, self._all)
        with self._changed:
            while self._free < want:
                if self._stop.is_set():
                    raise Stopped
                self._changed.wait(0.1)
            self._free -= want
        try:
            yield
        finally:
            with self._changed:
                self._free += want
                self._changed.notify_all()
