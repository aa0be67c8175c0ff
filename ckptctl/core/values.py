"""Values are trees: what a pickle holds besides tensor bytes, as plain data and inert records.

Nothing here reads a file.

A tree is None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict (any hashable key),
or one of the
nodes below. Trees keep identity: an object that stood at two places of a pickle is one object here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.core.dtype import DType

Tree = Any
"""A value tree; see the module's first lines."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle mentions: never imported. Equal and hashable by name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Record:
    """An object that a pickle would have built, left inert.

    What would have been called, with what, and the state put on it.

    how is "reduce" (func(*args)), "newobj" (cls.__new__(cls, *args)) or "newobj_ex" (with kwargs); func is what was to
    be called (a Global, or
    any tree). state is what BUILD gave (`has_state` tells None from nothing), items and pairs what APPENDS and SETITEMS
    gave.
    """

    func: Tree
    args: Tree = ()
    how: str = "reduce"
    kwargs: Tree = None
    state: Tree = None
    has_state: bool = False
    items: list[Tree] = field(default_factory=list)
    pairs: list[tuple[Tree, Tree]] = field(default_factory=list)

    @property
    def cls(self) -> str:
        """The dotted name of what it is an instance of, "" where that is no plain name."""
        return str(self.func) if isinstance(self.func, Global) else ""


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes that one or more tensors view. key is the file's own name of it; numel counts elements of dtype.

    dtype None is an untyped storage, whose numel is bytes. start_byte and nbytes are filled in by the container
    (offsets in the file).
    """

    key: str
    dtype: DType | None
    numel: int
    location: str = "cpu"
    start_byte: int = -1
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class TensorRef:
    """A tensor of a torch file: a strided view of a storage. offset and stride count elements.

    A 0-d tensor has shape ().

    conj and neg are torch's lazy bits: the stored bytes are before them. parameter tells an nn.Parameter.
    wrappers are the records around it (subclass, DTensor), outermost first.
    """

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False
    attributes: Tree = None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(eq=False, slots=True)
class Array:
    """A small array read into memory: data are the little-endian row-major bytes.

    Kind is "torch" or "numpy" (how it was stored).
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    kind: str = "torch"


class OrderedPairs(dict[Tree, Tree]):
    """collections.OrderedDict of a pickle: a dict that is written again as one.

    Attributes are what BUILD put on it (`_metadata`).
    """

    attributes: Tree = None


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor among the values that is too large to be one.

    It is the checkpoint's tensor (name, kind), and is moved like one.
    """

    name: str
    kind: str = "other"


def as_number(value: Tree) -> Tree:
    """A count or a setting that is held as a tensor of one element, as the number that it is; others as they are."""
    import numpy as np

    from ckptctl.core.dtype import BY_NAME

    if isinstance(value, Array) and value.dtype in BY_NAME and len(value.data) == BY_NAME[value.dtype].itemsize:
        return np.frombuffer(value.data, BY_NAME[value.dtype].numpy)[0].item()
    return value


def holds_array(tree: Tree) -> bool:
    """Whether there is a tensor anywhere in a value."""
    stack, seen = [tree], set()
    while stack:
        at = stack.pop()
        if isinstance(at, (Array, Held, TensorRef)):
            return True
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, dict):
            stack += at.values()
        elif isinstance(at, (list, tuple)):
            stack += at
        elif isinstance(at, Record):
            stack += [at.args, at.kwargs, at.state, *at.items, *(v for pair in at.pairs for v in pair)]
    return False
