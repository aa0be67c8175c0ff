"""How bytes get into the output files: through the page cache while that is quick, past it from where it is not.

Through the cache the disk gets its data in the background and in any order. But the system must find a page for each
4 KiB, and where memory is in pieces, or filled with what still waits for the disk, that takes longer than the disk
would. Measured on ext4 (Linux 6.18, two cores, sources in the cache): 2.0 GB through the cache 0.9 to 1.0 s, past it
(O_DIRECT) 1.4 to 2.1 s; 5.9 GB, or 2.0 GB where pages are hard to find, 5 to 20 s through it, 3.5 to 5.8 s past it.
So the time of each write is looked at.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from ckptctl.execute.files import OpenFiles, write_all
from ckptctl.execute.system import file_system, start_writeback

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 4096
"""What a direct write's place, length and memory are multiples of (man 2 open, O_DIRECT); a disk may want less."""
DIRECT_LEAST_NBYTES = 32 << 20
"""Smaller files go through the cache: whoever opens them next finds them there."""
_EXT, _XFS, _OVERLAY = 0xEF53, 0x58465342, 0x794C7630
_DIRECT_SYSTEMS = {_EXT, _XFS, _OVERLAY}
"""Source: man 2 statfs. Network and parallel file systems are left out: there the cache gathers what would else be one
request after another."""
SLOW_SECONDS = 1.5e-9
"""The cache is slow where a thread takes longer than this for a byte. Where all is well it takes 0.4e-9, where pages
are hard to find 3e-9 and more; a direct write takes 1e-9."""
LOOK_NBYTES = 256 << 20
"""Bytes between two looks at the time: a hiccup of a tenth of a second decides nothing."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class Writer:
    """Writes to the output files of a job, by their numbers. Threads share it; use as a context."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]) -> None:
        """Paths and final sizes of the files, which are there at that size."""
        self._paths = paths
        self.files = OpenFiles(os.O_RDWR)
        flag = getattr(os, "O_DIRECT", 0)
        self._direct_files = OpenFiles(os.O_RDWR | flag)
        large = [n for n, nbytes in enumerate(sizes) if flag and nbytes >= DIRECT_LEAST_NBYTES]
        system = file_system(paths[large[0]]) if large else 0
        self._able = set(large) if system in _DIRECT_SYSTEMS else set()
        self._can_share = system != _EXT
        self._is_past = False
        self._seconds, self._nbytes = 0.0, 0

    def took(self, seconds: float, nbytes: int) -> None:
        """A thread took that long for bytes that went through the cache. Decides about the next ones."""
        # Threads may lose a count of each other's; what is decided needs no more than a rough mean.
        self._seconds += seconds
        self._nbytes += nbytes
        if self._nbytes >= LOOK_NBYTES:
            self._is_past = self._is_past or self._seconds > SLOW_SECONDS * self._nbytes
            self._seconds, self._nbytes = 0.0, 0

    def beats_kernel(self, number: int) -> bool:
        """Whether a file is written past the cache on a file system whose copies never share blocks.

        The kernel's own copy (copy_file_range) goes through the cache there.
        """
        return self._is_past and number in self._able and not self._can_share

    def write(self, number: int, data: memoryview, start: int) -> None:
        """Write data at start. OSError as it comes.

        Past the cache go whole pages that lie in memory as they do in the file.
        """
        if self._is_past and number in self._able:
            first = min(-start % PAGE, len(data))
            last = first + (len(data) - first) // PAGE * PAGE
            if last > first and self._directly(number, data[first:last], start + first):
                # Pages at the ends are shared with neighbouring extents: those meet in the cache.
                if first:
                    self._through(number, data[:first], start)
                if last < len(data):
                    self._through(number, data[last:], start + last)
                return
        began = time.perf_counter()
        self._through(number, data, start)
        self.took(time.perf_counter() - began, len(data))

    def written(self, number: int, start: int, nbytes: int) -> None:
        """Those bytes are complete: the disk may begin with them."""
        if not (self._is_past and number in self._able):
            with self.files.use(self._paths[number]) as fd:
                start_writeback(fd, start, nbytes)

    def _directly(self, number: int, data: memoryview, start: int) -> bool:
        """Whether the system took all of it. Where it does not do that at all, the file is not tried again."""
        try:
            with self._direct_files.use(self._paths[number]) as fd:
                done = 0
                while done < len(data):
                    n = os.pwrite(fd, data[done:], start + done)
                    if n % PAGE:  # a short write; what is left begins within a page
                        return False
                    done += n
        except OSError as err:
            if err.errno not in _NO_DIRECT:
                raise
            self._able.discard(number)
            return False
        return True

    def _through(self, number: int, data: memoryview, start: int) -> None:
        with self.files.use(self._paths[number]) as fd:
            write_all(fd, data, start)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()
        self._direct_files.close()
