"""A gang's extents gathered together, each in its buffer: every stretch of a source is read once for all of them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.compose import joined
from ckptctl.core.tensor import dense_strides
from ckptctl.core.view import unit_slices
from ckptctl.execute.memory import Bytes, aligned, buffer
from ckptctl.execute.scatter import blocks, far_axes, parts, place, stretch
from ckptctl.execute.stream import Reads, fill
from ckptctl.plan.steps import Extent, Merge, Move, Step, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckptctl.execute.sources import Sources

_NEAR = 64 << 10
"""Moves with no more than this between them are looked at together."""
_WASTE = 9
"""A stretch is read as a whole where it is at most so many times what is wanted of it."""


class Filled(NamedTuple):
    """An extent with its bytes."""

    extent: Extent
    data: Bytes


class _Want(NamedTuple):
    """A strided move, or a part of one: the source bytes it stretches over (it sorts by them), and its buffer."""

    source: int
    start: int
    stop: int
    number: int
    move: Move


def gather(
    sources: Sources, gang: Sequence[tuple[Extent, Sequence[Step]]], window_nbytes: int, check: Callable[[], None]
) -> list[Filled]:
    """The bytes of all extents of a gang. check is called now and then: it may raise."""
    filled = [Filled(e, aligned(e.start, e.stop - e.start)) for e, _ in gang]
    reads = Reads(sources)
    wants: dict[int, list[_Want]] = defaultdict(list)
    for number, (extent, steps) in enumerate(gang):
        view = filled[number].data.data
        for step in steps:
            at = step.dst - extent.start
            if isinstance(step, Merge):
                continue  # computed into the buffer afterwards: execute.merge
            if not isinstance(step, Move):
                n = len(step.data) if isinstance(step, Write) else step.nbytes
                fill(view[at : at + n], step, 0)
            elif step.is_run:
                reads.add(step.source, step.src, step.numel * step.item, view, at)
            else:
                wants[step.source].append(_Want(step.source, step.src, step.src + stretch(step), number, step))
    reads.flush()
    window = buffer(window_nbytes)
    for some in wants.values():
        dense, sparse = _by_density(some)
        for group, start, stop in _windows(dense, window_nbytes):
            check()
            _scatter(sources, filled, group, start, stop, window)
        for want in sparse:
            check()
            _pick(sources, filled[want.number], want.move, window, check)
    return filled


def _by_density(wants: list[_Want]) -> tuple[list[_Want], list[_Want]]:
    """Moves that are read by windows, and those whose runs are picked out, as a window would be mostly waste.

    What counts is the whole gang: columns of a matrix, each a small part of every row, may be all of it together.
    """
    wants.sort()
    dense: list[_Want] = []
    sparse: list[_Want] = []
    cluster: list[_Want] = []
    start = stop = wanted = 0

    def put() -> None:
        if wanted * _WASTE >= stop - start:
            dense.extend(cluster)
            return
        for want in cluster:
            own = want.move.numel * want.move.item
            (dense if own * _WASTE >= want.stop - want.start else sparse).append(want)

    for want in wants:
        if cluster and want.start - stop > _NEAR:
            put()
            cluster = []
        if not cluster:
            start = stop = want.start
            wanted = 0
        cluster.append(want)
        stop = max(stop, want.stop)
        wanted += want.move.numel * want.move.item
    if cluster:
        put()
    return dense, sparse


def _windows(wants: Iterable[_Want], limit: int) -> Iterator[tuple[list[_Want], int, int]]:
    """Moves or parts of them that are read together, and the bytes of the source to read for them."""
    group: list[_Want] = []
    start = stop = 0
    for want in heapq.merge(*_cut(wants, limit)):
        gap = want.start - stop
        near = gap <= min(_NEAR, max(4096, stop - start))
        fits = want.start >= start and max(stop, want.stop) - start <= limit
        if group and not (fits and near):
            yield group, start, stop
            group = []
        if not group:
            start, stop = want.start, want.stop
        group.append(want)
        stop = max(stop, want.stop)
    if group:
        yield group, start, stop


def _cut(wants: Iterable[_Want], limit: int) -> list[Iterable[_Want]]:
    """The moves as parts, in few sequences that rise by start.

    Parts are half a window at most: those of neighbouring files that cover one stretch then fit a window together.
    Moves that are small enough as they are, of which there may be thousands, make one sequence.
    """
    small: list[_Want] = []
    out: list[Iterable[_Want]] = [small]
    for want in wants:
        if want.stop - want.start <= limit // 2:
            small.append(want)
        else:
            out.append(_parts(want, limit // 2))
    small.sort()
    return out


def _parts(want: _Want, limit: int) -> Iterator[_Want]:
    for part in parts(want.move, limit):
        yield _Want(want.source, part.src, part.src + stretch(part), want.number, part)


def _scatter(sources: Sources, filled: list[Filled], group: list[_Want], start: int, stop: int, window: Bytes) -> None:
    """Read a stretch and place what is wanted of it."""
    # A single element may be longer than the window where limits are tiny.
    data = window if stop - start <= len(window) else buffer(stop - start)
    sources.read(group[0].source, start, [data.data[: stop - start]], stop - start)
    for want in group:
        into = filled[want.number]
        place(want.move, data, start, into.data, into.extent.start)


def _pick(sources: Sources, into: Filled, move: Move, window: Bytes, check: Callable[[], None]) -> None:
    """Read the runs of a sparse move: where they belong, or packed into the window, and place them from there."""
    outer, run_nbytes = far_axes(move)
    if run_nbytes > len(window):
        for part in parts(move, len(window)):
            check()
            want = _Want(part.source, part.src, part.src + stretch(part), 0, part)
            _scatter(sources, [into], [want], want.start, want.stop, window)
        return
    reads = Reads(sources)
    straight = _is_straight(move, outer)
    for block in blocks(move, outer, len(window) // run_nbytes):
        check()
        sizes = tuple(block.size[i] for i in outer)
        for number, index in enumerate(unit_slices(sizes)):
            src = block.src + sum(k * block.src_strides[i] for k, i in zip(index, outer, strict=True))
            if straight:
                dst = block.dst + sum(k * block.dst_strides[i] for k, i in zip(index, outer, strict=True))
                reads.add(block.source, src, run_nbytes, into.data.data, dst - into.extent.start)
            else:
                reads.add(block.source, src, run_nbytes, window.data, number * run_nbytes)
        reads.flush()
        if not straight:
            strides = list(block.src_strides)
            for i, step in zip(outer, dense_strides(sizes, run_nbytes), strict=True):
                strides[i] = step
            place(block._replace(src=0, src_strides=tuple(strides)), window, 0, into.data, into.extent.start)


def _is_straight(move: Move, outer: Sequence[int]) -> bool:
    """Whether what lies between far gaps is one run of bytes in the target, too."""
    inner = [i for i in range(len(move.size)) if i not in outer]
    size, src, dst = (tuple(v[i] for i in inner) for v in (move.size, move.src_strides, move.dst_strides))
    size, src, dst = joined(size, src, dst)
    return move._replace(size=size, src_strides=src, dst_strides=dst).is_run
