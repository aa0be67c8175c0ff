"""validate: is a checkpoint intact, is it safe, can a run go on from it. Findings as data; nothing is changed.

Files are looked at one by one first, so that every fault is told, not the first only; then as one checkpoint, by the
readers that all commands use.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl import formats
from ckptctl.core.errors import CkptError, MissingFact, Unrecognised, Unsupported, Usage
from ckptctl.core.sizes import parse_size
from ckptctl.core.tensor import InOnePlace
from ckptctl.core.values import Global
from ckptctl.operations.checks.answers import answered, intact, safe
from ckptctl.operations.checks.files import check_files
from ckptctl.operations.checks.folder import check_folder
from ckptctl.operations.checks.found import Found, Level
from ckptctl.operations.checks.model import check_model
from ckptctl.operations.checks.pickled import grave_global
from ckptctl.operations.checks.runs import targets_of, tracker_findings
from ckptctl.operations.checks.state import Resumable, check_state, resumable
from ckptctl.operations.elsewhere import near, reads_hub
from ckptctl.operations.naming import under_hub_names
from ckptctl.operations.opening import (
    Reading,
    given_config,
    open_checkpoint,
)
from ckptctl.remote import places
from ckptctl.rules import SEVERITIES, Finding, by_kind, known_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.core.checkpoint import Checkpoint, UnsafeGlobal

Document = dict[str, Any]
LEVELS: tuple[Level, ...] = ("header", "structure", "values")
_BASELINE_LIMIT = 64 << 20
_GENERAL = ("unsupported", "missing-fact", "unrecognised")
"""Codes that say no more than that it was not looked at."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What is looked at, and what counts. select and ignore are codes, kinds, or the first letters of a code."""

    level: str = "structure"
    checksums: bool = False
    against: Path | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    baseline: Path | None = None
    must_resume: bool = False


class Read(NamedTuple):
    """Progress: bytes read so far. How many there will be is not known before."""

    done_nbytes: int
    total_nbytes: int | None


@dataclass(slots=True)
class _Checked:
    """One checkpoint, checked. error is why it could not be looked at as one."""

    name: str
    path: Path
    found: Found
    checkpoint: Checkpoint | None = None
    error: CkptError | None = None


@reads_hub()
def validate(
    paths: Sequence[Path | str],
    what: Validation | None = None,
    reading: Reading | None = None,
    *,
    memory: str = "256MiB",
    jobs: int = 0,
    progress: Callable[[Any], None] | None = None,
) -> Document:
    """Findings of one or several checkpoints (schema ckptctl.validate/1), with the three answers for each.

    A run's folder with several steps is one checkpoint a step. Raises Unrecognised where nothing is there, and, for a
    single path, Unsupported or MissingFact where it cannot be looked at and nothing was found either.
    """
    what = what or Validation()
    if what.against is not None:
        what = replace(what, against=Path(near(what.against)))
    _require(what)
    _require_level(paths, what)
    _require_looked_at(what, reading)
    if reading is not None:
        given_config(reading.model_config)  # one that is not there is the user's mistake, not the checkpoint's
    known = _baseline(what.baseline)
    budget = parse_size(memory, "--memory")
    targets = [t for p in paths for t in targets_of(Path(p), reading)]
    alone = replace(reading, step=None) if reading is not None else None
    checked = [
        _one((name, at), what, reading if number is None else alone, budget, jobs, progress)
        for name, at, number in targets
    ]
    numbers = {name: number for name, _, number in targets}
    for one in checked:
        _filter(one.found, what)
        if one.error is not None and not one.found.has_errors:
            if len(checked) == 1:
                raise one.error
            one.found.error(one.error, severity="error")
        elif one.error is not None and one.error.code not in _GENERAL:
            one.found.error(one.error)
        one.found.finish()
    names = [one.name for one in checked]
    findings = [f for p in paths for f in tracker_findings(Path(p), "" if names == [str(p)] else str(p))]
    findings = [f for f in findings if not _matches(f, what.ignore)]
    rows = []
    for one in checked:
        _filter(one.found, what)
        answer = resumable(one.found, one.checkpoint)
        _resumes(one, what, answer)
        _filter(one.found, what)
        named = [f.of(one.name if len(checked) > 1 else "") for f in one.found.findings]
        told = {f.kind for f in tracker_findings(one.path, "")}
        findings += [f for f in named if f.kind not in told]
        rows.append(_row(one, answer, what.level))
    chosen = [f for f in findings if not what.select or _matches(f, what.select)]
    new = [f for f in chosen if f.fingerprint not in known]
    new.sort(key=lambda f: (f.checkpoint, SEVERITIES.index(f.severity)))
    going = [c for c, row in zip(checked, rows, strict=True) if row["resumable"]["answer"]]
    gravest = SEVERITIES[: SEVERITIES.index(what.fail_on) + 1]
    return {
        "schema": "ckptctl.validate/1",
        "level": what.level,
        "ok": not any(f.severity in gravest for f in new),
        "findings": [f.as_dict() for f in new],
        "counts": {s: sum(f.severity == s for f in new) for s in SEVERITIES},
        "checked": {k: sum(row["checked"][k] for row in rows) for k in ("tensors", "files", "bytes")},
        "checkpoints": rows,
        "newest_resumable": max(going, key=lambda c: _step(c, numbers)).name if going else None,
        "suppressed": {"baseline": len(chosen) - len(new)},
    }


