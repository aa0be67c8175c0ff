"""--merge-adapter: a checkpoint whose weights are computed from a base and LoRA adapters when they are written.

Decides which weight each tensor of an adapter belongs to; nothing is read or computed here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, OTHER, WEIGHTS, Checkpoint, Facts, File, is_state
from ckptctl.core.errors import Damaged, StateNotCarried, Unsupported, Usage
from ckptctl.core.tensor import Key, PieceTable, Product, Source, Sum, Tensor
from ckptctl.formats.hf.adapter import Adapted, Factors, adapted
from ckptctl.formats.hf.lora import require_plain, scale
from ckptctl.formats.target import Line
from ckptctl.names import absent_head, is_tied
from ckptctl.names.table import table
from ckptctl.operations.opening import open_checkpoint, require_one_source, require_safe, require_tensors
from ckptctl.operations.weights import tied_pair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptctl.operations.conversion import Conversion


@dataclass
class _Merging:
    """A base while adapters are put on it: what each weight starts from, and what is added to it."""

    source: Checkpoint
    weights: dict[str, Tensor]
    """Every weight by name, its master where those are wanted; a tied head that is not stored is its embedding."""
    owners: dict[str, str]
    """Name to the name that has the same bytes by a tie."""
    head: str = ""
    sources: list[Source] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    whole: dict[str, Tensor] = field(default_factory=dict)
    products: dict[str, list[Product]] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    """Names that no longer share bytes with what they are tied to."""

    def sharing(self, name: str) -> list[str]:
        """All names of one weight, this one first."""
        owner = self.owners.get(name, name)
        return [name, *(n for n in self.weights if n != name and self.owners.get(n, n) == owner)]


def merged(source: Checkpoint, folders: Sequence[Path | str], wanted: Conversion) -> tuple[Checkpoint, list[Line]]:
    """The base with adapters merged into it, in order, and the report's lines about them.

    Raises StateNotCarried where the base has an optimizer's state and --no-optimizer is not given: its moments are not
    those of merged weights. Unsupported, naming it, for what cannot be merged exactly; Damaged where an adapter
    contradicts itself or the base.
    """
    _require_base(source, wanted)
    config = source.facts.config or {}
    weights = {k.name: t for k, t in source.tensors.items() if k.kind in WEIGHTS}
    if wanted.weights == "master":
        weights |= {n: m for n in weights if (m := source.tensors.get(Key(n, MASTER))) is not None}
    owners = dict(source.ties)
    pair = tied_pair(source, weights)
    absent = absent_head(weights, config) if config else None
    if pair is not None:
        owners.setdefault(pair[0], pair[1])
    if absent is not None:
        weights[absent[0]] = weights[absent[1]]
        owners[absent[0]] = absent[1]
    out = _Merging(source, weights, owners, absent[0] if absent else "")
    lines = [_put(out, Path(folder), number) for number, folder in enumerate(folders)]
    facts, more = _untied(out)
    return _checkpoint(out, wanted, facts), [*lines, *more]


def _require_base(source: Checkpoint, wanted: Conversion) -> None:
    states = sorted({k.kind for k in source.tensors if is_state(k) and k.kind not in (OTHER, "step")})
    if (states or (source.optimizer and source.optimizer.groups)) and not wanted.no_optimizer:
        raise StateNotCarried(
            f"the base has an optimizer's state ({', '.join(states) or 'param groups'})",
            where=source.root,
            why="it is not that of the merged weights",
            fix="add --no-optimizer to let it go",
        )
    why = f"its weights are quantized ({source.quantized})" if source.quantized else ""
    why = why or ("it is an adapter itself" if source.adapter else "")
    if why:
        raise Unsupported("adapters cannot be merged into this base", where=source.root, why=why, code="merge-base")


def _put(out: _Merging, folder: Path, number: int) -> Line:
    """Read one adapter and note what it does to which weight."""
    adapter, evidence = open_checkpoint(folder)
    require_safe(adapter)
    require_tensors(adapter)
    require_one_source(evidence)
    config = adapter.adapter
    if config is None:
        raise Usage(
            f"--merge-adapter {folder}: this is no adapter",
            why=f"it is a {adapter.format} checkpoint without adapter_config.json",
            fix="give the folder that holds adapter_config.json",
        )
    where = str(folder)
    require_plain(config, where)
    tensors = _operands(out, adapter, number)
    found = adapted(tensors)
    _require_known(out, found, where)
    separate = tuple(map(str, config.get("modules_to_save") or ()))
    for name, own in found.whole.items():
        _whole(out, name, tensors[own], separate, where)
    turned = _orientation(out, found, tensors, config, where)
    for module, factors in found.factors.items():
        name = f"{module}.weight"
        product = _product(out, module, factors, tensors, config, turned[module], where)
        out.products.setdefault(name, []).append(product)
        _part(out, name)
    said = [f"{len(found.factors)} weights = base + scale * (B @ A), in float64, rounded once"] if found.factors else []
    said += [f"{len(found.whole)} tensors taken whole: {', '.join(list(found.whole)[:3])}"] if found.whole else []
    return Line("adapter", "converted", f"{folder}: {'; '.join(said)}")


def _operands(out: _Merging, adapter: Checkpoint, number: int) -> dict[str, Tensor]:
    """The adapter's tensors by name, their pieces in sources that are counted after those known so far.

    Paths are absolute: they do not lie below the base's folder.
    """
    root, before = Path(adapter.root).absolute(), len(out.source.sources) + len(out.sources)
    paths = {s.path: str(root / s.path) if s.path else str(root) for s in adapter.sources}
    out.sources += [replace(s, path=paths[s.path]) for s in adapter.sources]
    out.files += [replace(f, path=paths[f.path]) for f in adapter.files if f.path in paths]
    if "" in paths:  # a single file
        out.files += [replace(f, path=paths[""]) for f in adapter.files[:1]]
    made = {}
    for key, tensor in adapter.tensors.items():
        if key.kind not in WEIGHTS:
            continue  # a Trainer's folder has the adapter's optimizer beside it
        if tensor.why_unsupported or not tensor.dtype.is_float:
            raise Unsupported(
                f"{key.name} cannot be merged",
                where=adapter.root,
                why=tensor.why_unsupported or f"its type is {tensor.dtype.name}",
                code="adapter-type",
            )
        own = Key(f"{number}:{key.name}", "weight", "operand")
        pieces = tuple(_moved(t, before) for t in tensor.pieces)
        made[key.name] = replace(tensor, key=own, pieces=pieces, replicas=())
    return made


def _moved(table: PieceTable, by: int) -> PieceTable:
    return replace(table, source=table.source + by)


def _require_known(out: _Merging, found: Adapted, where: str) -> None:
    """Every tensor of the adapter belongs to a weight of the base, or the merge would lose it in silence."""
    if found.other:
        raise Unsupported(
            f"{len(found.other)} tensors of the adapter are neither LoRA factors nor whole weights",
            where=where,
            why=", ".join(found.other[:5]),
            fix="merge it with PEFT (merge_and_unload), then convert the result",
            code="adapter-names",
        )
    lost = [m for m in found.factors if f"{m}.weight" not in out.weights]
    lost += [n for n in found.whole if n not in out.weights]
    if lost:
        raise Damaged(
            f"{len(lost)} modules of the adapter are not in the base",
            where=where,
            why=", ".join(lost[:5]) + (", ..." if len(lost) > 5 else ""),
            fix="give the base that the adapter was trained on, under Hugging Face names (see `ckptctl ls`)",
            code="adapter-unmatched",
        )


def _whole(out: _Merging, name: str, tensor: Tensor, separate: Sequence[str], where: str) -> None:
    """A tensor that takes the place of the base's.

    One of modules_to_save is a copy of its own, which frees a tied weight; any other is the shared weight itself.
    """
    base = out.weights[name]
    if tensor.shape != base.shape or not base.dtype.is_float:
        raise Unsupported(
            f"the adapter's {name} does not fit the base's",
            where=where,
            why=f"it is {tensor.dtype.name} {tensor.shape}, the base's {base.dtype.name} {base.shape}",
            fix="resize the base as it was for training, then merge",
            code="adapter-shape",
        )
    module = name.rsplit(".", 1)[0]
    if any(module == s or module.endswith("." + s) for s in separate):
        _replace(out, name, tensor)
        _part(out, name)
        return
    for shared in out.sharing(name):
        _replace(out, shared, tensor)


def _replace(out: _Merging, name: str, tensor: Tensor) -> None:
    """What an earlier adapter added is gone: PEFT too puts the later adapter's copy in its place."""
    if out.products.pop(name, None):
        raise Unsupported(
            f"two adapters change {name}, and the second replaces it whole",
            fix="merge one, then the other",
            code="adapter-order",
        )
    out.whole[name] = tensor


