"""reshard: a checkpoint in its own format under another layout. What no flag changes stays as the source has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported, Usage
from ckptctl.formats import TARGETS
from ckptctl.operations.content import content_of
from ckptctl.operations.conversion import Conversion, check_flags
from ckptctl.operations.likeness import with_like
from ckptctl.operations.naming import fitting_config
from ckptctl.operations.opening import Reading, fingerprint, open_movable
from ckptctl.operations.planning import choices_of, planned_job
from ckptctl.operations.running import Running, budget_of, check_of, require_apart, run_planned, source_document

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.running import Document, OnProgress


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
    source, evidence = open_movable(src, reading)
    target = TARGETS.get(source.format)
    if target is None or not target.reshards:
        raise Unsupported(
            f"a {source.format} checkpoint has no layout to change",
            where=source.root,
            fix="`ckptctl convert` writes it in another format",
        )
    asked = {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "zero_stage": zero_stage, "universal": universal}
    for name, value in {**asked, **flags, "max_shard_size": max_shard_size}.items():
        if value is not None and value is not False and name not in target.reshards:
            flag = f"--{name.replace('_', '-')}"
            raise Usage(f"{flag} does not apply to {source.format}", fix=f"leave {flag} out")
    for name in sorted(target.reshards - target.flags):  # axes that the source may have, and that are not written
        if asked.get(name) not in (None, 1):
            raise Unsupported(
                f"--{name} {asked[name]}: {target.called} is not written with more than one rank of that axis",
                fix=f"leave --{name} out, or give 1",
            )
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
    source = fitting_config(source)
    wanted, like = with_like(wanted)
    if "zero_stage" in target.reshards:
        own_stage = None if wanted.universal else source.layout.get("zero_stage")
        stage = own_stage if wanted.zero_stage is None else wanted.zero_stage
        wanted = replace(wanted, zero_stage=stage, dp=wanted.dp or source.layout.get("dp"))
    content, lines = content_of(source, wanted, own_names=True)
    mesh = mesh_of(source, wanted)
    choices = replace(choices_of(wanted, like, reading), own_names=target.own_names, **mesh)  # type: ignore[arg-type]
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
    check = check_of(src, wanted, reading, running, document)
    return run_planned(planned, document, running, budget, progress, before_commit=check)


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
