"""Each file by itself: is it what its name says, whole, and safe. Reads headers and pickles, no tensor data."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Unrecognised, Unsupported
from ckptctl.core.values import Global, Storage, TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.hf import index
from ckptctl.formats.pickles import arrays
from ckptctl.formats.pickles.build import load, load_until_broken
from ckptctl.formats.pickles.danger import unknown, verdict
from ckptctl.formats.pickles.walk import path_text, walk
from ckptctl.formats.st import header
from ckptctl.formats.state import find
from ckptctl.formats.torchfile.read import CALLS, TorchFile, open_torch
from ckptctl.formats.torchfile.rebuild import Storages
from ckptctl.formats.torchfile.sniff import refuse_other, sniff
from ckptctl.formats.zipdir import read_zip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptctl.core.errors import Severity
    from ckptctl.formats.pickles.danger import Finding
    from ckptctl.formats.zipdir import ZipDirectory, ZipRecord
    from ckptctl.operations.checks.found import Found

TORCH = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".th", ".tar")
_UNPICKLED = (".joblib", ".dat", ".data", ".npy", ".npz")
"""Names of files that other loaders unpickle: looked at for that alone."""
_ALWAYS_TORCH = (".pt", ".pth", ".ckpt")
_JSON_LIMIT = 4 << 20
_HEAD = 1024
_MEMBER_LIMIT = 64 << 20
_PICKLED = (".pkl", ".pickle", ".joblib", ".dat", ".data", ".npy")
_HIGHEST_PROTOCOL = 5
_COMPRESSED: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"\x78", zlib.decompressobj),
    (b"BZ", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", lzma.LZMADecompressor),
    (b"\x5d\x00", lzma.LZMADecompressor),
)
"""How joblib compresses, by first bytes. Source: joblib 1.5, joblib/compressor.py."""
_UNFINISHED = (".tmp", ".part", ".incomplete", ".crdownload")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")
FRAMEWORKS = ("torch", "numpy", "builtins", "collections", "transformers", "deepspeed", "megatron")
"""Modules whose names are known: one that they do not have would fail wherever it is loaded."""


def files_below(path: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to path, file) of every file below, in order; folders that tools hide are left out."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            full = Path(folder) / name
            yield full.relative_to(path).as_posix(), full


def check_files(found: Found, wanted: list[str] | None = None) -> None:
    """Checks every file of the folder, or those wanted, each as far as its kind allows."""
    pairs = [(n, found.root / n) for n in wanted] if wanted is not None else files_below(found.root)
    for name, path in pairs:
        found.files.append(name)
        if path.is_symlink() and not _link(found, name, path):
            continue
        try:
            _file(found, name, path)
        except CkptError as err:
            found.unreadable.add(name)
            found.error(err, name)
        except (MemoryError, RecursionError) as err:
            found.unreadable.add(name)
            found.note("out-of-memory", "the file asks for more memory than there is", file=name, why=str(err))


def _link(found: Found, name: str, path: Path) -> bool:
    """Whether a link can be followed. The Hub's cache keeps every file as a link to its blobs."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        found.note(
            "broken-link", "the link leads nowhere", file=name, why=f"it stands for {str(path.readlink())[:200]}"
        )
        found.unreadable.add(name)
        return False
    if not target.is_relative_to(found.root.resolve()) and target.parent.name != "blobs":
        found.note("link-escapes", "the link leads out of the checkpoint", file=name, why=f"it stands for {target}")
    return True


def _file(found: Found, name: str, path: Path) -> None:
    base = path.name
    if base.endswith(_UNFINISHED):
        found.note("temporary-file", "the file is not finished by its name", file=name)
        return
    if base.endswith(".py"):
        found.note("carries-code", "a Python file lies beside the weights", file=name)
        return
    if not path.is_file():
        return
    with FileBytes(path, name=name) as reader:
        if base.endswith(".safetensors"):
            _safetensors(found, name, reader)
            return
        head = reader.read(0, min(reader.nbytes, _HEAD))
        kind = sniff(head)
        if kind == "lfs" or (kind in ("empty", "html") and base.endswith((*TORCH, ".json"))):
            raise refuse_other(kind, name)
        if base.endswith(index.INDEX_ENDINGS):
            _index(found, name, path)
        elif base.endswith(".json"):
            _json(found, name, reader)
        elif base.endswith(TORCH) or base == ".metadata":
            _torch(found, name, reader, kind)
        elif base.endswith(_UNPICKLED):
            _unread(found, name, reader, kind)


def _is_usable(found: Found, name: str, problems: list[CkptError], severity: Callable[[CkptError], Severity]) -> bool:
    """Adds a file's problems; whether none of them is an error."""
    for problem in problems:
        found.error(problem, name, severity(problem))
    if any(severity(p) == "error" for p in problems):
        found.unreadable.add(name)
        return False
    return True


def _index(found: Found, name: str, path: Path) -> None:
    problems: list[CkptError] = []
    read = index.read_index(path, name, problems)
    if _is_usable(found, name, problems, index.severity):
        found.indexes[name] = read


def _safetensors(found: Found, name: str, reader: FileBytes) -> None:
    problems: list[CkptError] = []
    read = header.read_header(reader, problems)
    if not _is_usable(found, name, problems, header.severity):
        return
    found.headers[name] = read
    found.names[name] = tuple(read.entries)
    found.tensors += len(read.entries)
    if not read.entries:
        found.note("no-tensors", "the file holds no tensor", file=name)


