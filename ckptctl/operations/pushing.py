"""push: a checkpoint to the Hub: checked, converted on the way where need be, described, sent whole, compared after.

A Hugging Face folder's files are sent as they are. Anything else becomes one first, in a folder that is removed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Usage
from ckptctl.operations.elsewhere import refuse_address
from ckptctl.operations.inspecting import inspect
from ckptctl.operations.opening import Reading, open_checkpoint, require_tensors
from ckptctl.operations.publishing import Local, Publication, change, hashed
from ckptctl.operations.running import Running
from ckptctl.operations.staging import staged
from ckptctl.operations.validating import Validation, validate
from ckptctl.remote.repository import MAIN, Repository
from ckptctl.report import card

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.publishing import Hashed, Published
    from ckptctl.remote.repository import Tree

Document = dict[str, Any]
README = "README.md"
KINDS = ("model", "dataset")
_WEIGHTS = (
    "model*.safetensors",
    "model*.safetensors.index*.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index*.json",
)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights by names that loaders look for: one of an earlier push beside the new ones would be loaded in their place.
Source: transformers 5.24.0, modeling_utils.py, _get_resolved_checkpoint_files; peft 0.21.2, utils/constants.py."""
_CARD_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class Push:
    """What is pushed where. repo is OWNER/NAME; as_is: in the source's own format; the rest as the command's flags."""

    repo: str
    revision: str = MAIN
    create_pr: bool = False
    private: bool = False
    message: str | None = None
    check: bool = True
    include_state: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    as_is: bool = False
    kind: str = "model"
    keep_last: int | None = None
    dtype: str = "source"
    weights: str = "model"
    max_shard_size: str = "5GB"
    work_dir: Path | str | None = None


@dataclass(slots=True)
class Parcel:
    """What is to be in the repository, and what the report says of it."""

    files: list[Local]
    document: Document
    stale: Callable[[Tree], list[str]] | None = None
    facts: card.Facts | None = None


def push(
    src: Path | str,
    wanted: Push,
    reading: Reading | None = None,
    running: Running | None = None,
    *,
    progress: Callable[[Any], None] | None = None,
) -> Document:
    """Push src to a repository of the Hub (schema ckptctl.push/1).

    Raises Usage (exit 2), what reading and converting raise, CkptError with code check-failed, hub-refused or
    hub-differs, Denied (exit 4) where the Hub refuses this user, Interrupted (exit 5) where it could not be reached:
    the same call then goes on from what the Hub has.
    """
    running = running or Running()
    reading = reading or Reading()
    _require(wanted)
    refuse_address(src)
    repository = Repository(wanted.repo, wanted.kind)
    if wanted.as_is:
        from ckptctl.operations.pushing_steps import push_steps

        return push_steps(Path(src), wanted, reading, running, repository, progress=progress)
    checkpoint, evidence = open_checkpoint(src, reading)
    require_tensors(checkpoint)
    checked = checked_document(wanted, checkpoint_path(src, checkpoint), reading, running, progress)
    about = inspect(src, reading)
    with staged(src, checkpoint, wanted, reading, running, progress) as stage:
        if stage.folder is None:
            parcel = Parcel([], {"fidelity": stage.fidelity})
            result = about
        else:
            held = Path(stage.folder)
            parcel = Parcel([Local(n, held / n) for n in stage.files], {"fidelity": stage.fidelity})
            result = inspect(held, Reading(format="trainer" if stage.is_trainer else None))
        parcel.stale = None if wanted.include or wanted.exclude else stale_weights([f.path for f in parcel.files])
        rows = [*card.rows(result), *card.source_rows(about), ("check", _check_line(checked))]
        fields = card.metadata(stage.config, stage.adapter)
        title = wanted.repo.partition("/")[2] or wanted.repo
        fidelity = without_paths(stage.fidelity, src, checkpoint.root, reading)
        parcel.facts = card.Facts(title, fields, rows, fidelity, command(src, wanted, reading))
        document = {
            "schema": "ckptctl.push/1",
            "source": {
                "path": str(src),
                "format": checkpoint.format,
                "variant": checkpoint.variant,
                "recognised": evidence.why,
                "step": checkpoint.step,
            },
            "converted": stage.converted,
            "check": checked,
            "warnings": list(checkpoint.warnings),
            **parcel.document,
        }
        if stage.folder is None:
            return _planned_only(document, repository, wanted, stage.planned_nbytes)
        return deliver(parcel, document, repository, wanted, running, progress)


