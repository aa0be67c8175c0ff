"""The run that a result is for (`--like`): what it decides where no flag does."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.operations.conversion import Conversion


def with_like(wanted: Conversion) -> tuple[Conversion, Any]:
    """The conversion with what that run decides, and the run as the target's format reads it; None where none is given.

    Only once check_flags has seen that the target takes one.
    """
    if wanted.like is None:
        return wanted, None
    like = import_module(f"ckptctl.formats.{wanted.to}.like").read(Path(wanted.like))
    said = {name: value for name, value in like.defaults.items() if getattr(wanted, name) is None}
    return replace(wanted, **said), like
