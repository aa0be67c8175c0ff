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
from ckptctl.report.differences import state_leaf
from ckptctl.report.outputs import require_replaceable
from ckptctl.report.text import json_text, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Document = dict[str, Any]
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_COLOURS = {"float32": "#4e79a7", "bfloat16": "#59a14f", "float16": "#edc948", "float64": "#b07aa1"}
_OTHER = "#9c9a95"
_RANKS, _LONG = 64, 400
_MOST = 400
"""Rows of a table and modules of a picture that are shown; the rest is one line."""
_STYLE = """
:root{color-scheme:light}body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:84em;padding:0 1.5em;
color:#111;background:#fff}
table{border-collapse:collapse;margin:.5em 0 1.5em}
td,th{padding:.15em .7em;text-align:left;border-bottom:1px solid #8884;
vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}code{font-size:12px}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}svg text{font:11px system-ui,sans-serif;fill:#111}
svg{display:block}
.heat{font-size:12px}.heat td{width:1.6em;height:1.4em;padding:0 .3em;text-align:center;border:1px solid #8882}
.heat td{white-space:nowrap}
.heat th{font-weight:400;padding:.1em .3em;white-space:nowrap}
.heat thead th{writing-mode:vertical-rl;transform:rotate(180deg);text-align:left}.wide{overflow-x:auto}
.verdict{font-size:1.2em;font-weight:600}ul{margin:.1em 0;padding-left:1.4em;list-style:none}
.key{display:inline-block;margin-right:1.5em}.key i{display:inline-block;width:1em;height:1em;margin-right:.4em;
vertical-align:-.15em}.yes{color:#1b6e2d}.no{color:#a3170d}
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
        require_replaceable(path, word)
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
        *_weights(d),
        "<h2>Training state</h2>",
        table(("part", ""), list(d["state"].items())),
        _values(d["state_values"]),
        "<h2>Which file holds what</h2>",
        *_layout(d, layout),
        table(("file", "role", "#size"), sizes),
    ]
    findings = [("would run code", f"{u['file']}: {u['global']} {u['why']}") for u in d["unsafe"]]
    findings += [("cannot be moved", f"{u['what']}: {u['why']}") for u in d["unsupported"]]
    findings += [("warning", w) for w in d["warnings"]]
    parts += ["<h2>Findings</h2>", table(("", ""), findings) if findings else "<p>none</p>"]
    groups = [(i, g["parameters"], json_text(g["settings"])) for i, g in enumerate(d["groups"])]
    parts += ["<h2>Param groups</h2>", table(("#group", "#parameters", "settings"), groups)] if groups else []
    return page(f"ckptctl inspect: {Path(d['path']).name}", parts)


def _weights(d: Document) -> list[str]:
    """The treemap of the weights, or of the masters where there are no others, with its colours' meaning."""
    tensors = d.get("tensors", ())
    kinds = ("weight", "buffer") if any(t["kind"] == "weight" for t in tensors) else ("master",)
    mine = [t for t in tensors if t["kind"] in kinds]
    return [_key({t["dtype"]: _COLOURS.get(t["dtype"], _OTHER) for t in mine}), treemap(_tiles(mine))]


def _tiles(tensors: Iterable[Mapping[str, Any]]) -> list[Tile]:
    """A tile for each module of all layers and experts together, and type."""
    sums: dict[tuple[str, str], int] = {}
    for t in tensors:
        key = (_NUMBER.sub(".*", t["name"]), t["dtype"])
        sums[key] = sums.get(key, 0) + t["bytes"]
    found = [
        Tile(f"{name} ({dtype}, {nbytes(n)})", n, _COLOURS.get(dtype, _OTHER)) for (name, dtype), n in sums.items() if n
    ]
    found.sort(key=lambda t: -t.weight)
    if len(found) > _MOST:
        rest = found[_MOST:]
        found = [*found[:_MOST], Tile(f"{len(rest)} more", sum(t.weight for t in rest), _OTHER)]
    return found


def treemap(tiles: Sequence[Tile], width: float = 1100, height: float = 460) -> str:
    """An SVG whose rectangles have areas by weight, the largest first. Tiles come sorted."""
    if not tiles:
        return "<p>none</p>"
    out = []
    for tile, x, y, w, h in _places(list(tiles), 0, 0, width, height):
        out.append(
            f'<g><title>{text_of(tile.label)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
            f'height="{h:.1f}" fill="{tile.colour}" fill-opacity=".6" stroke="#fff"/>{_label(tile, x, y, w, h)}</g>'
        )
    return f'<svg viewBox="0 0 {width:g} {height:g}" width="100%" role="img">{"".join(out)}</svg>'


