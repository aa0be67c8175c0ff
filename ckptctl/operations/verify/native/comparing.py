"""Native runs of one side or two, beside verify's own steps: the document's part about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER
from ckptctl.core.errors import Usage
from ckptctl.operations.verify.compare import Measure, compare
from ckptctl.operations.verify.native.running import run_native
from ckptctl.operations.verify.rules import rule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptctl.operations.verify.forms import Forms
    from ckptctl.operations.verify.native.launch import Launch
    from ckptctl.operations.verify.record import Record, Trained
    from ckptctl.operations.verify.rules import Rule
    from ckptctl.operations.verify.schedule import Rate
    from ckptctl.operations.verify.sides import Side
    from ckptctl.operations.verify.step import Job

Document = dict[str, Any]


@dataclass(frozen=True)
class Beside:
    """A side as it was read, the same under the model's names, and verify's own steps of it."""

    original: Side
    named: Side
    forms: Forms
    own: Record
    rates: Sequence[Rate]


def natively(
    sides: Sequence[Beside], job: Job, how: Launch, *, given_rates: bool, say: Callable[[str], None]
) -> Document:
    """Each side's own framework takes the same steps: compared with verify's steps, and two sides with each other.

    Raises Unsafe, before anything is started, where a pickle of either side is not clean.
    """
    if job.layers is not None:
        raise Usage("--native runs the whole model: leave --layers out")
    out: Document = {"equal": True}
    found: list[tuple[Record, Document]] = []
    for word, side in zip("ab", sides, strict=False):
        say(f"{side.named.path}: its own framework takes the same steps")
        record, about = run_native(
            side.original.checkpoint,
            side.named.checkpoint,
            _rule(side.named),
            job.batches,
            how,
            rates=_rates(side.named, side.rates[: len(job.batches)], given=given_rates),
            clip=job.clip,
            seed=job.seed,
        )
        found.append((record, about))
        measure = Measure(job.dtype, exact=False)
        own, native, skipped = aligned(side.own, record, side.forms, about["types"])
        judged = compare(own, native, measure)
        if not record.gradient_norms and judged.compared.pop("gradient norm", 0):
            skipped["gradient norms"] = len(record.parameters)
        out[word] = {
            **about,
            "losses": record.losses,
            "gradient_norms": record.gradient_norms,
            "lr": record.lr,
            "compared": judged.compared,
            "not_compared": skipped,
            "tolerance": measure.described,
            "differences": judged.differences,
            "equal": judged.equal,
        }
        out["equal"] = out["equal"] and judged.equal
    if len(found) == 2:
        out["between"] = _between(found, job)
        out["equal"] = out["equal"] and out["between"]["equal"]
    return out


def _between(found: Sequence[tuple[Record, Document]], job: Job) -> Document:
    """The two native runs against each other: bit for bit where both are of one framework and layout."""
    (a, about_a), (b, about_b) = found
    same = all(about_a[k] == about_b[k] for k in ("framework", "version", "ranks", "device", "types"))
    measure = Measure(job.dtype, exact=same)
    left, right, skipped = _common(a, b, lambda name, kind: about_a["types"].get(kind) == about_b["types"].get(kind))
    judged = compare(left, right, measure)
    return {
        "compared": judged.compared,
        "not_compared": skipped,
        "tolerance": measure.described,
        "differences": judged.differences,
        "equal": judged.equal,
    }


def aligned(
    own: Record, native: Record, forms: Forms, types: Mapping[str, str]
) -> tuple[Record, Record, dict[str, int]]:
    """Both records with what can be compared; the rest counted by kind.

    The state as loaded is compared where verify's digests are of the type in which the framework holds it. A framework
    that keeps no master of a float32 weight has the weight as its own.
    """
    held = {MASTER: types.get("weight", ""), **types}

    def comparable(name: str, kind: str) -> bool:
        form = forms.taken.get((name, kind))
        return form is not None and form[1] == held.get(kind)

    whole = {n: _with_master(own.parameters.get(n), p) for n, p in native.parameters.items()}
    return _common(own, replace(native, parameters=whole), comparable)


def _with_master(own: Trained | None, native: Trained) -> Trained:
    """The native side with its float32 weight as the master that verify's has of it."""
    if own is None or MASTER in native.before:
        return native
    before, after, samples = dict(native.before), dict(native.after), dict(native.samples)
    if MASTER in own.before and "weight" in before:
        before[MASTER] = before["weight"]
    if MASTER in own.after and "weight" in after:
        after[MASTER], samples[MASTER] = after["weight"], samples["weight"]
    return replace(native, before=before, after=after, samples=samples)


def _common(a: Record, b: Record, comparable: Callable[[str, str], bool]) -> tuple[Record, Record, dict[str, int]]:
    skipped: dict[str, int] = {}

    def skip(what: str) -> None:
        skipped[what] = skipped.get(what, 0) + 1

    left: dict[str, Trained] = {}
    right: dict[str, Trained] = {}
    for name in [*a.parameters, *(n for n in b.parameters if n not in a.parameters)]:
        x, y = a.parameters.get(name), b.parameters.get(name)
        if x is None or y is None:
            if (x or y) is not None and (x or y).settings is None:  # type: ignore[union-attr]
                skip("buffers and what is not trained")
                continue
            if x is not None:
                left[name] = x
            if y is not None:
                right[name] = y
            continue
        kinds = {k for k in (*x.before, *y.before) if comparable(name, k) and (k in x.before) == (k in y.before)}
        for kind in {*x.before, *y.before} - kinds:
            if (kind in x.before and kind in y.before) or kind in (MASTER, "weight"):
                skip(f"{kind} as loaded")
            else:
                kinds.add(kind)  # a moment that one side alone has is a difference
        steps = (x.step_before, y.step_before)
        if x.settings is not None and None in steps:
            skip("step counts")
        x, y = (
            replace(
                p,
                before={k: v for k, v in p.before.items() if k in kinds},
                step_before=None if None in steps else p.step_before,
            )
            for p in (x, y)
        )
        if y.settings == {} and x.settings is not None:
            y = replace(y, settings=x.settings)
            skip("group settings")
        if x.settings is None:
            y = replace(y, settings=None)
        left[name], right[name] = x, y
    return replace(a, parameters=left), replace(b, parameters=right), skipped


def _rule(side: Side) -> Rule | None:
    if not side.trains:
        return None
    kinds, settings = side.states, side.settings
    name = next(iter(kinds), next(iter(settings), ""))
    return rule_of(kinds.get(name, ()), settings.get(name, {}), side.path)


def _rates(side: Side, rates: Sequence[Rate], *, given: bool) -> list[list[float]]:
    """Each step's rate of each group. The first step's are left to the framework, unless they are the user's."""
    rule, optimizer = _rule(side), side.checkpoint.optimizer
    if rule is None or optimizer is None or not optimizer.groups:
        return []
    out: list[list[float]] = []
    for number, rate in enumerate(rates):
        groups = [side.settings.get(g.params[0], {}) if g.params else {} for g in optimizer.groups]
        own = [float(rate(rule.settings(options) | {"group": options})) for options in groups]
        out.append(own if number or given else [])
    return out
