"""The source's bytes by source number and offset, whether they lie in a file as they are or in compressed members.

Nothing is written to it. A compressed member is decoded once: into memory where it is small, the longest unused going
first; else into a scratch file of the job.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Damaged, NoSpace, Unsupported
from ckptctl.execute.files import OpenFiles, read_all, too_short
from ckptctl.execute.system import reading_failed, writing_failed
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckptctl.core.tensor import Source
    from ckptctl.remote.places import Elsewhere, Forward

_FEED = 1 << 20
"""Compressed bytes read at a time."""
_PIECE = 1 << 20
"""Decoded bytes made at a time."""
_BLIND_FEED = 1 << 10
"""Compressed bytes given at a time where the decoded size is unknown.

A block of 4 bytes can make 128 KiB, so these make 32 MiB at most.
"""
_WINDOW = 8 << 20
"""A decoder's own window is allowed to be at least this large. Source: RFC 8878, 3.1.1.1.2."""
_PLAIN, _ZSTD = "", "zstd"


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, stop) of a file, as they are."""

    path: str
    start: int
    stop: int


class Sources:
    """Reads from the sources of a job; threads may read at once. Use as a context.

    sizes: bytes of each file by path relative to root, as seen at the start. decoded_nbytes and member_nbytes are
    Sizes.decoded and .member. room tells how many bytes may still be written to the disk. read_nbytes counts what was
    read from the source.
    """

    def __init__(
        self,
        root: Path,
        sources: Sequence[Source],
        sizes: dict[str, int],
        scratch: Path,
        decoded_nbytes: int,
        member_nbytes: int,
        room: Callable[[], int],
    ) -> None:
        self._root, self._sources, self._sizes, self._scratch = root, sources, sizes, scratch
        self._decoded_nbytes, self._member_nbytes, self._room = decoded_nbytes, member_nbytes, room
        self.files = OpenFiles(os.O_RDONLY)
        self.go_on: Callable[[], None] = lambda: None
        """Called now and then while a member is decoded: it may raise."""
        self.read_nbytes = 0
        self._count = Lock()
        self._decoding = Lock()
        self._held: OrderedDict[int, bytes | bytearray] = OrderedDict()
        self._scratched: dict[int, Place] = {}
        self._streams = _Streams()
        self.is_far = bool(places.address_of(root))
        """Whether reads are requests, so that expect() saves some."""

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()
        self._streams.close()

    def _file(self, source: Source) -> Place:
        """Where a source's stored bytes lie."""
        path = os.path.join(self._root, source.path) if source.path else os.fspath(self._root)  # noqa: PTH118 - hot
        size = self._sizes[source.path]
        stop = size if source.stop is None else source.stop
        if not 0 <= source.start <= stop or stop > size:
            raise too_short(path, size, stop)
        return Place(path, source.start, stop)

    def plain(self, number: int) -> Place | None:
        """Where the bytes of a source lie as they are; None where it is a member that is (to be) decoded in memory."""
        source = self._sources[number]
        if source.codec == _PLAIN:
            return self._file(source)
        if source.codec != _ZSTD:
            raise Unsupported(f"bytes compressed by {source.codec!r} cannot be read", where=source.path)
        place = self._scratched.get(number)
        if place is None and source.decoded_nbytes > self._member_nbytes:
            self._member(number)
            place = self._scratched[number]
        return place

    def read(self, number: int, start: int, views: Sequence[memoryview], nbytes: int) -> None:
        """Fill the views, nbytes together, one after the other, from offset start of a source.

        Damaged where the source has fewer bytes or is not what its codec says, MissingFile where it is gone.
        """
        place = self.plain(number)
        if place is None:
            held = self._member(number)
            if held is not None:
                self._copy(number, held, start, views, nbytes)
                return
            place = self._scratched[number]
        if start < 0 or place.start + start + nbytes > place.stop:
            raise too_short(place.path, place.stop, place.start + start + nbytes)
        self._fill(place, views, start)
        if number not in self._scratched:
            self.counted(nbytes)

    def _fill(self, place: Place, views: Sequence[memoryview], start: int) -> None:
        """Fill the views with bytes of a place that is known to have them."""
        far = places.at(place.path)
        if far is not None:
            self._streams.fill(far, views, place.start + start, self.go_on)
            return
        try:
            with self.files.use(place.path) as fd:
                read_all(fd, views, place.start + start, place.path)
        except OSError as err:
            raise reading_failed(err, place.path) from err

    def expect(self, number: int, start: int, nbytes: int) -> None:
        """Nbytes of a source from offset start on will be read piece by piece, by the thread that says so."""
        place = self.plain(number)
        if place is not None and (far := places.at(place.path)) is not None:
            self._streams.at(far, place.start + start).expect(min(place.stop, place.start + start + nbytes))

    def counted(self, nbytes: int) -> None:
        """Add to read_nbytes."""
        with self._count:
            self.read_nbytes += nbytes

    def _copy(self, number: int, held: bytes | bytearray, start: int, views: Sequence[memoryview], nbytes: int) -> None:
        if start < 0 or start + nbytes > len(held):
            raise too_short(self._file(self._sources[number]).path, len(held), start + nbytes)
        data, at = memoryview(held), start
        for view in views:
            view[:] = data[at : at + len(view)]
            at += len(view)

    def _member(self, number: int) -> bytes | bytearray | None:
        """A decoded member; None where it went to its scratch file.

        One is decoded at a time, so that memory is for one decoder.
        """
        with self._decoding:
            held = self._held.get(number)
            if held is not None:
                self._held.move_to_end(number)
                return held
            if number in self._scratched:
                return None
            return self._decode(number)

    def _decode(self, number: int) -> bytearray | None:
        source = self._sources[number]
        place = self._file(source)
        known = source.decoded_nbytes
        self._make_room(self._member_nbytes if known < 0 else min(known, self._member_nbytes))
        held = bytearray()
        out, path, total = -1, self._scratch / str(number), 0
        try:
            for data in _zstd_pieces(self._feed(place), known, place.path, max(_WINDOW, self._member_nbytes // 2)):
                self.go_on()
                total += len(data)
                if 0 <= known < total:
                    raise _corrupt(place.path, f"it decodes to more than the {known} bytes that its metadata names")
                if out < 0 and total > self._member_nbytes:
                    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    _spill(out, held)
                    held = bytearray()
                if out < 0:
                    held += data
                else:
                    if known < 0 and self._room() < len(data):
                        raise NoSpace(
                            "a compressed member is larger than the free space",
                            where=place.path,
                            why=f"it made {total} bytes so far",
                        )
                    _spill(out, data)
        except OSError as err:
            raise writing_failed(err, path) from err
        finally:
            if out >= 0:
                os.close(out)
        if 0 <= known != total:
            raise _corrupt(place.path, f"it decodes to {total} bytes, its metadata names {known}")
        if out >= 0:
            self._scratched[number] = Place(os.fspath(path), 0, total)
            return None
        self._held[number] = held
        return held

    def _make_room(self, nbytes: int) -> None:
        """Let go of decoded members until one more of nbytes fits.

        Those in use by a thread stay with it until it has copied.
        """
        while self._held and sum(map(len, self._held.values())) + nbytes > self._decoded_nbytes:
            self._held.popitem(last=False)

    def _feed(self, place: Place) -> Iterator[bytes]:
        """The stored bytes, piece by piece."""
        at = place.start
        while at < place.stop:
            n = min(_FEED, place.stop - at)
            buffer = bytearray(n)
            self._fill(place, [memoryview(buffer)], at - place.start)
            self.counted(n)
            at += n
            yield bytes(buffer)


class _Streams:
    """Streams of files elsewhere: each thread goes on with its own where it reads on, a few files at once."""

    _A_THREAD = 4

    def __init__(self) -> None:
        self._lock = Lock()
        self._open: dict[int, OrderedDict[str, Forward]] = {}

    def fill(self, far: Elsewhere, views: Sequence[memoryview], start: int, check: Callable[[], None]) -> None:
        """Fill the views with a file's bytes from start on."""
        self.at(far, start).fill(views, check)

    def at(self, far: Elsewhere, start: int) -> Forward:
        """The stream of a file that the calling thread has, at the file's byte start."""
        with self._lock:
            mine = self._open.setdefault(get_ident(), OrderedDict())
        stream = mine.pop(far.name, None)
        if stream is None or not stream.skip(start):
            if stream is not None:
                stream.close()
            stream = far.stream(start)
        mine[far.name] = stream
        if len(mine) > self._A_THREAD:
            mine.popitem(last=False)[1].close()
        return stream

    def close(self) -> None:
        """Let go of all connections; no thread may read any more."""
        with self._lock:
            for some in self._open.values():
                for stream in some.values():
                    stream.close()
            self._open.clear()


def _spill(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _corrupt(path: str, why: str) -> Damaged:
    return Damaged(
        "compressed bytes cannot be decoded", where=path, why=why, fix="copy the file again", code="compressed-corrupt"
    )


class _Feed:
    """A file object over pieces, as far as zstandard wants one."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _: int = -1) -> bytes:
        return next(self._pieces, b"")


def _zstd_pieces(feed: Iterator[bytes], known: int, path: str, window_nbytes: int) -> Iterator[bytes]:
    """Decoded bytes of one or several frames, in small pieces.

    Damaged where the frames are broken or cut off (the latter only for known < 0).
    """
    import zstandard

    decoder = zstandard.ZstdDecompressor(max_window_size=1 << window_nbytes.bit_length() - 1)
    try:
        if known >= 0:
            raw: Any = _Feed(feed)  # all that it needs of a file is read()
            with decoder.stream_reader(raw, read_across_frames=True, closefd=False) as reader:
                while data := reader.read(_PIECE):
                    yield data
            return
        frame, fed = decoder.decompressobj(), False
        for piece in feed:
            rest = piece
            while rest:
                some, rest = rest[:_BLIND_FEED], rest[_BLIND_FEED:]
                while some:
                    fed = True
                    yield frame.decompress(some)
                    some = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame, fed = decoder.decompressobj(), False
        if fed:
            raise _corrupt(path, "the last frame is cut off")
    except zstandard.ZstdError as err:
        if "memory" in str(err):
            raise Unsupported(
                "compressed bytes need more memory than allowed", where=path, why=str(err), fix="raise --memory"
            ) from err
        raise _corrupt(path, str(err)) from err


def seen(root: Path, paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(bytes, mtime in ns) of files relative to root; 0 ns where a hash tells a file from others.

    MissingFile where one is gone, CkptError where one is no regular file.
    """
    out = {}
    for path in dict.fromkeys(paths):
        full = root / path if path else root
        try:
            status = full.stat()
        except OSError as err:
            raise reading_failed(err, full) from err
        if not stat.S_ISREG(status.st_mode):
            raise CkptError(
                "the source names something that is no regular file", where=os.fspath(full), code="read-failed"
            )
        out[path] = (status.st_size, 0 if places.identity_of(full) else status.st_mtime_ns)
    return out
