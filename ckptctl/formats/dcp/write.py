"""A DCP folder as output files: `__R_0.distcp` for each rank, cut as FSDP2 cuts over a mesh, and `.metadata`.

Nothing is written here.

Convert gives what torch's own get_state_dict names: `model.<fqn>`, `optim.state.<fqn>.<kind>`,
`optim.param_groups.<i>.<option>`; reshard keeps
the source's names and paths. Source: torch 2.13.0, distributed/checkpoint/state_dict.py, default_planner.py,
filesystem.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, OTHER, Entry, Optimizer, PathKey
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import Fill, OutputFile, Put, Region, Segment
from ckptctl.core.values import Array, Global, Held, Record, Tree
from ckptctl.formats.dcp.cut import Mesh, box_of
from ckptctl.formats.dcp.metadata import NAME
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import NumpyArray, SizeTuple
from ckptctl.formats.target import Choices, Content, Item, Line, Written
from ckptctl.formats.torch.write import TorchTree, averages, merged_states
from ckptctl.names.parallel import tensor_parallel_axis

if TYPE_CHECKING:
    from ckptctl.core.dtype import DType

_META = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True, eq=False, slots=True)
class Named:
    """One item of the state to write: its flat name, its path, and a tensor or a value."""

    name: str
    path: tuple[PathKey, ...]
    item: Item | None = None
    value: Tree = None
    held: Mapping[tuple[str, str], Item] = field(default_factory=dict)
    whole: tuple[int, ...] = ()
    """The shape of the tensor where item is only its rows from `first` on: others of that name have the rest."""
    first: int = 0
    filled: str = ""
    """Why its elements are zeros, "" where they are the item's."""


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A chunk on a rank: rows [start, stop) of a tensor, or all of one without rows."""

    named: Named
    lo: tuple[int, ...]
    size: tuple[int, ...]
    region: Region | None


def write(content: Content, choices: Choices) -> Written:
    """The folder for a mesh of choices.dp times choices.tp ranks."""
    return laid_out(list(own_items(content) if choices.own_names else _standard(content)), content, choices)


def laid_out(named: Sequence[Named], content: Content, choices: Choices, at: str = "") -> Written:
    """The files of a folder with those items, below `at` ("step-3/") where it is given, and what the report says."""
    lines = layout_lines(content, named, choices)
    numbered = [] if choices.own_names else [p for n, v in content.values.items() for p in _numbered(n, v)]
    if numbered:
        detail = f"{', '.join(numbered[:4])}: keys that are numbers become text, since DCP joins keys to names"
        lines.append(Line("values", "converted", detail))
    return Written(tuple(folder(named, choices, at)), True, tuple(lines))


def folder(named: Sequence[Named], choices: Choices, at: str = "") -> list[OutputFile]:
    """The files of one folder with these items, below `at` in the result."""
    _unique(named)
    mesh = Mesh(choices.dp, choices.tp)
    ranks = [list(_of_rank(named, rank, mesh)) for rank in range(mesh.ranks)]
    files, places = [], []
    for rank, chunks in enumerate(ranks):
        if not chunks:
            continue
        path = f"__{rank}_0.distcp"
        lengths = tuple(_lengths(chunks))
        places.append((path, chunks, lengths))
        files.append(OutputFile(at + path, lambda chunks=chunks: _segments(chunks)))  # type: ignore[misc]
    metadata = dump(_metadata(named, places))
    files.append(OutputFile(at + NAME, lambda: [Put(metadata)]))
    return files


def layout_lines(content: Content, named: Sequence[Named], choices: Choices) -> list[Line]:
    """What the report says of the cut, and of encodings of the source that are not kept."""
    mesh = Mesh(choices.dp, choices.tp)
    how = f"DCP for {mesh}: rows of axis 0 in parts of ceil(rows / ranks), as FSDP2 cuts"
    if mesh.tp > 1:
        cut = sum(_axis(n.item) is not None for n in named if n.item is not None)
        of = sum(n.item is not None and len(n.item.shape) > 0 for n in named)
        how += f"; {cut} of {of} tensors are cut over tp first, by the usual plan for their names, the others are not"
    lines = [Line("layout", "written", how)]
    packed = sum(bool(n.item is not None and n.item.module) for n in named)
    if packed and mesh.ranks > 1:
        lines.append(Line("layout", "written", f"{packed} tensors of quantized weights whole, each module in one file"))
    kept = content.source.variant if content.source.format == "dcp" else ""
    if kept and kept != "torchtitan":  # that is a naming, not an encoding
        lines.append(
            Line("encoding", "converted", f"the source's ({kept}) is not kept: one {NAME}, items as torch archives")
        )
    return lines


# ---- what to write --------------------------------------------------------------------------------------------------


def _standard(content: Content) -> Iterator[Named]:
    yield from model_items(content)
    averaged = averages(content)
    if content.optimizer is not None or len(content.states) > len(averaged):
        yield from optimizer_items(content)
    for name, item in averaged.items():
        yield Named(f"{EMA}.{name}", (EMA, name), item)
    for name, value in content.values.items():
        if name in ("model", "optim") or (averaged and name == EMA):
            raise Unsupported(
                f"a value of the source is called {name}, as a part of the result is",
                fix="rename it where the source is made",
            )
        yield from flattened((name,), value, content.held)


def model_items(content: Content, key: str = "model", prefix: str = "") -> Iterator[Named]:
    """The weights, and what stands among them, under a key of the state; prefix stands before every name."""
    for name, item in content.weights.items():
        yield Named(f"{key}.{prefix}{name}", (key, prefix + name), item)
    for name, value in content.model_values.items():
        yield Named(f"{key}.{prefix}{name}", (key, prefix + name), None, value, content.held)


def optimizer_items(
    content: Content, key: str = "optim", prefix: str = "", owner: int | None = None
) -> Iterator[Named]:
    """The optimizer under a key of the state, or that one of several which owner says.

    The first has what no group lists.
    """
    optimizer = content.optimizer or Optimizer(())
    groups = [g for g in optimizer.groups if owner is None or g.owner == owner]
    others = {n for g in optimizer.groups if g not in groups for n in g.params}
    mine = {n for g in groups for n in g.params}
    states = merged_states(content, optimizer, lambda item: item, lambda value: value)
    for name, entry in states.items():
        if name in others or (owner and name not in mine):
            continue
        for kind, value in entry.items():
            path = (key, "state", prefix + name, kind)
            yield (
                Named(".".join(path), path, value)
                if isinstance(value, Item)
                else Named(".".join(path), path, None, value)
            )
    for number, group in enumerate(groups):
        for option, value in {**group.options, "params": [prefix + n for n in group.params]}.items():
            path_ = (key, "param_groups", number, option)
            yield from flattened(path_, value, content.held)
    for option, value in optimizer.options.items():
        yield from flattened((key, option), value, content.held)


def own_items(content: Content, inside: str = "") -> Iterator[Named]:
    """Every item under the source's own name and path; of one folder of the source, where it has several."""
    by_key = {i.key: i for i in (*content.weights.values(), *content.states.values())}
    for entry in content.source.entries:
        if entry.folder != inside:
            continue
        if entry.key is None:
            yield Named(entry.name, entry.path, None, entry.value)
        elif entry.key in by_key:
            yield Named(entry.name, entry.path, by_key[entry.key])
        else:
            tensor = content.source.tensors[entry.key]
            yield Named(entry.name, entry.path, Item(entry.key, tensor, tensor.dtype))


