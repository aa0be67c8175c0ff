"""A universal folder as output segments: a folder a parameter, loaded with checkpoint.load_universal.

DeepSpeed has two forms, by the stage of the run that loads: a folder that holds both is loaded at stages 1, 2 and 3,
over any number of ranks. What they share is every parameter's states; they differ in the model-states file's name and
in where zero/optimizer_state.pt has settings and step.

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py; runtime/zero/stage_1_and_2.py and stage3.py,
load_hp_checkpoint_state_from_checkpoint_dir*.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported
from ckptctl.core.output import OutputFile, Put
from ckptctl.formats.deepspeed import flats
from ckptctl.formats.deepspeed.run import F32, WIDENED
from ckptctl.formats.deepspeed.writemodel import model_tree, torch_file
from ckptctl.formats.target import Item

if TYPE_CHECKING:
    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.run import Run
    from ckptctl.formats.torch.write import TorchTree

STAGE = 2
"""The stage whose form the folder has first: that of frozen parameters, and of param_shapes by group."""
FOR_STAGE_3 = ("exp_avg", "exp_avg_sq")
"""The states that stage 3 reads: these and no others."""


def files(run: Run) -> list[OutputFile]:
    """The trackers, the model-states files, the optimizer's settings, and every parameter's states."""
    run = replace(run, stage=STAGE)
    tag = f"global_step{run.step}_universal"
    out = [
        OutputFile("latest_universal", lambda: [Put(tag.encode())]),
        torch_file(f"{tag}/mp_rank_00_model_states.pt", run, partial(_model, run)),
        torch_file(f"{tag}/zero/optimizer_state.pt", run, partial(_settings, run)),
    ]
    if loads_at_three(run):
        places = replace(run, stage=3, dp=1, frozen=[])
        out.insert(2, torch_file(f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt", run, partial(_model, places)))
    for name in (n for g in run.groups for n in g.params):
        states = run.states.get(name, {})
        for kind, item in {"fp32": run.masters[name], **{k: i for k, i in states.items() if k != "step"}}.items():
            out.append(torch_file(f"{tag}/zero/{name}/{kind}.pt", run, partial(_param, item)))
        if "step" in states or (name, "step") in run.scalars:
            out.append(torch_file(f"{tag}/zero/{name}/step.pt", run, partial(_step, run, name)))
    for name, item in frozen(run).items():
        out.append(torch_file(f"{tag}/zero/{name}/fp32.pt", run, partial(_param, item)))
    return out


def require_place(run: Run, stage: int) -> None:
    """Unsupported where a folder for one stage is asked for, and DeepSpeed has no form that goes on there as it was."""
    if stage == 0:
        raise Unsupported("no run of stage 0 loads a universal folder", fix="leave --universal or --zero-stage 0 out")
    alone = next((k for k in sorted({*run.lone, *(k for s in run.singles.values() for k in s)})), None)
    if alone is not None:
        raise Unsupported(
            f"{alone} is one value of each parameter: a universal folder has no place for it",
            where=run.content.source.root,
            why="its loader takes every file of a parameter for elements of its own shape, but for the step",
            fix="--zero-stage S for the run's ranks, without --universal",
        )
    if stage == 3 and not loads_at_three(run):
        raise Unsupported(
            "a universal folder of this run cannot be loaded at stage 3 as it was",
            where=run.content.source.root,
            why="there DeepSpeed gives all param groups the first one's settings, counts the one step once for each "
            "sub-group, and reads Adam's two moments and no other state",
            fix="--zero-stage 3 without --universal, for the run's ranks; or --universal alone, for stages 1 and 2",
            code="universal-stage-3",
        )


def loads_at_three(run: Run) -> bool:
    """Whether a run of stage 3 can go on from it: that takes Adam's two moments, one step, and one sub-group.

    DeepSpeed gives all sub-groups one and the same step, which every one of them counts up, and all param groups the
    first one's settings: with several, a run would go on otherwise than it was. Without stage 3's form it stops.
    """
    if len(run.groups) != 1 or run.updates is None or run.experts or not run.has_settings:
        return False
    numel = sum(map(run.numel, run.groups[0].params))
    return set(FOR_STAGE_3) <= set(run.kinds[0]) and numel <= run.sub_group_numel()


def frozen(run: Run) -> dict[str, Item]:
    """Frozen parameters as float32: ds_to_universal writes them too, though no load restores them."""
    items = {n: run.content.weights[n] for n in run.frozen}
    return {n: Item(i.key, i.tensor, F32) for n, i in items.items() if i.tensor.held.name in WIDENED}


def casts(run: Run) -> frozenset[tuple[str, str]]:
    """Casts to float32 that frozen parameters need."""
    held = {i.tensor.held.name for i in frozen(run).values()}
    return frozenset((name, F32.name) for name in held if name != F32.name)


def _model(run: Run, made: TorchTree) -> Tree:
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    return {**model_tree(run, 0, made), **info}


def _param(item: Item, made: TorchTree) -> Tree:
    return {"cat_dim": 0, "param": made.tensor(item)}


def _step(run: Run, name: str, made: TorchTree) -> Tree:
    return flats.step(run, made, name)


def _settings(run: Run, made: TorchTree) -> Tree:
    """What ds_to_universal leaves of a rank's file: everything but its flat tensors."""
    out = {
        **flats.scaling(run),
        **flats.clipping(run),
        "zero_stage": flats.stage_enum(run.stage),
        "partition_count": [run.dp] * len(run.groups),
        "ds_version": run.version,
        "param_groups": [flats.options(run, made, i, [i]) for i in range(len(run.groups))],
    }
    return {**out, "optimizer_state_dict": _for_three(run, made)} if loads_at_three(run) else out


def _for_three(run: Run, made: TorchTree) -> Tree:
    """Stage 3's own place for settings and step."""
    first = next(iter(run.groups[0].params), "")
    return {"state": {0: {"step": flats.step(run, made, first)}}, "param_groups": [flats.options(run, made, 0, [0])]}
