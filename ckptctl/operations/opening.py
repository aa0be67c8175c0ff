"""Opening a source: what lies at a path, which of a run's steps, and the checkpoint read from its headers."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl import formats
from ckptctl.core.checkpoint import OTHER, WEIGHTS, Checkpoint, Facts
from ckptctl.core.errors import CkptError, Damaged, MissingFact, MissingFile, Unrecognised, Unsafe, Unsupported, Usage
from ckptctl.formats.bytesource import read_whole
from ckptctl.names import quantized_by_names
from ckptctl.names.keymap import KeyMap, key_map, recipes_of
from ckptctl.operations.elsewhere import refuse_address
from ckptctl.operations.replicas import require_choice, settled
from ckptctl.remote import places

if TYPE_CHECKING:
    from collections.abc import Container

_CONFIG_LIMIT = 64 << 20
_KEY_MAP_LIMIT = 16 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is to be read: what no file says, as the user gives it."""

    model_config: Path | str | None = None
    format: str | None = None
    step: str | None = None
    param_order: Path | str | None = None
    module: str | None = None
    key_map: Path | str | None = None
    layer_names: Path | str | None = None
    replica: str | None = None
    verify_replicas: bool = False
    weights_only: bool = False
    verify_checksums: bool = False
    """Whether all bytes of torch zips are compared with their checksums, before any of them is moved."""


def open_checkpoint(path: Path | str, reading: Reading | None = None) -> tuple[Checkpoint, formats.Evidence]:
    """The checkpoint at a path and how it was recognised. Reads headers and metadata, no tensor data.

    Raises Unrecognised, Unsupported, Damaged, MissingFile; Usage for a format that does not exist.
    """
    reading = reading or Reading()
    refuse_address(path)
    require_choice(reading.replica)
    path = Path(path)
    given = given_config(reading.model_config)
    if reading.format is not None:
        evidence = formats.Evidence(reading.format, "--from says so", path)
        reader = formats.reader(reading.format)
        if not path.exists():
            raise Unrecognised(f"nothing is at {path}", fix="check the path")
    else:
        evidence = formats.detect(step_folder(path, reading.step) if path.is_dir() else path)
        reader = formats.reader(evidence.format)
    hints = formats.Hints(
        given,
        given_order(reading.param_order),
        reading.module,
        given_layers(reading.layer_names, evidence.format),
        reading.replica or "",
        reading.verify_replicas,
        reading.weights_only,
    )
    checkpoint = reader.read(evidence.path, hints)
    if reading.replica is not None or reading.verify_replicas:
        checkpoint = settled(checkpoint, reading.replica, verify=reading.verify_replicas)
    if given.config is not None:
        checkpoint = replace(checkpoint, facts=given)
    if not checkpoint.quantized:
        # The config may be elsewhere, or say nothing: numbers that mean nothing without their scales show by name.
        method, _ = quantized_by_names(k.name for k in checkpoint.tensors if k.kind in WEIGHTS)
        checkpoint = replace(checkpoint, quantized=method) if method else checkpoint
    return (checkpoint if reading.key_map is None else mapped(checkpoint, Path(reading.key_map))), evidence


def open_movable(
    src: Path | str, reading: Reading | None = None, *, no_optimizer: bool = False
) -> tuple[Checkpoint, formats.Evidence]:
    """A source that may be converted: safe, with tensors, one checkpoint, without slices that are unknown.

    no_optimizer: an optimizer's state that cannot be read is passed over, with a warning: it is not wanted.
    """
    try:
        source, evidence = open_checkpoint(src, reading)
    except CkptError as err:
        if not no_optimizer or not err.code.startswith("optimizer-"):
            raise
        source, evidence = open_checkpoint(src, replace(reading or Reading(), weights_only=True))
        told = f"the optimizer's state is dropped unread: {err.what}" + (f" ({err.where})" if err.where else "")
        source = replace(source, warnings=(*source.warnings, told))
    require_safe(source)
    require_tensors(source)
    require_one_source(evidence)
    require_plain(source)
    if reading is not None and reading.verify_checksums:
        from ckptctl.operations.checks.sums import require_checksums

        checked, without = require_checksums(source)
        if not checked:
            raise Unsupported(
                "--verify-checksums: no file of the source has checksums that are known here",
                where=source.root,
                fix="leave it out; `ckptctl validate --against` compares with a list of SHA-256 sums",
            )
        if without:
            said = f"{without} of {checked + without} files of the source have no checksums, and were not compared"
            source = replace(source, warnings=(*source.warnings, said))
    return source, evidence


def fingerprint(wanted: str, reading: Reading | None) -> dict[str, str]:
    """What a resumed job must have in common with the interrupted one, besides the source's bytes and the plan."""
    return {"conversion": wanted, "reading": repr(reading or Reading())}


def pinned(root: str) -> dict[str, str]:
    """Which revision of a repository is read, for the same; nothing for a source on this machine."""
    address = places.address_of(root)
    return {"repository": address} if address else {}


