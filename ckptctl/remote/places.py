"""Which paths of this machine are placeholders for files elsewhere, and what reads those files' bytes.

Whoever reads bytes by a path asks `at(path)` first. A placeholder has its file's size and no bytes: opened as a file it
would read as zeros, so from the first one on nothing in this process opens one (`sys.addaudithook`).
"""

from __future__ import annotations

import os
import sys
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from ckptctl.core.errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Elsewhere(Protocol):
    """A file that is read by ranges. Threads may read at once."""

    @property
    def name(self) -> str:
        """What messages call it: its address."""

    @property
    def nbytes(self) -> int:
        """How long it is."""

    @property
    def identity(self) -> str:
        """Its content's hash, or what else changes where its content does."""

    def read(self, start: int, n: int) -> bytes:
        """Exactly n bytes from start, which the caller has checked to be there; small ones are kept."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Bytes [start, stop) that will be read soon: they may be fetched at once."""

    def stream(self, start: int) -> Forward:
        """Reads that go forward from start on, each byte once, nothing kept."""


class Forward(Protocol):
    """A stream of a file's bytes, of one thread."""

    def skip(self, start: int) -> bool:
        """Go on to byte start. False where that is behind, or so far ahead that another stream is quicker."""

    def expect(self, stop: int) -> None:
        """Reads will go on up to byte stop: what is asked for may reach so far."""

    def fill(self, views: Sequence[memoryview], check: Callable[[], None]) -> None:
        """Fill the views one after the other. check is called now and then: it may raise."""

    def close(self) -> None:
        """Let go of the connection."""


class Placed(Protocol):
    """A folder of placeholders."""

    @property
    def root(self) -> str:
        """Where it is on this machine."""

    @property
    def shown(self) -> str:
        """What people call it."""

    def at(self, name: str) -> Elsewhere | None:
        """The file whose placeholder is root/name; None for what is there as it is."""

    def identity(self, name: str) -> str:
        """The hash of the content of root/name, whether it is a placeholder or a copy; "" for a folder."""


_folders: dict[str, Placed] = {}
_lock = Lock()
_is_guarded = False


def add(folder: Placed) -> None:
    """Make a folder's placeholders known."""
    global _is_guarded
    with _lock:
        _folders[folder.root] = folder
        if not _is_guarded:
            sys.addaudithook(_guard)
            _is_guarded = True


def remove(folder: Placed) -> None:
    """Forget a folder, before its placeholders are removed."""
    with _lock:
        _folders.pop(folder.root, None)


def at(path: str | os.PathLike[str]) -> Elsewhere | None:
    """The file elsewhere whose placeholder a path is; None for any other path."""
    if not _folders:
        return None
    found = _below(os.fspath(path))
    return found[0].at(found[1]) if found is not None else None


def address_of(path: str | os.PathLike[str]) -> str:
    """The address of what has its placeholder at a path, "" for any other path."""
    found = _below(os.fspath(path)) if _folders else None
    return "" if found is None else found[0].shown + (f"/{found[1]}" if found[1] else "")


def identity_of(path: str | os.PathLike[str]) -> str:
    """The content's hash of a file that is elsewhere, a copy of which may be here; "" for any other path."""
    found = _below(os.fspath(path)) if _folders else None
    return found[0].identity(found[1]) if found is not None else ""


def shown(text: str) -> str:
    """A text for people in which placeholders' paths are the addresses of their files."""
    for root, folder in list(_folders.items()):
        text = text.replace(root, folder.shown)
    return text


def shown_in(document: Any) -> Any:
    """Plain data with every text as `shown` gives it."""
    if isinstance(document, str):
        return shown(document)
    if isinstance(document, dict):
        return {k: shown_in(v) for k, v in document.items()}
    if isinstance(document, list | tuple):
        return [shown_in(v) for v in document]
    return document


def _below(path: str) -> tuple[Placed, str] | None:
    """The folder that a path lies in, and its name there."""
    for root, folder in list(_folders.items()):
        if path.startswith(root) or root in path:
            name = os.path.relpath(os.path.normpath(path), root)
            if name == ".":
                return folder, ""
            if not name.startswith(".."):
                return folder, name
    return None


def _guard(event: str, args: tuple[Any, ...]) -> None:
    """Stops whatever would read a placeholder as a file."""
    if event != "open" or not _folders or not isinstance(args[0], str | os.PathLike):
        return
    path = os.fspath(args[0])
    if isinstance(path, str) and at(path) is not None:
        raise CkptError(
            "this part of ckptctl reads files of this machine only",
            where=address_of(path),
            fix="download the repository, and give its folder",
            code="not-by-range",
        )
