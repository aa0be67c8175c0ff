"""Tied weights that are stored twice: before one copy is left out, both are compared, by value and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged
from ckptctl.names import head_and_embedding
from ckptctl.operations.tensors import TensorReader

if TYPE_CHECKING:
    from ckptctl.core.tensor import Key
    from ckptctl.execute import Budget
    from ckptctl.formats.target import Content
    from ckptctl.plan.index import SourceIndex


def require_equal_copies(content: Content, index: SourceIndex, budget: Budget) -> None:
    """Damaged where the config ties two weights whose bytes differ: one of them would be lost without a word."""
    for alias in content.collapsed:
        pair = head_and_embedding(content.weights)
        owner = content.source.ties.get(alias) or (pair[1] if pair and pair[0] == alias else None)
        if owner is None or content.source.ties.get(alias) == owner:
            continue  # one storage: nothing to compare
        a, b = content.weights[alias].key, content.weights[owner].key
        with TensorReader(content.source, budget.memory_nbytes // 4) as reader:
            _compare(reader, a, b, content.source.facts.origin)


def _compare(reader: TensorReader, a: Key, b: Key, origin: str) -> None:
    left, right = reader.checkpoint.tensors[a], reader.checkpoint.tensors[b]
    why = ""
    if (left.shape, left.dtype.name) != (right.shape, right.dtype.name):
        why = f"{a.name} is {left.dtype.name} {left.shape}, {b.name} {right.dtype.name} {right.shape}"
    else:
        for (start, x), (_, y) in zip(reader.chunks(a), reader.chunks(b), strict=True):
            if not (x == y).all():
                why = f"they differ from element {start + int((x != y).argmax()) // left.dtype.itemsize} on"
                break
    if why:
        raise Damaged(
            f"{a.name} and {b.name} are tied by the config, and differ",
            where=origin,
            why=why,
            fix="correct tie_word_embeddings in the config (--model-config), or leave one out with --exclude",
            code="tied-tensors-differ",
        )
