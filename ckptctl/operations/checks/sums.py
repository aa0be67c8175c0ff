"""Checksums: those that files carry, those that lie beside them, and those of another copy. Reads whole files."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from ckptctl.checksum import crc32
from ckptctl.core.errors import CkptError
from ckptctl.formats.bytesource import FileBytes
from ckptctl.operations.checks.files import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ckptctl.operations.checks.found import Archive, Found

_BLOCK = 4 << 20
_LIST_LIMIT = 1 << 24
_LISTS = ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt", "checksums.sha256")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DOWNLOADS = ".cache/huggingface/download"


def check_archives(found: Found) -> None:
    """CRC-32 of every record of every torch zip that has some."""
    for name, archive in found.archives.items():
        if name in found.unreadable:
            continue
        try:
            with FileBytes(found.root / name, name=name) as reader:
                _archive(found, name, archive, reader)
        except CkptError as err:
            found.error(err, name)


def _archive(found: Found, name: str, archive: Archive, reader: FileBytes) -> None:
    directory = archive.directory
    if not directory.has_checksums:
        found.note("no-checksums", "the archive has no checksums", file=name)
        return
    for record in directory.records.values():
        if record.method:
            continue
        crc = 0
        for at in range(0, record.nbytes, _BLOCK):
            crc = crc32(reader.read(record.start + at, min(_BLOCK, record.nbytes - at)), crc)
        if crc != record.crc:
            short = record.name.rpartition("/data/")[2]
            tensor = archive.tensors.get(short, "") if "/data/" in record.name else ""
            why = f"CRC-32 of {record.name} is {crc:08x}, the archive says {record.crc:08x}"
            found.note("checksum-mismatch", "bytes changed after they were written", file=name, tensor=tensor, why=why)


def check_sums(found: Found) -> None:
    """SHA-256 that a list beside the files gives, that the Hub's cache keeps files under, or that downloads noted."""
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
            lines = noted.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 1 and _SHA256.fullmatch(lines[1].strip()):
                wanted[name] = (lines[1].strip(), "what the Hub said when it was downloaded")
    for name, (digest, origin) in wanted.items():
        if not (found.root / name).is_file():
            found.note("missing-file", "the file is not there", file=name, why=f"{origin} lists it")
            continue
        has = _sha256(found, name)
        if has and has != digest:
            why = f"SHA-256 is {has}, {digest} by {origin}"
            found.note("checksum-mismatch", "the file is not the one that was published", file=name, why=why)


def _listed(path: Path, name: str) -> Iterator[tuple[str, str]]:
    folder = name.rpartition("/")[0]
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _LINE.fullmatch(line):
            file = match[2].removeprefix("./")
            if not file.startswith("/") and ".." not in file.split("/"):
                yield f"{folder}/{file}" if folder else file, match[1].lower()


def _sha256(found: Found, name: str) -> str:
    digest = hashlib.sha256()
    try:
        with FileBytes(found.root / name, name=name) as reader:
            for at in range(0, reader.nbytes, _BLOCK):
                digest.update(reader.read(at, min(_BLOCK, reader.nbytes - at)))
    except CkptError as err:
        found.error(err, name)
        return ""
    return digest.hexdigest()


def check_against(found: Found, other: Path) -> None:
    """Every file of another copy, byte for byte."""
    for name, theirs in files_below(other):
        if not theirs.is_file():
            continue
        mine = found.root / name
        if not mine.is_file():
            found.note("file-missing-beside", "the file is not there", file=name, why=f"{other} has it")
            continue
        try:
            _same(found, name, mine, theirs)
        except CkptError as err:
            found.error(err, name)


def _same(found: Found, name: str, mine: Path, theirs: Path) -> None:
    with FileBytes(mine, name=name) as a, FileBytes(theirs) as b:
        why = f"{a.nbytes:,} bytes, {b.nbytes:,} there" if a.nbytes != b.nbytes else ""
        for at in range(0, 0 if why else a.nbytes, _BLOCK):
            n = min(_BLOCK, a.nbytes - at)
            left, right = a.read(at, n), b.read(at, n)
            if left != right:
                first = next(i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
                why = f"byte {at + first:,} is the first that differs"
                break
    if why:
        found.note("checksum-mismatch", "the file is not the one it is compared with", file=name, why=why)
