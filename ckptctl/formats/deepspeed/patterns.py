"""Patterns of parameters' names, by which universal_checkpoint_info says how tensor-parallel slices are joined.

AutoTP writes one for each parameter, in several lists: trying all of them for every name would take the square of the
parameters. Those that are one name, spelled out, are looked up; the others are tried.

Source: DeepSpeed 0.19.8, module_inject/layers.py, collect_autotp_universal_checkpoint_info.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged
from ckptctl.formats.pickles.nodes import show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.values import Tree

_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class Patterns:
    """A list of patterns, that are matched at a name's beginning. Damaged where one of them is none."""

    def __init__(self, listed: Iterable[Tree], where: str) -> None:
        self._names: dict[str, list[int]] = {}
        self._others: list[tuple[int, re.Pattern[str]]] = []
        for number, pattern in enumerate(listed):
            name = _ESCAPED.sub(r"\1", pattern[1:-1]) if isinstance(pattern, str) else ""
            if pattern == f"^{re.escape(name)}$":
                self._names.setdefault(name, []).append(number)
            else:
                self._others.append((number, _compiled(pattern, where)))

    def of(self, name: str) -> list[int]:
        """The places in the list of the patterns that match, in order."""
        return sorted([*self._names.get(name, ()), *(i for i, p in self._others if p.match(name))])


def unjoinable(what: str, why: str, where: str) -> Damaged:
    """A slice joined otherwise would be other parameters' numbers: what cannot be understood is never skipped."""
    return Damaged(
        f"{what}: tensor-parallel slices are not joined by a guess",
        where=where,
        why=f"universal_checkpoint_info: {why}",
        fix="copy the step again, or make a universal folder with ds_to_universal where the model is",
        code="zero-layout",
    )


def _compiled(pattern: Tree, where: str) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise unjoinable(f"{show(pattern)} is no pattern of names", "it is no text", where)
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as err:
        raise unjoinable(f"{show(pattern)} is no pattern of names", str(err), where) from err
