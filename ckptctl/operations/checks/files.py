"""Each file by itself: is it what its name says, whole, and safe. Reads headers and pickles, no tensor data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Unrecognised, Unsupported
from ckptctl.core.values import Storage, TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.hf import index
from ckptctl.formats.pickles.walk import path_text, walk
from ckptctl.formats.st import header
from ckptctl.formats.state import find
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchfile.sniff import refuse_other, sniff
from ckptctl.operations.checks.forked import each
from ckptctl.operations.checks.found import Found
from ckptctl.operations.checks.pickled import TORCH_TAR, may_hide, members, safe_globals, tar_names, unread
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptctl.core.errors import Severity

TORCH = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".th", ".tar")
_UNPICKLED = (".joblib", ".dat", ".data", ".npy", ".npz")
"""Names of files that other loaders unpickle: looked at for that alone."""
_ALWAYS_TORCH = (".pt", ".pth", ".ckpt")
_JSON_LIMIT = 4 << 20
_FAR_LIMIT = 1 << 20
_HEAD = 1024
_UNFINISHED = (".tmp", ".part", ".incomplete", ".crdownload")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules")


def files_below(path: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to path, file) of every file below, in order; folders that tools hide are left out."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            full = Path(folder) / name
            yield full.relative_to(path).as_posix(), full


def linked_folders(path: Path) -> list[str]:
    """Names of links to folders: nothing goes into them, or a circle would have no end."""
    return [
        (Path(folder) / f).relative_to(path).as_posix()
        for folder, folders, _ in os.walk(path)
        for f in sorted(folders)
        if not f.startswith(".") and (Path(folder) / f).is_symlink()
    ]


def check_files(found: Found, wanted: list[str] | None = None, jobs: int = 0) -> None:
    """Checks every file of the folder, or those wanted, each as far as its kind allows."""
    pairs = [(n, found.root / n) for n in wanted] if wanted is not None else list(files_below(found.root))
    apart = [(n, p) for n, p in pairs if p.name.lower().endswith(TORCH) and not p.is_symlink() and not places.at(p)]
    made = each(lambda i: _apart(found.root, *apart[i]), len(apart), jobs)
    told = {name: one for (name, _), one in zip(apart, made, strict=True)}
    for name in linked_folders(found.root) if wanted is None else ():
        if _link(found, name, found.root / name):
            found.unseen[name] = "it is a link to a folder"
    for name, path in pairs:
        found.files.append(name)
        if path.is_symlink() and not _link(found, name, path):
            continue
        if name in told:
            found.take(told[name])
        else:
            _checked(found, name, path)


def _apart(root: Path, name: str, path: Path) -> dict[str, Any]:
    """What is found in one file, by itself."""
    found = Found(root)
    _checked(found, name, path)
    return found.told()


def _checked(found: Found, name: str, path: Path) -> None:
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
            found.looked_at += 1
            _safetensors(found, name, reader)
            return
        head = reader.read(0, min(reader.nbytes, _HEAD))
        kind = sniff(head)
        if kind == "lfs" or (kind in ("empty", "html") and base.endswith((*TORCH, ".json"))):
            raise refuse_other(kind, name)
        low = base.lower()
        if base.endswith(index.INDEX_ENDINGS):
            found.looked_at += 1
            _index(found, name, path)
        elif base.endswith(".json"):
            _json(found, name, reader)
        elif low.endswith(".tar") and kind != "zip" and not _is_torch_tar(reader, kind):
            unread(found, name, reader)
        elif low.endswith(TORCH) or base == ".metadata":
            found.looked_at += 1
            _torch(found, name, reader, kind)
        elif low.endswith(_UNPICKLED) or (may_hide(head) and not low.endswith(".distcp")):
            found.looked_at += 1
            if places.at(path) is not None and kind != "zip" and reader.nbytes > _FAR_LIMIT:
                found.unseen[name] = "it would be read whole from the Hub"
            else:
                unread(found, name, reader)


def _is_torch_tar(reader: FileBytes, kind: str) -> bool:
    """Whether a file called a tar is one of torch's, of old or by its name alone; others are whatever a user keeps."""
    return kind == "pickle" or (kind == "tar" and tar_names(reader) >= TORCH_TAR)


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
        unread(found, name, reader)
        if isinstance(err, Unrecognised):
            base = name.rpartition("/")[2]
            if base.lower().endswith(_ALWAYS_TORCH) or base.startswith(("pytorch_model", "adapter_model")):
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
            unread(found, name, reader)
    safe_globals(found, name, opened)
    for at, why in opened.unsupported:
        found.note("unsupported", "a part of the file is not read", file=name, tensor=at, why=why, severity="info")
    names = _names(opened)
    if names:
        found.names[name] = names
        found.tensors += len(names)
    if opened.directory is not None:
        members(found, name, reader, opened.directory, opened.directory.record("data.pkl"))
        found.archives.append(name)


def _names(opened: TorchFile) -> tuple[str, ...]:
    """Names of the state dict in a file; paths of its tensors where there is none."""
    try:
        names = tuple(find(opened.root, lambda tree: isinstance(tree, TensorRef)).model)
    except CkptError:  # no state dict: what it is concerns its format's reader
        names = ()
    return names or (tuple(dict.fromkeys(tensors_in(opened).values())) if opened.storages else ())


def tensors_in(opened: TorchFile) -> dict[str, str]:
    """For each storage's key the path of the first tensor that is in it."""
    out: dict[str, str] = {}
    for path, node in walk(opened.root):
        if isinstance(node, (TensorRef, Storage)):
            key = node.storage.key if isinstance(node, TensorRef) else node.key
            if key not in out:
                out[key] = path_text(path)
    return out
