"""In which order a run's optimizer has the parameters of each group: flat tensors and torch's numbers have no names.

A DeepSpeed run's own order is kept, and so is that of state which torch's numbers key. Of others it is the family's,
that of `named_parameters()`: FSDP with flat parameters, for one, has those outside of layers first. Where there is no
family it is the source's, if the names are still its own and the model's state dict does not say otherwise, or what the
user gives. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.registered import registered
from ckptctl.formats.target import Line

NUMBERED = ("torch", "lightning", "trainer", "accelerate", "dcp")
"""Formats whose integer keys are torch's own: numbers in the order of the optimizer that the run had."""

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.checkpoint import Group
    from ckptctl.formats.target import Content, Item


LIKE = "--like"


def ordered(
    content: Content, groups: Sequence[Group], given: Sequence[str], instead: str, flag: str = "--param-order"
) -> tuple[list[Group], str]:
    """Groups with the parameters of each in order, and whose order that is. instead says what needs no order.

    given is the order that a flag gives: a file of names, or a run that the result is for (LIKE). Unsupported where
    that run trains other parameters. MissingFact where nothing says it and there is state to lay out.
    """
    source, names = content.source, [n for g in groups for n in g.params]
    if given:
        places = _of_run(content, names, given) if flag == LIKE else _given(content, names, given)
        return _sorted(groups, places), flag
    is_own = _is_own(content, names)
    if is_own and (source.format == "deepspeed" or _is_numbered(content)):
        return list(groups), "the source's own"
    twins = {owner: alias for alias, owner in content.ties.items()}
    for candidates in (names, [twins.get(n, n) for n in names]):
        family = registered(source.facts, candidates)
        if family is not None:
            at = {p.name: i for i, p in enumerate(family)}
            return _sorted(groups, {n: at[c] for n, c in zip(names, candidates, strict=True)}), "the family's"
    if is_own and _as_registered(content, groups):
        return list(groups), "the source's own"
    if not content.states:
        return list(groups), "the weights' own"
    said = f"the family {source.facts.family!r} is not known here, or has other names" if source.facts.family else ""
    kept = "its param groups list them otherwise than its model does" if is_own else ""
    raise MissingFact(
        "in which order the run's optimizer has its parameters is not known",
        where=source.root,
        why="; ".join(filter(None, (kept, said)))
        or "the source keeps no order of its param groups, and there is no config.json",
        fix="give the model's config with --model-config, or the names in the order of the model's named_parameters(), "
        f"a name a line: --param-order FILE; {instead}",
        code="param-order",
    )


def numbered(content: Content, given: Sequence[str], instead: str) -> tuple[Content, tuple[Line, ...]]:
    """The content with its groups as torch's numbers count them, and a line where the source has another order."""
    optimizer = content.optimizer
    if optimizer is None:
        return content, ()
    groups, whose = ordered(content, optimizer.groups, given, instead)
    content = replace(content, weights=in_order(content, groups, given))
    if [g.params for g in groups] == [g.params for g in optimizer.groups]:
        return content, ()
    line = Line("parameter order", "written", f"{whose}: the source's groups list them in another")
    return replace(content, optimizer=replace(optimizer, groups=tuple(groups))), (line,)


def in_order(content: Content, groups: Sequence[Group], given: Sequence[str] = ()) -> Mapping[str, Item]:
    """The weights, those of each group in its order: a state dict is all that names an optimizer's numbers.

    They stay as they are where they have that order already, as in a model's own state dict; a safetensors file has
    its names sorted. Others are put in the order given, else the family's, else the groups', between what is in none.
    """
    weights = content.weights
    listed = [n for g in groups for n in g.params if n in weights]
    family = registered(content.source.facts, listed)
    at: dict[str, int] = {}
    for order in (list(weights), given, [p.name for p in family or ()], listed):
        at = {n: i for i, n in enumerate(order)}
        places = [[at.get(n, -1) for n in g.params if n in weights] for g in groups]
        if all(p == sorted(p) and -1 not in p for p in places):
            break
    kept, turn = set(listed), iter(sorted(listed, key=at.__getitem__))
    names = [next(turn) if n in kept else n for n in weights]
    return weights if names == list(weights) else {n: weights[n] for n in names}


def _is_own(content: Content, names: Sequence[str]) -> bool:
    """Whether the names are in the order in which a run's optimizer had them, under the same names."""
    optimizer = content.source.optimizer
    if optimizer is None or not optimizer.order_known or content.source.naming:
        return False
    kept = {n: i for i, n in enumerate(n for g in optimizer.groups for n in g.params)}
    return all(n in kept for n in names) and list(names) == sorted(names, key=kept.__getitem__)


def _is_numbered(content: Content) -> bool:
    optimizer = content.source.optimizer
    return optimizer is not None and optimizer.keyed == "integers" and content.source.format in NUMBERED


def _as_registered(content: Content, groups: Sequence[Group]) -> bool:
    """Whether the groups list parameters as the source's state dict does, where that has the order of the modules.

    FSDP's full optimizer state has the order of flat parameters. Of a DCP's index the order says nothing: ranks share
    the writing.
    """
    if content.source.format != "torch" or _is_numbered(content):
        return True
    places = {k.name: i for i, k in enumerate(content.source.tensors) if k.kind in WEIGHTS}
    at = [[places[n] for n in g.params if n in places] for g in groups]
    return all(a == sorted(a) for a in at)


def _of_run(content: Content, names: Sequence[str], given: Sequence[str]) -> dict[str, int]:
    """Places in the optimizer of the run that the result is for. Unsupported where it trains other parameters."""
    places = {n: i for i, n in enumerate(given)}
    for alias, owner in content.ties.items():
        if owner not in places and alias in places:  # tied: the run calls it by its other name
            places[owner] = places.pop(alias)
    trained = set(names)
    lost, strange = [n for n in names if n not in places], [n for n in places if n not in trained]
    if lost or strange:
        raise Unsupported(
            f"--like: the run there does not train {lost[0]}"
            if lost
            else f"--like: the run there trains {strange[0]}, which the source does not",
            where=content.source.root,
            why=f"it trains {len(given)} parameters, the source {len(names)}; {len(lost)} and {len(strange)} of them "
            "are the one's alone",
            fix="give a checkpoint of the run that goes on: of the same model, with the same parameters frozen",
            code="like-differs",
        )
    return places


def _given(content: Content, names: Sequence[str], given: Sequence[str]) -> dict[str, int]:
    places = {n: i for i, n in enumerate(given)}
    lost = next((n for n in names if n not in places), None)
    if lost is not None or len(places) != len(given):
        raise MissingFact(
            f"--param-order does not name {lost}" if lost is not None else "--param-order names a parameter twice",
            where=content.source.root,
            why=f"it has {len(given)} names, the optimizer {len(names)} parameters",
            fix="list each parameter once, in the order of the model's named_parameters()",
            code="param-order",
        )
    strange = next((n for n in given if n not in content.weights and n not in content.ties), None)
    if strange is not None:
        raise MissingFact(
            f"--param-order names {strange}, which the model does not have",
            where=content.source.root,
            why="a list of another model's names would give an order by chance",
            fix="list the model's own parameters, in the order of its named_parameters()",
            code="param-order",
        )
    return places


def _sorted(groups: Sequence[Group], places: dict[str, int]) -> list[Group]:
    return [replace(g, params=tuple(sorted(g.params, key=places.__getitem__))) for g in groups]
