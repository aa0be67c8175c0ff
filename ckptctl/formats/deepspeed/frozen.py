"""Stage 3's frozen parameters, of which every rank's model-states file has a slot; and places that no file fills."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import Key, Tensor
from ckptctl.formats.deepspeed import layout
from ckptctl.formats.deepspeed.build import is_placeholder
from ckptctl.formats.deepspeed.modelfile import one_save, read_model, zero_section
from ckptctl.formats.deepspeed.slices import Rules, joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.dtype import DType
    from ckptctl.core.tensor import Ints
    from ckptctl.formats import Hints
    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.layout import Flat, Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile


def frozen(build: Build, team: list[ModelFile], hints: Hints) -> None:
    """Frozen parameters of stage 3: each rank's model file holds its slot of them. team are tensor-parallel ranks."""
    parts = [_fragments(build, model, mp) for mp, model in enumerate(team)]
    for key, tensor in parts[0].items():
        whole = tensor
        if len(team) > 1:
            info = next((m.universal for m in team if m.universal), build.slices)
            rules = Rules(info, hints.facts.config, team[0].path)
            whole = replace(joined(key, [p.get(key) for p in parts], rules, team[0].path), trainable=False)
        build.put(whole)


def _fragments(build: Build, model: ModelFile, mp: int) -> dict[Key, Tensor]:
    """The frozen parameters of one model-parallel rank, of the pieces in its data-parallel ranks' model files."""
    if not model.frozen:
        if model.frozen is None and model.values.get("deepspeed", {}).get("ds_version"):
            build.warnings.append("frozen parameters, if there were any, were left out at the save")
        return {}
    files = build.files
    ranks: list[dict[str, tuple[Flat, DType]]] = []
    dp = build.about["partition_count"][0] if build.about.get("partition_count") else model.dp or 1
    for d in range(dp):
        if (d, mp) not in files.shard_models:
            raise MissingFile(
                f"the model-states file of data-parallel rank {d} of {dp} is not there",
                where=str(files.root / files.tag),
                why="it has that rank's part of the frozen parameters",
                fix=f"copy zero_pp_rank_{d}_mp_rank_{mp:02d}_model_states.pt from where the run saved it",
            )
        with build.pile.open(files.shard_models[d, mp]) as opened:
            own = read_model(opened)
            one_save([model, own])
            ranks.append({n: opened.flat(r, f"the piece of {n}") for n, r in own.fragments.items()})
    quantized = zero_section(model.config).get("zero_quantized_nontrainable_weights") is True
    odd = next((n for held in ranks for n, (_, dtype) in held.items() if quantized and not dtype.is_float), None)
    if odd is not None:
        raise Unsupported(
            f"the frozen parameter {odd} is stored in whole numbers, whose scales are in no file",
            where=model.path,
            why="zero_quantized_nontrainable_weights is set: DeepSpeed saves such weights without what they mean",
            fix="take the frozen weights from where the run began with them",
        )
    return joined_fragments(model.frozen, ranks, str(files.root / files.tag))


def say_valueless(build: Build, first: ModelFile) -> None:
    """Parameters of stage 3 that have a place in module and nothing else: tied ones, where nothing says to which.

    MissingFile without the first rank's file, which alone lists them; a warning else (DeepSpeed before 0.9).
    Source: DeepSpeed 0.19.8, runtime/engine.py, _get_shared_params; a real run.
    """
    known = {*first.buffers, *build.believed(first), *(first.frozen or ()), *(n for g in first.shapes or () for n in g)}
    lost = [n for n, r in (first.module or {}).items() if is_placeholder(r) and n not in known]
    if lost and (0, 0) not in build.files.shard_models:
        raise MissingFile(
            f"the first rank's model-states file is not there, without which {lost[0]} has no value",
            where=str(build.files.root / build.files.tag),
            why="parameters that share one value are listed in it alone",
            fix="copy zero_pp_rank_0_mp_rank_00_model_states.pt from where the run saved it",
        )
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        build.warnings.append(f"{lost[0]} has no value{more}: no file says with which parameter it shares one")


def joined_fragments(
    shapes: dict[str, Shape], ranks: Sequence[dict[str, tuple[Flat, DType]]], where: str
) -> dict[Key, Tensor]:
    """Frozen parameters of ZeRO-3: each rank's model file has its slot of each, in the run's type."""
    out = {}
    for name, shape in shapes.items():
        numel, dp = math.prod(shape), len(ranks)
        flats: list[Flat] = []
        dtype: DType | None = None
        for number, rank in enumerate(ranks):
            if name not in rank:
                raise Damaged(
                    f"rank {number} has no piece of the frozen parameter {name}", where=where, code="mixed-saves"
                )
            flat, own = rank[name]
            dtype = dtype or own
            if own.name != dtype.name:
                raise Damaged(
                    f"ranks have the frozen parameter {name} in {dtype.name} and {own.name}",
                    where=where,
                    code="mixed-saves",
                )
            if flat.numel != layout.param_slot(numel, dp):
                raise Damaged(
                    f"rank {number}'s piece of the frozen parameter {name} has {flat.numel} elements, "
                    f"not {layout.param_slot(numel, dp)}",
                    where=where,
                    code="zero-layout",
                )
            flats.append(flat)
        if dtype is not None:
            pieces: tuple[Ints, Ints] = layout.columns(flats)
            table = layout.slotted_table(numel, 0, dp, pieces, dtype.itemsize)
            out[Key(name)] = Tensor(Key(name), dtype, shape, (table,), trainable=False)
    return out
