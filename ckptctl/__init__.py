"""ckptctl: inspect, convert and compare training checkpoints without the framework that wrote them.

    with ckptctl.open("runs/step_300") as checkpoint:
        w = checkpoint["model.embed_tokens.weight"]
        w.shape, w.dtype, w[:4].sum(), checkpoint.state("model.embed_tokens.weight", "exp_avg").numpy()
    ckptctl.convert("runs/step_300", "out", to="hf", no_optimizer=True, model_config="runs/config.json")

Names below are imported when first used: `import ckptctl` alone costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptctl.api import (
        CheckpointView,
        TensorHandle,
        convert,
        diff,
        inspect,
        open,
        push,
        reshard,
        strip,
        validate,
        verify,
    )
    from ckptctl.core.errors import CkptError

__all__ = [
    "CheckpointView",
    "CkptError",
    "TensorHandle",
    "__version__",
    "convert",
    "diff",
    "inspect",
    "open",
    "push",
    "reshard",
    "strip",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "CkptError":
        from ckptctl.core.errors import CkptError

        return CkptError
    if name in __all__:
        from ckptctl import api

        return getattr(api, name)
    raise AttributeError(f"module 'ckptctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
