"""Signals that end a process, as an exception: so that what was started is ended, and what was made is removed."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptctl.core.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

AGAIN = "run the same command with --resume to go on"
"""What to do about a job that was stopped and keeps what it wrote."""
_GRACE_S = 5.0
"""For so long after a signal no further one disturbs the cleaning up."""


class _Told(KeyboardInterrupt):
    """No CkptError on its way: a reader that takes those for damage must not take this for some."""


@contextmanager
def terminable(what: str = "the job was told to stop", fix: str = AGAIN) -> Iterator[None]:
    """SIGTERM, and SIGHUP of a closed terminal, end what is done within the context and raise Interrupted.

    That is so where this is the thread that gets signals. One context within another leaves it to the outer one, and
    a signal that somebody else handles or ignores (`nohup`) to him.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[tuple[float, int]] = []

    def stop(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not heard or now > heard[-1][0] + _GRACE_S:
            heard.append((now, number))
            raise _Told

    held = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in held:
        signal.signal(number, stop)
    try:
        yield
        if heard:  # where Python drops exceptions: in the callback of a weak reference
            raise _Told
    except _Told as err:
        raise Interrupted(what, why=signal.Signals(heard[-1][1]).name, fix=fix) from err
    finally:
        for number in held:
            signal.signal(number, signal.SIG_DFL)
