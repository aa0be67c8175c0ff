"""Experts of DeepSpeed's MoE layers: a file an expert, and at stage 0 an optimizer for each expert-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, MissingFile
from ckptctl.core.tensor import Key
from ckptctl.core.values import TensorRef
from ckptctl.formats.deepspeed import whole
from ckptctl.formats.deepspeed.folder import first_lost
from ckptctl.formats.torchtensor import tensor_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile
    from ckptctl.formats.deepspeed.zero import Native


def of_ranks(build: Build, model: ModelFile, mp: int) -> Native:
    """Stage 0 with experts: a whole optimizer for each expert-parallel rank."""
    files = build.files
    ranks = sorted(e for e, m in files.expert_optims if m == mp)
    if ranks != list(range(len(ranks))):
        raise MissingFile(f"the file of expert rank {len(ranks)} is not there", where=str(files.root / files.tag))
    every = _expert_shapes(build)
    per_layer = {layer: len({e for la, e, _ in files.experts if la == layer}) for layer, _, _ in files.experts}
    parts = []
    for rank in ranks:
        mine: dict[str, Shape] = {}
        for (layer, expert, _), shapes in sorted(every.items()):
            share = per_layer[layer] // len(ranks)
            if rank * share <= expert < (rank + 1) * share:
                mine.update(shapes)
        with build.pile.open(files.expert_optims[rank, mp]) as opened:
            tree = opened.mapping(opened.root, "the expert rank's file").get("optimizer")
            native, rest = whole.of_optimizer(opened, tree, build.trainable(model, mp), (), mine)
        build.keep(rest)
        parts.append(native)
    out = whole.joined_experts(parts, str(files.root / files.tag))
    out.ep = len(ranks)
    return out


def _expert_shapes(build: Build) -> dict[tuple[int, int, int], dict[str, Shape]]:
    out = {}
    for place, path in build.files.experts.items():
        with build.pile.open(path) as opened:
            entries = opened.mapping(opened.root, "the expert's file")
            out[place] = {str(n): r.shape for n, r in entries.items() if isinstance(r, TensorRef)}
    return out


def weights(build: Build, counts: Sequence[int] = ()) -> None:
    """Experts' weights, a file each, under their global numbers. MissingFile where one lacks.

    counts are the numbers of experts of each MoE layer, by the model-states file; () where it does not say.
    """
    seen: dict[int, set[int]] = {}
    for (layer, expert, _), path in sorted(build.files.experts.items()):
        seen.setdefault(layer, set()).add(expert)
        with build.pile.open(path) as opened:
            for name, ref in opened.mapping(opened.root, "the expert's file").items():
                if isinstance(ref, TensorRef):
                    build.put(tensor_of(Key(str(name)), ref, opened.number))
    _require_every(build, seen, counts)
    if not seen:
        return
    most = max(map(len, seen.values()))
    build.about["experts"] = {"layers": len(seen), "experts": most}


def _require_every(build: Build, seen: Mapping[int, set[int]], counts: Sequence[int]) -> None:
    """MissingFile where an expert of a layer has no file, Damaged where there are more than the run had.

    Layers are those of counts, if there are any, else those that have files; so are the experts of each.
    """
    for layer in range(len(counts)) if counts else sorted(seen):
        experts = seen.get(layer, set())
        count = counts[layer] if counts else max(experts) + 1
        lost = first_lost(experts)
        if lost < count:
            raise MissingFile(
                f"the file of expert {lost} of MoE layer {layer} is not there",
                where=str(build.files.root / build.files.tag),
                why=f"the layer has {count} experts, by {'num_experts' if counts else 'the other files'}",
                fix=f"copy layer_{layer}_expert_{lost}_mp_rank_00_model_states.pt",
            )
        more = next((e for e in sorted(experts) if e >= count), None)
        if more is not None:
            raise _strange(build, f"expert {more} of MoE layer {layer}", f"num_experts is {count}")
    strange = next((n for n in sorted(seen) if counts and n >= len(counts)), None)
    if strange is not None:
        raise _strange(build, f"MoE layer {strange}", f"num_experts lists {len(counts)} layers")


def _strange(build: Build, what: str, why: str) -> Damaged:
    return Damaged(
        f"there is a file of {what}, which the run did not have",
        where=str(build.files.root / build.files.tag),
        why=why,
        fix="move files of another save away",
        code="mixed-saves",
    )
