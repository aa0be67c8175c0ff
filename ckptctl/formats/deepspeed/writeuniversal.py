"""A universal folder as output segments: a folder a parameter, loaded with checkpoint.load_universal.

Its stage is 2: DeepSpeed loads it at any stage up to that, over any number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.core.output import OutputFile, Put
from ckptctl.formats.deepspeed import flats
from ckptctl.formats.deepspeed.writemodel import model_tree, torch_file

if TYPE_CHECKING:
    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.run import Run
    from ckptctl.formats.target import Item
    from ckptctl.formats.torch.write import TorchTree

STAGE = 2


def files(run: Run) -> list[OutputFile]:
    """The tracker, the model-states file, the optimizer's settings, and every parameter's states."""
    run = replace(run, stage=min(run.stage, STAGE))
    tag = f"global_step{run.step}_universal"
    out = [
        OutputFile("latest_universal", lambda: [Put(tag.encode())]),
        torch_file(f"{tag}/mp_rank_00_model_states.pt", run, partial(_model, run)),
        torch_file(f"{tag}/zero/optimizer_state.pt", run, partial(_settings, run)),
    ]
    for name in (n for g in run.groups for n in g.params):
        states = run.states.get(name, {})
        for kind, item in {"fp32": run.masters[name], **{k: i for k, i in states.items() if k != "step"}}.items():
            out.append(torch_file(f"{tag}/zero/{name}/{kind}.pt", run, partial(_param, item)))
        if "step" in states or (name, "step") in run.scalars:
            out.append(torch_file(f"{tag}/zero/{name}/step.pt", run, partial(_step, run, name)))
    return out


def _model(run: Run, made: TorchTree) -> Tree:
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    return {**model_tree(run, 0, made), **info}


def _param(item: Item, made: TorchTree) -> Tree:
    return {"cat_dim": 0, "param": made.tensor(item)}


def _step(run: Run, name: str, made: TorchTree) -> Tree:
    return flats.step(run, made, name)


def _settings(run: Run, made: TorchTree) -> Tree:
    """What ds_to_universal leaves of a rank's file: everything but its flat tensors."""
    return {
        **flats.scaling(run),
        "clip_grad": run.own.get("clip_grad", 0.0),
        "zero_stage": flats.stage_enum(run.stage),
        "partition_count": [run.dp] * len(run.groups),
        "ds_version": run.version,
        "param_groups": [flats.options(run, made, i, [i]) for i in range(len(run.groups))],
    }
