"""Reads DeepSpeed checkpoints: files -> tensors over the ranks' flat groups, groups with settings, counters.

Headers and pickles only. docs/formats/deepspeed.md says which files there are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFile, Unrecognised, Unsupported
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.deepspeed import experts, universal, whole, zero
from ckptctl.formats.deepspeed.beside import read_beside
from ckptctl.formats.deepspeed.build import Build, is_placeholder
from ckptctl.formats.deepspeed.folder import find, first_lost
from ckptctl.formats.deepspeed.frozen import frozen, say_valueless
from ckptctl.formats.deepspeed.modelfile import ModelFile, empty_places, every_rank, one_save, read_model
from ckptctl.formats.deepspeed.opened import Pile
from ckptctl.formats.deepspeed.pipeline import read_layers, renamed
from ckptctl.formats.deepspeed.shards import Shard, by_group, read_shard
from ckptctl.formats.deepspeed.teamed import joined_slices

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.formats.deepspeed.folder import Files


_NAMED_BY_STEP = re.compile(r"global_step(\d+)(?:_universal)?")


def detect(path: Path) -> Evidence | None:
    """A step's folder, or one with a tracker (`latest`) beside it. MissingFile where the tracker names no step."""
    files = find(path)
    return None if files is None else Evidence("deepspeed", files.why, path)


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint of the step at path, or that its tracker names.

    Raises MissingFile for a rank that is not there, Damaged for files of different saves, MissingFact and Unsupported
    for layouts that the files do not say.
    """
    files = find(path)
    if files is None:
        raise Unrecognised(
            f"no DeepSpeed checkpoint is at {path}",
            why="there is no *_model_states.pt, no *_optim_states.pt and no zero/*/fp32.pt, nor a tracker",
            fix="give the folder that holds `latest`, or a step's own",
        )
    build = Build(files, Pile(files.root), facts=hints.facts)
    if files.universal:
        universal.read(build)
    else:
        _regular(build, hints)
    read_beside(build)
    _say_step(build)
    return build.checkpoint()


def _say_step(build: Build) -> None:
    """A word where a step's folder has another step's name: a run without a tracker is told by such names."""
    name = build.files.tag.rpartition("/")[2] or build.files.root.name
    named = _NAMED_BY_STEP.fullmatch(name)
    if named is not None and build.step is not None and int(named[1]) != build.step:
        build.warnings.append(f"the folder is called {name}, and its files are of step {build.step}")


def _regular(build: Build, hints: Hints) -> None:
    files = build.files = _one_stage(build)
    is_three = not files.models and bool(files.shard_models)
    numbers = sorted({*files.models, *(mp for _, mp in (*files.shard_models, *files.optims))})
    models = {mp: _model(build, mp) for mp in _every_model_rank(files, numbers)}
    one_save(list(models.values()))
    every_rank(list(models.values()))
    autoep = next((m for m in models.values() if m.autoep), None)
    if autoep is not None:
        raise Unsupported(
            "this is a run of AutoEP, whose experts are stacked in the optimizer and apart in files",
            where=autoep.path,
            why="it has ds_autoep_layers",
            fix="make a universal folder of it with ds_to_universal: that is read",
        )
    first = models[min(models)]
    build.take_values(first)
    _say_other_values(build, models)
    tp, pp = _degrees(files, models)
    layer_names = read_layers(build, models, hints) if files.layers else {}
    sliced = tp > 1
    natives: dict[int, zero.Native] = {}
    for mp, model in models.items():
        natives[mp] = _native(build, model, mp, hints)
    _require_one_step(models, natives)
    if sliced:
        natives = joined_slices(build, models, natives, tp)
    for native in natives.values():
        build.take(native)
    experts.weights(build, first.experts)
    if not sliced:
        for model in models.values():
            build.weights(model)
            build.model_values.update(model.module_values)
        if is_three:
            say_valueless(build, first)
    if is_three:
        frozen(build, [models[mp] for mp in sorted(models)][:tp], hints)
    renamed(build, layer_names)  # before weights are derived: a tied layer's masters have another name than it has
    for model in models.values():
        build.derive(model)
    _describe(build, first, is_three, natives)
    build.layout |= {"tp": tp, "pp": pp, "ep": max(n.ep for n in natives.values())}


def _say_other_values(build: Build, models: Mapping[int, ModelFile]) -> None:
    """A word where model-parallel ranks' files have other values (random states of each, say) than the first's."""
    first = build.values
    for mp, model in models.items():
        odd = [n for n in {**first, **model.values} if repr(first.get(n)) != repr(model.values.get(n))]
        if odd:
            build.warnings.append(
                f"model-parallel ranks' files have different values of {', '.join(odd[:4])}: the first rank's are "
                f"taken, and those of rank {mp} are not"
            )
            return


def _one_stage(build: Build) -> Files:
    """The files, of which model-states files of another stage, left over from another save, are set aside."""
    files = build.files
    if not (files.models and files.shard_models):
        return files
    is_three = False
    for path in list(files.optims.values())[:1]:
        with build.pile.open(path) as opened:
            tree = opened.mapping(opened.root, "the optimizer-states file").get("optimizer_state_dict")
            is_three = isinstance(tree, dict) and "fp32_flat_groups" in tree
    stale = next(iter(files.models.values() if is_three else files.shard_models.values()))
    build.warnings.append(f"{stale} is of another ZeRO stage than the optimizer's files, left over from another save")
    return replace(files, models={}) if is_three else replace(files, shard_models={})


def _require_one_step(models: Mapping[int, ModelFile], natives: Mapping[int, zero.Native]) -> None:
    """Damaged where two model-parallel ranks' optimizers are at different steps: all of them step together."""
    first: dict[tuple[int, str], tuple[str, object]] = {}
    for mp, native in natives.items():
        for place, value in native.said.items():
            path, other = first.setdefault(place, (models[mp].path, value))
            if place[1] == "step" and value != other:
                raise Damaged(
                    f"model-parallel ranks' optimizers are at different steps in group {place[0]}",
                    where=f"{path}, {models[mp].path}",
                    why="the optimizer's files beside them are of different saves",
                    fix="copy the step again, from one save",
                    code="mixed-saves",
                )


