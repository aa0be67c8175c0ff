"""The parts of `verify` about recomputation and native runs: as text, as a picture, and on its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.core.errors import CkptError, Usage
from ckptctl.report import html, text
from ckptctl.report.outputs import require_replaceable
from ckptctl.report.picture import Bar, Picture, Words, png, svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Document = dict[str, Any]
_BARS = (("peak_bytes", "peak", "#4e79a7"), ("kept_bytes", "kept", "#f28e2b"), ("seconds", "time", "#76b7b2"))
_COLUMNS = (
    ("policy", "left"), ("layers", "right"), ("gradients", "left"), ("peak", "right"), ("saving", "right"),
    ("kept for backward", "right"), ("saving", "right"), ("time", "right"), ("extra", "right"),
)  # fmt: skip
MOST = 20
"""Differences that are listed."""


class File(NamedTuple):
    """A file of --output: html or png, and where."""

    form: str
    path: Path


def verify_files(words: Sequence[str], *, has_picture: bool) -> tuple[File, ...]:
    """--output's words: html=FILE or png=FILE. Usage for others, and for a picture of what is not measured."""
    out = []
    for word in words:
        form, _, name = word.partition("=")
        if form not in ("html", "png") or not name:
            raise Usage(f"--output {word}: there is no such report", fix="html=FILE, or png=FILE with --recompute")
        if form == "png" and not has_picture:
            raise Usage(f"--output {word}: the picture shows what --recompute measures", fix="give --recompute too")
        path = Path(name)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise Usage(f"--output {word}: the file cannot be written", fix="name a file in a folder that is there")
        require_replaceable(path, word)
        out.append(File(form, path))
    return tuple(out)


def write_verify_files(document: Document, files: Iterable[File]) -> None:
    """The document's page and picture. CkptError (write-failed) where the disk says no."""
    for form, path in files:
        made = png(picture(document["recompute"])) if form == "png" else html_page(document).encode("utf-8", "replace")
        try:
            path.write_bytes(made)
        except OSError as err:
            why = err.strerror or str(err)
            raise CkptError("a report cannot be written", where=str(path), why=why, code="write-failed") from err


def show_recompute(d: Document) -> None:
    """The table of policies."""
    sys.stdout.write(f"\nrecomputation of {text.clean(_of(d))}\n")
    columns = [*_COLUMNS, ("largest batch", "right")] if "max_batch" in d["policies"][0] else list(_COLUMNS)
    text.table(columns, _rows(d))
    sys.stdout.write(_verdict(d) + "\n")


def _of(d: Document) -> str:
    rows, columns = d["batch"]
    dropout = "with dropout" if d["dropout"] else "the model has no dropout"
    measured = "by the GPU's allocator" if d["measured"] == "allocator" else "as bytes of live tensors"
    layers = f"{d['layers']['count']} layers ({d['layers']['name']})"
    return f"{layers}, {rows} x {columns} tokens, {dropout}; memory {measured}"


def _rows(d: Document) -> list[tuple[str, ...]]:
    out = []
    for p in d["policies"]:
        row = (
            p["policy"], f"{p['recomputed_layers']}", "equal" if p["equal"] else "DIFFERENT",
            text.nbytes(p["peak_bytes"]), f"{p['saving']:.0%}", text.nbytes(p["kept_bytes"]), f"{p['kept_saving']:.0%}",
            f"{p['seconds']:.4g} s", f"{p['extra_time']:+.0%}",
        )  # fmt: skip
        out.append((*row, *([str(p["max_batch"]) + ("+" if p["at_limit"] else "")] if "max_batch" in p else [])))
    return out


def _verdict(d: Document) -> str:
    if d["equal"]:
        return "gradients are equal under all policies, bit for bit"
    if not d["repeatable"]:
        return "NOT SHOWN: the step has other gradients each time on this device, without recomputation too"
    bad = [p for p in d["policies"] if not p["equal"]]
    first = bad[0]["first_difference"]
    where = f", first in {text.clean(first['name'])}" if first else ""
    return f"NOT EQUAL: gradients differ under {', '.join(p['policy'] for p in bad)}{where}"


def picture(d: Document) -> Picture:
    """Peak memory, memory kept for the backward pass, and time of each policy, as shares of the largest."""
    left, span, top = 110, 420, 34
    bars: list[Bar] = []
    words = [Words(8, 8, _verdict(d)[:92])]
    most = {key: max(p[key] for p in d["policies"]) or 1 for key, _, _ in _BARS}
    y = top
    for p in d["policies"]:
        words.append(Words(8, y + 12, p["policy"][:16]))
        for number, (key, title, colour) in enumerate(_BARS):
            width = span * p[key] / most[key]
            bars.append(Bar(left, y + 13 * number, width, 11, colour))
            value = f"{p[key]:.3g} s" if key == "seconds" else text.nbytes(p[key])
            change = p["extra_time"] if key == "seconds" else -p["saving" if key == "peak_bytes" else "kept_saving"]
            more = f" {change:+.0%}" if p["policy"] != "none" else ""
            words.append(Words(left + width + 6, y + 13 * number + 2, f"{title} {value}{more}"))
        y += 13 * len(_BARS) + 12
    return Picture(700, y, bars, words)


