"""Which parameter each number of a Trainer's optimizer means, and which numbers a Trainer gives them. Pure.

The Trainer puts the model's parameters in two groups, those that decay and the rest, each in the order of
`named_parameters()`, and numbers them through. The order is that of the family's modules in memory, which differs
between Transformers 4 and 5 where experts are joined; shapes tell which one it was, or the numbers stay numbers.

Source: transformers 5.24.0, trainer.py, create_optimizer, get_decay_parameter_names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.errors import MissingFact
from ckptctl.formats.parameters import named_states
from ckptctl.formats.registered import registered
from ckptctl.names import NAMESPACES, family

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.checkpoint import Checkpoint, Facts, Optimizer
    from ckptctl.core.values import Tree
    from ckptctl.formats import Hints
    from ckptctl.formats.state import Found
    from ckptctl.formats.target import Content
    from ckptctl.names import Parameter

    Shapes = Mapping[str, tuple[int, ...]]
    Named = tuple[Optimizer, dict[tuple[str, str], Tree]]


def named(found: Found, weights: Checkpoint, facts: Facts, hints: Hints, where: str) -> Named:
    """The optimizer with every parameter under its name, as `parameters.named_states` gives it.

    Where exactly one order of the family's parameters fits every shape of every group, it has its names in it
    (`namespace` says which); else numbers, and why.
    """
    stored = {k.name: t.shown for k, t in weights.tensors.items() if k.kind in WEIGHTS and k.name not in weights.ties}
    orders, why = _orders(weights, facts, stored)
    if hints.param_order:
        known = {**stored, **{name: shape for shapes in orders.values() for name, shape in shapes.items()}}
        return named_states(found, known, where, hints.param_order)
    tried = {space: named_states(found, shapes, where) for space, shapes in orders.items()}
    open_ = named_states(found, {}, where)
    if not open_[0].unnamed:
        return open_  # named by the file itself
    good = {space: got for space, got in tried.items() if not got[0].unnamed}
    unclear = [f"{space}: {got[0].unnamed}" for space, got in tried.items() if "more than one" in got[0].unnamed]
    if len(good) == 1 and not unclear:
        space, (optimizer, states) = next(iter(good.items()))
        return replace(optimizer, namespace=space), states
    reasons = [*unclear, *(f"it fits as {space}" for space in good)] or [got[0].unnamed for got in tried.values()]
    return replace(open_[0], unnamed="; ".join(dict.fromkeys(reasons)) or why), open_[1]


def _orders(weights: Checkpoint, facts: Facts, stored: Shapes) -> tuple[dict[str, Shapes], str]:
    """The orders that the optimizer can have had, by namespace; and why there is none.

    Orders of the same parameters count once, whatever they are called: a head that only one of the namespaces calls
    otherwise leaves nothing open.
    """
    known = family(facts.config) if facts.config is not None else None
    if known is None:
        if weights.variant.startswith("bin"):
            return {"": stored}, ""  # a state dict is in the order in which modules registered their parameters
        said = f"the family {facts.family!r} is not known here" if facts.family else "there is no config.json"
        return {}, f"{said}, so the order of its parameters is not"
    out: dict[str, Shapes] = {}
    seen: list[list[tuple[tuple[str, ...], tuple[int, ...]]]] = []
    whys: list[str] = []
    for space in NAMESPACES:
        parameters = known.parameters(space)
        shapes = {p.name: p.shape for p in parameters}
        lost = next((n for p in parameters for n in files_of(p, stored) if n not in stored), None)
        other = next((n for n, shape in shapes.items() if stored.get(n, shape) != shape), None)
        if lost is not None:  # files with the names of one namespace are of a model that has them in memory too
            whys.append(f"by its config the model has {lost}, which is not among the weights")
        elif other is not None:
            whys.append(f"by its config {other} has shape {shapes[other]}, among the weights it has {stored[other]}")
        elif (order := [(tuple(files_of(p, stored)), p.shape) for p in parameters]) not in seen:
            seen.append(order)
            out[space] = shapes
    return out, "" if out else whys[0]


def files_of(parameter: Parameter, stored: Mapping[str, object]) -> Sequence[str]:
    """The names that a parameter's elements have in the files: its own where they have it so, else those on disk."""
    if parameter.name in stored:
        return (parameter.name,)
    return [n for row in parameter.stacks for n in row] or [parameter.disk or parameter.name]


def numbering(content: Content) -> list[tuple[str, bool]]:
    """(name, whether it decays) of every parameter, in the order in which a Trainer's model lists them.

    By the family's order, in the namespace that the content's names are of; a Trainer folder of a family that is not
    known here keeps the order it has. MissingFact where neither is there.
    """
    facts = content.source.facts
    known = family(facts.config) if facts.config is not None else None
    trained = {n for g in content.optimizer.groups for n in g.params} if content.optimizer else set()
    parameters = registered(facts, trained)
    if parameters is not None:
        return [(p.name, p.decays) for p in parameters]
    groups = content.optimizer.groups if content.optimizer else ()
    if content.source.format == "trainer" and len(groups) == 2:
        return [(n, number == 0) for number, g in enumerate(groups) for n in g.params]
    if known is not None:
        names = {p.name for space in NAMESPACES for p in known.parameters(space)}
        why = f"the optimizer has {next((n for n in sorted(trained) if n not in names), 'parameters')}, which "
        why += f"a {known.name} model of this config has not"
    else:
        why = f"the family {facts.family!r} is not known here" if facts.family else "there is no config.json"
    raise MissingFact(
        "in which order a Trainer's model lists its parameters is not known",
        where=content.source.root,
        why=why,
        fix="give the model's config with --model-config, or convert to torch or dcp",
        code="param-order",
    )
