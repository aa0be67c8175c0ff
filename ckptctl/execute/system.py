"""System calls that Python does not have, and errors of the system as the user's. Linux first.

Elsewhere each has a way round.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from ckptctl.core.errors import CkptError, MissingFile, NoSpace

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
_SYNC_FILE_RANGE_WRITE = 2  # Source: man 2 sync_file_range
NOREPLACE, EXCHANGE = 1, 2  # Source: man 2 renameat2
_AT_FDCWD = -100


class _Libc:
    """The C library's functions by name, None where it has none."""

    def __init__(self) -> None:
        linux = sys.platform.startswith("linux")
        self._lib = ctypes.CDLL(None, use_errno=True) if linux else None
        wide = ctypes.c_int64
        self.sync_file_range = self._find("sync_file_range", ctypes.c_int, wide, wide, ctypes.c_uint)
        # fallocate64 and not posix_fallocate: where a file system cannot, glibc's would write every block.
        self.fallocate = self._find("fallocate64", ctypes.c_int, ctypes.c_int, wide, wide)
        self.statfs = self._find("statfs64", ctypes.c_char_p, ctypes.c_char_p)
        text = ctypes.c_char_p
        self.renameat2 = self._find("renameat2", ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)

    def _find(self, name: str, *types: type) -> ctypes._NamedFuncPointer | None:
        found = getattr(self._lib, name, None)
        if found is not None:
            found.argtypes, found.restype = types, ctypes.c_int
        return found


_LIBC = _Libc()


def start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Ask for those bytes to go to the disk now, without waiting for them.

    The fsync at the end finds little left to do.
    """
    if _LIBC.sync_file_range is not None:
        _LIBC.sync_file_range(fd, start, nbytes, _SYNC_FILE_RANGE_WRITE)


def allocate(fd: int, nbytes: int) -> None:
    """Make the file nbytes long, with its blocks taken where the file system can. OSError where there is no room."""
    if nbytes and _LIBC.fallocate is not None:
        if _LIBC.fallocate(fd, 0, 0, nbytes) == 0:
            os.ftruncate(fd, nbytes)
            return
        code = ctypes.get_errno()
        if code not in _NOT_HERE and code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, nbytes)


def file_system(path: str) -> int:
    """The number that says which file system a path is on (`f_type`), 0 where the system does not say.

    Source: man 2 statfs: it is the structure's first field, a word.
    """
    room = ctypes.create_string_buffer(512)
    if _LIBC.statfs is None or _LIBC.statfs(os.fsencode(path), room) != 0:
        return 0
    return int.from_bytes(room.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)


def rename(old: Path, new: Path, flags: int) -> bool:
    """Rename with NOREPLACE (FileExistsError where new is there) or EXCHANGE.

    False, and nothing done, where the system has no such call.
    """
    if _LIBC.renameat2 is None:
        return False
    if _LIBC.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(old), None, os.fspath(new))


def boot_id() -> str:
    """Which start of the machine this is; "" where it does not say. What was written before another one may be lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def peak_rss() -> int:
    """The most memory that this process had resident, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def writing_failed(err: OSError, path: Path | str) -> CkptError:
    """The error for what writing to path raised."""
    why = err.strerror or str(err)
    if err.errno in _FULL:
        return NoSpace(
            "the disk is full, or a limit on file size or space is reached",
            where=os.fspath(path),
            why=why,
            fix="make room and run again with --resume: what is done is kept beside the target",
        )
    return CkptError(
        "the result cannot be written",
        where=os.fspath(path),
        why=why,
        fix="check the folder's rights and its disk, then run again with --resume",
        code="write-failed",
    )


def reading_failed(err: OSError, path: Path | str) -> CkptError:
    """The error for what opening or reading the source's file at path raised."""
    why = err.strerror or str(err)
    if err.errno in (errno.ENOENT, errno.ENOTDIR):
        return MissingFile(
            "a file of the source is gone",
            where=os.fspath(path),
            why=why,
            fix="bring it back and run again with --resume",
        )
    return CkptError(
        "a file of the source cannot be read",
        where=os.fspath(path),
        why=why,
        fix="check its rights and its disk, copy it again if need be, then run again with --resume",
        code="read-failed",
    )
