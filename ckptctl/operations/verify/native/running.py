"""A native run from start to end: the pickles are scanned, the ranks run, and what they tell becomes a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsafe, Unsupported
from ckptctl.operations.validating import Validation, validate
from ckptctl.operations.verify.native.launch import run_ranks
from ckptctl.operations.verify.native.planning import plan
from ckptctl.operations.verify.native.saved import record_of_saves
from ckptctl.operations.verify.record import SAMPLES, Record, Trained

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.operations.verify.batches import Batch
    from ckptctl.operations.verify.native.launch import Launch
    from ckptctl.operations.verify.rules import Rule

Document = dict[str, Any]


def scan(checkpoint: Checkpoint) -> Document:
    """A look at every pickle of a checkpoint, before a framework runs them: how many files were looked at.

    Raises Unsafe where one would run code, names what no framework is known to have, or cannot be read to its end.
    """
    found = validate([checkpoint.root], Validation(level="header"))
    for finding in found["findings"]:
        if finding["kind"].startswith("pickle-") or finding["kind"] in ("unsafe", "path-escapes"):
            raise _unclean(finding["what"], str(finding["where"].get("file") or checkpoint.root), finding["why"])
    for unsafe in checkpoint.unsafe:
        raise _unclean(f"it names {unsafe.name}, which would run code", unsafe.file, unsafe.why)
    for name in checkpoint.unknown_globals:
        raise _unclean(f"it names {name}", checkpoint.root, "no framework is known to have it: loading it runs that")
    return {"clean": True, "files": found["checked"]["files"]}


def _unclean(what: str, where: str, why: str) -> Unsafe:
    return Unsafe(
        f"--native runs pickles, and one is not clean: {what}",
        where=where,
        why=why,
        fix="leave --native out: verify's own step runs no pickle; see `ckptctl validate`",
        code="pickle-not-clean",
    )


def run_native(
    checkpoint: Checkpoint,
    named: Checkpoint,
    rule: Rule | None,
    batches: Sequence[Batch],
    how: Launch,
    *,
    rates: Sequence[Sequence[float]] = (),
    clip: float = 0.0,
    seed: int = 1234,
) -> tuple[Record, Document]:
    """A checkpoint loaded and trained on by its own framework: the record of the steps, and what to say of the run.

    named is the same checkpoint under the model's parameter names. rates: each step's learning rate of each group.
    Raises Unsafe before anything is started where a pickle is not clean.
    """
    scanned = scan(checkpoint)
    wanted = plan(checkpoint, named, rule)
    require_gpus(how, wanted.world)
    job = {
        **wanted.job,
        "batches": [_lists(b) for b in batches],
        "rates": [list(r) for r in rates],
        "clip": clip,
        "seed": seed,
        "samples": SAMPLES,
        "device": how.device,
        "threads": 1,
    }
    if wanted.runner == "run_deepspeed":
        rows = len(job["batches"][0]["input_ids"])
        job["deepspeed"]["config"] |= {"train_micro_batch_size_per_gpu": rows, "gradient_clipping": clip}

    def use(folder: Path, told: Document) -> tuple[Record, Document]:
        if wanted.runner == "run_megatron":
            return record_of_saves(folder, told, named, rule), told
        return record_of(told, job["groups"]), told

    record, told = run_ranks(wanted.runner, job, wanted.world, how, use=use)
    if told["unset"]:
        listed = ", ".join(told["unset"][:3])
        record.notes.append(f"the framework's load left {len(told['unset'])} parameters as they were (NaN): {listed}")
    about = {
        "framework": told["framework"],
        "version": told["version"],
        "ranks": wanted.world,
        "device": how.device,
        "backend": "nccl" if how.device == "cuda" else "gloo",
        "seconds": told["seconds"],
        "pickles": scanned,
        "notes": [*wanted.notes, *told["notes"]],
        "types": told["types"],
    }
    about["notes"] += record.notes
    return record, about


def record_of(told: Document, groups: Sequence[Document]) -> Record:
    """What rank 0 told, as a record. groups are those of the job: params, and the settings that a step takes.

    Settings are those that the framework's optimizer had after the load, where it has as many groups.
    """
    record = Record(
        losses=told["losses"],
        logits=told["logits"],
        gradient_norms=told["gradient_norms"],
        lr=told["lr"],
        finite=told["finite"],
    )
    settings: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        held = told["settings"][number] if len(told["settings"]) == len(groups) else {}
        loaded = {k: held[k] for k in group["settings"] if k in held}
        if len(loaded) == len(group["settings"]):
            loaded |= group["decoupled"]
        else:
            loaded = {}
        settings |= dict.fromkeys(group["params"], loaded)
    bits = told["digests"] == "xxh3"
    for name, one in told["parameters"].items():
        record.parameters[name] = Trained(
            name,
            tuple(one["shape"]),
            before=one["before"] if bits else {},
            after=one["after"],
            samples=one["samples"],
            gradient_norms=one["gradient_norms"],
            step_before=one.get("step_before"),
            step_after=one.get("step_after"),
            settings=settings.get(name),
        )
    if not bits:
        record.notes.append("the framework's Python has no xxhash: the state as loaded was not compared bit for bit")
    return record


def require_gpus(how: Launch, world: int) -> None:
    """Unsupported where a rank would have no GPU of its own."""
    if how.device != "cuda":
        return
    from ckptctl.operations.verify.needs import torch_module

    count = torch_module().cuda.device_count()
    if count < world:
        raise Unsupported(
            f"--native on GPUs needs {world}, one a rank",
            why=f"torch sees {count} here",
            fix="--device cpu runs the ranks on the CPU, over gloo",
            code="no-device",
        )


def _lists(batch: Batch) -> Document:
    """A batch as lists of ids."""
    out = {"input_ids": batch.input_ids.tolist(), "labels": batch.labels.tolist()}
    if batch.attention_mask is not None:
        out["attention_mask"] = batch.attention_mask.tolist()
    return out
