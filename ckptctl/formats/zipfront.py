"""A zip archive's first records, without its directory: what an item of a .distcp file says in its first few KB."""

from __future__ import annotations

import struct

from ckptctl.checksum import crc32
from ckptctl.core.errors import Damaged
from ckptctl.formats.zipformat import CENTRAL, DESCRIPTOR, ENCRYPTED, FULL32, LOCAL, LOCAL_HEADER, STREAMED


def first_records(prefix: bytes, base: int = 0) -> dict[str, tuple[int, int]]:
    """Records found from the front: name -> (base + first payload byte, bytes; -1 where prefix ends first).

    prefix begins at a local header. Only STORED records are followed; the list ends at the first record whose end is
    not in prefix, or at anything else than a local header. Raises Damaged (archive-inconsistent) where
    it does not start with one.

    torch leaves sizes out of local headers and puts them into a descriptor behind the payload, so the payload's end is
    looked for: the first descriptor whose two sizes are its own distance from the payload's start and whose CRC-32 is
    that of the bytes between (or 0, "not computed"). A payload can imitate that only on purpose; then this and
    read_zip differ, and nothing worse: every position is inside the file. Where it matters, read the directory.
    """
    found: dict[str, tuple[int, int]] = {}
    p = 0
    while p + LOCAL_HEADER.size <= len(prefix) and prefix[p : p + 4] == LOCAL:
        fields: tuple[int, ...] = LOCAL_HEADER.unpack_from(prefix, p)
        _, _, flags, method, _, _, _, compressed, _, name_len, extra_len = fields
        names_at = p + LOCAL_HEADER.size
        start = names_at + name_len + extra_len
        name = prefix[names_at : names_at + name_len].decode("utf-8", "replace")
        if start > len(prefix) or name in found:
            break
        stop, p = -1, -1
        if method == 0 and not flags & ENCRYPTED:
            stop, p = _payload_stop(prefix, start, flags, compressed)
        found[name] = (base + start, stop - start if stop >= 0 else -1)
        if p < 0:
            break
    if not found:
        why = f"the first bytes are {prefix[:8].hex(' ') or 'none'}"
        fix = "copy the file again"
        raise Damaged("no zip record starts here", where=f"byte {base}", why=why, fix=fix, code="archive-inconsistent")
    return found


def _payload_stop(prefix: bytes, start: int, flags: int, compressed: int) -> tuple[int, int]:
    """(payload's end, where the next header may be) within prefix, each -1 where it is not to be found there."""
    if not flags & STREAMED or compressed not in (0, FULL32):
        stop = start + compressed
        if compressed == FULL32 or stop > len(prefix):
            return (-1, -1)
        return (stop, stop + 16 if flags & STREAMED else stop)
    if prefix[start : start + 4] in (LOCAL, CENTRAL):  # nothing, and no descriptor
        return (start, start)
    stop, crc, done = start, 0, start
    while (stop := prefix.find(DESCRIPTOR, stop)) >= 0:
        for size, layout in ((24, "<IQQ"), (16, "<III")):
            if stop + size > len(prefix):
                continue
            said, first, second = struct.unpack_from(layout, prefix, stop + 4)
            if first == second == stop - start:
                crc, done = crc32(memoryview(prefix)[done:stop], crc), stop
                if said in (crc, 0):
                    return (stop, stop + size)
        stop += 1
    return (-1, -1)
