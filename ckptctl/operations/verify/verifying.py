"""verify: one side, or two, through the same steps, and the document about it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptctl.execute.signals import terminable
from ckptctl.operations.verify.checking import checks, weights_left_out
from ckptctl.operations.verify.compare import compare, runs_unlike, schedules_unlike
from ckptctl.operations.verify.device import deterministic
from ckptctl.operations.verify.more import more, require_more
from ckptctl.operations.verify.needs import torch_module, transformers_module
from ckptctl.operations.verify.preparing import prepare
from ckptctl.operations.verify.sides import opened, opened_both
from ckptctl.operations.verify.step import run
from ckptctl.operations.verify.wanted import Prepared, Verification

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ckptctl.operations.opening import Reading
    from ckptctl.operations.verify.record import Record

Document = dict[str, Any]


def verify(
    a: Path | str,
    b: Path | str | None = None,
    what: Verification | None = None,
    reading: Reading | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> Document:
    """Train the next step from a (and from b) and compare (schema ckptctl.verify/1): `equal`, and what differs.

    With a alone: against its own records, and a band of sanity. Reads both; writes nothing.

    Interrupted (exit 5) at SIGTERM and SIGHUP: no process and no scratch file is left. Unsupported (exit 3) without
    torch and Transformers, and for what cannot be trained on here.
    """
    what = what or Verification()
    require_more(what)
    with terminable("verify was told to stop", "run the same command again"):
        return _verify(a, b, what, reading, progress)


def _verify(
    a: Path | str,
    b: Path | str | None,
    what: Verification,
    reading: Reading | None,
    progress: Callable[[str], None] | None,
) -> Document:
    say = progress or (lambda text: None)
    torch_module()
    if not what.no_model:
        transformers_module()
    optimizer = not what.no_optimizer
    sides = [opened(a, reading, optimizer=optimizer)] if b is None else opened_both(a, b, reading, optimizer=optimizer)
    prepared = prepare(sides, what)
    records = []
    with deterministic(prepared.job.device):
        for side, forms, own in zip(prepared.sides, prepared.forms, prepared.rates, strict=True):
            say(f"training {what.steps} steps from {side.path}")
            records.append(run(side, forms, replace(prepared.job, rates=own)))
    made = document(prepared, records, what)
    more(made, sides, prepared, records, what, say)
    return made


def document(prepared: Prepared, records: Sequence[Record], what: Verification) -> Document:
    """What `--json` prints."""
    job, first = prepared.job, records[0]
    out: Document = {"schema": "ckptctl.verify/1"}
    for word, side, record in zip("ab", prepared.sides, records, strict=False):
        out[word] = {
            "path": side.path,
            "format": side.checkpoint.format,
            "variant": side.checkpoint.variant,
            "recognised": side.evidence,
            "step": side.checkpoint.step,
            "losses": record.losses,
            "logits": record.logits,
            "gradient_norms": record.gradient_norms,
            "lr": record.lr,
            "measured": record.measured,
            "not_in_model": record.left_out[:20],
        }
    out["device"] = {
        "name": job.device.name,
        "called": job.device.called,
        "dtype": job.dtype,
        "torch": str(torch_module().__version__),
        "transformers": None if job.types is not None else str(transformers_module().__version__),
        "deterministic": True,
        "offload": job.offload,
    }
    out["steps"] = len(job.batches)
    out["batch"] = what.batch.described if job.types is None else {"from": "nothing", "seed": job.seed}
    out["padding_rows"] = prepared.sides[0].padding_rows
    out["layers"] = {"run": prepared.layers[0], "of": prepared.layers[1]}
    out["clip_grad"] = job.clip
    out["parameters"] = sum(p.settings is not None for p in first.parameters.values())
    out["notes"] = [*prepared.notes, *dict.fromkeys(n for r in records for n in r.notes)]
    if len(records) == 2:
        if job.types is None and (homeless := weights_left_out(first)):
            named = f"{len(homeless)} weights ({homeless[0]})"
            out["notes"].append(
                f"{named} are not in the model of the config: their bytes are compared, no step has them"
            )
        judged = compare(first, records[1], prepared.measure, prepared.unlike)
        judged.differences.extend(schedules_unlike(prepared.sides, prepared.rates))
        differences, notes = runs_unlike(prepared.sides)
        judged.differences.extend(differences)
        out["notes"] += notes if any(s.trains for s in prepared.sides) else []
        out |= {
            "equal": judged.equal,
            "tolerance": prepared.measure.described,
            "compared": judged.compared,
            "first": judged.first,
            "cause": judged.cause or next((d for d in differences if d["name"]), None),
            "differences": judged.differences,
        }
        return out
    out["fresh_loss"] = first.fresh_loss
    out["checks"] = checks(
        first, prepared.sides[0].checkpoint, is_drawn=what.batch.file is None and what.batch.data is None
    )
    out["equal"] = all(c["ok"] is not False for c in out["checks"])
    return out
