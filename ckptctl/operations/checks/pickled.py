"""Pickles wherever they lie in a file, and what they would run: whole files, members of archives, compressed ones."""

from __future__ import annotations

import bz2
import io
import lzma
import re
import tarfile
import zlib
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError
from ckptctl.formats.bytesource import HeldBytes
from ckptctl.formats.pickles import arrays
from ckptctl.formats.pickles.build import load, load_until_broken
from ckptctl.formats.pickles.danger import unknown, verdict
from ckptctl.formats.pickles.scan import HIGHEST_PROTOCOL
from ckptctl.formats.torchfile.read import CALLS
from ckptctl.formats.torchfile.rebuild import Storages
from ckptctl.formats.torchfile.sniff import is_tar
from ckptctl.formats.zipdir import read_zip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.core.values import Global
    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.pickles.danger import Finding
    from ckptctl.formats.torchfile.read import TorchFile
    from ckptctl.formats.zipdir import ZipDirectory, ZipRecord
    from ckptctl.operations.checks.found import Found

_MEMBER_LIMIT = 64 << 20
_MOST_MEMBERS = 1 << 16
_DEEPEST = 3
_PICKLED = (".pkl", ".pickle", ".joblib", ".dat", ".data", ".npy")
_ARCHIVES = (".zip", ".pt", ".pth", ".ckpt", ".bin", ".npz")
_ZIP = b"PK\x03\x04"
_COMPRESSED: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"\x78", zlib.decompressobj),
    (b"BZ", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", lzma.LZMADecompressor),
    (b"\x5d\x00", lzma.LZMADecompressor),
)
"""How joblib compresses, by first bytes. Source: joblib 1.5, joblib/compressor.py."""
_FAULTS = (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError)
_FOREIGN = {b"\x04\x22\x4d\x18": "lz4", b"\x28\xb5\x2f\xfd": "zstd"}
"""What else joblib or pandas may have compressed with, which Python does not read by itself."""
_PIECE = 1 << 12
"""Bytes decompressed at a time: whoever loads a damaged stream runs what stands before the fault."""
_PLAIN = re.compile(rb"[(\]}]*[ci][A-Za-z_][\w.]*\r?\n[A-Za-z_][\w.]*\r?\n")
"""How a pickle of protocol 0 or 1 begins that asks for a name at once."""
FRAMEWORKS = ("torch", "numpy", "builtins", "collections", "transformers", "deepspeed", "megatron")
"""Modules whose names are known: one that they do not have would fail wherever it is loaded."""
TORCH_TAR = frozenset({"storages", "tensors", "pickle"})
"""Members of a file of torch 0.1. Source: PyTorch 2.13, torch/serialization.py, _legacy_load."""


class _Part:
    """A range of a source as a source of its own."""

    def __init__(self, of: ByteSource, start: int, nbytes: int, path: str) -> None:
        self.of, self.start, self.nbytes, self.path = of, start, nbytes, path

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start. Damaged where there are fewer."""
        return self.of.read(self.start + start, n)


class _Stream(io.RawIOBase):
    """A source as a stream, for tarfile."""

    def __init__(self, of: ByteSource) -> None:
        self.of, self.at = of, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(offset + (0, self.at, self.of.nbytes)[whence], 0)
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        left = max(self.of.nbytes - self.at, 0)
        data = self.of.read(self.at, left if size < 0 else min(size, left))
        self.at += len(data)
        return data


def may_hide(head: bytes) -> bool:
    """Whether a file of any name begins as a pickle, or as what may hold some: a zip, a tar, or gzip's."""
    begins = head[:1] == b"\x80" and len(head) > 2 and 2 <= head[1] <= HIGHEST_PROTOCOL
    return begins or head.startswith((_ZIP, b"\x1f\x8b")) or is_tar(head) or _PLAIN.match(head) is not None


