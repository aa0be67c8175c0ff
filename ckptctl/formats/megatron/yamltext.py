"""The plain part of YAML that runs' configs are written in: block mappings and lists of scalars. Pure.

Only what `yaml.safe_dump` and OmegaConf write is understood: mappings by indentation, lists with `- `, empty or flat
`[...]` and `{}`, plain and quoted scalars. Tags and anchors are let go; nothing is ever built or named by them.
Source: YAML 1.2.2, chapters 7 and 8.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 8 << 20
_DEEPEST = 200
_LONGEST = 1 << 16
_KEY = re.compile(
    r"""(?P<key>"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#:'"\[\]{},&*!|>%@-][^#]*?|-?[\w./]+)\s*:(?:\s+|$)"""
)
_INTEGER, _NUMBER = re.compile(r"[-+]?\d{1,40}"), re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
_WORDS = {"null": None, "~": None, "": None, "true": True, "false": False}


class _Lines:
    """Lines with their indentation, without comments and empty ones."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.rows: list[tuple[int, str, int]] = []
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.rstrip()
            body = line.lstrip(" ")
            if len(body) > _LONGEST:
                raise Damaged("a line of the run's config is too long", where=f"{where}, line {number}", code="yaml")
            if body and not body.startswith(("#", "---", "%", "...")):
                self.rows.append((len(line) - len(body), body, number))
        self.at = 0

    def peek(self) -> tuple[int, str, int] | None:
        return self.rows[self.at] if self.at < len(self.rows) else None

    def damaged(self, why: str) -> Damaged:
        row = self.peek()
        at = f", line {row[2]}" if row else ""
        return Damaged("the run's config is no YAML that is read here", where=f"{self.where}{at}", why=why, code="yaml")


def parsed(text: str, where: str) -> Any:
    """The mapping, list or scalar that a text is. Damaged for what is none of them."""
    if len(text) > LIMIT:
        raise Damaged("the run's config is too long", where=where, why=f"{len(text)} characters", code="yaml")
    lines = _Lines(text, where)
    first = lines.peek()
    if first is None:
        return None
    value = _block(lines, first[0], 0)
    if lines.peek() is not None:
        raise lines.damaged("its indentation does not fit")
    return value


def _block(lines: _Lines, indent: int, depth: int) -> Any:
    row = lines.peek()
    if row is None or depth > _DEEPEST:
        raise lines.damaged("it nests too deeply" if row else "it stops in the middle")
    if row[1] == "-" or row[1].startswith("- "):
        return _list(lines, indent, depth)
    if _KEY.match(row[1]):
        return _mapping(lines, indent, depth)
    lines.at += 1
    return scalar(row[1])


def _mapping(lines: _Lines, indent: int, depth: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    while (row := lines.peek()) is not None and row[0] == indent:
        found = _KEY.match(row[1])
        if found is None:
            raise lines.damaged(f"{row[1][:40]!r} is no entry of a mapping")
        key, rest = str(scalar(found["key"])), row[1][found.end() :]
        lines.at += 1
        out[key] = _value(lines, rest, indent, depth, in_list=False)
    if (row := lines.peek()) is not None and row[0] > indent:
        raise lines.damaged("its indentation does not fit")
    return out


def _list(lines: _Lines, indent: int, depth: int) -> list[Any]:
    out: list[Any] = []
    while (row := lines.peek()) is not None and row[0] == indent and (row[1] == "-" or row[1].startswith("- ")):
        rest = row[1][1:].lstrip(" ")
        if rest == "-" or rest.startswith("- ") or _KEY.match(rest):
            # A mapping or list that begins on the dash's line: as if it began on a line of its own.
            inner = indent + len(row[1]) - len(rest)
            lines.rows[lines.at] = (inner, rest, row[2])
            out.append(_block(lines, inner, depth + 1))
            continue
        lines.at += 1
        out.append(_value(lines, rest, indent, depth, in_list=True))
    return out


def _value(lines: _Lines, rest: str, indent: int, depth: int, *, in_list: bool) -> Any:
    """What stands after a key or a dash: on its line, or in the lines below it that are indented more."""
    rest = re.sub(r"^(?:[!&]\S*\s*)+", "", rest)
    row = lines.peek()
    below = row is not None and row[0] > indent
    if rest[:1] in ("|", ">"):
        return "\n".join(_deeper(lines, indent))
    if rest and not rest.startswith("#"):
        if below and row is not None and rest[:1] not in ("'", '"', "[", "{") and _KEY.match(row[1]):
            raise lines.damaged("an entry is below a value")
        if below:
            rest = " ".join([rest, *_deeper(lines, indent)])
        return scalar(rest)
    if below and row is not None:
        return _block(lines, row[0], depth + 1)
    same = row is not None and row[0] == indent and not in_list and (row[1] == "-" or row[1].startswith("- "))
    return _list(lines, indent, depth + 1) if same else None


def _deeper(lines: _Lines, indent: int) -> Iterator[str]:
    while (row := lines.peek()) is not None and row[0] > indent:
        lines.at += 1
        yield row[1]


def scalar(text: str) -> Any:
    """A scalar, or a flat list or mapping in brackets of which only JSON's are read; else the text itself."""
    text = text.strip()
    if text[:1] == "'":
        return text[1 : text.rfind("'")].replace("''", "'")
    if text[:1] in ('"', "[", "{"):
        try:
            return json.loads(text[: text.rfind({'"': '"', "[": "]", "{": "}"}[text[0]]) + 1])
        except (ValueError, RecursionError):
            inner = text[1 : text.rfind("]")] if text[0] == "[" else ""
            return [scalar(x) for x in inner.split(",")] if inner and not re.search(r"[\[\]{}:]", inner) else text
    text = re.split(r"\s#", text, maxsplit=1)[0].rstrip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
