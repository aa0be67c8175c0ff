"""Slices of tensors in safetensors files, as torch's distributed checkpoints write them: where each one belongs.

Every file's header names the offsets of its slices; the size of the whole tensor is in no file.
Source: torch 2.13.0, distributed/checkpoint/_hf_utils.py, DCP_SHARDING_INFO; hf_storage.py; filesystem.py (items as
safetensors inside `.distcp`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged
from ckptctl.formats.jsonscan import short

if TYPE_CHECKING:
    from ckptctl.formats.st.header import StHeader

INFO = "DCP_SHARDING_INFO"
OWN_METADATA = ("DCP_VERSION", INFO)
"""Entries of `__metadata__` that are true of slices only."""


def slices(header: StHeader, path: str) -> dict[str, tuple[int, ...]] | None:
    """Name -> offsets of the slice that a file of torch's DCP writer holds; None for a file of whole tensors.

    The global shape is in no file: it is the largest offset + size over all shards. Damaged, code dcp-sharding-info,
    where the text is no such map.
    """
    text = header.metadata.get(INFO)
    if text is None:
        return None
    try:
        info = json.loads(text)
        out = {name: tuple(info[name]["saved_offsets"]) for name in header.entries}
    except (ValueError, RecursionError, KeyError, TypeError) as err:
        why = f"{type(err).__name__}: {str(err)[:100]}"
        raise Damaged(
            "DCP_SHARDING_INFO cannot be read", where=path, why=why, fix="copy it again", code="dcp-sharding-info"
        ) from err
    for name, offsets in out.items():
        shape = header.entries[name].shape
        if len(offsets) != len(shape) or any(type(o) is not int or not 0 <= o < 1 << 62 for o in offsets):
            what = f"the slice of {short(name)} has offsets that do not fit it"
            why = f"offsets {list(offsets)[:8]}, shape {list(shape)[:8]}"
            raise Damaged(what, where=path, why=why, fix="copy it again", code="dcp-sharding-info")
    return out
