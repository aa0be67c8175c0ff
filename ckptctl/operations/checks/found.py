"""What is found while one checkpoint is checked: findings, each once, and what was looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ckptctl.rules import Finding, Where, finding, from_error

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.errors import CkptError, Severity
    from ckptctl.formats.hf.index import Index
    from ckptctl.formats.st.header import StHeader
    from ckptctl.formats.zipdir import ZipDirectory

Level = Literal["header", "structure", "values"]
_LIMIT = 200
"""Findings of one kind that are kept; the rest are counted."""


@dataclass(slots=True)
class Archive:
    """A torch zip that was opened: its records, and which tensor each storage is of, by the storage's key."""

    directory: ZipDirectory
    tensors: dict[str, str]


@dataclass
class Found:
    """One checkpoint while it is checked. root is its folder, files are relative to it."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    headers: dict[str, StHeader] = field(default_factory=dict)
    """Headers of the safetensors files that could be read."""
    indexes: dict[str, Index] = field(default_factory=dict)
    """Indexes that could be read."""
    archives: dict[str, Archive] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the tensors in each file, where the file has such."""
    unreadable: set[str] = field(default_factory=set)
    tensors: int = 0
    nbytes: int = 0
    """Bytes of tensor values that were read."""
    _seen: set[tuple[str, str, str, str]] = field(default_factory=set)
    _kinds: Counter[str] = field(default_factory=Counter)

    def add(self, new: Finding) -> None:
        """A finding, once for each kind and place."""
        key = (new.kind, new.where.file, new.where.tensor, new.where.field)
        if key in self._seen:
            return
        self._kinds[new.kind] += 1
        if self._kinds[new.kind] <= _LIMIT:
            self._seen.add(key)
            self.findings.append(new)

    def note(
        self,
        kind: str,
        what: str,
        *,
        file: str = "",
        tensor: str = "",
        field: str = "",
        why: str = "",
        fix: str = "",
        severity: Severity | None = None,
    ) -> None:
        """Adds a finding of a check of our own."""
        self.add(finding(kind, what, file=file, tensor=tensor, field=field, why=why, fix=fix, severity=severity))

    def error(self, err: CkptError, file: str = "", severity: Severity | None = None) -> None:
        """Adds what a reader raised. Without a file the place is read out of the message."""
        root = str(self.root)
        if file:
            self.add(from_error(err, file, (f"{root}/{file}",), severity))
            return
        where = err.where.removeprefix(f"{root}/").removeprefix(root)
        name = next((f for f in sorted(self.files, key=len, reverse=True) if _begins(where, f)), "")
        if name:
            made = from_error(err, name, (f"{root}/{name}",), severity)
            place = Where(name, where[len(name) :].lstrip(", "))
            self.add(replace(made, where=place))
        else:
            self.add(replace(from_error(err, "", (), severity), where=Where(where)))

    def finish(self) -> None:
        """Says how many findings were left out."""
        for kind, count in self._kinds.items():
            if count > _LIMIT:
                found = finding(kind, f"{count - _LIMIT} more findings of this kind are not listed")
                self.findings.append(replace(found, severity="info"))

    @property
    def has_errors(self) -> bool:
        """Whether anything so far is an error."""
        return any(f.severity == "error" for f in self.findings)


def _begins(where: str, name: str) -> bool:
    return where == name or where.startswith((f"{name}, ", f"{name}: ", f"{name} ("))
