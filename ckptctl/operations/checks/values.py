"""Values: what no training gives, and what must be alike and is not. Every byte is read once, in bounded memory.

Floats are looked at as bits. One pass that joins the bits of all elements of a block (or) tells that there is nothing
to see in most blocks: no magnitude is above what was joined. Sign and magnitude order floats as integers, so that a
pass over unsigned and one over signed ones tell the rest: the largest magnitude, NaN and infinities, signs.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.core.errors import CkptError
from ckptctl.core.tensor import Key
from ckptctl.execute.cast import carrier, convert
from ckptctl.operations.checks.model import tied_pair
from ckptctl.operations.tensors import TensorReader, typed
from ckptctl.operations.turns import Part, in_turn, parts_of
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Tensor
    from ckptctl.operations.checks.found import Found
    from ckptctl.operations.tensors import Bytes

CHUNK_NBYTES = 1 << 20
_BLOCK_NBYTES = 1 << 22
"""Bytes at a time: more would not stay in the cache, fewer have threads wait for each other (a quarter of it takes half
as long again, where others use the machine too)."""
_FEW_NBYTES = 1 << 12


class _Bits(NamedTuple):
    """A float type as bits: the integer type, the first magnitude that is no number, infinity's (-1 where none).

    absurd is the first magnitude that no training gives; where the type has none, the first that is no number.
    """

    unsigned: str
    signed: str
    first_not_finite: int
    infinity: int
    absurd: int


_FLOATS = {
    "float64": _Bits("<u8", "<i8", 0x7FF << 52, 0x7FF << 52, 0x430C6BF526340001),
    "float32": _Bits("<u4", "<i4", 0x7F800000, 0x7F800000, 0x58635FAA),
    "bfloat16": _Bits("<u2", "<i2", 0x7F80, 0x7F80, 0x5864),
    "float16": _Bits("<u2", "<i2", 0x7C00, 0x7C00, 0x7C00),
    "float8_e5m2": _Bits("u1", "i1", 0x7C, 0x7C, 0x7C),
    "float8_e4m3fn": _Bits("u1", "i1", 0x7F, -1, 0x7F),
}
"""absurd is above 1e15: no weight or moment of a run that goes on is; a flipped bit of an exponent often makes one."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_ZERO_IS_FINE = ("bias", "lora_B", "lora_embedding_B", "norm")


@dataclass
class Seen:
    """What a pass over elements of one tensor told. largest and first_bits are bits; largest is 0 below the absurd."""

    count: int = 0
    largest: int = 0
    nans: int = 0
    infinities: int = 0
    first_odd: int = -1
    is_negative: bool = False
    first_bits: int | None = None
    is_constant: bool = True
    is_zero: bool = True

    def take(self, bits: Any, kind: _Bits, start: int) -> None:
        """Adds a block of elements, at least one, from number start on."""
        unsigned = bits.view(kind.unsigned)
        sign = 1 << (8 * unsigned.itemsize - 1)
        joined = _joined(unsigned)
        if self.first_bits is None:
            self.first_bits = int(unsigned[0])
        if self.is_constant:
            self.is_constant = _are_all(unsigned, self.first_bits)
        self.count += len(unsigned)
        self.is_zero = self.is_zero and not joined & (sign - 1)
        if joined & sign and not self.is_negative:
            self.is_negative = int(unsigned.max()) > sign  # and not -0.0
        if joined & (sign - 1) < kind.absurd:
            return
        high = int(unsigned.max())
        top = max(high - sign if high >= sign else 0, int(bits.view(kind.signed).max()))
        self.largest = max(self.largest, top if top < kind.first_not_finite else 0)
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

    def add(self, later: Seen) -> None:
        """Adds what was told of elements that come later."""
        if self.first_bits is None:
            self.first_bits = later.first_bits
        self.is_constant = self.is_constant and later.is_constant and later.first_bits in (None, self.first_bits)
        self.is_zero = self.is_zero and later.is_zero
        self.count += later.count
        self.largest = max(self.largest, later.largest)
        self.nans += later.nans
        self.infinities += later.infinities
        self.first_odd = later.first_odd if self.first_odd < 0 else self.first_odd
        self.is_negative = self.is_negative or later.is_negative


def _joined(unsigned: Any) -> int:
    """All elements' bits joined by or."""
    if unsigned.nbytes % 8 or not unsigned.flags.aligned:
        return int(np.bitwise_or.reduce(unsigned))
    wide: int = int(np.bitwise_or.reduce(unsigned.view("<u8")))
    bits = 32
    while bits >= 8 * unsigned.itemsize:
        wide |= wide >> bits
        bits //= 2
    return int(wide & ((1 << 8 * unsigned.itemsize) - 1))


