"""An optimizer of a torch file whose parameters are named: its tensors among a checkpoint's, all else as values.

Shared by the formats that keep an optimizer in a file of torch.save.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.tensor import Key
from ckptctl.core.values import TensorRef
from ckptctl.formats.torchtensor import tensor_of, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Optimizer
    from ckptctl.core.tensor import Tensor
    from ckptctl.core.values import Tree
    from ckptctl.formats.bytesource import ByteSource


def placed(
    optimizer: Optimizer,
    states: Mapping[tuple[str, str], Tree],
    reader: ByteSource,
    tensors: dict[Key, Tensor],
    source: int,
    *,
    prefix: str = "",
    groups_before: int = 0,
) -> Optimizer:
    """The optimizer with scalars, settings and options as values; states are what `parameters.named_states` gives.

    Tensors are put under their names with prefix before them, as bytes of source, whose file the reader is.
    groups_before are those of other optimizers of the checkpoint: large tensors among settings are named by the number
    of the group.
    """

    def value(at: str, tree: Tree) -> Tree:
        return value_of(tree, at, reader, tensors, source)

    for (name, kind), leaf in states.items():
        if isinstance(leaf, TensorRef):
            key = Key(prefix + name, kind)
            tensors[key] = tensor_of(key, leaf, source)
    scalars = {k: value(".".join(k), v) for k, v in states.items() if not isinstance(v, TensorRef)}
    groups = tuple(
        replace(g, options={k: value(f"param_groups.{i}.{k}", v) for k, v in g.options.items()})
        for i, g in enumerate(optimizer.groups, groups_before)
    )
    options = {k: value(f"optimizer.{k}", v) for k, v in optimizer.options.items()}
    return replace(optimizer, groups=groups, scalars=scalars, options=options)
