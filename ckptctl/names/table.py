"""Reads the naming files of this folder, each once."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(name: str) -> dict[str, Any]:
    """The data of `name.toml`. It is shared: nothing in it is to be changed."""
    return tomllib.loads(files(__package__ or "ckptctl.names").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