def unread(found: Found, name: str, source: ByteSource, main: ZipRecord | None = None, depth: int = 0) -> None:
    """Pickles of a file that is not read as torch's: whoever loads it runs what stands before a fault.

    Where they cannot be looked at, the file is among found.unseen. main is a zip's record that was looked at.
    """
    head = source.read(0, min(source.nbytes, 1024))
    if depth > _DEEPEST:
        found.unseen.setdefault(name, "archives lie in it one within another")
    elif head.startswith(_ZIP):
        try:
            directory = read_zip(source)
        except CkptError as err:
            found.unseen.setdefault(name, err.what)
            return
        members(found, name, source, directory, main, depth)
    elif is_tar(head):
        _tar(found, name, source, depth)
    elif head.startswith(tuple(_FOREIGN)):
        found.unseen.setdefault(name, f"it is compressed with {_FOREIGN[head[:4]]}")
    elif head.strip(b"\0"):
        data, is_whole = _unpacked(source)
        if not _holds_more(data):
            _broken(found, name, _behind_header(data), is_whole)
        elif is_whole:
            unread(found, name, HeldBytes(data, source.path), None, depth + 1)
        else:
            found.unseen.setdefault(name, "it is compressed, and large or damaged")


def _holds_more(data: bytes) -> bool:
    """Whether a file begins as an archive, or as what is compressed."""
    return data.startswith((_ZIP, *_FOREIGN, *(magic for magic, _ in _COMPRESSED))) or is_tar(data)


def _broken(found: Found, name: str, data: bytes, is_whole: bool) -> None:
    """Pickles from the start of data, up to a fault: by then whoever loads them ran them."""
    read = load_until_broken(data, name)
    _safe(found, name, read.unsafe, ())
    if not is_whole and read.to_end and data:
        found.unseen.setdefault(name, "its pickle goes on beyond what was read: it is large, or badly compressed")


def tar_names(source: ByteSource) -> frozenset[str]:
    """Names of a tar's members, as far as they can be read."""
    names = set()
    with suppress(tarfile.TarError, CkptError, OSError, ValueError, EOFError, RecursionError):
        for info in islice(tarfile.open(fileobj=_Stream(source), mode="r:"), _MOST_MEMBERS):  # noqa: SIM115
            names.add(info.name.removeprefix("./"))
    return frozenset(names)


def _tar(found: Found, name: str, source: ByteSource, depth: int) -> None:
    try:
        for count, info in enumerate(tarfile.open(fileobj=_Stream(source), mode="r:")):  # noqa: SIM115
            if count >= _MOST_MEMBERS:
                found.unseen.setdefault(name, "it has too many members")
                return
            if not info.isreg() or not info.size:
                continue
            part = _Part(source, info.offset_data, info.size, f"{source.path}, {info.name}")
            if info.name.endswith(_PICKLED) or may_hide(part.read(0, min(part.nbytes, 1024))):
                unread(found, name, part, None, depth + 1)
    except (tarfile.TarError, CkptError, OSError, ValueError, EOFError, RecursionError) as err:
        found.unseen.setdefault(name, f"its tar cannot be read: {err}")


def _unpacked(source: ByteSource) -> tuple[bytes, bool]:
    """A file's first bytes, decompressed as joblib does, and whether they are all."""
    data = source.read(0, min(source.nbytes, _MEMBER_LIMIT))
    is_whole = len(data) == source.nbytes
    for magic, opened in _COMPRESSED:
        if data.startswith(magic):
            made, is_all = _decompressed(data, opened)
            return made, is_whole and is_all
    return data, is_whole


