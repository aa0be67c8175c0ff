"""A source's param groups as the two that a Trainer makes, and its scheduler's state for them. Pure.

torch's load_state_dict wants as many groups, of the same sizes, as the new optimizer has, and takes every setting from
the file. So a setting can differ between the two groups, and nowhere else.

Source: transformers 5.24.0, trainer.py, create_optimizer; torch 2.13.0, optim/optimizer.py, load_state_dict;
optim/lr_scheduler.py, LambdaLR.load_state_dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import PARTS, Group, Optimizer
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.target import Line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.values import Tree

SHOWN = ("decays", "does not decay")


@dataclass(frozen=True, slots=True)
class TwoGroups:
    """The Trainer's groups, and for each the number of the source's group whose settings it has (-1 where empty)."""

    groups: tuple[Group, Group]
    origins: tuple[int, int]
    lines: tuple[Line, ...] = ()


def two_groups(optimizer: Optimizer, order: Sequence[tuple[str, bool]], where: str) -> TwoGroups:
    """The optimizer's parameters in the Trainer's groups. order: (name, whether it decays) in named_parameters order.

    A parameter that no group lists is one that the run does not train. Unsupported where parameters of one of the
    Trainer's groups have different settings, or are none of the model's; MissingFact where there are no groups.
    """
    if not optimizer.groups:
        raise MissingFact(
            "the source keeps no param groups: learning rate and weight decay are not known",
            where=where,
            fix="convert from a checkpoint of the run that has them, or to torch or dcp",
            code="param-groups",
        )
    home = {name: number for number, group in enumerate(optimizer.groups) for name in group.params}
    listed = {name for name, _ in order}
    lost = next((n for n in home if n not in listed), None)
    if lost is not None:
        raise Unsupported(
            f"the optimizer has {lost}, which is no parameter of the model by its config",
            where=where,
            why="a Trainer numbers the parameters of the model that its config describes",
            fix="give the model's own config with --model-config",
        )
    members = [[n for n, d in order if d is decays and n in home] for decays in (True, False)]
    origins = [_one_origin(optimizer, names, [home[n] for n in names], SHOWN[i]) for i, names in enumerate(members)]
    if origins == [-1, -1]:
        raise MissingFact("the source's param groups list no parameter", where=where, code="param-groups")
    filled = [o if o >= 0 else origins[1 - i] for i, o in enumerate(origins)]
    groups = [Group(tuple(names), dict(optimizer.groups[o].options)) for names, o in zip(members, filled, strict=True)]
    before = [len(g.params) for g in optimizer.groups]
    after = [len(names) for names in members]
    lines = []
    if [list(g.params) for g in optimizer.groups] != members:
        lines.append(
            Line("param groups", "converted", f"groups of {_listed(before)} parameters -> {_listed(after)}, by number")
        )
    return TwoGroups((groups[0], groups[1]), (filled[0], filled[1]), tuple(lines))


def _one_origin(optimizer: Optimizer, names: Sequence[str], homes: Sequence[int], what: str) -> int:
    """The group of the source that all of them are in, or one that has the settings of all; -1 for none."""
    if not homes:
        return -1
    first = optimizer.groups[homes[0]].options
    one_of = {home: name for name, home in zip(reversed(names), reversed(homes), strict=True)}
    for home, name in one_of.items():
        options = optimizer.groups[home].options
        differ = sorted(
            k for k in {*first, *options} if k not in _LABELS and repr(first.get(k)) != repr(options.get(k))
        )
        if differ:
            raise Unsupported(
                f"{names[0]} and {name} have different settings ({', '.join(differ)}), and a Trainer has them in one "
                "param group",
                why=f"{differ[0]} is {first.get(differ[0])!r} and {options.get(differ[0])!r}; both are of what "
                f"{what}, and a Trainer makes two groups, no more",
                fix="convert to torch or dcp, which keep any groups",
                code="param-groups",
            )
    return homes[0]


_LABELS = ("name", "group_name", "param_names")
"""What tells groups apart and changes no step."""


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def scheduler(
    values: Mapping[str, Tree], two: TwoGroups, step: int, groups_before: int
) -> tuple[Tree, tuple[str, ...], Line]:
    """The state of the Trainer's LambdaLR, the values that it was made of, and what became of them.

    The source's state where it is of that kind, its rates by group; else made of the step and the groups' rates.
    """
    name = next((n for n in PARTS["scheduler"] if n in values), None)
    state = values[name] if name is not None else None
    if isinstance(state, (list, tuple)) and len(state) == 1:
        state = state[0]
    rates = [g.options.get("lr") for g in two.groups]
    bases = [g.options.get("initial_lr", g.options.get("lr")) for g in two.groups]
    used = (name,) if name is not None else ()
    if isinstance(state, dict) and _is_lambda(state, groups_before):
        out = dict(state)
        for key in ("base_lrs", "_last_lr", "lr_lambdas"):
            out[key] = [state[key][o] for o in two.origins]
        return out, used, Line("scheduler", "carried", f"{name}: a LambdaLR after {out['last_epoch']} steps")
    made = {
        "base_lrs": bases,
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None for _ in two.groups],
    }
    fate, told = ("converted", f"{name} -> ") if name is not None else ("written", "the source has none: ")
    detail = f"{told}a LambdaLR after {step} steps, base rates {bases}; the curve is that of the Trainer's arguments"
    return made, used, Line("scheduler", fate, detail)


def _is_lambda(state: Mapping[str, Tree], groups: int) -> bool:
    """Whether it is a LambdaLR's state for that many groups. Objects among its functions are none a Trainer has."""
    lists = [state.get(k) for k in ("base_lrs", "_last_lr", "lr_lambdas")]
    return (
        isinstance(state.get("last_epoch"), int)
        and all(isinstance(v, (list, tuple)) and len(v) == groups for v in lists)
        and all(f is None or isinstance(f, dict) for f in state["lr_lambdas"])
    )
