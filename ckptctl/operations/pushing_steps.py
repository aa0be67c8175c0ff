"""push --as-is: checkpoints in their own format, a run's folder step by step, the oldest first.

The run's pointer to its newest step goes last, when that step is there; with --keep-last older steps go with it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl import formats
from ckptctl.core.errors import CkptError, Unrecognised, Unsafe, Usage
from ckptctl.operations.inspecting import inspect
from ckptctl.operations.opening import STEP_FOLDERS, TRACKERS, Reading, steps_of
from ckptctl.operations.publishing import Local, Publication, change, hashed
from ckptctl.operations.pushing import (
    Parcel,
    checked_document,
    chosen,
    command,
    finished,
    ready,
    told,
    with_card,
)
from ckptctl.remote.repository import MAIN
from ckptctl.remote.repository import Tree as HubTree
from ckptctl.report import card

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptctl.operations.pushing import Push
    from ckptctl.operations.running import Running
    from ckptctl.remote.repository import Repository

Document = dict[str, Any]
_LIGHTNING = re.compile(r"(?:.*[-_=])?step[=_-]?(\d{1,12})(?:-v\d+)?\.ckpt", re.ASCII)
"""Source: lightning 2.6, callbacks/model_checkpoint.py, format_checkpoint_name: `epoch=0-step=100.ckpt`."""
_HIDDEN = (".metadata", ".gitattributes")
"""Hidden files that belong to a checkpoint, by how their names begin; others (.env, .cache, .git) stay here."""
_TRACKER_LIMIT = 4096


@dataclass(slots=True)
class _Run:
    """A run's folder: its steps by number, a folder or a file each, and what is to be said of those left out."""

    root: Path
    steps: dict[int, Path]
    trackers: dict[str, int | None]
    notes: list[str] = field(default_factory=list)

    @property
    def named(self) -> set[int]:
        """The steps that its trackers name."""
        return {n for n in self.trackers.values() if n is not None}


def push_steps(
    src: Path,
    wanted: Push,
    reading: Reading,
    running: Running,
    repository: Repository,
    *,
    progress: Callable[[Any], None] | None = None,
) -> Document:
    """Push a run's folder, or one checkpoint, in its own format. Returns the document of push()."""
    if not src.exists():
        raise Unrecognised(f"nothing is at {src}", fix="check the path")
    run = _run(src)
    if not run.steps:
        if wanted.keep_last is not None:
            raise Usage("--keep-last is for a run's folder", why=f"{src} is one checkpoint")
        return _push_one(src, wanted, reading, running, repository, progress)
    tree = repository.tree(wanted.revision) or (repository.tree(MAIN) if wanted.revision != MAIN else None)
    local = _pushable(run, reading.step)
    going, held = _steps(run, local, wanted, reading, repository, tree)
    threads = running.jobs or 4
    steps = [(n, [_local(f, run.root) for f in _files(local[n], run.root)]) for n in going]
    trackers = [_local(run.root / name, run.root) for name, n in run.trackers.items() if n in held]
    last = Parcel(trackers, {}, _pruning(run, held) if wanted.keep_last is not None else None)
    alone = replace(reading, step=None)
    about = inspect(local[going[-1]], alone)
    last.facts = _facts(about, src, wanted, reading, held)
    ends = [*trackers, *with_card(last, repository, tree)]
    picked = {f.path for f in chosen([*(f for _, files in steps for f in files), *ends], wanted)}
    made = [(n, hashed([f for f in files if f.path in picked], threads)) for n, files in steps]
    files = tree.files if tree is not None else {}
    new = [n for n, step in made if any(not f.is_held(files.get(f.path)) for f in step)]
    checked = [checked_document(wanted, local[n], alone, running, progress) for n in new]
    document: Document = {
        "schema": "ckptctl.push/1",
        "source": {
            "path": str(src),
            **{k: about[k] for k in ("format", "variant", "recognised")},
            "step": going[-1],
        },
        "converted": False,
        "check": _all_checked(checked),
        "fidelity": [],
        "steps": [{"step": n, "path": local[n].name} for n in going],
        "warnings": [*about["warnings"], *run.notes],
    }
    made_ends = hashed([f for f in ends if f.path in picked], threads)
    if running.dry_run:
        every = [*(f for _, step in made for f in step), *made_ends]
        planned = change(tree or HubTree("", {}), every, last.stale)
        return told(document, repository, wanted, planned.sent, planned.there, planned.deleted, dry_run=True)
    ready(repository, wanted)
    message = wanted.message or f"Upload {src.resolve().name}"
    publication = Publication(
        repository, wanted.revision, message, as_pull=wanted.create_pr, threads=running.jobs, progress=progress
    )
    for number, step in made:
        publication.put(step, message=f"{message}: step {number}")
    publication.put(made_ends, last.stale, message=f"{message}: {_what(held)}")
    return finished(publication.finish(), document, repository, wanted)


