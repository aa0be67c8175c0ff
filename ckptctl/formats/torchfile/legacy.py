"""The stream that torch.save wrote before 1.6: five pickles, then the storages. Reads no tensor data.

Source: torch 2.13, torch/serialization.py, _legacy_save, _legacy_load; torch/csrc/serialization.cpp,
THPStorage_writeFileRaw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.formats.pickles.build import Loaded, load
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.pickles.scan import Scan, Truncated, scan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.values import Storage, Tree
    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.pickles.calls import Call
    from ckptctl.formats.pickles.objects import Finish
    from ckptctl.formats.torchfile.rebuild import Storages

MAGIC_NUMBER, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
MAGIC = MAGIC_NUMBER.to_bytes(10, "little")
_FIRST_READ = 1 << 16


class Front:
    """The first bytes of a file, as many as its pickles turn out to need, at most limit."""

    def __init__(self, reader: ByteSource, limit: int) -> None:
        self.reader, self.limit = reader, limit
        self.data = reader.read(0, min(reader.nbytes, _FIRST_READ))

    def scan(self, start: int) -> Scan:
        """The extent of the pickle at start; reads more of the file as needed. Truncated where the file ends first."""
        while True:
            try:
                return scan(self.data, self.reader.path, start)
            except Truncated:
                if len(self.data) == self.reader.nbytes:
                    raise
                if len(self.data) >= self.limit:
                    why = f"it does not stop within {self.limit} bytes"
                    raise Unsupported(
                        "the pickle is too large", where=self.reader.path, why=why, code="pickle-too-large"
                    ) from None
                self.data = self.reader.read(0, min(self.reader.nbytes, 4 * len(self.data), self.limit))


def read_legacy(
    front: Front, storages: Storages, calls: Mapping[str, Call], finish: Mapping[str, Finish]
) -> tuple[Loaded, int, list[CkptError]]:
    """The object of the stream, where the last pickle stops, what is wrong with its storages. Places those it can."""
    reader = front.reader

    def one(start: int, persistent: Storages | None = None) -> Loaded:
        found = front.scan(start)
        return load(
            front.data, reader.path, persistent=persistent, rebuild=calls, finish=finish, scanned=found, start=start
        )

    magic = one(0)
    protocol = one(magic.stop)
    system = one(protocol.stop)
    if magic.tree != MAGIC_NUMBER or protocol.tree != PROTOCOL:
        why = f"magic {show(magic.tree)}, protocol {show(protocol.tree)}"
        raise Damaged("this is no stream of torch.save", where=reader.path, why=why, code="pickle-damaged")
    if isinstance(system.tree, dict) and system.tree.get("little_endian") is False:
        raise Unsupported(
            "the file is big-endian",
            where=reader.path,
            why="its system record says so",
            fix="load it with torch and save it again",
            code="big-endian",
        )
    loaded = one(system.stop, storages)
    keys = one(loaded.stop)
    for other in (magic, protocol, system, keys):  # names in these pickles would run as well
        loaded.globals.update(other.globals)
        loaded = loaded._replace(risky_getattr=loaded.risky_getattr + other.risky_getattr)
    problems = _place(reader, storages, keys.tree, keys.stop)
    return loaded, keys.stop, problems


def _place(reader: ByteSource, storages: Storages, keys: Tree, start: int) -> list[CkptError]:
    """Fills in where each storage lies: for each key an int64 count, then the elements. Whatever is wrong ends it."""
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise Damaged("the list of storage keys is damaged", where=reader.path, why=show(keys), code="pickle-damaged")
    problems: list[CkptError] = []
    at = start
    for key in keys:
        storage = storages.by_key.get(key)
        if storage is None:
            why = f"nothing says how large it is; it would begin at byte {at}"
            problems.append(
                Damaged(f"storage {show(key)} is used by no tensor", where=reader.path, why=why, code="storage-unknown")
            )
            break
        if at + 8 > reader.nbytes:
            problems.append(_short(reader, storage, at, 0))
            break
        numel = int.from_bytes(reader.read(at, 8), "little", signed=True)
        if numel != storage.numel:
            why = f"{storage.numel} elements by the pickle, {numel} by the count at byte {at}"
            problems.append(
                Damaged(f"storage {show(key)} has two sizes", where=reader.path, why=why, code="storage-size-mismatch")
            )
            break
        nbytes = numel * (storage.dtype.itemsize if storage.dtype else 1)
        storage.start_byte, storage.nbytes = at + 8, min(nbytes, reader.nbytes - at - 8)
        at += 8 + nbytes
        if at > reader.nbytes:
            problems.append(_short(reader, storage, at - nbytes, nbytes))
            break
    else:
        if at != reader.nbytes:
            why = f"the last storage stops at byte {at} of {reader.nbytes}"
            problems.append(Damaged("bytes follow the last storage", where=reader.path, why=why, code="trailing-bytes"))
    for key, (outer, first) in storages.views.items():
        inner = storages.by_key[key]
        if outer.start_byte >= 0:
            item = outer.dtype.itemsize if outer.dtype else 1
            inner.start_byte, inner.nbytes = outer.start_byte + first * item, inner.numel * item
    return problems


def _short(reader: ByteSource, storage: Storage, start: int, nbytes: int) -> Damaged:
    return Damaged(
        f"the file ends inside storage {show(storage.key)}",
        where=reader.path,
        why=f"it holds {nbytes} bytes from byte {start} on; the file has {reader.nbytes}",
        fix="copy the file again",
        code="data-truncated",
    )
