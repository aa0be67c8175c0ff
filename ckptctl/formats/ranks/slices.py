"""What torch pickles as a DTensor or a ShardedTensor, as data: which boxes of which tensor lie in this rank's file.

Reads no tensor data besides a mesh's list of ranks. Where a DTensor's box begins is in no file: it follows from its
placements, the mesh and the rank.
Source: torch 2.13.0, distributed/tensor/_api.py, DTensor; distributed/_shard/sharded_tensor/api.py, ShardedTensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.core.tensor import dense_strides
from ckptctl.core.values import Global, Record, TensorRef, Tree
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.ranks.placing import Grid, Placement, box_of, cutting_order, grid_of
from ckptctl.formats.torchfile.rebuild import SLICES
from ckptctl.formats.torchtensor import read_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.formats.bytesource import ByteSource
    from ckptctl.formats.zipdir import ZipDirectory

_MESH_LIMIT = 8 << 20
"""The largest list of ranks that is read, in bytes: a million ranks."""
_MOST_AXES = 64
_PARAMETER = "torch._utils._rebuild_parameter"


class Part(NamedTuple):
    """A box of a tensor, and the tensor of this file that holds it, of the box's size.

    crc is that of its bytes where it is all of a storage whose checksum the file records, else -1.
    """

    lo: tuple[int, ...]
    size: tuple[int, ...]
    ref: TensorRef
    crc: int = -1


class Box(NamedTuple):
    """What placements give a rank: a box, its mesh, and over how many ranks and by how many of its axes it is cut."""

    lo: tuple[int, ...]
    size: tuple[int, ...]
    grid: Grid
    ways: int
    way: int
    axes: int


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """What one rank holds of one tensor. how is "dtensor", "sharded" or "plain" (not cut, as far as the file says).

    file is the number of the file it is in. ranks are all that have a part in it, as the file says; rank is the one
    that wrote it, -1 where it does not say. ways and way: over how many ranks it is cut, and which of the ways this
    rank has; axes are the mesh's that cut it.
    """

    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Part, ...]
    file: int
    how: str = "plain"
    ranks: tuple[int, ...] = ()
    rank: int = -1
    ways: int = 1
    way: int = 0
    axes: int = 0
    trainable: bool | None = None


def is_tensor(tree: Tree) -> bool:
    """Whether a node of a torch file's tree is a tensor: plain, DTensor or ShardedTensor, bare or as a parameter."""
    if isinstance(tree, TensorRef):
        return True
    if isinstance(tree, Record) and tree.cls == _PARAMETER and tree.args:
        tree = tree.args[0]
    return isinstance(tree, Record) and _wrapped_class(tree) in SLICES


