"""Findings: what was found, where, how grave it is. Made of the readers' errors, or by a check of validate's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from ckptctl.core.errors import CkptError, MissingFact, MissingFile, Unrecognised, Unsafe, Unsupported
from ckptctl.rules.registry import by_kind

if TYPE_CHECKING:
    from typing import Unpack

    from ckptctl.core.errors import Severity
    from ckptctl.rules.registry import Rule

_CLASSES: tuple[tuple[type[CkptError], str], ...] = (
    (Unsafe, "unsafe"),
    (MissingFile, "missing-file"),
    (Unsupported, "unsupported"),
    (MissingFact, "unsupported"),
    (Unrecognised, "unrecognised"),
)


@dataclass(frozen=True, slots=True)
class Where:
    """The place: a file relative to the checkpoint, a tensor, a field; "" where none is meant."""

    file: str = ""
    tensor: str = ""
    field: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.file, self.tensor, self.field)))


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. checkpoint is which of several it is of, as the report names it; kind may be finer than the rule."""

    rule: Rule
    kind: str
    severity: Severity
    what: str
    where: Where = Where()
    why: str = ""
    fix: str = ""
    checkpoint: str = ""

    @property
    def fingerprint(self) -> str:
        """What a baseline and GitLab know it by: the rule and the place, not the values, which change."""
        words = (self.rule.code, self.checkpoint, self.where.file, self.where.tensor, self.where.field)
        return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def as_dict(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return {
            "code": self.rule.code,
            "kind": self.kind,
            "severity": self.severity,
            "what": self.what,
            "where": {"file": self.where.file, "tensor": self.where.tensor, "field": self.where.field},
            "why": self.why,
            "fix": self.fix,
            "checkpoint": self.checkpoint,
            "fingerprint": self.fingerprint,
        }

    def of(self, checkpoint: str) -> Finding:
        """The same, of one of several checkpoints."""
        return replace(self, checkpoint=checkpoint)


class Said(TypedDict, total=False):
    """What a finding may say besides its kind and what was found."""

    file: str
    tensor: str
    field: str
    why: str
    fix: str
    severity: Severity | None


def finding(kind: str, what: str, **said: Unpack[Said]) -> Finding:
    """A finding of a kind that has a rule. KeyError where it has none: that is a mistake here."""
    rule = by_kind(kind, kind)
    where = Where(said.get("file", ""), said.get("tensor", ""), said.get("field", ""))
    fix = said.get("fix") or rule.cure
    return Finding(rule, kind, said.get("severity") or rule.severity, what, where, said.get("why", ""), fix)


def from_error(
    err: CkptError, file: str = "", names: tuple[str, ...] = (), severity: Severity | None = None
) -> Finding:
    """What a reader raised, as a finding. file is the one it looked at, names are what its messages call that file.

    A code without a rule keeps its slug, under the rule of its class.
    """
    rule = by_kind(err.code, next((kind for cls, kind in _CLASSES if isinstance(err, cls)), "damaged"))
    rest = err.where
    for name in sorted({file, *names}, key=len, reverse=True):
        if name and (rest == name or rest.startswith(f"{name}, ")):
            rest = rest[len(name) + 2 :]
            break
    else:
        if not file:
            file, rest = rest, ""
    is_field = rest.startswith(("metadata.", "__metadata__"))
    where = Where(file, "" if is_field else rest, rest if is_field else "")
    return Finding(rule, err.code, severity or rule.severity, err.what, where, err.why, err.fix or rule.cure)
