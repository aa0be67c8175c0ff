"""Reading a safetensors header: every rule of the reference reader, and those that it does not check. No tensor data is read.

Source: safetensors 0.8.0, tensor.rs: read_metadata, Metadata::new, validate, and enum Dtype.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptctl.core.dtype import BY_SAFETENSORS, DType
from ckptctl.core.errors import CkptError, Damaged
from ckptctl.formats.bytesource import ByteSource
from ckptctl.formats.st.jsonscan import U64, Raw, Scan, short

HEADER_LIMIT = 100_000_000
"""Bytes. Source: tensor.rs, MAX_HEADER_SIZE."""
METADATA = "__metadata__"
_PROBLEM_LIMIT = 200
_SEVERITY = {
    "header-does-not-start-with-brace": "warning",
    "duplicate-metadata-key": "warning",
    "unknown-field": "warning",
    "data-not-aligned": "info",
}


@dataclass(frozen=True, slots=True)
class StEntry:
    """One tensor. shape counts elements (of 4 bits, too); start_byte counts from the file's start."""

    dtype: DType
    shape: tuple[int, ...]
    start_byte: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StHeader:
    """What a file holds: entries in the header's order, which need not be the data's. data_start is the first byte of data."""

    entries: dict[str, StEntry]
    metadata: dict[str, str]
    data_start: int
    warnings: tuple[CkptError, ...] = ()


@dataclass(slots=True)
class _Draft:
    """What could be read so far, with what is wrong."""

    entries: dict[str, StEntry] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0
    problems: list[CkptError] = field(default_factory=list)
    is_placed: bool = True
    """Whether every entry has one usable range, so that holes and overlaps can be told."""


def read_header(reader: ByteSource) -> StHeader:
    """The header of a safetensors file that fills reader.

    Raises Damaged, its code a kind of finding (header-too-large, gap, overlap, duplicate-name, ...), for the first problem that
    is an error; the others are in `warnings`.
    """
    draft = _examine(reader)
    for problem in draft.problems:
        if severity(problem) == "error":
            raise problem
    return StHeader(draft.entries, draft.metadata, draft.data_start, tuple(draft.problems))


def problems(reader: ByteSource) -> list[CkptError]:
    """All that is wrong with a file, the first 200 of it; see severity(). Empty for a good file."""
    return _examine(reader).problems


def severity(problem: CkptError) -> str:
    """error, warning or info: whether a problem of a header makes its file unusable."""
    return _SEVERITY.get(problem.code, "error")


def _examine(reader: ByteSource) -> _Draft:
    draft = _Draft()
    try:
        text = _text(reader)
        draft.data_start = 8 + len(text)
        _parse(Scan(text, reader.path), draft)
        del text
        if draft.is_placed:
            for problem in _tiling(reader, draft):
                _note(draft, problem)
        if draft.data_start % 8:
            _note(draft, _problem(reader.path, "data-not-aligned", "the data does not start at a multiple of 8", f"it starts at byte {draft.data_start}"))
    except CkptError as err:
        _note(draft, err)
    return draft


def _note(draft: _Draft, problem: CkptError) -> None:
    if len(draft.problems) < _PROBLEM_LIMIT:
        draft.problems.append(problem)


def _problem(where: str, code: str, what: str, why: str, fix: str = "write the file again, or copy it again from where it is whole") -> Damaged:
    return Damaged(what, where=where, why=why, fix=fix, code=code)


def _text(reader: ByteSource) -> bytes:
    """The header's bytes, which are UTF-8."""
    path, n = reader.path, reader.nbytes
    if n == 0:
        raise _problem(path, "empty-file", "the file is empty", "an interrupted download or a full disk leaves such files", "copy it again")
    head = reader.read(0, min(n, 512))
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        size = next((line[5:] for line in head.decode("ascii", "replace").splitlines() if line.startswith("size ")), "?")
        raise _problem(path, "lfs-pointer", "the file is a Git LFS pointer, not the tensors", f"it stands for {size} bytes, and has {n}", "run `git lfs pull`")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise _problem(path, "html-page", "the file is a web page, not tensors", f"it starts with {head[:40]!r}", "download it again, signed in where needed")
    if n < 8:
        raise _problem(path, "header-truncated", "the file has no room for the header's length", f"8 bytes are due, it has {n}", "copy it again")
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT:
        hint = "; it is a zip archive, as torch.save writes" if head.startswith(b"PK\3\4") else ""
        raise _problem(path, "header-too-large", f"the header would be longer than {HEADER_LIMIT:,} bytes", f"its length word says {length:,}{hint}")
    if 8 + length > n:
        raise _problem(path, "header-truncated", "the header goes past the end of the file", f"it stops at byte {8 + length:,}, the file has {n:,}")
    text = reader.read(8, length)
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, length, 1 << 20):
        try:
            decoder.decode(text[start : start + (1 << 20)], final=start + (1 << 20) >= length)
        except UnicodeDecodeError as err:
            raise _problem(path, "header-not-utf8", "the header is not UTF-8", f"{err.reason} near byte {8 + start + err.start:,}") from err
    return text


def _parse(scan: Scan, draft: _Draft) -> None:
    """Fills draft from the header's text. Damaged where it is no JSON object."""
    p = scan.space(0)
    if scan.byte(p) != b"{":
        stop = scan.space(scan.skip(p))
        if stop < len(scan.text):
            scan.fail(stop, "the end is wanted")
        raise _problem(scan.path, "header-not-an-object", "the header is no JSON object", f"it starts with {scan.shown(p, p + 20)!r}")
    if p:
        _note(
            draft,
            _problem(scan.path, "header-does-not-start-with-brace", "the header does not start with a brace", f"{p} bytes of white space stand before it"),
        )
    seen: set[str] = set()
    more, p = scan.opened(p)
    while more:
        name, p = scan.key(p)
        if name in seen:
            why = "JSON readers differ in which one they take"
            _note(draft, _problem(_at(scan.path, name), "duplicate-name", f"{short(name)} stands twice in the header", why))
            draft.is_placed = False
        if name == METADATA:
            p = _metadata(scan, p, draft)
        else:
            raw, p = scan.entry(p)
            if name not in seen:
                _entry(scan.path, name, raw, draft)
        seen.add(name)
        more, p = scan.next(p, b"}")
    p = scan.space(p)
    if p < len(scan.text):
        scan.fail(p, "the end (or spaces) behind the header's object is wanted")


