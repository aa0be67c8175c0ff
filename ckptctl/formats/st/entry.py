"""One tensor's entry of a safetensors header, as it stands. Whether its numbers fit is header.py's matter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.formats.jsonscan import short

if TYPE_CHECKING:
    from ckptctl.formats.jsonscan import Scan

USUAL = re.compile(
    rb'"([^"\\\x00-\x1f]++)":'
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:(?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18}))*+)?+)\],'
    rb'"data_offsets":\[(0|[1-9][0-9]{0,18}),(0|[1-9][0-9]{0,18})\]\},'
)
"""A name and its entry as the reference writer has them, and a comma; numbers of up to 19 digits fit 64 bits."""


class Raw(NamedTuple):
    """dtype, shape and offsets, None where missing or of another type. why has (code, reason) for each fault.

    extra are fields that the format does not know.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None
    why: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()


def read_entry(scan: Scan, p: int) -> tuple[Raw, int]:
    """The entry at p, and the position behind it, whatever its fields' order, and whatever is missing or wrong."""
    if scan.byte(p) != b"{":
        after = scan.skip(p)
        reason = f"an object is wanted, {scan.shown(p, after)} is there"
        return Raw(None, None, None, (("bad-entry", reason),)), after
    dtype: str | None = None
    lists: dict[str, tuple[int, ...] | None] = {"shape": None, "data_offsets": None}
    why: list[tuple[str, str]] = []
    seen: set[str] = set()
    extra: list[str] = []
    more, p = scan.opened(p)
    while more:
        field, p = scan.key(p)
        if field in seen:
            why.append(("bad-entry", f"the field {short(field)} stands twice"))
        seen.add(field)
        if field == "dtype" and scan.byte(p) == b'"':
            dtype, p = scan.string(p)
        elif field in lists:
            lists[field], reason, after = scan.ints(p)
            if reason and field == "shape":
                why.append(("size-overflow" if "64 bits" in reason else "bad-shape", reason))
            elif reason:
                why.append(("bad-offsets", reason))
            p = after
        else:
            after = scan.skip(p)
            if field == "dtype":
                why.append(("unknown-dtype", f"a text is wanted, {scan.shown(p, after)} is there"))
            elif len(extra) < 4:
                extra.append(field)
            p = after
        more, p = scan.next(p, b"}")
    why += [
        ("missing-field", f"{field} is missing") for field in ("dtype", "shape", "data_offsets") if field not in seen
    ]
    return Raw(dtype, lists["shape"], lists["data_offsets"], tuple(why), tuple(extra)), p
