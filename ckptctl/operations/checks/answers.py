"""The first two answers: is a checkpoint intact, is it safe. The third is in state.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.operations.checks.found import Found


def answered(answer: bool | None, why: str) -> dict[str, Any]:
    """An answer as the report has it: None where it was not looked at."""
    return {"answer": answer, "why": why}


def intact(found: Found) -> dict[str, Any]:
    """Whether nothing is damaged."""
    errors = [f for f in found.findings if f.severity == "error"]
    count = sum(
        f.rule.question == "intact" or (f.rule.question == "resumable" and f.kind != "not-resumable") for f in errors
    )
    return answered(not count, f"{count} error{'' if count == 1 else 's'}" if count else "nothing found")


def safe(found: Found) -> dict[str, Any]:
    """Whether no pickle, path or link does harm. None where there are pickles that could not be looked at."""
    danger = next((f for f in found.findings if f.severity == "error" and f.rule.question == "safe"), None)
    if danger is not None:
        return answered(False, danger.what)
    if found.unseen:
        file, why = next(iter(found.unseen.items()))
        more = f", and {len(found.unseen) - 1} more files" if len(found.unseen) > 1 else ""
        return answered(None, f"the pickles of {file} could not be looked at: {why}{more}")
    return answered(True, "no pickle, path or link in it does harm")
