"""Weights and their float32 masters: where a format promises that one is the other rounded, samples are compared.

Flat tensors have no names in them: an order that is not the run's gives each parameter another's numbers, of the right
shape and count. A look at a few thousand elements of each finds that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.checkpoint import MASTER
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key
from ckptctl.operations.tensors import TensorReader, typed

if TYPE_CHECKING:
    from ckptctl.execute import Budget
    from ckptctl.formats.target import Content

SAMPLE_NUMEL = 4096
"""Elements that are compared at the beginning, and at the end, of each parameter."""
MOST = 2000
"""Parameters that are compared at most, spread over all of them."""


def require_rounded_masters(content: Content, budget: Budget) -> None:
    """Damaged, naming the parameter, where a weight is not its master in the weight's type."""
    source = content.source
    if not source.rounded_masters:
        return
    used = {k[0] for k in content.states} | {n for n, item in content.weights.items() if item.key.kind == MASTER}
    pairs = []
    for name in dict.fromkeys(used):
        weight, master = source.tensors.get(Key(name)), source.tensors.get(Key(name, MASTER))
        if weight is not None and master is not None and weight.cast_from is None and weight.numel:
            pairs.append((weight, master))
    pairs = pairs[:: max(1, -(-len(pairs) // MOST))]
    if not pairs:
        return
    with TensorReader(source, budget.memory_nbytes // 4) as reader:
        for weight, master in pairs:
            n = weight.numel
            spans = {(0, min(n, SAMPLE_NUMEL)), (max(0, n - SAMPLE_NUMEL), n)}
            for start, stop in sorted(spans):
                stored = typed(reader.run(weight.key, start, stop), weight)
                with np.errstate(invalid="ignore", over="ignore"):
                    rounded = typed(reader.run(master.key, start, stop), master).astype(stored.dtype)
                unlike = (stored != rounded) & ~(np.isnan(stored) & np.isnan(rounded))
                if unlike.any():
                    at = int(unlike.argmax())
                    raise Damaged(
                        f"{weight.key.name} is not its float32 master rounded to {weight.dtype.name}",
                        where=source.root,
                        why=f"element {start + at} is {stored[at]} in the model, {rounded[at]} by the master: the "
                        "order of the flat groups is another one, the files are of two saves, or the weights were "
                        "changed apart from the optimizer",
                        fix="`--weights model --no-optimizer` takes the weights alone; copy the step again, from one "
                        "save",
                        code="masters-differ",
                    )
