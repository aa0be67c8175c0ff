"""Random plans with the bytes they must make, and jobs over files of their sources. The product never imports this."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, OutputFile, Put, Region
from ckptctl.core.tensor import Key, Piece, PieceTable, Source, Tensor, dense_strides
from ckptctl.execute import Job, work
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Case:
    """A plan, the bytes of its sources, and what each output file must hold."""

    plan: Plan
    sources: list[bytes]
    wanted: dict[str, bytes]

    def job(self, folder: Path, *, target: str = "made") -> Job:
        """Write the sources below folder and name the job."""
        root = folder / "source"
        root.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(self.sources):
            path = root / str(number)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        sources = self.plan.index.sources
        return Job(self.plan, check(self.plan), sources, root, folder / target, True, {"test": 1})

    def found(self, folder: Path, target: str = "made") -> dict[str, bytes]:
        """What a finished job's folder holds, by path."""
        root = folder / target
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def laid_out(rng: random.Random, array: np.ndarray, item: int, sources: list[bytes], scale: int) -> list[Piece]:
    """Cut an array (the last axis: an item's bytes) into pieces, add the files that hold them, in one of four ways."""
    shape = array.shape[:-1]
    n, k = math.prod(shape), len(shape)
    kind = rng.choice(["rows", "columns", "flat", "turned"]) if k else "flat"
    pieces = []

    def add(data: bytes) -> tuple[int, int]:
        pad = rng.randint(0, 3 * scale)
        sources.append(rng.randbytes(pad) + data + rng.randbytes(rng.randint(0, 2)))
        return len(sources) - 1, pad

    if kind == "flat":
        flat = array.reshape(n, item)
        cut = sorted([0, n, *(rng.randint(0, n) for _ in range(rng.randint(0, 4)))])
        for a, b in pairwise(cut):
            number, pad = add(flat[a:b].tobytes())
            pieces.append(Piece((n,), (a,), (b - a,), number, pad, (item,)))
    elif kind == "turned":
        order = list(range(k))
        rng.shuffle(order)
        turned = np.ascontiguousarray(array.transpose(*order, k))
        steps = dense_strides(tuple(shape[p] for p in order), item)
        strides = [0] * k
        for i, p in enumerate(order):
            strides[p] = steps[i]
        number, pad = add(turned.tobytes())
        pieces.append(Piece(shape, (0,) * k, shape, number, pad, tuple(strides)))
    else:
        axis = 0 if kind == "rows" else k - 1
        cut = sorted([0, shape[axis], *(rng.randint(0, shape[axis]) for _ in range(rng.randint(0, 4)))])
        for a, b in pairwise(cut):
            lo, size = [0] * k, list(shape)
            lo[axis], size[axis] = a, b - a
            part = np.ascontiguousarray(array[tuple(slice(x, x + m) for x, m in zip(lo, size, strict=True))])
            number, pad = add(part.tobytes())
            pieces.append(Piece(shape, tuple(lo), tuple(size), number, pad, dense_strides(tuple(size), item)))
        rng.shuffle(pieces)
    return pieces


def random_case(seed: int, *, scale: int = 1, extent_nbytes: int | None = None) -> Case:
    """A plan of up to three tensors and three files. scale multiplies the sizes of axes."""
    rng = random.Random(seed)
    sources: list[bytes] = []
    tensors: dict[Key, Tensor] = {}
    arrays: dict[Key, np.ndarray] = {}
    for number in range(rng.randint(1, 3)):
        shape = tuple(rng.randint(1, 7 * scale if i < 2 else 5) for i in range(rng.choice([0, 1, 2, 2, 3])))
        dtype = BY_NAME[rng.choice(["uint8", "float16", "float32", "int64", "complex128"])]
        key = Key(f"t{number}")
        array = np.frombuffer(rng.randbytes(math.prod(shape) * dtype.itemsize), np.uint8)
        arrays[key] = array.reshape(*shape, dtype.itemsize)
        pieces = laid_out(rng, arrays[key], dtype.itemsize, sources, scale)
        tables = (PieceTable.of(pieces, dtype.itemsize),)
        tensors[key] = Tensor(key, dtype, shape, tables)
    files, wanted = [], {}
    for number in range(rng.randint(1, 3)):
        segments, data = random_segments(rng, tensors, arrays)
        path = rng.choice(["", "a/", "a/b/"]) + f"file{number}"
        files.append(OutputFile(path, lambda segments=segments: segments))
        wanted[path] = data
    index = SourceIndex(tensors, [Source(str(i)) for i in range(len(sources))])
    largest = max(map(len, wanted.values()))
    size = extent_nbytes or rng.choice([e for e in (16, 64, 4096, 1 << 20) if largest < 200 * e])
    return Case(Plan(tuple(files), index, extent_nbytes=size), sources, wanted)


def random_segments(rng, tensors, arrays):
    """Segments of one file and their bytes."""
    segments, data = [Put(rng.randbytes(rng.randint(0, 9)))], bytearray()
    data += segments[0].data
    for _ in range(rng.randint(0, 4)):
        key = rng.choice(list(tensors))
        shape, dtype, array = tensors[key].shape, tensors[key].dtype, arrays[key]
        crc = rng.random() < 0.5
        if rng.random() < 0.3:
            fill = Fill(rng.randint(0, 50), rng.randbytes(rng.randint(1, 5)), "padding")
            segments.append(fill)
            data += (fill.value * 50)[: fill.nbytes]
        if rng.random() < 0.4 or not shape:
            n = math.prod(shape)
            a = rng.randint(0, n)
            b = rng.randint(a, n)
            segments.append(Region(key, dtype, (n,), (a,), (b - a,), crc=crc))
            data += array.reshape(n, dtype.itemsize)[a:b].tobytes()
        else:
            lo = tuple(rng.randrange(v) for v in shape)
            size = tuple(rng.randint(1, v - x) for v, x in zip(shape, lo, strict=True))
            segments.append(Region(key, dtype, shape, lo, size, crc=crc))
            data += np.ascontiguousarray(array[tuple(slice(x, x + m) for x, m in zip(lo, size, strict=True))]).tobytes()
    return segments, bytes(data)


def stop_after(monkeypatch, n, err=KeyboardInterrupt):
    """The job fails when a worker begins its n-th gang."""
    real, calls = work.Worker.do, []

    def do(self, gang):
        calls.append(gang)
        if len(calls) > n:
            raise err
        return real(self, gang)

    monkeypatch.setattr(work.Worker, "do", do)
