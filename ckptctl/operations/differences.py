"""What a comparison finds, as its document lists it. Data only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.operations.measuring import Measure

Document = dict[str, Any]


@dataclass
class Found:
    """What a comparison has found so far: the document's differences, and how many of each kind were compared."""

    differences: list[Document] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    within: int = 0
    """Elements that differ by no more than the tolerance."""
    measured: dict[tuple[str, str], Measure] = field(default_factory=dict)
    state: Document = field(default_factory=lambda: {"equal": 0, "differ": {}})
    """The training state as a tree: how many values below a node are equal, and the others by key; see leaf()."""

    def add(self, name: str, kind: str, what: str, detail: str = "", **more: Any) -> None:
        """One difference of the document: what is value, dtype, shape, only-in-a, only-in-b or renamed."""
        said = {"detail": detail} if detail else {}
        self.differences.append({"name": name, "kind": kind, "what": what, **said, **more})

    def leaf(self, path: Sequence[str], what: str = "", a: Any = None, b: Any = None) -> None:
        """One value of the training state, at its place in the tree. what is "" where both sides are equal."""
        node = self.state
        node["equal"] += not what
        for key in path[:-1]:
            node = node["differ"].setdefault(key, {})
            node["equal"] = node.get("equal", 0) + (not what)
            node.setdefault("differ", {})
        if what:
            sides = {k: v for k, v in (("a", a), ("b", b)) if what != f"only-in-{'b' if k == 'a' else 'a'}"}
            node["differ"].setdefault(path[-1], {}).update({"what": what, **sides})
