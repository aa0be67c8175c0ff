"""The journal of a job: what it is, and which extents are written. JSON lines, appended one write call each.

--resume reads it again.

    {"schema": ..., "tool": ..., "plan": ..., "extent_nbytes": ..., "fingerprint": {...}, "boot": ...}
    [file, start, stop, [[segment, crc32, nbytes], ...], crc32 or null]    one an extent, after its bytes were written
    {"complete": inode}                                                    the result is whole; it is being renamed

An extent's segments are those whose checksum something needs, in file order; its own checksum counts bytes that come
late as 0.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import ckptctl
from ckptctl.core.errors import CkptError, SourceChanged
from ckptctl.core.output import Fill, Late, Put, Region
from ckptctl.execute.job import Job, Json, used_keys, used_sources
from ckptctl.execute.sources import seen
from ckptctl.execute.system import boot_id, reading_failed, writing_failed
from ckptctl.plan.steps import Extent
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptctl.plan.planner import Plan

SCHEMA = "ckptctl.journal/1"
_ENDS = 64 << 10
"""Bytes at either end of a source file that its fingerprint digests: headers and directories are there."""


class Done(NamedTuple):
    """What the journal knows of a written extent.

    The checksums of segments ((segment, CRC-32, bytes), ...), and of all its bytes or None.
    """

    segments: tuple[tuple[int, int, int], ...]
    crc: int | None


def plan_digest(plan: Plan) -> str:
    """A digest of all that decides which source bytes go where, but for the size of extents."""
    out = hashlib.blake2b(digest_size=16)
    for file in plan.files:
        out.update(repr((file.path, file.nbytes, len(file.segments))).encode())
        for segment in file.segments:
            match segment:
                case Put(data):
                    out.update(b"put")
                    out.update(hashlib.blake2b(data, digest_size=16).digest())
                case Fill(nbytes, value):
                    out.update(repr(("fill", nbytes, value)).encode())
                case Late(nbytes, needs):
                    out.update(repr(("late", nbytes, needs)).encode())
                case Region():
                    s = segment
                    out.update(repr((tuple(s.key), s.dtype.name, s.view, s.lo, s.size, s.parts, s.crc)).encode())
    for key in used_keys(plan):
        tensor = plan.index.tensors.get(key)
        if tensor is None:
            continue
        out.update(repr((tuple(key), tensor.dtype.name, tensor.held.name, tensor.shape)).encode())
        for table in tensor.pieces:
            out.update(repr((table.view, table.itemsize, table.strides is None)).encode())
            for column in (table.lo, table.size, table.source, table.start, table.strides):
                if column is not None:
                    out.update(column.tobytes())
    for number in used_sources(plan):
        out.update(repr(plan.index.sources[number]).encode())
    out.update(repr(sorted(map(str, plan.casts))).encode())
    return out.hexdigest()


def source_marks(job: Job) -> dict[str, dict[str, Json]]:
    """Size, times of change and digest of the ends of each source file that the job reads, by path.

    Two times, since whoever writes a file can put back the one of its data, and not that of its inode. A file elsewhere
    has its hash. MissingFile where one is gone.
    """
    paths = [job.sources[number].path for number in used_sources(job.plan)]
    out: dict[str, dict[str, Json]] = {}
    for path, (size, mtime) in seen(job.root, paths).items():
        full = job.root / path if path else job.root
        identity = places.identity_of(full)
        if identity:
            out[path] = {"nbytes": size, "mtime_ns": mtime, "hash": identity}
            continue
        try:
            with full.open("rb") as file:
                digest = hashlib.blake2b(file.read(_ENDS), digest_size=16)
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
                changed = os.fstat(file.fileno()).st_ctime_ns
        except OSError as err:
            raise reading_failed(err, full) from err
        out[path] = {"nbytes": size, "mtime_ns": mtime, "ctime_ns": changed, "ends": digest.hexdigest()}
    return out


def header_of(job: Job, marks: Mapping[str, Json]) -> dict[str, Json]:
    """The journal's first line. ValueError where the job's fingerprint is nothing that JSON can hold."""
    header = {
        "schema": SCHEMA,
        "tool": ckptctl.__version__,
        "plan": plan_digest(job.plan),
        "extent_nbytes": job.plan.extent_nbytes,
        "fingerprint": dict(job.fingerprint),
        "sources": dict(marks),
        "boot": boot_id(),
    }
    made: dict[str, Json] = json.loads(json.dumps(header))
    return made


@dataclass
class Past:
    """What a journal tells of the job before.

    That is its header ({} where there is none), the written extents, and the bytes that hold them.
    """

    header: dict[str, Json] = field(default_factory=dict)
    done: dict[Extent, Done] = field(default_factory=dict)
    complete: int | None = None
    nbytes: int = 0

    @property
    def same_boot(self) -> bool:
        """Whether the machine ran on since then: what was written is there even where it has not reached the disk."""
        return bool(boot_id()) and self.header.get("boot") == boot_id()


def read_journal(data: bytes) -> Past:
    """The journal's lines, up to the first that is torn or is none: a job that was killed may leave one."""
    past = Past()
    for line in data.splitlines(keepends=True):
        try:
            value = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            value = None
        if not _take(past, value):
            break
        past.nbytes += len(line)
    return past


