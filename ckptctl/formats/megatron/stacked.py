"""Keys of torch_dist as tensors of the package's naming: stacked layers and experts, halves, flat runs of parts. Pure.

Source: Megatron-LM core_v0.16.1, core/transformer/transformer_block.py, core/transformer/moe/experts.py
(sharded_state_dict).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged
from ckptctl.core.remake import Native, remade, to_hub
from ckptctl.core.tensor import Key, Part, Tensor
from ckptctl.formats.dcp.metadata import NAME
from ckptctl.formats.megatron import model

if TYPE_CHECKING:
    from collections.abc import Mapping

_STACK = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])")
_EXPERTS = "mlp.experts.experts."
_MOST_PARTS = 1_000_000
"""Layers times experts of one key: more is damage, and would take memory for each."""


def unflattened(raw: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Tensors of the file's keys in their own shapes: fully_sharded_model_space keeps states as flat runs of parts.

    A tensor that ranks cut in a grid of (x, y) parts is (x, y, elements of a part) there, cut again along the last.
    Source: core_v0.14.0, core/dist_checkpointing/strategies/torch.py, sharded_tensor_to_torch_sharded_tensor.
    """
    out: dict[Key, Tensor] = {}
    flat: dict[str, dict[Key, Tensor]] = {}
    natives: dict[str, Native] = {}
    for key, tensor in raw.items():
        weight = raw.get(Key(key.name))
        if key.kind == "weight" or weight is None or len(tensor.shape) != len(weight.shape) + 1:
            out[key] = tensor
            continue
        *grid, numel = tensor.shape
        pairs = list(zip(weight.shape, grid, strict=True))
        if any(n < 1 or w % n for w, n in pairs) or numel != prod(w // n for w, n in pairs):
            raise Damaged(
                f"{key.kind} of {key.name} is {tensor.shape}, no grid of parts of {weight.shape}",
                where=NAME,
                code="metadata-damaged",
            )
        # Grids differ where masters are cut in another way than moments; one name for each.
        name = f"{key.name}#{'.'.join(map(str, grid))}"
        flat.setdefault(name, {})[Key(name, key.kind)] = tensor
        natives[name] = _grid(name, key.name, tensor.shape, weight.shape)
    for name, made in natives.items():
        own = remade(flat[name], to_hub([made]))
        out |= {k: replace(m.tensor, key=k) for k, m in own.items()}
    return out


def _grid(name: str, hub: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> Native:
    """A grid of flat parts as the tensor that it is."""
    *grid, _ = shape
    part = tuple(w // n for w, n in zip(whole, grid, strict=True))
    view = (*grid, *part)
    hub_view = tuple(n for pair in zip(grid, part, strict=True) for n in pair)
    k = len(grid)
    axes = (*(2 * i for i in range(k)), *(2 * i + 1 for i in range(k)))
    zero = (0,) * len(view)
    return Native(name, shape, (Part(Key(hub), view, zero, view, hub_view, zero, axes),), (whole,))


def natives(raw: Mapping[Key, Tensor]) -> list[Native]:
    """Keys of the file as tensors of the package's naming: stacked layers and experts come apart, halves together.

    A key has the shape of its weight, or of a state where there is none.
    """
    of: dict[str, Tensor] = {}
    for key, tensor in raw.items():
        if key.kind == "weight" or key.name not in of:
            of[key.name] = tensor
    return [_native(name, tensor) for name, tensor in of.items()]


def _native(key: str, tensor: Tensor) -> Native:
    half = _HALF.fullmatch(key)
    plain = half[1] if half else key
    stack, single = _STACK.fullmatch(plain), model.LAYER.fullmatch(plain)
    tail = stack[1] if stack else single[2] if single else ""
    axes = 1 if stack else 0
    experts = tail.startswith(_EXPERTS) and re.match(r"linear_fc[12]\.", tail[len(_EXPERTS) :]) is not None
    axes += 1 if experts else 0
    if len(tensor.shape) < axes or prod(tensor.shape[:axes]) > _MOST_PARTS:
        raise Damaged(f"{key} has shape {tensor.shape}", where=NAME, why="its first axes are layers and experts")
    inner = tensor.shape[axes:]
    names = []
    for at in _indices(tensor.shape[:axes]):
        layer = at[0] if stack else int(single[1]) if single else 0
        names.append(model.local_name(_named(plain, tail, layer, at[-1] if experts else None)))
    if half and inner:
        return _halves(key, names, tensor.shape[:axes], inner, 0 if half[2] == "w" else 1)
    if not axes:
        return Native.renamed(key, names[0], tensor.shape)
    parts = []
    for at, name in zip(_indices(tensor.shape[:axes]), names, strict=True):
        size = (*(1,) * axes, *inner)
        lo = (*at, *(0,) * len(inner))
        parts.append(Part(Key(name), tensor.shape, lo, size, size, (0,) * len(size), tuple(range(len(size)))))
    return Native(key, tensor.shape, tuple(parts), (inner,) * len(parts))


def _halves(key: str, names: list[str], first: tuple[int, ...], inner: tuple[int, ...], which: int) -> Native:
    """A key that holds the gates alone, or the ups: half of each first projection.

    Source: core_v0.16.1, core/transformer/mlp.py, apply_swiglu_sharded_factory (singleton_local_shards);
    core/transformer/fsdp_dtensor_checkpoint.py, handle_swiglu_in_state_dict.
    """
    rows, *rest = inner
    parts = []
    for at, name in zip(_indices(first), names, strict=True):
        size = (*(1,) * len(first), 1, rows, *rest)
        lo = (*at, 0, *(0,) * len(inner))
        hub = (*(1,) * len(first), 2, rows, *rest)
        hub_lo = (*(0,) * len(first), which, *(0,) * len(inner))
        parts.append(Part(Key(name), (*first, 1, *inner), lo, size, hub, hub_lo, tuple(range(len(size)))))
    return Native(key, (*first, *inner), tuple(parts), ((2 * rows, *rest),) * len(parts))


def _indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for n in shape:
        out = [(*at, i) for at in out for i in range(n)]
    return out


def _named(key: str, tail: str, layer: int, expert: int | None) -> str:
    if not tail:
        return key
    if expert is not None:
        tail = f"mlp.experts.local_experts.{expert}.{tail[len(_EXPERTS) :]}"
    tail = re.sub(r"^mlp\.experts\.experts\.(\d+)\.", r"mlp.experts.local_experts.\1.", tail)
    return f"decoder.layers.{layer}.{tail}"
