"""How a planned conversion is run, and the document about it: the same for convert, reshard and strip."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl import __version__
from ckptctl.core.errors import Usage
from ckptctl.core.sizes import parse_size
from ckptctl.execute import Budget, Outcome, Progress, reread, run, space

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.conversion import Conversion
    from ckptctl.operations.opening import Reading
    from ckptctl.operations.planning import Planned
    from ckptctl.plan.planner import Plan

Document = dict[str, Any]
OnProgress = Callable[[Progress], None]
MEMORY_FLOOR = 16 << 20
"""Bytes below which nothing runs."""


@dataclass(frozen=True, slots=True)
class Running:
    """How a conversion is run. memory is text such as 512MiB; jobs 0 chooses."""

    dry_run: bool = False
    plan_out: Path | str | None = None
    overwrite: bool = False
    resume: bool = False
    jobs: int = 0
    memory: str = "512MiB"
    report: Path | str | None = None
    verify: bool = False
    """Train the next step from the source and from the result before the result has its name."""


def budget_of(running: Running) -> Budget:
    """Memory and threads as the executor takes them. Usage for less memory than anything needs."""
    memory = parse_size(running.memory, "--memory")
    if memory < MEMORY_FLOOR:
        raise Usage(f"--memory {running.memory} is too little", why=f"{memory} bytes", fix="give at least 16MiB")
    return Budget(memory, running.jobs)


def require_apart(running: Running, src: Path, dst: Path) -> None:
    """Usage where --report or --plan-out would overwrite source or target, or cannot be written."""
    for flag, given in (("--report", running.report), ("--plan-out", running.plan_out)):
        if given is None:
            continue
        path = Path(given).resolve()
        for what, other in (("source", src.resolve()), ("target", dst.resolve())):
            if path == other or other in path.parents:
                raise Usage(f"{flag} {given} lies in the {what}", fix="name a file elsewhere")
        if path.is_dir() or not path.parent.is_dir():
            raise Usage(
                f"{flag} {given} cannot be written",
                why="its folder is not there, or it is a folder itself",
                fix="name a file in a folder that is there",
            )


def run_planned(
    planned: Planned,
    document: Document,
    running: Running,
    budget: Budget,
    progress: OnProgress | None,
    *,
    in_place: bool = False,
    before_commit: Callable[[Path], None] | None = None,
) -> Document:
    """Run what is planned, where it is no dry run, and complete the document. in_place: the target is the source.

    before_commit gets the finished result before it has its name; what it raises stops that.
    """
    document["fidelity"] = [{"part": line.part, "fate": line.fate, "detail": line.detail} for line in planned.lines]
    spent = planned.account
    document["source_bytes"] = {
        "total": spent.total_nbytes,
        "used": spent.used_nbytes,
        "dropped": dict(spent.dropped_nbytes),
        "gaps": spent.gap_nbytes,
        "gap_reason": planned.content.source.gap_reason,
    }
    document["warnings"] = list(planned.content.source.warnings)
    document["plan"] = _plan_summary(planned, budget)
    if planned.content.source.key_map:
        document["key_map"] = [{"to": new, "from": list(olds)} for new, olds in planned.content.source.key_map]
    if running.plan_out is not None:
        _write_plan(Path(running.plan_out), planned.plan)
    document["dry_run"] = running.dry_run
    if not running.dry_run:
        outcome = run(
            planned.job,
            budget,
            resume=running.resume,
            overwrite=running.overwrite,
            in_place=in_place,
            progress=progress,
            before_commit=before_commit,
        )
        document["result"] = _result(outcome)
    if running.report is not None:
        Path(running.report).write_text(json.dumps(document, indent=2) + "\n")
    return document


def check_of(
    src: Path | str, wanted: Conversion, reading: Reading | None, running: Running, document: Document
) -> Callable[[Path], None] | None:
    """What --verify does with the finished result before it has its name; None without the flag."""
    if not running.verify:
        return None
    from ckptctl.operations.verify.before import verified_before  # its parts are for nobody else here

    return verified_before(src, wanted, reading, running, document)


def _plan_summary(planned: Planned, budget: Budget) -> Document:
    totals = planned.totals
    need, free = space(planned.job)
    return {
        "files": len(planned.plan.files),
        "extents": totals.extents,
        "read_bytes": totals.read_nbytes,
        "written_bytes": totals.written_nbytes,
        "copies": totals.moves,
        "strided_copies": totals.strided,
        "shortest_run_bytes": totals.shortest_run,
        "casts": dict(totals.casts),
        "merged_elements": totals.merged,
        "reread_factor": round(reread(planned.job, budget), 3),
        "index_memory_bytes": planned.plan.index.nbytes,
        "memory_bytes": budget.memory_nbytes,
        "space_needed_bytes": need,
        "space_free_bytes": free,
    }


def _result(outcome: Outcome) -> Document:
    return {
        "seconds": round(outcome.seconds, 3),
        "written_bytes": outcome.written_nbytes,
        "read_bytes": outcome.read_nbytes,
        "resumed_bytes": outcome.resumed_nbytes,
        "version": __version__,
    }


def _write_plan(path: Path, plan: Plan) -> None:
    """The plan as JSON lines: its files, then every extent with its steps."""
    with path.open("w") as out:
        for number, file in enumerate(plan.files):
            out.write(json.dumps({"file": number, "path": file.path, "nbytes": file.nbytes}) + "\n")
        for extent in plan.extents():
            steps = [
                [type(s).__name__, *(x.hex() if isinstance(x, bytes) else x for x in s)] for s in plan.extent(extent)
            ]
            out.write(json.dumps({"extent": list(extent), "steps": steps}, default=str) + "\n")


def source_document(source: Checkpoint, why: str) -> Document:
    """What a report says of its source."""
    return {
        "path": source.root,
        "format": source.format,
        "variant": source.variant,
        "recognised": why,
        "step": source.step,
    }
