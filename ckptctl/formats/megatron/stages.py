"""What each rank of a mesh holds of whole parameters: which chunk a parameter is in, and its part there. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.megatron import model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.model import Place, Shape

_SHOWN = 12
"""Divisors that an error names."""
Chunk = tuple[int, int]
"""(pipeline rank, chunk of it)."""


def chunks_of(names: Iterable[str], facts: Facts, *, tied: bool) -> dict[Chunk, list[str]]:
    """The parameters of every chunk of a pipeline. A tied embedding is in the last chunk, too, as the head.

    Source: Megatron-LM core_v0.16.1, core/models/gpt/gpt_model.py, GPTModel.__init__.
    """
    every = [(p, c) for c in range(facts.vpp) for p in range(facts.pp)]
    starts = [facts.first_layer(*at) for at in every]
    out: dict[Chunk, list[str]] = {at: [] for at in every}
    first, last = every[0], every[-1]
    holder: dict[int, Chunk] = {}
    for at, (start, stop) in zip(every, pairwise([*starts, facts.number("num_layers")]), strict=True):
        holder.update(dict.fromkeys(range(start, stop), at))
    for name in names:
        layer = model.layer_of(name)
        if layer is not None:
            if layer not in holder:
                raise Damaged(f"{name} is of no layer of the pipeline", where=facts.where, code="layers-missing")
            out[holder[layer]].append(name)
        elif name.startswith("embedding."):
            out[first].append(name)
            if tied and name == model.EMBEDDING and facts.pp > 1:
                out[last].append(model.HEAD)
        else:
            out[last].append(name)
    return out


def local_shapes(shapes: Mapping[str, Shape], tp: int, where: str, *, fused: bool | None = None) -> dict[str, Shape]:
    """The shape of a rank's part of each parameter. Damaged where ranks do not divide one, Unsupported if unknown.

    fused: whether layers are the Transformer Engine's, None where that is not known.
    """
    out = {}
    for name, shape in shapes.items():
        axis = model.cut_axis(name)
        if "_down_proj." in name and fused is not None:
            axis = None if fused else 0  # latent attention; see model.places
        if isinstance(axis, str):
            if tp > 1:
                raise Unsupported(
                    f"how {tp} tensor-parallel ranks share {name} {shape} is not known here",
                    where=where,
                    fix="with one tensor-parallel rank it is taken as it is",
                    code="tensor-unknown",
                )
            axis = None
        if axis is None:
            out[name] = shape
            continue
        if shape[axis] % tp:
            fits = [str(n) for n in range(1, min(shape[axis], 4096) + 1) if shape[axis] % n == 0]
            raise Unsupported(
                f"{tp} tensor-parallel ranks do not divide {name} {shape}",
                where=where,
                why=f"each has as much of its axis {axis}, which is {shape[axis]}",
                fix=f"--tp {', '.join(fits[:_SHOWN])} would do for it",
                code="mesh-does-not-divide",
            )
        out[name] = (*shape[:axis], shape[axis] // tp, *shape[axis + 1 :])
    return out


def place(name: str, local: Mapping[str, Shape], tp_rank: int, tp: int) -> Place:
    """Where a rank's part of a whole parameter lies in it."""
    spot = model.Spot(tp_rank, tp, 0, 0, "")
    return model.places(name, local[name], spot, local)[0]
