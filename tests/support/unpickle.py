"""Python's own unpickler, for bytes that the tests made themselves; and what every reader owes to any bytes at all."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Callable


def unpickle(data: bytes) -> Any:
    """What a real unpickler makes of our own bytes."""
    return pickle.loads(data)  # noqa: TID251


def read_or_refuse(read: Callable[[], object], where: str) -> None:
    """Fails where read raises anything but a CkptError that says where."""
    try:
        read()
    except CkptError as err:
        if not err.where.startswith(where):
            raise AssertionError(f"an error that says {err.where!r}, not {where!r}: {err}") from err
