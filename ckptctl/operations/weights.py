"""Which weights a conversion takes, and under which type. Pure choice: no bytes are read, no format is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, MASTER, OTHER, WEIGHTS, Checkpoint, is_state
from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import MissingFact, Unsupported, Usage
from ckptctl.core.tensor import Key, Tensor
from ckptctl.formats.target import Item, Line
from ckptctl.names import head_and_embedding, is_tied, quantized_by_names
from ckptctl.operations.opening import require_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptctl.operations.conversion import Conversion


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, g) for g in globs)


def chosen(name: str, wanted: Conversion) -> bool:
    """Whether --only and --exclude leave a name in."""
    return (not wanted.only or _matches(name, wanted.only)) and not _matches(name, wanted.exclude)


def chosen_weights(source: Checkpoint, wanted: Conversion, lines: list[Line]) -> dict[str, Item]:
    """The weights to write by name. Adds the report's lines; errors as `content.content_of`."""
    out: dict[str, Item] = {}
    left, masters, untrained = 0, 0, 0
    updated = _updated(source)
    for key, tensor in source.tensors.items():
        if key.kind not in WEIGHTS:
            continue
        if not chosen(key.name, wanted):
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
    require_movable(out.values())
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


def require_movable(items: Iterable[Item]) -> None:
    """Unsupported for a tensor that the source names and that cannot be moved."""
    for item in items:
        if item.tensor.why_unsupported:
            raise Unsupported(
                f"{item.key.name} ({item.key.kind}) cannot be moved",
                why=item.tensor.why_unsupported,
                fix=f"leave it out with --exclude '{item.key.name}'",
            )


def tied_pair(source: Checkpoint, names: Mapping[str, object]) -> tuple[str, str] | None:
    """(head, embedding) where the config ties them and both are there under their own bytes or one's."""
    config = source.facts.config
    if config is None or not is_tied(config):
        return None
    return head_and_embedding(names)
