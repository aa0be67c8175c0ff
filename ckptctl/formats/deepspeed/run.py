"""What every file of a DeepSpeed target says: groups in order, masters and states by name, settings. No files here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, Group, Optimizer
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.deepspeed import layout, teams
from ckptctl.formats.deepspeed.modelfile import ROUND_ROBIN, zero_section
from ckptctl.formats.order import in_order, ordered
from ckptctl.formats.registered import registered
from ckptctl.formats.target import Item

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.teams import Team
    from ckptctl.formats.target import Choices, Content

F32 = BY_NAME["float32"]
VERSION = "0.19.8"
"""What files say wrote them where the source does not: the version whose files are the test."""
SUB_GROUP_SIZE = 1_000_000_000
"""zero_optimization.sub_group_size where the source's configuration has none. Source: DeepSpeed 0.19.8, config.py."""
ONE = ((), (1,))
"""Shapes of a tensor of one number that belongs to no element."""
WIDENED = ("float32", "bfloat16", "float16")
"""Types of which a float32 master is made, which is exact."""
_SECTION = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Run:
    """A run that could have written the target.

    kinds are the states of each group; lone those that are one number of each parameter, as a step is; experts the
    number of experts of each MoE layer, by what stands before them.
    """

    content: Content
    dp: int
    ep: int
    stage: int
    groups: Sequence[Group]
    masters: Mapping[str, Item]
    states: Mapping[str, Mapping[str, Item]]
    lone: frozenset[str]
    kinds: Sequence[Sequence[str]]
    experts: Mapping[str, int]
    frozen: Sequence[str]
    buffers: Sequence[str]
    dtype: str
    own: Mapping[str, Any]
    config: Mapping[str, Any]
    whose: str
    """Whose order the parameters of each group are in; "" where there is none."""
    updates: int | None = None
    """How often the optimizer updated every parameter alike, where that was asked; None where they differ."""
    empty: frozenset[str] = frozenset()
    """Parameters without elements, which no partitioned optimizer has.

    Source: DeepSpeed 0.19.8, runtime/engine.py, _get_zero_frozen_param_attributes (is_optimized_parameter)."""
    is_recast: bool = False
    """Whether the run is to compute in another type than the source's: what that had for its own type goes."""

    @property
    def has_shards(self) -> bool:
        """Whether ranks have files of an optimizer: not at stage 0, which has it whole or not at all."""
        return self.stage > 0

    @property
    def is_whole(self) -> bool:
        """Whether the model-states file has the whole optimizer: stage 0, if there is state."""
        return self.stage == 0 and bool(self.states)

    @property
    def has_settings(self) -> bool:
        """Whether param groups have settings: learning rate, weight decay and the like."""
        return any(g.options for g in self.groups)

    @property
    def was_dealt(self) -> bool:
        """Whether the source's run dealt parameters to ranks in turn, which the target's must not."""
        return bool(zero_section(self.own.get("ds_config")).get(ROUND_ROBIN))

    @property
    def step(self) -> int:
        """Steps of the run."""
        return self.content.source.step or 0

    @property
    def version(self) -> str:
        """The DeepSpeed that files say wrote them."""
        return str(self.own.get("ds_version") or VERSION)

    @property
    def scalars(self) -> Mapping[tuple[str, str], Tree]:
        """What is no tensor in a parameter's state, by (name, kind)."""
        return self.content.optimizer.scalars if self.content.optimizer else {}

    @property
    def single(self) -> frozenset[str]:
        """States that are one number of each parameter, and not its elements'."""
        return self.lone | {"step"}

    @cached_property
    def singles(self) -> Mapping[str, Mapping[str, Tree]]:
        """The scalars of each parameter, by kind, without its step."""
        out: dict[str, dict[str, Tree]] = {}
        for (name, kind), value in self.scalars.items():
            if kind != "step":
                out.setdefault(name, {})[kind] = value
        return out

    @property
    def casts(self) -> frozenset[tuple[str, str]]:
        """Casts to float32 that masters and moments need."""
        every = [
            *self.masters.values(),
            *(i for s in self.states.values() for k, i in s.items() if k not in self.single),
        ]
        return frozenset((i.tensor.held.name, F32.name) for i in every if i.tensor.held.name != F32.name)

    def numel(self, name: str) -> int:
        """Elements of a parameter."""
        return math.prod(self.content.weights[name].shape)

    def flats(self, rank: int) -> list[tuple[int, Team]]:
        """A rank's flat groups, with the param group that each is of: one a group, or at stage 3 its sub-groups."""
        out = []
        for number, group in enumerate(self.groups):
            if self.stage != 3:
                out.append((number, teams.team(group.params, self.dp, self.ep, rank)))
                continue
            numels = [self.numel(n) for n in group.params]
            for sub in layout.sub_groups(numels, self.dp, self.sub_group_numel()):
                names = [group.params[i] for i in sub]
                out.append((number, teams.team(names, self.dp, 1, rank)))
        return out

    def sub_group_numel(self) -> int:
        """Elements of a rank's slots at which a sub-group of stage 3 closes."""
        size = zero_section(self.config).get("sub_group_size")
        return int(size) if isinstance(size, (int, float)) and 0 < size < math.inf else SUB_GROUP_SIZE


