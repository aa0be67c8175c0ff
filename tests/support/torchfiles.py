"""Torch files made by hand, and their tensors' bytes taken out through strides. No torch."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import numpy as np

from ckptctl.core.values import Global, OrderedPairs, Record, TensorRef
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import PersistentId

REBUILD = "torch._utils"


def call(dotted: str, *args: Any) -> Record:
    """A call as a pickle has it."""
    module, _, name = dotted.rpartition(".")
    return Record(Global(module, name), args)


def stored(key: str, numel: int, cls: str = "FloatStorage", location: str = "cpu", *more: Any) -> PersistentId:
    """The persistent id of a storage; more is the sixth entry that streams before 1.6 have."""
    module = "torch.storage" if cls == "UntypedStorage" else "torch"
    return PersistentId(("storage", Global(module, cls), key, location, numel, *more))


def v2(storage: Any, offset: Any, size: Any, stride: Any, *more: Any, grad: bool = False) -> Record:
    """A tensor as torch writes it."""
    return call(f"{REBUILD}._rebuild_tensor_v2", storage, offset, size, stride, grad, OrderedPairs(), *more)


def torch_zip(
    tree: Any, storages: dict[str, bytes], root: str = "archive", method: int = zipfile.ZIP_STORED, **records: bytes
) -> bytes:
    """A torch file of a tree and its storages, as a zip."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr(f"{root}/data.pkl", tree if isinstance(tree, bytes) else dump(tree))
        archive.writestr(f"{root}/version", b"3\n")
        for key, data in storages.items():
            archive.writestr(f"{root}/data/{key}", data)
        for name, data in records.items():
            archive.writestr(f"{root}/{name.replace('__', '.')}", data)
    return out.getvalue()


def torch_stream(tree: Any, storages: list[tuple[str, int, bytes]], little: bool = True) -> bytes:
    """A stream as before torch 1.6: storages are (key, number of elements, bytes)."""
    system = {"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = [0x1950A86A20F9469CFC6C, 1001, system, tree, [key for key, _, _ in storages]]
    tail = [struct.pack("<q", numel) + data for _, numel, data in storages]
    return b"".join([*map(dump, head), *tail])


def tensor_bytes(ref: TensorRef, file: bytes) -> bytes:
    """A tensor's elements, packed row-major, taken out of the whole file's bytes through offset and strides."""
    item = ref.dtype.itemsize
    whole = file[ref.storage.start_byte : ref.storage.start_byte + ref.storage.nbytes]
    array = np.frombuffer(whole, dtype=f"V{item}")
    if not ref.numel:
        return b""
    view = np.lib.stride_tricks.as_strided(
        array[ref.offset :], ref.shape, [step * item for step in ref.stride], writeable=False
    )
    return view.tobytes()
