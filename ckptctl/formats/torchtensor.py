"""Tensors of torch pickles as the core's tensors, and small ones as values.

Shared by torch files, `.bin` folders and DCP items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.dtype import packed
from ckptctl.core.errors import CkptError, Unsupported
from ckptctl.core.tensor import Key, Piece, PieceTable, Tensor, dense_strides
from ckptctl.core.values import Array, Held, OrderedPairs, Record, TensorRef, Tree
from ckptctl.formats.state import number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptctl.formats.bytesource import ByteSource

VALUE_LIMIT = 64 << 10
"""The largest tensor that is read as a value (random state, counters), in bytes.

Larger ones are tensors of kind other.
"""


def tensor_of(key: Key, ref: TensorRef, source: int) -> Tensor:
    """A tensor whose bytes lie in source, at the places that its storage says. Strides are kept.

    No copy is made contiguous here, and of an expanded tensor (stride 0) the same bytes are read many times.
    """
    item = ref.dtype.itemsize
    strides = tuple(s * item for s in ref.stride)
    start = ref.storage.start_byte + ref.offset * item
    why = "its conjugate or negative bit is set: the stored bytes are before it" if ref.conj or ref.neg else ""
    table = PieceTable.of([Piece(ref.shape, (0,) * len(ref.shape), ref.shape, source, start, strides)], item)
    return Tensor(
        key,
        packed(ref.dtype),
        ref.shape,
        (table,),
        trainable=ref.requires_grad if ref.parameter else None,
        why_unsupported=why,
    )


def same_place(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors are one: same bytes, seen the same way."""
    return a.storage is b.storage and (a.offset, a.shape, a.stride, a.dtype.name) == (
        b.offset,
        b.shape,
        b.stride,
        b.dtype.name,
    )


def aliases(tensors: Mapping[str, TensorRef]) -> dict[str, str]:
    """Names of tensors that are an earlier one, and which: tied weights over one storage.

    Empty tensors are never aliases.
    """
    seen: dict[tuple[int, int, tuple[int, ...], tuple[int, ...], str], str] = {}
    out = {}
    for name, ref in tensors.items():
        if not ref.numel or not ref.storage.nbytes:
            continue
        place = (id(ref.storage), ref.offset, ref.shape, ref.stride, ref.dtype.name)
        if place in seen:
            out[name] = seen[place]
        else:
            seen[place] = name
    return out


def read_array(ref: TensorRef, reader: ByteSource, limit: int = VALUE_LIMIT) -> Array:
    """A small tensor as a value, its elements packed row-major.

    Unsupported above limit, and where the stored bits are not its values.
    """
    nbytes = ref.dtype.nbytes(ref.shape)
    if nbytes > limit or ref.conj or ref.neg:
        raise Unsupported(
            f"a tensor of {nbytes} bytes among the values is too large, or not plain",
            where=reader.path,
            why=f"shape {ref.shape}",
        )
    item = ref.dtype.itemsize
    start = ref.storage.start_byte + ref.offset * item
    if not nbytes:
        data = b""
    elif ref.stride == dense_strides(ref.shape, 1) or ref.numel == 1:
        data = reader.read(start, nbytes)
    else:
        import numpy as np

        if len(ref.shape) > 60:
            raise Unsupported(f"a tensor of {len(ref.shape)} axes among the values cannot be read", where=reader.path)
        span = sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True)) * item + item
        raw = np.frombuffer(reader.read(start, span), np.uint8)
        strides = tuple(s * item for s in ref.stride)
        data = np.lib.stride_tricks.as_strided(raw, (*ref.shape, item), (*strides, 1)).tobytes()
    return Array(ref.dtype.name, ref.shape, data)


def steps_made(states: Mapping[Any, Mapping[str, Tree]], reader: ByteSource) -> int | None:
    """The step that the first parameter with one counts; None where no state has one, or it is no whole number."""
    for entry in states.values():
        value = entry.get("step")
        if isinstance(value, TensorRef) and value.numel == 1:
            try:
                return number(read_array(value, reader))
            except CkptError:
                return None
        if value is not None:
            return number(value)
    return None


def read_leaves(tree: Tree, reader: ByteSource) -> Tree:
    """The tree with its tensors as values, all of one file. As read_array."""
    return map_leaves(tree, lambda ref, _: read_array(ref, reader))


def map_leaves(tree: Tree, convert: Callable[[TensorRef, str], Tree], path: str = "") -> Tree:
    """The tree with every TensorRef replaced by convert(it, its dotted path).

    Containers are made anew where something in them changed.

    Cycles are kept as they are. Nesting beyond 200 levels is left as it is.
    """
    done: dict[int, Tree] = {}
    kept: list[Tree] = []  # ids stay those of living objects

    def walk(at: Tree, where: str, depth: int) -> Tree:
        if not isinstance(at, (TensorRef, dict, list, tuple, Record)):
            return at
        if id(at) in done or depth > 200:
            return done.get(id(at), at)
        done[id(at)] = at
        kept.append(at)
        if isinstance(at, TensorRef):
            out = convert(at, where)
        else:
            out = _rebuilt(at, lambda inner, key: walk(inner, f"{where}.{key}" if where else str(key), depth + 1))
        done[id(at)] = out
        return out

    return walk(tree, path, 0)


def _rebuilt(at: Tree, walk: Callable[[Tree, Any], Tree]) -> Tree:
    if isinstance(at, dict):
        pairs = {k: walk(v, k) for k, v in at.items()}
        if all(pairs[k] is v for k, v in at.items()):
            return at
        if isinstance(at, OrderedPairs):
            ordered = OrderedPairs(pairs)
            ordered.attributes = at.attributes
            return ordered
        return pairs
    if isinstance(at, (list, tuple)):
        items = [walk(v, i) for i, v in enumerate(at)]
        if all(a is b for a, b in zip(items, at, strict=True)):
            return at
        return items if isinstance(at, list) else type(at)(items) if type(at) is not tuple else tuple(items)
    if isinstance(at, Record):
        at.args, at.state, at.kwargs = walk(at.args, "args"), walk(at.state, "state"), walk(at.kwargs, "kwargs")
        at.items = [walk(v, i) for i, v in enumerate(at.items)]
        at.pairs = [(k, walk(v, k)) for k, v in at.pairs]
    return at


def value_of(tree: Tree, path: str, reader: ByteSource, tensors: dict[Key, Tensor], source: int) -> Tree:
    """A value with its tensors inside.

    Small ones read, larger ones put among tensors under their path, and Held in the tree.
    """

    def convert(ref: TensorRef, where: str) -> Tree:
        if ref.dtype.nbytes(ref.shape) <= VALUE_LIMIT and not (ref.conj or ref.neg):
            return read_array(ref, reader)
        key, again = Key(where, "other"), 1
        while key in tensors:  # dotted paths may meet: {"w.x": a, "w": {"x": b}}
            again += 1
            key = Key(f"{where}#{again}", "other")
        tensors[key] = tensor_of(key, ref, source)
        return Held(key.name, key.kind)

    return map_leaves(tree, convert, path)
