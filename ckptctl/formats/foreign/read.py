"""Names what lies at a path when it is of a framework that this version does not read.

Reads names of files only. Without this, a Trainer folder would pass for a Hugging Face one, and its optimizer would be
lost in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.formats import Evidence, Hints


def _any(folder: Path, *patterns: str) -> str:
    return next((p.name for pattern in patterns for p in sorted(folder.glob(pattern))), "")


SIGNS: tuple[tuple[str, Callable[[Path], str]], ...] = (
    (
        "a Megatron torch_dist checkpoint without its common.pt",
        lambda p: _any(p, "metadata.json") if (p / ".metadata").is_file() else "",
    ),
    (
        "an Orbax checkpoint",
        lambda p: _any(
            p,
            "_CHECKPOINT_METADATA",
            "manifest.ocdbt",
            "_METADATA",
            "*/_METADATA",
            "*/*/_METADATA",
            "*/_CHECKPOINT_METADATA",
        ),
    ),
    ("a ColossalAI checkpoint", lambda p: _any(p, "model", "modeling") if _any(p, "optimizer", "lr_scheduler") else ""),
    ("a NeMo archive", lambda p: _any(p, "model_weights", "context")),
)
FILE_SIGNS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    ("a NeMo archive", lambda p: p.suffix == ".nemo"),
    ("a Flax msgpack file", lambda p: p.suffix == ".msgpack"),
    ("a GGUF file", lambda p: p.suffix == ".gguf"),
    ("an HDF5 file", lambda p: p.suffix in (".h5", ".hdf5")),
)


def detect(path: Path) -> Evidence | None:
    """Unsupported, naming the framework, where one is recognised; else None."""
    if path.is_dir():
        for what, sign in SIGNS:
            found = sign(path)
            if found:
                raise Unsupported(
                    f"this is {what}, which this version does not read yet",
                    where=str(path),
                    why=f"it holds {found}",
                    fix=_FIX,
                )
    else:
        for what, matches in FILE_SIGNS:
            if matches(path):
                raise Unsupported(f"this is {what}, which this version does not read yet", where=str(path), fix=_FIX)
    return None


_FIX = (
    "read here are: Hugging Face folders (safetensors, .bin), torch files, PyTorch DCP folders, DeepSpeed's, Megatron's"
)


def read(path: Path, hints: Hints) -> Checkpoint:
    """Never called: detect answers None or raises."""
    raise Unsupported(f"{path} cannot be read by this version", where=str(hints.facts.origin))
