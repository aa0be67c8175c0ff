"""The pickle of a DCP `.metadata` of any size, opcode for opcode as CPython's pickler writes it (protocol 4)."""

from __future__ import annotations

import struct

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x04")
        self.memoized = 0
        self.ids: dict[object, int] = {}

    def memo(self, key: object = None) -> None:
        self.out += b"\x94"
        if key is not None:
            self.ids[key] = self.memoized
        self.memoized += 1

    def again(self, key: object) -> bool:
        index = self.ids.get(key)
        if index is not None:
            self.out += bytes((0x68, index)) if index < 256 else b"j" + struct.pack("<I", index)
        return index is not None

    def text(self, text: str) -> None:
        if not self.again(text):
            self.out += bytes((0x8C, len(text))) + text.encode()
            self.memo(text)

    def name(self, module: str, name: str) -> None:
        if not self.again((module, name)):
            self.text(module)
            self.text(name)
            self.out += b"\x93"
            self.memo((module, name))

    def number(self, n: int) -> None:
        if n < 256:
            self.out += bytes((0x4B, n))
        elif n < 65536:
            self.out += b"M" + struct.pack("<H", n)
        else:
            self.out += b"J" + struct.pack("<i", n) if n < 2**31 else b"\x8a\x08" + struct.pack("<q", n)

    def size(self, *extents: int) -> None:
        self.name("torch", "Size")
        for n in extents:
            self.number(n)
        self.out += b")" if not extents else bytes((0x84 + len(extents),))
        for code in (b"", b"\x85", b"R"):
            self.out += code
            self.memo()

    def new(self, module: str, name: str) -> None:
        self.name(module, name)
        self.out += b")\x81"
        self.memo()
        self.mapping()

    def mapping(self) -> None:
        self.out += b"}"
        self.memo()
        self.out += b"("


def metadata_pickle(tensors: int, chunks: int) -> bytes:
    """Metadata of as many tensors, each of (512 * chunks, 4096) in as many chunks of 512 rows, one a rank."""
    w, names = _Writer(), [f"model.layers.{t}.mlp.experts.down_proj.weight" for t in range(tensors)]
    w.new(METADATA, "Metadata")
    w.text("state_dict_metadata")
    w.mapping()
    for name in names:
        w.text(name)
        w.new(METADATA, "TensorStorageMetadata")
        w.text("size")
        w.size(512 * chunks, 4096)
        w.text("chunks")
        w.out += b"]"
        w.memo()
        w.out += b"("
        for rank in range(chunks):
            w.new(METADATA, "ChunkStorageMetadata")
            w.text("offsets")
            w.size(512 * rank, 0)
            w.text("sizes")
            w.size(512, 4096)
            w.out += b"ub"
        w.out += b"eub"
    w.out += b"u"
    w.text("storage_data")
    w.mapping()
    for t, name in enumerate(names):
        for rank in range(chunks):
            w.new(METADATA, "MetadataIndex")
            w.text("fqn")
            w.text(name)
            w.text("offset")
            w.size(512 * rank, 0)
            w.text("index")
            w.number(rank)
            w.out += b"ub"
            w.new(FILESYSTEM, "_StorageInfo")
            w.text("relative_path")
            w.text(f"__{rank}_0.distcp")
            w.text("offset")
            w.number(8_390_000 * t)
            w.text("length")
            w.number(8_390_000)
            w.text("transform_descriptors")
            w.out += b"Nub"
            if rank % 250 == 249:
                w.out += b"u("
    w.out += b"uub."
    return bytes(w.out)
