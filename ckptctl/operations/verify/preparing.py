"""Decides what the sides of a verification share: names, types, batches, tolerances. No tensor is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.core.errors import Unsupported, Usage
from ckptctl.core.sizes import parse_size
from ckptctl.formats.schedule import schedulers
from ckptctl.operations.naming import under_one_naming
from ckptctl.operations.running import MEMORY_FLOOR
from ckptctl.operations.verify import batches as batches_of
from ckptctl.operations.verify.compare import Measure, loss_scale
from ckptctl.operations.verify.device import Device, deterministic, device_named, dtype_named
from ckptctl.operations.verify.forms import Forms, Unlike, alone, narrowest, owned, together, widest
from ckptctl.operations.verify.model import built
from ckptctl.operations.verify.schedule import Rate, rates
from ckptctl.operations.verify.sides import Side, with_config, with_steps
from ckptctl.operations.verify.step import Job
from ckptctl.operations.verify.wanted import VOCABULARIES, Prepared, Verification

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

NOTHING: Any = np.zeros((1, 2), np.int64)
AHEAD = 4
"""Steps of which the learning rates are compared at least, where both sides' schedules are known."""


def prepare(sides: Sequence[Side], what: Verification) -> Prepared:
    """Decide what both sides share, from headers and configs alone. Usage for settings that make no sense."""
    if what.steps < 1:
        raise Usage("--steps is at least 1")
    if not 0 <= what.clip < float("inf"):
        raise Usage("--clip-grad is a number from 0 on")
    if not 0 <= what.batch.seed < 1 << 62:
        raise Usage(f"--seed {what.batch.seed}: from 0 to 2^62 - 1")
    memory = parse_size(what.memory, "--memory")
    if memory < MEMORY_FLOOR:
        raise Usage(f"--memory {what.memory} is too little", why=f"{memory} bytes", fix="give at least 16MiB")
    device = device_named(what.device)
    if what.no_model:
        return _without_model(sides, what, device, memory)
    sides = with_config(sides)
    wanted = dtype_named(what.dtype)
    dtype, notes = (wanted, []) if wanted else _computed_in(sides)
    named, ties, layers, vocabulary = [], [], (0, 0), 0
    truncated: Collection[str] | None = None
    for side in sides:
        with deterministic(device):
            model = built(side.config or {}, Device("meta", "meta"), dtype, layers=what.layers, seed=None)
        names = [*model.parameters, *model.buffers]
        named.append(side.under(names, model.ties))
        ties.append(model.ties)
        truncated = {*names, *(truncated or ())} if model.is_truncated else truncated
        layers, vocabulary = (model.layers, model.of_layers), model.vocabulary or vocabulary
        notes += _assumed(side)
    if what.same_settings:
        named, said = _same_settings(named)
        notes += said
    named, said = _vocabulary(named, what.vocabulary)
    notes += said
    if layers[0] != layers[1]:
        notes.append(f"the first {layers[0]} of {layers[1]} layers are run and compared: the others are not looked at")
    unlike: list[Unlike] = []
    if len(named) == 2:
        left, right, unlike = together(named[0], named[1], (ties[0], ties[1]), truncated, rounded=what.rounded)
        forms: tuple[Forms, ...] = (left, right)
        measure = Measure(dtype, widths=_widths(named, ties, truncated))
    else:
        forms, measure = (alone(named[0], ties[0], truncated),), Measure(dtype)
    curves, said = _rates(named, what)
    if any(s.trains for s in named):
        notes += said
    else:
        notes.append("there is no optimizer: loss, logits and gradients are looked at, and no update")
    job = Job(
        device,
        dtype,
        batches_of.batches(what.batch, what.steps, vocabulary),
        curves[0],
        what.layers,
        memory,
        what.offload,
        what.clip,
        _scale(named, dtype),
        what.batch.seed,
        fresh=len(named) == 1,
    )
    return Prepared(tuple(named), forms, job, measure, tuple(unlike), tuple(dict.fromkeys(notes)), curves, layers)


