"""Which naming a checkpoint has, and the way from it to the hub's names and from there to a target's. No format here.

The hub has the names of Hugging Face files. A naming is `disk` (those), `module5` (experts stacked, as Transformers 5
has them in memory) or `torchtitan`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl import names
from ckptctl.core.checkpoint import OTHER, WEIGHTS, Checkpoint
from ckptctl.core.errors import CkptError, Damaged, MissingFact, Unsupported
from ckptctl.core.regroup import regrouped
from ckptctl.core.remake import Made, Native, Recipe, from_hub, remade, to_hub
from ckptctl.core.tensor import Key
from ckptctl.formats.target import Content, Item, Line
from ckptctl.operations.tensors import TensorReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptctl.core.tensor import Tensor
    from ckptctl.operations.conversion import Conversion


def naming_of(checkpoint: Checkpoint) -> str:
    """The naming of a checkpoint: of its optimizer's state where that differs from its weights'."""
    if checkpoint.naming:
        return checkpoint.naming
    every = [k.name for k in checkpoint.tensors if k.kind != OTHER]
    if names.looks_like_torchtitan(k.name for k in checkpoint.tensors if k.kind in WEIGHTS):
        return "torchtitan"
    found = _family(checkpoint)
    if found is None:
        return "disk"
    in_memory = {n.name for n in names.in_memory(found)}
    return "module5" if in_memory.intersection(every) else "disk"


def is_mixed(checkpoint: Checkpoint, naming: str) -> bool:
    """Whether weights and states have names of two namings, as a Trainer's folder does for stacked experts."""
    found = _family(checkpoint)
    if naming != "module5" or found is None:
        return False
    natives = names.in_memory(found)
    weights = {k.name for k in checkpoint.tensors if k.kind in WEIGHTS}
    return any(part.hub.name in weights for n in natives for part in n.parts)


def _family(checkpoint: Checkpoint) -> names.Family | None:
    return None if checkpoint.facts.config is None else names.family(checkpoint.facts.config)


def for_target(source: Checkpoint, wanted: Conversion) -> tuple[Checkpoint, str]:
    """The source under the names that a conversion chooses from, and the naming to give the result (`named_for`).

    A target without names of its own has those that --names says, else those of the source's optimizer, else those on
    disk; one that is loaded into a model as it is named has no use for these last.
    """
    had = naming_of(source)
    naming = wanted.target.naming or wanted.names or ("module5" if had == "module5" else "disk")
    # A run's own names are already those in its memory; a Trainer's folder has a config that says which those are.
    of_files = wanted.target.is_folder_of_weights or had == "megatron" or source.format == "hf"
    if wanted.target.in_memory and not wanted.names and naming == "disk" and of_files and _family(source) is not None:
        naming = _in_memory(source)
    if naming == had and not is_mixed(source, had):
        return fitting_config(source), ""
    return as_hub(source, had, whole=True), naming


def fitting_config(source: Checkpoint) -> Checkpoint:
    """The source, once its config is known to be of its model: where names stay Megatron's, too, which need none.

    The config says what is padding of the vocabulary, and a result carries it. Damaged where it describes another
    model (see as_hub); a warning where its family has no names of Megatron's.
    """
    if source.naming != "megatron" or source.facts.config is None:
        return source
    try:
        as_hub(source, "megatron", whole=True)
    except (MissingFact, Unsupported) as err:
        if _family(source) is not None and err.code != "family-unknown":
            raise
        told = f"whether the config is of this model is not known: {err.what}; of it, vocab_size is used"
        return replace(source, warnings=(*source.warnings, told))
    return source


def _in_memory(source: Checkpoint) -> str:
    """The names in memory of the run's own Transformers: of its optimizer, else by the version in the config."""
    if source.optimizer is not None and source.optimizer.namespace in ("module5", "module4"):
        return source.optimizer.namespace
    version = str((source.facts.config or {}).get("transformers_version") or "")
    return "module4" if version.partition(".")[0] in ("2", "3", "4") else "module5"


