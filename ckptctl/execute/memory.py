"""One memory budget shared by threads: each takes what its work needs as one, and waits while there is less. No bytes are here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Event


class Stopped(Exception):
    """A thread was told to stop: somebody else has the reason."""


class Memory:
    """nbytes that threads may hold together. A request for more than all waits until nothing else is held, then is let through."""

    def __init__(self, nbytes: int, stop: Event) -> None:
        self._free, self._all = nbytes, nbytes
        self._stop = stop
        self._changed = Condition()

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Holds nbytes within the context. Raises Stopped where the job stops first. A thread must not hold two at a time."""
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
