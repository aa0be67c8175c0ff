"""The first two answers: is a checkpoint intact, is it safe. The third is in state.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.operations.checks.found import Found
    from ckptctl.rules import Finding


def answered(answer: bool | None, why: str) -> dict[str, Any]:
    """An answer as the report has it: None where it was not looked at."""
    return {"answer": answer, "why": why}


def intact(found: Found) -> dict[str, Any]:
    """Whether nothing is damaged. None where there are errors that are not to be told."""
    count, hidden = (sum(map(_damages, some)) for some in (found.findings, found.ignored))
    if hidden and not count:
        return answered(None, _left_out(hidden))
    return answered(not count, _errors(count) if count else "nothing found")


def _damages(one: Finding) -> bool:
    question = one.rule.question
    is_damage = question == "intact" or (question == "resumable" and one.kind != "not-resumable")
    return is_damage and one.severity == "error"


def _errors(count: int) -> str:
    return f"{count} error{'' if count == 1 else 's'}"


def _left_out(count: int) -> str:
    return f"{_errors(count)} left out as asked for (--ignore)"


def safe(found: Found) -> dict[str, Any]:
    """Whether no pickle, path or link does harm. None where some could not be looked at, or are not to be told."""
    danger, hidden = (
        [f for f in some if f.severity == "error" and f.rule.question == "safe"]
        for some in (found.findings, found.ignored)
    )
    if danger:
        return answered(False, danger[0].what)
    if hidden:
        return answered(None, _left_out(len(hidden)))
    if found.unseen:
        file, why = next(iter(found.unseen.items()))
        more = f", and {len(found.unseen) - 1} more files" if len(found.unseen) > 1 else ""
        return answered(None, f"the pickles of {file} could not be looked at: {why}{more}")
    return answered(True, "no pickle, path or link in it does harm")
