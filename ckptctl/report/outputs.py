"""Where reports of findings go: one to stdout, others to files, several at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.core.errors import CkptError, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence


FORMS = ("text", "json", "junit", "sarif", "github", "gitlab")
"""What --output takes; report.findings has a writer for each."""
_LOOK = 4096
_FIRST = (b"::error file=", b"::warning file=", b"::notice file=")
_EMPTY = b"[]"
"""GitLab's report of nothing."""
_PICTURE = b"\x89PNG"
"""Holds nothing that says whose it is: only another picture takes its place."""
_IN_HEAD = (b'"ckptctl.', b"<title>ckptctl ", b'name="ckptctl', b"sarif-2.1.0", b'"check_name": "CK')
_IN_TAIL = b", level "
"""What the reports begin with or hold, of every form; the text's last line says the level."""


class Output(NamedTuple):
    """One report: its form, and its file ("" is stdout)."""

    form: str
    file: str


def outputs(words: Sequence[str]) -> tuple[Output, ...]:
    """--output's words: FORM or FORM=FILE. Usage for a form that does not exist, or two that both want stdout."""
    out: list[Output] = []
    for word in words or ("text",):
        form, has_file, file = word.partition("=")
        if form not in FORMS or (has_file and not file):
            raise Usage(
                f"--output {word}: there is no such report",
                fix=f"FORM or FORM=FILE, FORM of {', '.join(FORMS)}",
            )
        if has_file:
            require_replaceable(Path(file), word)
            if any(os.path.realpath(file) == os.path.realpath(o.file) for o in out if o.file):
                raise Usage(f"--output {word}: another report goes to that file", fix="give each a file of its own")
        out.append(Output(form, file))
    # Workflow commands are picked out of whatever text a step prints; nothing else can share a stream.
    shown = [o.form for o in out if not o.file and o.form != "github"]
    if len(shown) > 1 or (shown not in ([], ["text"]) and any(o.form == "github" and not o.file for o in out)):
        raise Usage(
            f"--output: {' and '.join(shown)} cannot both go to stdout", fix="give all but one a file: FORM=FILE"
        )
    return tuple(out)


def require_replaceable(path: Path, word: str) -> None:
    """Usage where a report would be written over what is none: a checkpoint, most likely. word is --output's."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as stream:
            head = stream.read(_LOOK)
            stream.seek(max(0, path.stat().st_size - _LOOK))
            tail = stream.read(_LOOK)
    except OSError:
        return  # writing it says why
    first = (*_FIRST, _PICTURE) if word.startswith("png=") else _FIRST
    is_ours = head.startswith(first) or any(mark in head for mark in _IN_HEAD) or _IN_TAIL in tail
    if head and head.strip() != _EMPTY and not is_ours:
        why = "what it holds is not a report of ckptctl"
        raise Usage(f"--output {word}: the file is there", why=why, fix="give another file, or remove it first")


def show_findings(document: dict[str, Any], wanted: Sequence[Output]) -> None:
    """Writes every report. GitHub's adds its page to the file that GITHUB_STEP_SUMMARY names."""
    from ckptctl.report import findings  # no other command wants it

    for output in wanted:
        made = findings.WRITERS[output.form](document)
        if not output.file:
            sys.stdout.write(made.encode("utf-8", "backslashreplace").decode("utf-8"))
        else:
            _write(Path(output.file), made, "w")
        summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
        if output.form == "github" and summary:
            _write(Path(summary), findings.summary(document), "a")


def _write(path: Path, made: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(made)
    except OSError as err:
        why = err.strerror or str(err)
        raise CkptError(
            "a report cannot be written", where=str(path), why=why, fix="give another file", code="write-failed"
        ) from err
