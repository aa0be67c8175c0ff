"""Tree nodes that only pickles have, besides those of `core.values`: torch.Size, persistent ids, NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

from ckptctl.core.values import Array, Tree


class SizeTuple(tuple[Tree, ...]):
    """A torch.Size: a tuple that is written again as one."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class PersistentId:
    """A persistent id of a pickle read without a resolver: what the id is, left as it was."""

    pid: Tree


@dataclass(eq=False, slots=True)
class NumpyArray(Array):
    """A NumPy array or scalar of plain dtype, as NumPy pickles it.

    dtype is NumPy's text, e.g. "<f8"; data are row-major, little-endian.
    module is where the pickle found `_reconstruct` (NumPy 2 or 1); fortran tells an array that was column-major.
    """

    kind: str = "numpy"
    module: str = "numpy._core.multiarray"
    fortran: bool = False
    scalar: bool = False


def show(value: object, limit: int = 80) -> str:
    """A short text of any plain value of a file, for messages: never long, never an exception."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, (tuple, list)):
        inner = ", ".join(show(item, 20) for item in value[:6])
        return f"({inner}{', ...' if len(value) > 6 else ''})"[: 2 * limit]
    elif value is not None and not isinstance(value, (bool, int, float)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= limit + 2 else text[:limit] + "..."
