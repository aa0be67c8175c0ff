"""Runs of a source read with few calls, and extents that go through one small buffer from first byte to last."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptctl.execute.cast import carrier, convert
from ckptctl.execute.memory import buffer
from ckptctl.plan.steps import After, Merge, Move, Repeat, Step, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptctl.execute.sources import Sources

_FAR = 64 << 10
"""A gap between two runs that is read along is at most this long, ..."""
_PAGE = 4096
"""... and at most as long as the bytes that are wanted on either side of it, or a page, which the disk reads anyway."""
_READS = 1024
"""Runs that are collected before they are read."""


class Run(NamedTuple):
    """Bytes of a source that belong at a place of a buffer."""

    source: int
    src: int
    nbytes: int
    buffer: memoryview
    at: int


class Reads:
    """Collects runs, then reads them with few calls.

    Neighbours in a source are read at once, the bytes between thrown away.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._runs: list[Run] = []
        self._waste = memoryview(bytearray(_FAR))

    def add(self, source: int, src: int, nbytes: int, buffer: memoryview, at: int) -> None:
        """A run that is to be read; it is there after flush."""
        if self._runs:
            last = self._runs[-1]
            if (
                last.source == source
                and last.buffer is buffer
                and last.src + last.nbytes == src
                and last.at + last.nbytes == at
            ):
                self._runs[-1] = last._replace(nbytes=last.nbytes + nbytes)
                return
        self._runs.append(Run(source, src, nbytes, buffer, at))
        if len(self._runs) >= _READS:
            self.flush()

    def flush(self) -> None:
        """Read all that was added."""
        runs, self._runs = self._runs, []
        runs.sort(key=lambda r: r[:2])
        views: list[memoryview] = []
        source, start, stop = -1, 0, 0
        for run in runs:
            gap = run.src - stop
            near = gap == 0 or 0 < gap <= min(_FAR, max(_PAGE, min(stop - start, run.nbytes)))
            if views and (run.source != source or not near):
                self._sources.read(source, start, views, stop - start)
                views = []
            if not views:
                source, start = run.source, run.src
            elif gap:
                views.append(self._waste[:gap])
            views.append(run.buffer[run.at : run.at + run.nbytes])
            stop = run.src + run.nbytes
        if views:
            self._sources.read(source, start, views, stop - start)


def is_stream(steps: Iterable[Step]) -> bool:
    """Whether steps can be filled from the first byte to the last: no box is scattered over the extent."""
    return all(s.is_run or _is_line(s) if isinstance(s, Move) else not isinstance(s, Merge) for s in steps)


def _is_line(move: Move) -> bool:
    """Whether a move is one run on both sides, bits or cast."""
    if len(move.size) > 1:
        return False
    return not move.size or (move.src_strides[0] == move.item and move.dst_strides[0] == move.dst_item)


def repeat_into(view: memoryview, pattern: bytes, phase: int) -> None:
    """Fill view with the pattern, from byte phase of it on."""
    unit = pattern[phase:] + pattern[:phase]
    block = unit * (min(len(view), _FAR) // len(unit) + 1)
    block = block[: len(block) - len(block) % len(unit)]
    for at in range(0, len(view), len(block)):
        n = min(len(block), len(view) - at)
        view[at : at + n] = block[:n]


class Stream:
    """One buffer through which an extent goes from its first byte to its last.

    full(start, data) is called with each filled stretch: data are the file's bytes from start on, valid during the
    call.
    """

    def __init__(self, sources: Sources, nbytes: int, full: Callable[[int, memoryview], None]) -> None:
        self._array = buffer(nbytes)
        self._buffer = self._array.data
        self._page = _PAGE if nbytes % _PAGE == 0 and nbytes > _PAGE else 1
        self._sources, self._full = sources, full
        self._staged = buffer(0)
        self._reads = Reads(sources)
        self._start = self._first = self._used = self._limit = 0

    def begin(self, start: int) -> None:
        """The next byte is the file's byte start. It lies in the buffer's page as it does in the file's."""
        self._first = self._used = start % self._page
        self._start = start - self._first
        self._limit = len(self._buffer) - self._start % len(self._buffer)

    def flush(self) -> None:
        """Hand over what is in the buffer."""
        if self._used > self._first:
            self._reads.flush()
            self._full(self._start + self._first, self._buffer[self._first : self._used])
            self.begin(self._start + self._used)

    def _room(self, unit: int) -> int:
        """Bytes that may be put now, whole units; flushes where none fits."""
        if self._limit - self._used < unit:
            self.flush()
        # The first stretch is shorter, so that later ones begin and stop at pages of the file; but for large elements.
        room = self._limit - self._used if self._limit - self._used >= unit else len(self._buffer) - self._used
        return room - room % unit

    def put(self, step: Step) -> None:
        """The next step. It begins where the one before stopped."""
        if isinstance(step, Move):
            self._cast(step) if step.rule is not None else self._run(step)
            return
        assert not isinstance(step, Merge)  # is_stream says no to those
        nbytes, done = len(step.data) if isinstance(step, Write) else step.nbytes, 0
        while done < nbytes:
            n = min(nbytes - done, self._room(1))
            view = self._buffer[self._used : self._used + n]
            self._used += n
            fill(view, step, done)
            done += n

    def _run(self, move: Move) -> None:
        nbytes, done = move.numel * move.item, 0
        if self._sources.is_far:
            self._reads.flush()
            self._sources.expect(move.source, move.src, nbytes)
        while done < nbytes:
            n = min(nbytes - done, self._room(1))
            self._reads.add(move.source, move.src + done, n, self._buffer, self._used)
            self._used += n
            done += n

    def _cast(self, move: Move) -> None:
        assert move.rule is not None
        numel, done = move.numel, 0
        types = carrier(move.rule.source), carrier(move.rule.target)
        if self._sources.is_far:
            self._sources.expect(move.source, move.src, numel * move.item)
        while done < numel:
            n = min(numel - done, self._room(move.dst_item) // move.dst_item)
            if n * move.item > len(self._staged):
                # A cast reads at most four times what it makes.
                self._staged = buffer(max(4 * len(self._buffer), n * move.item))
            staged = self._staged[: n * move.item]
            self._sources.read(move.source, move.src + done * move.item, [staged.data], len(staged))
            target = np.ndarray((n,), types[1], self._array, self._used)
            convert(target, staged.view(types[0]), move.rule)
            self._used += n * move.dst_item
            done += n


def fill(view: memoryview, step: Write | Repeat | After, done: int) -> None:
    """Bytes of a step from its byte done on. Those that come late are 0 until then."""
    if isinstance(step, Write):
        view[:] = step.data[done : done + len(view)]
    elif isinstance(step, Repeat):
        repeat_into(view, step.pattern, (step.phase + done) % len(step.pattern))
    else:
        repeat_into(view, b"\0", 0)