def _require(what: Validation) -> None:
    if what.level not in LEVELS:
        raise Usage(f"--level {what.level}: there is no such level", fix=f"one of {', '.join(LEVELS)}")
    if what.fail_on not in SEVERITIES:
        raise Usage(f"--fail-on {what.fail_on}: there is no such severity", fix=f"one of {', '.join(SEVERITIES)}")
    words = known_words()
    if what.against is not None and what.against.is_file():
        from ckptctl.operations.checks.sums import published

        published(what.against)  # what cannot be read is the user's mistake
    elif what.against is not None and not what.against.is_dir():
        raise Usage(f"--against {what.against}: there is no such folder", fix="give a folder that holds the same files")
    for word in (*what.select, *what.ignore):
        if word not in words and not (word.startswith("CK") and any(w.startswith(word) for w in words)):
            raise Usage(f"there is no rule {word!r}", fix="give a code (CK101), its beginning (CK1), or a kind")


def _require_level(paths: Sequence[Path | str], what: Validation) -> None:
    """Usage where every byte of a repository on the Hub would be read."""
    for path in paths:
        address = places.address_of(path)
        if address and (what.level == "values" or what.checksums):
            asked = "--level values" if what.level == "values" else "--checksums"
            raise Usage(
                f"{asked}: {address} is on the Hub, and would be read whole",
                fix="give --level structure or header; or download it (`hf download`) and give its folder",
            )


def _require_looked_at(what: Validation, reading: Reading | None) -> None:
    """Usage where something is asked for that headers do not tell: nothing would be said of it."""
    if what.level != "header":
        return
    asked = {"--resumable": what.must_resume, "--verify-replicas": reading is not None and reading.verify_replicas}
    for flag, given in asked.items():
        if given:
            raise Usage(f"{flag}: --level header does not look at that", fix="give --level structure or values")


def _matches(found: Finding, words: Sequence[str]) -> bool:
    return any(w in (found.kind, found.rule.kind) or found.rule.code.startswith(w) for w in words)


def _filter(found: Found, what: Validation) -> None:
    if what.ignore:
        found.ignored += [f for f in found.findings if _matches(f, what.ignore)]
        found.findings = [f for f in found.findings if not _matches(f, what.ignore)]


