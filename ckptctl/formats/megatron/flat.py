"""Moments in buffers of torch_dist: dp_reshardable (tensors by bucket) and dp_zero_gather_scatter (an object a group).

Where each parameter lies in a buffer is in no file: it follows from order and sizes, and is checked against the pieces
that the ranks wrote. Source: Megatron-LM core_v0.16.1, core/optimizer/distrib_optimizer.py,
sharded_param_state_dp_reshardable, sharded_param_state_dp_zero.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
    from collections.abc import Callable, Iterator

    from ckptctl.formats.datafiles import DataFiles
    from ckptctl.formats.megatron.buffers import Buffer
    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.found import Found

_BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.gbuf_idx_(\d{1,9})\.dtype_(.+)\.bucket_idx_(\d{1,9})\.(\w+)"
)
_OBJECT = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d{1,9})\.param_state/shard_0_1")


def is_flat(index: Index) -> bool:
    """Whether moments lie in buffers."""
    return any(_BUCKET.fullmatch(n) or _OBJECT.fullmatch(n) for n in index.items)


class _Mesh:
    """The buffers of every rank: order and shapes of its parameters."""

    def __init__(self, params: list[Param], facts: Facts) -> None:
        if facts.ep > 1:
            raise Unsupported(
                "moments in buffers of a run with expert parallelism are not read",
                where=NAME,
                fix="save with --dist-ckpt-optim-fully-reshardable, or in the classic format",
                code="optimizer-unknown",
            )
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
        self.local = stages.local_shapes(shapes, facts.tp, NAME, fused=fused)
        self.chunks = stages.chunks_of([p.name for p in params], facts, tied=self.tied)
        self._order = model.order_of(fused=fused, grouped=facts.flag("moe_grouped_gemm"))

    def buffers(self, pp_rank: int) -> Iterator[tuple[list[Param], Buffer]]:
        """The buffers of a stage in order: by chunk, then by type."""
        for chunk in range(self.facts.vpp):
            names = sorted(self.chunks[pp_rank, chunk], key=self._order)
            params = [Param(n, self.local[n], chunk, self._dtype(n)) for n in names]
            for dtype in dict.fromkeys(p.dtype for p in params):
                of = [p for p in params if p.dtype == dtype]
                yield of, laid_out(of, pp_rank, self.facts)

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
        return any(placed.is_shifted for pp in range(facts.pp) for _, placed in mesh.buffers(pp))
    except CkptError:
        return True


def states(index: Index, files: DataFiles, heads: Heads, params: list[Param], out: Found) -> dict[Key, Tensor]:
    """Moments and masters of all parameters as whole tensors."""
    mesh = _Mesh(params, out.facts)
    found = _buckets(index, heads, mesh) if any(_BUCKET.fullmatch(n) for n in index.items) else {}
    return found or _objects(index, files, mesh, out)


# ---- dp_reshardable -------------------------------------------------------------------------------------------------


def _buckets(index: Index, heads: Heads, mesh: _Mesh) -> dict[Key, Tensor]:
    facts, tensors = mesh.facts, {}
    locals_: list[Native] = []
    wholes: list[Native] = []
    by_place = {(int(m[1]), int(m[2]), int(m[4]), m[5]): n for n in index.items if (m := _BUCKET.fullmatch(n))}
    kinds = sorted({k[3] for k in by_place})
    for group in range(facts.tp * facts.pp):
        pp_rank, tp_rank = divmod(group, facts.tp)
        for gbuf, (of, placed) in enumerate(mesh.buffers(pp_rank)):
            for bucket, numel in enumerate(placed.unpadded):
                members = [p for p in of if placed.slots[slot_name(p)].bucket == bucket]
                raw = f"{group}.{gbuf}.{bucket}"
                for kind in kinds:
                    key = Key(raw, STATE_KEYS.get(kind, kind))
                    tensors[key] = _bucket(
                        index, heads, by_place.get((group, gbuf, bucket, kind)), key, numel, members, placed
                    )
                locals_.append(_parts(raw, numel, members, placed, group))
            wholes += [_part_of_whole(p, group, tp_rank, mesh) for p in of]
    made = {k: m.tensor for k, m in remade(tensors, to_hub(locals_)).items()}
    joined = remade({k: replace(t, key=k) for k, t in made.items()}, to_hub(wholes))
    return {
        k: replace(m.tensor, key=k)
        for k, m in joined.items()
        if k.name in mesh.of and not (k.kind == "master" and mesh.of[k.name].dtype == "float32")
    }


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


def _parts(raw: str, numel: int, members: list[Param], placed: Buffer, group: int) -> Native:
    """A bucket as the rank's parameters in it."""
    parts, shapes = [], []
    for p in members:
        slot = placed.slots[slot_name(p)]
        view, size = (numel,), (slot.numel,)
        parts.append(Part(Key(_local(p, group)), view, (slot.start,), size, size, (0,), (0,)))
        shapes.append(p.shape)
    return Native(raw, (numel,), tuple(parts), tuple(shapes))