def flattened(path: tuple[PathKey, ...], value: Tree, held: Mapping[tuple[str, str], Item]) -> Iterator[Named]:
    """A value as items: dicts always go down; lists where they hold a tensor, a dict or such a list.

    The rest is one item.

    Source: torch 2.13.0, distributed/checkpoint/_traverse.py, traverse_state_dict.
    """
    if isinstance(value, dict) and value and all(isinstance(k, (str, int)) for k in value):
        for key, inner in value.items():
            yield from flattened((*path, str(key)), inner, held)
    elif isinstance(value, list) and _goes_down(value):
        for i, inner in enumerate(value):
            yield from flattened((*path, i), inner, held)
    elif isinstance(value, Held):
        yield Named(".".join(map(str, path)), path, held[value.name, value.kind])
    else:
        yield Named(".".join(map(str, path)), path, None, value, held)


def _numbered(path: str, value: Tree) -> Iterator[str]:
    """Where dicts with numbers as keys are taken apart: torch itself reads such keys back as text."""
    if isinstance(value, dict) and all(isinstance(k, (str, int)) for k in value):
        if any(isinstance(k, int) for k in value):
            yield path
        for key, inner in value.items():
            yield from _numbered(f"{path}.{key}", inner)
    elif isinstance(value, list) and _goes_down(value):
        for i, inner in enumerate(value):
            yield from _numbered(f"{path}.{i}", inner)


