"""A folder of placeholders for a repository's files, and what was read of them by small reads, kept in one file.

A placeholder has the size of its file and holds no block of the disk. No network here: `Listed.source` reads.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptctl.remote.places import Forward

ENDS_NBYTES = 64 << 10
"""Bytes that are read at once at either end of a file: most headers and directories are shorter."""
_LEAST_NBYTES = 4 << 10
"""Bytes that are read at once elsewhere."""
_KEPT_NBYTES = 16 << 20
"""Reads up to this size are kept ..."""
_CACHE_NBYTES = 256 << 20
"""... until so many bytes are, together."""
_AHEAD = 64
"""Files of one series whose heads are fetched ahead."""
_PREFIX = "ckptctl-hub-"
_NEW_SECONDS = 3600.0
_FETCHERS = 16
"""Threads that fetch ahead."""


class Ranges(Protocol):
    """A file's bytes, read from where it is."""

    def stream(self, start: int, stop: int | None = None) -> Forward:
        """A stream from start on, up to stop where that is known."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of a repository. local is where a copy of it lies on this machine, "" for none."""

    path: str
    nbytes: int
    identity: str
    source: Ranges
    local: str = ""


class Kept:
    """A file elsewhere: small reads are kept and answered again, large ones pass through. See places.Elsewhere."""

    def __init__(self, folder: Folder, listed: Listed) -> None:
        self.name, self.nbytes, self.identity = f"{folder.shown}/{listed.path}", listed.nbytes, listed.identity
        self.path, self._source, self._folder = listed.path, listed.source, folder
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._runs: list[tuple[int, int, int]] = []
        """(start, stop, where in the folder's cache), rising, none in another."""

    def stream(self, start: int) -> Forward:
        """A stream of its bytes from start on."""
        return self._source.stream(start)

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start."""
        parts, at, stop = [], start, start + n
        with self._lock:
            while at < stop:
                run, until = self._run_at(at, stop)
                if run is not None:
                    parts.append(self._folder.cached(run[2] + at - run[0], until - at))
                else:
                    first, last = self._around(at, until)
                    parts.append(self._fetch(first, last)[at - first : until - first])
                at = until
        if n:
            self._folder.looked_at(self, start, stop)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges that are wanted soon, several at once, and wait for them."""
        with self._lock:
            wanted = [r for r in _merged(ranges) if not self._has(*r)]
        if len(wanted) > 1:
            self._folder.at_once([lambda r=r: self._have(*r) for r in wanted])  # type: ignore[misc]

    def _have(self, start: int, stop: int) -> None:
        """Have bytes [start, stop) at hand. Several threads may fetch at once, in parts that are not the same."""
        with self._lock:
            if self._has(start, stop):
                return
            first, last = self._around(start, stop)
        data = self._pull(first, last)
        with self._lock:
            self._keep(first, data)

    def head(self) -> None:
        """Have the first bytes at hand; who reads them meanwhile waits for it."""
        with self._lock:
            stop = min(self.nbytes, ENDS_NBYTES)
            if stop and not self._has(0, stop):
                self._fetch(*self._around(0, stop))

    def tail(self) -> None:
        """Have the last bytes at hand; who reads them meanwhile waits for it."""
        with self._lock:
            start = max(0, self.nbytes - ENDS_NBYTES)
            if self.nbytes and not self._has(start, self.nbytes):
                self._fetch(*self._around(start, self.nbytes))

    def _run_at(self, at: int, stop: int) -> tuple[tuple[int, int, int] | None, int]:
        """The run that was kept and has byte at, None for none; and up to where, before stop, that is so."""
        i = bisect_right(self._starts, at) - 1
        if i >= 0 and at < self._runs[i][1]:
            return self._runs[i], min(stop, self._runs[i][1])
        return None, min(stop, self._starts[i + 1]) if i + 1 < len(self._starts) else stop

    def _has(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) were kept, or there is none of them."""
        while start < stop:
            run, start = self._run_at(start, stop)
            if run is None:
                return False
        return True

    def _around(self, start: int, stop: int) -> tuple[int, int]:
        """What is fetched where [start, stop) is wanted, none of which was kept: no byte is fetched twice."""
        first, last = start, min(self.nbytes, max(stop, start + _LEAST_NBYTES))
        if start < ENDS_NBYTES:
            first, last = 0, max(last, min(self.nbytes, ENDS_NBYTES))
        if stop > self.nbytes - ENDS_NBYTES and stop - start < ENDS_NBYTES:
            first, last = min(first, max(0, self.nbytes - ENDS_NBYTES)), self.nbytes
        i = bisect_right(self._starts, start)
        before = self._runs[i - 1][1] if i else 0
        after = self._starts[i] if i < len(self._starts) else self.nbytes
        return max(first, before), min(last, after)

    def _fetch(self, start: int, stop: int) -> bytes:
        data = self._pull(start, stop)
        self._keep(start, data)
        return data

    def _pull(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        stream = self._source.stream(start, stop)
        try:
            stream.fill([memoryview(data)], lambda: None)
        finally:
            stream.close()
        return bytes(data)

    def _keep(self, start: int, data: bytes) -> None:
        at = self._folder.cache(data) if len(data) <= _KEPT_NBYTES else None
        if at is None:
            return
        stop = start + len(data)
        if any(r[0] < stop and start < r[1] for r in self._runs):
            return  # another thread was quicker
        self._runs = sorted([*self._runs, (start, stop, at)])
        self._starts = [r[0] for r in self._runs]


class Folder:
    """Placeholders for files below a new folder of this machine; close it, which removes them.

    The cache's descriptor stays open until the process ends: a thread that still fetches must not write to whatever
    file has its number next.
    shown is what messages call the folder; name what it is called on this machine.
    """

    def __init__(self, shown: str, name: str, files: Iterable[Listed]) -> None:
        self.shown = shown
        _sweep()
        self._base = os.path.realpath(tempfile.mkdtemp(prefix=_PREFIX))
        self.root = f"{self._base}/{name}"
        self._owner = os.getpid()
        self._cache = os.open(f"{self._base}/cache", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._cache, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as somebody needs the folder: see _sweep
        self._cached = 0
        self._lock = threading.Lock()
        self._files: dict[str, Kept] = {}
        self._identities: dict[str, str] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._asked: set[Callable[[], None]] = set()
        self._fetchers = 0
        try:
            Path(self.root).mkdir()
            for file in files:
                self._place(file)
            self._series = _series(self._files)
            places.add(self)
        except BaseException:
            self.close()
            raise

    def _place(self, file: Listed) -> None:
        if not is_plain(file.path) or file.nbytes < 0:
            raise Damaged(
                "the Hub lists a file that cannot be one",
                where=self.shown,
                why=f"{file.path[:200]!r}, {file.nbytes} bytes",
                code="hub-answer",
            )
        full = Path(self.root, file.path)
        self._identities[file.path] = file.identity
        try:
            full.parent.mkdir(parents=True, exist_ok=True)
            if file.local:
                full.symlink_to(file.local)
                return
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            try:
                os.ftruncate(fd, file.nbytes)
            finally:
                os.close(fd)
            os.utime(full, (0, 0))
        except (OSError, ValueError, OverflowError) as err:
            why = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
            raise CkptError(
                "a file of the repository cannot be stood for on this machine",
                where=f"{self.shown}/{file.path[:200]}",
                why=f"{why}; it has {file.nbytes} bytes",
                fix="point TMPDIR at a file system that takes such names and sizes",
                code="hub-file-not-placed",
            ) from err
        self._files[file.path] = Kept(self, file)

    def at(self, name: str) -> Kept | None:
        """The file whose placeholder is root/name."""
        return self._files.get(name)

    def identity(self, name: str) -> str:
        """The hash of the content of root/name."""
        return self._identities.get(name, "")

    def cached(self, at: int, n: int) -> bytes:
        """Bytes that cache() took."""
        data = os.pread(self._cache, n, at)
        if len(data) != n:
            raise CkptError("what was read of the repository is gone", where=self._base, code="read-failed")
        return data

    def cache(self, data: bytes) -> int | None:
        """Keep bytes; where they are, or None where no more are kept."""
        with self._lock:
            if self._cached + len(data) > _CACHE_NBYTES:
                return None
            at = self._cached
            self._cached += len(data)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._cache, data[done:], at + done)
        except OSError:  # no room: they will be asked for again
            return None
        return at

    def looked_at(self, file: Kept, start: int, stop: int) -> None:
        """Fetch the same end of the files that come next in a series: headers are read of one after the other."""
        series, at = self._series.get(file.path, ((), 0))
        if start < ENDS_NBYTES:
            self._later([f.head for f in series[at + 1 : at + 1 + _AHEAD]])
        elif stop > file.nbytes - ENDS_NBYTES:
            self._later([f.tail for f in series[at + 1 : at + 1 + _AHEAD]])

    def _later(self, tasks: Sequence[Callable[[], None]]) -> None:
        fresh = []
        with self._lock:
            for task in tasks:
                if task not in self._asked:
                    self._asked.add(task)
                    fresh.append(task)
            self._queue.extend(fresh)
            more = min(len(fresh), _FETCHERS - self._fetchers)
            self._fetchers += more
        for _ in range(more):
            threading.Thread(target=self._work, name="ckptctl-fetch", daemon=True).start()

    def _work(self) -> None:
        """Do what is queued. Nobody waits for it: what fails is asked for again by whoever needs it."""
        while True:
            with self._lock:
                if not self._queue:
                    self._fetchers -= 1
                    return
                task = self._queue.popleft()
            try:
                task()
            except Exception:
                with self._lock:
                    self._queue.clear()

    def at_once(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Do all tasks, several at a time. Raises what the first that fails raises."""
        left, failed = deque(tasks), list[BaseException]()

        def work() -> None:
            while not failed:
                try:
                    task = left.popleft()
                except IndexError:
                    return
                try:
                    task()
                except BaseException as err:
                    failed.append(err)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_FETCHERS, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Remove the folder."""
        places.remove(self)
        with self._lock:
            self._queue.clear()
        if os.getpid() == self._owner:
            shutil.rmtree(self._base, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders of processes that were killed: those whose lock nobody holds, and which are no new ones."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_mtime > time.time() - _NEW_SECONDS:
                continue
            fd = os.open(folder / "cache", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or being removed
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)


def is_plain(path: str) -> bool:
    """Whether a listed path stays where it is put."""
    return not any(p in ("", ".", "..") or "\0" in p or "\\" in p for p in path.split("/"))


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that lie near each other as one, in order."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start - out[-1][1] <= 4 * _LEAST_NBYTES and stop - out[-1][0] <= _KEPT_NBYTES:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        elif stop > start:
            out.append((start, stop))
    return out


def _series(files: dict[str, Kept]) -> dict[str, tuple[Sequence[Kept], int]]:
    """For each file those whose names differ by numbers only, in order, and its place among them."""
    found: dict[str, list[Kept]] = {}
    for name in sorted(files):
        found.setdefault(re.sub(r"\d+", "#", name), []).append(files[name])
    return {f.path: (some, i) for some in found.values() for i, f in enumerate(some) if len(some) > 1}
