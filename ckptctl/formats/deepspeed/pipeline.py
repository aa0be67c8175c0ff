"""Pipelines: a file a layer, whose names are the layer's own, and what a known family's model calls them.

PipelineModule is a list of layers; in param_shapes a parameter is `<layer>.<name in the layer>`, and what the model's
class calls it is in no file. Where the config names a family, and layer after layer has the names and shapes of its
modules in order, these are its names.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import Group
from ckptctl.core.errors import Damaged, MissingFile, Unsupported, Usage
from ckptctl.core.tensor import Key
from ckptctl.core.values import TensorRef
from ckptctl.formats.deepspeed.slices import Rules, joined
from ckptctl.formats.torchtensor import tensor_of
from ckptctl.names import NAMESPACES, family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.tensor import Tensor
    from ckptctl.formats import Hints
    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile
    from ckptctl.names import Family, Namespace

_PREFIX = "tied_modules."
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_SLICE = re.compile(r"model_\d+")
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
    """A pipeline's layer files: their tensors under `<layer>.<name>`; returns what these, and tied ones, are called.

    Tensor-parallel slices of a layer, a file each, are joined. Raises MissingFile where a layer that the stages name,
    or one of its slices, is not there.
    """
    slices: dict[int, dict[str, dict[str, Tensor]]] = {}
    for (layer, text), path in sorted(build.files.layers.items()):
        with build.pile.open(path) as opened:
            own = slices.setdefault(layer, {}).setdefault(text, {})
            for name, ref in opened.mapping(opened.root, "the layer's file").items():
                key = Key(f"{layer}.{name}")
                if isinstance(ref, TensorRef):
                    own[str(name)] = tensor_of(key, ref, opened.number)
                else:
                    build.model_values[key.name] = opened.value(key.name, ref)
    _require_slices(build, slices)
    first = models[min(models)]
    rules = Rules(next((m.universal for m in models.values() if m.universal), {}), hints.facts.config, first.path)
    layers: dict[int, dict[str, Shape]] = {}
    for layer, parts in sorted(slices.items()):
        whole = next(iter(parts.values()))
        for name, tensor in whole.items():
            key = Key(f"{layer}.{name}")
            if len(parts) > 1:
                tensor = joined(key, [p.get(name) for p in parts.values()], rules, build.files.where("layer files"))
            build.put(tensor)
        if whole:
            layers[layer] = {n: build.tensors[Key(f"{layer}.{n}")].shape for n in whole}
    build.about["layers"] = len(layers)
    tied = _tied(build, models, layers)
    _require_layers(build, models, layers)
    build.stages = _stages(models, layers)
    if hints.layer_names:
        names: dict[str, str] | str = _given(layers, models, hints.layer_names)
    else:
        names = family_names(layers, hints.facts.config)
    if isinstance(names, str):
        build.warnings.append(
            f"the layers keep their numbers for names: {names}; --model-config gives the config, --layer-names FILE "
            "the names"
        )
        names = {}
    return {**_named(names, tied), **names}


def _named(names: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    """Names of everything, given those of the layers' parameters."""
    return {**names, **{n: names.get(layer, layer) for n, layer in tied.items()}}


def _tied(build: Build, models: Mapping[int, ModelFile], layers: Mapping[int, Mapping[str, Shape]]) -> dict[str, str]:
    """Tied modules' parameters as the optimizer's files call them, and as the layer that holds them does.

    PipelineModule calls such parameters tied_modules.<key>.<name>; every stage that uses them has them in its shards.
    The layer is the one that has their names and shapes, and is named by no stage itself; where two tied modules, or
    two such layers, are alike, nothing says which is whose, and names stay.
    Source: DeepSpeed 0.19.8, runtime/pipe/module.py, TiedLayerSpec; a real run over two stages.
    """
    out: dict[str, str] = {}
    every = {n: s for m in models.values() for g in m.shapes or () for n, s in g.items()}
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in every.items():
        if m := _TIED.fullmatch(name):
            modules.setdefault(m[1], {})[m[2]] = shape
    free = {n: dict(m) for n, m in sorted(layers.items()) if not any(f"{n}.{local}" in every for local in m)}
    for key, module in modules.items():
        found = [n for n, own in free.items() if own == module]
        if len(found) != 1 or list(modules.values()).count(module) > 1:
            build.warnings.append(f"which layer the tied module {key} is, is in no file: it keeps its name")
            continue
        out.update({f"{_PREFIX}{key}.{local}": f"{found[0]}.{local}" for local in module})
    return out


