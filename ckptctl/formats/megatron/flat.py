"""Moments in buffers of torch_dist: dp_reshardable (tensors by bucket) and dp_zero_gather_scatter (an object a group).

Where each parameter lies in a buffer is in no file: it follows from order and sizes, and is checked against the pieces
that the ranks wrote. Source: Megatron-LM core_v0.16.1, core/optimizer/distrib_optimizer.py,
sharded_param_state_dp_reshardable, sharded_param_state_dp_zero.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.core.dtype import packed
from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.core.remake import Native, remade, to_hub
from ckptctl.core.tensor import Key, Part, Tensor
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.dcp.items import Heads, LazyTable
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, Index
from ckptctl.formats.megatron import model, stages
from ckptctl.formats.megatron.buffers import STATE_KEYS, laid_out, slot_name
from ckptctl.formats.megatron.collect import Span, Whole
from ckptctl.formats.megatron.groups import Param
from ckptctl.formats.megatron.runargs import is_old_grouped
from ckptctl.formats.torchfile.read import open_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptctl.formats.datafiles import DataFiles
    from ckptctl.formats.megatron.buffers import Buffer
    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.found import Found
    from ckptctl.formats.megatron.model import Place

_GROUP = r"(?:chained_(\d{1,9})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})"
_BUCKET = re.compile(_GROUP + r"\.gbuf_idx_(\d{1,9})\.dtype_(?:.+)\.bucket_idx_(\d{1,9})\.(\w+)")
_OBJECT = re.compile(_GROUP + r"\.param_state/shard_0_1")


def is_flat(index: Index) -> bool:
    """Whether moments lie in buffers."""
    return any(_BUCKET.fullmatch(n) or _OBJECT.fullmatch(n) for n in index.items)


class _Ranks(NamedTuple):
    """Ranks that hold one set of buffers together: those of one optimizer, alike but for their data-parallel number."""

    chained: int
    """0: of all parameters but experts, where expert-parallel ranks have experts of their own; 1: of those."""
    number: int
    """As files number them."""
    pp_rank: int
    ep_rank: int
    tp_rank: int

    @property
    def called(self) -> str:
        """What their buffers and parameters go by while they are put together."""
        return f"{self.chained}.{self.number}"


class _Mesh:
    """The buffers of every rank: order and shapes of its parameters."""

    def __init__(self, params: list[Param], facts: Facts) -> None:
        if is_old_grouped(facts.args):
            raise Unsupported(
                "moments in buffers of a run with GroupedMLP are not read",
                where=NAME,
                fix="save with --dist-ckpt-optim-fully-reshardable, or in the classic format",
                code="optimizer-unknown",
            )
        self.facts = facts
        self.tied = facts.tied
        self.of = {p.name: p for p in params}
        shapes = {p.name: p.shape for p in params}
        if self.tied and model.EMBEDDING in shapes:
            shapes[model.HEAD] = shapes[model.EMBEDDING]
        fused = facts.args.get("transformer_impl", "transformer_engine") != "local"
        self.local: dict[str, model.Shape] = {}
        for tp, experts in ((facts.tp, False), (facts.etp, True)):
            cut = {n: s for n, s in shapes.items() if model.is_expert(n) == experts}
            self.local |= stages.local_shapes(cut, tp, NAME, fused=fused)
        self.chunks = stages.chunks_of([p.name for p in params], facts, tied=self.tied)
        self._expert = {n: model.expert_of(n) for n in shapes if model.is_expert(n)}
        self._order = model.order_of(fused=fused, grouped=facts.flag("moe_grouped_gemm"))

    def ranks(self) -> Iterator[_Ranks]:
        """All sets of ranks with buffers of their own, in the order of their numbers.

        Source: core_v0.16.1, core/optimizer/__init__.py, get_megatron_optimizer (data_parallel_group_idx is the rank
        in the model-parallel group, for experts in that of tensor-, expert-parallel ranks and stages).
        """
        facts = self.facts
        for number in range(facts.pp * facts.tp):
            pp_rank, tp_rank = divmod(number, facts.tp)
            yield _Ranks(0, number, pp_rank, 0, tp_rank)
        if facts.ep > 1 and self._expert:
            for number in range(facts.pp * facts.ep * facts.etp):
                rest, tp_rank = divmod(number, facts.etp)
                yield _Ranks(1, number, *divmod(rest, facts.ep), tp_rank)

    def buffers(self, ranks: _Ranks) -> Iterator[tuple[list[Param], Buffer]]:
        """The buffers of some ranks in order: by chunk, then by type."""
        for chunk in range(self.facts.vpp):
            names = [n for n in self.chunks[ranks.pp_rank, chunk] if self._is_of(n, ranks)]
            params = [Param(n, self.local[n], chunk, self._dtype(n)) for n in sorted(names, key=self._order)]
            for dtype in dict.fromkeys(p.dtype for p in params):
                of = [p for p in params if p.dtype == dtype]
                yield of, laid_out(of, ranks.pp_rank, self.facts)

    def _is_of(self, name: str, ranks: _Ranks) -> bool:
        if self.facts.ep == 1:
            return True
        if not ranks.chained:
            return name not in self._expert
        experts = self.facts.experts // self.facts.ep
        return name in self._expert and experts > 0 and self._expert[name] // experts == ranks.ep_rank

    def place(self, name: str, ranks: _Ranks) -> Place:
        """Where some ranks' part of a parameter lies in it."""
        return stages.place(name, self.local, ranks.tp_rank, self.facts.etp if ranks.chained else self.facts.tp)

    def _dtype(self, name: str) -> str:
        return self.of[model.EMBEDDING if name == model.HEAD and self.tied else name].dtype

    def whole(self, name: str) -> str:
        """The name whose tensor a rank's parameter is a part of."""
        return model.EMBEDDING if name == model.HEAD and self.tied else name


