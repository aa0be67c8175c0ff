"""What the command line and the Python API call: one function a command, documents out.

Names are imported when first used, so that `inspect` does not wait for what only `convert` needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.operations.comparing import Comparison, diff
    from ckptctl.operations.conversion import Conversion
    from ckptctl.operations.converting import convert
    from ckptctl.operations.inspecting import inspect, ls
    from ckptctl.operations.opening import Reading, open_checkpoint
    from ckptctl.operations.pushing import Push, push
    from ckptctl.operations.resharding import reshard
    from ckptctl.operations.running import Running
    from ckptctl.operations.showing import show
    from ckptctl.operations.stripping import strip
    from ckptctl.operations.validating import Validation, validate
    from ckptctl.operations.verify.batches import Wanted as Batches
    from ckptctl.operations.verify.verifying import verify as verify_training
    from ckptctl.operations.verify.wanted import Verification, parse_rates

_HOME = {
    "Comparison": "comparing",
    "diff": "comparing",
    "Conversion": "conversion",
    "Running": "running",
    "convert": "converting",
    "Push": "pushing",
    "push": "pushing",
    "reshard": "resharding",
    "inspect": "inspecting",
    "ls": "inspecting",
    "Reading": "opening",
    "open_checkpoint": "opening",
    "show": "showing",
    "strip": "stripping",
    "Validation": "validating",
    "validate": "validating",
    "Batches": "verify.batches",
    "Verification": "verify.wanted",
    "parse_rates": "verify.wanted",
    "verify_training": "verify.verifying",
}
_OTHERWISE = {"Batches": "Wanted", "verify_training": "verify"}
"""Names that are others at home. `verify` here is the package."""

__all__ = [
    "Batches",
    "Comparison",
    "Conversion",
    "Push",
    "Reading",
    "Running",
    "Validation",
    "Verification",
    "convert",
    "diff",
    "inspect",
    "ls",
    "open_checkpoint",
    "parse_rates",
    "push",
    "reshard",
    "show",
    "strip",
    "validate",
    "verify_training",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), _OTHERWISE.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
