"""Two records of the same steps: whether they are equal, and what differs, in the model's order. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER
from ckptctl.formats.schedule import schedulers
from ckptctl.operations.state_values import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptctl.operations.verify.forms import Unlike
    from ckptctl.operations.verify.record import Record, Trained
    from ckptctl.operations.verify.schedule import Rate
    from ckptctl.operations.verify.sides import Side

Document = dict[str, Any]

LOSS: dict[str, float] = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-3, "float16": 2e-3}
"""By the type that is computed in, how far apart two losses may be that are not of equal bits by right."""
_BASES = ("initial_lr", "max_lr", "min_lr", "lr_mult", "wd_mult")
"""Of a group's settings, what schedules start from: torch's initial_lr, the others Megatron's."""
RELATIVE: dict[str, float] = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-8}
"""By the narrowest type of a state, how far apart its numbers may be after the steps, over the tensor's largest."""
GRADIENT: dict[str, float] = {**RELATIVE, "float32": 2**-13}
"""The same of gradients, and so of moments, where two programs computed them.

A gradient is a sum over all tokens. Summed up in another order, terms that nearly cancel leave more of float32's 24
bits apart than 1e-5 has room for: 3e-5 in layer norms of small models; 16-bit types have that room as they are.
"""


def of_squares(relative: float) -> float:
    """How far apart sums of squares (exp_avg_sq) may be, over the largest, where gradients are by `relative`.

    A gradient g that is off by up to r of the tensor's largest G has a square that is off by up to
    (|g| + rG)^2 - g^2 <= ((1 + r)^2 - 1) G^2, and the new sum is no smaller than its share of G^2: nothing in it
    cancels. So of the sum, too, it is at most (1 + r)^2 - 1: a little over twice r.
    """
    return relative * (2 + relative)


@dataclass(frozen=True, slots=True)
class Judged:
    """What a comparison came to.

    In the model's order, first is the first parameter whose update differs, cause the first of which something differs
    before the step: its state, its count, its settings. An update can differ by another parameter's weights alone.
    """

    differences: list[Document] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    first: Document | None = None
    cause: Document | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class Measure:
    """How two runs are compared: bit for bit, or within tolerances. exact is for what is the same type on both sides.

    widths has for (name, kind) the narrowest type where the sides hold it in two: within tolerance, and said.
    """

    dtype: str
    exact: bool = True
    widths: dict[str, str] = field(default_factory=dict)
    """By parameter: the narrowest type of its state, where the sides update it in different ones."""

    @property
    def described(self) -> Document:
        """For the report."""
        if self.exact and not self.widths:
            return {"mode": "bits", "why": "state of one type on both sides: the same step has the same bits"}
        out: Document = {"mode": "tolerance", "loss": LOSS[self.dtype]}
        if self.widths:
            narrow = sorted(set(self.widths.values()))
            out["relative"] = {w: RELATIVE[w] for w in narrow}
            out["why"] = (
                f"{len(self.widths)} parameters are updated in different types on the two sides: the state before the "
                "step is compared bit for bit, what the step makes of it within the narrower type's rounding"
            )
        else:
            out["relative"] = {self.dtype: RELATIVE[self.dtype]}
            out["moments"] = {self.dtype: GRADIENT[self.dtype]}
            out["squares"] = {self.dtype: of_squares(GRADIENT[self.dtype])}
            out["why"] = "the sides were computed by different programs"
        return out


