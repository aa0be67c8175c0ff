"""Which checkpoints lie at a path: one, or one a step of a run; and what a run's tracker names. Names of files only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl import formats
from ckptctl.core.errors import CkptError, Unrecognised
from ckptctl.formats.bytesource import read_whole
from ckptctl.operations.opening import TRACKERS, is_one_checkpoint, step_folder, steps_of
from ckptctl.rules import Finding, finding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.operations.opening import Reading

_TRACKER = "tracker-names-missing-step"
_TRACKER_LIMIT = 4096


def targets_of(path: Path, reading: Reading | None) -> list[tuple[str, Path, int | None]]:
    """(name, path, its number in a run) of each checkpoint at a path: a run's folder has one a step."""
    if not path.exists() and not path.is_symlink():
        raise Unrecognised(f"nothing is at {path}", fix="check the path")
    wanted = reading.step if reading is not None else None
    if not path.is_dir() or is_one_checkpoint(path):
        return [(str(path), path, None)]
    steps = steps_of(path)
    if wanted is not None and steps:
        number = _last(path, steps) if wanted == "latest" else None
        at = steps[number] if number is not None else step_folder(path, wanted)
        return [(str(at), at, next(n for n, p in steps.items() if p == at))]
    if wanted is not None or (len(steps) < 2 and (not steps or _is_known(path))):
        return [(str(path), path, None)]
    return [(str(steps[n]), steps[n], n) for n in sorted(steps)]


def _last(path: Path, steps: Mapping[int, Path]) -> int:
    """The step that a run's tracker names, else its last one: whole or not, that is to be told."""
    for tracker in TRACKERS:
        if (path / tracker).is_file():
            said = _folder_of(_said(path / tracker))
            found = next((n for n, at in steps.items() if at.name == said), None)
            if found is not None:
                return found
    return max(steps)


def _said(file: Path) -> str:
    """What a tracker says."""
    return read_whole(file, _TRACKER_LIMIT).decode("utf-8", "replace").strip()


def _folder_of(said: str) -> str:
    """The folder that a tracker names by what it says: Megatron's says a number."""
    return f"iter_{int(said):07d}" if said.isascii() and said.isdigit() and len(said) < 12 else said


def _is_known(path: Path) -> bool:
    """Whether a folder is a checkpoint of its own by its format, such as DeepSpeed's with one step in it."""
    try:
        formats.detect(path)
    except Unrecognised:
        return False
    except CkptError:
        return True
    return True


def tracker_findings(path: Path, name: str) -> list[Finding]:
    """Pointers of a run that name what is not there. name is what the report calls the run's folder."""
    out = []
    for tracker in TRACKERS if path.is_dir() else ():
        file = path / tracker
        if not file.is_file() or file.stat().st_size > _TRACKER_LIMIT:
            continue
        said = _said(file)
        if not (said and said.isprintable() and "\ufffd" not in said):
            if tracker.startswith("latest") and steps_of(path):
                out.append(finding(_TRACKER, f"{tracker} names no step", file=tracker).of(name))
            continue
        folder = _folder_of(said)
        if said != "release" and "/" not in said and not (path / folder).exists():
            what, why = f"{tracker} names {said[:80]}, which is not there", f"there is no {folder[:80]}"
            out.append(finding(_TRACKER, what, file=tracker, why=why).of(name))
    return out
