"""What a comparison finds, as its document lists it. Data only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    def add(self, name: str, kind: str, what: str, detail: str = "", **more: Any) -> None:
        """One difference of the document: what is value, dtype, shape, only-in-a, only-in-b or renamed."""
        said = {"detail": detail} if detail else {}
        self.differences.append({"name": name, "kind": kind, "what": what, **said, **more})
