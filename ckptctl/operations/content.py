"""What a conversion takes from its source.

Which weights and states, under which type, and what becomes of every other part.

Pure choice: no bytes are read, no format is named. The report's lines are made here, so that nothing is left out
without a word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import ADAPTER, EMA, MASTER, OTHER, WEIGHTS, Checkpoint, Optimizer, is_state, part_of
from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import MissingFact, StateNotCarried, Unsupported, Usage
from ckptctl.core.tensor import Key, Tensor
from ckptctl.core.values import Record, Tree, holds_array
from ckptctl.formats import TARGETS
from ckptctl.formats.target import Content, Item, Line, Target
from ckptctl.names import absent_head, head_and_embedding, is_tied, quantized_by_names
from ckptctl.operations.opening import require_data, require_names

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_CHOICES = ("source", "float32", "bfloat16", "float16")
WEIGHT_CHOICES = ("model", "master")
NAME_CHOICES = ("module5", "module4", "disk")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion is to make. The defaults are those of the command line."""

    to: str
    dtype: str = "source"
    weights: str = "model"
    no_optimizer: bool = False
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    trainable_only: bool = False
    max_shard_size: str = "5GB"
    dp: int | None = None
    tp: int | None = None
    index_keys: bool = False
    bare: bool = False
    merge_adapter: tuple[str, ...] = ()
    """Folders of adapters that are merged into the weights, in order."""
    names: str | None = None
    module_prefix: str | None = None
    zero_stage: int | None = None
    universal: bool = False
    pp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    megatron_format: str | None = None
    optimizer: str | None = None
    vocab_divisor: int | None = None
    layer_spec: str | None = None

    @property
    def target(self) -> Target:
        """What the target can hold. Only once check_flags has seen that there is such a one."""
        return TARGETS[self.to]


LAYOUT_FLAGS = (
    "dp", "tp", "pp", "vpp", "ep", "megatron_format", "optimizer", "vocab_divisor", "layer_spec", "index_keys", "bare",
    "names", "module_prefix", "zero_stage", "universal",
)  # fmt: skip
"""Fields of Conversion that are not for every target. max_shard_size has a default: it never contradicts."""


def check_flags(wanted: Conversion) -> None:
    """Usage for flags that do not exist or contradict each other."""
    if wanted.to not in TARGETS:
        raise Usage(f"--to {wanted.to}: there is no such target", fix=f"this version writes {', '.join(TARGETS)}")
    if wanted.dtype not in DTYPE_CHOICES:
        raise Usage(f"--dtype {wanted.dtype}: there is no such choice", fix=f"one of {', '.join(DTYPE_CHOICES)}")
    if wanted.weights not in WEIGHT_CHOICES:
        raise Usage(f"--weights {wanted.weights}: there is no such choice", fix=f"one of {', '.join(WEIGHT_CHOICES)}")
    if wanted.zero_stage not in (None, 1, 2, 3):
        raise Usage(f"--zero-stage {wanted.zero_stage}: there is no such stage to write", fix="one of 1, 2, 3")
    if wanted.names not in (None, *NAME_CHOICES):
        raise Usage(f"--names {wanted.names}: there is no such choice", fix=f"one of {', '.join(NAME_CHOICES)}")
    for name in LAYOUT_FLAGS:
        if getattr(wanted, name) and name not in wanted.target.flags:
            flag = f"--{name.replace('_', '-')}"
            takers = ", ".join(t for t, target in TARGETS.items() if name in target.flags)
            raise Usage(f"{flag} is for --to {takers}, not for --to {wanted.to}", fix=f"leave {flag} out")


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
    weights = _weights(source, wanted, lines)
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
        _movable(states.values())
        states = _selected_states(states, weights, source, wanted, lines)
        states = _masters_once(states, weights, lines)
        optimizer = _selected_groups(source.optimizer, weights, states, wanted)
    else:
        _dropped(source, states, wanted, lines)
        states, optimizer = {}, None
    values = _values(source, wanted, lines)
    if keep:
        _kept(source, states, scalars, optimizer, lines)
    collapsed = _collapsed(source, weights, wanted, lines)
    made = _second_name(source, weights, wanted, lines)
    ties = {a: o for a, o in source.ties.items() if a in weights and o in weights and a not in collapsed} | made
    _movable(held.values())
    own = [f.path for f in source.files if f.role == "own"]
    if own and wanted.to != source.format:
        lines.append(Line("other files", "dropped", f"{', '.join(own)}: {wanted.target.called} has no place for it"))
    model_values = _model_values(source, wanted)
    return Content(source, weights, states, optimizer, values, model_values, held, ties, collapsed), lines


