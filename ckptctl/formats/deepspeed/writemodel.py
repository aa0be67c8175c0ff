"""The model-states file of a DeepSpeed target, and its experts' files: weights in the run's type, shapes, counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.output import OutputFile
from ckptctl.core.values import OrderedPairs, Tree
from ckptctl.formats.deepspeed import flats, teams, writewhole
from ckptctl.formats.deepspeed.modelfile import OWN, SETTINGS, STRUCTURE
from ckptctl.formats.deepspeed.zero import EXPERT
from ckptctl.formats.pickles.nodes import SizeTuple
from ckptctl.formats.torch.write import TorchTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.output import Segment
    from ckptctl.formats.deepspeed.run import Run

RESERVED = STRUCTURE | frozenset({OWN, *SETTINGS, "global_steps", "global_samples", "skipped_steps", "lr_scheduler"})
"""Names that a model-states file has for its own parts: values of other sources are not put there."""


def torch_file(path: str, run: Run, tree: Callable[[TorchTree], Tree]) -> OutputFile:
    """A torch file of a tree that is made when its segments are asked for.

    The folder in it has the file's name, as torch's have: at stage 3 nothing else tells ranks' files apart.
    """
    root = path.rpartition("/")[2].rpartition(".")[0]

    def segments() -> list[Segment]:
        made = TorchTree(held=run.content.held)
        return made.segments(tree(made), root=root)

    return OutputFile(path, segments)


def model_tree(run: Run, rank: int, made: TorchTree) -> dict[str, Tree]:
    """The model-states file: of every rank at stage 3, where module only keeps places. Experts have their own."""
    content, values = run.content, run.content.values
    module = OrderedPairs()
    for name, item in content.weights.items():
        if EXPERT.fullmatch(name):
            continue
        if run.stage == 3 and name not in run.buffers:
            module[name] = flats.flat(made, [], 0, item.dtype)
        else:
            module[name] = made.tensor(content.weights[content.ties.get(name, name)])
    module.update({n: made.value(v) for n, v in content.model_values.items()})
    frozen = [n for n in run.frozen if not EXPERT.fullmatch(n)] if run.stage > 1 else None
    root: dict[str, Tree] = {
        "module": module,
        "buffer_names": list(run.buffers),
        "optimizer": writewhole.optimizer(run, made) if run.is_whole else None,
        "param_shapes": [_shapes(run, team) for _, team in run.flats(0)] if run.has_shards else None,
        "frozen_param_shapes": None if frozen is None else _shapes(run, _plain(frozen)),
        "shared_params": dict(content.ties),
        "frozen_param_fragments": None if frozen is None else _fragments(run, frozen, rank, made),
        "lr_scheduler": made.value(values.get("lr_scheduler")),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": _count(values.get("skipped_steps")),
        "global_steps": run.step,
        "global_samples": _count(values.get("global_samples")),
        "dp_world_size": run.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": made.value(run.config),
        "ds_version": run.version,
    }
    if run.experts:
        root |= {"num_experts": list(run.experts.values()), "ds_autoep_layers": None}
    if OWN in run.own:
        root[OWN] = made.value(run.own[OWN])
    for name, value in values.items():
        if name not in RESERVED and (name not in root or root[name] is None):
            root[name] = made.value(value)
    return root


def _fragments(run: Run, frozen: list[str], rank: int, made: TorchTree) -> OrderedPairs:
    """Frozen parameters: whole, or at stage 3 the rank's slot of each."""
    out = OrderedPairs()
    for name in frozen:
        item = run.content.weights[name]
        if run.stage == 3:
            parts, numel = flats.slot_of(item, run.dp, rank)
            out[name] = flats.flat(made, parts, numel, item.dtype)
        else:
            out[name] = made.tensor(item)
    return out


def expert_tree(run: Run, names: list[str], made: TorchTree) -> Tree:
    """An expert's weights under its number in the whole model."""
    return {n: made.tensor(run.content.weights[run.content.ties.get(n, n)]) for n in names}


def _plain(names: list[str]) -> teams.Team:
    return teams.Team(tuple(names), tuple(names), 1, 0)


def _shapes(run: Run, team: teams.Team) -> OrderedPairs:
    weights = run.content.weights
    return OrderedPairs(
        {local: SizeTuple(weights[name].shape) for name, local in zip(team.names, team.local, strict=True)}
    )


def _count(value: Tree) -> int:
    return value if type(value) is int else 0
