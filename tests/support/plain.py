"""Torch files and DCP folders read by Python's own zipfile and pickle: no product code, no torch. For trusted files.

Never give it anything from fixtures/checkpoints/broken: it runs pickles (with stand-ins for every class but a few).
"""

from __future__ import annotations

import builtins
import collections
import io
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.checkpoints import Truth, digest

# torch's name, bytes of an element, safetensors' name. Written down again: a slip in the product's own table shows.
KNOWN = [
    ("bool", 1, "BOOL"),
    ("uint8", 1, "U8"),
    ("int8", 1, "I8"),
    ("int16", 2, "I16"),
    ("uint16", 2, "U16"),
    ("float16", 2, "F16"),
    ("bfloat16", 2, "BF16"),
    ("int32", 4, "I32"),
    ("uint32", 4, "U32"),
    ("float32", 4, "F32"),
    ("int64", 8, "I64"),
    ("uint64", 8, "U64"),
    ("float64", 8, "F64"),
    ("complex64", 8, "C64"),
    ("complex128", 16, "C128"),
    ("float8_e4m3fn", 1, "F8_E4M3"),
    ("float8_e5m2", 1, "F8_E5M2"),
    ("float8_e8m0fnu", 1, "F8_E8M0"),
    ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
]
ITEM = {name: item for name, item, _ in KNOWN}
SAFETENSORS = {name: short for name, _, short in KNOWN}
STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class Plain(NamedTuple):
    """A tensor: torch's name of its type, its shape, its bytes packed row-major, and its storage's key."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    storage: str = ""

    @property
    def truth(self) -> Truth:
        """As truth files say it."""
        return digest(SAFETENSORS[self.dtype], self.shape, self.data)

    def numbers(self) -> np.ndarray:
        """As NumPy values, for types that NumPy has."""
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class Stand:
    """Any class that a pickle names; keeps what it was given."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


def _tensor(
    storage: tuple[str, str, bytes], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *more: Any
) -> Plain:
    dtype, key, raw = storage
    if len(more) > 2 and isinstance(more[2], str):
        dtype = more[2]  # _rebuild_tensor_v3
    item = ITEM[dtype]
    if not math.prod(size):
        return Plain(dtype, tuple(size), b"", key)
    elements = np.frombuffer(raw, f"V{item}")[offset:]
    view = np.lib.stride_tricks.as_strided(elements, size, [s * item for s in stride], writeable=False)
    return Plain(dtype, tuple(size), view.tobytes(), key)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storages: dict[str, bytes]) -> None:
        super().__init__(io.BytesIO(data))
        self.storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("builtins", "__builtin__") and name in ("set", "frozenset", "complex", "bytearray"):
            return getattr(builtins, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda tensor, *_: tensor
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and (name in ITEM or name == "strided"):
            return name
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "uint8"
        return type(name, (Stand,), {"__module__": module})

    def persistent_load(self, pid: Any) -> tuple[str, str, bytes]:
        _, dtype, key, _, numel = pid
        assert len(self.storages[key]) == numel * ITEM[dtype]
        return dtype, key, self.storages[key]


def torch_tree(data: bytes | Path) -> Any:
    """The tree of a torch zip; zipfile checks the checksum of every record that is read."""
    raw = data.read_bytes() if isinstance(data, Path) else data
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        root = archive.namelist()[0].split("/")[0]
        storages = {n.split("/", 2)[2]: archive.read(n) for n in archive.namelist() if n.startswith(f"{root}/data/")}
        return _Unpickler(archive.read(f"{root}/data.pkl"), storages).load()


class Dcp(NamedTuple):
    """A DCP folder: items by flat name, tensors put together; their paths; and chunks as (file, lo, size)."""

    items: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    chunks: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]


def dcp_folder(folder: Path) -> Dcp:
    """Reads a folder. Fails where chunks overlap, leave a hole, or are not what the metadata says."""
    meta = _Unpickler((folder / ".metadata").read_bytes(), {}).load().state
    places = {(i.state["fqn"], i.state.get("offset")): s.state for i, s in meta["storage_data"].items()}
    files = {path: (folder / path).read_bytes() for path in {s["relative_path"] for s in places.values()}}
    out, used = Dcp({}, dict(meta["planner_data"]), {}), set()

    def item(name: str, offset: Any) -> Any:
        s = places[name, offset]
        used.add((name, offset))
        return torch_tree(files[s["relative_path"]][s["offset"] : s["offset"] + s["length"]]), s["relative_path"]

    for name, m in meta["state_dict_metadata"].items():
        if type(m).__name__ == "BytesStorageMetadata":
            out.items[name] = item(name, None)[0]
            continue
        properties = m.state["properties"]
        size, (dtype, *_) = (
            tuple(m.state["size"]),
            properties.state if hasattr(properties, "state") else properties.args,
        )
        whole, seen = np.zeros(size, f"V{ITEM[dtype]}"), np.zeros(size, np.uint8)
        out.chunks[name] = []
        for chunk in m.state["chunks"]:
            lo, extent = chunk.state["offsets"], chunk.state["sizes"]
            got, path = item(name, lo)
            assert (got.dtype, got.shape) == (dtype, extent), name
            at = tuple(slice(a, a + n) for a, n in zip(lo, extent, strict=True))
            whole[at] = np.frombuffer(got.data, f"V{ITEM[dtype]}").reshape(extent)
            seen[at] += 1
            out.chunks[name].append((path, lo, extent))
        assert (seen == 1).all(), name
        out.items[name] = Plain(dtype, size, whole.tobytes())
    assert used == set(places)
    return out


def nested(dcp: Dcp) -> Any:
    """The nested state by the folder's own paths; dicts whose keys are all integers are lists."""
    root: dict[Any, Any] = {}
    for name, value in dcp.items.items():
        *path, last = dcp.paths[name]
        at = root
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value

    def lists(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        inner = {k: lists(v) for k, v in tree.items()}
        return list(inner.values()) if inner and all(isinstance(k, int) for k in inner) else inner

    return lists(root)
