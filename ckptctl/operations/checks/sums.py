"""Checksums: those that files carry, those that lie beside them, and those of another copy. Reads whole files."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ckptctl.checksum import combine, crc32
from ckptctl.core.errors import CkptError, Damaged, Usage
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.dcp.metadata import NAME, ByteItem, read_index
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.zipdir import read_zip
from ckptctl.operations.checks.files import files_below, tensors_in
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.formats.zipdir import ZipDirectory, ZipRecord
    from ckptctl.operations.checks.found import Found

_BLOCK = 4 << 20
_BUFFER = 1 << 18
"""Bytes at a time of a thread: they stay in a core's cache."""
_PART = 32 << 20
"""Bytes of a record that one thread takes."""
_LIST_LIMIT = 1 << 24
_LISTS = ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt", "checksums.sha256")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_DIGITS = 64
_MADE_BY_THE_HUB = ".gitattributes"
"""What every repository has, whatever was put into it."""
_DOWNLOADS = ".cache/huggingface/download"


def check_archives(found: Found, jobs: int = 0) -> None:
    """CRC-32 of every record of every torch zip that has some."""
    names = [n for n in found.archives if n not in found.unreadable]
    with ThreadPoolExecutor(max(1, jobs or 2)) as pool:
        for name in names:
            try:
                with FileBytes(found.root / name, name=name) as reader:
                    _archive(found, name, reader, pool)
            except CkptError as err:
                found.error(err, name)


def require_checksums(source: Checkpoint, jobs: int = 0) -> tuple[int, int]:
    """Damaged where bytes of a source's torch zip are not those that its checksums are of. Reads every file whole.

    The items of a `.distcp` file are such zips one after the other. How many files have checksums, and how many have
    none.
    """
    root = Path(source.root)
    files = [root / s.path if s.path else root for s in source.sources]
    items = _items(root)
    checked, without = 0, 0
    with ThreadPoolExecutor(max(1, jobs or 2)) as pool:
        for file in dict.fromkeys(files):
            spans = items.get(file.name, [("", 0, None)])
            have = [_has_right_sums(file, *span, pool) for span in spans]
            checked, without = (checked + 1, without) if have and all(have) else (checked, without + 1)
    return checked, without


def _items(root: Path) -> dict[str, list[tuple[str, int, int | None]]]:
    """Each item of the files that a DCP's index names: its own name, its first byte and the one after its last."""
    out: dict[str, list[tuple[str, int, int | None]]] = {}
    if not (root / NAME).is_file():
        return out
    with FileBytes(root / NAME, name=NAME) as reader:
        index = read_index(reader)
    for name, item in index.items.items():
        if isinstance(item, ByteItem):
            rows = [(item.file, item.offset, item.length)]
        else:
            rows = list(zip(item.file.tolist(), item.offset.tolist(), item.length.tolist(), strict=True))
        for number, offset, length in rows:
            out.setdefault(index.files[number], []).append((name, offset, offset + length))
    return {file: sorted(spans, key=lambda s: s[1]) for file, spans in out.items()}


def _has_right_sums(file: Path, name: str, start: int, stop: int | None, pool: ThreadPoolExecutor) -> bool:
    """Whether a zip in a file has checksums. Damaged where one is not that of its bytes."""
    with FileBytes(file, start, stop, name=str(file)) as reader:
        try:
            directory = read_zip(reader)
        except CkptError:  # no zip, and so without checksums
            return False
        if not directory.has_checksums:
            return False
        for record, why in _unlike(reader, directory, pool):
            raise Damaged(
                f"bytes of {name or record.name} changed after they were written",
                where=str(file),
                why=why,
                fix="copy the file again from where it is whole; `ckptctl validate --level values` names the "
                "tensors of a torch file",
                code="checksum-mismatch",
            )
    return True


def _unlike(reader: FileBytes, directory: ZipDirectory, pool: ThreadPoolExecutor) -> list[tuple[ZipRecord, str]]:
    """Records of a zip whose bytes are not those that its checksums are of, and why."""
    records = [r for r in directory.records.values() if not r.method]
    parts = [(r, at, min(_PART, r.nbytes - at)) for r in records for at in range(0, max(r.nbytes, 1), _PART)]
    sums: dict[str, int] = {}
    for (record, at, n), crc in zip(
        parts, pool.map(lambda p: _crc(reader, p[0].start + p[1], p[2]), parts), strict=True
    ):
        sums[record.name] = combine(sums[record.name], crc, n) if at else crc
    return [
        (r, f"CRC-32 of {r.name} is {sums[r.name]:08x}, the archive says {r.crc:08x}")
        for r in records
        if sums[r.name] != r.crc
    ]