def is_shifted(params: list[Param], facts: Facts) -> bool:
    """Whether a run of these facts has a padded bucket before another, on any rank; True where that cannot be told."""
    several = facts.flag("overlap_grad_reduce") or (facts.tied and facts.pp > 1)
    if not several or facts.optional("num_layers") is None:
        return several
    try:
        mesh = _Mesh(params, facts)
        return any(placed.is_shifted for ranks in mesh.ranks() for _, placed in mesh.buffers(ranks))
    except CkptError:
        return True


def states(index: Index, files: DataFiles, heads: Heads, params: list[Param], out: Found) -> dict[Key, Tensor]:
    """Moments and masters of all parameters as whole tensors."""
    mesh = _Mesh(params, out.facts)
    found = _buckets(index, heads, mesh) if any(_BUCKET.fullmatch(n) for n in index.items) else {}
    return found or _objects(index, files, mesh, out)


# ---- dp_reshardable -------------------------------------------------------------------------------------------------


def _buckets(index: Index, heads: Heads, mesh: _Mesh) -> dict[Key, Tensor]:
    tensors: dict[Key, Tensor] = {}
    locals_: list[Native] = []
    wholes: list[Native] = []
    found = {n: m for n in index.items if (m := _BUCKET.fullmatch(n))}
    by_place = {(int(m[1] or 0), int(m[2]), int(m[3]), int(m[4]), m[5]): n for n, m in found.items()}
    kinds = sorted({k[4] for k in by_place})
    for ranks in mesh.ranks():
        for gbuf, (of, placed) in enumerate(mesh.buffers(ranks)):
            for bucket, numel in enumerate(placed.unpadded):
                members = [p for p in of if placed.slots[slot_name(p)].bucket == bucket]
                raw = f"{ranks.called}.{gbuf}.{bucket}"
                for kind in kinds:
                    key = Key(raw, STATE_KEYS.get(kind, kind))
                    name = by_place.pop((ranks.chained, ranks.number, gbuf, bucket, kind), None)
                    tensors[key] = _bucket(index, heads, name, key, numel, members, placed)
                locals_.append(_parts(raw, numel, members, placed, ranks))
            wholes += [_part_of_whole(p, ranks, mesh) for p in of]
    _require_none(by_place.values())
    made = {k: m.tensor for k, m in remade(tensors, to_hub(locals_)).items()}
    joined = remade({k: replace(t, key=k) for k, t in made.items()}, to_hub(wholes))
    return {
        k: replace(m.tensor, key=k)
        for k, m in joined.items()
        if k.name in mesh.of and not (k.kind == "master" and mesh.of[k.name].dtype == "float32")
    }


def _require_none(left: Iterable[str]) -> None:
    """Unsupported where there are buffers that no rank of the mesh has by the model's order."""
    name = next(iter(left), None)
    if name is not None:
        raise Unsupported(
            f"{name} is of no rank by the args",
            where=NAME,
            why="which parameters a buffer holds follows from the mesh and the model's order",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-buffers",
        )


def _bucket(
    index: Index, heads: Heads, name: str | None, key: Key, numel: int, members: list[Param], placed: Buffer
) -> Tensor:
    chunks = index.items.get(name or "")
    if not isinstance(chunks, Chunks) or chunks.shape != (numel,):
        have = chunks.shape if isinstance(chunks, Chunks) else "absent"
        raise Unsupported(
            f"a bucket of the optimizer is {have}, and should have {numel} elements by the model's order",
            where=NAME,
            why=f"{key.kind} of buffer {key.name}: where each parameter lies in it follows from order and sizes",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-buffers",
        )
    starts = set(chunks.lo[:, 0].tolist())
    for p in members:
        slot = placed.slots[slot_name(p)]
        if slot.start not in starts:
            raise Unsupported(
                f"no rank wrote a piece at element {slot.start} of a bucket, where {p.name} should begin",
                where=NAME,
                why="the order of parameters in the run's buffers is another",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-buffers",
            )
    return Tensor(key, packed(chunks.dtype), (numel,), LazyTable(chunks, heads, chunks.file))


