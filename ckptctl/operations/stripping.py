"""strip: a checkpoint without parts of it, in its own format: the weights alone unless more is asked for.

The same steps as convert, over a source without the parts that go. Where weights lie in files of their own, these are
carried whole.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.core.errors import Unsupported, Usage
from ckptctl.formats import TARGETS
from ckptctl.formats.carry import Carried
from ckptctl.formats.target import Choices, Line, Written
from ckptctl.operations.content import content_of
from ckptctl.operations.conversion import Conversion
from ckptctl.operations.opening import fingerprint, open_movable
from ckptctl.operations.parts import Kept, kept, without
from ckptctl.operations.planning import planned_job
from ckptctl.operations.resharding import mesh_of
from ckptctl.operations.running import Running, budget_of, require_apart, run_planned, source_document

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.opening import Reading
    from ckptctl.operations.running import OnProgress

Document = dict[str, Any]
_SHARD_SIZE = 5_000_000_000


def strip(
    src: Path | str,
    dst: Path | str | None = None,
    reading: Reading | None = None,
    running: Running | None = None,
    *,
    keep: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    in_place: bool = False,
    yes: bool = False,
    progress: OnProgress | None = None,
) -> Document:
    """Write src without parts of it at dst, in its own format (schema ckptctl.strip/1).

    keep and drop are words of parts.PARTS and globs over tensor names; weights alone stay where neither is given.
    in_place replaces src by the result once that is whole; it needs yes. Unsupported for formats that are only read.
    """
    what = kept(keep, drop)
    running = running or Running()
    _require_target(src, dst, in_place=in_place, yes=yes, running=running)
    budget = budget_of(running)
    if reading is not None and reading.key_map is not None:
        raise Usage("--key-map: strip keeps the source's names", fix="convert gives new ones")
    full, evidence = open_movable(src, reading)
    target = Path(full.root).resolve() if dst is None else Path(dst)
    require_apart(running, Path(src), target)
    source, dropped = without(full, what)
    if not any(k.kind in (*WEIGHTS, MASTER) for k in source.tensors):
        globs = ", ".join(map(repr, (*what.globs, *what.drop_globs)))
        fix = "give patterns that leave some; see the names with `ckptctl ls`"
        raise Usage("nothing would be left of the weights", why=globs, fix=fix, code="no-tensors")
    written, to = _as_they_are(full, source) if what.weights_alone else None, _format(full, source, what)
    wanted = Conversion(to)
    content, lines = content_of(source, wanted, own_names=True)
    gone = {line.part for line in dropped} | {"optimizer state"}
    lines = [*(x for x in lines if not (x.fate == "absent" and x.part in gone) and x.fate != "dropped"), *dropped]
    choices = _choices(full, what, wanted)
    shaping = (lambda made: _in_place(made, full)) if dst is None else None
    planned = planned_job(
        content, lines, to, choices, target, budget, fingerprint(repr((wanted, what)), reading), written, shaping, full
    )
    document: Document = {
        "schema": "ckptctl.strip/1",
        "source": source_document(full, evidence.why),
        "target": {"format": full.format if written is not None else to, "path": str(target), "in_place": dst is None},
    }
    document["saved"] = _saved(full, sum(f.nbytes for f in planned.written.files))
    if dst is None:
        running = replace(running, overwrite=True)
    return run_planned(planned, document, running, budget, progress, in_place=dst is None)


def _require_target(src: Path | str, dst: Path | str | None, *, in_place: bool, yes: bool, running: Running) -> None:
    """Usage where it is not clear what is to be written, or what is to be replaced was not agreed to."""
    if in_place and dst is not None:
        raise Usage("--in-place and a target contradict each other", fix="leave one of them out")
    if dst is None and not in_place:
        raise Usage("strip needs a target", fix=f"name one, or give --in-place --yes to replace {src}")
    if in_place and not yes and not running.dry_run:
        raise Usage(
            f"--in-place replaces {src}: what goes is lost",
            fix="add --yes if that is meant; --dry-run shows what would go",
            code="needs-yes",
        )


def _format(full: Checkpoint, source: Checkpoint, what: Kept) -> str:
    """The target that the result is written as: the source's own. Unsupported where that is only read."""
    if full.format == "trainer" and source.optimizer is None:
        return "hf"  # a Trainer folder without the optimizer is a Hugging Face folder
    if full.format not in TARGETS:
        raise Unsupported(
            f"{full.format} checkpoints are read and not written by this version",
            where=full.root,
            fix="`ckptctl convert --to hf --no-optimizer` takes the weights out of it",
            code="not-written",
        )
    return full.format