def _require(wanted: Push) -> None:
    if wanted.kind not in KINDS:
        raise Usage(f"--repo-type {wanted.kind}: there is no such type", fix=f"one of {', '.join(KINDS)}")
    if wanted.create_pr and wanted.revision != MAIN:
        raise Usage("--create-pr and --revision contradict each other", why="a pull request is for main")
    if wanted.keep_last is not None and not wanted.as_is:
        raise Usage("--keep-last is for steps of a run", fix="add --as-is")
    if wanted.keep_last is not None and wanted.create_pr:
        raise Usage("--keep-last and --create-pr contradict each other", why="a step goes when the new one is there")
    if wanted.as_is and wanted.include_state:
        raise Usage("--include-state says nothing with --as-is", why="a checkpoint as it is has its state")
    changed = wanted.dtype != "source" or wanted.weights != "model" or wanted.max_shard_size != "5GB"
    if wanted.as_is and changed:
        raise Usage("--as-is converts nothing", fix="leave --dtype, --weights and --max-shard-size out")


def checkpoint_path(src: Path | str, checkpoint: Checkpoint) -> Path:
    """Where the one checkpoint lies that is looked at: a step of a run where src is the run's folder."""
    from ckptctl.operations.opening import steps_of

    root = Path(checkpoint.root)
    if not root.is_dir() or checkpoint.step is None:
        return root
    steps = steps_of(root)
    return steps.get(checkpoint.step, root) if len(steps) > 1 else root


def checked_document(
    wanted: Push,
    path: Path,
    reading: Reading,
    running: Running,
    progress: Callable[[Any], None] | None,
) -> Document | None:
    """What `validate --level values` says in short, None with --no-check. CkptError where it finds errors."""
    if not wanted.check:
        return None
    alone = replace(reading, step=None)
    found = validate([path], Validation("values"), alone, memory=running.memory, jobs=running.jobs, progress=progress)
    if not found["ok"]:
        errors = [f for f in found["findings"] if f["severity"] == "error"]
        first = "; ".join(f"{f['code']} {f['what']}" for f in errors[:3])
        raise CkptError(
            f"{len(errors)} errors are found, and nothing is pushed",
            where=str(path),
            why=first + ("; ..." if len(errors) > 3 else ""),
            fix=f"see `ckptctl validate {path} --level values`; --no-check pushes it all the same",
            code="check-failed",
        )
    return {"level": found["level"], "ok": True, "counts": found["counts"]}


def _check_line(checked: Document | None) -> str:
    if checked is None:
        return "none (--no-check)"
    counts = checked["counts"]
    more = f", {counts['warning']} warnings" if counts["warning"] else ""
    return f"ckptctl validate, level {checked['level']}: no error{more}"


def stale_weights(names: Sequence[str]) -> Callable[[Tree], list[str]]:
    """What a repository has of earlier weights that a loader would take in place of the new ones, or beside them."""
    patterns = _ADAPTERS if any(n in _ADAPTERS for n in names) else _WEIGHTS
    if not any(fnmatchcase(n, p) for n in names for p in patterns):
        return lambda _: []
    new = frozenset(names)

    def stale(tree: Tree) -> list[str]:
        return sorted(
            p for p in tree.files if p not in new and any(fnmatchcase(p, one) for one in patterns) and "/" not in p
        )

    return stale