def compare(a: Record, b: Record, measure: Measure, unlike: Sequence[Unlike] = ()) -> Judged:
    """Everything that differs between two runs of the same batches. unlike is what their headers showed."""
    out: list[Document] = []
    compared: Counter[str] = Counter()
    order = [*a.parameters, *(n for n in b.parameters if n not in a.parameters)]
    by_name: dict[str, list[Document]] = {}
    for u in unlike:
        by_name.setdefault(u.name, []).append(_found(u.name, u.kind, u.what, u.detail))
    for alias, owner in sorted({*a.untied, *b.untied}):
        sides = [word for word, r in (("a", a), ("b", b)) if (alias, owner) in r.untied]
        detail = f"the model has one tensor for it and {owner}; in {' and '.join(sides)} they have different bytes"
        by_name.setdefault(owner, []).append(_found(alias, "weight", "untied", detail))
    shown = {(u.name, u.kind) for u in unlike}
    for name, kind in sorted({*a.incomplete, *b.incomplete} - shown):
        sides = [word for word, r in (("a", a), ("b", b)) if (name, kind) in r.incomplete]
        detail = f"its optimizer's step needs it, and {' and '.join(sides)} has only the rest of the state"
        by_name.setdefault(name, []).append(_found(name, kind, "missing", detail))
    first: Document | None = None
    cause: Document | None = None
    for name in [*order, *(n for n in by_name if n not in order)]:
        found = by_name.get(name, [])
        x, y = a.parameters.get(name), b.parameters.get(name)
        if x is None or y is None:
            if x is not y and not found:
                found = [_found(name, "weight", "only-in-a" if y is None else "only-in-b")]
            out += found
            cause = cause or next((d for d in found if d["name"] == name), None)
            continue
        before = [*found, *_state(x, y, compared)]
        updates = _updates(x, y, measure, compared)
        out += before + updates
        cause = cause or next(iter(before), None)
        first = first or next(iter(updates or found), None)
    out += _numbers(a, b, measure, compared)
    return Judged(out, dict(compared), first, cause)


def schedules_unlike(sides: Sequence[Side], rates: Sequence[Sequence[Rate]]) -> list[Document]:
    """The first step at which the sides' schedules give a parameter another rate, where both are of one kind.

    A schedule of another framework is no copy: formats that cannot hold the source's get one of their own.
    """
    kinds = [[set(s) for s in schedulers(side.checkpoint.values)[0] if isinstance(s, Mapping)] for side in sides]
    if not kinds[0] or kinds[0] != kinds[1]:
        return []
    a, b = (s.settings for s in sides)
    for name in a:
        if name not in b or not all(isinstance(s[name].get("lr"), (int, float)) for s in (a, b)):
            continue
        for number, (p, q) in enumerate(zip(*rates, strict=False)):
            x, y = (r(s[name] | {"group": s[name]}) for r, s in ((p, a), (q, b)))
            if number and x != y:
                return [_found("", "schedule", "value", f"step {number + 1}: lr {x:g} and {y:g} ({name})")]
    return []


def runs_unlike(sides: Sequence[Side]) -> tuple[list[Document], list[str]]:
    """(differences, notes) of what no training step shows: the schedule's own state, and how far the run is.

    Schedules of one kind are compared by value, private fields of torch's left out; of two kinds, or where one side has
    none, it is said. The run's step is a difference between checkpoints of one format: formats count differently.
    """
    out: list[Document] = []
    notes: list[str] = []
    found = [[s for s in schedulers(side.checkpoint.values)[0] if isinstance(s, Mapping)] for side in sides]
    if [set(s) for s in found[0]] != [set(s) for s in found[1]]:
        held = ["a schedule's state" if f else "no schedule's state" for f in found]
        why = "of two kinds" if all(found) else f"a has {held[0]}, b {held[1]}"
        notes.append(f"schedules are not compared beyond the learning rates of the steps trained: {why}")
    else:
        for s, t in zip(*found, strict=True):
            unlike = [
                f"{k}: {plain(s[k])} and {plain(t[k])}"
                for k in s
                if not str(k).startswith("_") and _is_data(s[k]) and _is_data(t[k]) and not _alike(s[k], t[k])
            ]
            if unlike:
                out.append(_found("", "schedule", "value", "; ".join(unlike)))
    scales = [loss_scale(side) for side in sides]
    if scales[0] is not None and scales[1] is not None and scales[0] != scales[1]:
        out.append(_found("", "loss scale", "value", f"{scales[0]:g} and {scales[1]:g}"))
    elif any(s not in (None, 1) for s in scales) and None in scales:
        notes.append(f"the loss scale is not compared: {scales[0]} and {scales[1]}")
    out += _bases(sides)
    p, q = (side.checkpoint.step for side in sides)
    if p is not None and q is not None and p != q:
        if sides[0].checkpoint.format == sides[1].checkpoint.format:
            out.append(_found("", "run step", "value", f"{p} and {q}"))
        else:
            notes.append(f"the runs' own steps are {p} and {q}; formats count differently, so that is no difference")
    return out, notes