def _model_values(source: Checkpoint, wanted: Conversion) -> dict[str, Tree]:
    """What stands among the weights and is no tensor. Unsupported where a target would lose a tensor inside it."""
    chosen = {n: v for n, v in source.model_values.items() if _chosen(n, wanted)}
    if not wanted.target.is_folder_of_weights:
        return chosen
    for name, value in chosen.items():
        if holds_array(value):
            raise Unsupported(
                f"{name} holds a tensor and is none: {wanted.target.called} has no place for it",
                where=source.root,
                why=f"it is an object of class {value.cls}" if isinstance(value, Record) else "",
                fix=f"leave it out with --exclude '{name}', or convert to torch or dcp",
            )
    return {}


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, g) for g in globs)


def _chosen(name: str, wanted: Conversion) -> bool:
    return (not wanted.only or _matches(name, wanted.only)) and not _matches(name, wanted.exclude)


def _weights(source: Checkpoint, wanted: Conversion, lines: list[Line]) -> dict[str, Item]:
    out: dict[str, Item] = {}
    left, masters, untrained = 0, 0, 0
    updated = _updated(source)
    for key, tensor in source.tensors.items():
        if key.kind not in WEIGHTS:
            continue
        if not _chosen(key.name, wanted):
            left += 1
            continue
        if wanted.trainable_only and key.name not in updated:
            untrained += 1
            continue
        owner = source.ties.get(key.name, key.name)
        master = source.tensors.get(Key(owner, MASTER)) if wanted.weights == "master" else None
        masters += master is not None and owner == key.name
        used = master or tensor
        out[key.name] = Item(used.key, used, _dtype(used, wanted.dtype))
    _unmatched(source, wanted)
    if not out:
        raise MissingFact(
            "no weight is left to write",
            why=f"{left} are left out by --only and --exclude, {untrained} by --trainable-only",
            fix="check the patterns with `ckptctl ls`",
            code="no-tensors",
        )
    _movable(out.values())
    require_data(source, out)
    casts: Counter[tuple[str, str]] = Counter()
    for item in out.values():
        if item.dtype.name != item.tensor.held.name:
            casts[item.tensor.held.name, item.dtype.name] += 1
    small = sum(i.dtype.name.startswith("float") and not i.dtype.is_float for i in out.values())
    nbytes = sum(i.nbytes for i in out.values())
    taken = f"{len(out)} tensors, {nbytes} bytes"
    if wanted.weights == "master":
        taken += f"; {masters} masters, {len(out) - masters} weights as stored"
    merged = sum(i.tensor.made is not None for i in out.values())
    if merged:
        taken += f"; {merged} of them merged with an adapter"
    derived = sum(i.tensor.cast_from is not None for i in out.values())
    if derived:
        taken += f"; {derived} are stored as masters only"
    if casts:
        how = ", ".join(f"{n} cast {a} -> {b}, {_how(a, b)}" for (a, b), n in casts.items())
        lines.append(Line("weights", "converted", f"{taken}; {how}"))
    else:
        lines.append(Line("weights", "converted" if merged else "carried", taken))
    if small and wanted.dtype != "source":
        lines.append(
            Line("weights", "carried", f"{small} tensors of less than 16 bits keep their type: --dtype is not for them")
        )
    if left:
        lines.append(Line("weights", "dropped", f"{left} tensors, left out by --only or --exclude"))
    if untrained:
        lines.append(
            Line("weights", "dropped", f"{untrained} tensors that the optimizer does not update (--trainable-only)")
        )
    if source.quantized:
        _together(source, out)
        if wanted.dtype != "source":
            raise Unsupported(
                f"--dtype {wanted.dtype}: the weights are quantized ({source.quantized})",
                why="their numbers mean nothing without their scales",
                fix="leave --dtype out: they are copied byte for byte",
            )
        lines.append(Line("quantization", "carried", f"{source.quantized}: packed tensors are copied byte for byte"))
    return out