def _goes_down(values: Sequence[Tree]) -> bool:
    return any(
        (isinstance(v, (dict, Array, Held)) and not isinstance(v, NumpyArray))
        or (isinstance(v, list) and _goes_down(v))
        for v in values
    )


def _unique(named: Sequence[Named]) -> None:
    seen: set[str] = set()
    for n in named:
        if n.name in seen and not n.first:
            raise Unsupported(
                f"two items of the result would be called {n.name}",
                fix="leave one out with --exclude",
                code="duplicate-name",
            )
        seen.add(n.name)


# ---- how it is cut --------------------------------------------------------------------------------------------------


def _of_rank(named: Sequence[Named], rank: int, mesh: Mesh) -> Iterator[Chunk]:
    """A rank's items: rank 0 has the objects first and whatever is not cut; every rank its box of each tensor."""
    if rank == 0:
        for n in named:
            if n.item is None and not _is_array(n.value):
                yield Chunk(n, (), (), None)
    modules: dict[str, int] = {}
    for number, n in enumerate(named):
        if n.item is not None:
            shape = n.item.shape
            if n.item.module:
                # Packed numbers and their scales: whole, and in one file, module after module over the ranks.
                if modules.setdefault(n.item.module, len(modules)) % mesh.ranks == rank:
                    yield Chunk(n, (0,) * len(shape), shape, n.item.region(crc=True))
                continue
            if not shape or n.item.key.kind == "step" or mesh.ranks == 1:
                if rank == 0:
                    yield _cut(n, (0,) * len(shape), shape)
                continue
            box = box_of(shape, mesh, rank, _axis(n.item) if mesh.tp > 1 else None, number)
            if box is not None:
                yield _cut(n, box.lo, box.size)
        elif rank == 0 and _is_array(n.value):
            yield Chunk(n, (0,) * len(n.value.shape), n.value.shape, None)


def _cut(named: Named, lo: tuple[int, ...], size: tuple[int, ...]) -> Chunk:
    """A box of an item as a chunk of the tensor that it is rows of."""
    assert named.item is not None
    at = (lo[0] + named.first, *lo[1:]) if lo else lo
    return Chunk(named, at, size, None if named.filled else named.item.box(lo, size, crc=True))


def _axis(item: Item) -> int | None:
    """Which axis of a tensor tensor parallelism cuts; states are cut as their parameter is."""
    return None if item.key.kind == OTHER else tensor_parallel_axis(item.key.name, len(item.shape))


def _is_array(value: Tree) -> bool:
    return isinstance(value, Array) and not isinstance(value, NumpyArray)


# ---- the bytes ------------------------------------------------------------------------------------------------------


