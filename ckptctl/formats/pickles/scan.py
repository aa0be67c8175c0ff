"""One fast pass over a pickle's opcodes: is all inside, where does it stop, which memo ids are read. Builds nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.pickles.opcodes import CODE, LINE, OPCODES, REFUSED

HIGHEST_PROTOCOL = 5
_MAX_LINE = 1 << 24
_WINDOW = 1 << 22
_SHORT_TEXT = 64
"""Texts below this many bytes are passed over in C."""


class Scan(NamedTuple):
    """What a pass over the opcodes found.

    stop is one past STOP. read holds every memo id below stop - start that some GET names, and possibly a few more
    (it is found without telling operands from opcodes, which is what makes it fast): what is not in it is never read.
    """

    start: int
    stop: int
    protocol: int
    read: frozenset[int]


class Truncated(Damaged):
    """The pickle goes on beyond the bytes given: more of the file may be needed. at is the opcode that is cut."""

    code = "pickle-truncated"
    at = 0


def scan(data: bytes | memoryview, where: str, start: int = 0) -> Scan:
    """Checks the pickle at data[start:] opcode by opcode and says where it stops. where is the file, for messages.

    Raises Truncated where the data end before STOP, Damaged at a byte that is no opcode, Unsupported for EXT1/2/4,
    NEXT_BUFFER, READONLY_BUFFER and protocols above 5. Takes no memory for lengths that the data claim.
    """
    size, at, protocol, skip = len(data), start, 0, _FIXED.match
    while True:
        run = skip(data, at)
        at = run.end() if run else at
        if at >= size:
            raise _truncated(where, at, size, "before STOP")
        opcode = OPCODES.get(data[at])
        if opcode is None:
            raise Damaged(
                f"byte {data[at]:#04x} is no pickle opcode",
                where=where,
                why=f"at byte {at}",
                fix="copy the file again",
                code="pickle-damaged",
            )
        name, operand, counted = opcode
        if name in REFUSED:
            raise Unsupported(
                f"the pickle uses {name}",
                where=where,
                why=f"at byte {at}: {REFUSED[name]}",
                fix="save it again without",
                code="pickle-opcode",
            )
        if operand < 0:
            after = at + 1
            for _ in range(-operand):
                after = _line_stop(data, after, where, name)
        else:
            after = at + 1 + operand
        if after > size:
            raise _truncated(where, at, size, f"inside {name}")
        if counted:
            nbytes = int.from_bytes(data[at + 1 : after], "little")
            if nbytes > size - after:
                raise _truncated(where, at, size, f"inside {name} of {nbytes} bytes")
            after += nbytes
        elif name == "PROTO":
            protocol = data[at + 1]
            if protocol > HIGHEST_PROTOCOL:
                raise Unsupported(
                    f"pickle protocol {protocol}",
                    where=where,
                    why=f"at byte {at}; 5 is the newest known",
                    code="pickle-protocol",
                )
        at = after
        if name == "STOP":
            return Scan(start, at, protocol, read_ids(data, start, at))


def _truncated(where: str, at: int, size: int, how: str) -> Truncated:
    made = Truncated(f"the pickle ends {how}", where=where, why=f"at byte {at} of {size}", fix="copy the file again")
    made.at = at
    return made


def _line_stop(data: bytes | memoryview, at: int, where: str, name: str) -> int:
    """One past the newline that ends the line at data[at:]."""
    line = _LINE.match(data, at, min(len(data), at + _MAX_LINE))
    if line is None:
        if len(data) - at >= _MAX_LINE:
            raise Damaged(
                f"a line of {name} is longer than {_MAX_LINE} bytes",
                where=where,
                why=f"at byte {at}",
                code="pickle-damaged",
            )
        raise _truncated(where, at, len(data), f"inside {name}")
    return line.end()


def read_ids(data: bytes | memoryview, start: int, stop: int) -> frozenset[int]:
    """Memo ids that a GET could name: whatever follows a byte that could be one, below the pickle's length."""
    flat = np.frombuffer(data, dtype=np.uint8)
    known: set[int] = set()  # np.unique would import numpy.ma, a fiftieth of a second
    for first in range(start, stop, _WINDOW):
        part = flat[first : min(stop, first + _WINDOW + 4)].astype(np.uint8)
        short = np.flatnonzero(part[:-1] == CODE["BINGET"])
        known.update(np.flatnonzero(np.bincount(part[short + 1])).tolist())
        if len(part) > 4:
            long = np.flatnonzero(part[:-4] == CODE["LONG_BINGET"])
            ids = part[long + 1].astype(np.int64)
            for byte in (1, 2, 3):
                ids |= part[long + 1 + byte].astype(np.int64) << (8 * byte)
            known.update(ids[ids < stop - start].tolist())
    if protocol_0_gets := _TEXT_GET.findall(data, start, stop):
        known.update(int(digits) for digits in protocol_0_gets)
    return frozenset(known)


def _fixed_runs() -> re.Pattern[bytes]:
    """Matches opcodes whose length says nothing about others, and short texts, one after the other, in C."""
    by_size: dict[int, bytes] = {}
    for code, opcode in OPCODES.items():
        if opcode.operand >= 0 and not opcode.counted and opcode.name not in (*REFUSED, "STOP", "PROTO"):
            by_size[opcode.operand] = by_size.get(opcode.operand, b"") + re.escape(bytes([code]))
    return re.compile(
        b"(?:"
        + b"|".join(b"[%b].{%d}" % (codes, n) if n else b"[%b]++" % codes for n, codes in sorted(by_size.items()))
        + b"|X(?:%b)" % b"|".join(b"%b\\0\\0\\0.{%d}" % (re.escape(bytes([n])), n) for n in range(_SHORT_TEXT))
        + b")*+",
        re.S,
    )


_FIXED = _fixed_runs()
_LINE = re.compile(rb"[^\n]*+\n")
_TEXT_GET = re.compile(rb"g(\d{1,10})\n")
assert LINE == -1
