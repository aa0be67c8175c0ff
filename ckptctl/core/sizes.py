"""Sizes as people write them: 5GB, 200KB, 512MiB. Pure text and integers."""

from __future__ import annotations

import re
from decimal import Decimal

from ckptctl.core.errors import Usage

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)


def parse_size(text: str, what: str = "the size") -> int:
    """Bytes, rounded down, of a number and a unit: KB to TB are decimal, KiB to TiB binary; none is bytes.

    Upper and lower case are alike. what is the flag that a message names. Raises Usage for anything else,
    and beyond 64 bits.
    Source: huggingface_hub 2.4.0, serialization/_base.py, parse_size_to_int, for the decimal units.
    """
    found = _SIZE.fullmatch(text)
    factor = _UNITS.get(found[2].upper()) if found else None
    if found is None or factor is None:
        why = f"a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB are wanted, {text[:40]!r} is given"
        raise Usage(f"{what} cannot be read", why=why, fix="write it like 5GB or 512MiB")
    value = int(Decimal(found[1]) * factor)
    if value >= 1 << 63:
        raise Usage(f"{what} is beyond 64 bits", why=f"{text[:40]!r} is given", fix="give a smaller one")
    return value