def under_one_naming(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints under names that can be compared: their own where these are of one naming, else the hub's."""
    namings = naming_of(a), naming_of(b)
    if namings[0] == namings[1] and not is_mixed(a, namings[0]) and not is_mixed(b, namings[1]):
        return a, b
    return as_hub(a, namings[0]), as_hub(b, namings[1])


def natives_of(checkpoint: Checkpoint, naming: str, present: Iterable[str] = ()) -> list[Native]:
    """The tensors of a naming that are not the hub's.

    MissingFact where they depend on the model's numbers and no config says them.
    """
    if naming in ("", "disk"):
        return []
    found = _family(checkpoint)
    if found is None:
        config = checkpoint.facts.config
        raise MissingFact(
            f"the model's config is needed for {_called(naming)} names"
            if config is None
            else f"{_called(naming)} names of a {checkpoint.facts.family or 'nameless'} model are not known here",
            where=checkpoint.root,
            why="how its heads and experts are arranged is in no file" if config is None else "",
            fix="give the model's config.json with --model-config" if config is None else "give the names by --key-map",
            code="model-config",
        )
    if naming == "torchtitan":
        return names.torchtitan(found, present)
    if naming == "megatron":
        heads = {"output_layer.weight", "lm_head.weight", "embed_out.weight"}
        return names.megatron(found, head=not heads.isdisjoint(present))
    return names.in_memory(found, "module5" if naming == "module5" else "module4")


def _called(naming: str) -> str:
    return {
        "torchtitan": "torchtitan's",
        "megatron": "Megatron's",
        "module5": "Transformers 5's",
        "module4": "Transformers 4's",
    }[naming]


def as_hub(checkpoint: Checkpoint, naming: str, *, whole: bool = False) -> Checkpoint:
    """The checkpoint under the hub's names. Damaged where the config is of another model, by names or shapes.

    whole: also where a Megatron's checkpoint lacks parameters that the config describes.
    """
    present = {k.name for k in checkpoint.tensors}
    natives = natives_of(checkpoint, naming, present)
    if whole and naming == "megatron":
        _require_all(checkpoint, natives, present)
    natives = [n for n in natives if n.name in present]
    if naming in ("torchtitan", "megatron"):
        _require_known(checkpoint, {n.name for n in natives} | set(_kept(present, naming)), naming)
    kept = _kept({k.name for k in checkpoint.tensors if k.kind in WEIGHTS}, naming)
    if kept:
        told = f"{len(kept)} weights of multi-token prediction keep Megatron's names, such as {kept[0]}"
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, told))
    return replace(renamed(checkpoint, to_hub(natives)), naming="")


def _require_all(checkpoint: Checkpoint, natives: Iterable[Native], present: set[str]) -> None:
    family = _family(checkpoint)
    buffers = {b.name for b in family.buffers("disk")} if family is not None else set()
    absent = [n.name for n in natives if n.name not in present and n.parts[0].hub.name not in buffers]
    if absent:
        raise Damaged(
            f"the config describes a model with {len(absent)} more weights than the checkpoint has: {absent[0]}",
            where=checkpoint.root,
            fix="give the config of this model with --model-config",
            code="config-weights-missing",
        )


def _kept(names: Iterable[str], naming: str) -> list[str]:
    """Names that a naming's own models have and the hub has none for: they stay as they are, both ways."""
    return sorted(n for n in names if naming == "megatron" and n.startswith("mtp."))


def under_hub_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under names that a family's tensors have, where its own, or its optimizer's, are others."""
    naming = naming_of(checkpoint)
    if naming in ("", "disk", "module5", "module4") and not is_mixed(checkpoint, naming):
        return checkpoint
    try:
        return as_hub(checkpoint, naming)
    except CkptError:  # without a config its names stay its own, and completeness is not told
        return checkpoint


def _require_known(checkpoint: Checkpoint, known: set[str], naming: str) -> None:
    """Damaged where a weight has a name that is none of the naming's: it would go on under a name that nobody knows."""
    unknown = [k.name for k in checkpoint.tensors if k.kind in WEIGHTS and k.name not in known]
    if unknown:
        raise Damaged(
            f"{len(unknown)} weights have names that {_called(naming)} model has not: {', '.join(unknown[:4])}",
            where=checkpoint.root,
            fix="check the config (--model-config), leave them out where the checkpoint is made, or give --key-map",
            code="names-unknown",
        )


