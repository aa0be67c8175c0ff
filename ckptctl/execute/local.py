"""Running a job on this machine: checks first, then threads over the plan's extents, then the name. Whole or nothing.

run(job, budget)                refuse, lock, compare with the journal, write, sync, look at the source again, rename
space(job)                      what it needs and what is free, for a dry run
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, Mismatch, SourceChanged, Usage
from ckptctl.execute.cast import require_casts
from ckptctl.execute.checks import FileChecks, extent_crc
from ckptctl.execute.files import read_all
from ckptctl.execute.job import Budget, Job, Json, Outcome, Progress, Sizes, fitted, sizes_for, used_sources
from ckptctl.execute.journal import Journal, Past, header_of, read_journal, require_same, source_marks
from ckptctl.execute.memory import Stopped
from ckptctl.execute.signals import terminable
from ckptctl.execute.sources import Sources, seen
from ckptctl.execute.system import cores, peak_rss, writing_failed
from ckptctl.execute.target import (
    Partial,
    free_nbytes,
    is_complete,
    plain_target,
    remove_old,
    removed_journal,
    require_apart,
    require_new,
    require_paths,
    require_space,
)
from ckptctl.execute.work import Shared, Worker, finish
from ckptctl.plan.gangs import Gang, gangs
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ckptctl.plan.steps import Extent

_MOST_JOBS = 8
"""Threads at most, and as many where the source is elsewhere: they wait for it, and not for a core."""
_SYNCERS = 2
"""Threads that wait for files to reach the disk."""


def run(
    job: Job,
    budget: Budget | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    in_place: bool = False,
    checksums: bool = False,
    progress: Callable[[Progress], None] | None = None,
    before_commit: Callable[[Path], None] | None = None,
) -> Outcome:
    """Write a job's result under its target's name, completely, or raise and leave what is done for resume=True.

    in_place: the target is the source itself, and with overwrite the result takes its place when it is whole.
    checksums: the CRC-32 of every file is wanted (most are known anyway). progress is called from this thread, about
    ten times a second. before_commit gets the finished file or folder before it has its name: what it raises, stops the
    commit; a Mismatch removes the result, other errors leave it for resume=True.

    Raises Usage (target there, or mixed up with the source), NoSpace, MissingFile, Damaged, Unsupported, SourceChanged
    (on resume: another job; at the end: the source was written to), Interrupted (SIGTERM, SIGHUP), CkptError with code
    busy, write-failed or read-failed, and KeyboardInterrupt as it comes.
    """
    started = time.monotonic()
    budget = budget or Budget()
    job = replace(fitted(job, budget), target=plain_target(job.target))
    sizes = sizes_for(job, budget)
    require_casts(job.plan.casts)
    require_paths(job.plan.files, job.folder)
    if not in_place:
        require_apart(job.target, job.root, [job.root / job.sources[n].path for n in used_sources(job.plan)])
    elif not job.target.samefile(job.root):
        raise Usage("in place means that the target is the source", where=str(job.target), why=f"that is {job.root}")
    marks = source_marks(job)
    header = header_of(job, marks)
    with terminable():
        past = _left_complete(job.target)
        if past is not None and resume:
            require_same(past.header, header)
            nbytes = job.totals.written_nbytes
            return Outcome(
                time.monotonic() - started,
                nbytes,
                0,
                nbytes,
                0,
                {},
                peak_rss(),
                ("the interrupted job was already complete",),
            )
        require_new(job.target, overwrite)
        with Partial(job.target) as partial:
            return _Run(job, budget, sizes, partial, marks, header, checksums, progress, started).run(
                resume, overwrite, before_commit
            )


def space(job: Job, budget: Budget | None = None) -> tuple[int, int]:
    """(bytes that the job needs on the target's disk, bytes that are free there). Nothing is written or resumed."""
    sizes = sizes_for(job, budget or Budget())
    return sum(f.nbytes for f in job.plan.files) + _scratch_nbytes(job, sizes), free_nbytes(job.target.parent)


def _scratch_nbytes(job: Job, sizes: Sizes) -> int:
    """Bytes of decoded members that will not be held in memory, as far as their sizes are known."""
    found = (job.sources[n] for n in used_sources(job.plan))
    return sum(s.decoded_nbytes for s in found if s.codec and s.decoded_nbytes > sizes.member)


def _left_complete(target: Path) -> Past | None:
    """What a job tells that put the target in place and was stopped before its folder was gone; that is removed now.

    None where there is no such job: then nothing is touched.
    """
    if not os.path.lexists(target):
        return None
    past = read_journal(removed_journal(target))
    if is_complete(target, past.complete):
        remove_old(target)
        return past
    if not Partial.folder_of(target).exists():
        return None
    with Partial(target) as partial:
        past = read_journal(partial.read())
        if not is_complete(target, past.complete):
            return None
        partial.discard()
        return past


class _Run:
    """One run of a job whose folder is locked."""

    def __init__(
        self,
        job: Job,
        budget: Budget,
        sizes: Sizes,
        partial: Partial,
        marks: Mapping[str, Json],
        header: Mapping[str, Json],
        checksums: bool,
        progress: Callable[[Progress], None] | None,
        started: float,
    ) -> None:
        self.job, self.sizes, self.partial, self.marks, self.header = job, sizes, partial, marks, header
        self.jobs = budget.jobs or (_MOST_JOBS if places.address_of(job.root) else min(_MOST_JOBS, cores()))
        self.checksums, self.progress, self.started = checksums, progress, started
        self.journal = Journal(partial.fd, os.fspath(partial.journal))
        self.checks = [FileChecks(job.plan, n) for n in range(len(job.plan.files))]
        self.notes: list[str] = []
        self.resumed_nbytes = 0
        self.failures: list[BaseException] = []

    def run(self, resume: bool, overwrite: bool, before_commit: Callable[[Path], None] | None) -> Outcome:
        files = self.job.plan.files
        past = self._past(resume)
        require_space(self.partial.missing_nbytes(files) + _scratch_nbytes(self.job, self.sizes), self.job.target)
        kept = self.partial.lay_out(files, self.job.folder)
        if not past.header:
            self.journal.line(self.header)
        self._take_over(past, kept)
        file_nbytes = {path: mark["nbytes"] for path, mark in self.marks.items()}
        sizes = self.sizes
        with Sources(
            self.job.root, self.job.sources, file_nbytes, self.partial.scratch, sizes.decoded, sizes.member, self._room
        ) as sources:
            paths = [self.partial.path_of(f) for f in files]
            shared = Shared(self.job.plan, sizes, sources, self.journal, paths, self.checks, self.checksums)
            with shared.writer:
                crcs = self._threads(shared)
        self._same_source()
        if before_commit is not None:
            try:
                before_commit(self.partial.out)
            except Mismatch:  # it is not what it should be: nothing to go on with
                self.partial.discard()
                raise
        self.partial.commit(files, overwrite, lambda inode: self.journal.line({"complete": inode}))
        return Outcome(
            time.monotonic() - self.started,
            self.job.totals.written_nbytes,
            sources.read_nbytes,
            self.resumed_nbytes,
            shared.direct_nbytes,
            {f.path: crc for f, crc in zip(files, crcs, strict=True)},
            peak_rss(),
            tuple(self.notes),
        )

    def _room(self) -> int:
        return free_nbytes(self.partial.path)

    def _past(self, resume: bool) -> Past:
        """What is to be gone on with; an empty past, and an empty folder, where there is nothing."""
        data = self.partial.read()
        past = read_journal(data) if resume else Past()
        if past.header:
            require_same(past.header, self.header)
            os.ftruncate(self.partial.fd, past.nbytes)
            # The inode of a commit that did not come about means nothing any more.
            return replace(past, complete=None)
        if resume:
            self.notes.append("there was no interrupted job to go on with: started anew")
        self.partial.clear()
        return Past()

    def _take_over(self, past: Past, kept: set[int]) -> None:
        """Count extents that are there already.

        After a start of the machine since then, only those whose bytes still have their checksum.
        """
        for extent, done in past.done.items():
            if extent.file in kept and (past.same_boot or (done.crc is not None and self._is_there(extent, done.crc))):
                self.checks[extent.file].add(extent, done)
                self.resumed_nbytes += extent.stop - extent.start
        self.done = {e for c in self.checks for e in c.written}

    def _is_there(self, extent: Extent, crc: int) -> bool:
        path = os.fspath(self.partial.path_of(self.job.plan.files[extent.file]))
        buffer = memoryview(bytearray(min(self.sizes.chunk, extent.stop - extent.start)))
        value, at = 0, extent.start
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                while at < extent.stop:
                    some = buffer[: min(len(buffer), extent.stop - at)]
                    read_all(fd, [some], at, path)
                    value = extent_crc(self.checks[extent.file], at, some, value)
                    at += len(some)
            finally:
                os.close(fd)
        except OSError as err:
            raise writing_failed(err, path) from err
        return value == crc

    def _gangs(self) -> Iterator[Gang]:
        """What is left to do."""
        for gang in gangs(self.job.plan, self.job.totals, self.sizes.gang):
            left = tuple(e for e in gang if e not in self.done)
            if left:
                yield left

    def _threads(self, shared: Shared) -> list[int | None]:
        """Write all that is left, and bring every file to the disk. Returns the files' checksums."""
        left, turn, idle = self._gangs(), threading.Lock(), threading.Event()
        synced: dict[int, Future[int | None]] = {}
        whole = [c.number for c in self.checks if not c.waiting]
        with ThreadPoolExecutor(_SYNCERS, "ckptctl-sync") as syncers:

            def work() -> None:
                try:
                    worker = Worker(shared)
                    while not shared.stop.is_set():
                        with turn:
                            gang = next(left, None)
                        if gang is None:
                            return
                        for number in worker.do(gang):
                            synced[number] = syncers.submit(finish, shared, number)
                except Stopped:
                    pass
                except BaseException as err:
                    self.failures.append(err)
                    shared.stop.set()

            threads = [threading.Thread(target=work, name=f"ckptctl-{i}") for i in range(self.jobs)]

            def watch() -> None:
                for thread in threads:
                    thread.join()
                idle.set()

            try:
                for number in whole:
                    synced[number] = syncers.submit(finish, shared, number)
                for thread in threads:
                    thread.start()
                threading.Thread(target=watch, name="ckptctl-watch", daemon=True).start()
                while not idle.wait(0.1):
                    self._tell(shared)
                self._raise_failure()
                while not all(f.done() for f in synced.values()):
                    self._tell(shared)
                    time.sleep(0.01)
                crcs = [synced[n].result() for n in range(len(self.checks))]
            finally:
                shared.stop.set()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                syncers.shutdown(wait=True, cancel_futures=True)
            self._tell(shared)
            return crcs

    def _raise_failure(self) -> None:
        for err in self.failures:
            if isinstance(err, MemoryError):
                raise CkptError(
                    "memory ran out",
                    why=str(err),
                    fix="lower --memory or --jobs, then run with --resume",
                    code="no-memory",
                ) from err
            raise err

    def _tell(self, shared: Shared) -> None:
        if self.progress is not None:
            done = self.resumed_nbytes + shared.done_nbytes
            self.progress(Progress(done, self.job.totals.written_nbytes, time.monotonic() - self.started, peak_rss()))

    def _same_source(self) -> None:
        """SourceChanged where a source file is not as it was at the start."""
        for path, now in seen(self.job.root, list(self.marks)).items():
            was = (self.marks[path]["nbytes"], self.marks[path]["mtime_ns"])
            if now != was:
                raise SourceChanged(
                    "the source was written to while it was read",
                    where=os.fspath(self.job.root / path if path else self.job.root),
                    why=f"{was[0]} bytes, changed at {was[1]} ns before; {now[0]} bytes, {now[1]} ns now",
                    fix="wait until nothing writes to it, then run anew without --resume",
                )