def _local(param: Param, group: int) -> str:
    return f"{group}:{slot_name(param)}"


def _part_of_whole(param: Param, group: int, tp_rank: int, mesh: _Mesh) -> Native:
    """A rank's parameter as a part of the whole; a copy of what another rank has goes by a name of its own."""
    place = stages.place(param.name, mesh.local, tp_rank, mesh.facts.tp)
    size, zero = place.size, (0,) * len(place.size)
    axes = tuple(range(len(size)))
    if mesh.whole(param.name) != param.name or (tp_rank and not place.cut):
        part = Part(Key(f"copy {group} {param.name}"), size, zero, size, size, zero, axes)
        return Native(_local(param, group), param.shape, (part,), (param.shape,))
    part = Part(Key(param.name), size, zero, size, place.view, place.lo, axes)
    return Native(_local(param, group), param.shape, (part,), (place.shape,))


# ---- dp_zero_gather_scatter -----------------------------------------------------------------------------------------


def _objects(index: Index, files: DataFiles, mesh: _Mesh, out: Found) -> dict[Key, Tensor]:
    whole = Whole(out.whole.take, out.whole.verify)
    for name, item in index.items.items():
        found = _OBJECT.fullmatch(name)
        if found is None or not isinstance(item, ByteItem):
            continue
        pp_rank, tp_rank = divmod(int(found[1]), mesh.facts.tp)
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
            buffers = list(mesh.buffers(pp_rank))
            if len(flat) != len(buffers):
                raise Unsupported(
                    f"{name} has {len(flat)} buffers, {len(buffers)} by the model's order",
                    where=NAME,
                    fix="take the weights alone with --no-optimizer",
                    code="optimizer-buffers",
                )
            for states_, (of, placed) in zip(flat, buffers, strict=True):
                span_of = partial(Span, file=item.file, opened=opened, reader=reader, base=item.offset)
                _object_buffer(states_, of, placed, tp_rank, mesh, span_of, whole)
    made = {k: replace(t, replicas=()) for k, t in whole.tensors()}
    out.warnings += whole.warnings()
    return made


def _object_buffer(
    states_: Tree,
    of: list[Param],
    placed: Buffer,
    tp_rank: int,
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
            at = stages.place(p.name, mesh.local, tp_rank, mesh.facts.tp)
            name = mesh.whole(p.name)
            first = name == p.name and (at.cut or tp_rank == 0)
            copy = None if first else (p.name, -1 if at.cut else tp_rank)
            alike = not at.cut or name != p.name or (mesh.tied and name == model.EMBEDDING)
            whole.put(replace(at, name=name), kind, span, copy, offset=placed.joined(slot_name(p)), compare=alike)


__all__ = ["is_flat", "is_shifted", "states"]
