"""What `verify` needs beyond the core: torch and Transformers, imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckptctl.core.errors import Unsupported

INSTALL = "pip install 'ckptctl[verify]'"
"""The line that installs both."""


def torch_module() -> Any:
    """Torch. Unsupported, with the install line, where it is not there."""
    return _needed("torch")


def transformers_module() -> Any:
    """Transformers. Unsupported, with the install line, where it is not there."""
    return _needed("transformers")


def _needed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as err:
        raise Unsupported(
            f"verify needs {name}, which is not installed",
            why=f"{type(err).__name__}: {err}",
            fix=f"install it: {INSTALL}",
            code="needs-install",
        ) from err