def chosen(files: Sequence[Local], wanted: Push) -> list[Local]:
    """The files that --include and --exclude leave. Usage where a pattern fits none."""
    for flag, patterns in (("--include", wanted.include), ("--exclude", wanted.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(f.path, pattern) for f in files):
                raise Usage(f"{flag} {pattern} fits no file", fix="see the files with --dry-run")
    return [
        f
        for f in files
        if (not wanted.include or any(fnmatchcase(f.path, p) for p in wanted.include))
        and not any(fnmatchcase(f.path, p) for p in wanted.exclude)
    ]


def command(src: Path | str, wanted: Push, reading: Reading) -> str:
    """What to type for the same push, with names in place of paths: paths tell of the machine."""
    words = ["ckptctl push", Path(src).resolve().name, wanted.repo]
    flags: list[tuple[str, Any, Any]] = [
        ("--as-is", wanted.as_is, False),
        ("--repo-type", wanted.kind, "model"),
        ("--dtype", wanted.dtype, "source"),
        ("--weights", wanted.weights, "model"),
        ("--max-shard-size", wanted.max_shard_size, "5GB"),
        ("--include-state", wanted.include_state, False),
        ("--no-check", not wanted.check, False),
        ("--keep-last", wanted.keep_last, None),
        ("--from", reading.format, None),
        ("--step", reading.step, None),
        ("--module", reading.module, None),
    ]
    for name in ("model_config", "param_order", "key_map", "layer_names"):
        given = getattr(reading, name)
        flags.append((f"--{name.replace('_', '-')}", Path(given).resolve().name if given is not None else None, None))
    flags += [("--include", p, None) for p in wanted.include] + [("--exclude", p, None) for p in wanted.exclude]
    for flag, value, default in flags:
        if value != default:
            words += [flag] if value is True else [flag, str(value)]
    return " ".join(words)


def without_paths(fidelity: Sequence[Document], src: Path | str, root: str, reading: Reading) -> list[Document]:
    """The report with names in place of this machine's paths, which are nobody's business on the Hub."""
    given = [src, root, reading.model_config, reading.param_order, reading.key_map, reading.layer_names]
    known = {str(p): Path(p).resolve().name for p in given if p is not None}
    known |= {str(Path(p).resolve()): name for p, name in known.items()}
    out = []
    for line in fidelity:
        detail = line["detail"]
        for path, name in sorted(known.items(), key=lambda item: -len(item[0])):
            detail = detail.replace(path, name)
        out.append({**line, "detail": detail})
    return out


def deliver(
    parcel: Parcel,
    document: Document,
    repository: Repository,
    wanted: Push,
    running: Running,
    progress: Callable[[Any], None] | None,
) -> Document:
    """Send a parcel with its card, and complete the document; with --dry-run say only what would be sent."""
    tree = repository.tree(wanted.revision) or (repository.tree(MAIN) if wanted.revision != MAIN else None)
    files = [*(f for f in parcel.files if f.path != README), *with_card(parcel, repository, tree)]
    files = chosen(sorted(files, key=lambda f: f.path), wanted)
    if not files:
        raise Usage("--include and --exclude leave no file", fix="see the files with --dry-run")
    made = hashed(files, running.jobs or 4)
    if running.dry_run:
        from ckptctl.remote.repository import Tree

        planned = change(tree or Tree("", {}), made, parcel.stale)
        return told(document, repository, wanted, planned.sent, planned.there, planned.deleted, dry_run=True)
    name = document["source"]["path"]
    message = wanted.message or f"Upload {Path(name).resolve().name}"
    ready(repository, wanted)
    publication = Publication(
        repository, wanted.revision, message, as_pull=wanted.create_pr, threads=running.jobs, progress=progress
    )
    publication.put(made, parcel.stale)
    return finished(publication.finish(), document, repository, wanted)


def ready(repository: Repository, wanted: Push) -> None:
    """Have the repository there, and the branch."""
    repository.create(private=wanted.private)
    if wanted.revision != MAIN and repository.tree(wanted.revision) is None:
        repository.branch(wanted.revision)


def with_card(parcel: Parcel, repository: Repository, tree: Tree | None) -> list[Local]:
    """README.md: the source's own or the Hub's completed, else a new one."""
    if parcel.facts is None:
        return []
    old = next((f for f in parcel.files if f.path == README), None)
    text: bytes | None = None
    if old is not None and old.nbytes <= _CARD_LIMIT:
        text = old.content if isinstance(old.content, bytes) else old.content.read_bytes()
    elif tree is not None and README in tree.files and tree.files[README].nbytes <= _CARD_LIMIT:
        text = repository.text(README, tree.commit)
    try:
        before = text.decode() if text is not None else None
    except UnicodeDecodeError as err:
        raise CkptError(
            "README.md is no text in UTF-8", where=README, why=str(err), fix="mend it, or --exclude README.md"
        ) from err
    return [Local(README, card.card(parcel.facts, before).encode())]


def finished(done: Published, document: Document, repository: Repository, wanted: Push) -> Document:
    """The document of a push that was done and compared."""
    out = told(document, repository, wanted, done.sent, done.there, done.deleted, dry_run=False)
    files = [*done.sent, *done.there]
    out["commit"] = done.commit
    out["commits"] = done.commits
    url = repository.pull_url(done.pull) if done.pull is not None else ""
    out["pull_request"] = {"number": done.pull, "url": url} if done.pull is not None else None
    out["verified"] = {"files": len(files), "bytes": sum(f.nbytes for f in files)}
    return out


def told(
    document: Document,
    repository: Repository,
    wanted: Push,
    sent: Sequence[Hashed],
    there: Sequence[Hashed],
    deleted: Sequence[str],
    *,
    dry_run: bool,
) -> Document:
    """The document with what is or would be sent."""
    rows = [(f, "sent") for f in sent] + [(f, "there") for f in there]
    return {
        **document,
        "target": {
            "repo": wanted.repo,
            "type": wanted.kind,
            "revision": wanted.revision,
            "url": repository.url,
        },
        "files": [
            {"path": f.path, "bytes": f.nbytes, "sha256": f.sha256, "state": state}
            for f, state in sorted(rows, key=lambda row: row[0].path)
        ],
        "sent": {"files": len(sent), "bytes": sum(f.nbytes for f in sent)},
        "there": {"files": len(there), "bytes": sum(f.nbytes for f in there)},
        "deleted": list(deleted),
        "dry_run": dry_run,
        "warnings": [*document["warnings"], *repository.notes],
    }


def _planned_only(document: Document, repository: Repository, wanted: Push, nbytes: int) -> Document:
    """A dry run with a conversion: what would be written is known by size, not by hash."""
    out = told(document, repository, wanted, [], [], [], dry_run=True)
    out["sent"] = {"files": None, "bytes": nbytes}
    return out
