"""Values of the text opcodes of protocols 0 and 1, and of those that count their bytes.

Raises ValueError for text that no pickler writes.

Source: CPython 3.13, Lib/pickle.py, load_int, load_long, load_float, load_string, load_unicode.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.values import Tree


def _int(line: bytes) -> Tree:
    if line in (b"00", b"01"):
        return line == b"01"
    return int(line, 0)


def _long(line: bytes) -> int:
    return int(line[:-1] if line.endswith(b"L") else line, 0)


def _old_text(data: bytes) -> Tree:
    """A str of Python 2: text where it is UTF-8, as torch.load reads it, else bytes."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _string(line: bytes) -> Tree:
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b'"', b"'"):
        raise ValueError("a text without its quotes")
    return _old_text(codecs.escape_decode(line[1:-1])[0])


def _unicode(line: bytes) -> str:
    return str(line, "raw-unicode-escape")


TEXT_VALUES: dict[int, Callable[[bytes], Tree]] = {
    ord("I"): _int,
    ord("L"): _long,
    ord("F"): float,
    ord("S"): _string,
    ord("V"): _unicode,
}


COUNTED_BYTES: dict[int, Callable[[bytes], Tree]] = {
    0x42: bytes,
    0x43: bytes,
    0x8E: bytes,
    0x96: bytearray,
    0x8D: lambda data: str(data, "utf-8", "surrogatepass"),
    0x54: _old_text,
    0x55: _old_text,
}
"""Values whose bytes follow their number, by opcode: what is made of the bytes."""
