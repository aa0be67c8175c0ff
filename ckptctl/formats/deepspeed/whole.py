"""Stage 0: an optimizer that is not partitioned, in the model-states file or, with experts, a file an expert rank.

Its state is keyed by numbers, as torch's is; names come from the order of the module's state dict where the shapes
leave no doubt. Source: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py and fused_optimizer.py, state_dict.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import MASTER, Group
from ckptctl.core.errors import Damaged, MissingFact
from ckptctl.core.tensor import Key, Tensor
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.deepspeed import layout
from ckptctl.formats.deepspeed.opened import plain_object
from ckptctl.formats.deepspeed.zero import Native
from ckptctl.formats.parameters import named_states
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.state import Found, find

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.opened import Opened

_INNER = "optimizer_state_dict"
_MASTERS = ("fp32_groups", "fp32_groups_flat")


def of_optimizer(
    file: Opened,
    tree: Tree,
    shapes: Mapping[str, Shape],
    order: Sequence[str],
    experts: Mapping[str, Shape] | None = None,
) -> tuple[Native, dict[str, Tree]]:
    """Masters, states and groups of a whole optimizer, and what else its wrapper keeps (loss scale, counters).

    shapes are the module's parameters in order; experts those of the groups marked `moe`, in order. MissingFact where a
    fused optimizer's flat groups could be of several orders.
    """
    outer = file.mapping(tree, "the optimizer")
    inner = outer.get(_INNER, outer)
    rest = {
        str(k): file.value(f"deepspeed.{k}", plain_object(v))
        for k, v in outer.items()
        if inner is not outer and k not in (_INNER, *_MASTERS)
    }
    found = find(inner, lambda t: isinstance(t, TensorRef))
    if not found.has_optimizer:
        raise Damaged("the optimizer has no state and no param groups", where=file.path, code="zero-layout")
    flats, masters = (_groups(file, outer.get(key), found) for key in ("fp32_groups_flat", "fp32_groups"))
    if flats is not None:
        return _fused(file, flats, found, shapes, order), rest
    out = Native()
    if experts is None:
        _named(file, found, masters, shapes, order, out)
        return out, rest
    is_moe = [bool(g.get("moe")) for g in found.groups]
    for wanted, names in ((False, shapes), (True, experts)):
        chosen = [i for i, moe in enumerate(is_moe) if moe is wanted]
        part = Found(groups=[found.groups[i] for i in chosen], has_optimizer=True)
        ids = {p for g in part.groups for p in g.get("params", ())}
        part.states = {k: v for k, v in found.states.items() if k in ids}
        listed = None if masters is None else [masters[i] for i in chosen]
        _named(file, part, listed, names, (), out)
    return out, rest


def _groups(file: Opened, tree: Tree, found: Found) -> Sequence[Tree] | None:
    """Float32 weights by param group, None where there are none. Damaged where they are not as many."""
    if tree is None or (isinstance(tree, (list, tuple)) and len(tree) == len(found.groups)):
        return tree
    raise Damaged(
        f"there are {len(found.groups)} param groups, and float32 weights of another number",
        where=file.path,
        why=f"they are {show(tree)}",
        code="zero-layout",
    )


def _named(
    file: Opened,
    found: Found,
    masters: Sequence[Tree] | None,
    shapes: Mapping[str, Shape],
    order: Sequence[str],
    out: Native,
) -> None:
    optimizer, states = named_states(found, shapes, file.path, order)
    for (name, kind), value in states.items():
        if isinstance(value, TensorRef):
            out.tensors[Key(name, kind)] = file.tensor(Key(name, kind), value)
        else:
            out.scalars[name, kind] = file.value(f"{name}.{kind}", value)
    out.groups += [
        Group(g.params, {k: file.value(f"group.{k}", v) for k, v in g.options.items()}) for g in optimizer.groups
    ]
    out.unnamed = out.unnamed or optimizer.unnamed
    for number, (group, flats) in enumerate(zip(optimizer.groups, masters, strict=True) if masters else ()):
        if not isinstance(flats, (list, tuple)) or len(flats) != len(group.params):
            raise Damaged(
                f"group {number} has {len(group.params)} parameters, and float32 weights for another number",
                where=file.path,
                code="zero-layout",
            )
        for name, ref in zip(group.params, flats, strict=True):
            shape = ref.shape if isinstance(ref, TensorRef) else None
            if not isinstance(ref, TensorRef) or shape != shapes.get(name, shape):
                raise Damaged(
                    f"the float32 weights of {name} have shape {shape}, its weights {shapes.get(name)}",
                    where=file.path,
                    code="zero-layout",
                )
            out.tensors[Key(name, MASTER)] = file.tensor(Key(name, MASTER), ref)


def _fused(
    file: Opened, flats: Sequence[Tree], found: Found, shapes: Mapping[str, Shape], order: Sequence[str]
) -> Native:
    """FP16_Optimizer: one flat tensor a group, unpadded, in the optimizer's order."""
    if not order and len(flats) > 1:
        raise MissingFact(
            "which parameters each flat group holds is not in the checkpoint",
            where=file.path,
            why=f"{len(flats)} groups of a fused optimizer, without names",
            fix="give the names in the optimizer's order, a name a line: --param-order FILE",
            code="param-order",
        )
    out, names = Native(), deque(order or shapes)
    for number, (ref, options) in enumerate(zip(flats, found.groups, strict=True)):
        flat, _ = file.flat(ref, f"the float32 weights of group {number}")
        mine, held = [], 0
        while names and held < flat.numel:
            mine.append(names.popleft())
            held += math.prod(shapes.get(mine[-1], (0,)))
        starts, total = layout.starts_of(shapes.get(n, (0,)) for n in mine)
        if total != flat.numel:
            raise MissingFact(
                f"group {number} has {flat.numel} elements, which the parameters in order do not add up to",
                where=file.path,
                why=f"the nearest is {total}",
                fix="give the names in the optimizer's order, a name a line: --param-order FILE",
                code="param-order",
            )
        states = found.states.get(number, {})
        kinds = {MASTER: ref, **{k: v for k, v in states.items() if isinstance(v, TensorRef) and v.shape == ref.shape}}
        for kind, value in kinds.items():
            place, dtype = file.flat(value, f"{kind} of group {number}")
            for name, at in zip(mine, starts, strict=True):
                table = layout.joined_table(
                    math.prod(shapes[name]), at, max(1, total), layout.columns([place]), dtype.itemsize
                )
                out.tensors[Key(name, kind)] = Tensor(Key(name, kind), dtype, shapes[name], (table,))
        for kind, value in states.items():
            if kind in kinds:
                continue
            for name in mine:
                if isinstance(value, TensorRef):
                    out.tensors[Key(name, kind)] = file.tensor(Key(name, kind), value)
                else:
                    out.scalars[name, kind] = file.value(f"{name}.{kind}", value)
        out.groups.append(
            Group(tuple(mine), {k: file.value(f"group.{k}", v) for k, v in options.items() if k != "params"})
        )
    if names and not order:
        raise MissingFact(
            f"the optimizer's groups end before {names[0]}: which parameters it has is not in the checkpoint",
            where=file.path,
            fix="give the names in the optimizer's order, a name a line: --param-order FILE",
            code="param-order",
        )
    return out


def joined_experts(parts: Sequence[Native], where: str) -> Native:
    """Expert ranks' optimizers as one: dense parameters are the same in each, and are taken from the first."""
    out = parts[0]
    for part in parts[1:]:
        if len(part.groups) != len(out.groups):
            raise Damaged(
                f"expert ranks have {len(out.groups)} and {len(part.groups)} param groups",
                where=where,
                code="mixed-saves",
            )
        out.unnamed = out.unnamed or part.unnamed
        out.tensors.update({k: v for k, v in part.tensors.items() if k not in out.tensors})
        out.scalars.update({k: v for k, v in part.scalars.items() if k not in out.scalars})
        groups = []
        for mine, other in zip(out.groups, part.groups, strict=True):
            new = tuple(n for n in other.params if n not in set(mine.params))
            groups.append(Group((*mine.params, *new), mine.options))
        out.groups = groups
    return out