def _bases(sides: Sequence[Side]) -> list[Document]:
    """Groups in which a number differs that no step takes, and the schedules of later ones start from.

    One a pair of numbers, under its first parameter. Where one side keeps none, nothing is said of it.
    """
    a, b = (side.settings for side in sides)
    found: dict[tuple[str, Any, Any], str] = {}
    for name in a:
        for word in _BASES:
            p, q = (s.get(name, {}).get(word) for s in (a, b))
            if isinstance(p, (int, float)) and isinstance(q, (int, float)) and p != q:
                found.setdefault((word, p, q), name)
    return [_found(name, "group", "value", f"{word}: {p} and {q}") for (word, p, q), name in found.items()]


def loss_scale(side: Side) -> float | None:
    """What a run's losses are multiplied by, where its format keeps that."""
    scaler = side.checkpoint.about.get("loss_scaler")
    found = scaler.get("cur_scale") if isinstance(scaler, Mapping) else None
    return float(found) if isinstance(found, (int, float)) else None


def _is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _state(x: Trained, y: Trained, compared: Counter[str]) -> list[Document]:
    """What was loaded, bit for bit; steps and settings by value."""
    out = []
    for kind in [*x.before, *(k for k in y.before if k not in x.before)]:
        compared[kind] += 1
        if kind not in x.before or kind not in y.before:
            if kind in x.before or kind in y.before:
                out.append(_found(x.name, kind, "only-in-a" if kind in x.before else "only-in-b"))
        elif x.before[kind] != y.before[kind]:
            out.append(_found(x.name, kind, "value", "other elements before the step"))
    if x.settings is not None or y.settings is not None:
        compared["step"] += 1
        if x.step_before != y.step_before:
            out.append(_found(x.name, "step", "value", f"{_n(x.step_before)} and {_n(y.step_before)} updates so far"))
        compared["group settings"] += 1
        out += _settings(x, y)
    return out


def _settings(x: Trained, y: Trained) -> list[Document]:
    if x.settings is None or y.settings is None:
        return [_found(x.name, "group", "only-in-a" if y.settings is None else "only-in-b", "trained on one side only")]
    unlike = [
        f"{k}: {x.settings.get(k, 'absent')} and {y.settings.get(k, 'absent')}"
        for k in sorted({*x.settings, *y.settings})
        if not _alike(x.settings.get(k), y.settings.get(k))
    ]
    return [_found(x.name, "group", "value", "; ".join(unlike))] if unlike else []


def _alike(p: Any, q: Any) -> bool:
    if isinstance(p, (list, tuple)) and isinstance(q, (list, tuple)):
        return len(p) == len(q) and all(_alike(s, t) for s, t in zip(p, q, strict=True))
    return bool(p == q)


def _updates(x: Trained, y: Trained, measure: Measure, compared: Counter[str]) -> list[Document]:
    """Gradient norms, and what the step made of the parameter."""
    out = []
    compared["gradient norm"] += 1
    for number, (p, q) in enumerate(zip(x.gradient_norms, y.gradient_norms, strict=False)):
        if p != q and not (measure.dtype and _near(p, q, measure, number)):
            out.append(_found(x.name, "gradient", "value", f"step {number + 1}: norm {_n(p)} and {_n(q)}"))
            break
    width = measure.widths.get(x.name)
    for kind in [*x.after, *(k for k in y.after if k not in x.after)]:
        if kind not in x.after or kind not in y.after:
            if kind == MASTER and (width is not None or not measure.exact):
                continue  # the side without one updates the weight itself
            if kind == MASTER and _same_master(x, y):
                continue
            out.append(_found(x.name, kind, "only-in-a" if kind in x.after else "only-in-b", "after the step"))
            continue
        compared[f"updated {kind}"] += 1
        if x.after[kind] == y.after[kind]:
            continue
        mine, theirs = x.samples.get(kind, []), y.samples.get(kind, [])
        gap, at, scale = _gap(mine, theirs)
        if not measure.exact:
            if kind not in ("weight", MASTER):
                r = GRADIENT[measure.dtype]
                if gap <= (of_squares(r) if kind.endswith("_sq") else r) * scale:
                    continue
            elif all(_near_updates(mine, theirs, scale, x, measure.dtype)):
                continue
        elif width is not None and gap <= RELATIVE[width] * scale:
            continue
        detail = f"after the step, by up to {gap:.3g} in {len(mine)} elements looked at"
        out.append(
            _found(x.name, f"updated {kind}", "value", detail + (f", the first of them number {at}" if gap else ""))
        )
    return out


