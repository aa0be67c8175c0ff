"""The text of `diff`. Takes the document that `--json` prints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckptctl.report.text import clean, cut, said_of, table

if TYPE_CHECKING:
    from collections.abc import Iterator

Document = dict[str, Any]


def _apart(x: Document) -> str:
    """How far two tensors are apart, in the words of a table."""
    if "max_abs" not in x:
        return ""
    ulps = "" if x["max_ulp"] is None else f", {x['max_ulp']} ULPs"
    nans = f"; {x['nan_on_one_side']} NaN on one side" if x["nan_on_one_side"] else ""
    return f"; at most {x['max_abs']:.4g} apart ({x['max_rel']:.3g} relative{ulps}){nans}"


def state_leaf(node: Document) -> str:
    """How a value of the training state differs, in words."""
    if node["what"] == "value":
        return f"{said_of(node['a'])} and {said_of(node['b'])}"
    side = node["what"].removeprefix("only-in-")
    return f"only in {side}: {said_of(node[side])}"


def _state_tree(node: Document, indent: str = "  ") -> list[str]:
    """The training state that two checkpoints have, a line a value that differs; equal ones are counted."""
    lines = []
    for key, value in node["differ"].items():
        equal = f"{value['equal']} equal" if value.get("equal") else ""
        said = "; ".join(filter(None, (state_leaf(value) if "what" in value else "", equal)))
        lines.append(f"{indent}{clean(str(key))}" + (f": {clean(said)}" if said else ""))
        if "differ" in value and any(True for _ in _unequal(value)):
            lines += _state_tree(value, f"{indent}  ")
    return lines


def _unequal(node: Document) -> Iterator[Document]:
    """Values below a node that differ."""
    for value in node.get("differ", {}).values():
        if "what" in value:
            yield value
        yield from _unequal(value)


def diff(d: Document, verbose: bool = False) -> None:
    """The text of `diff`."""
    listed = [x for x in d["differences"] if "path" not in x]  # the others are in the tree
    if listed:
        rows = [(x["name"], x["kind"], x["what"], x.get("detail", "") + _apart(x)) for x in listed]
        table((("name", "left"), ("kind", "left"), ("differs in", "left"), ("", "left")), rows)
        sys.stdout.write("\n")
    if any(_unequal(d.get("state", {}))):
        sys.stdout.write("training state\n")
        cut(_state_tree(d["state"]), "--json has all")
        sys.stdout.write("\n")
    if d.get("stats", {}).get("layers"):
        keys = ("norm_a", "norm_b", "norm_difference", "cosine")
        layers = [(x["layer"] or "-", x["kind"], *(f"{x[k]:.6g}" for k in keys)) for x in d["stats"]["layers"]]
        titles = ("norm of A", "norm of B", "norm of A - B", "cosine")
        table((("layer", "left"), ("kind", "left"), *((t, "right") for t in titles)), layers)
        sys.stdout.write("\n")
    compared = ", ".join(f"{n} {k}" for k, n in d["compared"].items()) or "nothing"
    verdict = "equal" if d["equal"] else f"different: {len(d['differences'])} of them"
    within = f"; {d['within_tolerance']:,} elements differ within the tolerance" if d.get("within_tolerance") else ""
    sys.stdout.write(f"{verdict} (compared: {compared}){within}\n")
