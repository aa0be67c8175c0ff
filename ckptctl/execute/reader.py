"""Values of tensors in memory, by the same reading that a job uses: for diff, show and the Python API.

Nothing of the source is written.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.execute.gather import gather
from ckptctl.execute.merge import merge
from ckptctl.execute.sources import Sources
from ckptctl.execute.system import reading_failed
from ckptctl.plan.steps import Extent, Merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.tensor import Source
    from ckptctl.execute.memory import Bytes
    from ckptctl.plan.steps import Step

_WINDOW_NBYTES = 16 << 20


class _Sizes(dict[str, int]):
    """Bytes of each file, looked up when first asked for: files that no wanted tensor lies in may be missing."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, path: str) -> int:
        file = self._root / path if path else self._root
        try:
            size = file.stat().st_size
        except OSError as err:
            raise reading_failed(err, file) from err
        self[path] = size
        return size


class Reader:
    """Reads moves into memory. Close it; memory_nbytes bounds windows and decoded members, not what it gives out."""

    def __init__(self, sources: Sequence[Source], root: Path, memory_nbytes: int) -> None:
        self._window = max(1 << 20, min(_WINDOW_NBYTES, memory_nbytes // 4))
        self._scratch = Path(tempfile.mkdtemp(prefix="ckptctl-")) if any(s.codec for s in sources) else None
        scratch = self._scratch or root
        self._sources = Sources(
            root, sources, _Sizes(root), scratch, memory_nbytes // 2, memory_nbytes // 4, self._room
        )

    def _room(self) -> int:
        return shutil.disk_usage(self._scratch or ".").free

    def read(self, moves: Sequence[Step], nbytes: int) -> Bytes:
        """Nbytes that the moves fill, counted from destination byte 0.

        Damaged or MissingFile where the source has them not.
        """
        (filled,) = gather(self._sources, [(Extent(0, 0, nbytes), moves)], self._window, lambda: None)
        for step in moves:
            if isinstance(step, Merge):
                merge(self._sources, step, filled.data, 0, self._window, lambda: None)
        return filled.data

    def close(self) -> None:
        """Close the files, and remove what was decoded."""
        self._sources.__exit__(None, None, None)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