def _steps(
    run: _Run, local: dict[int, Path], wanted: Push, reading: Reading, repository: Repository, tree: HubTree | None
) -> tuple[list[int], list[int]]:
    """The steps that are pushed, and those that the repository has afterwards. Usage where none is pushed."""
    on_hub = set(_on_hub(run, tree.files if tree is not None else ()).values())
    newest = sorted({*local, *on_hub})
    kept = set(newest if wanted.keep_last is None else newest[-wanted.keep_last :])
    kept |= run.named if reading.step is None else set()
    kept |= _named_on_hub(repository, tree, run)
    going = sorted(n for n in local if n in kept)
    if not going:
        raise Usage("no step is left to push", why=f"newer ones are on the Hub: {', '.join(map(str, sorted(kept)))}")
    return going, sorted(n for n in {*going, *on_hub} if n in kept)


def _push_one(
    src: Path,
    wanted: Push,
    reading: Reading,
    running: Running,
    repository: Repository,
    progress: Callable[[Any], None] | None,
) -> Document:
    """One checkpoint, at the top of the repository."""
    from ckptctl.operations.pushing import deliver

    about = inspect(src, reading)
    checked = checked_document(wanted, src, reading, running, progress)
    base = src if src.is_dir() else src.parent
    files = [_local(f, base) for f in _files(src, src)]
    facts = _facts(about, src, wanted, reading, [about["step"]] if about["step"] is not None else [])
    document: Document = {
        "schema": "ckptctl.push/1",
        "source": {"path": str(src), **{k: about[k] for k in ("format", "variant", "recognised", "step")}},
        "converted": False,
        "check": checked,
        "fidelity": [],
        "warnings": list(about["warnings"]),
    }
    return deliver(Parcel(files, {}, None, facts), document, repository, wanted, running, progress)


# ---- what lies here -------------------------------------------------------------------------------------------------


def _run(src: Path) -> _Run:
    if not src.is_dir():
        return _Run(src, {}, {})
    named = sorted(p for p in src.iterdir() if _LIGHTNING.fullmatch(p.name))
    steps = steps_of(src) or {n: p for p in named if (n := step_number(p.name)) is not None}
    run = _Run(src, steps, {name: _tracked(src / name) for name in TRACKERS if (src / name).is_file()})
    known = {p.name for p in steps.values()} | run.trackers.keys()
    others = sorted(p.name for p in src.iterdir() if p.name not in known and not p.name.startswith("."))
    if others:
        more = ", ..." if len(others) > 4 else ""
        run.notes.append(f"not pushed, for they are no steps of the run: {', '.join(others[:4])}{more}")
    return run


def step_number(name: str) -> int | None:
    """The step that a folder's or a Lightning file's name tells, None where it tells none."""
    found = _LIGHTNING.fullmatch(name)
    prefix = next((s for s in STEP_FOLDERS if name.startswith(s)), None)
    digits = found[1] if found else name[len(prefix) :] if prefix else name
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None


def _tracked(file: Path) -> int | None:
    if file.stat().st_size > _TRACKER_LIMIT:
        return None
    return step_number(file.read_text(encoding="utf-8", errors="replace").strip())


def _pushable(run: _Run, step: str | None) -> dict[int, Path]:
    """The steps that are whole: a run that is still saving one has not named it yet, or lacks its last file."""
    if step not in (None, "latest"):
        if not str(step).isdigit() or int(str(step)) not in run.steps:
            listed = ", ".join(map(str, sorted(run.steps)))
            raise Unrecognised(
                f"step {step} is not in {run.root}", why=f"steps there: {listed}", fix="give one of them"
            )
        return {int(str(step)): run.steps[int(str(step))]}
    for name, number in run.trackers.items():
        if number is not None and number not in run.steps:
            raise CkptError(
                f"{name} names step {number}, which is not there",
                where=str(run.root / name),
                fix="copy the step, or correct the file",
                code="tracker-names-missing-step",
            )
    out = {}
    for number, path in run.steps.items():
        if run.named and number > max(run.named):
            run.notes.append(f"step {number} is left out: the run has not said yet that it is whole")
        elif not _is_whole(path):
            run.notes.append(f"step {number} is left out: it is not complete")
        else:
            out[number] = path
    if not out:
        raise Unrecognised(f"no step in {run.root} is complete", why="; ".join(run.notes), fix="wait for the run")
    return {max(out): out[max(out)]} if step == "latest" else out