def _choices(full: Checkpoint, what: Kept, wanted: Conversion) -> Choices:
    """The source's own layout."""
    mesh, stage = mesh_of(full, wanted), full.layout.get("zero_stage")
    is_folder = full.format == "lightning" and full.variant == "sharded"
    choices = Choices(
        _SHARD_SIZE,
        own_names=full.format in ("dcp", "torch")
        and wanted.to == full.format
        and full.variant not in ("ranks", "fsdp1", "verl"),
        zero_stage=2 if stage is None else stage,
        universal=full.variant == "universal",
        sharded=is_folder,
        weights_alone="optimizer" not in what.parts and "masters" not in what.parts,
    )
    return replace(choices, **mesh)  # type: ignore[arg-type]


# ---- files that are carried whole -----------------------------------------------------------------------------------


def _as_they_are(full: Checkpoint, source: Checkpoint) -> Written | None:
    """The files of the weights, whole, where no other part lies in them; None where the format mixes them.

    Files that say what the weights mean (indexes beside them, config, tokenizer) go with them.
    """
    if full.format not in TARGETS or not TARGETS[full.format].parts_apart or not Path(full.root).is_dir():
        return None
    kept_files, every = _holders(full, source.tensors), _holders(full, full.tensors)
    gone = _holders(full, [k for k in full.tensors if k not in source.tensors])
    if not kept_files or every is None or gone is None or kept_files & gone:
        return None
    # A rank's file may hold nothing but copies of what others have: it goes with the set that its role puts it in.
    data = {f.path for f in full.files if f.role == "data"}
    if data & gone and data - every:
        return None
    kept_files |= data - gone
    folders = {PurePosixPath(f).parent for f in kept_files}
    carried = Carried(full)
    for file in full.files:
        beside = file.role == "index" and PurePosixPath(file.path).parent in folders
        if file.path in kept_files or beside or file.role in ("config", "extra"):
            carried.add(file.path)
    line = Line("files", "carried", f"{len(carried.files)} files as they are: no other part lies in them")
    return Written(tuple(carried.files), True, (line,), carried.tensors, carried.sources)


def _holders(checkpoint: Checkpoint, keys: Any) -> set[str] | None:
    """The files that hold these tensors' bytes; None where one has no bytes, so that it is not known which it is in."""
    numbers: set[int] = set()
    for key in keys:
        tensor = checkpoint.tensors[key]
        if tensor.made is not None or not any(len(table) for table in tensor.pieces):
            return None
        for table in tensor.pieces:
            numbers |= {int(n) for n in set(table.source.tolist())}
    return {checkpoint.sources[n].path for n in numbers}


# ---- in place -------------------------------------------------------------------------------------------------------


def _in_place(written: Written, full: Checkpoint) -> Written:
    """The result as what takes the source's place. Unsupported where that would lose files that are not the source's.

    A run's folder that is written for a step becomes the step's folder, where that is the source.
    """
    root = Path(full.root)
    if written.folder != root.is_dir():
        raise Unsupported(
            "--in-place: the result is a file, and the source is a folder" if root.is_dir()
            else "--in-place: the result is a folder, and the source is a file",
            where=full.root,
            fix="name a target",
            code="in-place",
        )  # fmt: skip
    if not written.folder:
        return written
    step, files = f"{root.name}/", written.files
    inner = [f for f in files if f.path.startswith(step)]
    if inner and all("/" not in f.path for f in files if not f.path.startswith(step)):
        files = tuple(replace(f, path=f.path.removeprefix(step)) for f in inner)
    known = {f.path for f in full.files} | {f.path for f in files}
    strangers = sorted(
        path
        for folder, inside, names in os.walk(root)
        for path in (
            Path(folder, n).relative_to(root).as_posix()
            for n in (*names, *(d for d in inside if Path(folder, d).is_symlink()))
        )
        if path not in known
    )
    if strangers:
        raise Unsupported(
            f"--in-place: {len(strangers)} files in the folder are not the checkpoint's, and would be lost",
            where=full.root,
            why=", ".join(strangers[:4]) + (", ..." if len(strangers) > 4 else ""),
            fix="move them away, or name a target",
            code="in-place",
        )
    return replace(written, files=files)


def _saved(full: Checkpoint, after: int) -> Document:
    before = sum(f.nbytes for f in full.files)
    return {"before_bytes": before, "after_bytes": after, "bytes": before - after}