def _part(out: _Merging, name: str) -> None:
    """A weight gets values of its own: what it is tied to keeps the old ones."""
    if len(out.sharing(name)) > 1:
        out.apart.add(name)


def _product(
    out: _Merging,
    module: str,
    factors: Factors,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    turned: bool,
    where: str,
) -> Product:
    """One module's product in its weight's own orientation.

    Stored are A (rank, in) and B (out, rank). A linear weight (out, in) adds B @ A. A turned one (in, out) adds its
    transpose, A^T @ B^T; so does an embedding (rows, columns), whose A is (rank, rows) and B (columns, rank).
    """
    first, second = tensors[factors.first], tensors[factors.second]
    rank = first.shape[0]
    times = scale(config, module, rank, where)
    if turned:
        return Product(first, second, True, True, rank, times)
    return Product(second, first, False, False, rank, times)


def _orientation(
    out: _Merging, found: Adapted, tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str
) -> dict[str, bool]:
    """For each module whether its weight is stored turned (in, out): by shape, and where it is square by its kind.

    fan_in_fan_out alone does not tell: PEFT sets it anew for each module by its class and saves the last one.
    Source: peft 0.21.2, tuners/lora/layer.py, dispatch_default.
    """
    turned: dict[str, bool] = {}
    square = []
    for module, f in found.factors.items():
        base, a, b = out.weights[f"{module}.weight"], tensors[f.first].shape, tensors[f.second].shape
        plain, other = (b[0], a[-1]), (a[-1], b[0])
        fits = len(a) == len(b) == 2 and base.dtype.is_float
        if not fits or (base.shape not in ((other,) if f.embedding else (plain, other))):
            raise Unsupported(
                f"the adapter's factors do not fit {module}.weight",
                where=where,
                why=f"A is {a}, B is {b}, the weight {base.dtype.name} {base.shape}",
                fix="give the base that the adapter was trained on",
                code="adapter-shape",
            )
        if f.embedding:
            turned[module] = True
        elif plain == other:
            square.append(module)
        else:
            turned[module] = base.shape == other
    seen = {turned[m] for m, f in found.factors.items() if m in turned and not f.embedding}
    said = bool(config.get("fan_in_fan_out"))
    family = out.source.facts.family
    stored_turned: dict[str, list[str]] = table("conv1d")  # the modules that are, by model_type
    for module in square:
        if family in stored_turned:
            turned[module] = module.rsplit(".", 1)[-1] in stored_turned[family]
        elif seen <= {said}:
            turned[module] = said
        else:
            raise Unsupported(
                f"{module}.weight is square: whether it is stored (in, out) or (out, in) is in no file",
                where=where,
                why=f"fan_in_fan_out is {said}, other modules of the adapter are stored otherwise",
                fix="merge it with PEFT (merge_and_unload), then convert the result",
                code="adapter-orientation",
            )
    return turned