def _is_whole(path: Path) -> bool:
    evidence = formats.detect(path)
    complete = getattr(formats.reader(evidence.format), "is_complete", None)
    return complete is None or bool(complete(evidence.path))


def _files(path: Path, home: Path) -> list[Path]:
    """Every file of a checkpoint.

    Unsafe for a link that leaves home, or leads to a hidden file: what it leads to was not meant. So for a linked
    folder: leaving it out would lose what is in it.
    """
    if path.is_file():
        return [path]
    out = []
    homes = [home.resolve(), path.resolve()]
    for folder, names, files in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
        linked = next((n for n in names if Path(folder, n).is_symlink()), None)
        if linked is not None:
            raise _linked(Path(folder, linked), path)
        for name in sorted(files):
            file = Path(folder, name)
            if (name.startswith(".") and not name.startswith(_HIDDEN)) or not file.is_file():
                continue
            if file.is_symlink() and not any(_is_meant(file.resolve(), h) for h in homes):
                raise _linked(file, path)
            out.append(file)
    return out


def _is_meant(file: Path, home: Path) -> bool:
    return home in file.parents and not any(p.startswith(".") for p in file.relative_to(home).parts[:-1])


def _linked(link: Path, path: Path) -> Unsafe:
    is_folder = link.is_dir()
    return Unsafe(
        f"{link.relative_to(path)} is a link " + ("to a folder" if is_folder else "that leaves the checkpoint"),
        where=str(link),
        why=f"it leads to {link.resolve()}",
        fix=f"put the {'folder' if is_folder else 'file'} itself there, or remove the link",
        code="link-escapes",
    )


def _local(file: Path, base: Path) -> Local:
    return Local(file.relative_to(base).as_posix(), file)


# ---- what lies on the Hub -------------------------------------------------------------------------------------------


def _naming(name: str) -> str:
    """A step's name without its number: what a run calls its steps."""
    return "*.ckpt" if _LIGHTNING.fullmatch(name) else name.rstrip("0123456789")


def _on_hub(run: _Run, paths: Iterable[str]) -> dict[str, int]:
    """The run's steps in a repository: what is at its top under names like those that the run gives, by name.

    A folder that others made, such as notes/ or 2026/, is none, unless the run names its steps so.
    """
    namings = {_naming(p.name) for p in run.steps.values()}
    tops = {p.partition("/")[0] for p in paths if "/" in p or _LIGHTNING.fullmatch(p)}
    named = {top: step_number(top) for top in tops if _naming(top) in namings}
    return {top: n for top, n in named.items() if n is not None}


def _named_on_hub(repository: Repository, tree: HubTree | None, run: _Run) -> set[int]:
    """The steps that trackers of the repository name and that none of the run's takes the place of."""
    out = set()
    for name in TRACKERS:
        held = tree.files.get(name) if tree is not None and name not in run.trackers else None
        if tree is not None and held is not None and held.nbytes <= _TRACKER_LIMIT:
            out.add(step_number(repository.text(name, tree.commit).decode(errors="replace").strip()))
    return {n for n in out if n is not None}


def _pruning(run: _Run, held: list[int]) -> Callable[[HubTree], list[str]]:
    """What --keep-last takes away: folders and files of steps that are not to be held."""

    def stale(tree: HubTree) -> list[str]:
        gone = [top for top, n in _on_hub(run, tree.files).items() if n not in held]
        return sorted(top if top in tree.files else f"{top}/" for top in gone)

    return stale


# ---- the report -----------------------------------------------------------------------------------------------------


def _facts(about: Document, src: Path, wanted: Push, reading: Reading, steps: list[int]) -> card.Facts:
    rows = [*card.rows(about), *card.source_rows(about)]
    rows = [("steps", ", ".join(map(str, steps))) if name == "step" and steps else (name, v) for name, v in rows]
    heading = "Training checkpoint" if len(steps) < 2 else "Training checkpoints"
    fields: dict[str, Any] = {"tags": ["checkpoint", about["format"]]}
    title = wanted.repo.partition("/")[2] or wanted.repo
    return card.Facts(title, fields, rows, [], command(src, wanted, reading), heading)


def _what(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _all_checked(checked: list[Document | None]) -> Document | None:
    done = [c for c in checked if c is not None]
    if not done:
        return None
    counts = {k: sum(c["counts"][k] for c in done) for k in done[0]["counts"]}
    return {"level": done[0]["level"], "ok": True, "counts": counts}
