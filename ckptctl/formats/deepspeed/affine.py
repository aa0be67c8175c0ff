"""Affine maps of tensor-parallel slices: which rows (or columns) of a parameter each rank holds, piece by piece.

AutoTP writes them where patterns of names cannot say it: fused projections whose blocks are dealt out in another order,
or that every rank holds whole. The patterns beside them are for older readers, and may be wrong for such parameters.

Source: DeepSpeed 0.19.8, checkpoint/affine.py, ParamAffineMap and AffinePiece; module_inject/layers.py,
collect_autotp_universal_checkpoint_info.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.errors import Unsupported
from ckptctl.core.tensor import dense_strides
from ckptctl.formats.deepspeed.patterns import Patterns, unjoinable
from ckptctl.formats.pickles.nodes import show

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.layout import Shape

VERSION = 1
"""The newest map that is known. Source: DeepSpeed 0.19.8, checkpoint/affine.py, AFFINE_MAP_FORMAT_VERSION."""


class Cut(NamedTuple):
    """A run along the axis: first row in the slice, rows, first row in the whole."""

    begin: int
    rows: int
    to: int


class Cuts(NamedTuple):
    """Along which axis (None: every rank holds all of it) the ranks' runs lie."""

    axis: int | None
    ranks: tuple[tuple[Cut, ...], ...] = ()


class Maps:
    """affine_map of universal_checkpoint_info, or its absence (None).

    Damaged for what is no such map, Unsupported for a newer one.
    """

    def __init__(self, tree: Tree, where: str) -> None:
        self._where = where
        params = tree.get("params") if isinstance(tree, dict) else {} if tree is None else None
        if not isinstance(params, dict):
            raise unjoinable("affine_map is no map", show(tree), where)
        version = tree.get("version", VERSION) if isinstance(tree, dict) else VERSION
        if type(version) is not int or version > VERSION:
            raise Unsupported(f"affine_map has version {show(version)}: {VERSION} is known", where=where)
        self._patterns, self._entries = Patterns(params, where), list(params.values())

    def of(self, name: str, shapes: Sequence[Shape]) -> Cuts | None:
        """The runs of a parameter's slices of these shapes; None where no map has its name, or it has no element.

        Damaged for a map that is not one of these slices, Unsupported for one that is no runs along one axis.
        """
        found = self._patterns.of(name)
        if len(found) > 1:
            raise unjoinable(f"{len(found)} entries of affine_map are {name}'s", f"numbers {show(found)}", self._where)
        return _cuts(self._entries[found[0]], name, shapes, self._where) if found else None