def _json(found: Found, name: str, reader: FileBytes) -> None:
    if reader.nbytes > _JSON_LIMIT:
        return
    try:
        json.loads(reader.read(0, reader.nbytes).decode("utf-8-sig"))
    except (ValueError, RecursionError) as err:
        found.unreadable.add(name)
        why = str(err)[:200] or "it is nested too deep"
        found.note("config-not-json", "the file is no JSON", file=name, why=why)


def _torch(found: Found, name: str, reader: FileBytes, kind: str) -> None:
    """A torch file, or any pickle. Files whose names only may mean one (`.bin`) are let go where they are none."""
    problems: list[CkptError] = []
    try:
        opened = open_torch(reader, problems)
    except CkptError as err:
        _unread(found, name, reader, kind)
        if isinstance(err, Unrecognised):
            base = name.rpartition("/")[2]
            if base.endswith(_ALWAYS_TORCH) or base.startswith(("pytorch_model", "adapter_model")):
                found.unreadable.add(name)
                found.error(err, name)
        elif isinstance(err, Unsupported):
            found.error(err, name, "error" if err.code != "unsupported" else "warning")
        else:
            raise
        return
    for problem in problems:
        found.error(problem, name)
    if problems:
        found.unreadable.add(name)
        if kind == "pickle":
            _unread(found, name, reader, kind)
    safe_globals(found, name, opened)
    for at, why in opened.unsupported:
        found.note("unsupported", "a part of the file is not read", file=name, tensor=at, why=why, severity="info")
    names = _names(opened)
    if names:
        found.names[name] = names
        found.tensors += len(names)
    if opened.directory is not None:
        _members(found, name, reader, opened.directory, opened.directory.record("data.pkl"))
        found.archives.append(name)


def _unread(found: Found, name: str, reader: FileBytes, kind: str) -> None:
    """Pickles of a file that cannot be read whole: whoever loads it runs what stands before the fault."""
    if kind == "zip":
        try:
            directory = read_zip(reader)
        except CkptError:  # it is why the file cannot be read, and is told
            return
        _members(found, name, reader, directory, None)
    elif kind not in ("empty", "lfs", "html", "zeros", "tar"):
        _safe(found, name, load_until_broken(_unpacked(reader), name).unsafe, ())


def _unpacked(reader: FileBytes) -> bytes:
    """A file's first bytes as its loader unpickles them: decompressed as joblib does, from behind a NumPy header on."""
    data = reader.read(0, min(reader.nbytes, _MEMBER_LIMIT))
    for magic, opened in _COMPRESSED:
        if data.startswith(magic):
            try:
                data = opened().decompress(data, _MEMBER_LIMIT)
            except (OSError, ValueError, EOFError, zlib.error, lzma.LZMAError):  # nobody can read it
                return b""
            break
    return _behind_header(data)


def _behind_header(data: bytes) -> bytes:
    """The pickle behind the header of a .npy file of objects, nothing of one of numbers; other data as they are.

    Source: NumPy 2.2, numpy/lib/format.py, the format's description.
    """
    if not data.startswith(b"\x93NUMPY") or len(data) < 12:
        return data
    start = 12 if data[6] > 1 else 10
    stop = start + int.from_bytes(data[8:start], "little")
    return data[stop:] if b"O" in data[start:stop] else b""


def _members(found: Found, name: str, reader: FileBytes, directory: ZipDirectory, main: ZipRecord | None) -> None:
    """Pickles of an archive besides its main one: torch does not look at them, and other loaders do."""
    for record in directory.records.values():
        if record is main or not _may_be_pickle(reader, record):
            continue
        if max(record.nbytes, record.compressed_nbytes) > _MEMBER_LIMIT or record.method not in (0, 8):
            why = f"{record.name} has {record.nbytes:,} bytes, zip method {record.method}"
            what = "a pickle in the archive was not looked at"
            found.note("unsupported", what, file=name, field=record.name, why=why, severity="warning")
            continue
        data = reader.read(record.start, record.compressed_nbytes)
        where = f"{name}, {record.name}"
        try:
            data = data if record.method == 0 else zlib.decompressobj(-15).decompress(data, _MEMBER_LIMIT)
        except zlib.error:  # nobody can read it
            continue
        data = _behind_header(data)
        try:
            loaded = load(data, where, persistent=Storages(where), rebuild=CALLS, finish=arrays.FINISH)
        except CkptError:  # perhaps no pickle, whatever its name
            _safe(found, name, load_until_broken(data, where).unsafe, ())
        else:
            _safe(found, name, loaded.unsafe, unknown(loaded.globals))


def _may_be_pickle(reader: FileBytes, record: ZipRecord) -> bool:
    """Whether a member is a pickle by its name, or by its first bytes where it is no storage of torch's."""
    if record.name.endswith(_PICKLED):
        return True
    if record.method or record.nbytes < 2 or "/data/" in record.name:
        return False
    head = reader.read(record.start, 2)
    return head[0] == 0x80 and head[1] <= _HIGHEST_PROTOCOL


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


def _names(opened: TorchFile) -> tuple[str, ...]:
    """Names of the state dict in a file; paths of its tensors where there is none."""
    try:
        names = tuple(find(opened.root, lambda tree: isinstance(tree, TensorRef)).model)
    except CkptError:  # no state dict: what it is concerns its format's reader
        names = ()
    return names or tuple(dict.fromkeys(tensors_in(opened).values()))


def tensors_in(opened: TorchFile) -> dict[str, str]:
    """For each storage's key the path of the first tensor that is in it."""
    out: dict[str, str] = {}
    for path, node in walk(opened.root):
        if isinstance(node, (TensorRef, Storage)):
            key = node.storage.key if isinstance(node, TensorRef) else node.key
            if key not in out:
                out[key] = path_text(path)
    return out
