"""Makes a big checkpoint without a model: what FSDP2 on R ranks and Adam leave in a PyTorch distributed checkpoint.

    python benchmarks/make_synthetic.py OUT [--size 2GB] [--ranks 2]

OUT/ckpt is the checkpoint: weights, exp_avg, exp_avg_sq and step of a Llama-shaped model in float32, rows cut over the
ranks, and parameter groups. OUT/config/config.json is the model's configuration. Values are noise. The vocabulary alone
makes 200 MB, so sizes below that are not met. Needs NumPy only, and holds a few MiB whatever the size: items are
written one after the other, and torch's classes are stand-ins with the right names.

Source: the files are as torch 2.13.0 writes them: torch/distributed/checkpoint/filesystem.py (items and storage_data),
metadata.py (the classes of .metadata), torch/serialization.py and caffe2/serialize/inline_container.cc (the zips).
"""

from __future__ import annotations

import argparse
import copyreg
import io
import json
import math
import pickle
import shutil
import struct
import sys
import types
import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
VOCAB = 32_000


class Shape(NamedTuple):
    """The sizes of a Llama model; heads are 64 wide, four query heads share one key/value head."""

    hidden: int
    inner: int
    layers: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the model's order."""
        h, kv = self.hidden, self.hidden // 4
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, h)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            out |= {f"{at}.self_attn.q_proj.weight": (h, h), f"{at}.self_attn.k_proj.weight": (kv, h)}
            out |= {f"{at}.self_attn.v_proj.weight": (kv, h), f"{at}.self_attn.o_proj.weight": (h, h)}
            out |= {f"{at}.mlp.gate_proj.weight": (self.inner, h), f"{at}.mlp.up_proj.weight": (self.inner, h)}
            out |= {f"{at}.mlp.down_proj.weight": (h, self.inner)}
            out |= {f"{at}.input_layernorm.weight": (h,), f"{at}.post_attention_layernorm.weight": (h,)}
        return out | {"model.norm.weight": (h,), "lm_head.weight": (VOCAB, h)}

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        heads = self.hidden // 64
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads // 4, "head_dim": 64, "vocab_size": VOCAB}
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu"}
        return {**kind, **sizes, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def shape_of(nbytes: int, by: int = 1) -> Shape:
    """The Llama-like sizes whose weights and two moments in float32 come nearest to nbytes.

    by: what divides the numbers of layers and of key/value heads.
    """
    best: tuple[float, Shape] | None = None
    for hidden in (256, 512, 1024, 2048, 4096, 8192):
        inner = -(-hidden * 8 // 3 // 256) * 256
        layer = hidden * hidden * 5 // 2 + 3 * hidden * inner
        layers = max(1, round((nbytes / 12 - 2 * VOCAB * hidden) / layer / by)) * by
        if hidden // 256 % by:
            continue
        off = abs(12 * (2 * VOCAB * hidden + layers * layer) / nbytes - 1) + abs(math.log(layers / 16)) / 10
        if best is None or off < best[0]:
            best = off, Shape(hidden, inner, layers)
    assert best is not None
    return best[1]


# Stand-ins for torch's classes: pickle writes the names of what it is given, so things with these names will do.


def stand_in(module: str, name: str, thing: Any = None) -> Any:
    """A class (or thing) that pickles as the global `module name`."""
    thing = thing if thing is not None else type(name, (), {})
    thing.__module__ = module
    parent = sys.modules.setdefault(module, types.ModuleType(module))
    setattr(parent, name, thing)
    return thing


class Called:
    """An object that pickles as a call of function with arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


class Named:
    """An object that pickles as a global of its own name, as torch's dtypes do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> str:
        return self.name


def function(name: str) -> Callable[..., None]:
    """A function that is called name and does nothing."""

    def stand(*_: Any) -> None:
        return None

    stand.__name__ = stand.__qualname__ = name
    return stand


META = "torch.distributed.checkpoint.metadata"
Metadata = stand_in(META, "Metadata")
TensorStorageMetadata = stand_in(META, "TensorStorageMetadata")
BytesStorageMetadata = stand_in(META, "BytesStorageMetadata")
TensorProperties = stand_in(META, "TensorProperties")
ChunkStorageMetadata = stand_in(META, "ChunkStorageMetadata")
MetadataIndex = stand_in(META, "MetadataIndex")
MemFormat = stand_in(META, "_MEM_FORMAT_ENCODING")
StorageInfo = stand_in("torch.distributed.checkpoint.filesystem", "_StorageInfo")
Size = stand_in("torch", "Size")
FloatStorage = stand_in("torch", "FloatStorage")
float32 = stand_in("torch", "float32", Named("float32"))
get_layout = stand_in("torch.serialization", "_get_layout", function("_get_layout"))
rebuild_tensor = stand_in("torch._utils", "_rebuild_tensor_v2", function("_rebuild_tensor_v2"))


def made(kind: Any, state: Any) -> Any:
    """An instance that pickles as object.__new__ and then that state, as a dataclass does."""

    class Instance(Called):
        def __reduce__(self) -> Any:
            return copyreg.__newobj__, (kind,), state  # type: ignore[attr-defined]

    return Instance(None)


def size(numbers: tuple[int, ...]) -> Called:
    """A torch.Size."""
    return Called(Size, numbers)


class Pickler(pickle._Pickler):  # noqa: SLF001  the C one insists on real classes
    """Writes Called and made objects; storages by their persistent id."""

    def persistent_id(self, obj: Any) -> Any:
        """What torch.save gives for a storage; None for all else."""
        return obj.identity if isinstance(obj, StorageRef) else None

    def save_reduce(self, func: Any, args: Any, state: Any = None, *rest: Any, obj: Any = None, **more: Any) -> None:
        """Write NEWOBJ without the check that obj is an instance of the class it will be read as."""
        if func is copyreg.__newobj__:  # type: ignore[attr-defined]
            self.save(args[0])
            self.save(())
            self.write(pickle.NEWOBJ)
            self.memoize(obj)
            if state is not None:
                self.save(state)
                self.write(pickle.BUILD)
            return
        super().save_reduce(func, args, state, *rest, obj=obj, **more)


class StorageRef(NamedTuple):
    """Stands where a tensor's storage is."""

    identity: tuple[Any, ...]


def pickled(value: Any, protocol: int) -> bytes:
    """The value as a pickle."""
    out = io.BytesIO()
    Pickler(out, protocol).dump(value)
    return out.getvalue()


# One item: a torch.save zip.


def write_item(out: BinaryIO, pickle_bytes: bytes, nbytes: int, data: Iterator[bytes] | None) -> int:
    """Writes one zip at out's position, returns its length; data are the nbytes of storage 0, None for no storage."""
    start, central = out.tell(), []
    records: list[tuple[str, int, Iterator[bytes]]] = [("data.pkl", len(pickle_bytes), iter([pickle_bytes]))]
    for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
        records.append((name, len(text), iter([text])))
    if data is not None:
        records.append(("data/0", nbytes, data))
    records += [("version", 2, iter([b"3\n"])), (".data/serialization_id", 40, iter([b"0" * 40]))]
    for name, length, chunks in records:
        path = f"archive/{name}".encode()
        at = out.tell() - start
        pad = -(at + 30 + len(path) + 4) % 64
        out.write(struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(path), 4 + pad))
        out.write(path + struct.pack("<2sH", b"FB", pad) + b"Z" * pad)
        crc = 0
        for chunk in chunks:
            out.write(chunk)
            crc = zlib.crc32(chunk, crc)
        if length:
            out.write(struct.pack("<4s3I", b"PK\7\x08", crc, length, length))
        fixed = struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, 0x0808, 0, 0, 0, crc, length, length, len(path), 0, 0, 0, 0, 0, at
        )
        central.append(fixed + path)
    first, directory, n = out.tell() - start, b"".join(central), len(central)
    out.write(directory)
    at = out.tell() - start
    out.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, n, n, len(directory), first))
    out.write(struct.pack("<4sIQI", b"PK\6\7", 0, at, 1))
    out.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, n, n, len(directory), first, 0))
    return out.tell() - start