def _are_all(unsigned: Any, value: int) -> bool:
    """Whether all elements are one value. A few are looked at first: in most blocks they tell."""
    few = unsigned[:: max(1, len(unsigned) // 16)]
    return bool((few == value).all()) and bool((unsigned == value).all())


def check_values(
    found: Found, checkpoint: Checkpoint, memory_nbytes: int, jobs: int, progress: Callable[[int], None] | None = None
) -> None:
    """Reads every tensor. What cannot be read is a finding, and the others are read all the same."""
    aliases = {k for k in checkpoint.tensors if k.kind in WEIGHTS and k.name in checkpoint.ties}
    keys = [k for k, t in checkpoint.tensors.items() if not t.why_unsupported and not t.made and k not in aliases]
    with TensorReader(checkpoint, memory_nbytes // 2) as reader, ThreadPoolExecutor(max(1, jobs or 2)) as pool:
        scanner = _Scanner(reader)
        whole: Seen | CkptError = Seen()
        for part, seen in in_turn(pool, scanner.attempt, parts_of(checkpoint.tensors, keys)):
            if isinstance(whole, Seen):
                if isinstance(seen, Seen):
                    whole.add(seen)
                else:
                    whole = seen
            if not part.is_last:
                continue
            tensor = checkpoint.tensors[part.key]
            if isinstance(whole, CkptError):
                found.error(whole)
            else:
                _judge(found, part.key, tensor, whole)
                found.nbytes += tensor.nbytes
            if progress is not None:
                progress(tensor.nbytes)
            whole = Seen()
        try:
            _alike(found, reader, pool)
        except CkptError as err:
            found.error(err)


class _Scanner:
    """Scans parts of tensors, each thread with a buffer of its own."""

    def __init__(self, reader: TensorReader) -> None:
        self.reader = reader
        self._own = threading.local()

    def attempt(self, part: Part) -> Seen | CkptError:
        """What a part's elements tell, or why they cannot be read."""
        try:
            return self._scan(part)
        except CkptError as err:
            return err

    def _scan(self, part: Part) -> Seen:
        tensor = self.reader.checkpoint.tensors[part.key]
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.empty(_BLOCK_NBYTES, np.uint8)
        buffer: Bytes = self._own.buffer
        kind = _FLOATS.get(tensor.dtype.name)
        seen = Seen()
        if self.reader.is_unordered(part.key):
            if part.start:
                return seen  # the first part took all of it
            for data in self.reader.unordered(part.key, buffer):
                if kind is not None:
                    seen.take(data, kind, 0)
            if not (seen.nans or seen.infinities):
                return seen
            seen = Seen()  # the first of them is to be named: once more, in order
            part = part._replace(stop=tensor.numel)
        for start, data in self.reader.blocks(part.key, part.start, part.stop, buffer):
            if kind is not None:
                seen.take(data, kind, start)
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
    if seen.largest >= kind.absurd:
        largest = _number(seen.largest, kind, tensor)
        why = f"the largest magnitude is {largest:.3g}"
        found.note("absurd-magnitude", f"{name} has values that no training gives", tensor=name, field=at, why=why)
    if key.kind == "exp_avg_sq" and seen.is_negative and not seen.nans:
        found.note("negative-second-moment", f"exp_avg_sq of {name} is negative somewhere", tensor=name, field=at)
    is_matrix = len(tensor.shape) >= 2 and seen.count > 1 and not any(w in name for w in _ZERO_IS_FINE)
    if key.kind == "weight" and is_matrix and seen.is_constant and not (seen.nans or seen.infinities):
        if seen.is_zero:
            found.note("all-zero", f"{name} is zero throughout", tensor=name)
        else:
            value = _number(seen.first_bits or 0, kind, tensor)
            found.note("constant", f"{name} is {value:g} throughout", tensor=name)


def _number(bits: int, kind: _Bits, tensor: Tensor) -> float:
    """The number that bits of a type are."""
    return float(np.array([bits], kind.unsigned).view(tensor.dtype.numpy)[0])


def _alike(found: Found, reader: TensorReader, pool: ThreadPoolExecutor) -> None:
    """What must be alike: ties, masters and the weights they round to. And what must not: the two moments."""
    checkpoint = reader.checkpoint
    pair = tied_pair(checkpoint)
    if pair is not None:
        _tie(found, reader, *(next(k for k in checkpoint.tensors if k.name == n and k.kind in WEIGHTS) for n in pair))
    equal: list[str] = []
    both = 0
    for key, tensor in checkpoint.tensors.items():
        if key.kind == _MOMENTS[0]:
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
    masters = [k for k in checkpoint.tensors if k.kind == MASTER and _is_rounded(checkpoint, k)]
    whole = _Unlike()
    for part, unlike in in_turn(pool, lambda p: _masters_part(reader, p), parts_of(checkpoint.tensors, masters)):
        whole = whole.joined(unlike)
        if part.is_last:
            _master(found, checkpoint, part.key, whole)
            whole = _Unlike()


class _Unlike(NamedTuple):
    """How many masters round to another weight, the first, and the largest difference."""

    many: int = 0
    first: int = -1
    furthest: float = 0.0

    def joined(self, later: _Unlike) -> _Unlike:
        """With what was found in elements that come later."""
        first = later.first if self.first < 0 else self.first
        furthest = later.furthest if not later.furthest <= self.furthest else self.furthest
        return _Unlike(self.many + later.many, first, furthest)


def _equal_moments(reader: TensorReader, a: Key, b: Key) -> bool:
    """Whether two moments are bit for bit equal, and not both zero throughout, as before the first update."""
    numel, item = reader.checkpoint.tensors[a].numel, reader.checkpoint.tensors[a].dtype.itemsize
    few = min(numel, _FEW_NBYTES // item)
    is_zero = True
    for start, stop, nbytes in ((0, few, _FEW_NBYTES), (few, numel, CHUNK_NBYTES)):  # nearly always the first few tell
        if start == stop:
            continue
        buffers = [np.empty(nbytes, np.uint8) for _ in range(2)]
        both = (reader.blocks(k, start, stop, buffer) for k, buffer in zip((a, b), buffers, strict=True))
        for (_, x), (_, y) in zip(*both, strict=True):
            if not np.array_equal(x, y):
                return False
            is_zero = is_zero and not x.any()
    return not is_zero


def _is_rounded(checkpoint: Checkpoint, key: Key) -> bool:
    """Whether a master's weight is stored too, and both are floats that can be read."""
    target, source = checkpoint.tensors.get(Key(key.name, "weight", key.part)), checkpoint.tensors[key]
    if target is None or target.shape != source.shape or not (target.dtype.is_float and source.dtype.is_float):
        return False
    return not (target.why_unsupported or source.why_unsupported or target.made or source.made)


def _masters_part(reader: TensorReader, part: Part) -> _Unlike:
    """Whether some elements of a master round to their weights."""
    weight = Key(part.key.name, "weight", part.key.part)
    source, target = reader.checkpoint.tensors[part.key], reader.checkpoint.tensors[weight]
    rule = Cast(source.dtype.name, target.dtype.name)
    out = _Unlike()
    room = CHUNK_NBYTES // source.dtype.itemsize
    buffers = [np.empty(room * t.dtype.itemsize, np.uint8) for t in (source, target)]
    both = zip(
        *(reader.blocks(k, part.start, part.stop, b) for k, b in zip((part.key, weight), buffers, strict=True)),
        strict=True,
    )
    for (start, x), (_, y) in both:
        wide, has = x.view(carrier(source.dtype.name)), y.view(carrier(target.dtype.name))
        made = np.empty_like(has)
        convert(made, wide, rule)
        if np.array_equal(made.view(np.uint8), has.view(np.uint8)):
            continue
        differ = (made != has) & ~((made != made) & (has != has))  # NaNs of other payloads are alike here
        if differ.any():
            values = typed(has.view(np.uint8), target).astype(np.float64)
            apart = np.abs(values - typed(wide.view(np.uint8), source).astype(np.float64))[differ]
            furthest = float(np.nanmax(apart)) if not np.isnan(apart).all() else math.nan
            out = out.joined(_Unlike(int(differ.sum()), start + int(differ.argmax()), furthest))
    return out


def _master(found: Found, checkpoint: Checkpoint, key: Key, unlike: _Unlike) -> None:
    """A finding where masters do not round to their weights."""
    if unlike.many:
        shape, numel = checkpoint.tensors[key].shape, checkpoint.tensors[key].numel
        index = list(map(int, np.unravel_index(unlike.first, shape))) if shape else []
        why = f"{unlike.many:,} of {numel:,} elements, the first at {index}; "
        why += f"the largest difference is {unlike.furthest:.3g}"
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