def _untied(out: _Merging) -> tuple[Facts, list[Line]]:
    """The config, saying that the head is not the embedding any more where that is so."""
    facts = out.source.facts
    config = facts.config
    if not out.apart:
        return facts, []
    changed = ", ".join(sorted(out.apart))
    if config is None or not is_tied(config):
        return facts, [Line("tied weights", "converted", f"{changed}: changed alone, tied no more")]
    new = {**config, "tie_word_embeddings": False}
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("tie_word_embeddings"):
        new["text_config"] = {**text, "tie_word_embeddings": False}
    line = Line("tied weights", "converted", f"{changed}: changed alone; tie_word_embeddings true -> false")
    return Facts(new, (json.dumps(new, indent=2, ensure_ascii=False) + "\n").encode(), facts.origin), [line]


def _checkpoint(out: _Merging, wanted: Conversion, facts: Facts) -> Checkpoint:
    tensors = dict(out.source.tensors)
    untied = bool(out.apart)
    changed = {*out.whole, *out.products}
    if untied:  # a head that was not stored now has bytes of its own, be they the embedding's
        changed |= {n for a in out.apart for n in out.sharing(a) if n == out.head}
    else:
        changed.discard(out.head)  # still the embedding, and still not stored
    for name in changed:
        base = out.weights[name]
        stored = out.whole.get(name, base)
        kind = base.key.kind if name != out.head else "weight"
        key = Key(name, kind)
        operand = replace(stored, key=stored.key._replace(part=stored.key.part or "base"), trainable=None)
        if name in out.products or stored.dtype.name != base.dtype.name:
            made = Sum(operand, tuple(out.products.get(name, ())))
            tensors[key] = Tensor(key, base.dtype, base.shape, (), trainable=base.trainable, made=made)
        else:
            tensors[key] = replace(stored, key=key, trainable=base.trainable)
    ties = {a: o for a, o in out.source.ties.items() if not {a, o} & out.apart and out.whole.get(a) is out.whole.get(o)}
    return replace(
        out.source,
        tensors=tensors,
        sources=(*out.source.sources, *out.sources),
        files=(*out.source.files, *out.files),
        ties=ties,
        facts=facts,
    )
