"""What of two checkpoints is compared bit for bit before a step is trained, and in which type. Pure; no torch.

Where a state lies in two types, one is a rounding of the other or a widening: which one is told by the masters. A side
without masters whose weights are float32 has them in its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, OTHER, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ckptctl.core.tensor import Key, Tensor
    from ckptctl.operations.verify.sides import Side

_ORDER = ("bool", "int8", "uint8", "int16", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Forms:
    """For one side: which tensor stands for (name, kind), and the type in which it is compared."""

    taken: Mapping[tuple[str, str], tuple[Key, str]] = field(default_factory=dict)

    def of(self, key: Key) -> list[tuple[str, str, str]]:
        """(name, kind, type) of all that this tensor stands for."""
        return self._by_key().get(key, [])

    def _by_key(self) -> dict[Key, list[tuple[str, str, str]]]:
        found: dict[Key, list[tuple[str, str, str]]] | None = getattr(self, "_cache", None)
        if found is None:
            found = {}
            for (name, kind), (key, form) in self.taken.items():
                found.setdefault(key, []).append((name, kind, form))
            object.__setattr__(self, "_cache", found)
        return found


@dataclass(frozen=True)
class Unlike:
    """What shows from the headers alone: there on one side only, or of another shape or type."""

    name: str
    kind: str
    what: str
    detail: str = ""


def owned(side: Side, ties: Mapping[str, str], names: Collection[str] | None) -> dict[tuple[str, str], Tensor]:
    """What a side has of each state, by (name, kind): second names of tied parameters left out, and padding.

    names: take those alone (None: all). A parameter that is stored under its second name only is there under its first.
    """
    out: dict[tuple[str, str], Tensor] = {}
    seconds: dict[tuple[str, str], Tensor] = {}
    for key, tensor in side.checkpoint.tensors.items():
        if key.part not in ("", "made", "padding") or key.kind in ("step", OTHER, "file"):
            continue
        kind = "weight" if key.kind in WEIGHTS else key.kind
        kind += " padding" if key.part == "padding" else ""
        if key.name in ties:
            seconds[ties[key.name], kind] = tensor
        elif names is None or key.name in names:
            out[key.name, kind] = tensor
    for at, tensor in seconds.items():
        if names is None or at[0] in names:
            out.setdefault(at, tensor)
    return out


def alone(side: Side, ties: Mapping[str, str], names: Collection[str] | None) -> Forms:
    """The forms of a side that is compared with nothing: everything in its own type."""
    return Forms({at: (t.key, t.dtype.name) for at, t in owned(side, ties, names).items()})


def together(
    a: Side,
    b: Side,
    ties: tuple[Mapping[str, str], Mapping[str, str]],
    names: Collection[str] | None,
    *,
    rounded: bool = False,
) -> tuple[Forms, Forms, list[Unlike]]:
    """The forms of two sides, and what differs by the headers alone.

    rounded: where one side's weights are of a narrower type, they are to be the other's, rounded.
    """
    left, right = owned(a, ties[0], names), owned(b, ties[1], names)
    taken: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    unlike: list[Unlike] = []
    for at in [*left, *(n for n in right if n not in left)]:
        name, kind = at
        x, y = left.get(at), right.get(at)
        if kind.startswith(MASTER):
            other = (name, kind.replace(MASTER, "weight"))
            x, y = x or left.get(other), y or right.get(other)
        if x is None or y is None:
            unlike.append(Unlike(name, kind, "only-in-a" if y is None else "only-in-b"))
            continue
        if x.shape != y.shape:
            unlike.append(Unlike(name, kind, "shape", f"{x.shape} and {y.shape}"))
            continue
        form = _form(x, y, kind, name, left, right)
        if rounded and form is not None and kind.startswith("weight"):
            form = narrowest((x.dtype.name, y.dtype.name))
        if form is None:
            unlike.append(Unlike(name, kind, "dtype", f"{x.dtype.name} and {y.dtype.name}"))
            continue
        taken[0][at], taken[1][at] = (x.key, form), (y.key, form)
    return Forms(taken[0]), Forms(taken[1]), unlike


def _form(
    x: Tensor,
    y: Tensor,
    kind: str,
    name: str,
    left: Mapping[tuple[str, str], Tensor],
    right: Mapping[tuple[str, str], Tensor],
) -> str | None:
    """The type in which two tensors are compared; None where none holds both exactly."""
    p, q = x.dtype.name, y.dtype.name
    if p == q:
        return p
    if p not in _ORDER or q not in _ORDER or not (x.dtype.is_float and y.dtype.is_float):
        return None
    narrow, wide = sorted((p, q), key=_ORDER.index)
    if narrow in ("float16", "bfloat16") and wide == "bfloat16":
        return "float32"
    has_master = (name, kind.replace("weight", MASTER)) in (left if p == narrow else right)
    return narrow if kind.startswith("weight") and has_master else wide


def widest(names: Iterable[str]) -> str:
    """The widest of float types."""
    return max(names, key=_ORDER.index)


def narrowest(names: Iterable[str]) -> str:
    """The narrowest of float types; of others the first."""
    found = list(names)
    return min(found, key=_ORDER.index) if all(n in _ORDER for n in found) else found[0]
