"""Reading a safetensors header: the reference reader's rules, and those it leaves out. No tensor data is read.

Source: safetensors 0.8.0, tensor.rs: read_metadata, Metadata::new, validate, and enum Dtype.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_SAFETENSORS, DType
from ckptctl.core.errors import CkptError, Damaged
from ckptctl.formats.jsonscan import U64, Scan, short
from ckptctl.formats.st.entry import USUAL, Raw, read_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.errors import Severity
    from ckptctl.formats.bytesource import ByteSource

HEADER_LIMIT = 100_000_000
"""Bytes. Source: tensor.rs, MAX_HEADER_SIZE."""
METADATA = "__metadata__"
_PROBLEM_LIMIT = 200
_KINDS = 4096
"""Types and shapes that are looked up rather than worked out again."""
_SEVERITY: dict[str, Severity] = {
    "header-does-not-start-with-brace": "warning",
    "duplicate-metadata-key": "warning",
    "unknown-field": "warning",
    "data-not-aligned": "info",
}
_AGAIN = "write the file again, or copy it again from where it is whole"


@dataclass(frozen=True, slots=True)
class StEntry:
    """One tensor. shape counts elements (of 4 bits, too); start_byte counts from the file's start."""

    dtype: DType
    shape: tuple[int, ...]
    start_byte: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StHeader:
    """What a file holds: entries in the header's order, not the data's, which starts at data_start."""

    entries: dict[str, StEntry]
    metadata: dict[str, str]
    data_start: int
    warnings: tuple[CkptError, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What could be read so far, with what is wrong."""

    path: str
    entries: dict[str, StEntry] = field(default_factory=dict)
    placed: list[str] = field(default_factory=list)
    """Names of entries with a usable range, whose first bytes and ends are in begins and stops."""
    begins: array[int] = field(default_factory=lambda: array("Q"))
    stops: array[int] = field(default_factory=lambda: array("Q"))
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0
    problems: list[CkptError] = field(default_factory=list)
    is_placed: bool = True
    """Whether every entry has one usable range, so that holes and overlaps can be told."""

    def note(self, code: str, what: str, why: str, at: str = "") -> None:
        """Adds a problem; at is the tensor or field."""
        if len(self.problems) < _PROBLEM_LIMIT:
            self.problems.append(_problem(self.path, code, what, why, at=at))

    def put(self, name: str, begin: int, stop: int) -> None:
        """The range of an entry's data."""
        self.placed.append(name)
        self.begins.append(begin)
        self.stops.append(stop)

    def ranges(self) -> list[tuple[str, tuple[int, int]]]:
        """(name, range) by ranges, rising."""
        pairs = zip(self.begins, self.stops, strict=True)
        return sorted(zip(self.placed, pairs, strict=True), key=lambda item: item[1])


def read_header(reader: ByteSource, problems: list[CkptError] | None = None) -> StHeader:
    """The header of a safetensors file that fills reader.

    With problems, all that is wrong (the first 200 of it; see severity()) is put there, and what could be read is
    given; otherwise what is an error is raised, and the rest is in `warnings`.

    Raises Damaged, its code a kind of finding (header-too-large, gap, overlap, duplicate-name, ...).
    """
    draft = _examine(reader)
    if problems is not None:
        problems.extend(draft.problems)
    else:
        for problem in draft.problems:
            if severity(problem) == "error":
                raise problem
    return StHeader(draft.entries, draft.metadata, draft.data_start, tuple(draft.problems))


def severity(problem: CkptError) -> Severity:
    """error, warning or info: whether a problem of a header makes its file unusable."""
    return _SEVERITY.get(problem.code, "error")


def _problem(path: str, code: str, what: str, why: str, fix: str = _AGAIN, *, at: str = "") -> Damaged:
    where = f"{path}, {at if len(at) <= 200 else at[:197] + '...'}" if at else path
    return Damaged(what, where=where, why=why, fix=fix, code=code)


def _examine(reader: ByteSource) -> _Draft:
    draft = _Draft(reader.path)
    try:
        text = _text(reader)
        draft.data_start = 8 + len(text)
        scan = Scan(text, reader.path, noun="the header", code="header-not-json", base=8)
        del text
        scan.check_utf8("header-not-utf8")
        _parse(scan, draft)
    except CkptError as err:
        draft.problems.append(err)
        return draft
    if draft.is_placed:
        draft.problems += _tiling(reader, draft)
    if draft.data_start % 8:
        why = f"it starts at byte {draft.data_start}"
        draft.note("data-not-aligned", "the data does not start at a multiple of 8", why)
    return draft


def _text(reader: ByteSource) -> bytes:
    """The header's bytes. Damaged where the file is something else, or too short for it."""
    path, n = reader.path, reader.nbytes
    if n == 0:
        why = "an interrupted download or a full disk leaves such files"
        raise _problem(path, "empty-file", "the file is empty", why, "copy it again")
    head = reader.read(0, min(n, 512))
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        size = next(
            (line[5:] for line in head.decode("ascii", "replace").splitlines() if line.startswith("size ")), "?"
        )
        why = f"it stands for {size} bytes, and has {n}"
        raise _problem(path, "lfs-pointer", "the file is a Git LFS pointer, not the tensors", why, "run `git lfs pull`")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        why, fix = f"it starts with {head[:40]!r}", "download it again, signed in where that is needed"
        raise _problem(path, "html-page", "the file is a web page, not tensors", why, fix)
    if n < 8:
        why = f"8 bytes are due, it has {n}"
        raise _problem(path, "header-truncated", "the file has no room for the header's length", why, "copy it again")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT:
        hint = "; it is a zip archive, as torch.save writes" if head.startswith(b"PK\3\4") else ""
        what = f"the header would be longer than {HEADER_LIMIT:,} bytes"
        raise _problem(path, "header-too-large", what, f"its length word says {length:,}{hint}")
    if 8 + length > n:
        why = f"it stops at byte {8 + length:,}, the file has {n:,}"
        raise _problem(path, "header-truncated", "the header goes past the end of the file", why)
    return reader.read(8, length)


def _parse(scan: Scan, draft: _Draft) -> None:
    """Fills draft from the header's text. Damaged where it is no JSON object."""
    p = scan.space(0)
    if scan.byte(p) != b"{":
        scan.stop(scan.skip(p))
        why = f"it starts with {scan.shown(p, p + 20)!r}"
        raise _problem(scan.path, "header-not-an-object", "the header is no JSON object", why)
    if p:
        why = f"{p} bytes of white space stand before it"
        draft.note("header-does-not-start-with-brace", "the header does not start with a brace", why)
    seen: set[str] = set()
    more, p = scan.opened(p)
    while more:
        p = _usual(scan, p, draft, seen)
        name, p = scan.key(p)
        raw: Raw | None
        raw, p = (None, _metadata(scan, p, draft)) if name == METADATA else read_entry(scan, p)
        if name in seen:
            why = "JSON readers differ in which one they take"
            draft.note("duplicate-name", f"{short(name)} stands twice in the header", why, name)
            draft.is_placed = False
        elif raw is not None:
            _check(name, raw, draft)
        seen.add(name)
        more, p = scan.next(p, b"}")
    scan.stop(p)


def _usual(scan: Scan, p: int, draft: _Draft, seen: set[str]) -> int:
    """Takes the members from p on that are as the reference writes them and nothing is wrong with: the fast way.

    The position of the first that is not so, or is the last.
    """
    text, match, entries, data_start = scan.text, USUAL.match, draft.entries, draft.data_start
    known: dict[tuple[bytes, bytes], tuple[DType, tuple[int, ...], int] | None] = {}
    while found := match(text, p):
        raw_name, dtype, shape, first, last = found.groups()
        name = raw_name.decode()
        kind = (dtype, shape)
        if kind not in known:
            if len(known) > _KINDS:
                known.clear()
            known[kind] = _kind(dtype, shape)
        has = known[kind]
        begin, stop = int(first), int(last)
        if has is None or stop - begin != has[2] or name in seen or name == METADATA:
            break
        seen.add(name)
        entries[name] = StEntry(has[0], has[1], data_start + begin, has[2])
        draft.put(name, begin, stop)
        p = found.end()
    return p


def _kind(dtype: bytes, shape: bytes) -> tuple[DType, tuple[int, ...], int] | None:
    """Type, shape and bytes of an entry, None where they make no tensor."""
    known = BY_SAFETENSORS.get(dtype.decode())
    if known is None:
        return None
    sizes = tuple(map(int, shape.split(b","))) if shape else ()
    bits = _bits(known, sizes)
    return (known, sizes, bits // 8) if bits % 8 == 0 and bits < U64 else None


def _bits(dtype: DType, shape: tuple[int, ...]) -> int:
    """Bits of a tensor; at least 2**64 where they overflow on the way, even with a 0 later in the shape.

    In this order, as the reference reader multiplies: (2**40, 2**40, 0) overflows.
    """
    bits = dtype.bits
    for size in shape:
        bits *= size
        if bits // dtype.bits >= U64:
            break
    return bits


def _metadata(scan: Scan, p: int, draft: _Draft) -> int:
    """Reads __metadata__ at p and returns the position behind it."""
    if scan.byte(p) != b"{":
        after = scan.skip(p)
        if scan.text[p:after] != b"null":  # the reference reader takes null for absent
            why = f"{scan.shown(p, after)} is there"
            draft.note("metadata-not-strings", "__metadata__ must be an object of texts", why, METADATA)
        return after
    texts, others, twice, p = scan.texts(p)
    if others:
        why = f"those of {', '.join(map(short, others[:5]))}"
        draft.note("metadata-not-strings", "values of __metadata__ are no texts", why, METADATA)
    for key in twice[:5]:
        what = f"{short(key)} stands twice in __metadata__"
        draft.note("duplicate-metadata-key", what, "the last one is taken", METADATA)
    draft.metadata = texts
    return p


def _check(name: str, raw: Raw, draft: _Draft) -> None:
    """Checks one entry by itself and adds it to draft."""
    for code, reason in raw.why:
        draft.note(code, f"the entry of tensor {short(name)} is wrong", reason, name)
    if raw.extra:
        what = f"the entry of tensor {short(name)} has fields that the format does not know"
        draft.note("unknown-field", what, ", ".join(map(short, raw.extra)), name)
    dtype = BY_SAFETENSORS.get(raw.dtype) if raw.dtype is not None else None
    if raw.dtype is not None and dtype is None:
        what = f"tensor {short(name)} has dtype {short(raw.dtype)}, which the format does not have"
        draft.note("unknown-dtype", what, f"known are {', '.join(BY_SAFETENSORS)}", name)
    if raw.offsets is None or len(raw.offsets) != 2 or raw.offsets[1] < raw.offsets[0]:
        draft.is_placed = False
        if raw.offsets is not None:
            why = f"two numbers are wanted, the first not above the second; {list(raw.offsets[:8])} is there"
            draft.note("bad-offsets", f"the data_offsets of tensor {short(name)} are wrong", why, name)
        return
    begin, stop = raw.offsets
    draft.put(name, begin, stop)
    if dtype is None or raw.shape is None:
        return
    bits = _bits(dtype, raw.shape)
    if bits // 8 == stop - begin and bits % 8 == 0 and bits < U64:
        draft.entries[name] = StEntry(dtype, raw.shape, draft.data_start + begin, stop - begin)
        return
    shown = f"shape {list(raw.shape[:8])} of {dtype.safetensors}"
    if bits >= U64:
        draft.note("size-overflow", f"the size of tensor {short(name)} overflows 64 bits", shown, name)
    elif bits % 8:
        what = f"tensor {short(name)} is no whole number of bytes"
        draft.note("not-whole-bytes", what, f"{shown} is {bits} bits", name)
    else:
        why = f"{bits // 8} bytes by {shown}, {stop - begin} by its data_offsets"
        draft.note("size-mismatch", f"tensor {short(name)} has two sizes", why, name)


def _tiling(reader: ByteSource, draft: _Draft) -> list[CkptError]:
    """Whether the tensors lie back to back from the data's start to the file's end; at most 200 problems."""
    found: list[CkptError] = []
    if not _is_tiled(draft):
        for problem in _holes(draft):
            if len(found) < _PROBLEM_LIMIT:
                found.append(problem)
    last = max(draft.stops, default=0)
    there = reader.nbytes - draft.data_start
    if last > there:
        rows = draft.ranges()
        cut = [name for name, (_, stop) in rows if stop > there]
        whole = f"{len(rows) - len(cut)} of {len(rows)} tensors are whole, the first that is not is {short(cut[0])}"
        why = f"{there:,} of {last:,} bytes of data are there; {whole}"
        what = f"{last - there:,} bytes are missing at the end"
        found.append(_problem(draft.path, "data-truncated", what, why, "copy the file again", at=cut[0]))
    elif last < there:
        why = f"the tensors stop at byte {draft.data_start + last:,}, the file at {reader.nbytes:,}"
        what = f"{there - last:,} bytes stand after the last tensor"
        found.append(_problem(draft.path, "trailing-bytes", what, why))
    return found


def _is_tiled(draft: _Draft) -> bool:
    """Whether ranges lie back to back from 0 on."""
    import numpy as np

    begins, stops = (np.frombuffer(c, np.uint64) for c in (draft.begins, draft.stops))
    if not len(begins):
        return True
    order = np.lexsort((stops, begins))
    return bool(begins[order[0]] == 0 and (begins[order[1:]] == stops[order[:-1]]).all())


def _holes(draft: _Draft) -> Iterator[CkptError]:
    last, before = 0, ""
    for name, (begin, stop) in draft.ranges():
        if begin > last:
            what, why = f"bytes {last} to {begin} of the data belong to no tensor", f"they lie before {short(name)}"
            yield _problem(draft.path, "gap", what, why, at=name)
        elif begin < last:
            what = f"tensors {short(before)} and {short(name)} overlap"
            why = f"the one stops at byte {last} of the data, the other has bytes {begin} to {stop}"
            yield _problem(draft.path, "overlap", what, why, at=name)
        if stop >= last:
            last, before = stop, name
