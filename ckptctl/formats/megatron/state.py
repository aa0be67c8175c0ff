"""The optimizer of a result: its groups, and the order in which they number parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported
from ckptctl.core.values import as_number
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.groups import is_decoupled
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.torchgroups import TORCH_ADAM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.checkpoint import Optimizer
    from ckptctl.core.values import Tree
    from ckptctl.formats.megatron.facts import Facts
    from ckptctl.formats.megatron.like import Like


_RATES = ("lr", "weight_decay")
_COMPARED = ("lr", "betas", "eps", "weight_decay", "max_lr", "min_lr", "lr_mult")
"""What parameters of one group have alike."""


@dataclass(frozen=True, slots=True)
class Sort:
    """Which parameters one group of a Megatron run has: matrices or the rest, experts apart or not, decoupled or not.

    decoupled: embedding and head, where they have a learning rate of their own (--decoupled-lr).
    """

    decays: bool
    experts: bool
    decoupled: bool = False


@dataclass(frozen=True, slots=True)
class Sorting:
    """How a run sorts parameters into groups. apart: experts have groups of their own; norms: facts.decays_norms."""

    apart: bool
    decoupled: bool = False
    norms: bool = False

    def sort_of(self, name: str, shape: tuple[int, ...]) -> Sort:
        """Which group a parameter is of."""
        experts = self.apart and model.is_expert(name)
        decays = model.decays(name, shape, norms=self.norms)
        return Sort(decays, experts, self.decoupled and name in model.VOCABULARY)


def sorting_of(facts: Facts, optimizer: Optimizer, like: Like | None, *, apart: bool) -> Sorting:
    """How the run of these facts sorts. Rates are decoupled where groups of the source, or of --like, are."""
    decoupled = like is not None and like.args.get("decoupled_lr") is not None
    decoupled = decoupled or any(is_decoupled(g.options, facts) for g in optimizer.groups)
    return Sorting(apart, decoupled, facts.decays_norms)


@dataclass(frozen=True)
class Groups:
    """The groups of a run in Megatron's order, with their settings, and notes for the report."""

    of: Mapping[Sort, Mapping[str, Tree]]
    step: int | None
    notes: tuple[str, ...]
    sorting: Sorting

    def chained(self) -> list[list[Sort]]:
        """The groups of each optimizer: one, or the dense ones' and the experts'."""
        order = sorted(self.of, key=lambda f: (f.experts, not f.decays, f.decoupled))
        if not self.sorting.apart:
            return [order]
        return [[f for f in order if not f.experts], [f for f in order if f.experts]]


def groups_of(
    optimizer: Optimizer,
    shapes: Mapping[str, tuple[int, ...]],
    step: int | None,
    *,
    sorting: Sorting,
    facts: Facts,
    distributed: bool,
    constants: Mapping[str, Tree] | None = None,
) -> Groups:
    """Megatron's groups with the settings of the source's.

    step is the count of updates; constants are those of the schedule that goes on, where it is not the source's, and
    facts those of its run.
    Unsupported where parameters of one of Megatron's groups train differently in the source.
    """
    of: dict[Sort, dict[str, Tree]] = {}
    first: dict[Sort, tuple[str, tuple[Tree, ...]]] = {}
    notes: list[str] = []
    by_name: dict[str, Mapping[str, Tree]] = {}
    for group in optimizer.groups:
        by_name |= dict.fromkeys(group.params, _own(group.options))
    for name, shape in shapes.items():
        options = by_name.get(name)
        if options is None:
            raise Unsupported(
                f"{name} is in no param group",
                why="Megatron's optimizer has every parameter in one",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-groups",
            )
        fam = sorting.sort_of(name, shape)
        said = tuple(_plain(options.get(k)) for k in _COMPARED)
        if fam in first and first[fam][1] != said:
            other, values = first[fam]
            unlike = next(k for k, a, b in zip(_COMPARED, values, said, strict=True) if a != b)
            raise Unsupported(
                f"{name} and {other} have another {unlike} ({show(said[_COMPARED.index(unlike)])} and "
                f"{show(values[_COMPARED.index(unlike)])}), and are in one group of Megatron's",
                why="its groups are matrices, and biases with one-dimensional weights",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-groups",
            )
        if fam not in first:
            first[fam] = (name, said)
            of[fam] = _settings(options, fam, distributed=distributed)
            if constants is not None:
                of[fam] |= {k: constants[k] for k in ("max_lr", "min_lr") if k in constants}
                own = {"max_lr": "decoupled_lr", "min_lr": "decoupled_min_lr"} if fam.decoupled else {}
                of[fam] |= {k: facts.args[v] for k, v in own.items() if facts.args.get(v) is not None}
    for fam, settings in of.items():
        if not fam.decays and settings["weight_decay"]:
            notes.append(
                f"biases and one-dimensional weights decayed by {settings['weight_decay']} in the source; Megatron "
                "does not decay them (wd_mult 0)"
            )
            settings["weight_decay"] = 0.0
        settings["wd_mult"] = settings.get("wd_mult", 1.0) if fam.decays else 0.0
    return Groups(of, step, tuple(notes), sorting)


def _own(options: Mapping[str, Tree]) -> Mapping[str, Tree]:
    """A group's settings as Megatron takes them: numbers, and no bounds of another scheduler, which it would follow.

    Unsupported where a rate is no number. Source: torch 2.13, optim/adam.py: a capturable Adam's lr may be a tensor;
    optim/lr_scheduler.py, OneCycleLR: it keeps its max_lr and min_lr in the groups.
    """
    is_own = "wd_mult" in options or "pre_wd_mult" in options
    out = {k: as_number(v) for k, v in options.items() if is_own or k not in ("max_lr", "min_lr")}
    odd = next((k for k in _RATES if not isinstance(out.get(k, 0.0), (int, float))), None)
    if odd is not None:
        raise Unsupported(
            f"{odd} of a param group is {show(out[odd])}, no number",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-groups",
        )
    return out


def _plain(value: Tree) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _settings(options: Mapping[str, Tree], fam: Sort, *, distributed: bool) -> dict[str, Tree]:
    lr = options.get("lr", 0.0)
    out: dict[str, Tree] = {
        "is_expert_parallel": fam.experts,
        "default_config": not fam.decoupled and options.get("default_config", True),
        "wd_mult": options.get("wd_mult", options.get("pre_wd_mult", 1.0)),
        "lr_mult": options.get("lr_mult", options.get("pre_lr_mult", 1.0)),
        "is_decoupled_lr": fam.decoupled and options.get("is_decoupled_lr", False),
    }
    # Without bounds of its own a group has the run's, by its flags. Source: core/optimizer_param_scheduler.py, get_lr.
    out |= {k: options[k] for k in ("max_lr", "min_lr") if k in options}
    out["lr"] = lr
    if distributed:
        out["bias_correction"] = options.get("bias_correction", True)
    out["betas"] = _plain(options.get("betas", (0.9, 0.999)))
    out["eps"] = options.get("eps", 1e-8)
    out["weight_decay"] = options.get("weight_decay", 0.0)
    if not distributed:
        out |= {k: options.get(k, v) for k, v in TORCH_ADAM.items()}
    return out
