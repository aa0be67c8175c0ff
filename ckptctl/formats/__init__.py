"""The formats: what lies at a path, and who reads it. One package a format; imported when first needed.

A format is a module `read` with `detect(path) -> Evidence | None` and `read(path, hints) -> Checkpoint`, and a module
`write` where it can be a target.
Order matters: the first that recognises a path has it, so that folders which hold others' files come first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ckptctl.core.checkpoint import Checkpoint, Facts
from ckptctl.core.errors import Unrecognised, Unsupported, Usage
from ckptctl.formats.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Evidence:
    """What makes a path look like a format.

    Path is where its files are (a folder inside the given one, for example).
    """

    format: str
    why: str
    path: Path


@dataclass(frozen=True, slots=True)
class Hints:
    """What the user says about a source: the model's config, and the order of the optimizer's parameters.

    module: which part of several it is about, by name; "" takes names as they are, None decides by what is there.
    layer_names: what a pipeline's layers, which have numbers, are called.
    replica: which copy of a tensor that several ranks hold is taken where they differ: "first" or "last"; "": none, it
    is an error. verify_replicas: large copies without a checksum are read and compared, too.
    weights_only: the optimizer's state is passed over where a reader would look into it to tell what it holds.
    """

    facts: Facts = field(default_factory=Facts)
    param_order: tuple[str, ...] = ()
    module: str | None = None
    layer_names: Mapping[str, str] = field(default_factory=dict)
    replica: str = ""
    verify_replicas: bool = False
    weights_only: bool = False


class Reader(Protocol):
    """A format's read module."""

    detect: Callable[[Path], Evidence | None]
    read: Callable[[Path, Hints], Checkpoint]


FORMATS = ("deepspeed", "megatron", "foreign", "trainer", "accelerate", "lightning", "dcp", "hf", "torch")
"""Every format with a read module, in order of detection.

`foreign` knows what others look like that cannot be read yet.
"""

MEGATRON_FLAGS = frozenset(
    {"dp", "tp", "pp", "vpp", "ep", "megatron_format", "optimizer", "vocab_divisor", "keep_padding_rows"}
    | {"layer_spec", "like"}
)

TARGETS: dict[str, Target] = {
    "hf": Target(
        "a Hugging Face folder",
        holds_state=False,
        is_folder_of_weights=True,
        flags=frozenset({"max_shard_size", "bare"}),
        reshards=frozenset({"max_shard_size"}),
        naming="disk",
        parts_apart=True,
    ),
    "trainer": Target(
        "a Trainer folder",
        torch_groups=True,
        parts_apart=True,
        is_folder_of_weights=True,
        flags=frozenset({"max_shard_size", "names"}),
        reshards=frozenset({"max_shard_size"}),
        in_memory=True,
    ),
    "torch": Target(
        "a torch file",
        torch_groups=True,
        holds_averages=True,
        flags=frozenset({"index_keys", "names"}),
        parts_apart=True,
    ),
    "dcp": Target(
        "a DCP folder",
        torch_groups=True,
        holds_averages=True,
        flags=frozenset({"dp", "tp", "names", "like"}),
        reshards=frozenset({"dp", "tp", "like"}),
        own_names=True,
    ),
    "deepspeed": Target(
        "a DeepSpeed folder",
        one_step_a_group=True,
        rounds_masters=True,
        flags=frozenset({"dp", "ep", "zero_stage", "universal", "like", "names"}),
        reshards=frozenset({"dp", "tp", "pp", "ep", "zero_stage", "universal", "like"}),
        in_memory=True,
    ),
    "torchtitan": Target("a torchtitan folder", torch_groups=True, flags=frozenset({"dp", "tp"}), naming="torchtitan"),
    "accelerate": Target(
        "an Accelerate folder",
        torch_groups=True,
        parts_apart=True,
        holds_averages=True,
        flags=frozenset({"dp"}),
        reshards=frozenset({"dp"}),
        own_names=True,
    ),
    "lightning": Target(
        "a Lightning checkpoint",
        torch_groups=True,
        holds_averages=True,
        flags=frozenset({"dp", "module_prefix"}),
        reshards=frozenset({"dp"}),
        own_names=True,
    ),
    "megatron": Target(
        "a Megatron run's folder",
        flags=MEGATRON_FLAGS,
        reshards=MEGATRON_FLAGS,
        naming="megatron",
        one_step=True,
        own_groups=True,
        rounds_masters=True,
    ),
}
"""Every format with a write module, by the name that --to takes."""


def reader(name: str) -> Reader:
    """A format's read module. Usage where there is none of that name."""
    if name not in FORMATS or name == "foreign":
        raise Usage(
            f"there is no format {name!r}", fix=f"--from takes one of {', '.join(f for f in FORMATS if f != 'foreign')}"
        )
    return _module(name)


def _module(name: str) -> Reader:
    return cast("Reader", import_module(f"ckptctl.formats.{name}.read"))


def detect(path: Path) -> Evidence:
    """What lies at a path, looking one or two levels down where the folder itself is nothing known.

    Unrecognised where nothing is found, or several things are (they are listed); Unsupported where it is known but not
    read yet.
    """
    if not path.exists() and not path.is_symlink():
        raise Unrecognised(f"nothing is at {path}", fix="check the path")
    here = _detect_here(path)
    if here is not None:
        return here
    if path.is_dir():
        foreign: list[Unsupported] = []
        inner = _outermost([e for e in (_quiet(p, foreign) for p in _below(path)) if e is not None])
        if len(inner) == 1 and not foreign:
            return Evidence(inner[0].format, f"{inner[0].why}, in {inner[0].path.relative_to(path)}", inner[0].path)
        if inner:
            others = [err.where for err in foreign if Path(err.where).is_relative_to(path)]
            found = [*(e.path for e in inner), *map(Path, others)]
            listed = ", ".join(str(p.relative_to(path)) for p in found[:8])
            raise Unrecognised(
                f"{path} holds several checkpoints",
                why=listed + (", ..." if len(found) > 8 else ""),
                fix="give one of them",
            )
        if foreign:
            raise foreign[0]
    raise Unrecognised(
        f"no known checkpoint is at {path}",
        why=_contents(path),
        fix="give the checkpoint's folder or file; `--from FORMAT` says what it is",
    )


def _detect_here(path: Path) -> Evidence | None:
    for name in FORMATS:
        found = _module(name).detect(path)
        if found is not None:
            return found
    return None


def _quiet(path: Path, foreign: list[Unsupported]) -> Evidence | None:
    """What is at a path, None for nothing; what is known but not read yet is put on foreign."""
    try:
        return _detect_here(path)
    except Unsupported as err:
        foreign.append(err)
        return None


def _outermost(found: list[Evidence]) -> list[Evidence]:
    """Those that lie in no other: a step's folder inside of a run's is the run's."""
    places = {e.path for e in found}
    return [e for e in found if not places.intersection(e.path.parents)]


def _below(path: Path) -> list[Path]:
    """Folders one and two levels down, and torch or safetensors files one level down when there are no such folders."""
    try:
        first = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        second = [q for p in first for q in sorted(p.iterdir()) if q.is_dir()]
        files = sorted(
            p for p in path.iterdir() if p.is_file() and p.suffix in (".pt", ".pth", ".ckpt", ".safetensors", ".bin")
        )
    except OSError:
        return []
    return [*first, *second] if first else files


def _contents(path: Path) -> str:
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        return f"the folder holds {len(names)} entries: {', '.join(names[:6])}" if names else "the folder is empty"
    return f"the file has {path.stat().st_size} bytes"
