"""convert: choose, lay out, plan, check, run, report. The same steps for every pair of formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.operations.content import content_of
from ckptctl.operations.conversion import check_flags
from ckptctl.operations.elsewhere import reads_hub
from ckptctl.operations.likeness import with_like
from ckptctl.operations.merging import merged
from ckptctl.operations.naming import for_target, named_for
from ckptctl.operations.opening import fingerprint, open_movable, pinned
from ckptctl.operations.planning import choices_of, planned_job
from ckptctl.operations.running import Running, budget_of, check_of, require_apart, run_planned, source_document

if TYPE_CHECKING:
    from ckptctl.formats.target import Line
    from ckptctl.operations.conversion import Conversion
    from ckptctl.operations.opening import Reading
    from ckptctl.operations.running import Document, OnProgress


@reads_hub()
def convert(
    src: Path | str,
    dst: Path | str,
    wanted: Conversion,
    reading: Reading | None = None,
    running: Running | None = None,
    *,
    progress: OnProgress | None = None,
) -> Document:
    """Convert src to another format at dst. Returns the document that `--json` prints (schema ckptctl.convert/1).

    Raises Usage (exit 2), StateNotCarried, MissingFact, Damaged, Unsafe, NoSpace, ... (exit 3); on any of them nothing
    stands at dst.
    """
    check_flags(wanted)
    wanted, like = with_like(wanted)
    running = running or Running()
    budget = budget_of(running)
    require_apart(running, Path(src), Path(dst))
    source, evidence = open_movable(src, reading, no_optimizer=wanted.no_optimizer)
    adapters: list[Line] = []
    if wanted.merge_adapter:
        source, adapters = merged(source, wanted.merge_adapter, wanted)
    source, naming = for_target(source, wanted)
    content, lines = content_of(source, wanted)
    content, renamings = named_for(content, naming)
    lines = [*adapters, *lines, *renamings]
    choices = replace(
        choices_of(wanted, like, reading),
        dp=wanted.dp or wanted.ep or 1,
        tp=wanted.tp or 1,
        pp=wanted.pp or 1,
        vpp=wanted.vpp or 1,
        ep=wanted.ep or 1,
        sharded=wanted.dp is not None,
    )
    mark = {**fingerprint(repr(wanted), reading), **pinned(source.root)}
    planned = planned_job(content, lines, wanted.to, choices, Path(dst), budget, mark)
    document: Document = {
        "schema": "ckptctl.convert/1",
        "source": source_document(source, evidence.why),
        "target": {"format": wanted.to, "path": str(dst)},
    }
    check = check_of(src, wanted, reading, running, document)
    return run_planned(planned, document, running, budget, progress, before_commit=check)
