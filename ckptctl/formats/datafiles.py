"""The files of a folder that hold its data, opened when they are needed. Nothing of what they hold is known here."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ckptctl.core.errors import MissingFile
from ckptctl.formats.bytesource import FileBytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptctl.core.values import Tree

OPEN_FILES = 64
"""How many are kept open at most; those in use are open besides."""


class DataFiles:
    """Files by their numbers in an index or a list, opened when needed and at most a few at once."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, names
        self.plain: dict[bytes, Tree] = {}
        """Values of items that were read, by the items' bytes; see dcp.items.read_object."""
        self._open: dict[int, FileBytes] = {}
        self._lock = threading.Lock()

    def get(self, number: int) -> FileBytes:
        """File number `number`. MissingFile where it is not there."""
        with self._lock:
            found = self._open.get(number)
            if found is None:
                path = self.folder / self.names[number]
                if not path.is_file():
                    raise MissingFile(
                        f"{self.names[number]} is missing",
                        where=str(self.folder),
                        why="the metadata names it",
                        fix="copy the file; without it the tensors in it cannot be read",
                    )
                if len(self._open) >= OPEN_FILES:
                    # Let go of, not closed: another thread may read it. It closes when the last one lets go.
                    del self._open[next(iter(self._open))]
                found = self._open[number] = FileBytes(path, name=self.names[number])
            return found

    def full(self, number: int) -> Path:
        """Where file number `number` lies. MissingFile where it is not there."""
        self.get(number)
        return self.folder / self.names[number]

    def close(self) -> None:
        """Close what is open."""
        for f in self._open.values():
            f.close()
        self._open.clear()