@dataclass
class Slicer:
    """Turns the tensors of one file into slices. number is the rank by the file's name, file that of the file."""

    reader: ByteSource
    number: int
    file: int = 0
    directory: ZipDirectory | None = None
    meshes: dict[int, Grid] = field(default_factory=dict)
    boxes: dict[tuple[Tree, ...], Box] = field(default_factory=dict)
    kept: list[Tree] = field(default_factory=list)

    def slice(self, tree: Tree, name: str) -> Slice:
        """What `is_tensor` knows, as a Slice.

        Raises Damaged where what the file says of it contradicts itself, Unsupported where it does not tell enough.
        """
        if isinstance(tree, TensorRef):
            grad = tree.requires_grad if tree.parameter else None
            part = self._part((0,) * len(tree.shape), tree)
            return Slice(tree.shape, tree.dtype, (part,), self.file, trainable=grad)
        made = self.record(tree, name) if isinstance(tree, Record) else None
        if made is None:
            raise self.bad(name, "is no tensor", show(tree))
        return made

    def _part(self, lo: tuple[int, ...], ref: TensorRef) -> Part:
        whole = ref.offset == 0 and ref.numel == ref.storage.numel and ref.stride == dense_strides(ref.shape, 1)
        record = self.directory.record(f"data/{ref.storage.key}") if self.directory and whole else None
        return Part(lo, ref.shape, ref, record.crc if record is not None and record.crc else -1)

    def record(self, record: Record, name: str) -> Slice | None:
        """A DTensor or a ShardedTensor, bare or as a parameter; None for any other record."""
        if record.cls == _PARAMETER and len(record.args) >= 2:
            inner = self.record(record.args[0], name) if isinstance(record.args[0], Record) else None
            grad = record.args[1] if isinstance(record.args[1], bool) else None
            return None if inner is None else replace(inner, trainable=grad)
        kind = _wrapped_class(record)
        if kind not in SLICES:
            return None
        if len(record.args) != 4 or not isinstance(record.args[2], tuple) or len(record.args[2]) < 4:
            raise self.bad(name, f"is a {kind} that torch would not write so", show(record.args))
        _, dtype, size = record.args[2][:3]
        if isinstance(size, (tuple, list)) and all(type(n) is int and 0 <= n < 1 << 62 for n in size):
            shape = tuple(size)
        else:
            raise self.bad(name, "has an impossible shape", show(size), "bad-shape")
        if len(shape) > _MOST_AXES or math.prod(max(n, 1) for n in shape) >= 1 << 60:
            raise self.bad(name, "is larger than any file", f"shape {show(shape)}", "size-overflow")
        known = BY_NAME.get(dtype.name) if isinstance(dtype, Global) and dtype.module == "torch" else None
        if known is None:
            raise Unsupported(
                f"the element type of {name} is {show(str(dtype))}, which is not known here",
                where=self.reader.path,
                code="unknown-dtype",
            )
        made = (self._dtensor if kind == "DTensor" else self._sharded)(record.args[3], name, shape, known)
        for part in made.parts:
            if part.ref.dtype.name != known.name:
                why = f"the tensor is {known.name}, this rank's part {part.ref.dtype.name}"
                raise self.bad(name, "has a part of another element type", why, "dtype-mismatch")
        return made

    def bad(self, name: str, what: str, why: str, code: str = "placement-damaged") -> CkptError:
        """Damaged, about one tensor of this file."""
        return Damaged(f"{name} {what}", where=f"{self.reader.path}, {name}", why=why, code=code)

    # ---- DTensor ----------------------------------------------------------------------------------------------------

    def _dtensor(self, state: Tree, name: str, shape: tuple[int, ...], dtype: DType) -> Slice:
        slots = _state(state)
        local, spec = slots.get("_local_tensor"), slots.get("_spec")
        if not isinstance(local, TensorRef) or not isinstance(spec, Record):
            raise self.bad(name, "is a DTensor without its local tensor or its spec", show(sorted(map(str, slots))))
        fields = _state(spec.state)
        mesh, placements = fields.get("mesh"), fields.get("placements")
        plain = _plain_placements(placements)
        key = (shape, id(mesh), plain, id(placements) if plain is None else 0, id(fields.get("shard_order")))
        if key not in self.boxes:
            self.kept += [mesh, placements, fields.get("shard_order")]  # ids stay those of living objects
            self.boxes[key] = self._box(fields, name, shape)
        box = self.boxes[key]
        size, grid = box.size, box.grid
        if local.shape != size and (local.numel or math.prod(size)):
            raise self.bad(
                name,
                "has a local tensor that its placements do not give",
                f"rank {self._rank_of(spec)} at {grid.coordinate} of mesh {grid.shape} holds {size} of "
                f"{shape} by them, and {show(local.shape)} in the file",
                "shard-shape-mismatch",
            )
        parts = (self._part(box.lo, local),) if math.prod(size) else ()
        rank = self._rank_of(spec)
        return Slice(shape, dtype, parts, self.file, "dtensor", grid.ranks, rank, box.ways, box.way, box.axes)

    def _rank_of(self, spec: Record) -> int:
        mesh = _state(spec.state).get("mesh")
        rank = _state(mesh.state).get("_rank") if isinstance(mesh, Record) else None
        return rank if type(rank) is int else self.number

    def _box(self, spec: Mapping[str, Tree], name: str, shape: tuple[int, ...]) -> Box:
        grid = self._mesh(spec.get("mesh"), name)
        placements = self._placements(spec.get("placements"), name, shape, grid)
        orders: dict[int, list[int]] = {}
        for dim in dict.fromkeys(p.dim for p in placements if p.dim is not None):
            order = cutting_order(placements, grid.shape, dim)
            if order is None:
                raise Unsupported(
                    f"{name} is cut in an order that its placements do not tell",
                    where=self.reader.path,
                    why=f"placements {placements} on a mesh of {grid.shape}",
                    code="placement-order",
                )
            orders[dim] = self._recorded(spec, placements, grid, dim, order, name)
        lo, size = box_of(shape, orders, grid)
        ways, way, axes = 1, 0, 0
        for axis, p in enumerate(placements):
            if p.dim is not None:
                ways, way = ways * grid.shape[axis], way * grid.shape[axis] + grid.coordinate[axis]
                axes += grid.shape[axis] > 1
        return Box(lo, size, grid, ways, way, axes)

    def _recorded(
        self, spec: Mapping[str, Tree], placements: list[Placement], grid: Grid, dim: int, order: list[int], name: str
    ) -> list[int]:
        """The order as the spec records it. Unsupported where several plain Shards cut one axis and none is recorded.

        Before `_StridedShard` FSDP2 over TP was two plain Shards whose order was the reverse of what they now mean.
        """
        many = [axis for axis in order if grid.shape[axis] > 1]
        if len(many) < 2 or any(p.dim == dim and p.split > 1 for p in placements):
            return order
        entries = spec.get("shard_order")
        for entry in entries if isinstance(entries, tuple) else ():
            fields = entry.args if isinstance(entry, Record) else entry
            if isinstance(fields, tuple) and len(fields) == 2 and fields[0] == dim and isinstance(fields[1], tuple):
                if sorted(map(str, fields[1])) != sorted(map(str, order)):
                    raise self.bad(name, "has a shard order that its placements contradict", show(fields[1]))
                return list(fields[1])
        raise Unsupported(
            f"{name} is cut by several axes of the mesh on one of its own, and the order is not recorded",
            where=self.reader.path,
            why=f"placements {placements} on a mesh of {grid.shape}, as torch before 2.6 may have meant either way",
            fix="save it with torch.distributed.checkpoint, whose index has offsets",
            code="placement-order",
        )

    def _placements(self, tree: Tree, name: str, shape: tuple[int, ...], grid: Grid) -> list[Placement]:
        if not isinstance(tree, (tuple, list)) or len(tree) != len(grid.shape):
            raise self.bad(name, f"does not have one placement an axis of its mesh {grid.shape}", show(tree))
        out = []
        for p in tree:
            kind = p.cls.rpartition(".")[2] if isinstance(p, Record) else ""
            state = _state(p.state) if isinstance(p, Record) else {}
            dim, split = state.get("dim"), state.get("split_factor", 1)
            if kind == "Replicate":
                out.append(Placement())
            elif kind in ("Shard", "_StridedShard"):
                if type(dim) is not int or not 0 <= dim < len(shape):
                    raise self.bad(name, f"is cut on axis {show(dim)}", f"it has {len(shape)} axes")
                if type(split) is not int or not 0 < split < 1 << 31:
                    raise self.bad(name, f"has a split factor of {show(split)}", "it is a number of ranks")
                out.append(Placement(dim, split))
            elif kind in ("Partial", "_Partial"):
                raise Unsupported(
                    f"{name} is a partial sum on each rank",
                    where=self.reader.path,
                    why="its placement is Partial: the sum of all ranks' values is the tensor",
                    fix="redistribute it before saving",
                )
            else:
                raise self.bad(name, f"has a placement that is not known: {show(kind or p)}", "")
        return out

    def _mesh(self, mesh: Tree, name: str) -> Grid:
        if not isinstance(mesh, Record):
            raise self.bad(name, "has no mesh", show(mesh))
        if id(mesh) not in self.meshes:
            state = _state(mesh.state)
            self.meshes[id(mesh)] = (self._laid_out if "_layout" in state else self._listed)(state, name)
        return self.meshes[id(mesh)]

    def _laid_out(self, state: Mapping[str, Tree], name: str) -> Grid:
        """A mesh as torch 2.9 and later keep it: a layout of places in a map of ranks."""
        layout = state["_layout"]
        fields = _state(layout.state) if isinstance(layout, Record) else {}
        if "axes" in fields:
            found = [_state(a.state) for a in fields["axes"] if isinstance(a, Record)]
            axes = [(_ints(f.get("shape")), _ints(f.get("stride"))) for f in found]
        else:  # one layout with an entry an axis
            shape, stride = fields.get("shape"), fields.get("stride")
            pair = (shape, stride) if isinstance(shape, tuple) and isinstance(stride, tuple) else ((shape,), (stride,))
            axes = [(_ints(n), _ints(s)) for n, s in zip(*pair, strict=False)]
        ranks = self._rank_list(state.get("_rank_map"), name)
        rank = state.get("_rank", self.number)
        plain = all(n is not None and s is not None and len(n) == len(s) for n, s in axes) and type(rank) is int
        grid = grid_of([(n or (), s or ()) for n, s in axes], ranks, rank) if plain and axes else None
        if grid is None:
            raise self.bad(name, "has a mesh in which its rank has no place", f"rank {show(rank)} of {show(ranks)}")
        return grid

    def _listed(self, state: Mapping[str, Tree], name: str) -> Grid:
        """A mesh as torch before 2.9 keeps it: an array of ranks, and the saving rank's place in it."""
        mesh = state.get("mesh", state.get("_mesh"))
        if not isinstance(mesh, TensorRef):
            raise self.bad(name, "has a mesh without its ranks", show(sorted(map(str, state))))
        ranks = self._rank_list(mesh, name)
        place = state.get("_coordinate_on_dim")
        if isinstance(place, (list, tuple)) and len(place) == len(mesh.shape):
            coordinate = tuple(place)
        elif self.number in ranks:
            coordinate = tuple(int(i) for i in np.unravel_index(ranks.index(self.number), mesh.shape))
        else:
            coordinate = ()
        if len(coordinate) != len(mesh.shape) or not all(
            type(c) is int and 0 <= c < n for c, n in zip(coordinate, mesh.shape, strict=True)
        ):
            raise self.bad(name, "has a mesh in which its rank has no place", f"{show(coordinate)} of {mesh.shape}")
        return Grid(mesh.shape, coordinate, tuple(ranks))

    def _rank_list(self, ref: Tree, name: str) -> list[int]:
        if not isinstance(ref, TensorRef) or ref.dtype.name not in ("int32", "int64") or not ref.numel:
            raise self.bad(name, "has a mesh without its ranks", show(ref))
        array = read_array(ref, self.reader, _MESH_LIMIT)
        ranks: list[int] = np.frombuffer(array.data, np.dtype(array.dtype)).tolist()
        if min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise self.bad(name, "has a mesh that lists a rank twice, or a negative one", show(ranks))
        return ranks

    # ---- ShardedTensor ----------------------------------------------------------------------------------------------

    def _sharded(self, state: Tree, name: str, shape: tuple[int, ...], dtype: DType) -> Slice:
        """State: (local shards, metadata, process group, sharding spec, rrefs)."""
        if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
            raise self.bad(name, "is a ShardedTensor that torch would not write so", show(state))
        parts = []
        for shard in state[0]:
            fields = _state(shard.state) if isinstance(shard, Record) else {}
            ref, metadata = fields.get("tensor"), fields.get("metadata")
            where = _state(metadata.state) if isinstance(metadata, Record) else {}
            lo, size = _ints(where.get("shard_offsets")), _ints(where.get("shard_sizes"))
            if not isinstance(ref, TensorRef) or lo is None or size is None or not len(lo) == len(size) == len(shape):
                raise self.bad(name, "has a shard that does not say where it lies", show(sorted(map(str, where))))
            if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(lo, size, shape, strict=True)):
                raise self.bad(name, "has a shard outside it", f"offsets {lo}, sizes {size}, the tensor is {shape}")
            if ref.shape != size:
                why = f"its metadata says {size}, the tensor in the file is {show(ref.shape)}"
                raise self.bad(name, "has a shard of another size", why, "shard-shape-mismatch")
            if ref.numel:
                parts.append(self._part(lo, ref))
        self._require_listed(state[1], parts, name)
        group = _state(state[2].state) if isinstance(state[2], Record) else {}
        numbers = [group.get(k) for k in ("global_rank", "global_world_size", "local_rank", "local_world_size")]
        told = _ints(numbers)
        if told is None:
            raise self.bad(name, "does not say which rank wrote it", show(numbers))
        rank, world, way, ways = told
        if not (0 <= rank < world <= 1 << 24 and 0 <= way < ways <= world):
            raise self.bad(name, "was written by a rank that cannot be", f"rank {show(rank)} of {show(world)}")
        # Within groups of ranks only the group's size is told: whether it is whole shows when the pieces are joined.
        ranks = tuple(range(world)) if ways == world else ()
        return Slice(shape, dtype, tuple(parts), self.file, "sharded", ranks, rank, ways, way, 1)

    def _require_listed(self, metadata: Tree, parts: list[Part], name: str) -> None:
        listed = _state(metadata.state).get("shards_metadata") if isinstance(metadata, Record) else None
        if not isinstance(listed, list) or not listed:
            raise self.bad(name, "does not list its shards", show(metadata))
        offsets = [_ints(_state(m.state).get("shard_offsets")) for m in listed if isinstance(m, Record)]
        if any(p.lo not in offsets for p in parts):
            raise self.bad(name, "holds a shard that its own list does not have", show([p.lo for p in parts]))


