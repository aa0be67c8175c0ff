"""What one thread does.

Gangs of extents, each by the quickest way that its steps allow, written, counted and put in the journal.

runs, no checksum      copy_file_range: the kernel moves the bytes, on some disks without copying them
merged boxes           computed into a gang's buffers, from what is read for each
runs, casts, fills     a stream through one small buffer: read, checked and written while it is in the core's cache
strided boxes          a gang in buffers: windows of the source are read once and scattered
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack, contextmanager
from threading import Event, Lock
from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError
from ckptctl.execute.checks import ExtentChecks, FileChecks
from ckptctl.execute.files import OpenFiles, too_short, write_all
from ckptctl.execute.gather import gather
from ckptctl.execute.memory import Memory, Stopped
from ckptctl.execute.merge import NEED_NBYTES as MERGE_NBYTES
from ckptctl.execute.merge import merge
from ckptctl.execute.stream import Stream, is_stream
from ckptctl.execute.system import reading_failed, writing_failed
from ckptctl.execute.writing import Writer
from ckptctl.plan.steps import Extent, Merge, Move, Step
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckptctl.execute.job import Sizes
    from ckptctl.execute.journal import Done, Journal
    from ckptctl.execute.sources import Place, Sources
    from ckptctl.plan.gangs import Gang
    from ckptctl.plan.planner import Plan

DIRECT_NBYTES = 1 << 20
"""Runs from this length on are left to the kernel ..."""
DIRECT_ALIGNMENT = 4096
"""... where source and target lie alike in their pages. Else it copies no faster than we do, no file system can share
the blocks, and there would be no checksum. Measured for 2 GB on ext4, with fsync: cp 1.65 s, copy_file_range 1.05 s
where pages agree and 1.6 s where not, through memory with checksums 1.45 s."""
_DIRECT_PIECE = 8 << 20
_WRITE_PIECE = 4 << 20
_NO_DIRECT = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
    errno.EOVERFLOW,
}


class Shared:
    """What all threads of a job use."""

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        sources: Sources,
        journal: Journal,
        paths: Sequence[Path],
        checks: Sequence[FileChecks],
        checksums: bool,
    ) -> None:
        """Paths and checks are by output file; checksums.

        Each file's is wanted, so that nothing may be left to the kernel.
        """
        self.plan, self.sizes, self.sources, self.journal, self.checks = plan, sizes, sources, journal, checks
        self.paths = [os.fspath(p) for p in paths]
        self.writer = Writer(self.paths, [f.nbytes for f in plan.files])
        self.stop = Event()
        self.memory = Memory(sizes.buffers, self.stop)
        self.direct = hasattr(os, "copy_file_range") and not checksums
        self.lock = Lock()
        sources.go_on = self.go_on
        self.done_nbytes = self.direct_nbytes = 0

    def count(self, nbytes: int, direct: bool = False) -> None:
        """Bytes that were written; also where the job is told to stop."""
        with self.lock:
            self.done_nbytes += nbytes
            self.direct_nbytes += nbytes if direct else 0
        self.go_on()

    def go_on(self) -> None:
        """Raises Stopped where the job is told to stop."""
        if self.stop.is_set():
            raise Stopped


class Worker:
    """One thread's buffers and work."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._stream = Stream(shared.sources, shared.sizes.chunk, self._full)
        self._file, self._path = 0, ""
        self._sums: ExtentChecks | None = None

    def do(self, gang: Gang) -> list[int]:
        """Write all extents of a gang. Returns the files of which one was the last."""
        shared = self._shared
        filled = [(e, shared.plan.extent(e)) for e in gang]
        if all(is_stream(steps) for _, steps in filled):
            # The chunk, what a cast reads for it (at most four times as much), and what is thrown away.
            with shared.memory.held(6 * shared.sizes.chunk):
                return [e.file for e, steps in filled if self._streamed(e, steps)]
        computed = any(isinstance(s, Merge) for _, steps in filled for s in steps)
        need = shared.sizes.gang_need(sum(e.stop - e.start for e in gang)) + (MERGE_NBYTES if computed else 0)
        with shared.memory.held(need):
            return self._gathered(filled)

    def _begin(self, extent: Extent) -> ExtentChecks:
        self._file, self._path = extent.file, self._shared.paths[extent.file]
        self._sums = ExtentChecks(self._shared.checks[extent.file])
        return self._sums

    def _streamed(self, extent: Extent, steps: Sequence[Step]) -> bool:
        sums, direct_nbytes = self._begin(extent), 0
        shared = self._shared
        direct = not shared.checks[extent.file].needs(extent) and not shared.writer.beats_kernel(extent.file)
        self._stream.begin(extent.start)
        for step in steps:
            if direct and isinstance(step, Move) and (place := self._aligned(step)) is not None:
                self._stream.flush()
                done = self._direct(step, place)
                direct_nbytes += done
                self._stream.begin(step.dst + done)
                rest = step.numel * step.item - done
                if not rest:
                    continue
                step = Move(step.dst + done, step.source, step.src + done, (rest,), (1,), (1,), 1, 1)
            self._stream.put(step)
        self._stream.flush()
        return self._written(extent, sums.done(whole=not direct_nbytes))

    def _gathered(self, filled: Sequence[tuple[Extent, Sequence[Step]]]) -> list[int]:
        shared = self._shared
        last = []
        gathered = gather(shared.sources, filled, shared.sizes.window, shared.go_on)
        for (extent, data), (_, steps) in zip(gathered, filled, strict=True):
            for step in steps:
                if isinstance(step, Merge):
                    merge(shared.sources, step, data, extent.start, shared.sizes.window, shared.go_on)
            sums = self._begin(extent)
            view = data.data
            for at in range(0, len(view), _WRITE_PIECE):
                self._full(extent.start + at, view[at : at + _WRITE_PIECE])
            if self._written(extent, sums.done(whole=True)):
                last.append(extent.file)
        return last

    def _full(self, start: int, data: memoryview) -> None:
        """Check, write and count bytes of the current extent."""
        assert self._sums is not None
        self._sums.feed(start, data)
        try:
            self._shared.writer.write(self._file, data, start)
        except OSError as err:
            raise writing_failed(err, self._path) from err
        self._shared.count(len(data))

    def _written(self, extent: Extent, done: Done) -> bool:
        """Note that an extent is written. True where it was its file's last."""
        shared = self._shared
        try:
            shared.writer.written(extent.file, extent.start, extent.stop - extent.start)
        except OSError as err:
            raise writing_failed(err, self._path) from err
        shared.journal.add(extent, done)
        with shared.lock:
            return shared.checks[extent.file].add(extent, done)

    def _aligned(self, move: Move) -> Place | None:
        """Where a run lies that the kernel is to copy; None where it is not to."""
        if not (self._shared.direct and move.is_run and move.numel * move.item >= DIRECT_NBYTES):
            return None
        place = self._shared.sources.plain(move.source)
        if place is None or places.at(place.path) is not None or (place.start + move.src - move.dst) % DIRECT_ALIGNMENT:
            return None
        return place

    def _direct(self, move: Move, place: Place) -> int:
        """Let the kernel copy a run. Returns how many bytes of it, fewer where the file systems do not do that."""
        shared = self._shared
        start, nbytes, done = place.start + move.src, move.numel * move.item, 0
        if move.src < 0 or start + nbytes > place.stop:
            raise too_short(place.path, place.stop, start + nbytes)
        with (
            self._opened(shared.sources.files, place.path, reading_failed) as source,
            self._opened(shared.writer.files, self._path, writing_failed) as out,
        ):
            while done < nbytes:
                began = time.perf_counter()
                try:
                    got = os.copy_file_range(
                        source, out, min(_DIRECT_PIECE, nbytes - done), start + done, move.dst + done
                    )
                except OSError as err:
                    if err.errno not in _NO_DIRECT:
                        raise _copying_failed(err, place.path, self._path) from err
                    shared.direct = False
                    break
                if got == 0:
                    raise too_short(place.path, start + done, start + nbytes)
                done += got
                shared.writer.took(time.perf_counter() - began, got)
                shared.count(got, direct=True)
        shared.sources.counted(done)
        return done

    @contextmanager
    def _opened(self, files: OpenFiles, path: str, failed: Callable[[OSError, str], CkptError]) -> Iterator[int]:
        """A descriptor, errors of opening it as the user's."""
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(files.use(path))
            except OSError as err:
                raise failed(err, path) from err
            yield fd


def finish(shared: Shared, number: int) -> int | None:
    """Put in an output file's late bytes, all extents being written, and bring the file to the disk.

    Returns its CRC-32, where known.
    """
    path, checks = shared.paths[number], shared.checks[number]
    lates = list(checks.lates())
    try:
        with shared.writer.files.use(path) as fd:
            for start, data in lates:
                write_all(fd, memoryview(data), start)
            os.fsync(fd)
    except OSError as err:
        raise writing_failed(err, path) from err
    return checks.crc(lates)


def _copying_failed(err: OSError, source: str, target: str) -> CkptError:
    if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return writing_failed(err, target)
    return CkptError(
        "bytes cannot be copied",
        where=source,
        why=f"{err.strerror} while copying to {target}",
        fix="check both disks, then run again with --resume",
        code="read-failed",
    )
