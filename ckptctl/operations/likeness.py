"""The run that a result is for (`--like`): what it decides where no flag does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported
from ckptctl.formats.order import LIKE
from ckptctl.operations.conversion import is_given
from ckptctl.operations.opening import open_checkpoint, require_safe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.operations.conversion import Conversion

_AXES = ("dp", "tp", "pp", "vpp", "ep", "zero_stage")


@dataclass(frozen=True)
class Likeness:
    """What a checkpoint of the run says: fields of a conversion, and its optimizer's parameters in order."""

    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    param_order: tuple[str, ...] = ()


def with_like(wanted: Conversion) -> tuple[Conversion, Any]:
    """The conversion with what that run decides, and the run as the target's format reads it; None where none is given.

    Only once check_flags has seen that the target takes one.
    """
    if wanted.like is None:
        return wanted, None
    path = Path(wanted.like)
    own = f"ckptctl.formats.{wanted.to}.like"
    like = import_module(own).read(path) if find_spec(own) else _of_checkpoint(path, wanted)
    said = {name: value for name, value in like.defaults.items() if not is_given(wanted, name)}
    return replace(wanted, **said), like


def _of_checkpoint(path: Path, wanted: Conversion) -> Likeness:
    """The layout of a checkpoint, and the order of its parameters where files keep them by place."""
    checkpoint, _ = open_checkpoint(path)
    require_safe(checkpoint)
    if checkpoint.format != wanted.to:
        raise Unsupported(
            f"--like: a checkpoint of {checkpoint.format} is there, and {wanted.target.called} is to be written",
            where=str(path),
            fix=f"give a {wanted.to} checkpoint of the run that goes on",
        )
    layout = dict(checkpoint.layout)
    layout["dp"] = layout.get("dp") or layout.get("world_size")
    said: dict[str, Any] = {a: layout[a] for a in _AXES if a in wanted.target.flags and layout.get(a) is not None}
    if checkpoint.variant == "universal":
        said = {"universal": True}
    elif wanted.universal:
        said.pop("zero_stage", None)
    groups = checkpoint.optimizer.groups if checkpoint.optimizer and wanted.to == "deepspeed" else ()
    return Likeness(str(path), said, tuple(n for g in groups for n in g.params))


def order_of(like: Any, given: tuple[str, ...]) -> dict[str, Any]:
    """The parameters' order, the user's own, else that run's; and by which flag it is given: fields of Choices."""
    if not given and isinstance(like, Likeness):
        return {"param_order": like.param_order, "order_flag": LIKE}
    return {"param_order": given}
