"""What verify does beyond its own steps, where it is asked for: native runs, and recomputation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Usage
from ckptctl.operations.verify.device import deterministic, device_named
from ckptctl.operations.verify.native.comparing import Beside, natively
from ckptctl.operations.verify.native.launch import Launch
from ckptctl.operations.verify.recompute import find_max_batch, policies, recompute, require_gpu
from ckptctl.operations.verify.step import loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptctl.operations.verify.record import Record
    from ckptctl.operations.verify.sides import Side
    from ckptctl.operations.verify.wanted import Prepared, Verification

Document = dict[str, Any]


def require_more(what: Verification) -> None:
    """Usage for settings that do not go together, before anything is read."""
    if what.recompute is not None:
        policies(what.recompute)
    if what.no_model and (what.native or what.recompute is not None or what.find_max_batch):
        raise Usage("--no-model computes nothing: leave --native, --recompute and --find-max-batch out")
    if what.find_max_batch:
        require_gpu(device_named(what.device).name)
    if not what.native:
        if what.python is not None:
            raise Usage("--python is for --native")
        return
    for given, flag in ((what.layers is not None, "--layers"), (what.no_optimizer, "--no-optimizer")):
        if given:
            raise Usage(f"{flag} and --native do not go together", why="the framework takes up the whole checkpoint")
    if what.dtype not in ("", "auto", "source"):
        raise Usage("--dtype and --native do not go together", why="the framework computes in the type of the weights")


def more(
    document: Document,
    sides: Sequence[Side],
    prepared: Prepared,
    records: Sequence[Record],
    what: Verification,
    say: Callable[[str], None],
) -> None:
    """Adds `native` and `recompute` to the document; `equal` is of them too. sides are as they were read."""
    if what.native:
        beside = [
            Beside(*one) for one in zip(sides, prepared.sides, prepared.forms, records, prepared.rates, strict=True)
        ]
        kind = "cuda" if prepared.job.device.is_cuda else "cpu"
        how = Launch(what.python or sys.executable, kind, what.native_timeout_s)
        document["native"] = natively(beside, prepared.job, how, given_rates=bool(what.lr), say=say)
        document["equal"] = document["equal"] and document["native"]["equal"]
    if what.recompute is not None or what.find_max_batch:
        document["recompute"] = _recomputed(prepared, what, say)
        document["equal"] = document["equal"] and document["recompute"]["equal"]


def _recomputed(prepared: Prepared, what: Verification, say: Callable[[str], None]) -> Document:
    """Side A's model under each policy."""
    import torch

    job = prepared.job
    device = torch.device(job.device.name)
    wanted = policies(what.recompute or "none")
    say(f"one step under {', '.join(p.name for p in wanted)}")
    with deterministic(job.device):
        net = loaded(prepared.sides[0], job).net
        batch = job.batches[0]
        given = {"input_ids": batch.input_ids, "labels": batch.labels}
        if batch.attention_mask is not None:
            given["attention_mask"] = batch.attention_mask
        on_device = {k: torch.from_numpy(v).to(device) for k, v in given.items()}
        found = recompute(net, on_device, wanted, seed=job.seed)
        if what.find_max_batch:
            say("the largest batch of each policy")
            for row, best in zip(found["policies"], find_max_batch(net, on_device, wanted, seed=job.seed), strict=True):
                row |= {k: v for k, v in best.items() if k != "policy"}
    return found
