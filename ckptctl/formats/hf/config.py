"""config.json of a Hugging Face folder: reading it, and what it says of the bytes. Layers are not here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.formats.bytesource import FileBytes

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "config.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
"""config.json's own word for the weights' type. Source: transformers 5.24.0 writes the first, 4 the second."""
_LIMIT = 1 << 22


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are packed: such tensors are copied as bits, never cut, cast or compared as plain matrices."""

    method: str
    settings: dict[str, Any]


def read_config(path: Path, name: str = "") -> dict[str, Any]:
    """A JSON object of a file: config.json, adapter_config.json, generation_config.json. name is for messages.

    Raises MissingFile; Damaged (config-not-json) for what is no JSON object; Unsupported beyond 4 MiB.
    """
    name = name or str(path)
    if not path.exists():
        raise MissingFile(
            "the file is not there", where=name, fix="copy it, or give --model-config", code="config-missing"
        )
    with FileBytes(path, name=name) as source:
        if source.nbytes > _LIMIT:
            raise Unsupported(f"the file is over {_LIMIT:,} bytes", where=name, why=f"{source.nbytes:,} bytes")
        text = source.read(0, source.nbytes)
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as err:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        why = str(err)[:200] or "it is nested too deep"
        raise Damaged("the file is no JSON", where=name, why=why, fix="copy it again", code="config-not-json") from err
    if not isinstance(value, dict):
        why = f"it is {type(value).__name__}"
        raise Damaged("the file is no JSON object", where=name, why=why, fix="copy it again", code="config-not-json")
    return value


def quantization(config: dict[str, Any]) -> Quantization | None:
    """What quantization_config says; None where there is none.

    Source: transformers 5.24.0, quantizers/auto.py; compression_config is the older name in compressed-tensors.
    """
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if isinstance(settings, dict) and settings:
            method = settings.get("quant_method")
            return Quantization(method if isinstance(method, str) else "", settings)
    return None


def config_dtype(config: dict[str, Any]) -> str:
    """The dtype that config.json names, as torch spells it without `torch.`; "" where it names none."""
    for key in DTYPE_KEYS:
        value = config.get(key)
        if isinstance(value, str):
            return value.removeprefix("torch.")
    return ""
