"""The rules: code, kind, severity, cause and cure of everything that `validate` can find."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.core.errors import Severity

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From the gravest on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of finding. code is stable (`CK101`), kind is its slug, severity what it is unless the finding says.

    question is the one of the three (intact, safe, resumable) that an error of it answers with no.
    """

    code: str
    kind: str
    severity: Severity
    question: str
    title: str
    cause: str
    cure: str


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, by rising code."""
    text = files(__package__ or "ckptctl.rules").joinpath("rules.toml").read_text(encoding="utf-8")
    return tuple(Rule(**row) for row in tomllib.loads(text)["rules"])


@cache
def _kinds() -> dict[str, Rule]:
    return {r.kind: r for r in rules()}


def by_kind(kind: str, otherwise: str = "damaged") -> Rule:
    """The rule of a kind; that of `otherwise` for a kind that has none of its own."""
    return _kinds().get(kind) or _kinds()[otherwise]


def known_words() -> frozenset[str]:
    """Every code and every kind: what --select and --ignore take."""
    return frozenset(w for r in rules() for w in (r.code, r.kind))
