"""What the tests of `verify` share: batches of the reference run, and checkpoints to change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckptctl import operations
from tests.support.checkpoints import FIXTURES, SHARED, ckpt

if TYPE_CHECKING:
    from pathlib import Path


def reference_batch(folder: Path, *steps: int) -> Path:
    """The batches that every real run was fed, as its own script draws them, as a batch file."""
    import numpy as np
    import torch

    drawn = [torch.randint(0, 131, (4, 32), generator=torch.Generator().manual_seed(1000 + s)) for s in steps]
    file = folder / "batch.npz"
    np.savez(file, input_ids=np.stack([d.numpy() for d in drawn]))
    return file


def folder_of(layout: str) -> Path:
    """A layout's folder, in the repository or beside it."""
    return FIXTURES / layout if (FIXTURES / layout).exists() else SHARED / layout


def reading_of(layout: str) -> operations.Reading:
    """How a layout is read: with the config that stands in its truth, where there is one."""
    config = folder_of(layout) / "truth" / "config.json"
    return operations.Reading(model_config=config if config.exists() else None)


def recorded(layout: str) -> list[float]:
    """The losses that the run recorded after its save."""
    found = json.loads((folder_of(layout) / "truth" / "losses.json").read_text())
    return found["losses"][3:6] if "losses" in found else [found["train"][k] for k in "456"]


def converted(layout: str, out: Path, to: str = "torch", **more: Any) -> Path:
    """A layout converted."""
    operations.convert(ckpt(layout), out, operations.Conversion(to=to, **more), reading_of(layout))
    return out


def verified(a: Path, b: Path | None = None, layout: str = "", **what: Any) -> dict[str, Any]:
    """verify on one thread's worth of tokens: enough to tell, and quick."""
    wanted = {"batch": operations.Batches(rows=2, columns=8), **what}
    reading = reading_of(layout) if layout else None
    return operations.verify_training(a, b, operations.Verification(**wanted), reading)


def state_file(path: Path) -> Path:
    """The one torch file of what was converted."""
    return path if path.is_file() else next(path.glob("*.pt"))
