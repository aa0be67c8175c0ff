"""convert and reshard: choose, lay out, plan, check, run, report. The same steps for every pair of formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl import __version__
from ckptctl.core.errors import NoSpace, Unsupported, Usage
from ckptctl.core.sizes import parse_size
from ckptctl.core.tensor import with_operands
from ckptctl.execute import Budget, Job, Outcome, Progress, fitted, reread, run, space
from ckptctl.formats import TARGETS
from ckptctl.formats.target import Choices, Content, Line, Written
from ckptctl.operations.content import Conversion, check_flags, content_of
from ckptctl.operations.masters import count_of_updates, require_equal_steps, require_rounded_masters
from ckptctl.operations.merging import merged
from ckptctl.operations.naming import for_target, named_for
from ckptctl.operations.opening import (
    Reading,
    given_order,
    open_checkpoint,
    require_one_source,
    require_plain,
    require_safe,
    require_tensors,
)
from ckptctl.operations.ties import require_equal_copies
from ckptctl.plan.account import Account, account
from ckptctl.plan.check import Totals, check, require_whole
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import EXTENT_NBYTES, Plan
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint

Document = dict[str, Any]
OnProgress = Callable[[Progress], None]


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


@dataclass(frozen=True)
class Planned:
    """A conversion that is ready to run."""

    content: Content
    written: Written
    plan: Plan
    totals: Totals
    job: Job
    account: Account
    lines: tuple[Line, ...]


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
    running = running or Running()
    budget = budget_of(running)
    require_apart(running, Path(src), Path(dst))
    source, evidence = opened(src, reading)
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
        param_order=given_order(reading.param_order) if reading else (),
    )
    if choices.max_shard_nbytes < 1:
        raise Usage("--max-shard-size must be at least 1 byte")
    planned = planned_job(content, lines, wanted.to, choices, Path(dst), budget, fingerprint(repr(wanted), reading))
    document: Document = {
        "schema": "ckptctl.convert/1",
        "source": source_document(source, evidence.why),
        "target": {"format": wanted.to, "path": str(dst)},
    }
    return run_planned(planned, document, running, budget, progress)


def reshard(
    src: Path | str,
    dst: Path | str,
    reading: Reading | None = None,
    running: Running | None = None,
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    zero_stage: int | None = None,
    universal: bool = False,
    max_shard_size: str | None = None,
    progress: OnProgress | None = None,
    **flags: Any,
) -> Document:
    """Write src in its own format under another layout at dst (schema ckptctl.reshard/1). What no flag changes is kept.

    Unsupported for formats without a layout to change; otherwise as convert.
    """
    if reading is not None and reading.key_map is not None:
        raise Usage("--key-map: reshard keeps the source's names", fix="convert gives new ones")
    running = running or Running()
    budget = budget_of(running)
    require_apart(running, Path(src), Path(dst))
    source, evidence = opened(src, reading)
    target = TARGETS.get(source.format)
    if target is None or not target.reshards:
        raise Unsupported(
            f"a {source.format} checkpoint has no layout to change",
            where=source.root,
            fix="`ckptctl convert` writes it in another format",
        )
    asked = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "zero_stage": zero_stage, "universal": universal or None}
    for name, value in {**asked, **flags, "max_shard_size": max_shard_size}.items():
        if value is not None and name not in target.reshards:
            flag = f"--{name.replace('_', '-')}"
            raise Usage(f"{flag} does not apply to {source.format}", fix=f"leave {flag} out")
    for name in sorted(target.reshards - target.flags):  # axes that the source may have, and that are not written
        if asked.get(name) not in (None, 1):
            raise Unsupported(
                f"--{name} {asked[name]}: {target.called} is not written with more than one rank of that axis",
                fix=f"leave --{name} out, or give 1",
            )
    if "zero_stage" in target.reshards:
        zero_stage = zero_stage or (None if universal else source.layout.get("zero_stage")) or 2
        dp = dp or source.layout.get("dp")
    wanted = Conversion(
        source.format,
        dp=dp,
        tp=tp if "tp" in target.flags else None,
        pp=pp if "pp" in target.flags else None,
        ep=ep,
        max_shard_size=max_shard_size or "5GB",
        zero_stage=zero_stage,
        universal=universal,
        **flags,
    )
    check_flags(wanted)
    content, lines = content_of(source, wanted, own_names=True)
    mesh = mesh_of(source, wanted)
    choices = Choices(
        parse_size(wanted.max_shard_size, "--max-shard-size"),
        own_names=target.own_names,
        zero_stage=zero_stage or 2,
        universal=universal,
        megatron_format=wanted.megatron_format,
        optimizer=wanted.optimizer,
        vocab_divisor=wanted.vocab_divisor,
        layer_spec=wanted.layer_spec,
        param_order=given_order(reading.param_order) if reading else (),
    )
    choices = replace(choices, **mesh)  # type: ignore[arg-type]
    planned = planned_job(content, lines, source.format, choices, Path(dst), budget, fingerprint(repr(wanted), reading))
    document: Document = {
        "schema": "ckptctl.reshard/1",
        "source": source_document(source, evidence.why),
        "target": {
            "format": source.format,
            "path": str(dst),
            "layout": {a: n for a, n in mesh.items() if a in target.reshards},
        },
    }
    return run_planned(planned, document, running, budget, progress)


def mesh_of(source: Checkpoint, wanted: Conversion) -> dict[str, int]:
    """The result's axes: the source's own where no flag says otherwise. --dp alone is a DCP's mesh of one axis."""
    own = source.layout
    dp = wanted.dp or own.get("dp") or own.get("world_size") or 1
    if "vpp" not in TARGETS[source.format].reshards:
        ep = {"ep": wanted.ep or own.get("ep") or 1} if "ep" in TARGETS[source.format].flags else {}
        return {"dp": dp, "tp": wanted.tp or (1 if wanted.dp else own.get("tp") or 1), **ep}
    axes = {a: getattr(wanted, a) or own.get(a) or 1 for a in ("tp", "pp", "vpp", "ep")}
    if wanted.pp is not None and wanted.vpp is None and wanted.pp == 1:
        axes["vpp"] = 1  # one stage has no chunks of its own
    if wanted.dp is None and dp % axes["ep"]:
        dp = axes["ep"]
    return {"dp": dp, **axes}


