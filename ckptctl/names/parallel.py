"""Which axis of a parameter tensor parallelism cuts, by its name: data in tensor_parallel.toml."""

from __future__ import annotations

from functools import cache

from ckptctl.names.table import table


@cache
def _axes() -> dict[str, int]:
    """Last part of a module's name -> the axis of its weight that is cut."""
    lists: dict[str, list[str]] = table("tensor_parallel")
    rows = {"column": 0, "row": 1, "vocabulary": 0}
    return {module: axis for group, axis in rows.items() for module in lists[group]}


def tensor_parallel_axis(name: str, axes: int) -> int | None:
    """The axis that is cut of a parameter with that many axes, None where it is the same on every rank.

    The bias of a module that is cut by columns is cut with it; that of one cut by rows is added once, and whole.
    """
    module, _, part = name.rpartition(".")
    axis = _axes().get(module.rpartition(".")[2])
    if part == "weight" and axes == 2:
        return axis
    return 0 if part == "bias" and axes == 1 and axis == 0 else None
