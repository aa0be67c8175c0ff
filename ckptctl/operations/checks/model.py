"""A model's tensors against its config: what is missing, of another shape or type, tied and not alike. No values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import WEIGHTS
from ckptctl.core.errors import CkptError
from ckptctl.formats.hf.adapter import adapted, rank_problems
from ckptctl.formats.hf.config import config_dtype
from ckptctl.names import NAMESPACES, family, head_and_embedding, is_tied
from ckptctl.operations.opening import placeholders

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.errors import Severity
    from ckptctl.core.tensor import Tensor
    from ckptctl.names import Family
    from ckptctl.operations.checks.found import Found

_SHOWN = 4
_TRAINED = ("hf", "trainer", "dcp", "torch")


def check_model(found: Found, checkpoint: Checkpoint) -> None:
    """Completeness, shapes, types and ties by the config; an adapter's factors by themselves."""
    if checkpoint.adapter is not None:
        _adapter(found, checkpoint)
        return
    weights = {k.name: t for k, t in checkpoint.tensors.items() if k.kind in WEIGHTS}
    for name in placeholders(checkpoint):
        found.note("placeholders", "the weight has no data", tensor=name, why="its shape is (0,)")
    config = checkpoint.facts.config
    if config is None or not weights or checkpoint.quantized:
        return
    # A part of a model that frameworks add to the true rows (padding) is no tensor of its own here.
    model = family(config)
    if model is not None:
        _family(found, checkpoint, weights, model)
    if checkpoint.format in ("hf", "trainer") and checkpoint.facts.origin == "config.json":
        _types(found, weights, config)


def tied_pair(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """(head, embedding) where the config ties them and both are stored, each for itself."""
    config = checkpoint.facts.config
    if config is None or not is_tied(config) or checkpoint.adapter is not None:
        return None
    names = [k.name for k in checkpoint.tensors if k.kind in WEIGHTS]
    pair = head_and_embedding(names)
    if pair is None or pair[0] not in names or pair[1] not in names or checkpoint.ties.get(pair[0]) == pair[1]:
        return None
    return pair


def _adapter(found: Found, checkpoint: Checkpoint) -> None:
    config = checkpoint.adapter or {}
    if str(config.get("peft_type")).upper() != "LORA":
        return
    try:
        problems = rank_problems(checkpoint, adapted(k.name for k in checkpoint.tensors))
    except CkptError as err:
        found.error(err)
        return
    file = next((f.path for f in checkpoint.files if f.role == "data"), "")
    for problem in problems:
        found.note("lora-rank-mismatch", problem.what, file=file, tensor=problem.where, why=problem.why)


def _family(found: Found, checkpoint: Checkpoint, weights: Mapping[str, Tensor], model: Family) -> None:
    try:
        best, extras = _shapes(model, weights)
    except CkptError as err:
        found.error(err, checkpoint.facts.origin)
        return
    common = len(set(best) & set(weights))
    if common * 2 < len(best):
        what = f"{common} of {len(best)} tensors of a {model.name} model are there"
        why = f"the names are others, or the config is another model's: {', '.join(list(weights)[:_SHOWN])}"
        if common:
            found.note("tensor-unexpected", what, file=checkpoint.facts.origin, why=why, severity="warning")
        else:
            found.note("reader-note", f"{what}: completeness was not checked", why=why)
        return
    pair = head_and_embedding([*best, *weights])
    severity: Severity | None = None if checkpoint.format in _TRAINED else "warning"
    for name, shape in best.items():
        tensor = weights.get(name)
        if tensor is None:
            if pair is not None and name == pair[0] and is_tied(checkpoint.facts.config or {}):
                continue
            head = " it is neither stored nor tied: loaders would draw it at random" if pair and name == pair[0] else ""
            why = f"{checkpoint.facts.origin} asks for it, of shape {list(shape)};{head}".rstrip(";")
            found.note("tensor-missing", f"{name} is not there", tensor=name, why=why, severity=severity)
        elif tensor.shown != shape and 0 not in tensor.shown:
            why = f"{list(tensor.shown)} is stored, {_said(checkpoint.facts.config or {}, tensor.shown, shape)}"
            found.note(
                "shape-differs-from-config",
                f"{name} has another shape than the config says",
                tensor=name,
                field=_field(checkpoint.facts.config or {}, tensor.shown, shape),
                why=why,
                severity=severity,
            )
    odd = [n for n in weights if n not in best and n not in extras]
    if odd:
        why = ", ".join(odd[:_SHOWN]) + (", ..." if len(odd) > _SHOWN else "")
        found.note("tensor-unexpected", f"{len(odd)} tensors are not those of a {model.name} model", why=why)


def _shapes(model: Family, weights: Mapping[str, Tensor]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Name -> shape of the model's tensors in the namespace that these are of, and names that may be there besides."""
    best: dict[str, tuple[int, ...]] = {}
    extras = {p.name for p in model.extras()}
    for namespace in NAMESPACES:
        shapes = {p.name: p.shape for p in model.parameters(namespace)}
        extras |= {p.name for p in model.buffers(namespace)}
        if len(weights.keys() & shapes) > len(weights.keys() & best) or not best:
            best = shapes
    pair = head_and_embedding(weights)
    if pair is not None and pair[1] in best:
        best.setdefault(pair[0], best[pair[1]])
    return best, extras


def _field(config: Mapping[str, Any], has: tuple[int, ...], said: tuple[int, ...]) -> str:
    """The field of the config whose number is the first size that differs, where one has it; "" else."""
    if len(has) != len(said):
        return ""
    size = next((b for a, b in zip(has, said, strict=True) if a != b), None)
    named = [k for k, v in config.items() if type(v) is int and v == size]
    return next(
        (k for k in ("vocab_size", "hidden_size", "intermediate_size") if k in named), named[0] if named else ""
    )


def _said(config: Mapping[str, Any], has: tuple[int, ...], said: tuple[int, ...]) -> str:
    field = _field(config, has, said)
    return f"{list(said)} is what the config says" + (f" ({field} {config[field]})" if field else "")


def _types(found: Found, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    said = config_dtype(dict(config))
    floats = {n: t for n, t in weights.items() if t.dtype.is_float}
    unlike = {n: t for n, t in floats.items() if t.dtype.name != said}
    if not said or not unlike:
        return
    if len(unlike) > 8 and len(unlike) * 2 > len(floats):
        kinds = ", ".join(sorted({t.dtype.name for t in unlike.values()}))
        what = f"{len(unlike)} of {len(floats)} tensors are {kinds} where config.json says {said}"
        found.note("dtype-differs-from-config", what, file="config.json", field="dtype")
        return
    for name, tensor in unlike.items():
        why = f"{tensor.dtype.name} where config.json says {said}"
        found.note("dtype-differs-from-config", f"{name} has another type than the config says", tensor=name, why=why)