def _take(past: Past, value: Json) -> bool:
    """Add one line to the past; False where it is no line of a journal."""
    if not past.header:
        if isinstance(value, dict) and value.get("schema"):
            past.header = value
        return bool(past.header)
    if isinstance(value, dict) and isinstance(value.get("complete"), int):
        past.complete = value["complete"]
        return True
    try:
        file, start, stop, segments, crc = value
        kept = tuple((int(a), int(b), int(c)) for a, b, c in segments)
        past.done[Extent(int(file), int(start), int(stop))] = Done(kept, None if crc is None else int(crc))
    except (TypeError, ValueError):
        return False
    return True


def require_same(old: Mapping[str, Json], new: Mapping[str, Json]) -> None:
    """SourceChanged, naming the first things that differ with both values, where a journal is of another job.

    The boot may differ.
    """
    names = {
        "tool": "the version of ckptctl",
        "plan": "the plan",
        "extent_nbytes": "the size of extents (--memory)",
        "schema": "the journal's schema",
    }
    wrong = []
    for at, a, b in _differences({**old, "boot": 0}, {**new, "boot": 0}, ()):
        what = names.get(at[0]) if len(at) == 1 else None
        wrong.append(f"{what or ' '.join(at)}: {_shown(a)} then, {_shown(b)} now")
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise SourceChanged(
            "the interrupted job is not the one that was asked for now",
            why="; ".join(wrong[:4]) + more,
            fix="run without --resume to start anew",
        )


_MISSING = object()


def _differences(a: Json, b: Json, at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Json, Json]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in (*a, *(k for k in b if k not in a)):
            yield from _differences(a.get(key, _MISSING), b.get(key, _MISSING), (*at, str(key)))
    elif a != b:
        yield at, a, b


def _shown(value: Json) -> str:
    text = "nothing" if value is _MISSING else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Journal:
    """Appends to an open journal; threads may at once. path is what messages name."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path
        self._lock = Lock()

    def add(self, extent: Extent, done: Done) -> None:
        """An extent whose bytes are written."""
        self.line([*extent, done.segments, done.crc])

    def line(self, value: Json) -> None:
        """One line. NoSpace or CkptError where it cannot be written; it is torn then, and will not be read."""
        data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                written = os.write(self._fd, data)
            except OSError as err:
                raise writing_failed(err, self._path) from err
            if written != len(data):
                raise CkptError(
                    "the journal cannot be written",
                    where=self._path,
                    why=f"{written} of {len(data)} bytes went in",
                    code="write-failed",
                )