def _baseline(path: Path | None) -> frozenset[str]:
    """Fingerprints of an earlier report: what it has is not told again."""
    if path is None:
        return frozenset()
    try:
        if path.stat().st_size > _BASELINE_LIMIT:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        found = json.loads(path.read_bytes())["findings"]
        if not isinstance(found, list):
            raise TypeError("its findings are no list")
        return frozenset(str(f["fingerprint"]) for f in found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        why = f"{type(err).__name__}: {err}"
        fix = "give what `ckptctl validate --output json=FILE` wrote"
        raise Usage(f"--baseline {path} cannot be read", why=why, fix=fix) from err


def _one(
    target: tuple[str, Path],
    what: Validation,
    reading: Reading | None,
    budget: int,
    jobs: int,
    progress: Callable[[Any], None] | None,
) -> _Checked:
    name, path = target
    alone = path.is_file() and not path.name.endswith(".index.json")
    root = path if path.is_dir() else path.parent
    found = Found(Path(os.path.abspath(root)))  # noqa: PTH100 (links are not to be followed)
    one = _Checked(name, path, found)
    check_files(found, [path.name] if alone else None, jobs)
    if not alone:
        check_folder(found, what.level)  # type: ignore[arg-type]
    if what.level != "header":
        _open(one, path, reading)
    else:
        _headers_only(one, path, reading, alone)
    if one.checkpoint is not None:
        _structure(found, one.checkpoint)
    if what.level == "values":
        from ckptctl.operations.checks.sums import check_archives
        from ckptctl.operations.checks.values import check_values

        check_archives(found, jobs)
        if one.checkpoint is not None and not one.checkpoint.unsafe:
            tell = _telling(found, progress)
            check_values(found, one.checkpoint, budget, jobs, tell)
    if what.checksums or what.against is not None:
        from ckptctl.operations.checks.sums import check_against, check_checksums

        if what.checksums:
            check_checksums(found)
        if what.against is not None:
            check_against(found, what.against)
    return one


def _telling(found: Found, progress: Callable[[Any], None] | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda _: progress(Read(found.nbytes, None))


def _open(one: _Checked, path: Path, reading: Reading | None) -> None:
    """The checkpoint as its reader sees it. What it raises is a finding, or, where it cannot read it, kept."""
    found = one.found
    try:
        one.checkpoint, _ = open_checkpoint(path, reading)
    except (Unsupported, MissingFact, Unrecognised) as err:
        is_known = err.code not in _GENERAL
        # Where the rule is no error nothing would be said of a checkpoint that was not looked at.
        if isinstance(err, Unsupported) and is_known and by_kind(err.code).severity == "error":
            found.error(err)
        else:
            one.error = err
    except Usage:
        raise
    except CkptError as err:
        if not _told(found, err):
            found.error(err, severity="error")  # no reader goes on from it, whatever the rule makes of it elsewhere


def _headers_only(one: _Checked, path: Path, reading: Reading | None, alone: bool) -> None:
    """What no file tells by itself: that there is no checkpoint at all, and what values a DCP keeps as pickles."""
    found = one.found
    if not found.looked_at and not found.has_errors and not (alone and path.suffix == ".json"):
        try:
            formats.detect(path)
        except CkptError as err:
            one.error = err
    items = [f for f in found.files if f.endswith(".distcp")]
    if not items:
        return
    try:
        checkpoint, _ = open_checkpoint(path, reading)
    except CkptError as err:
        found.unseen.update((f, err.what) for f in items)
        return
    for unsafe in checkpoint.unsafe:
        if not alone or unsafe.file.partition(" (")[0].rpartition("/")[2] == path.name:
            _unsafe(found, unsafe)


def _unsafe(found: Found, unsafe: UnsafeGlobal) -> None:
    file = unsafe.file.partition(" (")[0]
    found.note("pickle-calls-code", f"the pickle asks for {unsafe.name}", file=file, field=unsafe.name, why=unsafe.why)


def _told(found: Found, err: CkptError) -> bool:
    """Whether a check of the files has said what a reader says now."""
    alike = {err.code, *({"duplicate-tensor", "tensor-not-in-index"} if err.code == "tensor-not-in-shard" else ())}
    return any(f.kind in alike and f.severity == "error" for f in found.findings)


def _structure(found: Found, checkpoint: Checkpoint) -> None:
    """What metadata tell of the whole: every tensor can be found, the model is complete, the state is whole."""
    found.tensors = max(len(checkpoint.tensors), 0) or found.tensors
    if not checkpoint.tensors and not checkpoint.unsafe:
        found.note("no-tensors", "the checkpoint holds no tensor")
    for unsafe in checkpoint.unsafe:
        _unsafe(found, unsafe)
    told = {f.where.field for f in found.findings if f.kind == "pickle-unknown-global"}
    for name in checkpoint.unknown_globals:
        module, _, attribute = name.rpartition(".")
        if name not in told:
            grave = grave_global(Global(module, attribute))
            found.note(
                "pickle-unknown-global",
                f"a pickle names {name}",
                field=name,
                severity="error" if grave else "warning",
            )
    for key, tensor in checkpoint.tensors.items():
        if isinstance(tensor.pieces, InOnePlace):
            continue
        try:
            for table in tensor.pieces:
                len(table)
        except CkptError as err:
            found.error(err, tensor=key.name)
    for file in checkpoint.missing:
        found.note("missing-file", "the file is not there", file=file, why="a run that goes on loads it")
    named = under_hub_names(checkpoint)
    check_model(found, named)
    check_state(found, named)
    for warning in checkpoint.warnings:
        if not _is_told(found, warning):
            found.note("reader-note", warning, field=warning[:80])


def _is_told(found: Found, warning: str) -> bool:
    """Whether a reader's warning is about what is a finding already: by its words, or by the file it names."""
    places = ((f.what, f.where.file.rpartition("/")[2]) for f in found.findings)
    return any(what in warning or (file and file in warning) for what, file in places)


def _resumes(one: _Checked, what: Validation, answer: Resumable) -> None:
    """A finding where a run cannot go on from what looks as if it could, or where that was asked for."""
    if what.level == "header" or answer.answer or not (answer.partial or what.must_resume):
        return
    why = f"lacking: {', '.join(answer.lacks)}" if answer.lacks else ""
    severity = "error" if what.must_resume else "warning"
    one.found.note("not-resumable", f"no run can go on from this: {answer.why}", why=why, severity=severity)  # type: ignore[arg-type]


def _row(one: _Checked, answer: Resumable, level: str) -> Document:
    """One checkpoint's line of the report."""
    checkpoint = one.checkpoint
    return {
        "path": one.name,
        "format": checkpoint.format if checkpoint else "",
        "variant": checkpoint.variant if checkpoint else "",
        "step": checkpoint.step if checkpoint else None,
        "intact": intact(one.found),
        "safe": safe(one.found),
        "resumable": {
            **answered(
                None if level == "header" else answer.answer, "not looked at" if level == "header" else answer.why
            ),
            "loader": answer.loader,
            "lacks": list(answer.lacks),
        },
        "checked": {"tensors": one.found.tensors, "files": len(one.found.files), "bytes": one.found.nbytes},
        "findings": len(one.found.findings),
    }


def _step(one: _Checked, numbers: dict[str, int | None]) -> int:
    """A step as its run numbers it, since that is what loaders go by; what its files count where no run does."""
    number = numbers.get(one.name)
    if number is not None:
        return number
    return one.checkpoint.step if one.checkpoint is not None and one.checkpoint.step is not None else -1
