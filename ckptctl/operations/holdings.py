"""Which file holds what: bytes of every kind and layer in each file. From where the pieces lie; no value is read."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.tensor import InOnePlace
from ckptctl.plan.check import held_by_source

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        for source, nbytes in _by_source(tensor).items():
            path = checkpoint.sources[source].path or checkpoint.files[0].path
            row = (path, key.kind, layer_of(key.name))
            sums[row] = sums.get(row, 0) + nbytes
    return [{"file": file, "kind": kind, "layer": layer, "bytes": n} for (file, kind, layer), n in sums.items() if n]


def _by_source(tensor: Tensor) -> Mapping[int, int]:
    """Bytes of a tensor's pieces and replicas by source."""
    if isinstance(tensor.pieces, InOnePlace) and not tensor.replicas:
        return {tensor.pieces.source: tensor.numel * tensor.held.itemsize}
    return held_by_source(chain(tensor.pieces, *tensor.replicas))