def _metadata(scan: Scan, p: int, draft: _Draft) -> int:
    """Reads __metadata__ at p and returns the position behind it."""
    where = _at(scan.path, METADATA)
    if scan.byte(p) != b"{":
        stop = scan.skip(p)
        if scan.text[p:stop] != b"null":  # the reference reader takes null for absent
            _note(draft, _problem(where, "metadata-not-strings", "__metadata__ must be an object of texts", f"{scan.shown(p, stop)} is there"))
        return stop
    texts, others, twice, p = scan.texts(p)
    if others:
        shown = ", ".join(map(short, others[:5]))
        _note(draft, _problem(where, "metadata-not-strings", "values of __metadata__ are no texts", f"those of {shown}"))
    for key in twice[:5]:
        _note(draft, _problem(where, "duplicate-metadata-key", f"{short(key)} stands twice in __metadata__", "the last one is taken"))
    draft.metadata = texts
    return p


def _entry(path: str, name: str, raw: Raw, draft: _Draft) -> None:
    """Checks one entry by itself and adds it to draft."""
    where = _at(path, name)
    for code, reason in raw.why:
        _note(draft, _problem(where, code, f"the entry of tensor {short(name)} is wrong", reason))
    if raw.extra:
        shown = ", ".join(map(short, raw.extra))
        _note(draft, _problem(where, "unknown-field", f"the entry of tensor {short(name)} has fields that the format does not know", shown))
    dtype = BY_SAFETENSORS.get(raw.dtype) if raw.dtype is not None else None
    if raw.dtype is not None and dtype is None:
        why = f"known are {', '.join(BY_SAFETENSORS)}"
        _note(draft, _problem(where, "unknown-dtype", f"tensor {short(name)} has dtype {short(raw.dtype)}, which the format does not have", why))
    if raw.offsets is None or len(raw.offsets) != 2 or raw.offsets[1] < raw.offsets[0]:
        draft.is_placed = False
        if raw.offsets is not None:
            why = f"two numbers are wanted, the first not above the second; {list(raw.offsets[:8])} is there"
            _note(draft, _problem(where, "bad-offsets", f"the data_offsets of tensor {short(name)} are wrong", why))
        return
    begin, stop = raw.offsets
    draft.ranges[name] = (begin, stop)
    if dtype is None or raw.shape is None:
        return
    bits = dtype.bits
    for size in (1, *raw.shape):  # in this order, as the reference reader multiplies: (2**40, 2**40, 0) overflows
        bits *= size
        if bits // dtype.bits >= U64:
            break
    shown_shape = list(raw.shape[:8])
    if bits >= U64:
        why = f"shape {shown_shape} of {dtype.safetensors}"
        _note(draft, _problem(where, "size-overflow", f"the size of tensor {short(name)} overflows 64 bits", why))
    elif bits % 8:
        why = f"shape {shown_shape} of {dtype.safetensors} is {bits} bits"
        _note(draft, _problem(where, "not-whole-bytes", f"tensor {short(name)} is no whole number of bytes", why))
    elif bits // 8 != stop - begin:
        why = f"{bits // 8} bytes by shape {shown_shape} and dtype {dtype.safetensors}, {stop - begin} by its data_offsets"
        _note(draft, _problem(where, "size-mismatch", f"tensor {short(name)} has two sizes", why))
    else:
        draft.entries[name] = StEntry(dtype, raw.shape, draft.data_start + begin, stop - begin)


def _tiling(reader: ByteSource, draft: _Draft) -> Iterator[CkptError]:
    """Whether the tensors lie back to back from the data's start to the file's end."""
    path, data_nbytes = reader.path, reader.nbytes - draft.data_start
    last, before = 0, ""
    rows = sorted(draft.ranges.items(), key=lambda item: item[1])
    for name, (begin, stop) in rows:
        if begin > last:
            yield _problem(_at(path, name), "gap", f"bytes {last} to {begin} of the data belong to no tensor", f"they lie before tensor {short(name)}")
        elif begin < last:
            why = f"{short(before)} stops at byte {last} of the data, {short(name)} has bytes {begin} to {stop}"
            yield _problem(_at(path, name), "overlap", f"tensors {short(before)} and {short(name)} overlap", why)
        if stop >= last:
            last, before = stop, name
    if last > data_nbytes:
        cut = [name for name, (_, stop) in rows if stop > data_nbytes]
        why = (
            f"{data_nbytes:,} of {last:,} bytes of data are there; {len(rows) - len(cut)} of {len(rows)} tensors are whole, "
            f"the first that is not is {short(cut[0])}"
        )
        yield _problem(_at(path, cut[0]), "data-truncated", f"{last - data_nbytes:,} bytes are missing at the end", why, "copy the file again")
    elif last < data_nbytes:
        why = f"the tensors stop at byte {draft.data_start + last:,}, the file at {reader.nbytes:,}"
        yield _problem(path, "trailing-bytes", f"{data_nbytes - last:,} bytes stand after the last tensor", why)


def _at(path: str, name: str) -> str:
    return f"{path}, {name if len(name) <= 200 else name[:197] + '...'}"