def _given(
    layers: Mapping[int, Mapping[str, Shape]], models: Mapping[int, ModelFile], given: Mapping[str, str]
) -> dict[str, str]:
    """Names by the user's word: those of layers (their numbers), and of tied modules (tied_modules.<key>)."""
    every = {str(n): [f"{n}.{local}" for local in m] for n, m in layers.items()}
    for name in dict.fromkeys(n for m in models.values() for g in m.shapes or () for n in g):
        if m := _TIED.fullmatch(name):
            every.setdefault(f"{_PREFIX}{m[1]}", []).append(name)
    strange = next((n for n in given if n not in every), None)
    if strange is not None:
        raise Usage(
            f"--layer-names names {strange}, which is no layer with parameters",
            fix=f"the layers are {', '.join(every)}",
            code="layer-names",
        )
    return {
        n: f"{given[layer]}.{n.removeprefix(layer + '.')}".lstrip(".")
        for layer, names in every.items()
        if layer in given
        for n in names
    }


def _require_slices(build: Build, slices: Mapping[int, Mapping[str, Mapping[str, Tensor]]]) -> None:
    """MissingFile where a layer has fewer tensor-parallel files than another; Unsupported for files by other axes."""
    every = sorted({text for parts in slices.values() for text in parts})
    for text in every:
        if len(every) > 1 and not _SLICE.fullmatch(text):
            raise Unsupported(
                f"the layers' files are by {text}: only tensor-parallel slices (model_00, ...) are known",
                where=str(build.files.root / build.files.tag),
            )
    for layer, parts in sorted(slices.items()):
        lost = next((t for t in every if t not in parts), None)
        if lost is not None:
            raise MissingFile(
                f"the file of layer {layer} of {lost} is not there",
                where=str(build.files.root / build.files.tag),
                fix=f"copy layer_{layer:02d}-{lost}-model_states.pt from where the run saved it",
            )


def _require_layers(build: Build, models: Mapping[int, ModelFile], layers: Mapping[int, Mapping[str, Shape]]) -> None:
    """MissingFile where a stage's parameters are of a layer whose file is not there."""
    for model in models.values():
        for name in (n for g in model.shapes or () for n in g):
            number, _, local = name.partition(".")
            if number.isdecimal() and local not in layers.get(int(number), {}):
                there = int(number) in layers
                raise MissingFile(
                    f"layer {number} has no {local}" if there else f"the file of layer {number} is not there",
                    where=str(build.files.root / build.files.tag),
                    why=f"{model.path} has its parameter {local}",
                    fix=f"copy layer_{int(number):02d}-model_states.pt from where the run saved it",
                )


def _stages(models: dict[int, ModelFile], layers: dict[int, dict[str, Shape]]) -> dict[int, dict[str, Shape]]:
    """Which layers' parameters each stage has, where its optimizer is whole and names none: by how many it has.

    Layers go to stages in order. Damaged where the numbers do not end at a layer's end.
    """
    rest = [(f"{layer}.{n}", s) for layer, own in sorted(layers.items()) for n, s in own.items()]
    out: dict[int, dict[str, Shape]] = {}
    for mp, model in sorted(models.items()):
        if not isinstance(model.optimizer, dict):
            continue
        number = _count(model)
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
    asked = sum(_count(m) for m in models.values())
    held = sum(map(len, layers.values()))
    if asked and asked != held:
        raise Damaged(
            f"the stages' optimizers have {asked} parameters, the layers' files {held}",
            where=models[min(models)].path,
            why="a layer's file is not there, or some parameters are frozen or tied: which, is in no file",
            code="zero-layout",
        )
    return out


def _count(model: ModelFile) -> int:
    """Parameters of a stage's whole optimizer."""
    if not isinstance(model.optimizer, dict):
        return 0
    inner = model.optimizer.get("optimizer_state_dict", model.optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return sum(len(g.get("params", ())) for g in groups or () if isinstance(g, dict))


def renamed(build: Build, names: dict[str, str]) -> None:
    """A pipeline's tensors under the family's names, everywhere."""
    if not names:
        return

    def named(name: str) -> str:
        return names.get(name, name)

    count = len(build.tensors)
    build.tensors = {
        k._replace(name=named(k.name)): replace(t, key=k._replace(name=named(k.name))) for k, t in build.tensors.items()
    }
    if len(build.tensors) != count:
        twice = sorted(n for n, c in Counter(names.values()).items() if c > 1)
        raise Usage(f"two parameters would be called {(twice or ['the same'])[0]}", code="layer-names")
    build.groups = [Group(tuple(map(named, g.params)), g.options) for g in build.groups]
    build.scalars = {(named(n), kind): v for (n, kind), v in build.scalars.items()}
    build.ties = {named(a): named(b) for a, b in build.ties.items()}
