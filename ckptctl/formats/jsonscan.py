"""JSON scanned in place: no tree is built, so 100 MB of hostile text cost no more than themselves.

For safetensors headers and index files. Python's json keeps the last of duplicate keys, takes true for 1, NaN, lone
surrogates and 1e0, and recurses; none of that is wanted here. What the members mean is not known here.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import NoReturn

from ckptctl.core.errors import Damaged

DEPTH = 128
"""Source: serde_json 1, remaining_depth, which safetensors 0.8.0 parses with."""
U64 = 1 << 64

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"((?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+)"')
_SCALAR = re.compile(rb"true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_INTS = re.compile(
    rb"\[\s*+(?:(?:0|[1-9][0-9]*+)\s*+(?:,\s*+(?:0|[1-9][0-9]*+)\s*+)*+)?+\]".replace(rb"\s", rb"[ \t\n\r]")
)
_INT = re.compile(rb"[0-9]++")
_PAIR = re.compile(rb'\s*+"([^"\\\x00-\x1f]++)"\s*+:\s*+"([^"\\\x00-\x1f]*+)"\s*+,'.replace(rb"\s", rb"[ \t\n\r]"))
"""A member whose key and value are texts without escapes, and a comma: nearly all there are in an index."""
_BLOCK = 1 << 20
_SKIP_LIMIT = 1 << 20
"""Bytes of values that nobody asked for; more is no header or index, and would take minutes to check."""


class Scan:
    """A walk over JSON text: every method takes a position and gives the next one. Damaged, code, where it is no JSON.

    noun names the text in messages, base is its first byte in the file.
    """

    def __init__(self, text: bytes, path: str, *, noun: str, code: str, base: int = 0) -> None:
        self.text, self.path, self.noun, self.code, self.base = text, path, noun, code, base
        self.skipped = 0

    def check_utf8(self, code: str) -> None:
        """Damaged with that code where the text is not UTF-8. Takes memory for a block at a time."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(self.text), _BLOCK):
            try:
                decoder.decode(self.text[start : start + _BLOCK], final=start + _BLOCK >= len(self.text))
            except UnicodeDecodeError as err:
                why = f"{err.reason} near byte {self.base + start + err.start:,}"
                raise Damaged(
                    f"{self.noun} is not UTF-8", where=self.path, why=why, fix="copy the file again", code=code
                ) from err

    def space(self, p: int) -> int:
        """The first byte at or after p that is no white space."""
        found = _SPACE.match(self.text, p)
        return found.end() if found else p

    def byte(self, p: int) -> bytes:
        """One byte, b"" at the end."""
        return self.text[p : p + 1]

    def string(self, p: int) -> tuple[str, int]:
        """The string whose quote is at p."""
        found = _STRING.match(self.text, p)
        if found is None:
            self.fail(p, "a string is wanted")
        raw = found[1]
        if b"\\" not in raw:
            return raw.decode(errors="replace"), found.end()
        value = str(json.loads(found[0]))
        try:
            value.encode()
        except UnicodeEncodeError:  # serde_json refuses it, too
            self.fail(p, "whole characters are wanted, an escape makes half a one")
        return value, found.end()

    def key(self, p: int) -> tuple[str, int]:
        """The key at p, and where its value begins."""
        name, p = self.string(self.space(p))
        p = self.space(p)
        if self.byte(p) != b":":
            self.fail(p, "a colon is wanted")
        return name, self.space(p + 1)

    def opened(self, p: int) -> tuple[bool, int]:
        """Behind the brace of an object: (whether it has members, where)."""
        p = self.space(p + 1)
        return (False, p + 1) if self.byte(p) == b"}" else (True, p)

    def next(self, p: int, closer: bytes) -> tuple[bool, int]:
        """Behind a member: (whether another follows, where)."""
        p = self.space(p)
        if self.byte(p) == closer:
            return False, p + 1
        if self.byte(p) != b",":
            self.fail(p, f"a comma or {closer.decode()} is wanted")
        return True, p + 1

    def stop(self, p: int) -> None:
        """Checks that nothing but white space follows."""
        p = self.space(p)
        if p < len(self.text):
            self.fail(p, "the end is wanted")

    def skip(self, p: int) -> int:
        """Past the value at p, whatever it is.

        Damaged with code bad-entry where it is nested over 128 deep, or all that was skipped is over 1 MiB.
        """
        closers = bytearray()
        while True:
            first = p
            p = self.space(p)
            c = self.byte(p)
            if c in (b"{", b"["):
                closers += b"}" if c == b"{" else b"]"
                if len(closers) > DEPTH - 2:
                    self._odd(p, f"{self.noun} is nested over {DEPTH} deep")
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
            self.skipped += p - first + 1
            if self.skipped > _SKIP_LIMIT:
                self._odd(p, f"{self.noun} holds over {_SKIP_LIMIT:,} bytes that have no meaning in it")
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

    def _odd(self, p: int, what: str) -> NoReturn:
        why, fix = f"at byte {self.base + p:,}", "write the file again"
        raise Damaged(what, where=self.path, why=why, fix=fix, code="bad-entry")

    def ints(self, p: int) -> tuple[tuple[int, ...] | None, str, int]:
        """The list at p of integers from 0 to 2**64 - 1 (None, and why, where it is none), and the position behind."""
        found = _INTS.match(self.text, p)
        if found is None:
            stop = self.skip(p)
            return None, f"a list of integers from 0 is wanted, {self.shown(p, stop)} is there", stop
        values = []
        for digits in _INT.findall(found[0]):
            if len(digits) > 20 or (value := int(digits)) >= U64:
                return None, f"{self.shown(p, found.end())} holds a number beyond 64 bits", found.end()
            values.append(value)
        return tuple(values), "", found.end()

    def texts(self, p: int) -> tuple[dict[str, str], list[str], list[str], int]:
        """The object of texts at p: (it, keys of values that are none, keys that stand twice, the position behind)."""
        out: dict[str, str] = {}
        others: list[str] = []
        twice: list[str] = []
        more, p = self.opened(p)
        while more:
            while found := _PAIR.match(self.text, p):
                key = found[1].decode(errors="replace")
                if key in out:
                    twice.append(key)
                out[key] = found[2].decode(errors="replace")
                p = found.end()
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
        """Raises Damaged with this scan's code."""
        there = f"{self.shown(p, p + 20)!r} is there" if p < len(self.text) else "the text ends"
        why = f"{wanted} at byte {self.base + p:,}, {there}"
        raise Damaged(f"{self.noun} is no JSON", where=self.path, why=why, fix="copy the file again", code=self.code)


def short(name: str) -> str:
    """A name for a message."""
    return repr(name if len(name) <= 120 else name[:117] + "...")
