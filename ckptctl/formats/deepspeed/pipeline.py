"""Pipelines: a file a layer, whose names are the layer's own, and what a known family's model calls them.

PipelineModule is a list of layers; in param_shapes a parameter is `<layer>.<name in the layer>`, and what the model's
class calls it is in no file. Where the config names a family, and layer after layer has the names and shapes of its
modules in order, these are its names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import Group
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key
from ckptctl.core.values import TensorRef
from ckptctl.formats.torchtensor import tensor_of
from ckptctl.names import NAMESPACES, family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.formats import Hints
    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile
    from ckptctl.names import Family, Namespace

_BLOCK = re.compile(r"(.*?\.\d+)\.(.+)")


def family_names(layers: Mapping[int, Mapping[str, Shape]], config: Mapping[str, Any] | None) -> dict[str, str] | str:
    """The family's name of each `<layer>.<name>`; or why there is none: the config is not there, or does not fit."""
    if config is None:
        return "no config says which model it is"
    known = family(config)
    if known is None:
        return f"the family {config.get('model_type') or 'of the config'} is not known"
    why = ""
    for namespace in NAMESPACES:
        found = _matched(layers, known, namespace)
        if not isinstance(found, str):
            return found
        why = why or found
    return why


def _matched(layers: Mapping[int, Mapping[str, Shape]], known: Family, namespace: Namespace) -> dict[str, str] | str:
    modules: dict[str, dict[str, Shape]] = {}
    for p in known.parameters(namespace):
        block = _BLOCK.fullmatch(p.name)
        where, _, local = p.name.rpartition(".")
        if block is not None:
            where, local = block[1], block[2]
        modules.setdefault(where, {})[local] = p.shape
    if len(modules) != len(layers):
        return f"a {known.name} of this config has {len(modules)} layers, the checkpoint {len(layers)}"
    out = {}
    for (number, layer), (where, module) in zip(sorted(layers.items()), modules.items(), strict=True):
        if dict(layer) != module:
            strange = next((n for n in {**layer, **module} if layer.get(n) != module.get(n)), "")
            return f"layer {number} is not {where}: {strange} has shape {layer.get(strange)}, not {module.get(strange)}"
        out.update({f"{number}.{n}": f"{where}.{n}" for n in layer})
    return out


def read_layers(build: Build, models: dict[int, ModelFile], hints: Hints) -> dict[str, str]:
    """A pipeline's layer files: their tensors under `<layer>.<name>`; returns the family's names of these."""
    layers: dict[int, dict[str, Shape]] = {}
    for (layer, _), path in sorted(build.files.layers.items()):
        with build.pile.open(path) as opened:
            own = layers.setdefault(layer, {})
            for name, ref in opened.mapping(opened.root, "the layer's file").items():
                key = Key(f"{layer}.{name}")
                if isinstance(ref, TensorRef):
                    own[str(name)] = ref.shape
                    if key not in build.tensors:
                        build.put(tensor_of(key, ref, opened.number))
                else:
                    build.model_values[key.name] = opened.value(key.name, ref)
    build.about["layers"] = len(layers)
    build.stages = _stages(models, layers)
    names = family_names(layers, hints.facts.config)
    if isinstance(names, str):
        build.warnings.append(f"the layers keep their numbers for names: {names}; --model-config gives the config")
        return {}
    return names


def _stages(models: dict[int, ModelFile], layers: dict[int, dict[str, Shape]]) -> dict[int, dict[str, Shape]]:
    """Which layers' parameters each stage has, where its optimizer is whole and names none: by how many it has.

    Layers go to stages in order. Damaged where the numbers do not end at a layer's end.
    """
    rest = [(f"{layer}.{n}", s) for layer, own in sorted(layers.items()) for n, s in own.items()]
    out: dict[int, dict[str, Shape]] = {}
    for mp, model in sorted(models.items()):
        if not isinstance(model.optimizer, dict):
            continue
        inner = model.optimizer.get("optimizer_state_dict", model.optimizer)
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        number = sum(len(g.get("params", ())) for g in groups or () if isinstance(g, dict))
        out[mp] = dict(rest[:number])
        last = rest[number - 1][0].partition(".")[0] if number else ""
        rest = rest[number:]
        if rest and rest[0][0].partition(".")[0] == last:
            raise Damaged(
                f"stage {mp} has {number} parameters, which end inside layer {last}",
                where=model.path,
                why="some of them are frozen or tied: which, is in no file",
                code="zero-layout",
            )
    return out


def renamed(build: Build, names: dict[str, str]) -> None:
    """A pipeline's tensors under the family's names, everywhere."""
    if not names:
        return

    def named(name: str) -> str:
        return names.get(name, name)

    build.tensors = {
        k._replace(name=named(k.name)): replace(t, key=k._replace(name=named(k.name))) for k, t in build.tensors.items()
    }
    build.groups = [Group(tuple(map(named, g.params)), g.options) for g in build.groups]
    build.scalars = {(named(n), kind): v for (n, kind), v in build.scalars.items()}
    build.ties = {named(a): named(b) for a, b in build.ties.items()}