def show_native(d: Document) -> None:
    """What the frameworks' own runs gave."""
    sys.stdout.write("\n")
    for word in ("a", "b"):
        if word in d:
            one = d[word]
            where = f"{one['ranks']} ranks on {one['device']}, {one['backend']}"
            losses = ", ".join(f"{x:.9g}" for x in one["losses"])
            sys.stdout.write(f"native {word}: {text.clean(one['framework'])} {one['version']}, {where}: {losses}\n")
            clean = f"{one['pickles']['files']} files scanned before it was loaded: no pickle runs code"
            sys.stdout.write(f"  {clean}\n")
            for note in one["notes"]:
                sys.stdout.write(f"  note: {text.clean(note)}\n")
            _judged(one, "verify's own steps")
    if "between" in d:
        _judged(d["between"], "each other")


def _judged(one: Document, of: str) -> None:
    mode = one["tolerance"]
    how = "bit for bit" if mode["mode"] == "bits" else f"within tolerances (loss {mode['loss']:g})"
    if one["equal"]:
        sys.stdout.write(f"  equal to {of}: {how}\n")
        return
    rows = [(x["name"] or "-", x["kind"], x["what"], x["detail"]) for x in one["differences"][:MOST]]
    text.table((("name", "left"), ("kind", "left"), ("what", "left"), ("", "left")), rows)
    sys.stdout.write(f"  not equal to {of}: {len(one['differences'])} differences\n")


# ---- the page


def html_page(d: Document) -> str:
    """The page of `verify`: the answer, the steps, what differs or was checked, native runs, recomputation."""
    sides: list[str] = [w for w in ("a", "b") if w in d]
    device, layers = d["device"], d["layers"]
    facts: list[tuple[str, str]] = [(w, f"{d[w]['path']} ({d[w]['format']} {d[w]['variant']})") for w in sides]
    facts += [
        ("device", f"{device['called']}, computing in {device['dtype']}, torch {device['torch']}"),
        ("parameters", f"{d['parameters']} trained, {layers['run']} of {layers['of']} layers"),
    ]
    parts = [f'<p class="verdict">{"equal" if d["equal"] else "not equal"}</p>', html.table(("", ""), facts)]
    parts += ["<h2>Steps</h2>", html.table(*_steps(d, sides))]
    parts += [f"<p>{html.text_of(n)}</p>" for n in d["notes"]]
    if "checks" in d:
        rows = [({True: "yes", False: "NO", None: "-"}[c["ok"]], c["name"], c["detail"]) for c in d["checks"]]
        parts += ["<h2>Checks</h2>", html.table(("", "check", ""), rows)]
    else:
        parts += ["<h2>Differences</h2>", _differences(d["differences"])]
    if "native" in d:
        for word in sides:
            one = d["native"][word]
            parts += [
                f"<h2>Native run of {word}: {html.text_of(one['framework'])}</h2>",
                _differences(one["differences"]),
            ]
        if "between" in d["native"]:
            parts += ["<h2>Native runs of a and b</h2>", _differences(d["native"]["between"]["differences"])]
    if "recompute" in d:
        r = d["recompute"]
        titles = [("#" if side == "right" else "") + title for title, side in _COLUMNS]
        titles += ["#largest batch"] if "max_batch" in r["policies"][0] else []
        parts += [
            "<h2>Recomputation</h2>", f"<p>{html.text_of(_of(r))}</p>", svg(picture(r)), html.table(titles, _rows(r)),
        ]  # fmt: skip
    return html.page("ckptctl verify", parts)


def _steps(d: Document, sides: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    titles = ["#step", *(f"#{t} {w}" for t in ("loss", "gradient norm", "lr") for w in sides)]
    rows = []
    for k in range(d["steps"]):
        numbers = [f"{d[w][name][k]:.9g}" for name in ("losses", "gradient_norms") for w in sides]
        rates = [", ".join(f"{r:g}" for r in d[w]["lr"][k]) or "-" for w in sides]
        rows.append((str(k + 1), *numbers, *rates))
    return titles, rows


def _differences(found: Sequence[Document]) -> str:
    rows = [(x["name"] or "-", x["kind"], x["what"], x["detail"]) for x in found]
    return html.table(("name", "kind", "differs in", ""), rows) if rows else "<p>none</p>"
