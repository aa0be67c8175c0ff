"""Schedulers among the values of a training state, whatever name they were saved under. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.values import Tree


def schedulers(values: Mapping[str, Tree]) -> tuple[list[Tree], tuple[str, ...]]:
    """Each scheduler's state, in order, and the names of the values that they are. A list of them is several."""
    found: list[Tree] = []
    names = tuple(n for n in values if n in PARTS["scheduler"])
    for name in names:
        value = values[name]
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return found, names
