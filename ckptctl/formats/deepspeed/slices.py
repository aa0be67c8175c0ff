"""Tensor-parallel slices joined: along which axis is in the checkpoint's patterns, or told by the whole shapes.

A run over several tensor-parallel ranks has a model file and shards for each, of its slices. universal_checkpoint_info
(which Megatron-DeepSpeed and AutoTP write) says by patterns of names how slices are joined; else the config's family
does, whose whole shapes leave one axis at most. Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py,
merge_tp_slices; checkpoint/constants.py.
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.core.errors import Damaged, MissingFact, Unsupported
from ckptctl.core.tensor import Key, Piece, PieceTable, Tensor, dense_strides
from ckptctl.core.values import Record, Tree
from ckptctl.core.view import run_boxes
from ckptctl.formats.deepspeed.affine import Cut, Maps, owned
from ckptctl.formats.deepspeed.patterns import Patterns, unjoinable
from ckptctl.formats.pickles.nodes import show
from ckptctl.names import family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptctl.formats.deepspeed.layout import Shape

_FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up")
"""Names of weights that hold several matrices: their slices are slices of each, which shapes do not tell."""


class Rule(NamedTuple):
    """How slices make a tensor.

    Along axis (None: each is all of it). parts are what lies on it side by side, each the sizes of the ranks' shares
    of it; none where slices follow each other whole. rows are those of the true vocabulary, 0 for all. cuts are each
    rank's runs along the axis, where a map says them.
    """

    axis: int | None
    parts: tuple[tuple[int, ...], ...] = ()
    rows: int = 0
    cuts: tuple[tuple[Cut, ...], ...] = ()


class Rules:
    """The rule of each parameter. Raises MissingFact for names that nothing tells about."""

    def __init__(self, info: Mapping[str, Tree], config: Mapping[str, Any] | None, where: str) -> None:
        self._info, self._where = info, where
        self._lists: dict[str, Patterns] = {}
        known = family(config) if config is not None else None
        self._shapes = {p.name: p.shape for p in known.parameters()} if known is not None else {}

    def of(self, name: str, shapes: Sequence[Shape]) -> Rule:
        """The rule for slices of these shapes."""
        if self._info:
            return self._told(name, shapes)
        return self._by_shape(name, shapes)

    def _told(self, name: str, shapes: Sequence[Shape]) -> Rule:
        self._require_known(name)
        cuts = self._maps.of(name, shapes)
        if cuts is not None:
            return Rule(cuts.axis, (), self._rows(name), cuts.ranks)
        if self._matches("tp_replicated_parameter_patterns", name):
            return Rule(None)
        if self._matches("parameter_to_average_patterns", name):
            raise Unsupported(
                f"{name} is the mean of its tensor-parallel copies",
                where=self._where,
                why="parameter_to_average_patterns: a mean is computed, not copied",
                fix="make a universal folder with ds_to_universal first",
            )
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            if any(s[0] % 2 for s in shapes):
                raise self._wrong(f"the slices of {name} are no halves", f"they have {[s[0] for s in shapes]} rows")
            return Rule(0, (tuple(s[0] // 2 for s in shapes),) * 2)
        patterns, entries = self._sub_params
        if found := patterns.of(name):
            return self._side_by_side(*entries[found[0]], name, shapes)
        if self._matches("parameter_with_row_parallelism_patterns", name):
            return Rule(1)
        return Rule(0, (), self._rows(name))

    def _rows(self, name: str) -> int:
        """Rows of the true vocabulary, 0 for what is none."""
        if not self._matches("vocabulary_parameter_patterns", name):
            return 0
        rows = self._info.get("original_vocab_size")
        if type(rows) is not int or rows < 1:
            raise self._wrong(f"how many rows of {name} are tokens is not known", f"original_vocab_size is {rows}")
        return rows

    def _require_known(self, name: str) -> None:
        """Unsupported for what AutoTP itself says it cannot put together: its lists of patterns have the name too."""
        patterns, reasons = self._unknown
        if found := patterns.of(name):
            why = reasons[found[0]]
            raise Unsupported(
                f"the slices of {name} cannot be put together",
                where=self._where,
                why=f"universal_checkpoint_info says: {why}" if isinstance(why, str) else "AutoTP says so",
                fix="save the model whole from the run, with tensor parallelism gathered",
            )

    @cached_property
    def _maps(self) -> Maps:
        return Maps(self._info.get("affine_map"), self._where)

    @cached_property
    def _unknown(self) -> tuple[Patterns, list[Tree]]:
        """The patterns of what AutoTP cannot put together, and what it says of each."""
        said = self._info.get("autotp_unsupported_parameter_patterns")
        if said is not None and not isinstance(said, (dict, list, tuple)):
            raise self._wrong("autotp_unsupported_parameter_patterns lists nothing", show(said))
        reasons = list(said.values()) if isinstance(said, dict) else [None] * len(said or ())
        return Patterns(said or (), self._where), reasons

    @cached_property
    def _sub_params(self) -> tuple[Patterns, list[tuple[Tree, Mapping[Tree, Tree]]]]:
        """The patterns of all entries of parameter_with_sub_params, and each with its entry's fields."""
        every: list[tuple[Tree, Mapping[Tree, Tree]]] = []
        for entry in self._listed("parameter_with_sub_params"):
            fields = entry.state if isinstance(entry, Record) else entry
            patterns = fields.get("patterns") if isinstance(fields, dict) else None
            if not isinstance(fields, dict) or not isinstance(patterns, (list, tuple)):
                raise self._wrong("an entry of parameter_with_sub_params has no patterns", show(entry))
            every += [(p, fields) for p in patterns]
        return Patterns((p for p, _ in every), self._where), every

    def _listed(self, key: str) -> Sequence[Tree]:
        found = self._info.get(key)
        if found is not None and not isinstance(found, (list, tuple)):
            raise self._wrong(f"{key} is no list", show(found))
        return found or ()

    def _matches(self, key: str, name: str) -> bool:
        if key not in self._lists:
            self._lists[key] = Patterns(self._listed(key), self._where)
        return bool(self._lists[key].of(name))

    def _wrong(self, what: str, why: str) -> Damaged:
        return unjoinable(what, why, self._where)

    def _side_by_side(self, pattern: Tree, fields: Mapping[Tree, Tree], name: str, shapes: Sequence[Shape]) -> Rule:
        """A SubparamShape: {patterns, shape, partition_dim}, its shape having the sizes side by side on that axis.

        One number there is a count of equal parts, or, in older versions, the one part's size. Each rank has the same
        share of a part, but where sub_param_shard_widths says its own (version 0.4). Source: DeepSpeed 0.19.8,
        checkpoint/ds_to_universal.py, merge_tp_slices.
        """
        axis, shape = fields.get("partition_dim"), fields.get("shape")
        if type(axis) is not int or not isinstance(shape, (list, tuple)) or not 0 <= axis < len(shape):
            raise self._wrong(f"the parts of {name} are not known", f"shape {show(shape)}, partition_dim {show(axis)}")
        if any(len(s) <= axis or (axis and len(s) != len(shape)) for s in shapes):
            raise Unsupported(
                f"{name} has shape {shapes[0]}, and is sliced as {show(shape)} on axis {axis}",
                where=self._where,
                fix="make a universal folder with ds_to_universal where the model is",
            )
        total, tp = sum(s[axis] for s in shapes), len(shapes)
        sizes = _sizes(shape[axis], total)
        version = self._info.get("universal_checkpoint_version", 0)
        if isinstance(version, (int, float)) and version >= 0.4:
            every = self._info.get("sub_param_shard_widths")
            listed = every.get(pattern) if isinstance(every, dict) else None
            parts = tuple(tuple(w) if isinstance(w, (list, tuple)) else () for w in listed or ())
        else:
            parts = tuple((n // tp,) * tp for n in sizes)
        fits = all(len(w) == tp and all(type(n) is int and n >= 0 for n in w) for w in parts)
        if (
            not fits
            or tuple(map(sum, parts)) != sizes
            or [sum(w) for w in zip(*parts, strict=True)] != [s[axis] for s in shapes]
        ):
            raise self._wrong(
                f"the parts of {name} are {show(shape[axis])}, and do not make its slices",
                f"these are {[s[axis] for s in shapes]} on axis {axis}, of each part {show(list(parts))}",
            )
        return Rule(axis, parts)

    def _by_shape(self, name: str, shapes: Sequence[Shape]) -> Rule:
        whole = self._shapes.get(name)
        fix = "give the model's config with --model-config; its family must be one of those known by name"
        if whole is None:
            raise MissingFact(
                f"along which axis {name} is sliced is not in the checkpoint",
                where=self._where,
                why="it has no universal_checkpoint_info, and no config of a known family says its whole shape",
                fix=fix,
                code="slice-axis",
            )
        if all(s == whole for s in shapes):
            return Rule(None)
        for axis in range(len(whole)):
            rest = [(*s[:axis], *s[axis + 1 :]) for s in shapes]
            same = all(len(s) == len(whole) for s in shapes) and all(
                r == (*whole[:axis], *whole[axis + 1 :]) for r in rest
            )
            if same and sum(s[axis] for s in shapes) == whole[axis]:
                if axis == 0 and _FUSED.search(name):
                    raise MissingFact(
                        f"{name} holds several matrices: how each is sliced is not in the checkpoint",
                        where=self._where,
                        why="it has no universal_checkpoint_info",
                        fix="make a universal folder with ds_to_universal where the model is",
                        code="slice-axis",
                    )
                return Rule(axis)
        raise Damaged(
            f"the slices of {name} do not make its whole shape {whole}",
            where=self._where,
            why=f"they are {', '.join(map(str, shapes[:4]))}",
            fix=fix,
            code="zero-layout",
        )


def _sizes(said: Tree, total: int) -> tuple[int, ...]:
    """Sizes of the parts on an axis of total elements; () for what says none."""
    if isinstance(said, (list, tuple)):
        return tuple(n for n in said if type(n) is int) if all(type(n) is int for n in said) else ()
    if type(said) is not int or said < 1 or total % said:
        return ()
    return (total,) if said == total else (total // said,) * said


def joined(key: Key, slices: Sequence[Tensor | None], rules: Rules, where: str) -> Tensor:
    """A tensor of its slices, rank by rank. Damaged where they do not make one."""
    whole = [t for t in slices if t is not None]
    if len(whole) < len(slices):
        raise Damaged(f"one tensor-parallel rank has no {key.kind} of {key.name}", where=where, code="mixed-saves")
    first = whole[0]
    if any(t.held.name != first.held.name for t in whole):
        types = ", ".join(sorted({t.held.name for t in whole}))
        raise Damaged(
            f"tensor-parallel ranks have {key.kind} of {key.name} in {types}", where=where, code="mixed-saves"
        )
    if first.shape == () or (key.kind == "step" and first.numel == 1):
        return Tensor(key, first.dtype, first.shape, first.pieces, tuple(t.pieces for t in whole[1:]), first.trainable)
    rule = rules.of(key.name, [t.shape for t in whole])
    if rule.axis is None:
        if any(t.shape != first.shape for t in whole):
            raise Damaged(f"copies of {key.name} differ in shape", where=where, code="zero-layout")
        return Tensor(key, first.dtype, first.shape, first.pieces, tuple(t.pieces for t in whole[1:]), first.trainable)
    axis = rule.axis
    if any(len(t.shape) <= axis for t in whole):
        raise Damaged(f"{key.name} has shape {first.shape}, and is to be joined on axis {axis}", where=where)
    if rule.cuts:
        total = max(to + n for cuts in rule.cuts for _, n, to in cuts)
        every = owned(rule.cuts)
    else:
        total, offset, listed = sum(t.shape[axis] for t in whole), 0, []
        for number, tensor in enumerate(whole):
            listed.append(_cuts(rule, number, tensor.shape[axis], offset))
            offset += tensor.shape[axis]
        every = [listed]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    rows = rule.rows if 0 < rule.rows < shape[0] else 0
    tables = [_table(whole, cuts, axis, shape, rows) for cuts in every]
    shape = (rows, *shape[1:]) if rows else shape
    return Tensor(key, first.dtype, shape, (tables[0],), tuple((t,) for t in tables[1:]), first.trainable)


def _table(slices: Sequence[Tensor], cuts: Sequence[Sequence[Cut]], axis: int, shape: Shape, rows: int) -> PieceTable:
    """The pieces of the whole tensor, of each slice those that its cuts say; the first rows only, if any are said."""
    item = slices[0].held.itemsize
    pieces: list[Piece] = []
    for tensor, mine in zip(slices, cuts, strict=True):
        for table in tensor.pieces:
            for piece in table:
                pieces += _placed(piece, tensor.shape, shape, axis, mine, item)
    if rows:
        pieces = [p for q in pieces if (p := _cut_rows(q, (rows, *shape[1:]))) is not None]
    return PieceTable.of(pieces, item) if pieces else PieceTable.whole((0,), item, 0, 0)


def _cuts(rule: Rule, number: int, size: int, offset: int) -> list[Cut]:
    """(first row in the slice, rows, first row in the whole) along the axis."""
    if not rule.parts:
        return [Cut(0, size, offset)]
    out, inside, before = [], 0, 0
    for shares in rule.parts:
        out.append(Cut(inside, shares[number], before + sum(shares[:number])))
        inside += shares[number]
        before += sum(shares)
    return out


def _placed(piece: Piece, shape: Shape, whole: Shape, axis: int, cuts: Sequence[Cut], item: int) -> Iterator[Piece]:
    """A slice's piece (a run of its flattened elements, or all of it) as boxes of the whole tensor."""
    if piece.view == shape:
        boxes = [(piece.lo, piece.size, piece.start, piece.strides)]
    else:
        first = piece.lo[0]
        boxes, at = [], piece.start
        for lo, size in run_boxes(first, first + piece.size[0], shape):
            boxes.append((lo, size, at, dense_strides(size, item)))
            at += math.prod(size) * item
    for lo, size, start, strides in boxes:
        for begin, n, to in cuts:
            low, high = max(lo[axis], begin), min(lo[axis] + size[axis], begin + n)
            if low < high:
                place = (*lo[:axis], to + low - begin, *lo[axis + 1 :])
                extent = (*size[:axis], high - low, *size[axis + 1 :])
                at = start + (low - lo[axis]) * strides[axis]
                yield Piece(whole, place, extent, piece.source, at, strides)


def _cut_rows(piece: Piece, shape: Shape) -> Piece | None:
    """A piece less the rows beyond the shape: padding of the vocabulary."""
    rows = min(piece.size[0], shape[0] - piece.lo[0])
    if rows <= 0:
        return None
    return Piece(shape, piece.lo, (rows, *piece.size[1:]), piece.source, piece.start, piece.strides)
