"""Which file holds what: bytes of every kind and layer in each file. From where the pieces lie; no value is read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.tensor import InOnePlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Tensor

_LAYER = re.compile(r"(?:[^.]+\.)*?(?:layers|layer|h|blocks|block)\.\d+(?=\.)|(?:[^.]+\.)*?\d+(?=\.)")


def layer_of(name: str) -> str:
    """The layer that a tensor's name says, "" where it says none."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def holdings(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Rows of {file, kind, layer, bytes}: how much of each layer and kind lies in each file, replicas with it."""
    sums: dict[tuple[str, str, str], int] = {}
    for key, tensor in checkpoint.tensors.items():
        if tensor.why_unsupported or (key.kind in WEIGHTS and key.name in checkpoint.ties):
            continue
        for source, nbytes in _by_source(tensor):
            path = checkpoint.sources[source].path or checkpoint.files[0].path
            row = (path, key.kind, layer_of(key.name))
            sums[row] = sums.get(row, 0) + nbytes
    return [{"file": file, "kind": kind, "layer": layer, "bytes": n} for (file, kind, layer), n in sums.items() if n]


def _by_source(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(source, bytes) of a tensor's pieces, once for each source of a table."""
    item = tensor.held.itemsize
    if isinstance(tensor.pieces, InOnePlace) and not tensor.replicas:
        yield tensor.pieces.source, tensor.numel * item
        return
    for tables in (tensor.pieces, *tensor.replicas):
        for table in tables:
            numel = table.size.prod(axis=1) if table.size.shape[1] else np.ones(len(table), np.int64)
            for source in set(table.source.tolist()):
                yield source, int(numel[table.source == source].sum()) * item