def _archive(found: Found, name: str, reader: FileBytes, pool: ThreadPoolExecutor) -> None:
    directory = read_zip(reader)
    if not directory.has_checksums:
        found.note("no-checksums", "the archive has no checksums", file=name)
        return
    unlike = _unlike(reader, directory, pool)
    if not unlike:
        return
    tensors = tensors_in(open_torch(reader, []))
    for record, why in unlike:
        key = record.name.rpartition("/data/")[2] if "/data/" in record.name else ""
        tensor = tensors.get(key, "")
        found.note("checksum-mismatch", "bytes changed after they were written", file=name, tensor=tensor, why=why)


def _crc(reader: FileBytes, start: int, nbytes: int) -> int:
    """CRC-32 of bytes of a file, a buffer of them at a time."""
    buffer = memoryview(bytearray(min(_BUFFER, nbytes)))
    crc = 0
    for at in range(0, nbytes, _BUFFER):
        part = buffer[: min(_BUFFER, nbytes - at)]
        reader.into(start + at, part)
        crc = crc32(part, crc)
    return crc


def check_items(found: Found) -> int:
    """CRC-32 of the items of DCP files, by the index beside them: how many have one.

    Damage of the items themselves is others' to tell.
    """
    have = 0
    with ThreadPoolExecutor(2) as pool:
        for name in found.files:
            folder = (found.root / name).parent
            if PurePosixPath(name).name != NAME or name in found.unreadable:
                continue
            try:
                items = _items(folder)
            except CkptError:
                continue
            for file, spans in items.items():
                for span in spans if (folder / file).is_file() else []:
                    try:
                        have += _has_right_sums(folder / file, *span, pool)
                    except CkptError as err:
                        have += 1
                        where = str(PurePosixPath(name).parent / file)
                        found.note("checksum-mismatch", err.what, file=where, tensor=span[0], why=err.why)
    return have


def check_checksums(found: Found) -> None:
    """What is beside the files and what DCP items carry. A word where there is neither: nothing was compared then."""
    listed, carried = check_sums(found), check_items(found)
    has_list = any((found.root / n).is_symlink() or (found.root / n).exists() for n in _LISTS)  # what is wrong is said
    if not listed and not carried and not has_list:
        told = "nothing here has a checksum that is known: --checksums compared nothing"
        why = "no list of SHA-256 sums is beside the files, no note of the Hub's, and no DCP item has a CRC-32"
        found.note("reader-note", told, why=why, severity="info")


def check_sums(found: Found) -> int:
    """SHA-256 that a list beside the files gives, that the Hub's cache keeps files under, or that downloads noted.

    How many files have one.
    """
    wanted: dict[str, tuple[str, str]] = {}
    for name in found.files:
        path = found.root / name
        if path.is_symlink():
            blob = path.resolve()
            if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
                wanted[name] = (blob.name, "the name of the blob in the Hub's cache")
        if path.name in _LISTS and name not in found.unreadable:
            if path.stat().st_size > _LIST_LIMIT:
                why = f"it has {path.stat().st_size:,} bytes, more than {_LIST_LIMIT:,}"
                found.note("reader-note", "the list of checksums was not read", file=name, why=why, severity="warning")
            else:
                wanted |= {n: (digest, name) for n, digest in _listed(path, name)}
        noted = found.root / _DOWNLOADS / f"{name}.metadata"
        if noted.is_file():
            lines = read_whole(noted).decode("utf-8", "replace").splitlines()
            if len(lines) > 1 and _SHA256.fullmatch(lines[1].strip()):
                wanted[name] = (lines[1].strip(), "what the Hub said when it was downloaded")
    for name, (digest, origin) in wanted.items():
        _check_sum(found, name, digest, origin)
    return len(wanted)


def _check_sum(found: Found, name: str, digest: str, origin: str) -> None:
    """Whether a file is there and has that SHA-256, or that git's SHA-1 (40 digits) of it."""
    if not (found.root / name).is_file():
        found.note("missing-file", "the file is not there", file=name, why=f"{origin} lists it")
        return
    try:
        with FileBytes(found.root / name, name=name) as reader:
            has = _hash_like(digest, reader)
    except CkptError as err:
        found.error(err, name)
        return
    if has != digest:
        called = "SHA-256" if len(digest) == _SHA256_DIGITS else "git's SHA-1"
        why = f"{called} is {has}, {digest} by {origin}"
        found.note("checksum-mismatch", "the file is not the one that was published", file=name, why=why)


