"""The index of an old zarr checkpoint: a folder a tensor with a file a chunk. Reads `.zarray` files, no data.

Source: Megatron-LM core_v0.15.0, core/dist_checkpointing/strategies/zarr.py (`_create_zarr_array`: no compressor,
chunks of one size); the zarr 2 specification (array metadata).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.formats.bytesource import read_whole
from ckptctl.formats.dcp.metadata import ByteItem, Chunks, Index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARRAY = ".zarray"
BACKEND = "metadata.json"
_TYPES = {
    "bfloat16": "bfloat16", "<f4": "float32", "<f2": "float16", "<f8": "float64", "|u1": "uint8", "|i1": "int8",
    "<i2": "int16", "<i4": "int32", "<i8": "int64", "|b1": "bool",
}  # fmt: skip
_OBJECT = re.compile(r"shard_[\d.]+_[\d.]+\.pt")
_MOST_CHUNKS = 1 << 24
_MOST_AXES = 16


def is_zarr(path: Path) -> bool:
    """Whether a folder's metadata.json says that its tensors are zarr arrays."""
    file = path / BACKEND
    return file.is_file() and says_zarr(read_whole(file, 1 << 20))


def says_zarr(text: bytes) -> bool:
    """Whether a metadata.json says that tensors are zarr arrays."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("sharded_backend") == "zarr"


def read_index(path: Path) -> Index:
    """Every array and object of a folder. As index_of."""
    sizes = {}
    for top, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files) if Path(top) != path else ():
            full = Path(top) / file
            sizes[full.relative_to(path).as_posix()] = full.stat().st_size
    return index_of(sizes, lambda name: read_whole(path / name, 1 << 20), str(path))


def index_of(sizes: Mapping[str, int], read: Callable[[str], bytes], where: str) -> Index:
    """Every array and object among files of those sizes, by their names in a folder; read gives a small one's bytes.

    Unsupported for codecs and types that are not read, by name.
    """
    out = Index()
    for file, nbytes in sizes.items():
        name, _, last = file.rpartition("/")
        if last == ARRAY:
            out.items[name] = _array(name, _metadata(read(file), name), sizes, out)
        elif _OBJECT.fullmatch(last):
            out.files.append(file)
            item = file.removesuffix(".pt")
            out.items[item] = ByteItem(item, len(out.files) - 1, 0, nbytes)
    if not out.items:
        raise MissingFile("no array is there", where=where, why=f"{BACKEND} says zarr", fix="copy the folder again")
    return out


def _array(name: str, said: dict[str, Any], sizes: Mapping[str, int], out: Index) -> Chunks:
    shape, chunk = (_sizes(said, k, name) for k in ("shape", "chunks"))
    dtype = _dtype(said, name)
    if len(shape) != len(chunk) or len(shape) > _MOST_AXES or any(n < 1 for n in chunk):
        raise Damaged(
            f"{name} has shape {shape} in chunks of {chunk}", where=f"{name}/{ARRAY}", code="metadata-damaged"
        )
    if any(n % c for n, c in zip(shape, chunk, strict=True)):
        raise Unsupported(
            f"{name} {shape} is in chunks of {chunk}, which do not divide it",
            where=f"{name}/{ARRAY}",
            why="Megatron's ranks write parts of one size",
        )
    counts = [n // c for n, c in zip(shape, chunk, strict=True)]
    total = int(np.prod(counts, dtype=np.float64)) if counts else 1
    if total > _MOST_CHUNKS:
        raise Damaged(f"{name} would be in {total} chunks", where=f"{name}/{ARRAY}", code="metadata-damaged")
    nbytes = dtype.nbytes(chunk)
    separator = said.get("dimension_separator", ".")
    at = np.indices(counts).reshape(len(counts), -1).T if counts else np.zeros((1, 0), np.int64)
    first = len(out.files)
    for row in at.tolist():
        file = str(separator).join(map(str, row)) if row else "0"
        have = sizes.get(f"{name}/{file}")
        if have != nbytes:
            what = (
                f"chunk {file} of {name} is not there" if have is None else f"chunk {file} of {name} has {have} bytes"
            )
            error = MissingFile if have is None else Damaged
            raise error(what, where=f"{name}/{file}", why=f"a chunk has {nbytes} bytes", fix="copy the file again")
        out.files.append(f"{name}/{file}")
    n = len(at)
    lo = at.astype(np.int64) * np.array(chunk, np.int64)
    size = np.broadcast_to(np.array(chunk, np.int64), lo.shape).copy()
    numbers = np.arange(first, first + n, dtype=np.int32)
    lengths = np.full(n, nbytes, np.int64)
    return Chunks(name, dtype, shape, lo, size, numbers, np.zeros(n, np.int64), lengths, bare=True)


def _metadata(text: bytes, name: str) -> dict[str, Any]:
    where = f"{name}/{ARRAY}"
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise Damaged(f"{ARRAY} of {name} is no JSON", where=where, why=str(err), code="metadata-damaged") from err
    if not isinstance(said, dict):
        raise Damaged(f"{ARRAY} of {name} is no JSON object", where=where, code="metadata-damaged")
    for key in ("compressor", "filters"):
        codec = said.get(key)
        if codec:
            called = codec.get("id") if isinstance(codec, dict) else [f.get("id") for f in codec if isinstance(f, dict)]
            raise Unsupported(
                f"{name} is stored with {key} {called}, which is not read",
                where=f"{name}/{ARRAY}",
                why="Megatron writes arrays without one",
                fix="write the arrays again without a compressor",
                code="codec",
            )
    if said.get("order", "C") != "C" or said.get("zarr_format", 2) != 2:
        raise Unsupported(f"{name} is in order {said.get('order')}, zarr {said.get('zarr_format')}", where=name)
    return said


def _sizes(said: dict[str, Any], key: str, name: str) -> tuple[int, ...]:
    found = said.get(key)
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in found):
        raise Damaged(f"{key} of {name} is {found!r:.60}", where=f"{name}/{ARRAY}", code="metadata-damaged")
    return tuple(found)


def _dtype(said: dict[str, Any], name: str) -> DType:
    known = _TYPES.get(str(said.get("dtype")))
    if known is None:
        raise Unsupported(f"{name} is of type {said.get('dtype')!r:.40}, which is not read", where=f"{name}/{ARRAY}")
    return BY_NAME[known]
