"""Bytes of a file, or of a range of one, read at a position. No format is known here; nothing is mapped or cached."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Protocol

from ckptctl.core.errors import CkptError, Damaged, Unrecognised
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_AT_ONCE = 1 << 30
"""Linux moves at most 0x7FFFF000 bytes a call. Source: man 2 read."""


_SMALL = 64 << 20


class ByteSource(Protocol):
    """What a reader needs of a file: positions count from the source's own start, whatever it lies in."""

    @property
    def path(self) -> str:
        """What messages call it."""

    @property
    def nbytes(self) -> int:
        """How long it is."""

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start. Damaged where there are fewer: checked before memory is taken."""


class FileBytes:
    """Bytes [start, stop) of a file; stop None is the file's end. Use as a context, or close it.

    Reads with pread: no position is shared, so threads may read at once. Errors of the system become CkptErrors.
    Where path is a placeholder, the bytes are those of the file it stands for.
    """

    def __init__(
        self, path: str | os.PathLike[str], start: int = 0, stop: int | None = None, *, name: str = ""
    ) -> None:
        """Opens path. name is what messages call it (default: path).

        Raises Unrecognised where nothing can be opened, Damaged where [start, stop) is not inside the file.
        """
        self.path = name or os.fspath(path)
        self._start = start
        self._fd = -1
        self._far = places.at(path)
        if self._far is not None:
            self.nbytes = self._inside(start, self._far.nbytes if stop is None else stop, self._far.nbytes)
            return
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except (OSError, ValueError) as err:
            self.close()
            why = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
            raise Unrecognised(
                "the file cannot be opened", where=self.path, why=why, fix="check the path and its rights"
            ) from err
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise Unrecognised("this is no regular file", where=self.path, fix="give the file itself")
        self.nbytes = self._inside(start, status.st_size if stop is None else stop, status.st_size)

    def _inside(self, start: int, stop: int, size: int) -> int:
        if not 0 <= start <= stop <= size:
            self.close()
            raise Damaged(
                "a range of the file lies outside it",
                where=self.path,
                why=f"bytes {start} to {stop} are asked for, the file has {size}",
                fix="copy the file again",
                code="data-truncated",
            )
        return stop - start

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start (counted from this source's own start). Damaged where there are fewer."""
        if start < 0 or n < 0 or start + n > self.nbytes:
            raise Damaged(
                "the file ends too early",
                where=self.path,
                why=f"bytes {start} to {start + n} are asked for, there are {self.nbytes}",
                fix="copy the file again",
                code="data-truncated",
            )
        if self._far is not None:
            return self._far.read(self._start + start, n)
        try:
            data = os.pread(self._fd, min(n, _AT_ONCE), self._start + start)
            if len(data) == n:
                return data
            parts, got = [data], len(data)
            while data and got < n:
                data = os.pread(self._fd, min(n - got, _AT_ONCE), self._start + start + got)
                parts.append(data)
                got += len(data)
        except OSError as err:
            raise CkptError(
                "the file cannot be read", where=self.path, why=err.strerror or str(err), code="read-failed"
            ) from err
        if got < n:
            raise Damaged(
                "the file became shorter while it was read",
                where=self.path,
                why=f"{n} bytes from {start} are asked for, {got} came",
                fix="run again when nothing writes to it",
                code="data-truncated",
            )
        return b"".join(parts)

    def into(self, start: int, buffer: memoryview) -> None:
        """Fills buffer with the bytes from start on: for who reads much and keeps nothing. Damaged as read()."""
        if start < 0 or start + len(buffer) > self.nbytes:
            self.read(start, len(buffer))  # says what is wrong
        if self._far is not None:
            buffer[:] = self._far.read(self._start + start, len(buffer))
            return
        got = 0
        try:
            while got < len(buffer):
                n = os.preadv(self._fd, [buffer[got:]], self._start + start + got)
                if not n:
                    self.read(start, len(buffer))
                    break
                got += n
        except OSError as err:
            raise CkptError(
                "the file cannot be read", where=self.path, why=err.strerror or str(err), code="read-failed"
            ) from err

    @property
    def is_far(self) -> bool:
        """Whether each read is a request to somewhere else."""
        return self._far is not None

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Bytes [start, stop) that will be read soon: they come together where each read would be a request."""
        if self._far is not None:
            self._far.expect([(self._start + a, self._start + b) for a, b in ranges])

    def close(self) -> None:
        """Closes the file; twice does no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def read_whole(path: str | os.PathLike[str], limit: int = _SMALL) -> bytes:
    """All bytes of a small file, or its first limit bytes. Unrecognised where it cannot be opened."""
    with FileBytes(path) as source:
        return source.read(0, min(limit, source.nbytes))


class HeldBytes:
    """Bytes in memory as a source."""

    def __init__(self, data: bytes, path: str) -> None:
        self.data, self.path, self.nbytes = data, path, len(data)

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start. Damaged where there are fewer."""
        if start < 0 or n < 0 or start + n > self.nbytes:
            raise Damaged(
                "the data end too early",
                where=self.path,
                why=f"bytes {start} to {start + n} are asked for, there are {self.nbytes}",
                fix="copy the file again",
                code="data-truncated",
            )
        return self.data[start : start + n]
