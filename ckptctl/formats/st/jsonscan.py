"""The JSON of a safetensors header, scanned in place: no tree is built, so that 100 MB of hostile text cost no more than themselves.

Python's json keeps the last of duplicate keys, takes true for 1, NaN, lone surrogates and 1e0, and recurses; none of that is wanted here.
Knows JSON and the shape of an entry; the rules that entries must keep are in header.py.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from ckptctl.core.errors import Damaged

DEPTH = 128
"""Source: serde_json 1, remaining_depth, which safetensors 0.8.0 parses with."""
U64 = 1 << 64

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"((?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+)"')
_SCALAR = re.compile(rb"true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_INTS = re.compile(rb"\[[ \t\n\r]*+(?:(?:0|[1-9][0-9]*+)[ \t\n\r]*+(?:,[ \t\n\r]*+(?:0|[1-9][0-9]*+)[ \t\n\r]*+)*+)?+\]")
_INT = re.compile(rb"[0-9]++")
_USUAL = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:(?:0|[1-9][0-9]{0,18})(?:,(?:0|[1-9][0-9]{0,18}))*+)?+)\],'
    rb'"data_offsets":\[(0|[1-9][0-9]{0,18}),(0|[1-9][0-9]{0,18})\]\}'
)
"""An entry as the reference writer has it; numbers of up to 19 digits fit 64 bits."""


class Raw(NamedTuple):
    """One entry as it stands. A field is None where it is missing or no list of integers from 0 to 2**64 - 1; then why has (code, reason)."""

    dtype: str | None
    shape: tuple[int, ...] | None
    offsets: tuple[int, ...] | None
    why: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()


class Scan:
    """A walk over header text. Every method takes a position and returns one; Damaged where the text is no JSON."""

    def __init__(self, text: bytes, path: str) -> None:
        self.text, self.path = text, path

    def space(self, p: int) -> int:
        """The first byte at or after p that is no white space."""
        return _SPACE.match(self.text, p).end()  # type: ignore[union-attr]  # matches always

    def byte(self, p: int) -> bytes:
        """One byte, b"" at the end."""
        return self.text[p : p + 1]

    def string(self, p: int) -> tuple[str, int]:
        """The string whose quote is at p."""
        found = _STRING.match(self.text, p)
        if found is None:
            self.fail(p, "a string is wanted")
        raw = found[1]
        try:
            if b"\\" not in raw:
                return raw.decode(), found.end()
            value = json.loads(found[0])
            value.encode()  # a lone surrogate cannot be; serde_json refuses it, too
        except UnicodeError:
            self.fail(p, "an escape makes half a character")
        return str(value), found.end()

    def key(self, p: int) -> tuple[str, int]:
        """The key at p, and where its value begins."""
        name, p = self.string(self.space(p))
        p = self.space(p)
        if self.byte(p) != b":":
            self.fail(p, "a colon is wanted")
        return name, self.space(p + 1)

    def next(self, p: int, closer: bytes) -> tuple[bool, int]:
        """After a member: (whether another follows, where)."""
        p = self.space(p)
        if self.byte(p) == closer:
            return False, p + 1
        if self.byte(p) != b",":
            self.fail(p, "a comma or the end of an object is wanted")
        return True, p + 1

    def opened(self, p: int) -> tuple[bool, int]:
        """Behind the brace of an object: (whether it has members, where)."""
        p = self.space(p + 1)
        return (False, p + 1) if self.byte(p) == b"}" else (True, p)

    def skip(self, p: int) -> int:
        """Past the value at p, whatever it is. Damaged with code bad-entry where it is nested over 128 deep."""
        closers = bytearray()
        while True:
            p = self.space(p)
            c = self.byte(p)
            if c in (b"{", b"["):
                closers += b"}" if c == b"{" else b"]"
                if len(closers) > DEPTH - 2:
                    raise Damaged(
                        f"the header is nested over {DEPTH} deep", where=self.path, why=f"at byte {8 + p}", fix="write the file again", code="bad-entry"
                    )
                inner = self.space(p + 1)
                if self.byte(inner) != closers[-1:]:
                    p = self.key(inner)[1] if c == b"{" else inner
                    continue
                closers.pop()
                p = inner + 1
            elif c == b'"':
                p = self.string(p)[1]
            else:
                found = _SCALAR.match(self.text, p)
                if found is None:
                    self.fail(p, "a value is wanted")
                p = found.end()
            while closers:
                more, p = self.next(p, bytes(closers[-1:]))
                if not more:
                    closers.pop()
                    continue
                if closers[-1:] == b"}":
                    p = self.key(p)[1]
                break
            else:
                return p

    def ints(self, p: int, code: str) -> tuple[tuple[int, ...] | None, tuple[str, str] | None, int]:
        """The list of integers at p, or None and why not, and the position behind it."""
        found = _INTS.match(self.text, p)
        if found is None:
            stop = self.skip(p)
            return None, (code, f"a list of integers from 0 is wanted, {self.shown(p, stop)} is there"), stop
        values = []
        for digits in _INT.findall(found[0]):
            if len(digits) > 20 or (value := int(digits)) >= U64:
                over = "size-overflow" if code == "bad-shape" else code
                return None, (over, f"{self.shown(p, found.end())} holds a number beyond 64 bits"), found.end()
            values.append(value)
        return tuple(values), None, found.end()

    def entry(self, p: int) -> tuple[Raw, int]:
        """The entry of a tensor at p."""
        found = _USUAL.match(self.text, p)
        if found is not None:
            dtype, shape, begin, stop = found.groups()
            return Raw(dtype.decode(), tuple(map(int, shape.split(b","))) if shape else (), (int(begin), int(stop))), found.end()
        if self.byte(p) != b"{":
            stop_at = self.skip(p)
            return Raw(None, None, None, (("bad-entry", f"an object is wanted, {self.shown(p, stop_at)} is there"),)), stop_at
        dtype_text: str | None = None
        lists: dict[str, tuple[int, ...] | None] = {"shape": None, "data_offsets": None}
        why: list[tuple[str, str]] = []
        seen: set[str] = set()
        extra: list[str] = []
        more, p = self.opened(p)
        while more:
            field, p = self.key(p)
            if field in seen:
                why.append(("bad-entry", f"the field {short(field)} stands twice"))
            seen.add(field)
            if field == "dtype" and self.byte(p) == b'"':
                dtype_text, p = self.string(p)
            elif field in lists:
                lists[field], problem, p = self.ints(p, "bad-shape" if field == "shape" else "bad-offsets")
                why += [problem] if problem else []
            else:
                stop_at = self.skip(p)
                if field == "dtype":
                    why.append(("unknown-dtype", f"a text is wanted, {self.shown(p, stop_at)} is there"))
                elif len(extra) < 4:
                    extra.append(field)
                p = stop_at
            more, p = self.next(p, b"}")
        why += [("missing-field", f"{field} is missing") for field in ("dtype", "shape", "data_offsets") if field not in seen]
        return Raw(dtype_text, lists["shape"], lists["data_offsets"], tuple(why), tuple(extra)), p

    def texts(self, p: int) -> tuple[dict[str, str], list[str], list[str], int]:
        """The object of texts at p: (it, keys whose values are no texts, keys that stand twice, position behind it)."""
        out: dict[str, str] = {}
        others: list[str] = []
        twice: list[str] = []
        more, p = self.opened(p)
        while more:
            key, p = self.key(p)
            if key in out:
                twice.append(key)
            if self.byte(p) == b'"':
                out[key], p = self.string(p)
            else:
                others.append(key)
                p = self.skip(p)
            more, p = self.next(p, b"}")
        return out, others, twice, p

    def shown(self, p: int, stop: int) -> str:
        """Text for a message."""
        return self.text[p : min(stop, p + 40)].decode("utf-8", "replace") + ("..." if stop > p + 40 else "")

    def fail(self, p: int, wanted: str) -> NoReturn:
        """Raises Damaged, code header-not-json."""
        there = f"{self.shown(p, p + 20)!r} is there" if p < len(self.text) else "the header ends"
        raise Damaged("the header is no JSON", where=self.path, why=f"{wanted} at byte {8 + p}, {there}", fix="copy the file again", code="header-not-json")


def short(name: str) -> str:
    """A name for a message."""
    return repr(name if len(name) <= 120 else name[:117] + "...")
