"""Values: what no training gives, and what must be alike and is not. Every byte is read once, in bounded memory.

Floats are looked at as bits: sign and magnitude order them, so that three passes over unsigned and signed integers tell
the largest magnitude, NaN and infinities, signs, and whether all are one.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.core.errors import CkptError
from ckptctl.core.tensor import Key, dense_strides
from ckptctl.execute.cast import carrier, convert
from ckptctl.formats.bytesource import FileBytes
from ckptctl.operations.checks.model import tied_pair
from ckptctl.operations.tensors import TensorReader, typed
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Tensor
    from ckptctl.operations.checks.found import Found

CHUNK_NBYTES = 1 << 20
_BLOCK_NBYTES = 1 << 18
"""Bytes at a time: the passes over one block stay in a core's cache."""
_RUN_NBYTES = 1 << 16
"""Runs that are shorter on average are left to the planner, which reads windows of them."""


class _Bits(NamedTuple):
    """A float type as bits: the integer type, the first magnitude that is no number, infinity's (-1 where none)."""

    unsigned: str
    signed: str
    first_not_finite: int
    infinity: int


_FLOATS = {
    "float64": _Bits("<u8", "<i8", 0x7FF << 52, 0x7FF << 52),
    "float32": _Bits("<u4", "<i4", 0x7F800000, 0x7F800000),
    "bfloat16": _Bits("<u2", "<i2", 0x7F80, 0x7F80),
    "float16": _Bits("<u2", "<i2", 0x7C00, 0x7C00),
    "float8_e5m2": _Bits("u1", "i1", 0x7C, 0x7C),
    "float8_e4m3fn": _Bits("u1", "i1", 0x7F, -1),
}
_ABSURD = 1e15
"""No weight or moment of a run that goes on is larger; a flipped bit of an exponent often is."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ZERO_IS_FINE = ("bias", "lora_B", "lora_embedding_B", "norm")


@dataclass
class Seen:
    """What a pass over one tensor told. largest are bits of magnitudes."""

    count: int = 0
    largest: int = 0
    nans: int = 0
    infinities: int = 0
    first_odd: int = -1
    is_negative: bool = False
    first_bits: int | None = None
    is_constant: bool = True

    def take(self, bits: Any, kind: _Bits, start: int) -> None:
        """Adds a block of elements, from number start on."""
        unsigned, signed = bits.view(kind.unsigned), bits.view(kind.signed)
        sign = 1 << (8 * unsigned.itemsize - 1)
        high, low = int(unsigned.max()), int(unsigned.min())
        if self.first_bits is None:
            self.first_bits = low
        self.is_constant = self.is_constant and high == low == self.first_bits
        top = max(high - sign if high >= sign else 0, int(signed.max()))
        self.largest = max(self.largest, top if top < kind.first_not_finite else 0)
        self.is_negative = self.is_negative or high > sign
        self.count += len(unsigned)
        if top >= kind.first_not_finite:
            self._odd(unsigned, kind, sign, start)

    def _odd(self, unsigned: Any, kind: _Bits, sign: int, start: int) -> None:
        magnitude = unsigned & unsigned.dtype.type(sign - 1)
        odd = magnitude >= kind.first_not_finite
        infinite = int((magnitude == kind.infinity).sum()) if kind.infinity >= 0 else 0
        self.infinities += infinite
        self.nans += int(odd.sum()) - infinite
        if self.first_odd < 0:
            self.first_odd = start + int(odd.argmax())
        finite = magnitude[~odd]
        if len(finite):
            self.largest = max(self.largest, int(finite.max()))


def check_values(
    found: Found, checkpoint: Checkpoint, memory_nbytes: int, jobs: int, progress: Callable[[int], None] | None = None
) -> None:
    """Reads every tensor. What cannot be read is a finding, and the others are read all the same."""
    aliases = {k for k in checkpoint.tensors if k.kind in WEIGHTS and k.name in checkpoint.ties}
    keys = [k for k, t in checkpoint.tensors.items() if not t.why_unsupported and not t.made and k not in aliases]
    with TensorReader(checkpoint, memory_nbytes // 2) as reader, ThreadPoolExecutor(max(1, jobs or 2)) as pool:
        straight = _Straight(checkpoint)
        for key, seen in zip(keys, pool.map(lambda k: _attempt(reader, straight, k), keys), strict=True):
            if isinstance(seen, CkptError):
                found.error(seen)
            else:
                _judge(found, key, checkpoint.tensors[key], seen)
                found.nbytes += checkpoint.tensors[key].nbytes
            if progress is not None:
                progress(checkpoint.tensors[key].nbytes)
        try:
            _alike(found, reader)
        except CkptError as err:
            found.error(err)


def _attempt(reader: TensorReader, straight: _Straight, key: Key) -> Seen | CkptError:
    try:
        seen = straight.scan(key)
        return scan(reader, key) if seen is None else seen
    except CkptError as err:
        return err


class _Straight:
    """Tensors whose bytes lie in few long runs, read without a plan into one small buffer a tensor.

    What a scan asks for does not depend on the order of elements, but for where the first NaN is.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.root = Path(checkpoint.root)

    def scan(self, key: Key) -> Seen | None:
        """One tensor, read once; None where it lies otherwise, or has values that are no numbers."""
        tensor = self.checkpoint.tensors[key]
        kind = _FLOATS.get(tensor.dtype.name)
        runs = self._runs(tensor)
        if runs is None:
            return None
        seen = Seen()
        buffer = np.empty(min(_BLOCK_NBYTES, max((n for _, _, n in runs), default=0)), np.uint8)
        for path, start, nbytes in runs:
            with FileBytes(self.root / path if path else self.root, name=path or self.root.name) as reader:
                for at in range(0, nbytes, _BLOCK_NBYTES):
                    part = buffer[: min(_BLOCK_NBYTES, nbytes - at)]
                    reader.into(start + at, part.data)
                    if kind is not None:
                        seen.take(part.view(kind.unsigned), kind, 0)
        return None if seen.nans or seen.infinities else seen

    def _runs(self, tensor: Tensor) -> list[tuple[str, int, int]] | None:
        """(file, first byte, bytes) of each piece; None where one is no run of whole elements, or runs are short."""
        out: list[tuple[str, int, int]] = []
        item = tensor.dtype.itemsize
        for table in tensor.pieces:
            for piece in table:
                source = self.checkpoint.sources[piece.source]
                if source.codec or piece.strides != dense_strides(piece.size, item):
                    return None
                if piece.numel:
                    out.append((source.path, source.start + piece.start, piece.numel * item))
                if len(out) > 64 and sum(n for _, _, n in out) < _RUN_NBYTES * len(out):
                    return None
        return out


