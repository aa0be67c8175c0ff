"""Plans run by brute force, and the tensors and pieces that tests make them of. None of it is the product's executor.

- `elements(piece)`: element number -> byte, by NumPy's own indexing
- `run(plan, sources)`: the bytes of every output file, each checked to be written once
- `tensor(key, dtype, shape, pieces)`: a Tensor of pieces over any views
"""

from __future__ import annotations

import math
import random
import zlib
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Late
from ckptctl.core.tensor import Piece, PieceTable, Tensor, dense_strides
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.plan.steps import After, Move, Repeat, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Key
    from ckptctl.core.values import Tree
    from ckptctl.plan.planner import Plan
    from ckptctl.plan.steps import Extent, Step


def addresses(start: int, size: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """The byte of each element of a box, as an array of that size."""
    out = np.full(tuple(size), start, np.int64)
    for axis, (n, stride) in enumerate(zip(size, strides, strict=True)):
        out += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(len(size))])
    return out


def numbers(view: Sequence[int], lo: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """The number of each element of a box of a view, in row-major order of the tensor, as an array of that size."""
    whole = np.arange(math.prod(view)).reshape(tuple(view))
    return whole[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]


def elements(piece: Piece) -> dict[int, int]:
    """Element number -> byte for every element of a piece. AssertionError where it holds one twice."""
    which = numbers(piece.view, piece.lo, piece.size).ravel().tolist()
    found = dict(zip(which, addresses(piece.start, piece.size, piece.strides).ravel().tolist(), strict=True))
    assert len(found) == piece.numel
    return found


def dense(shape: tuple[int, ...], item: int, source: int, start: int) -> Piece:
    """A whole tensor that lies packed at a byte of a source."""
    return Piece(shape, (0,) * len(shape), shape, source, start, dense_strides(shape, item))


def torch_tree(path: Path) -> Tree:
    """The value tree of a torch file."""
    with FileBytes(path) as file:
        return open_torch(file).root


def tables(pieces: Iterable[Piece], item: int) -> tuple[PieceTable, ...]:
    """Pieces over any views as tables, one a view."""
    by_view: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_view[piece.view].append(piece)
    return tuple(PieceTable.of(rows, item) for rows in by_view.values())


def tensor(key: Key, dtype: DType, shape: tuple[int, ...], pieces: Iterable[Piece]) -> Tensor:
    """A tensor made of pieces over any views."""
    return Tensor(key, dtype, shape, tables(pieces, dtype.itemsize))


def run(plan: Plan, sources: Sequence[bytes], *, seed: int = 0) -> list[bytes]:
    """Every output file, written extent by extent in a shuffled order.

    AssertionError where extents leave a hole or overlap, a step leaves its extent, steps do not rise, or a byte is not
    written exactly once.
    """
    files = [bytearray(f.nbytes) for f in plan.files]
    times = [np.zeros(f.nbytes, np.int64) for f in plan.files]
    extents = list(plan.extents())
    assert all(e.stop - e.start > 0 for e in extents)
    late: list[tuple[int, After]] = []
    for extent in random.Random(seed).sample(extents, len(extents)):
        steps = plan.extent(extent)
        assert [s.dst for s in steps] == sorted(s.dst for s in steps)
        for step in steps:
            touched = _bytes_of(step)
            assert touched.min() >= extent.start
            assert touched.max() < extent.stop
            np.add.at(times[extent.file], touched.ravel(), 1)
            if isinstance(step, After):
                late.append((extent.file, step))
            else:
                _do(step, sources, files[extent.file])
    for count in times:
        assert (count == 1).all()
    for number, step in late:
        file = plan.files[number]
        segment = file.segments[step.segment]
        assert isinstance(segment, Late)
        crcs = [zlib.crc32(files[number][file.starts[i] : file.starts[i + 1]]) for i in segment.needs]
        data = segment.make(crcs)
        assert len(data) == step.nbytes == segment.nbytes
        files[number][step.dst : step.dst + step.nbytes] = data
    return [bytes(f) for f in files]


def _bytes_of(step: Step) -> np.ndarray:
    """The bytes of the output file that a step writes."""
    if isinstance(step, Move):
        return addresses(step.dst, step.size, step.dst_strides)[..., None] + np.arange(step.dst_item)
    return np.arange(step.dst, step.dst + (len(step.data) if isinstance(step, Write) else step.nbytes))


def _do(step: Step, sources: Sequence[bytes], out: bytearray) -> None:
    to = _bytes_of(step)
    view = np.frombuffer(out, np.uint8)
    if isinstance(step, Write):
        view[to] = np.frombuffer(step.data, np.uint8)
    elif isinstance(step, Repeat):
        view[to] = np.resize(np.roll(np.frombuffer(step.pattern, np.uint8), -step.phase), step.nbytes)
    elif isinstance(step, Move):
        at = addresses(step.src, step.size, step.src_strides)[..., None] + np.arange(step.item)
        data = np.frombuffer(sources[step.source], np.uint8)[at]
        if step.rule is not None:
            data = cast(data, BY_NAME[step.rule.source], BY_NAME[step.rule.target])
        view[to] = data


def cast(data: np.ndarray, source: DType, target: DType) -> np.ndarray:
    """Elements whose bytes are the last axis, as elements of another type."""
    values = np.ascontiguousarray(data).view(source.numpy)[..., 0]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(values.astype(target.numpy))[..., None].view(np.uint8)


def alone(plan: Plan, extent: Extent, sources: Sequence[bytes]) -> bytes:
    """The bytes of one extent that has no late ones."""
    out = bytearray(plan.files[extent.file].nbytes)
    for step in plan.extent(extent):
        _do(step, sources, out)
    return bytes(out[extent.start : extent.stop])
