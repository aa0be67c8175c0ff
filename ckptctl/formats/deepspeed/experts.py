"""Experts of DeepSpeed's MoE layers: a file an expert, and at stage 0 an optimizer for each expert-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import MissingFile
from ckptctl.core.tensor import Key
from ckptctl.core.values import TensorRef
from ckptctl.formats.deepspeed import whole
from ckptctl.formats.torchtensor import tensor_of

if TYPE_CHECKING:
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


def weights(build: Build) -> None:
    """Experts' weights, a file each, under their global numbers. MissingFile where one lacks."""
    seen: dict[int, set[int]] = {}
    for (layer, expert, _), path in sorted(build.files.experts.items()):
        seen.setdefault(layer, set()).add(expert)
        with build.pile.open(path) as opened:
            for name, ref in opened.mapping(opened.root, "the expert's file").items():
                if isinstance(ref, TensorRef):
                    build.put(tensor_of(Key(str(name)), ref, opened.number))
    if not seen:
        return
    most = max(max(s) for s in seen.values()) + 1
    for layer, experts in seen.items():
        lost = sorted(set(range(max(experts) + 1)) - experts)
        if lost:
            raise MissingFile(
                f"the file of expert {lost[0]} of MoE layer {layer} is not there",
                where=str(build.files.root / build.files.tag),
                fix=f"copy layer_{layer}_expert_{lost[0]}_mp_rank_00_model_states.pt",
            )
    build.about["experts"] = {"layers": len(seen), "experts": most}