def opened(src: Path | str, reading: Reading | None) -> tuple[Checkpoint, Any]:
    """A source that may be converted: safe, with tensors, one checkpoint, without slices that are unknown."""
    source, evidence = open_checkpoint(src, reading)
    require_safe(source)
    require_tensors(source)
    require_one_source(evidence)
    require_plain(source)
    return source, evidence


def budget_of(running: Running) -> Budget:
    """Memory and threads as the executor takes them. Usage for less memory than anything needs."""
    memory = parse_size(running.memory, "--memory")
    if memory < MEMORY_FLOOR:
        raise Usage(f"--memory {running.memory} is too little", why=f"{memory} bytes", fix="give at least 16MiB")
    return Budget(memory, running.jobs)


MEMORY_FLOOR = 16 << 20


def source_document(source: Checkpoint, why: str) -> Document:
    """What a report says of its source."""
    return {
        "path": source.root,
        "format": source.format,
        "variant": source.variant,
        "recognised": why,
        "step": source.step,
    }


def fingerprint(wanted: str, reading: Reading | None) -> dict[str, str]:
    """What a resumed job must have in common with the interrupted one, besides the source's bytes and the plan."""
    return {"conversion": wanted, "reading": repr(reading or Reading())}


def planned_job(
    content: Content,
    lines: list[Line],
    to: str,
    choices: Choices,
    dst: Path,
    budget: Budget,
    mark: dict[str, str],
    written: Written | None = None,
    shaped: Callable[[Written], Written] | None = None,
    whole: Checkpoint | None = None,
) -> Planned:
    """Lay out, plan and check. Nothing is written.

    written is the result where it is laid out already; shaped has the last word about its files; whole is the source
    before parts of it were left out, for the account of its bytes.
    """
    try:
        return _checked(content, lines, to, choices, dst, budget, mark, written, shaped, whole or content.source)
    except RecursionError as err:
        raise Unsupported(
            "a value of the training state is nested too deep, or holds itself",
            where=content.source.root,
            fix="leave it out where the checkpoint is made; --no-optimizer lets scheduler, random state, counters go",
        ) from err


