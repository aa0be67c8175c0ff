"""What is no tensor of the model, of many ranks: one value where all agree, one a rank where each has its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import part_of
from ckptctl.core.errors import Damaged
from ckptctl.core.values import Array, Held, Record, Tree
from ckptctl.formats.pickles.nodes import show

if TYPE_CHECKING:
    from ckptctl.core.tensor import Key, Tensor

_DEEPEST = 100


def same(a: Tree, b: Tree, depth: int = 0) -> bool:
    """Whether two values are equal by type and bits. Tensors that are held elsewhere never are: they are not read."""
    if isinstance(a, Held) or isinstance(b, Held) or depth > _DEEPEST:
        return False
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Array):
        return (a.dtype, a.shape, a.data) == (b.dtype, b.shape, b.data)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            k == j and same(v, b[j], depth + 1) for (k, v), j in zip(a.items(), b, strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, Record):
        sides = [(r.func, r.args, r.how, r.kwargs, r.state, r.items, [list(p) for p in r.pairs]) for r in (a, b)]
        return same(sides[0], sides[1], depth + 1)
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    return bool(a == b)


@dataclass
class RankValues:
    """The values of one set, by name; each rank's own only where they differ."""

    ranks: list[int] = field(default_factory=list)
    common: dict[str, Tree] = field(default_factory=dict)
    own: dict[str, dict[int, Tree]] = field(default_factory=dict)
    tensors: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, rank: int, name: str, value: Tree, where: str) -> None:
        """One rank's value. Damaged where counters or schedulers differ: the files are of several steps."""
        if name in self.own:
            self.own[name][rank] = value
        elif name not in self.common:
            if self.ranks:
                self._differs(rank, name, "is not there", "is", where)
            self.common[name] = value
        elif not same(self.common[name], value):
            self._differs(rank, name, show(self.common[name]), show(value), where)
            self.own[name] = {**dict.fromkeys(self.ranks, self.common.pop(name)), rank: value}

    def _differs(self, rank: int, name: str, first: str, here: str, where: str) -> None:
        if part_of(name) in ("counters", "scheduler"):
            raise Damaged(
                f"rank {rank} is of another step: its {name} differs",
                where=where,
                why=f"{first} on rank {self.ranks[0]}, {here} on rank {rank}",
                fix="put the files of one save together",
                code="ranks-mixed",
            )

    def done(self) -> dict[str, Tree]:
        """By name: the value, or {"rank_0": ..., ...} for random state of several ranks and for what differs."""
        out: dict[str, Tree] = {}
        for name, value in self.common.items():
            many = len(self.ranks) > 1 and part_of(name) == "rng"
            out[name] = {f"rank_{r}": value for r in self.ranks} if many else value
        for name, by_rank in self.own.items():
            out[name] = {f"rank_{r}": value for r, value in by_rank.items()}
        return out
