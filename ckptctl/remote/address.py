"""The address of a repository on the Hub, or of something in it. Nothing is looked up here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ckptctl.core.errors import Usage

if TYPE_CHECKING:
    import os

SCHEME = "hf:"
_KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
_SPECIAL = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)", re.ASCII)
"""Revisions with a slash in their names that are meant without quoting. Source: huggingface_hub 2.4.0,
hf_file_system.py, SPECIAL_REFS_REVISION_REGEX."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "hf://owner/name[@revision][/path]"


@dataclass(frozen=True, slots=True)
class Address:
    """A repository, a revision of it ("" is its main branch), and a path in it ("" is its top)."""

    repo: str
    kind: str = "model"
    revision: str = ""
    path: str = ""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit by its full hash: what it holds never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    def at(self, commit: str) -> Address:
        """The same thing at a commit."""
        return replace(self, revision=commit)

    def below(self, path: str) -> Address:
        """Another path of the same repository."""
        return replace(self, path=path)

    def __str__(self) -> str:
        kind = "" if self.kind == "model" else f"{self.kind}s/"
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{kind}{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path as the user gave it is an address; Path makes one slash of its two."""
    return str(path) == SCHEME or str(path).startswith(f"{SCHEME}/")


def parsed(path: str | os.PathLike[str]) -> Address:
    """The address that a text or path is. Usage where it is none, or none that can be looked up."""
    text = str(path)
    if not is_address(path):
        raise Usage(f"{text} is no address on the Hub", fix=f"write it as {_FORM}", code="hub-address")
    parts = text.removeprefix(SCHEME).lstrip("/").split("/")
    kind = _KINDS.get(parts[0])
    if kind is not None:
        parts = parts[1:]
    # Old repositories have no owner: `gpt2`, or `gpt2@main/config.json`.
    count = 1 if parts and "@" in parts[0] else 2
    head, rest = parts[:count], "/".join(parts[count:]).rstrip("/")
    name, at, revision = "/".join(head).rstrip("/").partition("@")
    if at:
        revision, rest = _revision(revision, rest)
        if not revision:
            raise Usage(f"{text} names no revision after the @", fix=f"write it as {_FORM}", code="hub-address")
    if not all(_is_name(n) for n in name.split("/")):
        why = f"{name!r} is no name of a repository" if name else "it names no repository"
        raise Usage(f"{text} is no address on the Hub", why=why, fix=f"write it as {_FORM}", code="hub-address")
    if rest and (any(p in ("", ".", "..") for p in rest.split("/")) or "\0" in rest):
        why = f"{rest!r} is no path in a repository"
        raise Usage(f"{text} is no address on the Hub", why=why, fix=f"write it as {_FORM}", code="hub-address")
    return Address(name, kind or "model", revision, rest)


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and ".." not in text and "--" not in text and not text.endswith(".git")


def _revision(first: str, rest: str) -> tuple[str, str]:
    """A revision that begins with first, and what of rest is the path behind it."""
    special = _SPECIAL.match(f"{first}/{rest}")
    whole = f"{first}/{rest}"
    if special is not None and whole[special.end() : special.end() + 1] in ("", "/"):
        return special[0], whole[special.end() + 1 :].rstrip("/")
    return unquote(first), rest
