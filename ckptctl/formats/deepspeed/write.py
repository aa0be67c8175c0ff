"""ZeRO-1, 2 and 3 folders for any number of data-parallel ranks, and stage 0, as output segments.

Flat groups follow the optimizer's own groups and order. Masters and moments are float32 (a narrower source is widened,
which is exact); module weights keep the run's type. Pickles name DeepSpeed's own classes, and are made here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import part_of
from ckptctl.core.output import OutputFile, Put
from ckptctl.formats.deepspeed import flats, writeuniversal, writewhole
from ckptctl.formats.deepspeed.modelfile import ROUND_ROBIN, SETTINGS, STRUCTURE
from ckptctl.formats.deepspeed.run import F32, run_of
from ckptctl.formats.deepspeed.writemodel import expert_tree, model_tree, torch_file
from ckptctl.formats.target import Choices, Content, Line, Written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptctl.core.values import Tree
    from ckptctl.formats.deepspeed.run import Run
    from ckptctl.formats.torch.write import TorchTree

_PREFIX = {"bfloat16": "bf16_"}


def write(content: Content, choices: Choices) -> Written:
    """The files of one step and its tracker. Unsupported for state that does not follow parameters."""
    run = run_of(content, choices)
    astray = _astray(content)
    decided = frozenset(line.part for line in astray)
    if choices.universal:
        writeuniversal.require_place(run, choices.zero_stage)
        files = writeuniversal.files(run)
        how = f"universal, for stages 1 to {3 if writeuniversal.loads_at_three(run) else 2}"
    elif run.is_whole:
        writewhole.require_place(run)
        files = list(_regular(run))
        how = "stage 0, the whole optimizer in the model-states file"
        how += "" if run.dtype == F32.name else ", for runs whose optimizer is not fused (no FusedAdam)"
    else:
        files = list(_regular(run))
        how = f"ZeRO-{run.stage} over {run.dp} ranks" + (f", experts over {run.ep} of them" if run.experts else "")
    if not run.has_shards and not run.is_whole and not choices.universal:
        how = "one model-states file, for load_checkpoint(load_module_only=True): no optimizer is beside it"
        return Written(tuple(files), True, (Line("layout", "written", how), *astray), decided=decided)
    order = f" in {run.whose} order" if run.whose else ""
    fresh = "" if run.states else "; load_checkpoint(load_optimizer_states=False) begins with a fresh optimizer"
    lines = [Line("layout", "written", f"{how}; {len(run.groups)} param groups{order}{fresh}")]
    if run.states and not run.has_settings:
        why = "the source has none: a run that loads it keeps its own"
        if run.stage == 3 or choices.universal:
            why = "the source has none, and DeepSpeed takes them from here: set them before the first step"
        lines.append(Line("settings of param groups", "absent", why))
    if run.was_dealt and run.stage in (1, 2) and not choices.universal:
        why = "flat groups are in the optimizer's own order: set it to false in the run's configuration, or DeepSpeed "
        why += "gives parameters each other's state"
        lines.append(Line(ROUND_ROBIN, "dropped", why))
    if run.is_recast and "loss_scaler" in run.own:
        why = f"it was that of a run in another type than {run.dtype}: the run that loads has its own"
        lines.append(Line("loss scale", "dropped", why))
    lines += astray
    if run.empty:
        why = f"{len(run.empty)}, with no state, which has no element either: DeepSpeed's optimizer leaves them out"
        lines.append(Line("parameters without elements", "written", why))
    widened = sum(i.tensor.held.name != F32.name for i in run.masters.values())
    if widened:
        lines.append(Line("masters", "filled", f"{widened} of {len(run.masters)}: the weights, widened to float32"))
    casts = run.casts | (writeuniversal.casts(run) if choices.universal else frozenset())
    return Written(tuple(files), True, tuple(lines), casts=casts, decided=decided)


def _astray(content: Content) -> list[Line]:
    """What is told of values that are called as a part of a model-states file, where it has the run's own."""
    taken = [name for name in content.values if name in STRUCTURE or name in SETTINGS]
    if not taken:
        return []
    kept = [name for name in content.values if name not in taken and part_of(name) == "other"]
    why = "a model-states file has parts of these names, the run's own"
    told = [Line("other values", "carried", ", ".join(kept))] if kept else []
    return [*told, Line("other values", "dropped", f"{', '.join(taken)}: {why}")]


def _regular(run: Run) -> Iterator[OutputFile]:
    tag = f"global_step{run.step}"
    yield OutputFile("latest", lambda: [Put(tag.encode())])
    for rank in range(run.dp if run.stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if run.stage == 3 else "mp_rank_00"
        yield torch_file(f"{tag}/{name}_model_states.pt", run, partial(model_tree, run, rank))
    for number, (prefix, count) in enumerate(run.experts.items()):
        for expert in range(count):
            names = [n for n in run.content.weights if n.startswith(f"{prefix}{expert}.")]
            path = f"{tag}/layer_{number}_expert_{expert}_mp_rank_00_model_states.pt"
            yield torch_file(path, run, partial(expert_tree, run, names))
    for rank in range(run.dp if run.has_shards else 0):
        name = f"{_PREFIX.get(run.dtype, '')}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        yield torch_file(f"{tag}/{name}", run, partial(_shard, run, rank))


def _shard(run: Run, rank: int, made: TorchTree) -> Tree:
    """The optimizer-states file of a rank."""
    is_three = run.stage == 3
    masters: list[Tree] = []
    states: dict[int, dict[str, Tree]] = {}
    slices: list[Tree] = []
    paddings: list[int] = []
    members: list[list[int]] = [[] for _ in run.groups]
    every = run.flats(rank)
    for at, (number, team) in enumerate(every):
        held = flats.piece(run, made, team, run.masters, pad=is_three)
        masters.append(held)
        state = flats.state(run, made, number, team)
        if state:
            states[at] = state
        members[number].append(at)
        if not is_three:
            paddings.append(flats.group_slot(run, team) - held.numel)
            slices.append(flats.slices(run, team))
    base: Tree = {"state": states, "param_groups": [flats.options(run, made, i, m) for i, m in enumerate(members)]}
    more: dict[str, Tree] = {}
    if states and not run.has_settings and not is_three:
        # The form of elastic checkpoints, which have no settings: a run that loads them keeps its own.
        base = [states.get(i, {}) for i in range(len(every))]
        more = {"base_optimizer_state_step": states[0].get("step") if 0 in states else None}
    if is_three:
        inner = {
            "zero_stage": flats.stage_enum(run.stage),
            **flats.scaling(run),
            "partition_count": run.dp,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    else:
        inner = {
            **flats.scaling(run),
            **flats.clipping(run),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "zero_stage": flats.stage_enum(run.stage),
            "group_paddings": None if more else paddings,  # moments have their padding
            "param_alignment_paddings": [[0] * len(team.names) for _, team in every],
            "partition_count": [team.dp for _, team in every],
            "ds_version": run.version,
            "param_slice_mappings": slices,
            **more,
        }
    return {"optimizer_state_dict": inner, "ds_config": made.value(run.config), "ds_version": run.version}