def _vocabulary(sides: list[Side], wanted: str) -> tuple[list[Side], list[str]]:
    """Sides with the vocabulary's padding, where it is trained too. Usage where it is asked for and not there."""
    if wanted not in VOCABULARIES:
        raise Usage(f"--vocabulary {wanted}: there is no such choice", fix=f"one of {', '.join(VOCABULARIES)}")
    padded = [s.padded() for s in sides]
    rows = {0 if p is None else p.padding_rows for p in padded}
    if rows == {0} and wanted != "padded":
        return sides, []
    if wanted == "true" or (wanted == "auto" and len(rows) > 1):
        return sides, ["over the true vocabulary: rows of padding after it are not looked at"]
    made = [p for p in padded if p is not None]
    if len(made) != len(sides) or len(rows) > 1:
        raise Usage(
            "--vocabulary padded: not every side has the same rows of padding",
            why=f"they have {', '.join(map(str, sorted(rows)))} rows",
            fix="--vocabulary true",
        )
    return made, [f"over the padded vocabulary, {made[0].padding_rows} rows more, as the run trained it"]


def _without_model(sides: Sequence[Side], what: Verification, device: Device, memory: int) -> Prepared:
    """The update alone, of gradients that are drawn: names need only agree with each other."""
    if what.layers is not None:
        raise Usage("--layers: there is no model to take layers of with --no-model")
    sides = list(sides)
    if len(sides) == 2:
        a, b = (s.checkpoint for s in sides)
        if a.facts.config is None or b.facts.config is None:
            facts = a.facts if a.facts.config is not None else b.facts
            a, b = replace(a, facts=facts), replace(b, facts=facts)
        a, b = under_one_naming(a, b)
        sides = [replace(sides[0], checkpoint=a), replace(sides[1], checkpoint=b)]
    sides = [with_steps(s) for s in sides]
    alike: list[str] = []
    if what.same_settings:
        sides, alike = _same_settings(sides)
    ties = [s.checkpoint.ties for s in sides]
    types: dict[str, list[str]] = {}
    for side, tied in zip(sides, ties, strict=True):
        for (name, kind), tensor in owned(side, tied, None).items():
            if kind == "weight":
                types.setdefault(name, []).append(tensor.dtype.name)
    widths: dict[str, str] = {}
    unlike: list[Unlike] = []
    if len(sides) == 2:
        left, right, unlike = together(sides[0], sides[1], (ties[0], ties[1]), None, rounded=what.rounded)
        forms: tuple[Forms, ...] = (left, right)
        widths = _widths(sides, ties, None)
    else:
        forms = (alone(sides[0], ties[0], None),)
    curves, said = _rates(sides, what)
    notes = ["there is no model: gradients are drawn, and the update alone is compared", *alike, *said]
    for side in sides:
        notes += _assumed(side)
    job = Job(
        device,
        "float32",
        [batches_of.Batch(NOTHING, NOTHING)] * what.steps,
        curves[0],
        None,
        memory,
        what.offload,
        what.clip,
        seed=what.batch.seed,
        types={name: narrowest(found) for name, found in types.items()},
    )
    measure = Measure("float32", widths=widths)
    return Prepared(tuple(sides), forms, job, measure, tuple(unlike), tuple(dict.fromkeys(notes)), curves)


def _computed_in(sides: Sequence[Side]) -> tuple[str, list[str]]:
    """The type of most elements of the weights; the narrower where two sides differ and one is float32."""
    found = []
    for side in sides:
        count: Counter[str] = Counter()
        for key, tensor in side.checkpoint.tensors.items():
            if key.kind in WEIGHTS and tensor.dtype.is_float:
                count[tensor.dtype.name] += tensor.numel
        found.append(count.most_common(1)[0][0] if count else "float32")
    for name in found:
        if name not in ("float32", "bfloat16", "float16", "float64"):
            raise Unsupported(f"weights of {name} are not computed with", fix="say a type to compute in: --dtype bf16")
    if len(set(found)) == 1:
        return found[0], []
    narrow = [n for n in found if n in ("bfloat16", "float16")]
    if len(narrow) == 1:
        return narrow[0], [f"both sides compute in {narrow[0]}: the weights are {found[0]} and {found[1]}"]
    wide = widest([*found, "float32"])
    return wide, [f"both sides compute in {wide}: the weights are {found[0]} and {found[1]}"]


