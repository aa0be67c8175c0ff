"""A progress bar on stderr: bytes, rate, time left, peak memory. Only on a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(*, enabled: bool) -> Iterator[Callable[[Any], None] | None]:
    """Gives a function to be called with every Progress, or None where there is nobody to see it."""
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[memory]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("writing", total=None, memory="")

        def update(state: Any) -> None:
            peak = getattr(state, "peak_rss_nbytes", 0)
            memory = f"peak {peak >> 20} MiB" if peak else ""
            bar.update(task, total=state.total_nbytes, completed=state.done_nbytes, memory=memory)

        yield update


def saying(*, enabled: bool) -> Callable[[str], None] | None:
    """A function that says on stderr what is being done, or None where there is nobody to see it."""
    if not enabled or not sys.stderr.isatty():
        return None
    return lambda line: print(line, file=sys.stderr, flush=True)  # noqa: T201
