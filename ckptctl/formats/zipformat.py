"""The zip format's fixed parts, and what its readers share. Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 to 4.5."""

from __future__ import annotations

import struct
from typing import NamedTuple, NoReturn

from ckptctl.core.errors import Damaged

LOCAL, CENTRAL, DESCRIPTOR = b"PK\3\4", b"PK\1\2", b"PK\7\b"
END, END64, LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
END_RECORD = struct.Struct("<4sHHHHIIH")
END64_RECORD = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
ZIP64_ID = 1
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
"""What a short field holds where the number stands in a zip64 one."""

STREAMED, UTF8, ENCRYPTED = 0x0008, 0x0800, 0x2041
"""Flag bits: sizes follow the payload; the name is UTF-8; any of the kinds of encryption."""
KNOWN_FLAGS = STREAMED | UTF8 | 0x0006
"""Bits 1 and 2 say how hard deflate tried."""


class Entry(NamedTuple):
    """A row of the central directory; offset is that of the local header. Sizes are bytes."""

    name: bytes
    offset: int
    nbytes: int
    compressed: int
    method: int
    crc: int
    flags: int

    def __str__(self) -> str:
        return shown(self.name)


def zip64_field(path: str, name: bytes, extra: bytes) -> bytes | None:
    """The content of the zip64 extra field, None where there is none. Damaged where there are two."""
    p, field = 0, None
    while p + 4 <= len(extra):
        ident, size = struct.unpack_from("<HH", extra, p)
        if p + 4 + size > len(extra):
            break
        if ident == ZIP64_ID:
            if field is not None:
                bad(path, f"record {shown(name)} has two zip64 fields", "loaders differ in which one they take")
            field = extra[p + 4 : p + 4 + size]
        p += 4 + size
    return field


def shown(name: bytes) -> str:
    """A name for a message: short, and without control characters."""
    return repr(name[:80].decode("utf-8", "replace"))


def bad(path: str, what: str, why: str) -> NoReturn:
    """Raises Damaged, code archive-inconsistent."""
    fix = "copy the file again, or write it again where that does not help"
    raise Damaged(what, where=path, why=why, fix=fix, code="archive-inconsistent")
