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


class Output(NamedTuple):
    """One report: its form, and its file ("" is stdout)."""

    form: str
    file: str


def outputs(words: Sequence[str]) -> tuple[Output, ...]:
    """--output's words: FORM or FORM=FILE. Usage for a form that does not exist, or two that both want stdout."""
    out = []
    for word in words or ("text",):
        form, has_file, file = word.partition("=")
        if form not in FORMS or (has_file and not file):
            raise Usage(
                f"--output {word}: there is no such report",
                fix=f"FORM or FORM=FILE, FORM of {', '.join(FORMS)}",
            )
        out.append(Output(form, file))
    # Workflow commands are picked out of whatever text a step prints; nothing else can share a stream.
    shown = [o.form for o in out if not o.file and o.form != "github"]
    if len(shown) > 1 or (shown not in ([], ["text"]) and any(o.form == "github" and not o.file for o in out)):
        raise Usage(
            f"--output: {' and '.join(shown)} cannot both go to stdout", fix="give all but one a file: FORM=FILE"
        )
    return tuple(out)


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