def _label(tile: Tile, x: float, y: float, w: float, h: float) -> str:
    """A tile's words, as many as it has room for: the end of a name tells more than its beginning."""
    room = int((w - 8) / 6.6)
    name, _, rest = tile.label.partition(" (")
    words = name.split(".")
    short = [".".join(words[i:]) for i in range(len(words))]
    if len(words) > 1 and words[-1] in ("weight", "bias"):
        short += [".".join(words[i:-1]) for i in range(len(words) - 1)]
    fits = next((s for s in short if len(s) <= room), "")
    if not fits or h < 18:
        return ""
    lines = [fits, *([rest.rstrip(")")] if h >= 34 and len(rest) <= room else [])]
    return "".join(f'<text x="{x + 4:.1f}" y="{y + 14 + 14 * i:.1f}">{text_of(s)}</text>' for i, s in enumerate(lines))


def _key(colours: Mapping[str, str]) -> str:
    """What colours mean."""
    shown = (f'<span class="key"><i style="background:{c}"></i>{text_of(n)}</span>' for n, c in colours.items())
    return f"<p>{''.join(shown)}</p>"


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


def _layout(d: Document, layout: str) -> list[str]:
    """Two pictures of files and what they hold: bytes of each kind, and each layer's share."""
    rows = d.get("holdings", ())
    files = list(dict.fromkeys(r["file"] for r in rows))[:_RANKS]
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    more = len({r["file"] for r in rows}) - len(files)
    parts = [f"<p>{text_of(layout or 'one place')}{f'; {more} files more are not shown' if more else ''}</p>"]
    parts += [_shares("What each file holds, by kind", rows, files, kinds, "kind", nbytes)]
    main = [k for k in ("weight", "master", *kinds) if k in kinds][:1]
    held = [r for r in rows if r["kind"] in main]
    layers = list(dict.fromkeys(r["layer"] for r in held))[:_MOST]
    if len(files) > 1 and held:
        title = f"Which part of each layer each file holds ({main[0]})"
        parts += [_shares(title, held, files, layers, "layer", None)]
    return parts


def _shares(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    files: Sequence[str],
    columns: Sequence[str],
    by: str,
    shown: Callable[[int], str] | None,
) -> str:
    """Files down, kinds or layers across; a cell's colour is the file's share of the column. shown writes bytes."""
    sums: dict[tuple[str, str], int] = {}
    whole: dict[str, int] = {}
    for r in rows:
        sums[r["file"], r[by]] = sums.get((r["file"], r[by]), 0) + r["bytes"]
        whole[r[by]] = whole.get(r[by], 0) + r["bytes"]
    head = "".join(f"<th>{text_of(c or '(no layer)')}</th>" for c in columns)
    lines = []
    for file in files:
        cells = []
        for c in columns:
            n = sums.get((file, c), 0)
            share = n / whole[c] if whole[c] else 0.0
            text = "" if not n else shown(n) if shown else f"{100 * share:.0f}"
            tip = text_of(f"{file}, {c or 'no layer'}: {nbytes(n)}, {100 * share:.1f}%")
            style = f' style="background:hsl(211 45% {96 - 36 * share:.0f}%)"' if n else ""
            cells.append(f'<td{style} title="{tip}">{text}</td>')
        lines.append(f"<tr><th>{text_of(file)}</th>{''.join(cells)}</tr>")
    unit = "" if shown else "; % of the layer"
    table = f'<table class="heat"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<p>{text_of(title)}{unit}</p><div class="wide">{table}</div>'


def _values(tree: Mapping[str, Any]) -> str:
    """Nested values as nested lists."""
    items = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            items.append(f"<li><b>{text_of(key)}</b>{_values(value)}</li>")
        else:
            items.append(f"<li>{text_of(key)}: {text_of(str(value)[:_LONG])}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


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
        mine = [t for t in tensors if t["kind"] == kind]
        if any((t["name"], kind) in unlike for t in mine):
            parts += [f"<h2>{text_of(kind)}: where they differ</h2>", _heat(mine, unlike)]
        else:
            parts += [f"<h2>{text_of(kind)}</h2>", f"<p>all {len(mine)} tensors are equal, bit for bit</p>"]
    found = [x for x in d["differences"] if "path" not in x]
    rows = [
        (x["name"], x["kind"], x["what"], x.get("differing", ""), _number(x.get("max_abs")), _number(x.get("max_rel")),
         x.get("max_ulp", ""), x.get("detail", ""))
        for x in found
    ]  # fmt: skip
    columns = ("name", "kind", "differs in", "#elements", "#max abs", "#max rel", "#ULPs", "")
    parts += ["<h2>Differences</h2>", table(columns, rows)] if rows else []
    parts += ["<h2>Training state</h2>", _state(d["state"])] if d.get("state", {}).get("differ") else []
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


def _state(node: Document) -> str:
    """The training state that two checkpoints have, as nested lists; equal values are counted."""
    items = []
    for key, value in node["differ"].items():
        said = [f'<span class="no">{text_of(state_leaf(value))}</span>'] if "what" in value else []
        said += [f'<span class="yes">{value["equal"]} equal</span>'] if value.get("equal") else []
        inner = _state(value) if any(v.get("differ") or "what" in v for v in value.get("differ", {}).values()) else ""
        items.append(f"<li><b>{text_of(key)}</b>: {'; '.join(said)}{inner}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""
