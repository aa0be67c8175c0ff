"""Pages: one file each, without network, scripts or fonts; every text of a checkpoint is escaped.

Takes the documents that `--json` prints. Pictures are SVG.
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.core.errors import CkptError, Usage
from ckptctl.report.text import json_text, nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Document = dict[str, Any]
_LAYER = re.compile(r"((?:[^.]+\.)*?\d+)\.(.+)")
_COLOURS = {"float32": "#4e79a7", "bfloat16": "#59a14f", "float16": "#edc948", "float64": "#b07aa1"}
_OTHER = "#9c9a95"
_MOST = 400
"""Rows of a table and modules of a picture that are shown; the rest is one line."""
_STYLE = """
:root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}
table{border-collapse:collapse;margin:.5em 0 1.5em}
td,th{padding:.15em .7em;text-align:left;border-bottom:1px solid #8884;
vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:12px}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}svg text{font:11px system-ui,sans-serif;fill:#111}
.heat td{width:1.6em;height:1.4em;padding:0 .3em;text-align:center;border:1px solid #8882;color:#111}
.heat th{font-weight:400}
.heat thead th{writing-mode:vertical-rl;transform:rotate(180deg);text-align:left}.wide{overflow-x:auto}
.verdict{font-size:1.2em;font-weight:600}ul{margin:.2em 0}
"""


def html_files(words: Sequence[str]) -> tuple[Path, ...]:
    """--output's words, each html=FILE. Usage for anything else, and for a file that cannot be there."""
    out = []
    for word in words:
        form, _, file = word.partition("=")
        if form != "html" or not file:
            raise Usage(f"--output {word}: there is no such report", fix="html=FILE")
        path = Path(file)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise Usage(f"--output {word}: the page cannot be written", fix="name a file in a folder that is there")
        out.append(path)
    return tuple(out)


def write_pages(document: Document, files: Iterable[Path]) -> None:
    """The document's page, to every file. CkptError (write-failed) where the disk says no."""
    for path in files:
        made = {"ckptctl.inspect/1": inspect_page, "ckptctl.diff/1": diff_page}[document["schema"]](document)
        try:
            path.write_text(made, encoding="utf-8", errors="backslashreplace")
        except OSError as err:
            why = err.strerror or str(err)
            raise CkptError("a page cannot be written", where=str(path), why=why, code="write-failed") from err


def text_of(value: object) -> str:
    """Text for a page: escaped, without control characters."""
    return html.escape("".join(c if c.isprintable() else "?" for c in str(value)))


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page around its parts."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text_of(title)}</title>'
    view = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    body = "\n".join(parts)
    return f"{head}{view}<style>{_STYLE}</style></head><body><h1>{text_of(title)}</h1>\n{body}\n</body></html>\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; columns that begin with # hold numbers. Rows beyond what a page should have are counted."""
    cls = [' class="n"' if c.startswith("#") else "" for c in columns]
    head = "".join(f"<th{k}>{text_of(c.lstrip('#'))}</th>" for c, k in zip(columns, cls, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{k}>{text_of(v)}</td>" for v, k in zip(row, cls, strict=True)) + "</tr>"
        for row in rows[:_MOST]
    ]
    more = f"<p>and {len(rows) - _MOST} more</p>" if len(rows) > _MOST else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{more}'


def _head(name: str) -> tuple[str, str]:
    """(layer, module) of a tensor's name."""
    found = _LAYER.match(name)
    return (found[1], found[2]) if found else ("", name)


# ---- inspect --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A rectangle of a treemap: what it says, what it weighs, its colour."""

    label: str
    weight: int
    colour: str


def inspect_page(d: Document) -> str:
    """The page of `inspect`: sizes by module and type, files and ranks, training state, what is wrong."""
    layout = ", ".join(f"{k} {v}" for k, v in d["layout"].items() if v)
    facts = [
        ("format", d["format"] + (f" ({d['variant']})" if d["variant"] else "")),
        ("recognised", d["recognised"]),
        ("path", d["path"]),
        ("layout", layout or "one place"),
        ("step", "-" if d["step"] is None else d["step"]),
        ("model", d["family"] or "not said (no config)"),
        ("size", f"{nbytes(sum(f['bytes'] for f in d['files']))} in {len(d['files'])} files"),
        ("resumable", ("yes" if d["resumable"] else "no") + f": {d['why']}"),
    ]
    kinds = [
        (k, v["tensors"], f"{v['numel']:,}", nbytes(v["bytes"]), ", ".join(v["dtypes"])) for k, v in d["kinds"].items()
    ]
    sizes = [(f["path"], f["role"], nbytes(f["bytes"])) for f in d["files"]]
    parts = [
        table(("", ""), facts),
        "<h2>Tensors by kind</h2>",
        table(("kind", "#tensors", "#elements", "#size", "types"), kinds),
        "<h2>Weights by module and type</h2>",
        treemap(_tiles(t for t in d.get("tensors", ()) if t["kind"] in ("weight", "buffer"))),
        "<h2>Training state</h2>",
        table(("part", ""), list(d["state"].items())),
        "<h2>Which file holds what</h2>",
        f"<p>{text_of(layout or 'one place')}</p>",
        _bars([(f["path"], f["bytes"]) for f in d["files"]]),
        table(("file", "role", "#size"), sizes),
    ]
    findings = [("would run code", f"{u['file']}: {u['global']} {u['why']}") for u in d["unsafe"]]
    findings += [("cannot be moved", f"{u['what']}: {u['why']}") for u in d["unsupported"]]
    findings += [("warning", w) for w in d["warnings"]]
    parts += ["<h2>Findings</h2>", table(("", ""), findings) if findings else "<p>none</p>"]
    groups = [(i, g["parameters"], json_text(g["settings"])) for i, g in enumerate(d["groups"])]
    parts += ["<h2>Param groups</h2>", table(("#group", "#parameters", "settings"), groups)] if groups else []
    return page(f"ckptctl inspect: {Path(d['path']).name}", parts)


def _tiles(tensors: Iterable[Mapping[str, Any]]) -> list[Tile]:
    """A tile for each module of all layers together, and type."""
    sums: dict[tuple[str, str], int] = {}
    for t in tensors:
        layer, module = _head(t["name"])
        key = (f"{layer.rpartition('.')[0]}.*.{module}" if layer else module, t["dtype"])
        sums[key] = sums.get(key, 0) + t["bytes"]
    found = [
        Tile(f"{name} ({dtype}, {nbytes(n)})", n, _COLOURS.get(dtype, _OTHER)) for (name, dtype), n in sums.items() if n
    ]
    found.sort(key=lambda t: -t.weight)
    if len(found) > _MOST:
        rest = found[_MOST:]
        found = [*found[:_MOST], Tile(f"{len(rest)} more", sum(t.weight for t in rest), _OTHER)]
    return found


def treemap(tiles: Sequence[Tile], width: float = 960, height: float = 420) -> str:
    """An SVG whose rectangles have areas by weight, the largest first. Tiles come sorted."""
    if not tiles:
        return "<p>none</p>"
    out = []
    for tile, x, y, w, h in _places(list(tiles), 0, 0, width, height):
        label = text_of(tile.label)
        shown = f'<text x="{x + 4:.1f}" y="{y + 14:.1f}">{text_of(tile.label[: int(w / 6.4)])}</text>'
        out.append(
            f'<g><title>{label}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="{tile.colour}" fill-opacity=".75" stroke="#fff"/>{shown if w > 60 and h > 18 else ""}</g>'
        )
    return f'<svg viewBox="0 0 {width:g} {height:g}" width="100%" role="img">{"".join(out)}</svg>'


def _places(tiles: list[Tile], x: float, y: float, w: float, h: float) -> list[tuple[Tile, float, float, float, float]]:
    """Halves the tiles by weight along the longer side, until each has a place of its own."""
    out = []
    stack = [(tiles, x, y, w, h)]
    while stack:
        some, x, y, w, h = stack.pop()
        if len(some) == 1:
            out.append((some[0], x, y, w, h))
            continue
        total, first, cut = sum(t.weight for t in some), some[0].weight, 1
        while cut < len(some) - 1 and first + some[cut].weight <= total / 2:
            first, cut = first + some[cut].weight, cut + 1
        share = first / total
        if w >= h:
            stack += [(some[:cut], x, y, w * share, h), (some[cut:], x + w * share, y, w * (1 - share), h)]
        else:
            stack += [(some[:cut], x, y, w, h * share), (some[cut:], x, y + h * share, w, h * (1 - share))]
    return out


def _bars(rows: Sequence[tuple[str, int]], width: int = 960) -> str:
    """A bar for each file, by its bytes."""
    rows = [r for r in rows if r[1]][:64]
    most = max((n for _, n in rows), default=1)
    out = [
        f'<rect x="0" y="{i * 20}" width="{max(1, width * n / most):.1f}" height="16" fill="#4e79a7" '
        f'fill-opacity=".6"/>'
        f'<text x="4" y="{i * 20 + 12}">{text_of(name)}: {nbytes(n)}</text>'
        for i, (name, n) in enumerate(rows)
    ]
    return f'<svg viewBox="0 0 {width} {20 * len(rows) + 4}" width="100%" role="img">{"".join(out)}</svg>'


# ---- diff -----------------------------------------------------------------------------------------------------------


def diff_page(d: Document) -> str:
    """The page of `diff`: the answer, a heat map of layers and modules, every difference, the state as a tree."""
    sides = [(side, d[side]["format"], d[side]["path"]) for side in ("a", "b")]
    verdict = "equal" if d["equal"] else f"different: {len(d['differences'])} of them"
    parts = [
        f'<p class="verdict">{verdict}</p>',
        table(("", "format", "path"), sides),
        table(("compared", "#"), list(d["compared"].items())),
    ]
    tensors = list(d.get("stats", {}).get("tensors", ()))
    unlike = {(x["name"], x["kind"]): x for x in d["differences"]}
    for kind in dict.fromkeys(t["kind"] for t in tensors):
        parts += [
            f"<h2>{text_of(kind)}: where they differ</h2>",
            _heat([t for t in tensors if t["kind"] == kind], unlike),
        ]
    found = [x for x in d["differences"] if "elements" in x or x["what"] != "value"]
    rows = [
        (x["name"], x["kind"], x["what"], x.get("differing", ""), _number(x.get("max_abs")), _number(x.get("max_rel")),
         x.get("max_ulp", ""), x.get("detail", ""))
        for x in found
    ]  # fmt: skip
    columns = ("name", "kind", "differs in", "#elements", "#max abs", "#max rel", "#ULPs", "")
    parts += ["<h2>Differences</h2>", table(columns, rows)] if rows else []
    values = {x["name"]: x.get("detail", "") for x in d["differences"] if x not in found}
    parts += ["<h2>Training state</h2>", _tree(values)] if values else []
    layers = [
        (s["layer"] or "(none)", s["kind"], *(_number(s[k]) for k in ("norm_a", "norm_b", "norm_difference", "cosine")))
        for s in d.get("stats", {}).get("layers", ())
    ]
    titles = ("layer", "kind", "#norm of A", "#norm of B", "#norm of A - B", "#cosine")
    parts += ["<h2>By layer</h2>", table(titles, layers)] if layers else []
    return page("ckptctl diff", parts)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _heat(tensors: Sequence[Document], unlike: Mapping[tuple[str, str], Document]) -> str:
    """Layers down, modules across; a cell's colour is the norm of the difference over A's, on a scale of tens."""
    layers = list(dict.fromkeys(t["layer"] for t in tensors))
    modules = list(dict.fromkeys(t["module"] for t in tensors))[:_MOST]
    cells = {(t["layer"], t["module"]): t for t in tensors}
    head = "".join(f"<th>{text_of(m)}</th>" for m in modules)
    lines = []
    for layer in layers[:_MOST]:
        row = [f"<th>{text_of(layer or '(none)')}</th>"]
        for module in modules:
            t = cells.get((layer, module))
            row.append("<td></td>" if t is None else _cell(t, unlike.get((t["name"], t["kind"]))))
        lines.append(f"<tr>{''.join(row)}</tr>")
    legend = "= the same bits; else the power of ten of |A - B| / |A|, red from 1 on"
    cells_of = f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<p>{legend}</p><div class="wide">{cells_of}</div>'


def _cell(t: Document, difference: Document | None) -> str:
    title = f"{t['name']}: cosine {_number(t['cosine'])}"
    if difference is None:
        return f'<td style="background:#d9ead3" title="{text_of(title)}">=</td>'
    if difference["what"] != "value":
        return f'<td style="background:#c9b3e0" title="{text_of(title)}">{text_of(difference["what"][:5])}</td>'
    share = t["norm_difference"] / t["norm_a"] if t["norm_a"] else math.inf
    power = math.floor(math.log10(share)) if 0 < share < math.inf else (0 if share else -9)
    heat = min(1.0, max(0.0, (power + 9) / 9)) if not math.isnan(share) else 1.0
    title += f"; {difference['detail']}; |A - B| / |A| {_number(share)}"
    shown = f"{power}" if share == share else "NaN"
    colour = f"hsl({50 - 50 * heat:.0f} 90% {85 - 30 * heat:.0f}%)"
    return f'<td style="background:{colour}" title="{text_of(title)}">{shown}</td>'


def _tree(values: Mapping[str, str]) -> str:
    """Names with dots as nested lists."""
    root: dict[str, Any] = {}
    for name, detail in values.items():
        at = root
        for word in name.split(".")[:40]:
            at = at.setdefault(word, {})
        at[""] = detail

    def shown(node: Mapping[str, Any]) -> str:
        items = (
            f"<li>{text_of(k)}{': ' + text_of(v['']) if '' in v else ''}{shown(v)}</li>" for k, v in node.items() if k
        )
        inner = "".join(items)
        return f"<ul>{inner}</ul>" if inner else ""

    return shown(root)
