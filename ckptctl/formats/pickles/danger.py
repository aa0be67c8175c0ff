"""Which names in a pickle would run code. Two data files decide, dangerous.toml and known.toml; nothing is imported.

The verdict is about what somebody else's unpickler would do: this project runs no pickle.
"""

from __future__ import annotations

import functools
import re
import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckptctl.core.dtype import DTYPES
from ckptctl.core.values import Global, Record, Tree

if TYPE_CHECKING:
    from collections import Counter

Verdict = Literal["dangerous", "known", "unknown"]

_CLASS = re.compile(r"_*[A-Z]\w*")
_GETATTR = "builtins.getattr"


class Finding(NamedTuple):
    """A name that a pickle should not hold, and why."""

    name: Global
    why: str


class _Lists(NamedTuple):
    modules: frozenset[str]
    names: frozenset[str]
    parts: frozenset[str]


@functools.cache
def _lists(file: str) -> _Lists:
    found: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))
    names = set(found["names"])
    if file == "known.toml":
        names |= {f"torch.{dtype.name}" for dtype in DTYPES} | {
            f"torch.{dtype.storage}" for dtype in DTYPES if dtype.storage
        }
    return _Lists(frozenset(found["modules"]), frozenset(names), frozenset(found.get("parts", ())))


def _within(dotted: str, modules: frozenset[str]) -> bool:
    """Whether the dotted name is one of modules, or below one."""
    parts = dotted.split(".")
    return any(".".join(parts[:n]) in modules for n in range(1, len(parts) + 1))


def _spelled(name: Global) -> str:
    """The dotted name as the lists spell it: Python 3's builtins."""
    module = "builtins" if name.module in ("__builtin__", "__builtins__") else name.module
    return f"{module}.{name.name}"


def verdict(name: Global) -> Verdict:
    """What a name is: dangerous (it would run code), known (a framework's own, inert) or unknown."""
    dotted = _spelled(name)
    bad = _lists("dangerous.toml")
    if dotted in bad.names or _within(dotted, bad.modules):
        return "dangerous"
    if any(part in bad.parts for part in name.name.split(".")):
        return "dangerous"
    good = _lists("known.toml")
    if dotted in good.names:
        return "known"
    if _within(name.module, good.modules) and all(_CLASS.fullmatch(part) for part in name.name.split(".")):
        return "known"
    return "unknown"


def is_inert_getattr(args: tuple[Tree, ...]) -> bool:
    """Whether getattr(*args) can only look up a plain attribute of a framework's own class or of a record of one.

    Real FSDP1 files hold such a call: the memory format, taken from an enum.
    Source: torch 2.13, distributed/_shard/sharded_tensor/metadata.py, TensorProperties (an Enum pickled by name).
    """
    if (
        len(args) != 2
        or type(args[1]) is not str
        or args[1] in _lists("dangerous.toml").parts
        or args[1].startswith("__")
    ):
        return False
    if isinstance(args[0], Record) and _is_getattr(args[0]):
        return True  # that one was judged when it was read
    owner = args[0].func if isinstance(args[0], Record) else args[0]
    return (
        isinstance(owner, Global)
        and verdict(owner) == "known"
        and _CLASS.fullmatch(owner.name.split(".")[-1]) is not None
    )


def calls_plain_attribute(func: Record) -> bool:
    """Whether calling func calls what a getattr found, and that is no class: a method or a function."""
    return _is_getattr(func) and (len(func.args) != 2 or not _CLASS.fullmatch(str(func.args[1])))


def _is_getattr(record: Record) -> bool:
    return isinstance(record.func, Global) and _spelled(record.func) == _GETATTR


def findings(names: Counter[Global], risky_getattr: int = 0) -> list[Finding]:
    """The dangerous ones among the names of a pickle; getattr where it was called on something that is not inert."""
    found = []
    for name in names:
        if _spelled(name) == _GETATTR:
            if risky_getattr:
                found.append(
                    Finding(
                        name,
                        "getattr on something else than a record or a class that checkpoints hold reaches any object",
                    )
                )
        elif verdict(name) == "dangerous":
            found.append(Finding(name, "unpickling it would run code that no checkpoint needs"))
    return found


def unknown(names: Counter[Global]) -> list[Finding]:
    """The names among those of a pickle that no list has: read as inert records."""
    return [
        Finding(name, "no class that checkpoints are known to hold") for name in names if verdict(name) == "unknown"
    ]