def given_config(path: Path | str | None) -> Facts:
    """--model-config as facts: a config.json, or a folder that has one."""
    if path is None:
        return Facts()
    refuse_address(path, "--model-config")
    file = Path(path)
    if file.is_dir():
        file = next(
            (f for f in (file / "config.json", file / "huggingface" / "config.json") if f.is_file()),
            file / "config.json",
        )
    if not file.is_file():
        raise MissingFile(
            f"--model-config: there is no file {file}", fix="give a config.json, or a folder that has one"
        )
    return read_config(file, str(file))


def read_config(file: Path, origin: str) -> Facts:
    """A config.json as facts. Damaged where it is no JSON object."""
    if file.stat().st_size > _CONFIG_LIMIT:
        raise Damaged(
            f"the config has {file.stat().st_size} bytes, more than {_CONFIG_LIMIT}",
            where=origin,
            code="config-too-large",
        )
    text = read_whole(file, _CONFIG_LIMIT)
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise Damaged("the config is no JSON", where=origin, why=str(err), code="config-not-json") from err
    if not isinstance(config, dict):
        raise Damaged(
            "the config is no JSON object", where=origin, why=f"it is a {type(config).__name__}", code="config-not-json"
        )
    return Facts(config, text, origin)


def mapped(checkpoint: Checkpoint, file: Path) -> Checkpoint:
    """The checkpoint under the names and shapes that a key map gives. Usage where the map is wrong or does not fit."""
    from ckptctl.operations.naming import renamed

    shapes: dict[str, tuple[int, ...]] = {}
    for key, tensor in checkpoint.tensors.items():
        if key.kind in WEIGHTS or (key.kind not in ("step", OTHER) and key.name not in shapes and tensor.shape):
            shapes[key.name] = tensor.shape
    recipes = recipes_of(read_key_map(file), shapes)
    made = tuple((r.name, tuple(dict.fromkeys(t.name for t in r.taken))) for r in recipes)
    return replace(renamed(checkpoint, recipes), key_map=made)


def read_key_map(file: Path) -> KeyMap:
    """A key map of TOML or JSON. MissingFile where it is not there, Usage where it is neither."""
    if not file.is_file():
        raise MissingFile(f"--key-map: there is no file {file}")
    if file.stat().st_size > _KEY_MAP_LIMIT:
        raise Usage(f"--key-map {file} has {file.stat().st_size} bytes, more than {_KEY_MAP_LIMIT}", code="key-map")
    try:
        text = file.read_text(encoding="utf-8")
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as err:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise Usage(f"--key-map {file} is no {kind}", why=str(err), fix="see docs/key-map.md", code="key-map") from err
    if not isinstance(data, dict):
        raise Usage(f"--key-map {file} is no table of rules", fix="see docs/key-map.md", code="key-map")
    return key_map(data, str(file))


def given_order(path: Path | str | None) -> tuple[str, ...]:
    """The names in a --param-order file, a name a line. MissingFile where there is none, Usage where it names none."""
    if path is None:
        return ()
    file = Path(path)
    if not file.is_file():
        raise MissingFile(f"there is no file {file}, of names a line")
    try:
        lines = [raw.strip() for raw in file.read_text(encoding="utf-8-sig").splitlines()]
    except ValueError as err:
        raise Usage(f"{file} is no text: names are expected, one a line", why=str(err)[:80]) from err
    out = tuple(line for line in lines if line and not line.startswith("#"))
    if not out:
        raise Usage(f"{file} names nothing", fix="give the names, one a line, or leave the file out")
    return out


def given_layers(path: Path | str | None, found: str) -> dict[str, str]:
    """What layers are called, by a --layer-names file: a layer and a name a line.

    Usage for another format's checkpoint, which has names, and for lines of another form.
    """
    if path is None:
        return {}
    if found != "deepspeed":
        raise Usage(f"--layer-names is for pipelines of DeepSpeed, and this is {found}", fix="leave it out")
    out: dict[str, str] = {}
    for line in given_order(path):  # a text file, too: without empty lines and comments
        words = line.split()
        if len(words) != 2 or words[0] in out:
            raise Usage(
                f"--layer-names {path}: a line is a layer and its name, each layer once, not {line[:80]!r}",
                fix="0 model.embed_tokens",
                code="layer-names",
            )
        out[words[0]] = words[1]
    return out


STEP_FOLDERS = ("step-", "step_", "checkpoint-", "checkpoint_", "global_step", "iter_", "step")
"""How runs name the folders of their steps: a prefix and a number."""


TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files in which a run names its last whole step. Source: DeepSpeed 0.19.8, runtime/engine.py, save_checkpoint;
Megatron-LM core_v0.16.1, training/checkpointing.py, get_checkpoint_tracker_filename."""


def steps_of(path: Path) -> dict[int, Path]:
    """The folders of a run that are named by step, by number."""
    found = {}
    for p in path.iterdir():
        prefix = next((s for s in STEP_FOLDERS if p.name.startswith(s)), None)
        digits = p.name[len(prefix) :] if prefix else p.name
        if p.is_dir() and digits.isdigit():
            found[int(digits)] = p
    return found


def is_one_checkpoint(path: Path) -> bool:
    """Whether a folder holds weights itself, whatever folders are beside them."""
    return (path / ".metadata").exists() or any(path.glob("*.safetensors")) or any(path.glob("*.bin"))


def step_folder(path: Path, wanted: str | None) -> Path:
    """The folder of one step of a run: the one asked for, or the newest that is complete.

    Path itself where it is no run's folder.
    """
    if is_one_checkpoint(path):
        if wanted not in (None, "latest"):
            raise Usage(f"--step {wanted}: {path} is one checkpoint, not a run's folder")
        return path
    steps = steps_of(path)
    if wanted in (None, "latest") and any((path / name).is_file() for name in TRACKERS):
        return path  # the run's own word on which step to take: its reader looks there
    if wanted not in (None, "latest"):
        if not wanted.isdigit() or int(wanted) not in steps:
            listed = ", ".join(map(str, sorted(steps)[-20:])) or "none"
            listed = f"{len(steps)}, the last are {listed}" if len(steps) > 20 else listed
            raise Unrecognised(
                f"step {wanted} is not in {path}", why=f"steps there: {listed}", fix="give one of them, or latest"
            )
        return steps[int(wanted)]
    if len(steps) < 2:
        return path
    for number in sorted(steps, reverse=True):
        try:
            evidence = formats.detect(steps[number])
            complete = getattr(formats.reader(evidence.format), "is_complete", None)
            if complete is not None and not complete(evidence.path):
                continue
        except Unrecognised:
            continue
        except Unsupported:
            break
        return steps[number]
    return path


def require_safe(checkpoint: Checkpoint) -> None:
    """Unsafe where a pickle of the source names something that would run code.

    Nothing that needs its values goes on.
    """
    if checkpoint.unsafe:
        first = checkpoint.unsafe[0]
        more = f" (and {len(checkpoint.unsafe) - 1} more)" if len(checkpoint.unsafe) > 1 else ""
        raise Unsafe(
            f"a pickle names {first.name}, which would run code{more}",
            where=first.file,
            why=first.why,
            fix="nothing was run; do not load this checkpoint elsewhere, and ask who made it",
            code="pickle-calls-code",
        )


def placeholders(checkpoint: Checkpoint) -> list[str]:
    """Weights that hold no element where a model has some: what ZeRO-3 leaves of a weight that was not gathered.

    Only told of a model with a config, whose parameters (`....weight`, `....bias`) are never of shape (0,).
    """
    if not checkpoint.facts.family:
        return []
    return [
        k.name
        for k, t in checkpoint.tensors.items()
        if k.kind in WEIGHTS and t.shape == (0,) and k.name.endswith((".weight", ".bias"))
    ]


def require_data(checkpoint: Checkpoint, taken: Container[str]) -> None:
    """Damaged, with their number, where weights that are taken are placeholders without data."""
    names = [n for n in placeholders(checkpoint) if n in taken]
    if names:
        weights = sum(k.kind in WEIGHTS for k in checkpoint.tensors)
        raise Damaged(
            f"{len(names)} of {weights} weights are placeholders without data: {names[0]}",
            where=checkpoint.root,
            why="their shape is (0,), as ZeRO-3 leaves weights that were not gathered before they were saved",
            fix="take the weights from the ZeRO checkpoint itself; --exclude goes on without these",
            code="placeholders",
        )


def require_plain(checkpoint: Checkpoint) -> None:
    """Unsupported, naming it, where the source holds a tensor that cannot be read: sparse, quantized, ..."""
    if checkpoint.unsupported:
        what, why = checkpoint.unsupported[0]
        raise Unsupported(
            f"{what} cannot be moved", where=checkpoint.root, why=why, fix="save it as a plain dense tensor"
        )


def require_one_source(evidence: formats.Evidence) -> None:
    """Whatever error the format has for two copies of the weights, side by side, that differ by value; reads both."""
    check = getattr(formats.reader(evidence.format), "require_one_source", None)
    if check is not None:
        check(evidence.path)


def require_names(checkpoint: Checkpoint) -> None:
    """MissingFact where the optimizer's state is keyed by numbers, and which parameters they mean is in no file."""
    if checkpoint.optimizer is not None and checkpoint.optimizer.unnamed:
        raise MissingFact(
            "the optimizer's state is keyed by numbers, and which parameter each one means is not in the file",
            where=checkpoint.root,
            why=checkpoint.optimizer.unnamed,
            fix="give the names in the optimizer's order, a name a line: --param-order FILE",
            code="param-order",
        )


def require_tensors(checkpoint: Checkpoint) -> None:
    """Unrecognised where there is no tensor at all; Unsupported where there are things that only look like some."""
    if not checkpoint.tensors:
        require_plain(checkpoint)
        raise Unrecognised(
            "the checkpoint holds no tensor",
            where=checkpoint.root,
            why=f"it holds objects of {', '.join(checkpoint.unknown_globals[:4])}"
            if checkpoint.unknown_globals
            else "",
            code="no-tensors",
            fix="check that this is the right file or folder",
        )
