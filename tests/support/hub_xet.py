"""Xet content in a folder: the real hf_xet reads and writes `local://FOLDER` itself; the server finds files in it.

Chunks must be stored as they are (HF_XET_XORB_COMPRESSION_POLICY=none).
Source: hf_xet 1.8 (xet-core), mdb_shard/src/{shard_format,file_structs}.rs, xorb_object: read from files it wrote.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

RECORD = 48  # bytes of every record of a shard
HEADER = 48


@dataclass(frozen=True)
class Segment:
    """Chunks first <= i < last of one xorb."""

    xorb: str
    first: int
    last: int


@dataclass(frozen=True)
class XetFile:
    hash: str
    segments: tuple[Segment, ...]


def hash_text(raw: bytes) -> str:
    """32 bytes as the text that Xet uses: four little-endian words of 64 bits."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


class XetStore:
    """A Xet content store in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder.resolve()
        self.url = f"local://{self.folder}"

    def find(self, sha256: str) -> XetFile | None:
        for shard in sorted(self.folder.rglob("*.mdb")):
            if found := _files(shard.read_bytes()).get(sha256):
                return found
        return None

    def copy(self, sha256: str, target: Path) -> None:
        """Writes a file's bytes to `target` where the store has it and they hash to `sha256`."""
        found = self.find(sha256)
        if found is None:
            return
        data = b"".join(b"".join(self._chunks(one)) for one in found.segments)
        if hashlib.sha256(data).hexdigest() == sha256:
            target.write_bytes(data)

    def _chunks(self, segment: Segment) -> list[bytes]:
        """A xorb is a row of chunks, each behind 8 bytes: version, 24-bit stored size, scheme, 24-bit size."""
        (path,) = self.folder.rglob(f"*{segment.xorb}")
        data, at, chunks = path.read_bytes(), 0, []
        for index in range(segment.last):
            stored, scheme = int.from_bytes(data[at + 1 : at + 4], "little"), data[at + 4]
            if scheme:
                raise ValueError("Xet chunks are compressed: set HF_XET_XORB_COMPRESSION_POLICY=none")
            if index >= segment.first:
                chunks.append(data[at + 8 : at + 8 + stored])
            at += 8 + stored
        return chunks


def _files(shard: bytes) -> dict[str, XetFile]:
    """The files of a shard by sha256: per file a head, its segments, their verifications, and the sha256."""
    found: dict[str, XetFile] = {}
    at = HEADER
    while shard[at : at + 32] != b"\xff" * 32:
        name = hash_text(shard[at : at + 32])
        flags, count = struct.unpack_from("<2I", shard, at + 32)
        at += RECORD
        segments = []
        for _ in range(count):
            _, _, first, last = struct.unpack_from("<4I", shard, at + 32)
            segments.append(Segment(hash_text(shard[at : at + 32]), first, last))
            at += RECORD
        if flags & 1 << 31:
            at += RECORD * count
        if flags & 1 << 30:
            found[hash_text(shard[at : at + 32])] = XetFile(name, tuple(segments))
            at += RECORD
    return found
