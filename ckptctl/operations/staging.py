"""The Hugging Face folder that is pushed: the source's own files, or a conversion in a folder for the time of the push.

A conversion that was interrupted, or could not be sent, is found again by the same command.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl import __version__, formats
from ckptctl.core.errors import CkptError, Interrupted, Unrecognised, Usage
from ckptctl.formats import Hints
from ckptctl.operations.conversion import Conversion
from ckptctl.operations.converting import convert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.opening import Reading
    from ckptctl.operations.pushing import Push
    from ckptctl.operations.running import Running

Document = dict[str, Any]


@dataclass(slots=True)
class Stage:
    """What is pushed: names of files in a folder. folder is None where a conversion is only planned."""

    folder: Path | None
    files: list[str]
    fidelity: list[Document] = field(default_factory=list)
    converted: bool = False
    is_trainer: bool = False
    config: Mapping[str, Any] | None = None
    adapter: Mapping[str, Any] | None = None
    planned_nbytes: int = 0


@contextmanager
def staged(
    src: Path | str,
    checkpoint: Checkpoint,
    wanted: Push,
    reading: Reading,
    running: Running,
    progress: Callable[[Any], None] | None,
) -> Iterator[Stage]:
    """The files to be pushed. What was converted is removed at the end, kept where the Hub could not be reached."""
    own = _as_it_is(checkpoint, wanted, reading)
    if own is not None:
        yield own
        return
    has_config = checkpoint.facts.config is not None or checkpoint.adapter is not None
    what = _conversion(wanted, bare=not has_config)
    if running.dry_run:
        with tempfile.TemporaryDirectory(prefix="ckptctl-push-") as folder:
            document = convert(src, Path(folder, "out"), what, reading, running)
        yield Stage(None, [], document["fidelity"], True, planned_nbytes=document["plan"]["written_bytes"])
        return
    home = _home(src, checkpoint, wanted, repr((what, reading)))
    held = _locked(home)
    try:
        out, note = home / "out", home / "convert.json"
        if out.is_dir() and note.is_file():
            document = json.loads(note.read_bytes())
        else:
            again = replace(running, resume=any(home.iterdir()), report=None, plan_out=None, overwrite=False)
            document = _converted(src, out, what, reading, again, progress)
            draft = note.with_suffix(".tmp")
            draft.write_text(json.dumps(document))
            draft.replace(note)
        files = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
        yield Stage(
            out,
            files,
            document["fidelity"],
            converted=True,
            is_trainer=wanted.include_state,
            config=checkpoint.facts.config,
            adapter=checkpoint.adapter,
        )
    except BaseException as err:
        if not isinstance(err, Interrupted | KeyboardInterrupt):
            shutil.rmtree(home, ignore_errors=True)
        raise
    else:
        shutil.rmtree(home, ignore_errors=True)
    finally:
        os.close(held)


def _locked(home: Path) -> int:
    """A descriptor that holds a folder for this process. CkptError where another one has it."""
    held = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(held)
        what = "another push of the same checkpoint is under way"
        raise CkptError(what, where=str(home), fix="wait for it", code="in-use") from err
    return held


def _converted(
    src: Path | str,
    out: Path,
    what: Any,
    reading: Reading,
    running: Running,
    progress: Callable[[Any], None] | None,
) -> Document:
    """The conversion's document; begun anew where an interrupted one cannot be gone on with."""
    try:
        return convert(src, out, what, reading, running, progress=progress)
    except CkptError as err:
        if not running.resume or err.code != "source-changed":
            raise
    for left in out.parent.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return convert(src, out, what, reading, replace(running, resume=False), progress=progress)


def _as_it_is(checkpoint: Checkpoint, wanted: Push, reading: Reading) -> Stage | None:
    """The source's own files where they are a Hugging Face folder in safetensors and nothing is to be changed."""
    root = Path(checkpoint.root)
    changed = wanted.dtype != "source" or wanted.weights != "model" or wanted.max_shard_size != "5GB"
    renamed = reading.key_map is not None or reading.module is not None
    if changed or renamed or not root.is_dir() or checkpoint.format not in ("hf", "trainer"):
        return None
    is_trainer = checkpoint.format == "trainer" and wanted.include_state
    try:
        plain = formats.reader("hf").read(root, Hints()) if checkpoint.format == "trainer" else checkpoint
    except Unrecognised:
        return None
    if not _is_loadable(plain):
        return None
    if plain.facts.config is None and plain.adapter is None and reading.model_config is not None:
        return None
    files = sorted({f.path for f in (checkpoint if is_trainer else plain).files})
    nbytes = sum((root / f).stat().st_size for f in files)
    line = {"part": "files", "fate": "carried", "detail": f"{len(files)} files as they are, {nbytes} bytes"}
    left = sorted({f.path for f in checkpoint.files} - set(files))
    lines = [line]
    if left:
        lines.append({"part": "training state", "fate": "dropped", "detail": f"left out: {', '.join(left)}"})
    return Stage(root, files, lines, is_trainer=is_trainer, config=plain.facts.config, adapter=plain.adapter)


def _is_loadable(plain: Checkpoint) -> bool:
    """Whether loaders find the weights by their names, in safetensors: one file, or numbered ones and their index."""
    data = [f.path for f in plain.files if f.role == "data"]
    if plain.variant == "adapter safetensors":
        return data == ["adapter_model.safetensors"]
    if plain.variant.partition(" ")[0] != "safetensors" or plain.variant.endswith(" sharded"):
        return False
    if (plain.facts.config or {}).get("transformers_weights"):
        return True
    named = all(fnmatchcase(n, "model*.safetensors") for n in data)
    return named and (len(data) == 1 or any(f.role == "index" for f in plain.files))


def _home(src: Path | str, checkpoint: Checkpoint, wanted: Push, how: str) -> Path:
    """A folder of this user for one conversion, by what is converted and how."""
    root = Path(checkpoint.root)
    stats = [(root / f.path if root.is_dir() else root).stat() for f in checkpoint.files]
    seen = [(f.path, s.st_size, s.st_mtime_ns) for f, s in zip(checkpoint.files, stats, strict=True)]
    text = repr((str(Path(src).resolve()), seen, how, __version__, os.getuid()))
    base = Path(wanted.work_dir) if wanted.work_dir is not None else Path(tempfile.gettempdir())
    if not base.is_dir():
        raise Usage(f"--work-dir {base}: there is no such folder", fix="make it, or name another")
    home = base / f"ckptctl-push-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    home.mkdir(mode=0o700, exist_ok=True)
    stat = home.lstat()
    if home.is_symlink() or stat.st_uid != os.getuid():
        raise Usage(f"{home} belongs to somebody else", fix="name another folder: --work-dir DIR")
    return home


def _conversion(wanted: Push, *, bare: bool) -> Conversion:
    """What becomes of a source that is no Hugging Face folder."""
    if wanted.include_state:
        return Conversion("trainer", dtype=wanted.dtype, weights=wanted.weights, max_shard_size=wanted.max_shard_size)
    return Conversion(
        "hf",
        dtype=wanted.dtype,
        weights=wanted.weights,
        no_optimizer=True,
        max_shard_size=wanted.max_shard_size,
        bare=bare,
    )
