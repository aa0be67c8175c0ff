"""What a verification is asked to do, and what is decided before anything is run. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptctl.core.errors import Usage
from ckptctl.operations.verify.batches import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.operations.verify.compare import Measure
    from ckptctl.operations.verify.forms import Forms, Unlike
    from ckptctl.operations.verify.schedule import Rate
    from ckptctl.operations.verify.sides import Side
    from ckptctl.operations.verify.step import Job

VOCABULARIES = ("auto", "true", "padded")


@dataclass(frozen=True, slots=True)
class Verification:
    """What is run. dtype is a word of --dtype; lr are rates of the steps, the last one for all that follow."""

    steps: int = 1
    batch: Wanted = field(default_factory=Wanted)
    device: str = "auto"
    dtype: str = "auto"
    layers: int | None = None
    memory: str = "512MiB"
    offload: bool = False
    lr: tuple[float, ...] = ()
    clip: float = 0.0
    no_optimizer: bool = False
    native: bool = False
    python: str | None = None
    native_timeout_s: float = 900.0
    recompute: str | None = None
    find_max_batch: bool = False
    no_model: bool = False
    """Gradients are drawn instead of computed: for models that Transformers has not."""
    same_settings: bool = False
    """Both sides take the groups' settings of the first: what differs in them is a note."""
    rounded: bool = False
    """Weights of the side that has them in a narrower type are those of the other, rounded."""
    vocabulary: str = "auto"
    """true, padded, or auto: padded where every side has the same padding."""


@dataclass(frozen=True)
class Prepared:
    """Sides under their models' names, and the job that both are run by: what everything else is made of."""

    sides: tuple[Side, ...]
    forms: tuple[Forms, ...]
    job: Job
    measure: Measure
    unlike: tuple[Unlike, ...] = ()
    notes: tuple[str, ...] = ()
    rates: tuple[Sequence[Rate], ...] = ()
    """Each side's learning rates of the steps, and of a few more."""
    layers: tuple[int, int] = (0, 0)
    """(layers that are run, layers of the model)."""


def parse_rates(text: str | None) -> tuple[float, ...]:
    """--lr as numbers. Usage where one is none."""
    try:
        found = tuple(float(word) for word in (text or "").split(",") if word.strip())
    except ValueError as err:
        raise Usage(f"--lr {text}: {err}", fix="numbers with commas between them, such as 1e-3,5e-4") from err
    if any(not 0 <= rate < float("inf") for rate in found):
        raise Usage(f"--lr {text}: a learning rate is a number from 0 on")
    return found
