"""File names that come out of files: whether they stay inside the checkpoint. Pure text; no file is looked at."""

from __future__ import annotations


def why_outside(name: str) -> str:
    """Why a file name of an index, archive or metadata may lead out of the checkpoint's folder; "" where it does not.

    Links are not looked at: the Hub's cache keeps every file as a link to its blobs.
    """
    if not name or name.endswith("/"):
        return "it names no file"
    if "\\" in name or "\0" in name or not name.isprintable():
        return "it has a backslash, or a character that cannot be shown"
    if name.startswith(("/", "~")) or name[1:2] == ":":
        return "it is absolute"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it has a part that is empty, . or .."
    return ""
