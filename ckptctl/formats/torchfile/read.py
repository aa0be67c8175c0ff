"""Opens a file of torch.save: its value tree, and where each storage's bytes lie. Reads no tensor data.

Source: torch 2.13, torch/serialization.py, load, _load; torch/csrc/jit/serialization/export.cpp for TorchScript.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckptctl.core.errors import CkptError, Damaged, Unrecognised, Unsafe, Unsupported
from ckptctl.formats.pickles import arrays
from ckptctl.formats.pickles.build import Loaded, load
from ckptctl.formats.pickles.danger import Finding, unknown
from ckptctl.formats.torchfile.check import check_tree
from ckptctl.formats.torchfile.legacy import MAGIC, Front, read_legacy
from ckptctl.formats.torchfile.rebuild import REBUILD, SLICES, Storages
from ckptctl.formats.torchfile.sniff import refuse_other, sniff
from ckptctl.formats.zipdir import ZipDirectory, ZipRecord, read_zip

if TYPE_CHECKING:
    from collections import Counter

    from ckptctl.core.values import Global, Storage, Tree
    from ckptctl.formats.bytesource import ByteSource

Variant = Literal["zip", "legacy", "torchscript", "pickle"]

PICKLE_LIMIT = 1 << 30
"""The largest pickle that is read into memory, in bytes."""
CALLS = {**REBUILD, **arrays.REBUILD}


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of torch.save. root is its tree, with TensorRef and Storage leaves; storages are those it names, by key.

    start_byte of a storage counts from the start of the reader that the file was opened with. pickle_nbytes are those
    of all pickles. unsupported are tensors that cannot be moved: (path in the tree, why). directory is that of a zip.
    """

    path: str
    variant: Variant
    root: Tree
    storages: dict[str, Storage]
    globals: Counter[Global]
    pickle_nbytes: int
    byteorder: Literal["little"] = "little"
    unsafe: list[Finding] = field(default_factory=list)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    directory: ZipDirectory | None = None

    @property
    def unknown(self) -> list[Finding]:
        """Names that no checkpoint is known to hold: read as inert records."""
        return unknown(self.globals)

    @property
    def cut(self) -> str:
        """The class whose slices the file holds, DTensor or ShardedTensor; "" where its tensors are whole."""
        return next((g.name for g in self.globals if g.name in SLICES and g.module.startswith("torch.distributed")), "")

    def require_safe(self) -> None:
        """Raises Unsafe, naming the first global that would run code, where there is one."""
        if self.unsafe:
            name, why = self.unsafe[0]
            others = f" (and {len(self.unsafe) - 1} more)" if len(self.unsafe) > 1 else ""
            raise Unsafe(
                f"the pickle asks for {name}{others}",
                where=self.path,
                why=why,
                fix="do not load this file anywhere; get the weights from a source you trust",
                code="pickle-calls-code",
            )


def open_torch(reader: ByteSource, problems: list[CkptError] | None = None) -> TorchFile:
    """Reads the file's pickles and finds its storages. Never fails for what a pickle names: see TorchFile.unsafe.

    With problems, what is wrong with tensors and storages (missing, of the wrong size, views outside) is put there
    and the rest is given; otherwise the first of it is raised.

    Raises Unrecognised for what is no torch file (saying what it is), Damaged where bytes contradict the pickle,
    Unsupported for big-endian files, deflated records, tar files.
    """
    head = reader.read(0, min(reader.nbytes, 1024))
    kind = sniff(head)
    if kind == "zip":
        opened, found = _open_zip(reader)
    elif kind == "pickle" and MAGIC in head[:64]:
        opened, found = _open_legacy(reader)
    elif kind == "pickle":
        opened, found = _open_pickle(reader)
    else:
        raise refuse_other(kind, reader.path)
    found.extend(check_tree(opened.root, reader.path, opened.unsupported))
    if problems is None and found:
        raise found[0]
    if problems is not None:
        problems.extend(found)
    return opened


