"""Checkpoints of a module that holds the model as an attribute: names with and without that attribute's name. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import OTHER, WEIGHTS, Checkpoint, Optimizer
from ckptctl.core.errors import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.tensor import Key


def attributes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The first words of the weights' names, each once, in order; () where a weight's name is one word."""
    names = [k.name for k in checkpoint.tensors if k.kind in WEIGHTS]
    return () if any("." not in n for n in names) else tuple(dict.fromkeys(n.partition(".")[0] for n in names))


def sole_attribute(checkpoint: Checkpoint) -> str:
    """The attribute under which every weight and every state lies, "" where there is none."""
    found = attributes(checkpoint)
    if len(found) != 1 or any(not n.startswith(f"{found[0]}.") for n in _named(checkpoint)):
        return ""
    return found[0]


def _named(checkpoint: Checkpoint) -> Iterable[str]:
    """Every parameter's name that is one: state that has numbers only has none."""
    yield from (k.name for k in checkpoint.tensors if k.kind != OTHER and not k.name.startswith("#"))
    yield from checkpoint.model_values
    if checkpoint.optimizer is not None:
        yield from (n for g in checkpoint.optimizer.groups for n in g.params if not n.startswith("#"))
        yield from (n for n, _ in checkpoint.optimizer.scalars if not n.startswith("#"))


def under(checkpoint: Checkpoint, module: str) -> Checkpoint:
    """The checkpoint of one module of it: what lies under `module.`, by its names there. What does not is left out.

    Usage where nothing lies there.
    """
    prefix = f"{module}."

    def inner(name: str) -> str | None:
        return name[len(prefix) :] if name.startswith(prefix) else name if name.startswith("#") else None

    def moved(key: Key) -> Key | None:
        name = key.name if key.kind == OTHER else inner(key.name)
        return None if name is None else key._replace(name=name)

    keys = {k: new for k in checkpoint.tensors if (new := moved(k)) is not None}
    if not any(k.kind in WEIGHTS for k in keys):
        listed = ", ".join(attributes(checkpoint)[:8]) or "no modules"
        raise Usage(f"--module {module}: no weight lies there", why=f"there are {listed}", fix="give one of them")
    left = sum(k.kind in WEIGHTS and k not in keys for k in checkpoint.tensors)
    note = f"of the module {module}: its names are without {prefix}"
    return replace(
        checkpoint,
        tensors={new: replace(checkpoint.tensors[k], key=new) for k, new in keys.items()},
        optimizer=_optimizer(checkpoint.optimizer, prefix) if checkpoint.optimizer else None,
        model_values={n: v for k, v in checkpoint.model_values.items() if (n := inner(k)) is not None},
        ties={a: o for x, y in checkpoint.ties.items() if (a := inner(x)) is not None and (o := inner(y)) is not None},
        entries=tuple(replace(e, key=keys.get(e.key)) if e.key is not None else e for e in checkpoint.entries)
        if not left
        else (),
        module=module,
        modules=(),
        warnings=(*checkpoint.warnings, note + (f"; {left} weights of other modules are left out" if left else "")),
    )


def _optimizer(optimizer: Optimizer, prefix: str) -> Optimizer:
    """Its groups and values of the module alone. Groups of nothing are left out, with their optimizer."""

    def stays(name: str) -> bool:
        return name.startswith((prefix, "#"))

    groups = [
        replace(g, params=tuple(p.removeprefix(prefix) for p in g.params if stays(p)))
        for g in optimizer.groups
        if not g.params or any(map(stays, g.params))
    ]
    owners = {o: i for i, o in enumerate(dict.fromkeys(g.owner for g in groups))}
    return replace(
        optimizer,
        groups=tuple(replace(g, owner=owners[g.owner]) for g in groups),
        scalars={(n.removeprefix(prefix), k): v for (n, k), v in optimizer.scalars.items() if stays(n)},
    )


def one_module(checkpoint: Checkpoint, wanted: str | None) -> Checkpoint:
    """The checkpoint under the names of the module that is wanted, or else of the one that holds everything.

    "" keeps the names as they are. Where there are several modules and none is wanted, all are kept, and a warning
    says how to take one.
    """
    if wanted is None:
        sole = sole_attribute(checkpoint)
        if sole:
            return under(checkpoint, sole)
        several = attributes(checkpoint)
        if len(several) < 2:
            return checkpoint
        said = f"weights lie in {len(several)} modules ({', '.join(several[:6])}): names keep them; --module takes one"
        return replace(checkpoint, warnings=(*checkpoint.warnings, said))
    return under(checkpoint, wanted) if wanted else checkpoint
