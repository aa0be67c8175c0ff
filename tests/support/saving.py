"""Small checkpoints of NumPy arrays made by hand: torch files, DCP folders, Hugging Face folders. No product writer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import safetensors.numpy

from ckptctl.core.values import Global, OrderedPairs, Record
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.support.torchfiles import REBUILD, call, stored, torch_zip, v2

if TYPE_CHECKING:
    from pathlib import Path

STORAGE = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
META = "torch.distributed.checkpoint.metadata"


class Strided(NamedTuple):
    """A view of an array's storage: offset and stride in elements. more is what comes after the hooks (conj, neg)."""

    base: np.ndarray
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    more: tuple[Any, ...] = ()


class Parameter(NamedTuple):
    """An nn.Parameter."""

    data: Any
    requires_grad: bool = True


class _Saving:
    def __init__(self) -> None:
        self.storages: dict[str, bytes] = {}
        self.keys: dict[int, str] = {}
        self.kept: list[Any] = []
        self.records: dict[int, Record] = {}

    def tree(self, at: Any) -> Any:
        """The tree with arrays as torch writes tensors; one array object is one storage."""
        if isinstance(at, Parameter):
            return call(f"{REBUILD}._rebuild_parameter", self.tree(at.data), at.requires_grad, OrderedPairs())
        if isinstance(at, np.ndarray):
            strides = tuple(s // at.itemsize for s in np.empty(at.shape, at.dtype).strides)
            return self.tensor(Strided(at, 0, at.shape, strides))
        if isinstance(at, Strided):
            return self.tensor(at)
        if isinstance(at, OrderedPairs):
            return OrderedPairs({k: self.tree(v) for k, v in at.items()})
        if isinstance(at, dict):
            return {k: self.tree(v) for k, v in at.items()}
        if isinstance(at, (list, tuple)):
            return type(at)(self.tree(v) for v in at)
        if isinstance(at, Record):  # one object stays one
            if id(at) not in self.records:
                self.kept.append(at)
                made = Record(at.func, self.tree(at.args), at.how, at.kwargs, self.tree(at.state), at.has_state)
                self.records[id(at)] = made
            return self.records[id(at)]
        return at

    def tensor(self, view: Strided) -> Record:
        base = view.base
        key = self.keys.setdefault(id(base), str(len(self.keys)))
        self.kept.append(base)
        self.storages[key] = base.tobytes()
        dtype = base.dtype.name
        if dtype in STORAGE:
            return v2(stored(key, base.size, STORAGE[dtype]), view.offset, view.size, view.stride, *view.more)
        untyped = stored(key, base.nbytes, "UntypedStorage")
        return call(
            f"{REBUILD}._rebuild_tensor_v3",
            untyped,
            view.offset,
            view.size,
            view.stride,
            False,
            OrderedPairs(),
            Global("torch", dtype),
        )


def torch_bytes(tree: Any) -> bytes:
    """A torch file of a tree whose tensors are NumPy arrays, Strided views or Parameters."""
    saving = _Saving()
    return torch_zip(saving.tree(tree), saving.storages)


def torch_save(path: Path, tree: Any) -> Path:
    """The same, as a file."""
    path.write_bytes(torch_bytes(tree))
    return path


class Chunk(NamedTuple):
    """A chunk of a DCP tensor: the file's name and its first index and size."""

    file: str
    lo: tuple[int, ...]
    size: tuple[int, ...]


def dcp_save(
    folder: Path,
    items: dict[tuple[str | int, ...], Any],
    cut: dict[str, list[Chunk]] | None = None,
    *,
    paths: bool = True,
) -> Path:
    """A DCP folder: items by path, named by the path joined with dots. Arrays are whole, or as cut says."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, bytearray] = {}
    state, storage, planner = {}, {}, {}

    def place(name: str, offset: Any, number: int | None, file: str, data: bytes) -> None:
        at = files.setdefault(file, bytearray())
        info = {"relative_path": file, "offset": len(at), "length": len(data)}
        at += data
        storage[_object(META, "MetadataIndex", {"fqn": name, "offset": offset, "index": number})] = _object(
            "torch.distributed.checkpoint.filesystem", "_StorageInfo", info
        )

    for path, value in items.items():
        name = ".".join(map(str, path))
        planner[name] = tuple(path)
        if not isinstance(value, np.ndarray):
            state[name] = _object(META, "BytesStorageMetadata", None)
            place(name, None, None, "__0_0.distcp", torch_bytes(value))
            continue
        chunks = (cut or {}).get(name) or [Chunk("__0_0.distcp", (0,) * value.ndim, value.shape)]
        rows = []
        for number, chunk in enumerate(chunks):
            part = value[tuple(slice(a, a + n) for a, n in zip(chunk.lo, chunk.size, strict=True))]
            lo = SizeTuple(chunk.lo)
            rows.append(_object(META, "ChunkStorageMetadata", {"offsets": lo, "sizes": SizeTuple(chunk.size)}))
            place(name, lo, number, chunk.file, torch_bytes(np.array(part, order="C")))
        layout = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory = Record(Global(META, "_MEM_FORMAT_ENCODING"), (0,))
        properties = _object(
            META, "TensorProperties", (Global("torch", value.dtype.name), layout, False, memory, False)
        )
        state[name] = _object(
            META, "TensorStorageMetadata", {"properties": properties, "size": SizeTuple(value.shape), "chunks": rows}
        )
    metadata = {
        "state_dict_metadata": state,
        "planner_data": planner if paths else None,
        "storage_data": storage,
        "storage_meta": None,
    }
    (folder / ".metadata").write_bytes(dump(_object(META, "Metadata", metadata)))
    for file, data in files.items():
        (folder / file).write_bytes(bytes(data))
    return folder


def _object(module: str, name: str, state: Any) -> Record:
    return Record(Global(module, name), (), "newobj", state=state, has_state=state is not None)


def hf_save(
    folder: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    """A Hugging Face folder of one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def arange(*shape: int, dtype: Any = np.float32, start: float = 0) -> np.ndarray:
    """Distinct numbers in a shape."""
    return (np.arange(np.prod(shape, dtype=int)) + start).reshape(shape).astype(dtype)


def adamw(names: list[Any], states: dict[Any, np.ndarray], *, step: float = 3, **options: Any) -> dict[str, Any]:
    """An AdamW state dict in one group: names are keys as params lists them, states by key give the moments' shapes."""
    state = {
        k: {"step": np.array(step, np.float32), "exp_avg": v + np.float32(0.5), "exp_avg_sq": v * np.float32(0.25)}
        for k, v in states.items()
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, **options, "params": names}
    return {"state": state, "param_groups": [group]}
