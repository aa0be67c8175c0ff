"""`convert --verify` and `reshard --verify`: the result trains the source's next step before it has its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Mismatch, Usage
from ckptctl.formats import TARGETS
from ckptctl.operations.verify.needs import torch_module, transformers_module
from ckptctl.operations.verify.verifying import verify
from ckptctl.operations.verify.wanted import Verification

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptctl.operations.conversion import Conversion
    from ckptctl.operations.opening import Reading
    from ckptctl.operations.running import Running

Document = dict[str, Any]


def verified_before(
    src: Path | str, wanted: Conversion, reading: Reading | None, running: Running, document: Document
) -> Callable[[Path], None] | None:
    """What is called with the finished result; None where nothing is written.

    Its answer goes under `verify` into the document. Usage for conversions whose result is not to train alike;
    Unsupported, before anything is written, where torch is not there. It raises Mismatch where the result differs.
    """
    for flag, given in (
        ("--only", wanted.only),
        ("--exclude", wanted.exclude),
        ("--trainable-only", wanted.trainable_only),
        ("--merge-adapter", wanted.merge_adapter),
    ):
        if given:
            raise Usage(f"--verify and {flag} do not go together", why="the result is another model than the source")
    torch_module(), transformers_module()
    if running.dry_run:
        return None
    what = Verification(
        memory=running.memory,
        no_optimizer=wanted.no_optimizer,
        same_settings=TARGETS[wanted.to].own_groups,
        rounded=wanted.dtype != "source",
    )

    def check(result: Path) -> None:
        found = verify(src, result, what, reading)
        document["verify"] = {k: found[k] for k in ("equal", "tolerance", "compared", "notes", "first", "cause")}
        if not found["equal"]:
            differences = found["differences"]
            at = found["cause"] or found["first"] or differences[0]
            raise Mismatch(
                f"the result does not train as the source does: {len(differences)} differences",
                where=at["name"],
                why=f"{at['kind']}: {at['what']} {at['detail']}",
                fix="the result was removed; please report this, with both checkpoints' `inspect --json`",
                code="verify-differs",
            )

    return check
