"""Writing safetensors: the header from names, dtypes and shapes alone, then the tensors, streamed.

Byte for byte what the reference writes, whose order of __metadata__ is random: here it is as given.
Source: safetensors 0.8.0, tensor.rs: prepare, serialize, Metadata::serialize, and the order of enum Dtype.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_SAFETENSORS
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import Put, Region, Segment
from ckptctl.formats.st.header import HEADER_LIMIT, METADATA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RANK = {name: rank for rank, name in enumerate(BY_SAFETENSORS)}
"""Where a dtype stands in enum Dtype, which core.dtype follows."""


def safetensors_segments(
    tensors: Sequence[tuple[str, Region]],
    metadata: Mapping[str, str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Segment]:
    """The segments of one file: its header, then the regions by dtype, the widest first, then by name.

    A region's shape is its size, but where shapes has another (elements smaller than a byte, moved as bytes).
    Raises Unsupported for a dtype that the format does not have, and for a header over 100 MB; ValueError for a
    name that stands twice, is __metadata__, or is no text that UTF-8 can hold.
    """
    seen: set[str] = set()
    for name, region in tensors:
        if name in seen or name == METADATA:
            raise ValueError(f"tensor {name!r} stands twice, or has a name that the format keeps for itself")
        seen.add(name)
        if not region.dtype.safetensors:
            raise Unsupported(
                f"safetensors cannot hold {region.dtype.name}",
                where=name,
                why=f"its dtypes are {', '.join(BY_SAFETENSORS)}",
                fix="exclude the tensor, or write another format",
                code="dtype-not-in-target",
            )
    ordered = sorted(tensors, key=lambda item: (-_RANK[item[1].dtype.safetensors], item[0].encode()))
    given = shapes or {}
    rows = [(name, region.dtype.safetensors, given.get(name, region.size), region.nbytes) for name, region in ordered]
    return [Put(_header(rows, metadata)), *(region for _, region in ordered)]


def _header(rows: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None) -> bytes:
    """Length word and header of (name, dtype, shape, bytes) in the data's order."""
    parts: list[str] = []
    if metadata is not None:
        parts.append(f"{_text(METADATA)}:{{{','.join(f'{_text(k)}:{_text(v)}' for k, v in metadata.items())}}}")
    at = 0
    for name, dtype, shape, nbytes in rows:
        sizes = ",".join(map(str, shape))
        parts.append(f'{_text(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{at},{at + nbytes}]}}')
        at += nbytes
    text = f"{{{','.join(parts)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        what, why = f"the header of {len(rows)} tensors is over {HEADER_LIMIT:,} bytes", f"{len(text):,} bytes"
        raise Unsupported(what, why=why, fix="use a smaller --max-shard-size")
    return len(text).to_bytes(8, "little") + text


def _text(value: str) -> str:
    """A JSON string as serde_json writes it: only quotes, backslashes and control characters are escaped."""
    return json.dumps(value, ensure_ascii=False)