def scan(reader: TensorReader, key: Key) -> Seen:
    """One tensor, read once. Types that are no floats are read and not judged."""
    tensor = reader.checkpoint.tensors[key]
    kind = _FLOATS.get(tensor.dtype.name)
    seen = Seen()
    for start, data in reader.chunks(key, CHUNK_NBYTES):
        if kind is None:
            continue
        step = _BLOCK_NBYTES // tensor.dtype.itemsize
        bits = data.view(kind.unsigned)
        for at in range(0, len(bits), step):
            seen.take(bits[at : at + step], kind, start + at)
    return seen


def _judge(found: Found, key: Key, tensor: Tensor, seen: Seen) -> None:
    if not seen.count:
        return
    kind = _FLOATS[tensor.dtype.name]
    name, at = key.name, "" if key.kind in WEIGHTS else key.kind
    if seen.nans or seen.infinities:
        counts = [f"{n:,} {word}" for n, word in ((seen.nans, "NaN"), (seen.infinities, "infinity")) if n]
        index = list(map(int, np.unravel_index(seen.first_odd, tensor.shape))) if tensor.shape else []
        what = f"{name} has {' and '.join(counts)}"
        why = f"of {seen.count:,} elements, the first at {index}"
        found.note("not-finite", what, tensor=name, field=at, why=why)
    largest = float(np.array([seen.largest], kind.unsigned).view(tensor.dtype.numpy)[0])
    if largest > _ABSURD:
        why = f"the largest magnitude is {largest:.3g}"
        found.note("absurd-magnitude", f"{name} has values that no training gives", tensor=name, field=at, why=why)
    if key.kind == "exp_avg_sq" and seen.is_negative and not seen.nans:
        found.note("negative-second-moment", f"exp_avg_sq of {name} is negative somewhere", tensor=name, field=at)
    is_matrix = len(tensor.shape) >= 2 and seen.count > 1 and not any(w in name for w in _ZERO_IS_FINE)
    if key.kind == "weight" and is_matrix and seen.is_constant:
        if not seen.largest and not seen.nans and not seen.infinities:
            found.note("all-zero", f"{name} is zero throughout", tensor=name)
        elif seen.largest:
            found.note("constant", f"{name} is {largest:g} throughout", tensor=name)


