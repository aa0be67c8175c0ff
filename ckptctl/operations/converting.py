"""convert: choose, lay out, plan, check, run, report. The same steps for every pair of formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.core.errors import Usage
from ckptctl.core.sizes import parse_size
from ckptctl.formats.target import Choices
from ckptctl.operations.content import content_of
from ckptctl.operations.conversion import check_flags
from ckptctl.operations.elsewhere import reads_hub
from ckptctl.operations.likeness import order_of, with_like
from ckptctl.operations.merging import merged
from ckptctl.operations.naming import for_target, named_for
from ckptctl.operations.opening import fingerprint, given_order, open_movable, pinned
from ckptctl.operations.planning import planned_job
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
    source, evidence = open_movable(src, reading)
    adapters: list[Line] = []
    if wanted.merge_adapter:
        source, adapters = merged(source, wanted.merge_adapter, wanted)
    source, naming = for_target(source, wanted)
    content, lines = content_of(source, wanted)
    content, renamings = named_for(content, naming)
    lines = [*adapters, *lines, *renamings]
    choices = Choices(
        parse_size(wanted.max_shard_size, "--max-shard-size"),
        wanted.dp or wanted.ep or 1,
        wanted.tp or 1,
        wanted.index_keys,
        wanted.bare,
        sharded=wanted.dp is not None,
        module_prefix=wanted.module_prefix,
        zero_stage=wanted.zero_stage or 2,
        universal=wanted.universal,
        pp=wanted.pp or 1,
        vpp=wanted.vpp or 1,
        ep=wanted.ep or 1,
        megatron_format=wanted.megatron_format,
        optimizer=wanted.optimizer,
        vocab_divisor=wanted.vocab_divisor,
        layer_spec=wanted.layer_spec,
        like=like,
        param_order=order_of(like, given_order(reading.param_order) if reading else ()),
    )
    if choices.max_shard_nbytes < 1:
        raise Usage("--max-shard-size must be at least 1 byte")
    mark = {**fingerprint(repr(wanted), reading), **pinned(source.root)}
    planned = planned_job(content, lines, wanted.to, choices, Path(dst), budget, mark)
    document: Document = {
        "schema": "ckptctl.convert/1",
        "source": source_document(source, evidence.why),
        "target": {"format": wanted.to, "path": str(dst)},
    }
    check = check_of(src, wanted, reading, running, document)
    return run_planned(planned, document, running, budget, progress, before_commit=check)
