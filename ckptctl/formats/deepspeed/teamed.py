"""Tensor-parallel ranks' weights, states and param groups as one: what slices.py joins, for a whole checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Group
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key, Tensor
from ckptctl.formats.deepspeed.slices import Rules, joined
from ckptctl.formats.deepspeed.zero import Native, padding_of
from ckptctl.formats.torchtensor import tensor_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.modelfile import ModelFile


def joined_slices(
    build: Build, models: Mapping[int, ModelFile], natives: Mapping[int, Native], tp: int
) -> dict[int, Native]:
    """Each pipeline stage's tensors whole; weights are put into the build.

    Model-parallel ranks are stage * tp + slice.
    """
    out: dict[int, Native] = {}
    for first in range(0, len(models), tp):
        team = [models[first + t] for t in range(tp)]
        parts = [natives[first + t] for t in range(tp)]
        info = next((m.universal for m in team if m.universal), build.slices)
        rules = Rules(info, build.facts.config, team[0].path)
        whole = Native(groups=_groups(parts, team), scalars=parts[0].scalars, padding=padding_of(parts), ep=parts[0].ep)
        _require_alike(parts, team)
        for key in dict.fromkeys(k for p in parts for k in p.tensors):
            slices = [p.tensors.get(key) or empty_slice(key, parts, m) for p, m in zip(parts, team, strict=True)]
            whole.tensors[key] = joined(key, slices, rules, team[0].path)
        weights = module_slices(team)
        buffers = team[0].buffers
        for name in (n for n in weights[0] if n in buffers):
            build.put(_one_buffer(name, weights, team[0].path))
        for name in dict.fromkeys(n for w in weights for n in w if n not in buffers):
            tensor = joined(Key(name), [w.get(name) for w in weights], rules, team[0].path)
            build.put(Tensor(tensor.key, tensor.dtype, tensor.shape, tensor.pieces, tensor.replicas))
        out[first] = whole
        build.ties.update({a: o for a, o in team[0].shared.items() if a in weights[0] and o in weights[0]})
    return out


def _one_buffer(name: str, weights: Sequence[Mapping[str, Tensor]], where: str) -> Tensor:
    """A buffer, of which every tensor-parallel rank has a copy: no patterns of parameters' names are asked for it."""
    copies = [w[name] for w in weights if name in w]
    first = copies[0]
    if any((t.shape, t.held.name) != (first.shape, first.held.name) for t in copies):
        raise Damaged(f"tensor-parallel ranks' copies of the buffer {name} differ in shape or type", where=where)
    key = Key(name, "buffer")
    return Tensor(key, first.dtype, first.shape, first.pieces, tuple(t.pieces for t in copies[1:]))


def module_slices(team: Sequence[ModelFile]) -> list[dict[str, Tensor]]:
    """Each tensor-parallel rank's weights, less the places of those that it does not hold."""
    return [{n: tensor_of(Key(n), r, m.source) for n, r in (m.module or {}).items() if r.shape != (0,)} for m in team]


def empty_slice(key: Key, parts: Sequence[Native], model: ModelFile) -> Tensor | None:
    """The slice of a rank that has no element of a parameter, and so no state of it; None for other parameters."""
    ref = (model.module or {}).get(key.name)
    known = next(t for p in parts if (t := p.tensors.get(key)) is not None)
    if ref is None or 0 not in ref.shape:
        return None
    if len(known.shape) != len(ref.shape):
        return known  # a single number, such as a step
    return Tensor(key, known.dtype, ref.shape, (), trainable=True)


def _groups(parts: Sequence[Native], team: Sequence[ModelFile]) -> list[Group]:
    """Param groups with the parameters of all ranks, in the order of the first that has each: some hold none of some.

    Damaged where ranks have another number of groups, or other settings.
    """
    first = parts[0].groups
    out = []
    for part, model in zip(parts[1:], team[1:], strict=True):
        if [repr(g.options) for g in part.groups] != [repr(g.options) for g in first]:
            raise _unlike("settings of the param groups", team[0], model)
    for number, group in enumerate(first):
        names = max((p.groups[number].params for p in parts), key=len)
        known = set(names)
        lost = dict.fromkeys(n for p in parts for n in p.groups[number].params if n not in known)
        out.append(Group((*names, *lost), group.options, group.owner))
    return out


def _require_alike(parts: Sequence[Native], team: Sequence[ModelFile]) -> None:
    """Damaged where tensor-parallel ranks' optimizers are at different steps."""
    first = parts[0]
    for part, model in zip(parts[1:], team[1:], strict=True):
        odd = [k for k in first.said if k in part.said and repr(first.said[k]) != repr(part.said[k])]
        if odd:
            raise _unlike(f"{odd[0][1]} of group {odd[0][0]}", team[0], model)


def _unlike(what: str, first: ModelFile, other: ModelFile) -> Damaged:
    return Damaged(
        f"tensor-parallel ranks differ in {what}",
        where=f"{first.path}, {other.path}",
        why="the optimizer's files beside them are of different saves",
        fix="copy the step again, from one save",
        code="mixed-saves",
    )
