"""Open files, at most so many at once, shared by threads; and reads that are whole or raise.

No position is ever shared.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_IOV_MAX = 1024
"""Buffers of one preadv. Source: POSIX limits.h; Linux has the same."""

_WRITE_NBYTES = 128 << 10
"""Bytes of one write. Larger ones make Linux look for large pages for its cache: 1 MiB took 5 times the CPU of 128 KiB
where memory was in pieces (6.18, ext4), and was no faster where it was not."""


class OpenFiles:
    """File descriptors by path, opened on first use; those longest unused are closed beyond the limit.

    Use as a context.
    """

    def __init__(self, flags: int, limit: int = 64) -> None:
        self._flags = flags | getattr(os, "O_CLOEXEC", 0)
        self._limit = limit
        self._lock = Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # path: [descriptor, threads that use it]

    @contextmanager
    def use(self, path: str) -> Iterator[int]:
        """The descriptor of path, which stays open within the context. OSError where it cannot be opened."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = [os.open(path, self._flags), 0]
            self._open.move_to_end(path)
            entry[1] += 1
            self._close_beyond_limit()
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _close_beyond_limit(self) -> None:
        if len(self._open) <= self._limit:
            return
        for path, (fd, users) in list(self._open.items()):
            if not users:
                del self._open[path]
                os.close(fd)
                if len(self._open) <= self._limit:
                    return

    def close(self) -> None:
        """Closes all of them; nothing may be in use."""
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_all(fd: int, views: Sequence[memoryview], start: int, path: str) -> None:
    """Fill the views, one after the other, with the file's bytes from start on. Damaged where it ends before.

    OSError as it comes.
    """
    for first in range(0, len(views), _IOV_MAX):
        some = views[first : first + _IOV_MAX]
        want = sum(map(len, some))
        got = os.preadv(fd, some, start)
        if got != want:
            _read_rest(fd, some, start, got, path)
        start += want


def _read_rest(fd: int, views: Sequence[memoryview], start: int, got: int, path: str) -> None:
    """What a call left over: it may stop early, at a signal or at its limit."""
    at = 0
    for view in views:
        done = min(max(got - at, 0), len(view))
        while done < len(view):
            n = os.preadv(fd, [view[done:]], start + at + done)
            if n == 0:
                raise too_short(path, start + at + done, start + at + len(view))
            done += n
        at += len(view)


def too_short(path: str, size: int, stop: int) -> Damaged:
    """The error for a file that has no byte at size, though bytes up to stop are named."""
    return Damaged(
        "the file ends too early",
        where=path,
        why=f"bytes up to {stop} are named by the metadata, it ends at or before {size}",
        fix="copy the file again, and run when nothing writes to it",
        code="data-truncated",
    )


def write_all(fd: int, data: memoryview, start: int) -> None:
    """Write data at start. OSError as it comes."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _WRITE_NBYTES], start + done)
