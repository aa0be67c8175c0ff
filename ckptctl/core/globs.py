"""Patterns over names, as the command line takes them: case counts, and `*` crosses dots."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns; none where there are none."""
    return any(fnmatchcase(name, g) for g in globs)
