"""`.metadata`: which tensors there are, how they are cut, and where each chunk's item lies. Reads that one pickle.

Opens no data file.

Source: torch 2.13.0, distributed/checkpoint/metadata.py (Metadata, TensorStorageMetadata, MetadataIndex), filesystem.py
(_StorageInfo). Older
releases pickle TensorProperties from distributed/_shard/sharded_tensor/metadata.py; absent fields are optional.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.checkpoint import PathKey, UnsafeGlobal
from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import Damaged, Unsafe, Unsupported
from ckptctl.core.values import Global, Record, Tree
from ckptctl.formats.paths import why_outside
from ckptctl.formats.pickles.build import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.tensor import Ints
    from ckptctl.formats.bytesource import ByteSource

NAME = ".metadata"
_META = "torch.distributed.checkpoint.metadata."
ZSTD = "stream.zstd/1"
_METADATA_LIMIT = 1 << 32
_PATH_LIMIT = 64
"""Keys in the path of one item; state dicts are a few levels deep."""


@dataclass(frozen=True, eq=False, slots=True)
class Copies:
    """Items that hold a chunk again, as columns: the row of the chunk, and where the item lies."""

    row: Ints
    file: Ints
    offset: Ints
    length: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Chunks:
    """One tensor of the index: its chunks as columns.

    Offset and length are those of each chunk's item in file number file; where it is bare, of the chunk's bytes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    lo: Ints
    size: Ints
    file: npt.NDArray[np.int32]
    offset: Ints
    length: Ints
    codec: str = ""
    bare: bool = False
    copies: Copies | None = None


@dataclass(frozen=True, slots=True)
class ByteItem:
    """One Python object of the index, and where its item lies. copies are the items of other ranks under its name."""

    name: str
    file: int
    offset: int
    length: int
    codec: str = ""
    copies: tuple[ByteItem, ...] = ()


@dataclass
class Index:
    """All of `.metadata`. items are in the order of the file.

    Paths gives the place in the nested state of each name.
    """

    items: dict[str, Chunks | ByteItem] = field(default_factory=dict)
    paths: dict[str, tuple[PathKey, ...]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _chunk(state: Tree) -> Tree:
    return state["offsets"], state["sizes"]


def _index(state: Tree) -> Tree:
    return state["fqn"], state.get("offset")


def _info(state: Tree) -> Tree:
    transforms = state.get("transform_descriptors")
    return state["relative_path"], state["offset"], state["length"], tuple(transforms) if transforms else ()


def _tensor(state: Tree) -> Tree:
    return state["properties"], state["size"], state["chunks"]


KNOWN = {
    _META + "ChunkStorageMetadata": _chunk,
    _META + "MetadataIndex": _index,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _info,
    _META + "TensorStorageMetadata": _tensor,
    _META + "Metadata": lambda state: dict(state),
}


def read_index(reader: ByteSource) -> Index:
    """The index of a folder.

    Damaged where a chunk has no item, a name leads outside the folder, or numbers make no sense.
    """
    if reader.nbytes > _METADATA_LIMIT:
        raise Damaged(
            f"the metadata has {reader.nbytes} bytes, more than {_METADATA_LIMIT}",
            where=reader.path,
            code="header-too-large",
        )
    loaded = load(reader.read(0, reader.nbytes), reader.path, known=KNOWN)
    tree = loaded.tree
    if not isinstance(tree, dict) or not isinstance(tree.get("state_dict_metadata"), dict):
        raise Damaged(
            "the metadata is no DCP metadata", where=reader.path, why=f"it holds {_kind(tree)}", code="metadata-damaged"
        )
    if loaded.stop != reader.nbytes:  # one changed byte may end it anywhere
        raise Damaged(
            "bytes follow the pickle",
            where=reader.path,
            why=f"it stops at byte {loaded.stop} of {reader.nbytes}",
            fix="copy the file again",
            code="trailing-bytes",
        )
    out = Index(unsafe=[UnsafeGlobal(reader.path, str(f.name), f.why) for f in loaded.unsafe])
    try:
        _fill(out, tree, reader.path)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError) as err:
        raise Damaged(
            "the metadata is damaged",
            where=reader.path,
            why=f"{type(err).__name__}: {err}",
            fix="copy the file again",
            code="metadata-damaged",
        ) from err
    return out


def _kind(tree: Tree) -> str:
    return tree.cls if isinstance(tree, Record) else type(tree).__name__


