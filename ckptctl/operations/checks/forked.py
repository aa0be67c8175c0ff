"""Work on many files by processes of our own, forked: headers and pickles are read by Python, which threads share.

What each makes is plain data that JSON can say. Where a process cannot be made, or does not answer, its work is done
here.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ckptctl.execute.system import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FEWEST = 32
"""Below so many pieces of work a process costs more than it saves."""
_MOST = 4
"""More processes would take memory without an end in sight."""


def each(work: Callable[[int], Any], count: int, jobs: int = 0) -> list[Any]:
    """work(i) for every i below count, in order. It must not raise, and changes nothing that is looked at later."""
    share = min(_MOST, jobs or cores(), count // (_FEWEST // 2)) if _may_fork() else 1
    lots = [range(i, count, max(1, share)) for i in range(max(1, share))]
    children = [_child(work, lot) for lot in lots[1:]]
    out: list[Any] = [None] * count
    try:
        for i in lots[0]:
            out[i] = work(i)
        for lot, child in zip(lots[1:], children, strict=True):
            told = _answer(child)
            for k, i in enumerate(lot):
                out[i] = told[k] if told is not None else work(i)
    finally:
        for child in children:
            _end(child)
    return out


def _may_fork() -> bool:
    """Whether a fork is harmless: on Linux, and while no other thread may hold a lock."""
    return sys.platform == "linux" and threading.active_count() == 1


def _child(work: Callable[[int], Any], lot: Sequence[int]) -> tuple[int, int]:
    """(process, the end of a pipe that its answer comes from); process 0 where there is none."""
    try:
        read, write = os.pipe()
    except OSError:
        return 0, -1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads of NumPy's libraries, which hold nothing
            process = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return 0, -1
    if process:
        os.close(write)
        return process, read
    try:  # the child: nothing of it may return to the caller
        os.close(read)
        with os.fdopen(write, "wb") as stream:
            stream.write(json.dumps([work(i) for i in lot]).encode())
    finally:
        os._exit(0)


def _answer(child: tuple[int, int]) -> list[Any] | None:
    """What a process made of its lot; None where it did not come to an end."""
    if not child[0]:
        return None
    parts = []
    while part := os.read(child[1], 1 << 20):
        parts.append(part)
    try:
        told: list[Any] = json.loads(b"".join(parts))
    except ValueError:
        return None
    return told


def _end(child: tuple[int, int]) -> None:
    """Closes the pipe, which ends who still writes into it, and waits for the process."""
    if not child[0]:
        return
    os.close(child[1])
    with suppress(OSError):
        os.kill(child[0], 9)
    with suppress(OSError):
        os.waitpid(child[0], 0)
