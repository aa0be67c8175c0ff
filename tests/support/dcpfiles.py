"""DCP folders made by hand: any names, tensors in any number of chunks, objects. No torch; one `.distcp` file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.values import Global, OrderedPairs, Record
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.support.torchfiles import stored, torch_zip, v2

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

META, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class Cut(NamedTuple):
    """A tensor in boxes: its shape, and each box's first index and values."""

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], np.ndarray]]


def _made(module: str, name: str, state: Any) -> Record:
    return Record(Global(module, name), (), "newobj", state=state, has_state=state is not None)


def tensor(array: np.ndarray, storages: dict[str, bytes]) -> Any:
    """A float32 tensor of a torch zip; its bytes go to storages."""
    array = np.ascontiguousarray(array, np.float32)
    key = str(len(storages))
    storages[key] = array.tobytes()
    return v2(stored(key, array.size), 0, array.shape, tuple(s // 4 for s in array.strides))


def write_dcp(folder: Path, items: Mapping[str, Any], *, chunks: int = 1) -> None:
    """A folder of those items: arrays in as many chunks of rows as divide them, at most chunks; others as objects."""
    folder.mkdir(parents=True, exist_ok=True)
    data, state, storage = bytearray(), {}, {}

    def put(name: str, offset: Any, tree: Any, storages: dict[str, bytes]) -> None:
        item = torch_zip(tree, storages)
        info = {"relative_path": "__0_0.distcp", "offset": len(data), "length": len(item)}
        storage[_made(META, "MetadataIndex", {"fqn": name, "offset": offset, "index": None})] = _made(
            FILES, "_StorageInfo", info
        )
        data.extend(item)

    for name, value in items.items():
        boxes: list[tuple[tuple[int, ...], np.ndarray]]
        if isinstance(value, Cut):
            shape, boxes = value.shape, value.boxes
        elif not isinstance(value, np.ndarray):
            put(name, None, value, {})
            state[name] = _made(META, "BytesStorageMetadata", None)
            continue
        else:
            shape = value.shape
            n = next((c for c in range(chunks, 0, -1) if value.ndim and shape[0] % c == 0), 1)
            parts = np.split(value, n) if value.ndim else [value]
            firsts = [(i * parts[0].shape[0], *(0,) * (value.ndim - 1)) if value.ndim else () for i in range(n)]
            boxes = list(zip(firsts, parts, strict=True))
        listed = []
        for first, part in boxes:
            lo = SizeTuple(first)
            storages: dict[str, bytes] = {}
            put(name, lo, tensor(part, storages), storages)
            listed.append(_made(META, "ChunkStorageMetadata", {"offsets": lo, "sizes": SizeTuple(part.shape)}))
        properties = Record(Global(META, "TensorProperties"), (Global("torch", "float32"),))
        fields = {"properties": properties, "size": SizeTuple(shape), "chunks": listed}
        state[name] = _made(META, "TensorStorageMetadata", fields)
    (folder / "__0_0.distcp").write_bytes(bytes(data))
    meta = {"state_dict_metadata": state, "planner_data": None, "storage_data": storage, "storage_meta": None}
    (folder / ".metadata").write_bytes(dump(_made(META, "Metadata", meta)))


def plain_pickle(root: Mapping[str, Any]) -> bytes:
    """A torch zip of a dict whose arrays are tensors."""
    storages: dict[str, bytes] = {}

    def put(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return tensor(value, storages)
        if isinstance(value, dict) and not isinstance(value, OrderedPairs):
            return {k: put(v) for k, v in value.items()}
        return value

    return torch_zip(put(dict(root)), storages)
