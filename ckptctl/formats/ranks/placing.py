"""Which box of a tensor a rank of a mesh holds, by placements. Pure integers: no file, no tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Index = tuple[int, ...]


class Placement(NamedTuple):
    """What one axis of a mesh does to a tensor: cuts its axis dim, or (dim None) holds it whole on every rank.

    split is the split_factor of a `_StridedShard`: into how many parts axes of the mesh further right cut that axis of
    the tensor *before* this one does; 1 for a plain Shard.
    """

    dim: int | None = None
    split: int = 1


class Grid(NamedTuple):
    """Where a rank stands in its mesh: sizes of the mesh's axes, the rank's place on each, and all ranks, row-major."""

    shape: Index
    coordinate: Index
    ranks: Index


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part number index of [start, stop): ceil(n / parts) elements each, late parts short or empty.

    Source: torch 2.13.0, distributed/tensor/placement_types.py, Shard.local_shard_size_and_offset.
    """
    each = -(-(stop - start) // parts)
    return min(stop, start + each * index), min(stop, start + each * (index + 1))


def cutting_order(placements: Sequence[Placement], sizes: Sequence[int], dim: int) -> list[int] | None:
    """The axes of the mesh that cut axis dim of the tensor, in the order in which they cut; None where none fits.

    From right to left each axis takes the place in the order before which exactly its split_factor of parts were cut.
    FSDP2 over TP is (_StridedShard(0, split_factor=tp), Shard(0)): TP cuts first.
    Source: torch 2.13.0, distributed/tensor/_dtensor_spec.py, _maybe_convert_StridedShard_to_shard_order.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        if placements[axis].dim != dim:
            continue
        before, place = 1, 0
        while before != placements[axis].split and place < len(order):
            before *= sizes[order[place]]
            place += 1
        if before != placements[axis].split:
            return None
        order.insert(place, axis)
    return order


def box_of(shape: Index, orders: dict[int, list[int]], grid: Grid) -> tuple[Index, Index]:
    """(first index, sizes) of what the rank at grid.coordinate holds; orders: for each cut axis, what cuts it in turn.

    An empty box lies where its part would begin.
    """
    lo, size = [0] * len(shape), list(shape)
    for dim, axes in orders.items():
        start, stop = 0, shape[dim]
        for axis in axes:
            start, stop = chunk(start, stop, grid.shape[axis], grid.coordinate[axis])
        lo[dim], size[dim] = start, stop - start
    return tuple(lo), tuple(size)


def grid_of(axes: Sequence[tuple[Index, Index]], rank_map: Sequence[int], rank: int) -> Grid | None:
    """The mesh that holds the rank, of those that a layout makes of a map of ranks; None where none does.

    axes gives for each axis of the mesh its sizes and strides (several where axes were joined), which count places of
    rank_map. A mesh of fewer places than the map stands for all those beside it with the same form: the one that holds
    the rank is the rank's own.
    Source: torch 2.13.0, distributed/_mesh_layout.py, _MeshLayout.remap_to_tensor; distributed/device_mesh.py, mesh.
    """
    flat = [(n, stride) for sizes, strides in axes for n, stride in zip(sizes, strides, strict=True)]
    if rank not in rank_map or any(n < 1 or stride < 0 for n, stride in flat):
        return None
    if math.prod(n for n, _ in flat) > len(rank_map):
        return None
    place = rank_map.index(rank)
    digits = [(place // stride) % n if stride else 0 for n, stride in flat]
    first = place - sum(d * stride for d, (_, stride) in zip(digits, flat, strict=True))
    places = [first]
    for n, stride in flat:
        places = [p + i * stride for p in places for i in range(n)]
    if min(places) < 0 or max(places) >= len(rank_map) or len(set(places)) != len(places):
        return None
    coordinate, at = [], 0
    for sizes, _ in axes:
        mine = 0
        for n in sizes:
            mine, at = mine * n + digits[at], at + 1
        coordinate.append(mine)
    shape = tuple(math.prod(sizes) for sizes, _ in axes)
    return Grid(shape, tuple(coordinate), tuple(rank_map[p] for p in places))