def _parts(raw: str, numel: int, members: list[Param], placed: Buffer, ranks: _Ranks) -> Native:
    """A bucket as the rank's parameters in it."""
    parts, shapes = [], []
    for p in members:
        slot = placed.slots[slot_name(p)]
        view, size = (numel,), (slot.numel,)
        parts.append(Part(Key(_local(p, ranks)), view, (slot.start,), size, size, (0,), (0,)))
        shapes.append(p.shape)
    return Native(raw, (numel,), tuple(parts), tuple(shapes))


def _local(param: Param, ranks: _Ranks) -> str:
    return f"{ranks.called}:{slot_name(param)}"


def _part_of_whole(param: Param, ranks: _Ranks, mesh: _Mesh) -> Native:
    """A rank's parameter as a part of the whole; a copy of what another rank has goes by a name of its own."""
    place = mesh.place(param.name, ranks)
    size, zero = place.size, (0,) * len(place.size)
    axes = tuple(range(len(size)))
    if mesh.whole(param.name) != param.name or (ranks.tp_rank and not place.cut):
        part = Part(Key(f"copy {ranks.called} {param.name}"), size, zero, size, size, zero, axes)
        return Native(_local(param, ranks), param.shape, (part,), (param.shape,))
    part = Part(Key(param.name), size, zero, size, place.view, place.lo, axes)
    return Native(_local(param, ranks), param.shape, (part,), (place.shape,))


# ---- dp_zero_gather_scatter -----------------------------------------------------------------------------------------


def _objects(index: Index, files: DataFiles, mesh: _Mesh, out: Found) -> dict[Key, Tensor]:
    whole = Whole(out.whole.take, out.whole.verify)
    every = {(r.chained, r.number): r for r in mesh.ranks()}
    for name, item in index.items.items():
        found = _OBJECT.fullmatch(name)
        if found is None or not isinstance(item, ByteItem):
            continue
        ranks = every.get((int(found[1] or 0), int(found[2])))
        if ranks is None:
            _require_none([name])
            continue
        path = files.folder / index.files[item.file]
        with FileBytes(
            path, item.offset, item.offset + item.length, name=f"{index.files[item.file]}, {name}"
        ) as reader:
            opened = open_torch(reader)
            tree = opened.root[0] if isinstance(opened.root, list) and len(opened.root) == 1 else opened.root
            if not isinstance(tree, dict):
                raise Damaged(f"{name} is no dict", where=NAME, code="optimizer-damaged")
            by_number = [v for k, v in sorted((k, v) for k, v in tree.items() if isinstance(k, int))]
            flat = [
                states for buffers in by_number for states in (buffers.values() if isinstance(buffers, dict) else ())
            ]
            buffers = list(mesh.buffers(ranks))
            if len(flat) != len(buffers):
                raise Unsupported(
                    f"{name} has {len(flat)} buffers, {len(buffers)} by the model's order",
                    where=NAME,
                    fix="take the weights alone with --no-optimizer",
                    code="optimizer-buffers",
                )
            for states_, (of, placed) in zip(flat, buffers, strict=True):
                span_of = partial(Span, file=item.file, opened=opened, reader=reader, base=item.offset)
                _object_buffer(states_, of, placed, ranks, mesh, span_of, whole)
    made = {k: replace(t, replicas=()) for k, t in whole.tensors()}
    out.warnings += whole.warnings()
    return made


def _object_buffer(
    states_: Tree,
    of: list[Param],
    placed: Buffer,
    ranks: _Ranks,
    mesh: _Mesh,
    span_of: Callable[[TensorRef], Span],
    whole: Whole,
) -> None:
    said = states_.get("numel_unpadded") if isinstance(states_, dict) else None
    if said != placed.numel:
        raise Unsupported(
            f"a buffer of the distributed optimizer has {said} elements, {placed.numel} by the model's order",
            where=NAME,
            fix="take the weights alone with --no-optimizer",
            code="optimizer-buffers",
        )
    for key, value in states_.items():
        if not isinstance(value, TensorRef):
            continue
        kind = STATE_KEYS.get(str(key), str(key))
        span = span_of(value)
        for p in of:
            if kind == "master" and p.dtype == "float32":
                continue
            at = mesh.place(p.name, ranks)
            name = mesh.whole(p.name)
            first = name == p.name and (at.cut or ranks.tp_rank == 0)
            copy = None if first else (p.name, -1 if at.cut else ranks.tp_rank)
            alike = not at.cut or name != p.name or (mesh.tied and name == model.EMBEDDING)
            whole.put(replace(at, name=name), kind, span, copy, offset=placed.joined(slot_name(p)), compare=alike)


__all__ = ["is_flat", "is_shifted", "states"]