def _near_updates(p: Sequence[float], q: Sequence[float], scale: float, x: Trained, dtype: str) -> Iterator[bool]:
    """Whether each sample of a weight is near enough to what another program made of it.

    Beside the rounding of the weight there is that of its update, lr * m / sqrt(v): where an element's gradients are k
    times smaller than the tensor's largest, its update is off by k times what gradients are off, and by twice the
    learning rate at most. (A bias of attention's keys has no gradient but rounding.)
    """
    r, lr = RELATIVE[dtype] * scale, float((x.settings or {}).get("lr") or 0.0)
    squares = x.samples.get("exp_avg_sq", [])
    if len(squares) != len(p) or not squares:
        yield from (s == t or abs(s - t) <= r or (s != s and t != t) for s, t in zip(p, q, strict=False))
        return
    eps = float((x.settings or {}).get("eps") or 0.0)
    steps, top = len(x.gradient_norms), math.sqrt(max(squares))
    for s, t, v in zip(p, q, squares, strict=False):
        below = math.sqrt(v) + eps
        update = min(1.0, GRADIENT[dtype] * top / below if below else 1.0)
        yield s == t or abs(s - t) <= r + 2 * steps * lr * update or (s != s and t != t)


def _same_master(x: Trained, y: Trained) -> bool:
    """A side that keeps no master updates its float32 weight: that has the other's master's bits."""
    with_master, without = (x, y) if MASTER in x.after else (y, x)
    return with_master.after[MASTER] == without.after.get("weight")


def _near(p: float | None, q: float | None, measure: Measure, number: int) -> bool:
    """Norms of steps after the first follow updates that may differ by rounding."""
    if p is None or q is None or (measure.exact and not measure.widths) or (number == 0 and measure.exact):
        return False
    width = next(iter(sorted(set(measure.widths.values()))), measure.dtype)
    return math.isclose(p, q, rel_tol=16 * RELATIVE[width], abs_tol=1e-8)


def _gap(p: Sequence[float], q: Sequence[float]) -> tuple[float, int, float]:
    """(largest distance, the first sample that differs, largest number) of two tensors' samples."""
    worst, first, scale = 0.0, -1, 0.0
    for number, (s, t) in enumerate(zip(p, q, strict=False)):
        if s == t or (s != s and t != t):
            scale = max(scale, abs(s)) if s == s else scale
            continue
        first = number if first < 0 else first
        gap = abs(s - t)
        worst = math.inf if gap != gap else max(worst, gap)
        scale = max(scale, abs(s), abs(t))
    return worst, first, scale


def _numbers(a: Record, b: Record, measure: Measure, compared: Counter[str]) -> list[Document]:
    """Losses, logits, norms and rates of each step."""
    out = []
    free = bool(measure.widths) or not measure.exact
    for number, (p, q) in enumerate(zip(a.losses, b.losses, strict=False)):
        compared["loss"] += 1
        exact = measure.exact and (number == 0 or not measure.widths)
        if not (p == q or (p != p and q != q)) and (exact or not abs(p - q) <= LOSS[measure.dtype]):
            out.append(_found("", "loss", "value", f"step {number + 1}: {p:.9g} and {q:.9g}"))
    if not free or measure.exact:
        for number, (s, t) in enumerate(zip(a.logits, b.logits, strict=False)):
            if number and measure.widths:
                break
            compared["logits"] += 1
            if s != t:
                out.append(_found("", "logits", "value", f"step {number + 1}: digest {s} and {t}"))
    for number, (u, v) in enumerate(zip(a.lr, b.lr, strict=False)):
        compared["lr"] += 1
        if u != v:
            out.append(_found("", "lr", "value", f"step {number + 1}: {u} and {v}"))
    return out


def _n(value: float | None) -> str:
    return "none" if value is None else f"{value:g}" if float(value).is_integer() else f"{value:.9g}"


def _found(name: str, kind: str, what: str, detail: str = "") -> Document:
    return {"name": name, "kind": kind, "what": what, "detail": detail}