def _together(source: Checkpoint, weights: dict[str, Item]) -> None:
    """Mark the tensors of each quantized weight as one module. Unsupported where some of its tensors are left out."""
    _, modules = quantized_by_names(k.name for k in source.tensors if k.kind in WEIGHTS)
    taken = {m for n, m in modules.items() if n in weights}
    for name, module in modules.items():
        if name in weights:
            weights[name] = replace(weights[name], module=module)
        elif module in taken:
            raise Unsupported(
                f"{name} is left out, and other tensors of {module} are not",
                where=source.root,
                why=f"the weight is quantized ({source.quantized}): its numbers mean nothing without their scales",
                fix=f"leave out all of them, '{module}.*', or none",
                code="quantized-parts",
            )


def _updated(source: Checkpoint) -> set[str]:
    """Weights that the optimizer updates: those with state, and the other names of the same weight."""
    out = {k.name for k in source.tensors if is_state(k) and k.kind not in (OTHER, EMA)}
    pairs = list(source.ties.items())
    pair = tied_pair(source, {k.name: k for k in source.tensors if k.kind in WEIGHTS})
    for alias, owner in [*pairs, *([pair] if pair else [])]:
        if alias in out or owner in out:
            out |= {alias, owner, *(a for a, o in pairs if o == owner)}
    return out


_EXACT = {
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float64"),
    ("float16", "float64"),
    ("float32", "float64"),
}


def _how(source: str, target: str) -> str:
    """What a cast does to values."""
    if (source, target) in _EXACT:
        return "exact"
    beyond = ", values beyond its range become infinite" if target == "float16" else ""
    return f"rounded to nearest even{beyond}"


def _unmatched(source: Checkpoint, wanted: Conversion) -> None:
    """A pattern that matches nothing is a typing mistake more often than not."""
    names = [*(k.name for k in source.tensors if k.kind in WEIGHTS), *source.model_values]
    for flag, globs in (("--only", wanted.only), ("--exclude", wanted.exclude)):
        for g in globs:
            if not any(fnmatchcase(n, g) for n in names):
                raise Usage(f"{flag} {g!r} matches no tensor", fix="see the names with `ckptctl ls`")


def _dtype(tensor: Tensor, choice: str) -> DType:
    return tensor.dtype if choice == "source" or not tensor.dtype.is_float else BY_NAME[choice]


def _movable(items: object) -> None:
    for item in items:  # type: ignore[attr-defined]
        if item.tensor.why_unsupported:
            raise Unsupported(
                f"{item.key.name} ({item.key.kind}) cannot be moved",
                why=item.tensor.why_unsupported,
                fix=f"leave it out with --exclude '{item.key.name}'",
            )


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
    kept = {k: i for k, i in states.items() if k[0] in weights or (k[0] not in names and _chosen(k[0], wanted))}
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
    if pair is None or pair[1] not in weights or not _chosen(pair[0], wanted):
        return {}
    weights[pair[0]] = weights[pair[1]]
    lines.append(
        Line("tied weights", "filled", f"{pair[0]} is {pair[1]} (tie_word_embeddings): written under both names")
    )
    return {pair[0]: pair[1]}


def tied_pair(source: Checkpoint, names: Mapping[str, object]) -> tuple[str, str] | None:
    """(head, embedding) where the config ties them and both are there under their own bytes or one's."""
    config = source.facts.config
    if config is None or not is_tied(config):
        return None
    return head_and_embedding(names)


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