def _alike(found: Found, reader: TensorReader) -> None:
    """What must be alike: ties, masters and the weights they round to. And what must not: the two moments."""
    checkpoint = reader.checkpoint
    pair = tied_pair(checkpoint)
    if pair is not None:
        _tie(found, reader, *(next(k for k in checkpoint.tensors if k.name == n and k.kind in WEIGHTS) for n in pair))
    equal: list[str] = []
    both = 0
    for key, tensor in checkpoint.tensors.items():
        if key.kind == MASTER:
            _master(found, reader, key)
        elif key.kind == _MOMENTS[0]:
            other = Key(key.name, _MOMENTS[1], key.part)
            second = checkpoint.tensors.get(other)
            if second is None or (second.shape, second.dtype) != (tensor.shape, tensor.dtype) or not tensor.numel:
                continue
            both += 1
            if _equal_moments(reader, key, other):
                equal.append(key.name)
    if equal:
        what = f"exp_avg and exp_avg_sq are the same for {len(equal)} of {both} parameters"
        found.note(
            "moments-equal", what, tensor=equal[0], why=f"{', '.join(equal[:4])}: one was written over the other"
        )


def _equal_moments(reader: TensorReader, a: Key, b: Key) -> bool:
    """Whether two moments are bit for bit equal, and not both zero throughout, as before the first update."""
    numel = reader.checkpoint.tensors[a].numel
    step = 1 << 14
    is_zero = True
    for start in range(0, numel, step):
        stop = min(numel, start + step)
        x, y = reader.run(a, start, stop), reader.run(b, start, stop)
        if not np.array_equal(x, y):
            return False
        is_zero = is_zero and not x.any()
        step = 1 << 20
    return not is_zero


def _master(found: Found, reader: TensorReader, key: Key) -> None:
    """Whether a master rounds to its weight."""
    tensors = reader.checkpoint.tensors
    weight = Key(key.name, "weight", key.part)
    target, source = tensors.get(weight), tensors[key]
    if target is None or target.shape != source.shape or not (target.dtype.is_float and source.dtype.is_float):
        return
    if target.why_unsupported or source.why_unsupported or target.made or source.made:
        return
    rule = Cast(source.dtype.name, target.dtype.name)
    unlike, first, furthest = 0, -1, 0.0
    step = CHUNK_NBYTES // source.dtype.itemsize
    for start in range(0, source.numel, step):
        stop = min(source.numel, start + step)
        wide = reader.run(key, start, stop).view(carrier(source.dtype.name))
        has = reader.run(weight, start, stop).view(carrier(target.dtype.name))
        made = np.empty_like(has)
        convert(made, wide, rule)
        if np.array_equal(made.view(np.uint8), has.view(np.uint8)):
            continue
        differ = (made != has) & ~((made != made) & (has != has))  # NaNs of other payloads are alike here
        if differ.any():
            first = start + int(differ.argmax()) if first < 0 else first
            unlike += int(differ.sum())
            values = typed(has.view(np.uint8), target).astype(np.float64)
            apart = np.abs(values - typed(wide.view(np.uint8), source).astype(np.float64))[differ]
            furthest = max(furthest, float(np.nanmax(apart)) if not np.isnan(apart).all() else math.nan)
    if unlike:
        index = list(map(int, np.unravel_index(first, source.shape))) if source.shape else []
        why = f"{unlike:,} of {source.numel:,} elements, the first at {index}; the largest difference is {furthest:.3g}"
        found.note("masters-differ", f"the master of {key.name} does not round to its weight", tensor=key.name, why=why)


def _tie(found: Found, reader: TensorReader, head: Key, embedding: Key) -> None:
    a, b = reader.checkpoint.tensors[head], reader.checkpoint.tensors[embedding]
    why = f"the config ties it to {embedding.name}"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        why += f", which is {b.dtype.name} {list(b.shape)}; it is {a.dtype.name} {list(a.shape)}"
        found.note("tied-tensors-differ", f"{head.name} is not its embedding", tensor=head.name, why=why)
        return
    furthest, unlike = 0.0, 0
    step = CHUNK_NBYTES // a.dtype.itemsize
    for start in range(0, a.numel, step):
        stop = min(a.numel, start + step)
        x, y = reader.run(head, start, stop), reader.run(embedding, start, stop)
        if np.array_equal(x, y):
            continue
        with np.errstate(all="ignore"):
            left, right = (typed(v, t).astype(np.float64) for v, t in ((x, a), (y, b)))
            furthest = float(np.nanmax([furthest, *np.abs(left - right)]))
        unlike += int((x.reshape(stop - start, -1) != y.reshape(stop - start, -1)).any(axis=1).sum())
    if unlike:
        why += f"; {unlike:,} of {a.numel:,} elements differ, by up to {furthest:.3g}"
        found.note("tied-tensors-differ", f"{head.name} is not its embedding", tensor=head.name, why=why)
