"""The optimizer in a classic folder's files: plain, in the rank's file, or distributed, in flat buffers beside it.

Source: Megatron-LM core_v0.16.1, core/optimizer/optimizer.py, distrib_optimizer.py, get_parameter_state_dp_zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.buffers import STATE_KEYS, Buffer, laid_out, slot_name
from ckptctl.formats.megatron.collect import Span
from ckptctl.formats.megatron.found import Found, number_of
from ckptctl.formats.megatron.groups import Param, Part, ids_of, members, settings
from ckptctl.formats.megatron.rankfile import RankFile, opened_file, put, whole_names
from ckptctl.formats.megatron.ranks import OPTIMIZER_FILE
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.torchtensor import read_leaves

if TYPE_CHECKING:
    from ckptctl.formats.bytesource import FileBytes
    from ckptctl.formats.torchfile.read import TorchFile

_SAMPLE_NUMEL = 1024
"""Elements that are compared at the beginning, and at the end, of each weight."""


def _grouped(part: Part, found: list[list[Param]], here: RankFile, out: Found) -> None:
    """Adds a rank's groups to those of the others."""
    for group, params in zip(part.groups, found, strict=True):
        step = _count(group.get("step"), here)
        options = read_leaves(settings(group), here.reader)
        out.add_group(options, whole_names(params, here, out), step, here.opened.path)


def _count(value: Tree, here: RankFile) -> Tree:
    """A count of updates, which torch keeps as a number or as a 0-d tensor."""
    return number_of(read_leaves(value, here.reader))


def plain(parts: list[Part], here: RankFile, out: Found) -> None:
    """Moments and masters by number, groups in order."""
    apart = out.facts.ep > 1
    for part in parts:
        found = members(part, here.params, out.facts, experts_apart=apart, where=here.opened.path)
        _require_listed(part, here.opened.path)
        _grouped(part, found, here, out)
        for number, (group, params) in enumerate(zip(part.groups, found, strict=True)):
            for identity, param in zip(ids_of(group), params, strict=True):
                _state(identity, param, part, here, out)
            if part.masters:
                _masters(part.masters[number], params, here, out)


def _require_listed(part: Part, where: str) -> None:
    """Damaged where numbers of groups and of states are not the same, or groups and their float32 copies."""
    listed = [i for g in part.groups for i in ids_of(g)]
    numbers = {i for i in listed if isinstance(i, (int, str))}
    left = [i for i in part.state if i not in numbers]
    if len(numbers) != len(listed) or left or any("params" not in g for g in part.groups):
        raise Damaged(
            "the optimizer's groups do not say which states are theirs",
            where=where,
            why=f"state {show(left[0])} is of none" if left else "they number no parameter, or one twice",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-groups",
        )
    if part.masters and len(part.masters) != len(part.groups):
        raise Damaged(
            f"the optimizer has {len(part.groups)} groups, and float32 copies of {len(part.masters)}",
            where=where,
            fix="take the weights alone with --no-optimizer",
            code="optimizer-groups",
        )


def _state(identity: Tree, param: Param, part: Part, here: RankFile, out: Found) -> None:
    entry = part.state.get(identity) if isinstance(identity, (int, str)) else None
    for kind, value in entry.items() if isinstance(entry, dict) else ():
        if kind == "step":
            number = _count(value, here)
            for name in whole_names([param], here, out):
                out.add_step(name, number, here.opened.path)
        elif isinstance(value, TensorRef):
            if value.shape != param.shape:
                raise Damaged(
                    f"{kind} of {param.name} is {value.shape}, the parameter {param.shape}",
                    where=here.opened.path,
                    why="parameters are numbered by decay and order, which then does not hold here",
                    fix="take the weights alone with --no-optimizer",
                    code="optimizer-groups",
                )
            span = here.span(value)
            put(param.name, param.chunk, str(kind), span, 0, value.shape, here, out)


def _masters(masters: Tree, params: list[Param], here: RankFile, out: Found) -> None:
    """Float32 copies of a group's 16-bit parameters, in its order."""
    halves = [p for p in params if p.dtype in ("bfloat16", "float16")]
    count = len(masters) if isinstance(masters, (list, tuple)) else 0
    if count != len(halves):
        raise Unsupported(
            f"a group has {len(halves)} 16-bit parameters and {count} float32 copies",
            where=here.opened.path,
            fix="take the weights alone with --no-optimizer",
            code="optimizer-groups",
        )
    for param, value in zip(halves, masters if halves else (), strict=True):
        if not isinstance(value, TensorRef) or value.shape != param.shape:
            raise Damaged(
                f"the float32 copy of {param.name} is not of its shape", where=here.opened.path, code="optimizer-groups"
            )
        span = here.span(value)
        put(param.name, param.chunk, "master", span, 0, value.shape, here, out)