def _model(build: Build, mp: int) -> ModelFile:
    """A model-parallel rank's model-states file: at stage 3 the first data-parallel rank's that is there."""
    files = build.files
    path = files.models.get(mp) or next((p for (_, m), p in sorted(files.shard_models.items()) if m == mp), "")
    if not path:
        raise MissingFile(
            f"there is no model-states file of model-parallel rank {mp}",
            where=str(files.root / files.tag),
            why="it has the parameters' shapes and order, without which the optimizer's files mean nothing",
            fix=f"copy mp_rank_{mp:02d}_model_states.pt from where the run saved it",
        )
    with build.pile.open(path) as opened:
        if opened.root is None or (build.pile.unsafe and not isinstance(opened.root, dict)):
            raise Damaged("the model-states file is no dict", where=path, code="zero-layout")
        return read_model(opened)


def _every_model_rank(files: Files, numbers: list[int]) -> list[int]:
    """Model-parallel ranks that files name, which must be 0, 1, ... without a hole."""
    if not numbers and files.layers:
        raise MissingFile(
            "the pipeline has layers, and no mp_rank_*_model_states.pt", where=str(files.root / files.tag)
        )
    lost = first_lost(numbers)
    if lost < max(numbers, default=0) + 1:
        raise MissingFile(
            f"the files of model-parallel rank {lost} of {max(numbers, default=0) + 1} are not there",
            where=str(files.root / files.tag),
            why=f"there are files of ranks {', '.join(map(str, numbers[:8])) or 'none'}",
            fix="copy the files of every rank",
        )
    return numbers


def _degrees(files: Files, models: dict[int, ModelFile]) -> tuple[int, int]:
    """(tp, pp): as the files say, else as DeepSpeed's own reshaper infers them (reshape_3d_utils.py)."""
    first = models[min(models)]
    if files.layers:
        tp = max(1, len({text for _, text in files.layers}))
    elif first.pp is not None and first.pp > 1 and first.tp:
        tp = first.tp
    else:
        return len(models), 1
    if tp < 1 or len(models) % tp:
        raise MissingFile(
            f"there are files of {len(models)} model-parallel ranks, of {tp} tensor-parallel ones a stage",
            where=first.path,
            fix="copy the files of every rank",
        )
    return tp, len(models) // tp


def _native(build: Build, model: ModelFile, mp: int, hints: Hints) -> zero.Native:
    """States and groups of one model-parallel rank, however its optimizer is kept."""
    files = build.files
    optims = {d: p for (d, m), p in files.optims.items() if m == mp}
    if optims:
        return _partitioned(build, model, optims, mp)
    if files.expert_optims:
        return experts.of_ranks(build, model, mp)
    if model.optimizer is None:
        if model.shapes is not None and not is_any_weight(model):
            raise MissingFile(
                "the optimizer's files are not there, which hold the weights at stage 3",
                where=model.path,
                fix="copy zero_pp_rank_*_optim_states.pt of every rank",
            )
        if model.shapes is not None:
            build.warnings.append("the optimizer's files are not there: weights only, from which no run goes on")
        return zero.Native()
    shapes = build.trainable(model, mp)
    with build.pile.open(model.path) as opened:  # again: its tree was let go
        native, rest = whole.of_optimizer(opened, opened.root["optimizer"], shapes, hints.param_order)
    build.keep(rest)
    return native


def is_any_weight(model: ModelFile) -> bool:
    """Whether module holds weights, not only places of them. A pipeline's are in files of their own."""
    return model.module is None or not any(is_placeholder(r) for r in model.module.values())


