"""Tensors that several ranks hold: are the copies equal, and which one is taken where they are not.

Readers compare what they can by checksums and small values, and know whose files copies lie in; here it is what a
checkpoint still says of copies, for whoever asks for all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, Usage
from ckptctl.core.tensor import Key
from ckptctl.operations.tensors import TensorReader

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Tensor

CHOICES = ("first", "last")
_MEMORY = 64 << 20


def require_choice(replica: str | None) -> None:
    """Usage for a copy that cannot be meant."""
    if replica is not None and replica not in CHOICES:
        raise Usage(f"--replica {replica}: there is no such choice", fix=f"one of {', '.join(CHOICES)}")


def settled(checkpoint: Checkpoint, replica: str | None, *, verify: bool) -> Checkpoint:
    """The checkpoint with the copies that replica names. verify: all copies are read, and compared first.

    Damaged where copies differ and replica names none.
    """
    several = {k: t for k, t in checkpoint.tensors.items() if t.replicas and not t.why_unsupported}
    differing = [k for k, t in several.items() if not _alike(checkpoint, k, t)] if verify else []
    if differing and replica is None:
        key = differing[0]
        raise Damaged(
            f"{key.name} ({key.kind}) is not the same on all ranks",
            where=checkpoint.root,
            why=f"its copies differ by value, and so do those of {len(differing) - 1} more tensors",
            fix="take all ranks' files from one save; --replica first or last says whose copies are taken",
            code="replicas-differ",
        )
    told = list(checkpoint.warnings)
    if verify and several:
        told.append(f"--verify-replicas: all copies of {len(several)} tensors were compared, {len(differing)} differ")
    elif verify and not any(w.startswith("--verify-replicas") for w in told):
        told.append("--verify-replicas: there are no copies but those that are compared whenever this format is read")
    if replica == "last":
        moved = {k: replace(t, pieces=t.replicas[-1], replicas=()) for k, t in several.items()}
        return replace(checkpoint, tensors={**checkpoint.tensors, **moved}, warnings=tuple(told))
    return replace(checkpoint, warnings=tuple(told)) if verify else checkpoint


def _alike(checkpoint: Checkpoint, key: Key, tensor: Tensor) -> bool:
    """Whether all copies of a tensor hold the same bytes; reads all of them, a chunk at a time."""
    names = [Key(str(number), key.kind) for number in range(1 + len(tensor.replicas))]
    copies = {
        n: replace(tensor, key=n, pieces=pieces, replicas=(), cast_from=None, dtype=tensor.held)
        for n, pieces in zip(names, (tensor.pieces, *tensor.replicas), strict=True)
    }
    with TensorReader(replace(checkpoint, tensors=copies), _MEMORY) as reader:
        for other in names[1:]:
            for (_, a), (_, b) in zip(reader.chunks(names[0]), reader.chunks(other), strict=True):
                if not (a == b).all():
                    return False
    return True
