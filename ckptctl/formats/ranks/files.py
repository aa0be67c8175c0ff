"""Which files of a folder are a set of ranks' files, by their names; whether the set is whole. Opens none.

Known names: verl's `model_world_size_W_rank_R.pt`, `optim_...`, `extra_state_...`, and any name with `rank` and a
number in it (`rank0.pt`, `checkpoint_rank_3.pt`, `model-rank-1.pth`).
Source: verl b178a3c, utils/checkpoint/fsdp_checkpoint_manager.py, FSDPCheckpointManager.save_checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, MissingFile

if TYPE_CHECKING:
    from pathlib import Path

_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_ANY = re.compile(r"(.*?)(?<![A-Za-z])rank[_-]?(\d{1,9})(?!\d)(.*)\.(?:pt|pth|bin|ckpt)", re.IGNORECASE)
_OTHERS = ("mp_", "pp_", "tp_", "dp_", "ep_", "local_")
"""What stands before `rank` in names of DeepSpeed and Megatron: those are sets of another kind."""
_LISTED = 8


@dataclass(frozen=True, slots=True)
class RankFiles:
    """A set: for each part of it (a name with the rank's number left out), the file of each rank.

    is_verl: named as verl does, so that the parts are model, optim and extra_state. world is what the names say, else
    None.
    """

    parts: dict[str, dict[int, str]]
    is_verl: bool = False
    world: int | None = None

    @property
    def ranks(self) -> list[int]:
        """All ranks by number."""
        return sorted({r for files in self.parts.values() for r in files})

    @property
    def first(self) -> str:
        """A file's name, for messages."""
        return next(iter(next(iter(self.parts.values())).values()))


def rank_files(folder: Path) -> RankFiles | None:
    """The set of ranks' files in a folder, None where there is none.

    Damaged where files of several world sizes lie side by side.
    """
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    verl = [m for m in map(_VERL.fullmatch, names) if m]
    if verl:
        worlds = sorted({int(m[2]) for m in verl})
        if len(worlds) > 1:
            raise Damaged(
                "rank files of different world sizes lie in one folder",
                where=str(folder),
                why=f"world sizes {', '.join(map(str, worlds))}, such as {verl[0][0]} and {verl[-1][0]}",
                fix="keep the files of one save in the folder",
                code="ranks-mixed",
            )
        parts: dict[str, dict[int, str]] = {}
        for m in verl:
            parts.setdefault(m[1], {})[int(m[3])] = m[0]
        return RankFiles(parts, True, worlds[0])
    parts = {}
    for m in [m for m in map(_ANY.fullmatch, names) if m]:
        if not m[1].lower().endswith(_OTHERS):
            parts.setdefault(f"{m[1]}*{m[3]}", {})[int(m[2])] = m[0]
    return RankFiles(parts) if parts else None


def require_whole(files: RankFiles, folder: str) -> None:
    """MissingFile where a rank's file is not there, Damaged where there is one too many, as far as names tell."""
    first = 0 if files.is_verl or 0 in files.ranks else min(files.ranks[0], 1)
    world = files.world if files.world is not None else files.ranks[-1] + 1 - first
    wanted = range(first, first + world)
    for part, by_rank in files.parts.items():
        extra = sorted(set(by_rank) - set(wanted))
        if extra:
            raise Damaged(
                f"{by_rank[extra[0]]} is of a rank that the set does not have",
                where=folder,
                why=f"its ranks are {first} to {first + world - 1}",
                fix="keep the files of one save in the folder",
                code="ranks-mixed",
            )
        if len(by_rank) < world:
            missing = [r for r in wanted if r not in by_rank]
            listed = ", ".join(map(str, missing[:_LISTED])) + (", ..." if len(missing) > _LISTED else "")
            raise missing_ranks(f"{part} of rank {listed}", folder, f"{len(by_rank)} of {world} files are there")


def missing_ranks(what: str, folder: str, why: str) -> MissingFile:
    """The error for ranks whose files are not there."""
    return MissingFile(
        f"the file with {what} is missing",
        where=folder,
        why=why,
        fix="copy the files of all ranks: each holds a part of every tensor",
        code="rank-missing",
    )