def _widths(sides: Sequence[Side], ties: Sequence[Mapping[str, str]], names: Collection[str] | None) -> dict[str, str]:
    """Parameters that the sides update in different types, and the narrowest type of their state."""
    types: list[dict[str, list[str]]] = []
    for side, tied in zip(sides, ties, strict=True):
        found: dict[str, list[str]] = {}
        have = owned(side, tied, names)
        for (name, kind), tensor in have.items():
            if kind != "weight" or (name, MASTER) not in have:
                found.setdefault(name, []).append(tensor.dtype.name)
        types.append(found)
    out = {}
    trained = {n for s in sides for found in (s.settings, s.states) for n in found}
    for name in types[0] if not any(s.trains for s in sides) else (n for n in types[0] if n in trained):
        p, q = (t.get(name, []) for t in types)
        floats = [t for t in (*p, *q) if t.startswith(("float", "bfloat"))]
        if p and q and floats and _updated_in(p) != _updated_in(q):
            out[name] = narrowest(floats)
    return out


def _updated_in(types: list[str]) -> str:
    floats = [t for t in types if t.startswith(("float", "bfloat"))]
    return widest(floats) if floats else ""


def _same_settings(sides: Sequence[Side]) -> tuple[list[Side], list[str]]:
    """Sides that are all trained with the first one's settings, and what was other on the second."""
    out, said = list(sides), []
    if len(sides) == 2:
        a, b = (s.settings for s in sides)
        wanted = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize")
        found: Counter[str] = Counter()
        for name in a:
            for key in wanted:
                x, y = (s.get(name, {}).get(key) for s in (a, b))
                if name in b and x is not None and y is not None and x != y and list_of(x) != list_of(y):
                    found[f"{key} {x} and {y}"] += 1
        said = [f"settings of a are taken for both: {k} of {n} parameters" for k, n in sorted(found.items())]
        out[1] = replace(sides[1], others=a)
    return out, said


def list_of(value: Any) -> Any:
    """A tuple as a list: files keep betas either way."""
    return list(value) if isinstance(value, tuple) else value


def _rates(sides: Sequence[Side], what: Verification) -> tuple[tuple[Sequence[Rate], ...], list[str]]:
    """Each side's learning rates: by its own schedule, or the other's where its format keeps none."""
    steps = max(what.steps, AHEAD)
    with_own = [s for s in sides if schedulers(s.checkpoint.values)[0]]
    found, said = [], []
    for side in sides:
        source = side if side in with_own or not with_own else with_own[0]
        curve, notes = rates(source.checkpoint, steps, what.lr)
        found.append(curve)
        said += notes if what.steps > 1 else []
    return tuple(found), said


def _scale(sides: Sequence[Side], dtype: str) -> float:
    """What fp16 losses are multiplied by: the run's own scale, a power of two."""
    if dtype != "float16":
        return 1.0
    for side in sides:
        found = loss_scale(side)
        if found is not None and 1 <= found <= 2**16:
            return found
    return 256.0


def _assumed(side: Side) -> list[str]:
    """What the files do not say, and how it is taken."""
    decays = [
        s
        for s in side.settings.values()
        if "betas" in s and s.get("weight_decay") and "decoupled_weight_decay" not in s
    ]
    if decays and not any("adam_w_mode" in s for s in decays):
        return [f"{side.path}: weight decay is taken as AdamW's (decoupled): the param groups do not say"]
    return []
