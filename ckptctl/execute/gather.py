"""Filling buffers with an extent's steps: runs are read where they belong, strided boxes by windows.

Nothing is written to a file here.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptctl.execute.cast import carrier, convert
from ckptctl.execute.memory import Bytes, buffer
from ckptctl.execute.scatter import parts, place
from ckptctl.plan.steps import After, Extent, Move, Repeat, Step, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    return all(not isinstance(s, Move) or s.is_run or _is_line(s) for s in steps)


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

    Full() is called with each filled stretch.

    full(start, data): data are the file's bytes from start on, valid during the call.
    """

    def __init__(self, sources: Sources, nbytes: int, full: Callable[[int, memoryview], None]) -> None:
        self._array = buffer(nbytes)
        self._buffer = self._array.data
        self._sources, self._full = sources, full
        self._reads = Reads(sources)
        self._start = self._used = 0

    def begin(self, start: int) -> None:
        """The next byte is the file's byte start."""
        self._start, self._used = start, 0

    def flush(self) -> None:
        """Hand over what is in the buffer."""
        if self._used:
            self._reads.flush()
            self._full(self._start, self._buffer[: self._used])
            self._start += self._used
            self._used = 0

    def _room(self, unit: int) -> int:
        """Bytes that may be put now, whole units; flushes where none fits."""
        if len(self._buffer) - self._used < unit:
            self.flush()
        room = len(self._buffer) - self._used
        return room - room % unit

    def put(self, step: Step) -> None:
        """The next step. It begins where the one before stopped."""
        if isinstance(step, Move):
            self._cast(step) if step.rule is not None else self._run(step)
            return
        nbytes, done = len(step.data) if isinstance(step, Write) else step.nbytes, 0
        while done < nbytes:
            n = min(nbytes - done, self._room(1))
            view = self._buffer[self._used : self._used + n]
            self._used += n
            _fill(view, step, done)
            done += n

    def _run(self, move: Move) -> None:
        nbytes, done = move.numel * move.item, 0
        while done < nbytes:
            n = min(nbytes - done, self._room(1))
            self._reads.add(move.source, move.src + done, n, self._buffer, self._used)
            self._used += n
            done += n

    def _cast(self, move: Move) -> None:
        assert move.rule is not None
        numel, done = move.numel, 0
        types = carrier(move.rule.source), carrier(move.rule.target)
        while done < numel:
            n = min(numel - done, self._room(move.dst_item) // move.dst_item)
            staged = buffer(n * move.item)
            self._sources.read(move.source, move.src + done * move.item, [staged.data], len(staged))
            target = np.ndarray((n,), types[1], self._array, self._used)
            convert(target, staged.view(types[0]), move.rule)
            self._used += n * move.dst_item
            done += n


def _fill(view: memoryview, step: Write | Repeat | After, done: int) -> None:
    """Bytes of a step from its byte done on. Those that come late are 0 until then."""
    if isinstance(step, Write):
        view[:] = step.data[done : done + len(view)]
    elif isinstance(step, Repeat):
        repeat_into(view, step.pattern, (step.phase + done) % len(step.pattern))
    else:
        repeat_into(view, b"\0", 0)


class Filled(NamedTuple):
    """An extent with its bytes."""

    extent: Extent
    data: Bytes


class _Want(NamedTuple):
    """A part of a strided move: which source bytes it stretches over, and the buffer it goes to.

    Sorted by those bytes.
    """

    source: int
    start: int
    stop: int
    number: int
    move: Move


def gather(
    sources: Sources, gang: Sequence[tuple[Extent, Sequence[Step]]], window_nbytes: int, check: Callable[[], None]
) -> list[Filled]:
    """The bytes of all extents of a gang; each stretch of a source is read once for all of them.

    Check is called now and then.
    """
    filled = [Filled(e, buffer(e.stop - e.start)) for e, _ in gang]
    reads = Reads(sources)
    wants: list[Iterator[_Want]] = []
    for number, (extent, steps) in enumerate(gang):
        view = filled[number].data.data
        for step in steps:
            at = step.dst - extent.start
            if not isinstance(step, Move):
                n = len(step.data) if isinstance(step, Write) else step.nbytes
                _fill(view[at : at + n], step, 0)
            elif step.is_run:
                reads.add(step.source, step.src, step.numel * step.item, view, at)
            else:
                # Half a window: parts of neighbouring files that cover one stretch then fit one window together.
                wants.append(_wanted(step, number, window_nbytes // 2))
    reads.flush()
    window = buffer(window_nbytes)
    for group, start, stop in _windows(heapq.merge(*_by_start(wants)), window_nbytes):
        check()
        _scatter(sources, filled, group, start, stop, window)
    return filled


def _wanted(move: Move, number: int, limit: int) -> Iterator[_Want]:
    for part in parts(move, limit):
        stop = part.src + sum((n - 1) * s for n, s in zip(part.size, part.src_strides, strict=True)) + part.item
        yield _Want(part.source, part.src, stop, number, part)


def _by_start(wants: Iterable[Iterator[_Want]]) -> list[Iterable[_Want]]:
    """The same parts in few sorted sequences.

    Moves of one part each, of which there may be thousands, are one of them.
    """
    singles: list[_Want] = []
    out: list[Iterable[_Want]] = [singles]
    for some in wants:
        first, second = next(some), next(some, None)
        if second is None:
            singles.append(first)
        else:
            out.append(itertools.chain((first, second), some))
    singles.sort()
    return out


def _windows(wants: Iterable[_Want], limit: int) -> Iterator[tuple[list[_Want], int, int]]:
    """Parts that are read together, and the bytes of the source to read for them."""
    group: list[_Want] = []
    source, start, stop = -1, 0, 0
    for want in wants:
        gap = want.start - stop
        near = gap <= min(_FAR, max(_PAGE, stop - start))
        fits = want.source == source and want.start >= start and max(stop, want.stop) - start <= limit
        if group and not (fits and near):
            yield group, start, stop
            group = []
        if not group:
            source, start, stop = want.source, want.start, want.stop
        group.append(want)
        stop = max(stop, want.stop)
    if group:
        yield group, start, stop


def _scatter(sources: Sources, filled: list[Filled], group: list[_Want], start: int, stop: int, window: Bytes) -> None:
    if len(group) == 1 and group[0].move.is_run:
        want = group[0]
        into = filled[want.number]
        at = want.move.dst - into.extent.start
        sources.read(want.source, start, [into.data.data[at : at + stop - start]], stop - start)
        return
    # A single part may stretch further than the window where its elements overlap or limits are tiny.
    data = window if stop - start <= len(window) else buffer(stop - start)
    sources.read(group[0].source, start, [data.data[: stop - start]], stop - start)
    for want in group:
        into = filled[want.number]
        place(want.move, data, start, into.data, into.extent.start)