def _decompressed(data: bytes, opened: Callable[[], Any]) -> tuple[bytes, bool]:
    """Streams one after the other, decompressed up to a fault or _MEMBER_LIMIT, and whether that is all there is.

    A stream of which nothing comes out is no stream: loaders stop before it.
    """
    out, at, stream, begun, left = bytearray(), 0, opened(), 0, b""
    try:
        while len(out) < _MEMBER_LIMIT:
            if stream.eof:
                left = stream.unused_data
                if not left and at >= len(data):
                    return bytes(out), True
                stream, begun = opened(), len(out)
            is_hungry = getattr(stream, "needs_input", True)
            if is_hungry and not left and at < len(data):
                left, at = data[at : at + _PIECE], at + _PIECE
            step = 1 if len(out) - begun < _PIECE else _PIECE  # a wrong checksum would hide all that came in its step
            made = stream.decompress(left if is_hungry else b"", step)
            left = getattr(stream, "unconsumed_tail", b"")
            out += made
            if not made and not left and not stream.eof and at >= len(data):
                return bytes(out), True  # the stream ends early, and with it what anybody can read
    except _FAULTS:
        return bytes(out), len(out) == begun
    return bytes(out), False


def _behind_header(data: bytes) -> bytes:
    """The pickle behind the header of a .npy file of objects, nothing of one of numbers; other data as they are.

    Source: NumPy 2.2, numpy/lib/format.py, the format's description.
    """
    if not data.startswith(b"\x93NUMPY") or len(data) < 12:
        return data
    start = 12 if data[6] > 1 else 10
    stop = start + int.from_bytes(data[8:start], "little")
    return data[stop:] if b"O" in data[start:stop] else b""


def members(
    found: Found, name: str, reader: ByteSource, directory: ZipDirectory, main: ZipRecord | None, depth: int = 0
) -> None:
    """Pickles of an archive besides its main one: torch does not look at them, and other loaders do."""
    for record in directory.records.values():
        if record is main or not _may_be_pickle(reader, record):
            continue
        if max(record.nbytes, record.compressed_nbytes) > _MEMBER_LIMIT or record.method not in (0, 8):
            why = f"{record.name} has {record.nbytes:,} bytes, zip method {record.method}"
            what = "a pickle in the archive was not looked at"
            found.note("unsupported", what, file=name, field=record.name, why=why, severity="warning")
            found.unseen.setdefault(name, why)
            continue
        data, is_whole = reader.read(record.start, record.compressed_nbytes), True
        where = f"{name}, {record.name}"
        if record.method:
            data, is_whole = _decompressed(data, lambda: zlib.decompressobj(-15))
        if _holds_more(data):
            unread(found, name, HeldBytes(data, where), None, depth + 1)
            continue
        data = _behind_header(data)
        try:
            loaded = load(data, where, persistent=Storages(where), rebuild=CALLS, finish=arrays.FINISH)
        except CkptError:  # perhaps no pickle, whatever its name
            _broken(found, name, data, is_whole)
        else:
            _safe(found, name, loaded.unsafe, unknown(loaded.globals))


def _may_be_pickle(reader: ByteSource, record: ZipRecord) -> bool:
    """Whether a member is a pickle or archive by its name, or by its first bytes where it is no storage of torch's."""
    if record.name.lower().endswith((*_PICKLED, *_ARCHIVES)):
        return True
    if record.method or record.nbytes < 2 or "/data/" in record.name:
        return False
    return may_hide(reader.read(record.start, min(record.nbytes, 1024)))


def safe_globals(found: Found, name: str, opened: TorchFile) -> None:
    """What the pickle names: what would run code, and what nobody knows."""
    _safe(found, name, opened.unsafe, opened.unknown)


def _safe(found: Found, name: str, unsafe: Sequence[Finding], odd_ones: Sequence[Finding]) -> None:
    for bad in unsafe:
        found.note("pickle-calls-code", f"the pickle asks for {bad.name}", file=name, field=str(bad.name), why=bad.why)
    for odd in odd_ones:
        grave = grave_global(odd.name)
        why = f"{odd.name.module.split('.')[0]} has no such name" if grave else odd.why
        found.note(
            "pickle-unknown-global",
            f"the pickle names {odd.name}",
            file=name,
            field=str(odd.name),
            why=why,
            severity="error" if grave else "warning",
        )


def grave_global(name: Global) -> bool:
    """Whether an unknown name is one that its framework would have to have, and is no class of somebody's own."""
    return verdict(name) == "unknown" and name.module.split(".")[0] in FRAMEWORKS