def published(path: Path) -> dict[str, str]:
    """Name -> checksum by a list of SHA256SUMS' form, or by what the Hub says of a repository, saved as JSON.

    The Hub gives the SHA-256 of files in LFS, and git's SHA-1 of the others. Usage where the file is neither.
    Source: huggingface.co, API of repositories: /api/models/NAME/tree/REVISION, /api/models/NAME?blobs=true.
    """
    fix = "give a folder, a list of lines `SHA256  NAME`, or the Hub's answer to /api/models/NAME/tree/main?recursive=1"
    try:
        if path.stat().st_size > _LIST_LIMIT:
            raise ValueError(f"it has more than {_LIST_LIMIT:,} bytes")
        text = path.read_text(encoding="utf-8")
        found = _of_hub(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else dict(_listed(path, path.name))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        why = f"{type(err).__name__}: {err}"[:200]
        raise Usage(f"--against {path}: no checksums can be read from it", why=why, fix=fix) from err
    if not found:
        raise Usage(f"--against {path}: it lists no checksum", fix=fix)
    return found


def _of_hub(answer: Any) -> dict[str, str]:
    """Name -> checksum of the Hub's answer."""
    out: dict[str, str] = {}
    for row in answer["siblings"] if isinstance(answer, dict) else answer:
        name, lfs = row.get("path") or row["rfilename"], row.get("lfs") or {}
        digest = lfs.get("sha256") or str(lfs.get("oid", "")).removeprefix("sha256:")
        digest = digest or row.get("blobId") or (row.get("oid") if row.get("type") == "file" else "")
        if digest and not name.startswith("/") and ".." not in name.split("/"):
            out[name] = digest
    return out


def _listed(path: Path, name: str) -> Iterator[tuple[str, str]]:
    folder = name.rpartition("/")[0]
    for line in read_whole(path).decode("utf-8", "replace").splitlines():
        if match := _LINE.fullmatch(line):
            file = match[2].removeprefix("./")
            if not file.startswith("/") and ".." not in file.split("/"):
                yield f"{folder}/{file}" if folder else file, match[1].lower()


def check_against(found: Found, other: Path) -> None:
    """Every file of another copy, byte for byte; by its hash where the copy is on the Hub, or other lists hashes."""
    if other.is_file():
        for name, digest in published(other).items():
            _check_sum(found, name, digest, str(other))
        return
    shown = places.shown(str(other))
    for name, theirs in files_below(other):
        if not theirs.is_file():
            continue
        mine = found.root / name
        if not mine.is_file():
            if name != _MADE_BY_THE_HUB or shown == str(other):
                found.note("file-missing-beside", "the file is not there", file=name, why=f"{shown} has it")
            continue
        try:
            _same(found, name, mine, theirs)
        except CkptError as err:
            found.error(err, name)


def _same(found: Found, name: str, mine: Path, theirs: Path) -> None:
    with FileBytes(mine, name=name) as a, FileBytes(theirs, name=places.shown(str(theirs))) as b:
        if a.nbytes != b.nbytes:
            why = f"{a.nbytes:,} bytes, {b.nbytes:,} there"
        else:
            here, there = _listed_hash(mine), _listed_hash(theirs)
            why = _unlike_hashes(a, b, here, there) if here or there else _unlike_bytes(a, b)
    if why:
        found.note("checksum-mismatch", "the file is not the one it is compared with", file=name, why=why)


def _unlike_bytes(a: FileBytes, b: FileBytes) -> str:
    """How two files of one size differ, "" where they do not."""
    for at in range(0, a.nbytes, _BLOCK):
        n = min(_BLOCK, a.nbytes - at)
        left, right = a.read(at, n), b.read(at, n)
        if left != right:
            first = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
            return f"byte {at + first:,} is the first that differs"
    return ""


def _listed_hash(path: Path) -> str:
    """The hash that the Hub lists for a file there, "" for a file of this machine."""
    return places.identity_of(path)


def _unlike_hashes(a: FileBytes, b: FileBytes, here: str, there: str) -> str:
    """How two files differ by hashes, of which the Hub lists one or both; the other is computed."""
    if len(here) != len(there):
        if len(there) == _SHA256_DIGITS or not here:  # large files' hash, and the other file is small, or is here
            here = _hash_like(there, a)
        else:
            there = _hash_like(here, b)
    return f"its hash is {here}, {there} there" if here != there else ""


def _hash_like(listed: str, reader: FileBytes) -> str:
    """The hash of a file of the kind that is listed: SHA-256 of a large file, git's name for the content of others.

    Source: git, Documentation/gitformat-pack, and hash-object: SHA-1 over "blob ", the size and a NUL, then the bytes.
    """
    if len(listed) == _SHA256_DIGITS:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % reader.nbytes, usedforsecurity=False)
    for at in range(0, reader.nbytes, _BLOCK):
        digest.update(reader.read(at, min(_BLOCK, reader.nbytes - at)))
    return digest.hexdigest()