def renamed(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> Checkpoint:
    """The checkpoint with tensors remade. It can no longer be written under its own item names."""
    if not recipes:
        return checkpoint
    made = remade(checkpoint.tensors, recipes)
    equal = [m.olds for m in made.values() if m.equal]
    require_equal(checkpoint, equal)
    plain = {r.taken[0].name: r.name for r in recipes if r.is_rename}
    gone = {t.name for r in recipes for t in r.taken} - set(plain)
    ties = {plain.get(a, a): plain.get(o, o) for a, o in checkpoint.ties.items() if a not in gone and o not in gone}
    optimizer = None if checkpoint.optimizer is None else regrouped(checkpoint.optimizer, recipes)
    tensors = {k: replace(m.tensor, key=k) for k, m in made.items()}
    padding = {k._replace(name=plain.get(k.name, k.name)): t for k, t in checkpoint.padding.items()}
    return replace(checkpoint, tensors=tensors, optimizer=optimizer, ties=ties, entries=(), padding=padding)


def require_equal(checkpoint: Checkpoint, sets: Iterable[tuple[Key, ...]]) -> None:
    """Damaged where numbers differ of which only one is kept, such as the step of experts that become one parameter."""
    with TensorReader(checkpoint) as reader:
        for keys in sets:
            first = reader.array(keys[0]).tobytes()
            other = next((k for k in keys[1:] if reader.array(k).tobytes() != first), None)
            if other is not None:
                raise Damaged(
                    f"{keys[0].name} and {other.name} become one parameter, and their {other.kind} differs",
                    where=checkpoint.root,
                    fix="keep the source's names (--names disk), or let the optimizer go with --no-optimizer",
                    code="scalars-differ",
                )


def named_for(content: Content, naming: str) -> tuple[Content, list[Line]]:
    """What a target is to hold, from the hub's names to its own. Line says what became others."""
    natives = natives_of(content.source, naming, content.weights)
    held = {n for n, _ in content.states} | set(content.weights)
    natives = [n for n in natives if any(p.hub.name in held for p in n.parts)]
    if naming in ("torchtitan", "megatron"):
        known = {p.hub.name for n in natives for p in n.parts}
        _require_nameable(content, known | set(_kept(content.weights, naming)), naming)
    recipes = from_hub(natives)
    if not recipes:
        return content, []
    items = {Key(n): i for n, i in content.weights.items()} | {Key(n, k): i for (n, k), i in content.states.items()}
    made = remade({k: replace(i.tensor, key=k) for k, i in items.items()}, recipes)
    tensors = dict(content.source.tensors)
    weights: dict[str, Item] = {}
    states: dict[tuple[str, str], Item] = {}
    for key, m in made.items():
        item = _item(key, m, items, tensors)
        if key.kind == "weight":
            weights[key.name] = item
        else:
            states[key.name, key.kind] = item
    require_equal(content.source, [tuple(items[o].key for o in m.olds) for m in made.values() if m.equal])
    plain = {r.taken[0].name: r.name for r in recipes if r.is_rename}
    optimizer = None if content.optimizer is None else regrouped(content.optimizer, recipes)
    changed = replace(
        content,
        source=replace(content.source, tensors=tensors, entries=()),
        weights=weights,
        states=states,
        optimizer=optimizer,
        ties={plain.get(a, a): plain.get(o, o) for a, o in content.ties.items()},
    )
    joined = sum(not r.is_rename for r in recipes)
    detail = f"{_called(naming)}: {len(recipes) - joined} renamed, {joined} rearranged or put together, bit for bit"
    return changed, [Line("names", "written", detail)]


def _require_nameable(content: Content, known: set[str], naming: str) -> None:
    unknown = [n for n in content.weights if n not in known]
    family = _family(content.source)
    predicted = {p.name for p in family.extras()} if unknown and family is not None else set()
    if unknown and predicted.issuperset(unknown):
        layers = sorted({n.split(".")[2] for n in unknown if n.startswith("model.layers.")}, key=len)
        raise MissingFact(
            f"{_called(naming)} names of multi-token prediction are not known for {len(unknown)} weights: {unknown[0]}",
            where=content.source.root,
            why="they are layers beyond the model's own, which training alone uses (num_nextn_predict_layers)",
            fix="leave them out with " + " ".join(f"--exclude 'model.layers.{n}.*'" for n in layers),
            code="names-unknown",
        )
    if unknown:
        raise MissingFact(
            f"{_called(naming)} model has no name for {len(unknown)} of the weights: {', '.join(unknown[:4])}",
            where=content.source.root,
            why="they are none of the model's that the config describes",
            fix="leave them out with --exclude, or check the config (--model-config)",
            code="names-unknown",
        )


def _item(key: Key, made: Made, items: Mapping[Key, Item], tensors: dict[Key, Tensor]) -> Item:
    """One item of the target; what is put together becomes a tensor of the source, in place of its parts."""
    first = items[made.olds[0]]
    if made.unchanged:
        return first
    for old in made.olds:
        tensors.pop(items[old].key, None)
    own = Key(key.name, first.key.kind, "made")
    tensors[own] = replace(made.tensor, key=own)
    return Item(own, replace(made.tensor, key=own), first.dtype)


__all__ = ["as_hub", "fitting_config", "for_target", "is_mixed", "named_for", "naming_of", "natives_of", "renamed"]