def run_of(content: Content, choices: Choices) -> Run:
    """Sorts the content. Raises Unsupported or MissingFact for what has no place."""
    weights = content.weights
    buffers = [n for n, i in weights.items() if i.key.kind == "buffer" or not i.dtype.is_float]
    candidates = [n for n in weights if n not in content.ties and n not in buffers]
    optimizer = content.optimizer or Optimizer(())
    groups = [
        Group(tuple(n for n in g.params if n in weights and n not in content.ties), g.options, g.owner)
        for g in optimizer.groups
    ] or _usual_groups(content, candidates)
    whose = ""
    if not choices.universal:
        instead = "a folder written with --universal needs no order"
        groups, whose = ordered(content, groups, choices.param_order, instead, choices.order_flag)
    experts = teams.counts(weights)
    stage = choices.zero_stage
    if choices.weights_alone and stage != 3 and not choices.universal:
        stage = 0  # at stage 3 the weights are the shards' masters and nothing else
    empty: frozenset[str] = frozenset()
    if stage or choices.universal:  # parameters without elements are frozen ones there, whatever the run's groups say
        empty = frozenset(n for g in groups for n in g.params if 0 in weights[n].shape)
        groups = [replace(g, params=tuple(n for n in g.params if n not in empty)) for g in groups]
    if experts:
        _require_place(content, stage, choices)
        groups = teams.expert_groups(groups, choices.dp, choices.ep)
    elif choices.ep > 1:
        raise Unsupported(
            f"--ep {choices.ep}: the model has no experts of DeepSpeed's", fix="leave --ep out, or give 1"
        )
    listed = dict.fromkeys(n for g in groups for n in g.params)
    placed = {*listed, *empty, *content.ties}
    astray = next((n for n, _ in content.states if n not in placed), None)
    if astray is not None:
        unnamed = optimizer.unnamed
        raise MissingFact(
            f"the optimizer's state is keyed by numbers: which parameter {astray} is, is in no file"
            if unnamed
            else f"{astray} has state, and is in no param group",
            where=content.source.root,
            why=unnamed or "flat tensors are by group, in the group's order",
            fix="give the names in the optimizer's order, a name a line: --param-order FILE"
            if unnamed
            else "--no-optimizer lets the state go",
            code="param-order",
        )
    lone = _lone(content)
    states = {n: s for n, s in _states(content, lone).items() if n not in empty}
    if not stage and states:
        content = replace(content, weights=in_order(content, groups, choices.param_order))
    own = content.values.get("deepspeed")
    own = own if isinstance(own, dict) else {}
    dtype = next((weights[n].dtype.name for n in candidates), F32.name)
    is_recast = any(weights[n].tensor.dtype.name != dtype for n in candidates[:1])
    return Run(
        content,
        choices.dp,
        choices.ep,
        stage,
        groups,
        {name: _master(content, name) for name in listed},
        states,
        lone,
        [_kinds(g.params, states, lone | {"step"}, is_flat=bool(stage or choices.universal)) for g in groups],
        experts,
        [n for n in candidates if n not in listed],
        buffers,
        dtype,
        own,
        _config(own, stage, dtype, is_recast=is_recast),
        whose,
        choices.updates,
        empty,
        is_recast,
    )


