"""Tensors that two checkpoints have under different names: told by their digests, streaming."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.tensor import Key, Tensor
    from ckptctl.operations.tensors import TensorReader


def renamed(
    left: TensorReader,
    gone: Mapping[tuple[str, str], Key],
    right: TensorReader,
    new: Mapping[tuple[str, str], Key],
) -> dict[tuple[str, str], str]:
    """Tensors of one side alone that the other has under another name: the same kind, type, shape and bytes.

    Only where one tensor of each side has that digest: a zero vector has too many namesakes to tell.
    """
    shapes = {_form(right.checkpoint.tensors[k], n[1]) for n, k in new.items()}
    shapes &= {_form(left.checkpoint.tensors[k], n[1]) for n, k in gone.items()}
    sides: list[dict[Any, list[str]]] = []
    for reader, names in ((left, gone), (right, new)):
        by_digest: dict[Any, list[str]] = {}
        for (name, kind), key in names.items():
            tensor = reader.checkpoint.tensors[key]
            if _form(tensor, kind) in shapes and not tensor.why_unsupported and tensor.numel:
                digest = hashlib.sha256()
                for _, data in reader.chunks(key):
                    digest.update(data.data)
                by_digest.setdefault((kind, *_form(tensor, kind), digest.digest()), []).append(name)
        sides.append(by_digest)
    pairs = ((d, names, sides[1].get(d, [])) for d, names in sides[0].items())
    return {(names[0], d[0]): others[0] for d, names, others in pairs if len(names) == len(others) == 1}


def _form(tensor: Tensor, kind: str) -> tuple[Any, ...]:
    return (kind, tensor.dtype.name, tensor.shown)
