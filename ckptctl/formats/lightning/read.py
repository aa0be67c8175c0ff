"""Reads Lightning's checkpoints: a `.ckpt` file, or a folder of that name with a DCP and `meta.pt`. No tensor data.

Names are those of the module that the LightningModule holds, where it holds one: an attribute's name before every name
says no more of the model than the LightningModule's class. Source: lightning 2.6.6,
pytorch/trainer/connectors/checkpoint_connector.py, dump_checkpoint; pytorch/strategies/fsdp.py, model_parallel.py,
save_checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Checkpoint, File, UnsafeGlobal
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Source
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.dcp import read as dcp
from ckptctl.formats.dcp.metadata import NAME
from ckptctl.formats.modules import one_module
from ckptctl.formats.state import number
from ckptctl.formats.torch import read as torch
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchtensor import value_of

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.core.tensor import Key, Tensor

VERSION = "pytorch-lightning_version"
META = "meta.pt"
_HEAD_NBYTES = 16 << 10
"""How far into a file its mark is looked for: it is the third key of the dict, and the pickle stands first."""


def detect(path: Path) -> Evidence | None:
    """A torch file with Lightning's version in it, or a DCP folder with `meta.pt`."""
    if path.name == META and (path.parent / NAME).is_file():
        path = path.parent
    if path.is_dir():
        whole = (path / NAME).is_file() and (path / META).is_file()
        return Evidence("lightning", f"it holds {NAME} and {META}", path) if whole else None
    if not path.is_file():
        return None
    head = read_whole(path, 4)
    if head.startswith(torch.PICKLE_STARTS):
        head = read_whole(path, _HEAD_NBYTES)
    if head.startswith(torch.PICKLE_STARTS) and VERSION.encode() in head:
        return Evidence("lightning", f"it has {VERSION}", path)
    return None


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a `.ckpt` file or folder. Usage where hints name a module that is not there."""
    if path.is_dir():
        return one_module(_folder(path, hints), hints.module)
    with FileBytes(path, name=path.name) as reader:
        found = torch.read_dict(path, hints, reader)
    return one_module(replace(found, format="lightning"), hints.module)


def _folder(path: Path, hints: Hints) -> Checkpoint:
    """Weights and optimizers from the DCP, everything else from meta.pt."""
    found = dcp.read(path, hints)
    tensors: dict[Key, Tensor] = dict(found.tensors)
    number_of_meta = len(found.sources)
    with FileBytes(path / META, name=META) as reader:
        opened = open_torch(reader)
        root = opened.root
        if not isinstance(root, dict):
            raise Damaged(f"{META} holds no dict", where=str(path), why=f"it holds a {type(root).__name__}")
        values = {str(k): value_of(v, str(k), reader, tensors, number_of_meta) for k, v in root.items()}
        nbytes = reader.nbytes
    step = number(values.get("global_step"))
    return replace(
        found,
        format="lightning",
        variant="sharded",
        sources=(*found.sources, Source(META)),
        tensors=tensors,
        values={**found.values, **values},
        step=found.step if step is None else step,
        files=(*found.files, File(META, nbytes, "state")),
        unsafe=(*found.unsafe, *(UnsafeGlobal(META, str(f.name), f.why) for f in opened.unsafe)),
        unknown_globals=tuple(sorted({*found.unknown_globals, *(str(f.name) for f in opened.unknown)})),
        unsupported=(*found.unsupported, *((f"{META}: {where}", why) for where, why in opened.unsupported)),
    )
