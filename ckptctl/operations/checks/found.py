"""What is found while one checkpoint is checked: findings, each once, and what was looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ckptctl.rules import Finding, Where, by_kind, finding, from_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Unpack

    from ckptctl.core.errors import CkptError, Severity
    from ckptctl.formats.hf.index import Index
    from ckptctl.formats.st.header import StHeader
    from ckptctl.rules import Said

Level = Literal["header", "structure", "values"]
_LIMIT = 200
"""Findings of one kind and severity that are kept; the rest are counted."""


@dataclass
class Found:
    """One checkpoint while it is checked. root is its folder, files are relative to it."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    ignored: list[Finding] = field(default_factory=list)
    """Those that were found and are not to be told."""
    files: list[str] = field(default_factory=list)
    headers: dict[str, StHeader] = field(default_factory=dict)
    """Headers of the safetensors files that could be read."""
    indexes: dict[str, Index] = field(default_factory=dict)
    """Indexes that could be read."""
    archives: list[str] = field(default_factory=list)
    """Torch zips that could be read."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the tensors in each file, where the file has such."""
    unreadable: set[str] = field(default_factory=set)
    unseen: dict[str, str] = field(default_factory=dict)
    """Files whose pickles could not be looked at, and why: nobody knows whether they are safe."""
    looked_at: int = 0
    """Files that may hold weights, indexes and pickles: where there is none, nothing was checked."""
    tensors: int = 0
    nbytes: int = 0
    """Bytes of tensor values that were read."""
    _seen: set[tuple[str, str, str, str]] = field(default_factory=set)
    _counts: Counter[tuple[str, Severity]] = field(default_factory=Counter)

    def add(self, new: Finding) -> None:
        """A finding, once for each kind and place."""
        if not self._is_new(new):
            return
        self._counts[new.kind, new.severity] += 1
        if self._counts[new.kind, new.severity] <= _LIMIT:
            self._seen.add(_key(new))
            self.findings.append(new)

    def note(self, kind: str, what: str, **said: Unpack[Said]) -> None:
        """Adds a finding of a check of our own."""
        self.add(finding(kind, what, **said))

    def error(self, err: CkptError, file: str = "", severity: Severity | None = None, tensor: str = "") -> None:
        """Adds what a reader raised. Without a file the place is read out of the message.

        tensor is the one that was wanted, where the message names none: the first of several that lack one thing.
        """
        made = self._placed(err, file, severity)
        if tensor and not made.where.tensor and self._is_new(made):
            self._seen.add(_key(made))
            made = replace(made, where=replace(made.where, tensor=tensor))
        self.add(made)

    def _is_new(self, found: Finding) -> bool:
        return _key(found) not in self._seen

    def _placed(self, err: CkptError, file: str, severity: Severity | None) -> Finding:
        root = str(self.root)
        if file:
            return from_error(err, file, (f"{root}/{file}",), severity)
        where = err.where.removeprefix(f"{root}/").removeprefix(root)
        name = next((f for f in sorted(self.files, key=len, reverse=True) if _begins(where, f)), "")
        if name:
            made = from_error(err, name, (f"{root}/{name}",), severity)
            place = Where(name, where[len(name) :].lstrip(", "))
            return replace(made, where=place)
        return replace(from_error(err, "", (), severity), where=Where(where))

    def told(self) -> dict[str, Any]:
        """What was found in files that were checked apart, as plain data: see take()."""
        return {
            "findings": [
                (f.rule.kind, f.kind, f.severity, f.what, (f.where.file, f.where.tensor, f.where.field), f.why, f.fix)
                for f in self.findings
            ],
            "more": [(*key, n - _LIMIT) for key, n in self._counts.items() if n > _LIMIT],
            "archives": self.archives,
            "names": {file: list(names) for file, names in self.names.items()},
            "unreadable": sorted(self.unreadable),
            "unseen": self.unseen,
            "looked_at": self.looked_at,
            "tensors": self.tensors,
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Adds what told() gave."""
        for rule, kind, severity, what, where, why, fix in told["findings"]:
            self.add(Finding(by_kind(rule), kind, severity, what, Where(*where), why, fix))
        for kind, severity, more in told["more"]:
            self._counts[kind, severity] += more
        self.archives += told["archives"]
        self.names |= {file: tuple(names) for file, names in told["names"].items()}
        self.unreadable.update(told["unreadable"])
        for file, why in told["unseen"].items():
            self.unseen.setdefault(file, why)
        self.looked_at += told["looked_at"]
        self.tensors += told["tensors"]

    def finish(self) -> None:
        """Says how many findings were left out."""
        for (kind, severity), count in self._counts.items():
            if count > _LIMIT:
                what = f"{count - _LIMIT} more of this kind ({severity}) are not listed"
                self.findings.append(finding(kind, what, severity="info"))

    @property
    def has_errors(self) -> bool:
        """Whether anything so far is an error."""
        return any(f.severity == "error" for f in self.findings)


def _key(found: Finding) -> tuple[str, str, str, str]:
    return found.kind, found.where.file, found.where.tensor, found.where.field


def _begins(where: str, name: str) -> bool:
    return where == name or where.startswith((f"{name}, ", f"{name}: ", f"{name} ("))