class Noise:
    """Endless float32 noise from one block of 8 MiB, a prime number of elements on each time."""

    def __init__(self) -> None:
        block = np.random.default_rng(0).normal(0, 0.02, 2**21).astype("<f4")
        self.block, self.squares = block.tobytes(), (block * block).tobytes()
        self.at = 0

    def take(self, nbytes: int, *, squares: bool) -> Iterator[bytes]:
        """Nbytes of it, in chunks; of its squares, as second moments are."""
        block = self.squares if squares else self.block
        self.at = (self.at + 4 * 1009) % len(block)
        at = self.at
        while nbytes:
            chunk = block[at : at + nbytes]
            yield chunk
            nbytes, at = nbytes - len(chunk), 0


def tensor_pickle(shape: tuple[int, ...]) -> bytes:
    """data.pkl of a dense float32 tensor."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    storage = StorageRef(("storage", FloatStorage, "0", "cpu", math.prod(shape)))
    return pickled(Called(rebuild_tensor, storage, 0, shape, strides, False, {}), 2)


def rows_of(shape: tuple[int, ...], ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of each rank's rows as FSDP2 cuts them: ceil(rows / ranks), late ranks fewer. () is rank 0's."""
    if not shape:
        return [((), ())]
    step = -(-shape[0] // ranks)
    cuts = [min(shape[0], rank * step) for rank in range(ranks + 1)]
    rest = (0,) * (len(shape) - 1)
    return [((a, *rest), (b - a, *shape[1:])) for a, b in pairwise(cuts)]


def write(folder: Path, shape: Shape, ranks: int) -> None:
    """The checkpoint's files, rank by rank, then .metadata."""
    names = shape.tensors()
    tensors: dict[tuple[str | int, ...], tuple[int, ...]] = {("model", name): s for name, s in names.items()}
    for name, s in names.items():
        tensors |= {("optim", "state", name, "step"): (), ("optim", "state", name, "exp_avg"): s}
        tensors[("optim", "state", name, "exp_avg_sq")] = s
    decay = [[n for n, s in names.items() if len(s) > 1], [n for n, s in names.items() if len(s) < 2]]
    values: dict[tuple[str | int, ...], Any] = {}
    for number, params in enumerate(decay):
        group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": (0.1, 0.0)[number], "params": params}
        values |= {("optim", "param_groups", number, key): value for key, value in group.items()}

    state: dict[str, Any] = {}
    strided, contiguous = Called(get_layout, "torch.strided"), Called(MemFormat, 0)
    properties = made(TensorProperties, (float32, strided, False, contiguous, False))
    for path, full in tensors.items():
        chunks = [made(ChunkStorageMetadata, {"offsets": size(lo), "sizes": size(n)}) for lo, n in rows_of(full, ranks)]
        state[dotted(path)] = made(
            TensorStorageMetadata, {"properties": properties, "size": size(full), "chunks": chunks}
        )
    state |= {dotted(path): made(BytesStorageMetadata, {}) for path in values}

    storage: dict[Any, Any] = {}
    noise = Noise()
    for rank in range(ranks):
        file = f"__{rank}_0.distcp"
        with (folder / file).open("wb") as out:
            for path, value in values.items() if rank == 0 else ():
                at = out.tell()
                length = write_item(out, pickled(value, 2), 0, None)
                key = made(MetadataIndex, {"fqn": dotted(path)})
                storage[key] = made(StorageInfo, {"relative_path": file, "offset": at, "length": length})
            for path, full in tensors.items():
                boxes = rows_of(full, ranks)
                if rank >= len(boxes):
                    continue
                lo, n = boxes[rank]
                at, nbytes = out.tell(), 4 * math.prod(n)
                data = (
                    noise.take(nbytes, squares=path[-1] == "exp_avg_sq") if full else iter([np.float32(1000).tobytes()])
                )
                length = write_item(out, tensor_pickle(n), nbytes, data)
                key = made(MetadataIndex, {"fqn": dotted(path), "offset": size(lo), "index": rank})
                storage[key] = made(StorageInfo, {"relative_path": file, "offset": at, "length": length})
    planner = {dotted(path): path for path in (*tensors, *values)}
    whole = {"state_dict_metadata": state, "planner_data": planner, "storage_data": storage, "storage_meta": None}
    (folder / ".metadata").write_bytes(pickled(made(Metadata, {**whole, "version": "1.0.0"}), 4))


def dotted(path: tuple[str | int, ...]) -> str:
    """The key under which DCP keeps a value."""
    return ".".join(map(str, path))


def parse(text: str) -> int:
    """Bytes of "2GB", "512MiB", "1000"."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=parse, default="2GB", help="weights and both moments together (default: 2GB)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--by", type=int, default=1, help="what divides the numbers of layers and key/value heads")
    arguments = parser.parse_args()
    shape = shape_of(arguments.size, arguments.by)
    shutil.rmtree(arguments.out, ignore_errors=True)
    (arguments.out / "ckpt").mkdir(parents=True)
    (arguments.out / "config").mkdir()
    (arguments.out / "config" / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    write(arguments.out / "ckpt", shape, arguments.ranks)
    total = sum(p.stat().st_size for p in (arguments.out / "ckpt").iterdir())
    print(f"{arguments.out}: {total / 1e9:.2f} GB, {arguments.ranks} ranks, {shape}")


if __name__ == "__main__":
    main()