def _partitioned(build: Build, model: ModelFile, optims: dict[int, str], mp: int) -> zero.Native:
    """The shards of every data-parallel rank. MissingFile names the first that lacks."""
    dp = model.dp if model.dp is not None else max(optims) + 1
    shards = [_shard(build, optims, 0, dp, mp)]
    count = shards[0].counts[0] if shards[0].stage == 3 and shards[0].counts else dp
    if count < dp:
        build.warnings.append(f"ZeRO-3 is cut over {count} of {dp} ranks (MiCS): the files of one replica are read")
    elif count > dp:
        raise Damaged(
            f"the optimizer's files are cut over {count} ranks, the model-states file says {dp}",
            where=shards[0].path,
            why=f"dp_world_size in {model.path}",
            fix="copy the files of one save",
            code="world-size",
        )
    shards += [_shard(build, optims, d, count, mp) for d in range(1, count)]
    _require_one_prefix([s.path for s in shards])
    stale = [p for d, p in sorted(optims.items()) if d >= dp]
    if stale:
        build.warnings.append(
            f"{len(stale)} files are of ranks beyond the run's {dp}, left over from another save: {stale[0]}"
        )
    build.keep(shards[0].rest)
    build.slices = build.slices or shards[0].info
    build.about.setdefault("partition_count", shards[0].counts)
    build.layout["dp"] = dp
    stage = shards[0].stage
    build.layout.setdefault("zero_stage", stage if stage is not None else model.stage or 1)
    if stage is None:
        build.about["optimizer"] = "BF16_Optimizer"
    if shards[0].elastic:
        build.warnings.append("elastic checkpoint: lr, betas and weight decay of the param groups are in no file")
        if any("step" in state for state in shards[0].states) and not shards[0].shared_step:
            build.warnings.append(
                "elastic checkpoint whose step is not in base_optimizer_state_step: DeepSpeed saves such ones, and "
                "does not load them; reshard writes one that it loads"
            )
    if stage == 3:
        _say_missing(build, mp, count)
    if stage == 3 and model.module is None and not build.files.layers:
        raise Damaged("the model-states file has no module", where=model.path, code="zero-layout")
    data_first = bool(model.config.get("use_data_before_expert_parallelism"))
    if model.shapes is None and shards[0].shapes is not None:
        model.shapes = by_group(shards[0].shapes, shards)
        empty_places(model)
    native = zero.of_shards(model, shards, data_first=data_first)
    build.warnings += native.notes
    return native


def _require_one_prefix(paths: list[str]) -> None:
    """Damaged where some ranks' files have the prefix of a run in bfloat16, and others not: they are of two runs."""
    first = paths[0].rpartition("/")[2].startswith("zero_")
    odd = next((p for p in paths if p.rpartition("/")[2].startswith("zero_") is not first), None)
    if odd is not None:
        raise Damaged(
            "two ranks' files are of runs in different types, by their names",
            where=f"{paths[0]}, {odd}",
            why="all files of a run in bfloat16 begin with bf16_, and no others",
            fix="copy the step again, from one save",
            code="mixed-saves",
        )


def _say_missing(build: Build, mp: int, count: int) -> None:
    """Ranks' model-states files of stage 3 that are not there: one is enough to read, while each rank loads its own."""
    for d in range(count):
        if (d, mp) not in build.files.shard_models:
            name = f"zero_pp_rank_{d}_mp_rank_{mp:02d}_model_states.pt"
            build.missing.append(build.files.where(name))
            build.warnings.append(
                f"{name} is not there: what it holds is in the other ranks' files too, but DeepSpeed "
                "does not load the checkpoint without it"
            )


def _shard(build: Build, optims: dict[int, str], d: int, dp: int, mp: int) -> Shard:
    if d not in optims:
        raise MissingFile(
            f"the optimizer's file of data-parallel rank {d} of {dp} is not there",
            where=str(build.files.root / build.files.tag),
            why=f"there are files of ranks {', '.join(map(str, sorted(optims)[:8]))}, model-parallel rank {mp}",
            fix=f"copy zero_pp_rank_{d}_mp_rank_{mp:02d}_optim_states.pt from where the run saved it",
        )
    with build.pile.open(optims[d]) as opened:
        return read_shard(opened)


def _describe(build: Build, first: ModelFile, is_three: bool, natives: dict[int, zero.Native]) -> None:
    build.layout.setdefault("zero_stage", 3 if is_three else first.stage or 0)
    build.layout.setdefault("dp", first.dp)
    build.layout.setdefault("world_size", (first.dp or 1) * (first.mp or 1))
    stage = build.layout["zero_stage"]
    build.variant = f"zero{stage}" + (" pipeline" if build.files.layers else "")
    own: Any = build.values.get("deepspeed")
    settings = own if isinstance(own, dict) else {}
    build.about |= {
        "ds_version": settings.get("ds_version"),
        "dtype": first.run_dtype,
        "padding": zero.padding_of(natives.values()),
        "loss_scaler": settings.get("loss_scaler"),
        "buffers": sorted(first.buffers),
    }
    if first.frozen is None and first.stage in (2, 3) and first.shapes is not None:
        build.warnings.append(
            "no frozen parameters are listed: if the run had any, they were left out at the save "
            "(exclude_frozen_parameters), and no file has them"
        )