def _open_zip(reader: ByteSource) -> tuple[TorchFile, list[CkptError]]:
    directory = read_zip(reader)
    record = directory.record("data.pkl")
    if record is None:
        raise Unrecognised(
            "this zip is no torch file",
            where=reader.path,
            why="it has no data.pkl",
            fix="give a file that torch.save wrote",
        )
    _require_little(reader, directory)
    data = _read_record(reader, record)
    storages = Storages(reader.path)
    loaded = load(data, f"{reader.path}, {record.name}", persistent=storages, rebuild=CALLS, finish=arrays.FINISH)
    problems = _trailing(reader.path, loaded.stop, len(data))
    for key, storage in storages.by_key.items():
        place = directory.record(f"data/{key}")
        if place is not None:
            _require_stored(reader, place)
            storage.start_byte, storage.nbytes = place.start, place.nbytes
    variant: Variant = "torchscript" if directory.record("constants.pkl") else "zip"
    return _torch_file(reader.path, variant, loaded, storages, len(data), directory), problems


def _open_legacy(reader: ByteSource) -> tuple[TorchFile, list[CkptError]]:
    front = Front(reader, PICKLE_LIMIT)
    storages = Storages(reader.path)
    loaded, stop, problems = read_legacy(front, storages, CALLS, arrays.FINISH)
    return _torch_file(reader.path, "legacy", loaded, storages, stop, None), problems


def _open_pickle(reader: ByteSource) -> tuple[TorchFile, list[CkptError]]:
    front = Front(reader, PICKLE_LIMIT)
    try:
        found = front.scan(0)
    except CkptError as err:
        if front.data[:1] == b"\x80":
            raise
        raise refuse_other("unknown", reader.path) from err  # text, most likely: protocol 0 has no mark of its own
    storages = Storages(reader.path)
    loaded = load(front.data, reader.path, persistent=storages, rebuild=CALLS, finish=arrays.FINISH, scanned=found)
    problems = _trailing(reader.path, loaded.stop, reader.nbytes)
    return _torch_file(reader.path, "pickle", loaded, storages, loaded.stop, None), problems


def _torch_file(
    path: str, variant: Variant, loaded: Loaded, storages: Storages, nbytes: int, directory: ZipDirectory | None
) -> TorchFile:
    return TorchFile(
        path, variant, loaded.tree, storages.by_key, loaded.globals, nbytes, unsafe=loaded.unsafe, directory=directory
    )


def _trailing(path: str, stop: int, nbytes: int) -> list[CkptError]:
    if stop == nbytes:
        return []
    why = f"it stops at byte {stop} of {nbytes}"
    return [Damaged("bytes follow the pickle", where=path, why=why, fix="copy the file again", code="trailing-bytes")]


def _read_record(reader: ByteSource, record: ZipRecord) -> bytes:
    _require_stored(reader, record)
    if record.nbytes > PICKLE_LIMIT:
        why = f"{record.nbytes} bytes, at most {PICKLE_LIMIT} are read"
        raise Unsupported(f"{record.name} is too large", where=reader.path, why=why, code="pickle-too-large")
    return reader.read(record.start, record.nbytes)


def _require_stored(reader: ByteSource, record: ZipRecord) -> None:
    if record.method:
        raise Unsupported(
            f"{record.name} is compressed",
            where=reader.path,
            why=f"zip method {record.method}; torch.save only stores, and torch reads such a file wrongly with mmap",
            fix="load it with torch and save it again",
            code="archive-compressed",
        )


def _require_little(reader: ByteSource, directory: ZipDirectory) -> None:
    record = directory.record("byteorder")
    if record is None:
        return
    _require_stored(reader, record)
    order = reader.read(record.start, record.nbytes) if record.nbytes <= 16 else b""
    if order == b"big":
        raise Unsupported(
            "the file is big-endian",
            where=reader.path,
            why="its record byteorder says so",
            fix="load it with torch and save it again",
            code="big-endian",
        )
    if order != b"little":
        why = f"the record byteorder holds {order[:16]!r}"
        raise Damaged(
            "the byte order is neither little nor big", where=reader.path, why=why, code="archive-inconsistent"
        )