def owned(ranks: Sequence[Sequence[Cut]]) -> list[list[list[Cut]]]:
    """Ways to take every row once, as each rank's runs: where several ranks hold one, each of them in turn is asked."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, cuts in enumerate(ranks):
        for cut in cuts:
            holders.setdefault((cut.to, cut.rows), []).append(rank)
    out = []
    for asked in range(max((len(h) for h in holders.values()), default=1)):
        chosen = {place: held[min(asked, len(held) - 1)] for place, held in holders.items()}
        out.append([[c for c in cuts if chosen[c.to, c.rows] == rank] for rank, cuts in enumerate(ranks)])
    return out


def _cuts(entry: Tree, name: str, shapes: Sequence[Shape], where: str) -> Cuts | None:
    fields = entry if isinstance(entry, dict) else {}
    logical, listed = fields.get("logical_shape"), fields.get("ranks")
    ranks = {str(k): v for k, v in listed.items()} if isinstance(listed, dict) else {}
    whole = _ints(logical)
    is_alike = whole is not None and all(len(s) == len(whole) for s in shapes)
    if whole is None or not is_alike or set(ranks) != {str(r) for r in range(len(shapes))}:
        raise unjoinable(f"the map of {name} is not one of {len(shapes)} slices", show(entry), where)
    if 0 in whole:
        return None  # nothing lies anywhere, and offsets tell no rows: the patterns say the axis
    every = [_pieces(ranks[str(r)], name, whole, shape, where) for r, shape in enumerate(shapes)]
    sizes = {*shapes, *(size for pieces in every for size, _, _ in pieces)}
    axes = {a for size in sizes for a in range(len(whole)) if size[a] != whole[a]}
    if not axes:
        return Cuts(None)
    if len(axes) > 1:
        raise Unsupported(f"{name} is sliced along several axes", where=where, why=f"axes {sorted(axes)}")
    axis = axes.pop()
    strides = dense_strides(whole, 1)
    out = []
    for pieces, shape in zip(every, shapes, strict=True):
        own = dense_strides(shape, 1)
        cuts = [Cut(dest // own[axis], size[axis], source // strides[axis]) for size, source, dest in pieces]
        exact = all(
            c.begin * own[axis] == dest and c.to * strides[axis] == source
            for c, (_, source, dest) in zip(cuts, pieces, strict=True)
        )
        if not exact or not _tiles([(c.begin, c.rows) for c in cuts], shape[axis]):
            raise unjoinable(f"the map of {name} does not make its slices", f"they are {show(list(shapes))}", where)
        out.append(tuple(c for c in cuts if c.rows))
    if not _tiles(sorted({(c.to, c.rows) for cuts in out for c in cuts}), whole[axis]):
        raise unjoinable(f"the map of {name} does not make {show(list(whole))}", f"on axis {axis}", where)
    return Cuts(axis, tuple(out))


def _pieces(entry: Tree, name: str, whole: Shape, shape: Shape, where: str) -> list[tuple[Shape, int, int]]:
    """(shape, first element in the whole, first element in the slice) of a rank's pieces: boxes of both."""
    fields: Mapping[Tree, Tree] = entry if isinstance(entry, dict) else {}
    listed, said = fields.get("pieces"), fields.get("shard_shape")
    if not isinstance(listed, (list, tuple)) or _ints(said) != shape:
        raise unjoinable(f"the map of {name} is of other slices", f"shape {show(said)}, the slice has {shape}", where)
    out = []
    for piece in listed:
        parts: Mapping[Tree, Tree] = piece if isinstance(piece, dict) else {}
        size, source, dest = _ints(parts.get("shape")), _place(parts.get("source")), _place(parts.get("dest"))
        if size is None or source is None or dest is None or not len(size) == len(whole) == len(shape):
            raise unjoinable(f"the map of {name} has a piece that is none", show(piece), where)
        if parts.get("scale", 1.0) != 1.0:
            raise Unsupported(
                f"the slices of {name} are its values times {show(parts['scale'])}",
                where=where,
                why="values are copied and not computed",
                fix="make a universal folder with ds_to_universal where the model is",
            )
        for (_, strides), own in ((source, dense_strides(whole, 1)), (dest, dense_strides(shape, 1))):
            if len(strides) != len(own) or any(n > 1 and a != b for n, a, b in zip(size, strides, own, strict=True)):
                raise Unsupported(f"the slices of {name} are no boxes of it", where=where, why=show(size))
        out.append((size, source[0], dest[0]))
    return out


def _tiles(runs: Sequence[tuple[int, int]], total: int) -> bool:
    """Whether (first, rows) cover 0 to total, each row once."""
    at = 0
    for first, rows in sorted(r for r in runs if r[1]):
        if first != at:
            return False
        at += rows
    return at == total


def _ints(tree: Tree) -> Shape | None:
    """Numbers from 0; None for anything else."""
    if not isinstance(tree, (list, tuple)):
        return None
    out = tuple(n for n in tree if type(n) is int and n >= 0)
    return out if len(out) == len(tree) else None


def _place(tree: Tree) -> tuple[int, Shape] | None:
    """(offset, strides) in elements; None for anything else."""
    if not isinstance(tree, (list, tuple)) or len(tree) != 2:
        return None
    offset, strides = _ints([tree[0]]), _ints(tree[1])
    return None if offset is None or strides is None else (offset[0], strides)
