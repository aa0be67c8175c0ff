"""What a file is by its first bytes, as far as it can be taken for a torch file. Reads nothing itself."""

from __future__ import annotations

from typing import Literal

from ckptctl.core.errors import CkptError, Damaged, Unrecognised, Unsupported
from ckptctl.formats.pickles.opcodes import OPCODES

Kind = Literal[
    "zip", "pickle", "tar", "lfs", "html", "json", "safetensors", "gzip", "zstd", "hdf5", "empty", "zeros", "unknown"
]

_MAGIC: tuple[tuple[bytes, Kind], ...] = (
    (b"PK\x03\x04", "zip"),
    (b"version https://git-lfs", "lfs"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x89HDF\r\n", "hdf5"),
)


def sniff(head: bytes) -> Kind:
    """The kind of file that begins with head (1 KiB, or the whole file). "pickle" may turn out to be none: scan it."""
    if not head:
        return "empty"
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if is_tar(head):
        return "tar"
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "html"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return "safetensors"
    if not head.strip(b"\0"):
        return "zeros"
    if head[:1] == b"\x80" and (len(head) < 2 or head[1] <= 9):  # 5 is the newest known: others are named
        return "pickle"
    if text.startswith(b"{") and text[1:].lstrip()[:1] in (b'"', b"}"):
        return "json"
    return "pickle" if head[0] in OPCODES and head[0] < 0x80 else "unknown"


def is_tar(head: bytes) -> bool:
    """Whether a file begins as a tar's first member does. Source: POSIX.1-2001, pax, ustar interchange format."""
    return head[257:262] == b"ustar"


def refuse_other(kind: Kind, path: str) -> CkptError:
    """The error for a file that is no torch file."""
    again = "download it again"
    if kind == "empty":
        return Damaged("the file is empty", where=path, fix="copy the file again", code="empty-file")
    if kind == "zeros":
        return Damaged(
            "the file begins with zeros only",
            where=path,
            why="it was never written to the end",
            fix="copy the file again",
        )
    if kind == "lfs":
        return Damaged(
            "this is a Git LFS pointer, not the file",
            where=path,
            fix="run `git lfs pull`, or " + again,
            code="lfs-pointer",
        )
    if kind == "html":
        return Damaged(
            "this is a web page, not the file", where=path, why="a failed download?", fix=again, code="html-page"
        )
    if kind == "tar":
        return Unsupported(
            "a tar file of torch 0.1",
            where=path,
            why="storages, tensors and pickle are members of a tar; this format is not read",
            fix="save it again with a torch of that time, on a machine you can lose: loading it can run code",
            code="torch-tar",
        )
    names = {"json": "JSON", "safetensors": "a safetensors file", "gzip": "gzip", "zstd": "zstd", "hdf5": "HDF5"}
    what = names.get(kind, "neither a zip nor a pickle")
    return Unrecognised(
        "this is no torch file", where=path, why=f"it is {what}", fix="give a file that torch.save wrote"
    )
