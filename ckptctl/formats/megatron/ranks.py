"""The folders of a classic checkpoint: which rank each is, and whether all are there. Names only."""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.errors import Damaged, MissingFile, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptctl.formats.megatron.facts import Facts

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
OPTIMIZER_FILE = "distrib_optim.pt"
_FOLDER = re.compile(r"(?:mp_rank|tp_rank)_\d{2,}(?:_(?:pp_rank_)?\d{3,}){0,2}")


class Rank(NamedTuple):
    """Which rank a folder is."""

    tp: int
    pp: int
    ep: int


def folder_name(rank: Rank, pp: int, ep: int) -> str:
    """A rank's folder in a run of pp stages and ep expert-parallel ranks.

    Source: Megatron-LM core_v0.16.1, megatron/training/checkpointing.py, get_checkpoint_name.
    """
    name = f"mp_rank_{rank.tp:02d}"
    name += f"_{rank.pp:03d}" if pp > 1 else ""
    return name + (f"_{rank.ep:03d}" if ep > 1 else "")


def folder_names(rank: Rank, facts: Facts) -> tuple[str, str]:
    """What a rank's folder may be called: Megatron's name, and NeMo's, tp_rank_TT_pp_rank_PPP."""
    return folder_name(rank, facts.pp, facts.ep), f"tp_rank_{rank.tp:02d}_pp_rank_{rank.pp:03d}"


def rank_folders(path: Path) -> list[Path]:
    """The folders of ranks, by name."""
    return sorted(p for p in path.iterdir() if _FOLDER.fullmatch(p.name) and p.is_dir())


def model_file(folder: Path) -> Path | None:
    """A rank's file of weights, None where it has none."""
    return next((folder / n for n in MODEL_FILES if (folder / n).is_file()), None)


def by_rank(path: Path, facts: Facts) -> dict[Rank, Path]:
    """The file of weights of every rank, in order. MissingFile naming those that are not there; Damaged for more."""
    found = {p.name: p for p in rank_folders(path)}
    out: dict[Rank, Path] = {}
    missing: list[str] = []
    places = expert_places(facts, str(path))
    for pp, (ep, tp) in product(range(facts.pp), places):
        name = _known(found, Rank(tp, pp, ep), facts)
        file = model_file(found.pop(name)) if name in found else None
        if file is None:
            missing.append(name)
        else:
            out[Rank(tp, pp, ep)] = file
    if missing:
        count, why = facts.pp * len(places), f"args say {mesh_said(facts)}"
        raise ranks_missing(missing, count, str(path), why, "copy their folders")
    if found:
        raise Damaged(
            f"{', '.join(list(found)[:4])}: no rank of {mesh_said(facts)}",
            where=str(path),
            why="args of the first rank say that mesh",
            fix="take the files of one save alone",
            code="ranks-differ",
        )
    return out


def ranks_missing(missing: Sequence[str], count: int, where: str, why: str, fix: str = "") -> MissingFile:
    """The error for ranks of which nothing is there: missing are the names of what each would be in."""
    what = f"{len(missing)} of {count} ranks are missing: {', '.join(missing[:4])}"
    return MissingFile(what, where=where, why=why, fix=fix, code="ranks-missing")


def mesh_said(facts: Facts) -> str:
    """The mesh, for messages."""
    return f"tp={facts.tp}, pp={facts.pp}, ep={facts.ep}"


def expert_places(facts: Facts, where: str) -> list[tuple[int, int]]:
    """(expert-parallel rank, tensor-parallel rank) of a stage's files.

    Every pair has one, but where experts are cut over fewer ranks than the rest: ranks are then counted through
    experts' ranks and within each through its own, and of those that hold the same experts the first one writes.
    Unsupported where the real files would not hold all. Source: core_v0.16.1, core/parallel_state.py,
    initialize_model_parallel (expert groups, order etp-ep-dp); training/checkpointing.py, save_checkpoint
    (get_expert_data_parallel_rank() == 0).
    """
    tp, ep, etp = facts.tp, facts.ep, facts.etp
    if etp == tp:
        return list(product(range(ep), range(tp)))
    if etp > tp or tp % etp or etp * ep < tp:
        raise Unsupported(
            f"experts are cut over {etp} tensor-parallel ranks, the rest over {tp}, and there are {ep} expert-parallel "
            "ranks",
            where=where,
            why="Megatron writes a classic file for each rank that holds other experts: these hold not all of the rest",
            fix="save as torch_dist, or with --expert-tensor-parallel-size equal to --tensor-model-parallel-size",
        )
    return [(r // etp, r % tp) for r in range(etp * ep)]


def _known(found: dict[str, Path], rank: Rank, facts: Facts) -> str:
    """A rank's folder as it is called here."""
    names = folder_names(rank, facts)
    return next((n for n in names if n in found), names[0])
