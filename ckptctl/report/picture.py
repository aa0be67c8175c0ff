"""Small pictures of bars and words, as SVG for pages and as PNG for everything else. Needs nothing beside zlib.

A plotting library would be the largest dependency of all for one picture of a dozen bars.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.report.html import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROWS = "0123456789abcdefghijklmnopqrstuv"
_GLYPHS = {
    "0": "ehjlphe", "1": "4c4444e", "2": "eh1248v", "3": "v2421he", "4": "26aiv22", "5": "vgu11he", "6": "68guhhe",
    "7": "v124888", "8": "ehhehhe", "9": "ehhf12c", "a": "00e1fhf", "b": "ggmphhu", "c": "00egghe", "d": "11djhhf",
    "e": "00ehvge", "f": "698s888", "g": "0fhhf1e", "h": "ggmphhh", "i": "40c444e", "j": "20622ic", "k": "ggikoki",
    "l": "c44444e", "m": "00qllhh", "n": "00mphhh", "o": "00ehhhe", "p": "00uhugg", "q": "00djf11", "r": "00mpggg",
    "s": "00ege1u", "t": "88s8896", "u": "00hhhjd", "v": "00hhha4", "w": "00hhlla", "x": "00ha4ah", "y": "00hhf1e",
    "z": "00v248v", ".": "00000cc", ",": "0000c48", "%": "op248j3", "+": "044v440", "-": "000v000", "=": "00v0v00",
    ":": "0cc0cc0", "/": "01248g0", "(": "2488842", ")": "8422248", "M": "hrllhhh", "B": "uhhuhhu", "K": "hikokih",
    "G": "ehgnhhf", "T": "v444444", " ": "0000000",
}  # fmt: skip
"""Letters of 5 x 7 dots: a character a row, whose five bits are its dots from left to right."""
_UNKNOWN = "vhhhhhv"
_ADVANCE = 6


class Bar(NamedTuple):
    """A rectangle; the origin is at the top left, the colour #rrggbb."""

    x: float
    y: float
    width: float
    height: float
    colour: str


class Words(NamedTuple):
    """A line of text, by its top left corner."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Bars, then words over them."""

    width: int
    height: int
    bars: Sequence[Bar]
    words: Sequence[Words]


def svg(picture: Picture) -> str:
    """The picture as an SVG element."""
    parts = [
        f'<rect x="{b.x:.1f}" y="{b.y:.1f}" width="{max(b.width, 0.5):.1f}" height="{b.height:.1f}" fill="{b.colour}"/>'
        for b in picture.bars
    ]
    parts += [f'<text x="{w.x:.1f}" y="{w.y + 9:.1f}">{text_of(w.text)}</text>' for w in picture.words]
    return f'<svg viewBox="0 0 {picture.width} {picture.height}" width="100%" role="img">{"".join(parts)}</svg>'


def png(picture: Picture, scale: int = 2) -> bytes:
    """The picture as a PNG file, on white. Source: W3C, Portable Network Graphics (third edition), 5 and 11."""
    width, height = picture.width * scale, picture.height * scale
    rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]
    for bar in picture.bars:
        lo, hi = _inside(bar.x, bar.width, scale, width)
        top, bottom = _inside(bar.y, bar.height, scale, height)
        line = bytes.fromhex(bar.colour[1:]) * (hi - lo)
        for y in range(top, bottom):
            rows[y][3 * lo : 3 * hi] = line
    for words in picture.words:
        for at, letter in enumerate(words.text):
            _draw(rows, letter, round((words.x + at * _ADVANCE) * scale), round(words.y * scale), scale)
    data = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _inside(start: float, size: float, scale: int, limit: int) -> tuple[int, int]:
    """Dots from start on, at least one where there is any, none outside."""
    lo = min(max(0, round(start * scale)), limit)
    hi = min(max(lo, round((start + size) * scale), lo + (size > 0)), limit)
    return lo, hi


def _draw(rows: list[bytearray], letter: str, x: int, y: int, scale: int) -> None:
    glyph = _GLYPHS.get(letter) or _GLYPHS.get(letter.lower(), _UNKNOWN)
    width = len(rows[0]) // 3
    for down, row in enumerate(glyph):
        bits = _ROWS.index(row)
        for across in range(5):
            lo = x + across * scale
            if not bits >> (4 - across) & 1 or lo < 0 or lo + scale > width:
                continue
            for line in rows[max(0, y + down * scale) : y + (down + 1) * scale]:
                line[3 * lo : 3 * (lo + scale)] = b"\x11" * (3 * scale)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
