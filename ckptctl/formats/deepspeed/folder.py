"""Which files a DeepSpeed checkpoint has, by their names, and which step the tracker names. Opens only the tracker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFile, Unrecognised, Unsafe
from ckptctl.formats.bytesource import read_whole

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

TRACKERS = ("latest", "latest_universal")
_TRACKER_LIMIT = 4096

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SHARD_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EXPERT = re.compile(r"(?:layer_(-?\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_RANKED = {
    "model-states file": _MODEL,
    "stage 3 model-states file": _SHARD_MODEL,
    "optimizer's file": _OPTIM,
    "expert rank's file": _EXPERT_OPTIM,
    "expert's file": _EXPERT,
}
_LAYER = re.compile(r"layer_(\d+)-(?:(.+)-)?model_states\.pt")


@dataclass(frozen=True)
class Files:
    """A step's files by what their names say; values are paths relative to root.

    Keys: model by model-parallel rank; shard_models and optims by (data-parallel rank, model-parallel rank);
    expert_optims by (expert-parallel rank, model-parallel rank); experts by (MoE layer, global expert, model-parallel
    rank); layers of a pipeline by (layer, text of the other axes' ranks). tag is the step's folder inside root, ""
    where root is it.
    """

    root: Path
    tag: str
    why: str
    tracked: bool = False
    models: dict[int, str] = field(default_factory=dict)
    shard_models: dict[tuple[int, int], str] = field(default_factory=dict)
    optims: dict[tuple[int, int], str] = field(default_factory=dict)
    expert_optims: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    layers: dict[tuple[int, str], str] = field(default_factory=dict)
    universal: bool = False

    @property
    def found(self) -> bool:
        """Whether there is anything of DeepSpeed's."""
        named = (self.models, self.shard_models, self.optims, self.expert_optims, self.experts, self.layers)
        return self.universal or any(named)

    def where(self, name: str) -> str:
        """A file of the step, as a path from root."""
        return f"{self.tag}/{name}" if self.tag else name


def find(path: Path) -> Files | None:
    """The files of the step that lies at path, or that its tracker names; None where nothing is DeepSpeed's.

    MissingFile where the tracker names a step that is not there, or no step at all; Unsafe where it leads outside.
    """
    if not path.is_dir():
        return None
    own = _in(path, path, "")
    if own.found:
        return own
    for tracker in TRACKERS:
        tag = _tracked(path / tracker)
        if tag is None:
            continue
        inner = _in(path, path / tag, tag, tracker) if tag else None
        if inner is not None and inner.found:
            return inner
        others = _others(path)
        if others or (tracker == "latest_universal" and tag) or tag.startswith("global_step"):
            raise _misled(path / tracker, tag, others)
    return None


def first_lost(numbers: Collection[int]) -> int:
    """The first number, from 0, that is not among them: whatever large ones a file's name may have."""
    known = set(numbers)
    return next(n for n in range(len(known) + 1) if n not in known)


def is_of_stage_three(path: str) -> bool:
    """Whether a model-states file is called as those of stage 3 are, of which every rank has one."""
    return _SHARD_MODEL.fullmatch(path.rpartition("/")[2]) is not None


def rank_of(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Which kind of file a name is, and whose: its numbers. None for other names, and for those of layers."""
    for kind, pattern in _RANKED.items():
        m = pattern.fullmatch(name)
        if m is not None:
            return kind, tuple(int(n or 0) for n in m.groups())
    return None


def _tracked(file: Path) -> str | None:
    """The one word in a tracker, "" where it is empty or holds something else; None where there is no such file."""
    try:
        if not file.is_file():
            return None
        text = read_whole(file).decode("utf-8").strip() if file.stat().st_size <= _TRACKER_LIMIT else ""
    except (OSError, Unrecognised, ValueError):
        return ""
    if not text.isprintable():
        return ""
    if text.startswith("/") or ".." in text.split("/"):
        raise Unsafe(
            f"{file.name} leads outside the checkpoint: {text!r}",
            where=str(file),
            fix="give the folder of the step itself",
            code="path-escapes",
        )
    return text


def _misled(tracker: Path, tag: str, others: list[str]) -> MissingFile:
    """The error for a tracker that names what is not there, or nothing (""): no loader takes another step by itself."""
    if tag:
        what = f"{tracker.name} names {tag}, which is not there, or holds no checkpoint"
        fix = "copy the step's folder, or give another one's path"
    else:
        nbytes = tracker.stat().st_size
        held = f"has {nbytes} bytes, which are no name" if nbytes else "is empty"
        what = f"{tracker.name} names no step: it {held}"
        fix = "write the step's name into it, or give the step's own folder"
    why = f"steps there: {', '.join(others) or 'none'}"
    return MissingFile(what, where=str(tracker), why=why, fix=fix, code="tracker-names-missing-step")


def _others(path: Path) -> list[str]:
    """Folders beside the tracker that hold a checkpoint of DeepSpeed's."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and _in(p, p, "").found)


def _in(root: Path, folder: Path, tag: str, tracker: str = "") -> Files:
    files = Files(root, tag, f"{tracker} names {tag}" if tracker else "the names of its files", bool(tracker))
    if not folder.is_dir():
        return files
    for file in sorted(p for p in folder.iterdir() if p.name.endswith(".pt")):
        _put(files, file.name)
    is_universal = any(p.is_dir() and (p / "fp32.pt").is_file() for p in _entries(folder / "zero"))
    return replace(files, universal=is_universal)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _put(files: Files, name: str) -> None:
    """Sort one file in. Damaged where two files are one rank's."""
    table: dict[Any, str]
    key: Any
    if m := _MODEL.fullmatch(name):
        table, key = files.models, int(m[1])
    elif m := _SHARD_MODEL.fullmatch(name):
        table, key = files.shard_models, (int(m[1]), int(m[2]))
    elif m := _OPTIM.fullmatch(name):
        table, key = files.optims, (int(m[1]), int(m[2]))
    elif m := _EXPERT_OPTIM.fullmatch(name):
        table, key = files.expert_optims, (int(m[1]), int(m[2]))
    elif m := _EXPERT.fullmatch(name):
        table, key = files.experts, (int(m[1] or 0), int(m[2]), int(m[3]))
    elif m := _LAYER.fullmatch(name):
        table, key = files.layers, (int(m[1]), m[2] or "")
    else:
        return
    if key in table:
        raise Damaged(
            "two files are the same rank's, of which one is left over from another save",
            where=files.where(name),
            why=f"the other is {table[key]}",
            fix="move the older one away",
            code="stale-file",
        )
    table[key] = files.where(name)
