"""DTensors and ShardedTensors as torch pickles them, made by hand of NumPy arrays: for `saving.torch_save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.values import Global, OrderedPairs, Record
from tests.support.saving import torch_save
from tests.support.torchfiles import call

if TYPE_CHECKING:
    from pathlib import Path

_SHARD = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"


def thing(dotted: str, state: Any) -> Record:
    """An object with attributes."""
    module, _, name = dotted.rpartition(".")
    return Record(Global(module, name), (), "newobj", None, state, True)


def shard(dim: Any) -> Record:
    """Shard(dim)."""
    return thing(f"{_TENSOR}.placement_types.Shard", {"dim": dim})


def strided(dim: Any, split: Any) -> Record:
    """_StridedShard(dim, split_factor)."""
    return thing(f"{_TENSOR}.placement_types._StridedShard", {"dim": dim, "split_factor": split})


def replicate() -> Record:
    """Replicate()."""
    return thing(f"{_TENSOR}.placement_types.Replicate", {})


def mesh(rank: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], ranks: list[int]) -> Record:
    """A DeviceMesh of torch 2.13."""
    layout = "torch.distributed._mesh_layout"
    axes = tuple(
        thing(f"{layout}._FlatLayout", {"shape": (n,), "stride": (s,)}) for n, s in zip(shape, strides, strict=True)
    )
    return thing(
        "torch.distributed.device_mesh.DeviceMesh",
        {
            "_device_type": "cpu",
            "_layout": thing(f"{layout}._MeshLayout", {"axes": axes}),
            "_rank_map": np.array(ranks, np.int32),
            "_rank": rank,
        },
    )


def line(rank: int, world: int) -> Record:
    """The mesh of all ranks, in one axis."""
    return mesh(rank, (world,), (1,), list(range(world)))


def old_mesh(place: list[int] | None, ranks: list[Any]) -> Record:
    """A DeviceMesh of torch before 2.9."""
    state = {"device_type": "cpu", "mesh": np.array(ranks, np.int64), "mesh_dim_names": None}
    if place is not None:
        state["_coordinate_on_dim"] = place
    return thing("torch.distributed.device_mesh.DeviceMesh", state)


def dtensor(
    local: np.ndarray, shape: Any, placements: list[Record], on: Record, *, order: Any = None, dtype: str = ""
) -> Record:
    """A DTensor of that shape whose local tensor this rank has."""
    spec = {"mesh": on, "placements": tuple(placements)}
    if order is not None:
        spec["shard_order"] = order
    local_and_spec = (None, {"_local_tensor": local, "_spec": thing(f"{_TENSOR}._dtensor_spec.DTensorSpec", spec)})
    return _wrapped(Global(_TENSOR, "DTensor"), shape, dtype or local.dtype.name, local_and_spec)


def sharded(
    shards: list[tuple[list[int], np.ndarray]], shape: Any, every: list[tuple[list[int], list[int]]], rank: int
) -> Record:
    """A ShardedTensor: this rank's (offsets, array), and (offsets, sizes) of every shard."""

    def at(offsets: list[int], sizes: list[int]) -> Record:
        return thing(f"{_SHARD}.metadata.ShardMetadata", (None, {"shard_offsets": offsets, "shard_sizes": sizes}))

    local = [
        thing(f"{_SHARD}.sharded_tensor.shard.Shard", (None, {"tensor": a, "metadata": at(o, list(a.shape))}))
        for o, a in shards
    ]
    metadata = thing(
        f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata",
        {"shards_metadata": [at(o, n) for o, n in every], "size": tuple(shape)},
    )
    world = len(every)
    group = thing(
        f"{_SHARD}.sharded_tensor.api.ProcessGroupState",
        {"local_rank": rank, "global_rank": rank, "local_world_size": world, "global_world_size": world},
    )
    return _wrapped(
        Global(f"{_SHARD}.sharded_tensor.api", "ShardedTensor"), shape, "float32", (local, metadata, group, None, False)
    )


def _wrapped(cls: Global, shape: Any, dtype: str, state: Any) -> Record:
    layout = call("torch.serialization._get_layout", "torch.strided")
    arguments = (cls, Global("torch", dtype), shape, (1,), 0, layout, call("torch.device", "cpu"), False)
    return call(
        "torch._tensor._rebuild_from_type_v2",
        Global("torch._utils", "_rebuild_wrapper_subclass"),
        cls,
        arguments,
        state,
    )


def rows(array: np.ndarray, world: int, rank: int) -> np.ndarray:
    """What rank holds of an array cut on axis 0: ceil(n / world) rows each."""
    each = -(-len(array) // world)
    return np.ascontiguousarray(array[each * rank : each * (rank + 1)])


def save_ranks(folder: Path, world: int, tree: Any, name: str = "rank{}.pt") -> Path:
    """A file a rank: tree(rank) is what it holds."""
    folder.mkdir(exist_ok=True)
    for rank in range(world):
        torch_save(folder / name.format(rank), tree(rank))
    return folder


def ordered(tree: dict[str, Any]) -> OrderedPairs:
    """A state dict as module.state_dict() gives it."""
    return OrderedPairs(tree)
