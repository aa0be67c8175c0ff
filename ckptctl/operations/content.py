"""What a conversion takes from its source.

Which weights and states, under which type, and what becomes of every other part.

Pure choice: no bytes are read, no format is named. The report's lines are made here, so that nothing is left out
without a word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import ADAPTER, EMA, MASTER, OTHER, WEIGHTS, Checkpoint, Optimizer, is_state, part_of
from ckptctl.core.errors import MissingFact, StateNotCarried, Unsupported
from ckptctl.core.values import Record, Tree, holds_array
from ckptctl.formats.target import Content, Item, Line
from ckptctl.formats.torchgroups import completed
from ckptctl.names import absent_head
from ckptctl.operations.opening import require_names
from ckptctl.operations.weights import chosen, chosen_weights, require_movable, tied_pair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.operations.conversion import Conversion


def content_of(source: Checkpoint, wanted: Conversion, *, own_names: bool = False) -> tuple[Content, list[Line]]:
    """The tensors and values to write, and the report's lines about them.

    Raises StateNotCarried where the target has no place for states and --no-optimizer is not given; Unsupported for
    tensors that cannot be moved; MissingFact where nothing is left, or state has numbers and no names. own_names: the
    target keeps the source's own names, so that none are needed.
    """
    keep = not wanted.no_optimizer and wanted.target.holds_state
    if (keep and not own_names) or wanted.trainable_only:
        require_names(source)
    if wanted.target.is_folder_of_weights and len(source.modules) > 1:
        raise MissingFact(
            f"the source holds {len(source.modules)} models, and {wanted.target.called} holds one",
            where=source.root,
            why=f"they are {', '.join(source.modules)}",
            fix=f"take one of them: --module {source.modules[0]}",
            code="several-models",
        )
    lines: list[Line] = []
    weights = chosen_weights(source, wanted, lines)
    states = {
        (k.name, k.kind): Item(k, t, t.dtype) for k, t in source.tensors.items() if is_state(k) and k.kind != OTHER
    }
    held = {(k.name, k.kind): Item(k, t, t.dtype) for k, t in source.tensors.items() if k.kind == OTHER}
    scalars = dict(source.optimizer.scalars) if source.optimizer else {}
    if not wanted.target.holds_state:
        _refuse_losing(source, wanted, {**states, **held})
        lines += [Line("other tensors", "dropped", f"{len(held)} tensors: --no-optimizer")] if held else []
        held = {}
    if keep:
        _refuse_averages(states, source, wanted)
        require_movable(states.values())
        states = _selected_states(states, weights, source, wanted, lines)
        states = _masters_once(states, weights, lines)
        optimizer = _selected_groups(source.optimizer, weights, states, wanted)
        if wanted.target.torch_groups and wanted.to != source.format:
            optimizer, lacked = completed(optimizer)
            if lacked:
                what = "amsgrad, maximize, ...: the source's Adam has no such settings, torch's loads none without"
                lines.append(Line("group settings", "filled", what))
    else:
        _dropped(source, states, wanted, lines)
        states, optimizer = {}, None
    values = _values(source, wanted, lines)
    if keep:
        _kept(source, states, scalars, optimizer, lines)
    collapsed = _collapsed(source, weights, wanted, lines)
    made = _second_name(source, weights, wanted, lines)
    ties = {a: o for a, o in source.ties.items() if a in weights and o in weights and a not in collapsed} | made
    require_movable(held.values())
    own = [f.path for f in source.files if f.role == "own"]
    if own and wanted.to != source.format:
        lines.append(Line("other files", "dropped", f"{', '.join(own)}: {wanted.target.called} has no place for it"))
    model_values = _model_values(source, wanted)
    return Content(source, weights, states, optimizer, values, model_values, held, ties, collapsed), lines


def _model_values(source: Checkpoint, wanted: Conversion) -> dict[str, Tree]:
    """What stands among the weights and is no tensor. Unsupported where a target would lose a tensor inside it."""
    kept = {n: v for n, v in source.model_values.items() if chosen(n, wanted)}
    if not wanted.target.is_folder_of_weights:
        return kept
    for name, value in kept.items():
        if holds_array(value):
            raise Unsupported(
                f"{name} holds a tensor and is none: {wanted.target.called} has no place for it",
                where=source.root,
                why=f"it is an object of class {value.cls}" if isinstance(value, Record) else "",
                fix=f"leave it out with --exclude '{name}', or convert to torch or dcp",
            )
    return {}


def _refuse_losing(source: Checkpoint, wanted: Conversion, states: Mapping[tuple[str, str], Item]) -> None:
    kinds = sorted({kind for _, kind in states if kind != "step"})
    kinds += [n for n, v in source.values.items() if part_of(n) == "other" and holds_array(v)]
    if kinds and not wanted.no_optimizer:
        raise StateNotCarried(
            f"{wanted.target.called} has no place for the training state ({', '.join(kinds)})",
            where=source.root,
            why=f"{len(states)} tensors of it would be lost" if states else "the tensors in it would be lost",
            fix="add --no-optimizer to let it go, or convert to torch or dcp, which keep it",
        )


def _refuse_averages(states: Mapping[tuple[str, str], Item], source: Checkpoint, wanted: Conversion) -> None:
    averaged = sum(kind == EMA for _, kind in states)
    if averaged and not wanted.target.holds_averages:
        raise StateNotCarried(
            f"{wanted.target.called} has no place for averaged weights (EMA)",
            where=source.root,
            why=f"{averaged} tensors of them would be lost",
            fix="convert to torch or dcp, which keep them, or add --no-optimizer to let all training state go",
        )


def _selected_states(
    states: dict[tuple[str, str], Item],
    weights: Mapping[str, Item],
    source: Checkpoint,
    wanted: Conversion,
    lines: list[Line],
) -> dict[tuple[str, str], Item]:
    names = {k.name for k in source.tensors if k.kind in WEIGHTS}
    kept = {k: i for k, i in states.items() if k[0] in weights or (k[0] not in names and chosen(k[0], wanted))}
    if len(kept) < len(states):
        lines.append(
            Line("optimizer state", "dropped", f"{len(states) - len(kept)} tensors of weights that are left out")
        )
    return kept


def _masters_once(
    states: dict[tuple[str, str], Item], weights: Mapping[str, Item], lines: list[Line]
) -> dict[tuple[str, str], Item]:
    """States without the masters that are written as the weights, unchanged: they would stand there twice."""
    twice = set()
    for (name, kind), item in states.items():
        weight = weights.get(name)
        if kind != MASTER or weight is None or weight.dtype != item.dtype:
            continue
        if weight.key == item.key or weight.tensor.cast_from is not None:  # the same tensor, or a name for it
            twice.add((name, kind))
    if twice:
        lines.append(Line(MASTER, "carried", f"{len(twice)} tensors: they are the weights"))
    return {key: item for key, item in states.items() if key not in twice}


def _selected_groups(
    optimizer: Optimizer | None, weights: Mapping[str, Item], states: Mapping[tuple[str, str], Item], wanted: Conversion
) -> Optimizer | None:
    if optimizer is None or not (wanted.only or wanted.exclude or wanted.trainable_only):
        return optimizer
    have = set(weights) | {name for name, _ in states}
    groups = tuple(replace(g, params=tuple(p for p in g.params if p in have)) for g in optimizer.groups)
    scalars = {k: v for k, v in optimizer.scalars.items() if k[0] in have}
    return replace(optimizer, groups=groups, scalars=scalars)


def _dropped(source: Checkpoint, states: Mapping[tuple[str, str], Item], wanted: Conversion, lines: list[Line]) -> None:
    why = "--no-optimizer" if wanted.no_optimizer else f"{wanted.target.called} has no place for it"
    for kind, n in Counter(kind for _, kind in states).items():
        lines.append(Line(kind, "dropped", f"{n} tensors: {why}"))
    if source.optimizer is not None and source.optimizer.groups:
        lines.append(Line("param groups", "dropped", why))
    if source.optimizer is None and not states:
        lines.append(Line("optimizer state", "absent", "the source has none"))


def _kept(
    source: Checkpoint,
    states: Mapping[tuple[str, str], Item],
    scalars: Mapping[tuple[str, str], object],
    optimizer: Optimizer | None,
    lines: list[Line],
) -> None:
    counts: dict[str, list[Item]] = {}
    for (_, kind), item in states.items():
        counts.setdefault(kind, []).append(item)
    for kind, items in counts.items():
        dtypes = ", ".join(sorted({i.dtype.name for i in items}))
        lines.append(Line(kind, "carried", f"{len(items)} tensors, {sum(i.nbytes for i in items)} bytes, {dtypes}"))
    for kind, n in Counter(kind for _, kind in scalars).items():
        lines.append(Line(kind, "carried", f"{n} values"))
    if optimizer is None:
        lines.append(Line("optimizer state", "absent", "the source has none"))
    elif optimizer.groups:
        order = (
            ""
            if optimizer.order_known
            else "; put together by equal settings, in the model's order: the source keeps no groups"
        )
        lines.append(
            Line(
                "param groups",
                "carried",
                f"{len(optimizer.groups)} groups of {sum(len(g.params) for g in optimizer.groups)} parameters"
                f"{_joined(optimizer)}{order}",
            )
        )
    else:
        lines.append(Line("param groups", "absent", "the source has none"))


def _joined(optimizer: Optimizer) -> str:
    owners = {g.owner for g in optimizer.groups}
    return f", of {len(owners)} optimizers, one after the other" if len(owners) > 1 else ""


def _values(source: Checkpoint, wanted: Conversion, lines: list[Line]) -> dict[str, object]:
    out: dict[str, object] = {}
    by_part: dict[str, list[str]] = {}
    for name, value in source.values.items():
        part = part_of(name)
        by_part.setdefault(part, []).append(name)
        held = wanted.target.holds_state and not (wanted.no_optimizer and part != "other")
        if held or (name == ADAPTER and source.adapter):
            out[name] = value
    for part in ("scheduler", "rng", "counters", "other"):
        names = by_part.get(part, [])
        label = {"rng": "random state", "other": "other values"}.get(part, part)
        if not names:
            if part != "other" and part not in map(part_of, source.native):
                lines.append(Line(label, "absent", "the source has none"))
            continue
        kept = [n for n in names if n in out]
        why = (
            "--no-optimizer"
            if wanted.no_optimizer and part != "other"
            else f"{wanted.target.called} has no place for it"
        )
        lines.append(
            Line(label, "carried" if kept else "dropped", ", ".join(names) if kept else f"{', '.join(names)}: {why}")
        )
    lines += _native(source, wanted)
    if source.model_values:
        fate = "dropped" if wanted.target.is_folder_of_weights else "carried"
        lines.append(
            Line(
                "values among the weights",
                fate,
                ", ".join(list(source.model_values)[:4])
                + (": not weights" if wanted.target.is_folder_of_weights else ""),
            )
        )
    return out


def _native(source: Checkpoint, wanted: Conversion) -> list[Line]:
    """What becomes of things that only the source's own format holds, where the target is another.

    Into its own format it is the writer that says what became of them.
    """
    if source.format == wanted.to:
        return []
    lines = []
    if source.native:
        why = f"only {source.format} checkpoints have them, for their own mesh"
        lines.append(Line("the run's own values", "dropped", f"{', '.join(source.native)}: {why}"))
    if source.padding:
        rows = ", ".join(f"{t.shape[0]} rows after {k.name}" for k, t in source.padding.items() if k.kind in WEIGHTS)
        lines.append(Line("vocabulary padding", "dropped", f"{rows}, and their states: not in the true vocabulary"))
    return lines


def _second_name(source: Checkpoint, weights: dict[str, Item], wanted: Conversion, lines: list[Line]) -> dict[str, str]:
    """A tied head that the source leaves out, for targets whose loaders want both names.

    Added to weights; returned as {head: embedding}.
    """
    config = source.facts.config
    pair = (
        absent_head((k.name for k in source.tensors if k.kind in WEIGHTS), config)
        if config and not wanted.target.is_folder_of_weights
        else None
    )
    if pair is None or pair[1] not in weights or not chosen(pair[0], wanted):
        return {}
    weights[pair[0]] = weights[pair[1]]
    lines.append(
        Line("tied weights", "filled", f"{pair[0]} is {pair[1]} (tie_word_embeddings): written under both names")
    )
    return {pair[0]: pair[1]}


def _collapsed(
    source: Checkpoint, weights: Mapping[str, Item], wanted: Conversion, lines: list[Line]
) -> frozenset[str]:
    """Aliases that a Hugging Face folder leaves out, since its config ties them.

    Equality of separate copies is checked before by value.
    """
    pair = tied_pair(source, weights) if wanted.target.is_folder_of_weights else None
    out = set()
    if pair is not None:
        out.add(pair[0])
        lines.append(Line("tied weights", "carried", f"{pair[0]} is {pair[1]} (tie_word_embeddings), stored once"))
    for alias, owner in source.ties.items():
        if alias in weights and owner in weights and alias not in out and wanted.target.is_folder_of_weights:
            lines.append(Line("tied weights", "filled", f"{alias} has a copy of {owner}: no config ties them"))
    return frozenset(out)