def _fill(out: Index, tree: Mapping[str, Any], where: str) -> None:
    storage = tree.get("storage_data")
    if not isinstance(storage, dict):
        raise Damaged("the metadata has no storage_data", where=where, code="metadata-damaged")
    numbers: dict[str, int] = {}
    for name, meta in tree["state_dict_metadata"].items():
        if isinstance(meta, tuple):
            out.items[name] = _chunks(name, meta, storage, numbers, where)
        elif isinstance(meta, Record):
            info = storage.get((name, None))
            if info is None:
                raise Damaged(
                    f"{name} has no place in a file",
                    where=where,
                    why="storage_data does not list it",
                    code="metadata-damaged",
                )
            out.items[name] = ByteItem(
                name,
                _file(info[0], numbers, where),
                _offset(info[1], name, where),
                _offset(info[2], name, where),
                _codec(info[3], name, where),
            )
        else:
            raise Damaged(
                f"{name} is neither a tensor nor an object",
                where=where,
                why=f"it is {_kind(meta)}",
                code="metadata-damaged",
            )
    out.files = list(numbers)
    planner = tree.get("planner_data")
    if isinstance(planner, dict):
        deep = next((n for n, p in planner.items() if isinstance(p, tuple) and len(p) > _PATH_LIMIT), None)
        if deep is not None:
            raise Damaged(
                f"the path of {deep!r} has more than {_PATH_LIMIT} keys", where=where, code="metadata-damaged"
            )
        out.paths = {
            n: tuple(p)
            for n, p in planner.items()
            if isinstance(p, tuple) and all(isinstance(k, (str, int)) for k in p)
        }


def _chunks(
    name: str, meta: tuple[Tree, ...], storage: Mapping[Tree, Tree], numbers: dict[str, int], where: str
) -> Chunks:
    properties, size, chunks = meta
    shape = _sizes(size, name, where)
    n, k = len(chunks), len(shape)
    lo, box = np.empty((n, k), np.int64), np.empty((n, k), np.int64)
    file, offset, length = np.empty(n, np.int32), np.empty(n, np.int64), np.empty(n, np.int64)
    codecs = set()
    for row, (at, extent) in enumerate(chunks):
        info = storage.get((name, at))
        if info is None:
            raise Damaged(
                f"a chunk of {name} has no place in a file",
                where=where,
                why=f"storage_data does not list its offsets {tuple(at)}",
                code="metadata-damaged",
            )
        if len(at) != k or len(extent) != k:
            raise Damaged(f"a chunk of {name} has {len(at)} axes, the tensor {k}", where=where, code="metadata-damaged")
        lo[row], box[row] = at, extent
        file[row] = _file(info[0], numbers, where)
        offset[row], length[row] = _offset(info[1], name, where), _offset(info[2], name, where)
        codecs.add(_codec(info[3], name, where))
    if len(codecs) > 1:
        raise Unsupported(f"the chunks of {name} are encoded in several ways", where=where)
    if k and bool(((lo < 0) | (box < 0) | (lo + box > np.array(shape, np.int64))).any()):
        raise Damaged(f"a chunk of {name} goes past its shape {shape}", where=where, code="metadata-damaged")
    return Chunks(
        name, _dtype(properties, name, where), shape, lo, box, file, offset, length, codecs.pop() if codecs else ""
    )


def _sizes(size: Tree, name: str, where: str) -> tuple[int, ...]:
    if not isinstance(size, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in size):
        raise Damaged(f"the shape of {name} is {size!r}", where=where, code="bad-shape")
    total = 1
    for n in size:
        total *= max(n, 1)
    if total >= 1 << 60:
        raise Damaged(f"the shape of {name}, {tuple(size)}, overflows", where=where, code="size-overflow")
    return tuple(size)


def _offset(value: Tree, name: str, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Damaged(f"the place of {name} is {value!r}", where=where, code="bad-offsets")
    return value


def _dtype(properties: Tree, name: str, where: str) -> DType:
    """TensorProperties pickles its fields as a tuple (dtype first) under __setstate__, or as a dict; or it is a call.

    Source: torch 2.13.0, distributed/checkpoint/metadata.py, TensorProperties.__getstate__.
    """
    state = properties
    if isinstance(properties, Record):
        state = properties.state if properties.has_state else properties.args
    first = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    dtype = BY_NAME.get(first.name) if isinstance(first, Global) and first.module == "torch" else None
    if dtype is None:
        raise Unsupported(
            f"the element type of {name} is {first}, which is not known here", where=where, code="unknown-dtype"
        )
    return dtype


def _codec(transforms: tuple[str, ...], name: str, where: str) -> str:
    if not transforms:
        return ""
    if transforms == (ZSTD,):
        return "zstd"
    raise Unsupported(
        f"{name} is encoded by {', '.join(map(str, transforms))}", where=where, why="only stream.zstd is known here"
    )


def _file(path: Tree, numbers: dict[str, int], where: str) -> int:
    number = numbers.get(path) if isinstance(path, str) else None
    if number is None:
        _require_inside(path, where)
        number = numbers[path] = len(numbers)
    return number


def _require_inside(path: Tree, where: str) -> None:
    """Unsafe where a name may lead out of the checkpoint's folder."""
    why = why_outside(path) if isinstance(path, str) else "it is no text"
    if why:
        raise Unsafe(
            f"the metadata names the file {path!r}",
            where=where,
            why=f"{why}: it may lead outside the checkpoint",
            fix="do not use this checkpoint; ask who made it",
            code="path-escapes",
        )