def _wrapped_class(record: Record) -> str:
    """The class of a tensor subclass in `_rebuild_from_type_v2`; "" for other records."""
    if record.cls.rpartition(".")[2] not in ("_rebuild_from_type_v2", "_rebuild_from_type") or len(record.args) < 2:
        return ""
    kind = record.args[1]
    return kind.name if isinstance(kind, Global) and kind.module.startswith("torch.distributed") else ""


def _state(tree: Tree) -> Mapping[str, Tree]:
    """An object's attributes: a dict, or (dict or None, slots)."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and len(tree) == 2 and all(part is None or isinstance(part, dict) for part in tree):
        return {**(tree[0] or {}), **(tree[1] or {})}
    return {}


def _plain_placements(placements: Tree) -> tuple[tuple[str, int, int], ...] | None:
    """Placements as (class, axis or -1, split factor), to be compared; None where there is more to them."""
    out = []
    for p in placements if isinstance(placements, (tuple, list)) else (None,):
        state = _state(p.state) if isinstance(p, Record) else {"dim": None}
        dim, split = state.get("dim", -1), state.get("split_factor", 1)
        if type(dim) is not int or type(split) is not int:
            return None
        out.append((p.cls, dim, split))
    return tuple(out)


def _ints(tree: Tree) -> tuple[int, ...] | None:
    """Whole numbers as a tuple, one as a tuple of one; None for anything else, and for numbers beyond 62 bits."""
    items: list[Any] = [tree] if type(tree) is int else list(tree) if isinstance(tree, (tuple, list)) else [None]
    return tuple(items) if all(type(n) is int and abs(n) < 1 << 62 for n in items) else None