def _item(chunk: Chunk, base_index: int) -> list[Segment]:
    """One item: a complete torch archive."""
    made, named = TorchTree(held=chunk.named.held), chunk.named
    if named.item is None:
        tree = made.value(named.value)
    elif named.filled:
        tree = made.packed(
            named.item.dtype, chunk.size, [Fill(named.item.dtype.nbytes(chunk.size), b"\0", named.filled)]
        )
    else:
        tree = made.tensor(named.item, chunk.region)
    return made.segments(tree, base_index=base_index, full=False)


def _segments(chunks: Sequence[Chunk]) -> list[Segment]:
    out: list[Segment] = []
    for chunk in chunks:
        out += _item(chunk, len(out))
    return out


def _lengths(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Bytes of each item. Those of tensors follow from type and shape alone, so that equal ones are counted once."""
    for chunk in chunks:
        if chunk.named.item is None:
            yield sum(s.nbytes for s in _item(chunk, 0))
        else:
            yield _tensor_nbytes(chunk.named.item.dtype, chunk.size, chunk.named.item.shape)


@lru_cache(maxsize=65536)
def _tensor_nbytes(dtype: DType, size: tuple[int, ...], shape: tuple[int, ...]) -> int:
    from ckptctl.core.tensor import Key, Tensor

    region = Region(Key(""), dtype, shape, (0,) * len(shape), size, crc=True)
    item = Item(Key(""), Tensor(Key(""), dtype, shape, ()), dtype)
    made = TorchTree()
    return sum(s.nbytes for s in made.segments(made.tensor(item, region), full=False))


# ---- .metadata ------------------------------------------------------------------------------------------------------


def _metadata(named: Sequence[Named], places: Sequence[tuple[str, Sequence[Chunk], Sequence[int]]]) -> Tree:
    chunks: dict[str, list[Tree]] = {}
    storage: dict[Tree, Tree] = {}
    for path, on_rank, lengths in places:
        at = 0
        for chunk, length in zip(on_rank, lengths, strict=True):
            name = chunk.named.name
            info = _object(_STORAGE, "_StorageInfo", {"relative_path": path, "offset": at, "length": length})
            if _is_object(chunk.named):
                storage[_index(name, None, None)] = info
            else:
                rows = chunks.setdefault(name, [])
                lo = SizeTuple(chunk.lo)
                storage[_index(name, lo, len(rows))] = info
                rows.append(_object(_META, "ChunkStorageMetadata", {"offsets": lo, "sizes": SizeTuple(chunk.size)}))
            at += length
    state = {
        n.name: _object(_META, "BytesStorageMetadata", None) if _is_object(n) else _tensor_metadata(n, chunks[n.name])
        for n in named
        if not n.first
    }
    return _object(
        _META,
        "Metadata",
        {
            "state_dict_metadata": state,
            "planner_data": {n.name: n.path for n in named},
            "storage_data": storage,
            "storage_meta": None,
        },
    )


def _is_object(named: Named) -> bool:
    return named.item is None and not _is_array(named.value)


def _object(module: str, name: str, state: Tree) -> Record:
    return Record(_name(module, name), (), "newobj", state=state, has_state=state is not None)


@lru_cache(maxsize=256)
def _name(module: str, name: str) -> Global:
    """One node for each name, so that the pickle mentions it once."""
    return Global(module, name)


def _index(name: str, offset: Tree, number: int | None) -> Record:
    return _object(_META, "MetadataIndex", {"fqn": name, "offset": offset, "index": number})


def _tensor_metadata(named: Named, chunks: list[Tree]) -> Tree:
    dtype, shape = (
        (named.item.dtype.name, named.whole or named.item.shape)
        if named.item is not None
        else (named.value.dtype, named.value.shape)
    )
    # By its constructor, the same since torch 2.1: its state would name an enum that releases before 2.3 lack.
    properties = Record(_name(_META, "TensorProperties"), (_name("torch", dtype),))
    return _object(
        _META, "TensorStorageMetadata", {"properties": properties, "size": SizeTuple(shape), "chunks": chunks}
    )


Writer = Callable[[Content, Choices], Written]
__all__ = ["Entry", "Named", "flattened", "laid_out", "write"]