def _usual_groups(content: Content, candidates: Sequence[str]) -> list[Group]:
    """Where the source keeps no groups: of state those that usually decay, and the rest, if the family is known."""
    family = registered(content.source.facts, candidates) if content.states else None
    decays = {p.name: p.decays for p in family or ()}
    parts = [tuple(n for n in candidates if decays.get(n, True) is wanted) for wanted in (True, False)]
    return [Group(names, {}) for names in parts if names] or [Group((), {})]


def _require_place(content: Content, stage: int, choices: Choices) -> None:
    """Unsupported where DeepSpeed itself has no form for experts. Source: 0.19.8, runtime/engine.py, stage3.py."""
    if stage == 3 or choices.universal:
        form = "a universal folder" if choices.universal else "ZeRO-3"
        raise Unsupported(
            f"experts of DeepSpeed's MoE layers have no place in {form}",
            where=content.source.root,
            why="DeepSpeed neither trains nor converts them so",
            fix="--zero-stage 1 or 2",
        )


def _master(content: Content, name: str) -> Item:
    """What a parameter's float32 master is made of: its own master, else the weight."""
    base = content.states.get((name, MASTER)) or content.weights[name]
    if base.tensor.held.name not in WIDENED:
        raise Unsupported(f"{name} is {base.tensor.held.name}: no float32 master can be made of it")
    return Item(base.key, base.tensor, F32)


def _lone(content: Content) -> frozenset[str]:
    """States that are one number of every parameter, whatever shapes these have: NAdam's mu_product."""
    weights = content.weights
    odd = {k for (n, k), i in content.states.items() if i.shape in ONE and n in weights and weights[n].shape != i.shape}
    return frozenset(odd - {"step"} - {k for (_, k), i in content.states.items() if i.shape not in ONE})


def _states(content: Content, lone: frozenset[str]) -> dict[str, dict[str, Item]]:
    """States by name and kind, less masters and those of aliases. Single numbers keep their type; others: float32."""
    out: dict[str, dict[str, Item]] = {}
    for (name, kind), item in content.states.items():
        if kind == MASTER or name in content.ties:
            continue
        is_single = kind == "step" or kind in lone
        if not is_single and item.shape != content.weights[name].shape:
            raise Unsupported(
                f"{kind} of {name} has shape {item.shape}: DeepSpeed's flat tensors hold states of the "
                "parameter's own shape",
                where=content.source.root,
                fix="--no-optimizer lets the state go",
            )
        out.setdefault(name, {})[kind] = item if is_single else Item(item.key, item.tensor, F32)
    return out


def _kinds(
    names: Sequence[str], states: Mapping[str, Mapping[str, Item]], single: frozenset[str], *, is_flat: bool
) -> list[str]:
    """The states of a group. Flat tensors want the same of every parameter; torch has none where no gradient was."""
    kinds = list(dict.fromkeys(k for n in names for k in states.get(n, {}) if k not in single))
    for kind in kinds if is_flat else ():
        without = next((n for n in names if kind not in states.get(n, {})), None)
        if without is not None:
            raise Unsupported(
                f"{without} has no {kind}, and others of its param group have",
                why="one flat tensor holds the whole group's",
                fix="--no-optimizer lets the state go",
            )
    return kinds


def _config(own: Mapping[str, Any], stage: int, dtype: str, *, is_recast: bool) -> dict[str, Any]:
    """The run's configuration, with the target's stage and type."""
    said = own.get("ds_config")
    config: dict[str, Any] = {**said} if isinstance(said, dict) else {}
    zero = config["zero_optimization"] = {**zero_section(config), "stage": stage}
    if zero.get(ROUND_ROBIN):
        zero[ROUND_ROBIN] = False  # flat groups are written in the optimizer's own order
    for section in ("bf16", "bfloat16", "fp16") if is_recast else ():
        if section in config:
            part = config[section]
            config[section] = {**(part if isinstance(part, dict) else {}), "enabled": section == _SECTION.get(dtype)}
    if dtype in _SECTION:
        config.setdefault(_SECTION[dtype], {"enabled": True})
    return config