def distributed(parts: list[Part], here: RankFile, reader: FileBytes, out: Found) -> None:
    """Moments and masters of the distributed optimizer: one flat buffer a chunk, type, and kind of expert."""
    opened = opened_file(reader, out)
    number = len(out.sources) - 1
    for part in parts:
        found = members(part, here.params, out.facts, experts_apart=out.facts.ep > 1, where=here.opened.path)
        _grouped(part, found, here, out)
    trees = opened.root if isinstance(opened.root, list) else [opened.root]
    for position, tree in enumerate(trees):
        if tree is None:
            continue  # dense state under expert parallelism: in the files of the first expert rank only
        if not isinstance(tree, dict):
            raise Damaged("the optimizer's buffers are no dict", where=opened.path, code="optimizer-damaged")
        experts = position > 0 if len(trees) > 1 else None
        for chunk, buffers in tree.items():
            if isinstance(chunk, int) and isinstance(buffers, dict):
                for types, states in buffers.items():
                    dtype = str(types[0] if isinstance(types, tuple) else types).removeprefix("torch.")
                    params = [p for p in here.params if p.chunk == chunk and p.dtype == dtype]
                    if out.facts.ep > 1:
                        params = [p for p in params if model.is_expert(p.name) == bool(experts)]
                    _buffer(states, params, here, opened, reader, number, out)


def _buffer(
    states: Tree, params: list[Param], here: RankFile, opened: TorchFile, reader: FileBytes, number: int, out: Found
) -> None:
    if not isinstance(states, dict):
        raise Unsupported(
            "the optimizer's buffers are kept by bucket, as before February 2024",
            where=opened.path,
            fix="load the run with --ckpt-convert-update-legacy-dist-opt-format and save it again",
            code="optimizer-unknown",
        )
    placed = laid_out(params, here.rank.pp, out.facts)
    said = states.get("numel_unpadded")
    if said != placed.numel:
        raise Unsupported(
            f"a buffer of the distributed optimizer has {said} elements, {placed.numel} by the model's order",
            where=opened.path,
            why="where each parameter lies in it is in no file, and follows from their order and sizes",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-buffers",
        )
    _require_in_place(params, placed, here)
    for key, value in states.items():
        if not isinstance(value, TensorRef):
            continue
        kind = STATE_KEYS.get(str(key), str(key))
        if value.shape != (placed.numel,):
            raise Damaged(
                f"{key} of a buffer has shape {value.shape}, not ({placed.numel},)",
                where=opened.path,
                code="optimizer-buffers",
            )
        span = Span(value, number, opened, reader)
        for p in params:
            if kind == "master" and p.dtype == "float32":
                _require_weight(p, span, placed.joined(slot_name(p)), here)
                continue  # the weight itself: in float32 the run updates it in place
            put(p.name, p.chunk, kind, span, placed.joined(slot_name(p)), p.shape, here, out)


def _require_weight(param: Param, span: Span, offset: int, here: RankFile) -> None:
    """Damaged where the optimizer's copy of a float32 weight is not that weight, at its beginning or its end.

    Nothing else in a file of buffers says whose it is: another rank's has the same names and sizes.
    """
    weight = here.span(here.refs[param.chunk, param.name])
    n, total = min(_SAMPLE_NUMEL, weight.ref.numel), weight.ref.numel
    if weight.dtype != span.dtype:
        return
    for first in {0, total - n}:
        if weight.elements(first, n) != span.elements(offset + first, n):
            raise Damaged(
                f"the optimizer's copy of {param.name} is not that weight",
                where=f"{span.opened.path}, {here.opened.path}",
                why="the buffers are another rank's or another save's, or the weights were changed apart from them",
                fix=f"copy the folders of all ranks again, from one save; without {OPTIMIZER_FILE} in any of them the "
                "weights are read alone",
                code="masters-differ",
            )


def _require_in_place(params: list[Param], placed: Buffer, here: RankFile) -> None:
    """The model's tensors are views of the run's buffer: where they lie in it proves the order, or contradicts it."""
    refs = {slot_name(p): here.refs[p.chunk, p.name] for p in params}
    storages = {id(r.storage) for r in refs.values()}
    if len(storages) != 1 or len(refs) < 2:
        return
    for name, ref in refs.items():
        if ref.offset != placed.in_run(name):
            raise Unsupported(
                f"{name.partition(':')[2]} lies at element {ref.offset} of the run's buffer, and should at "
                f"{placed.in_run(name)}",
                where=here.opened.path,
                why="where each parameter lies in the optimizer's buffers follows from their order and sizes",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-buffers",
            )
