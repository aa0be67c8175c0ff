"""An optimizer's groups and scalars under the new names of `core.remake`. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.checkpoint import Group, Optimizer
    from ckptctl.core.remake import Recipe
    from ckptctl.core.values import Tree


def regrouped(optimizer: Optimizer, recipes: Sequence[Recipe]) -> Optimizer:
    """The optimizer under new names: a name that is split gives its parts in their order, in its place.

    Unsupported where what becomes one parameter is in several groups, not all of it is in one, or its scalars differ.
    """
    new_of: dict[str, list[str]] = {}
    olds_of: dict[str, tuple[str, ...]] = {}
    for recipe in recipes:
        olds_of[recipe.name] = tuple(dict.fromkeys(t.name for t in recipe.taken))
        for name in olds_of[recipe.name]:
            new_of.setdefault(name, []).append(recipe.name)
    groups = tuple(replace(g, params=_members(g, new_of, olds_of)) for g in optimizer.groups)
    return replace(optimizer, groups=groups, scalars=_scalars(optimizer.scalars, new_of, olds_of))


def _members(
    group: Group, new_of: Mapping[str, Sequence[str]], olds_of: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    here = set(group.params)
    out: dict[str, None] = {}
    for name in group.params:
        for new in new_of.get(name, (name,)):
            if new in out:
                continue
            apart = next((o for o in olds_of.get(new, ()) if o not in here), None)
            if apart is not None:
                raise Unsupported(
                    f"{new} would be one parameter of {name} and {apart}, which are not in one param group",
                    fix="keep the source's names, or let the optimizer go with --no-optimizer",
                    code="groups-differ",
                )
            out[new] = None
    return tuple(out)


def _scalars(
    scalars: Mapping[tuple[str, str], Tree], new_of: Mapping[str, Sequence[str]], olds_of: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], Tree]:
    out: dict[tuple[str, str], Tree] = {}
    for (name, kind), value in scalars.items():
        for new in new_of.get(name, (name,)):
            for old in olds_of.get(new, (name,)):
                if (old, kind) not in scalars or repr(scalars[old, kind]) != repr(value):
                    raise Unsupported(
                        f"{new} would be one parameter, and {kind} is not the same for {name} and {old}",
                        fix="keep the source's names, or let the optimizer go with --no-optimizer",
                        code="scalars-differ",
                    )
            out[new, kind] = value
    return out