def _checked(
    content: Content,
    lines: list[Line],
    to: str,
    choices: Choices,
    dst: Path,
    budget: Budget,
    mark: dict[str, str],
    written: Written | None,
    shaped: Callable[[Written], Written] | None,
    whole: Checkpoint,
) -> Planned:
    source = content.source
    if written is None:
        if TARGETS[to].one_step:
            choices = replace(choices, updates=count_of_updates(content, budget))
        made: Written = import_module(f"ckptctl.formats.{to}.write").write(content, choices)
        written = made
    written = written if shaped is None else shaped(written)
    tensors = {**with_operands(source.tensors), **written.tensors}
    sources = (*source.sources, *written.sources)
    items = [*content.weights.values(), *content.states.values(), *content.held.values()]
    index = SourceIndex(tensors, sources)
    require_whole(index, {i.key for i in items})
    require_equal_copies(content, index, budget)
    require_rounded_masters(content, budget, TARGETS[to])
    if TARGETS[to].one_step_a_group:
        require_equal_steps(content, budget)
    casts = frozenset(Cast(i.tensor.held.name, i.dtype.name) for i in items if i.tensor.held.name != i.dtype.name)
    casts |= {Cast(*pair) for pair in written.casts}
    plan = Plan(written.files, index, casts, _extent_nbytes(budget))
    _require_possible(plan, dst)
    totals = check(plan)
    job = fitted(Job(plan, totals, sources, Path(source.root), dst, written.folder, mark), budget)
    used = {stored.key for i in items for stored in i.tensor.stored} | set(written.tensors)
    counted = {**with_operands(whole.tensors), **tensors}
    spent = account({k: t for k, t in counted.items() if not t.made}, sources, _sizes(source), used, whole.ties)
    told = [*(line for line in lines if line.part not in written.decided), *written.lines]
    return Planned(content, written, job.plan, job.totals, job, spent, tuple(told))


def _sizes(source: Checkpoint) -> dict[str, int]:
    """Bytes of each file by the path that sources have: a single file's is empty."""
    sizes = {f.path: f.nbytes for f in source.files}
    if not any(s.path == "" for s in source.sources):
        return sizes
    named = {s.path: sizes[s.path] for s in source.sources if s.path in sizes}  # adapters, by their own paths
    return {**named, "": sum(sizes.values()) - sum(named.values())}


def _extent_nbytes(budget: Budget) -> int:
    """Extents small enough that several fit the budget with their windows."""
    return max(1 << 20, min(EXTENT_NBYTES, budget.memory_nbytes // 16))


def _require_possible(plan: Plan, dst: Path) -> None:
    """NoSpace for a result larger than the whole disk, before it is planned: an expanded tensor may claim any size."""
    need = sum(f.nbytes for f in plan.files)
    place = next(p for p in (dst.absolute(), *dst.absolute().parents) if p.exists())
    total = shutil.disk_usage(place).total
    if need > total:
        raise NoSpace(
            "the result would be larger than the disk",
            where=str(dst),
            why=f"it has {need} bytes, the disk {total}",
            fix="check the shapes with `ckptctl ls`; choose another disk",
        )


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
) -> Document:
    """Run what is planned, where it is no dry run, and complete the document. in_place: the target is the source."""
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
        )
        document["result"] = _result(outcome)
    if running.report is not None:
        Path(running.report).write_text(json.dumps(document, indent=2) + "\n")
    return document


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
