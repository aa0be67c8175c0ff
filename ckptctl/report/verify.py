"""The text of `verify`. Takes the document that `--json` prints."""

from __future__ import annotations

import sys
from typing import Any

from ckptctl.report import text
from ckptctl.report.recompute import show_native, show_recompute

Document = dict[str, Any]
MOST = 20
"""Differences that are listed; the number of all is said."""


def verify(d: Document, verbose: bool = False) -> None:
    """Numbers of each step, what was compared, what differs."""
    device, layers = d["device"], d["layers"]
    pairs: list[tuple[str, str]] = [
        (word, f"{d[word]['path']} ({_format(d[word])})") for word in ("a", "b") if word in d
    ]
    pairs += [
        ("device", f"{device['called']}, computing in {device['dtype']}, torch {device['torch']}"),
        ("batch", _batch(d)),
        (
            "parameters",
            f"{d['parameters']} trained" + (f", {layers['run']} of {layers['of']} layers" if layers["of"] else ""),
        ),
    ]
    pairs += [(f"{word} took", _measured(d[word]["measured"])) for word in ("a", "b") if word in d]
    text.pairs(pairs)
    sys.stdout.write("\n")
    sides: list[str] = [word for word in ("a", "b") if word in d]
    columns = [("step", "right")]
    for title in ("loss", "gradient norm", "lr", "logits"):
        columns += [(f"{title} {word}" if len(sides) > 1 else title, "right") for word in sides]
    text.table(columns, [_row(d, sides, k) for k in range(d["steps"])])
    for note in d["notes"]:
        sys.stdout.write(f"note: {text.clean(note)}\n")
    sys.stdout.write("\n")
    (_two if "b" in d else _one)(d, verbose)
    if "native" in d:
        show_native(d["native"])
    if "recompute" in d:
        show_recompute(d["recompute"])


def _format(side: Document) -> str:
    return " ".join(w for w in (side["format"], side["variant"]) if w)


def _batch(d: Document) -> str:
    batch = d["batch"]
    if batch["from"] == "seed":
        return f"{batch['rows']} x {batch['columns']} tokens, drawn from seed {batch['seed']}"
    return "none: gradients are drawn" if batch["from"] == "nothing" else f"{batch['file']}"


def _measured(m: Document) -> str:
    rate = f", {m['load_gb_per_second']} GB/s" if m.get("load_gb_per_second") else ""
    peak = f", at most {text.nbytes(m['peak_device_bytes'])} on the device" if m.get("peak_device_bytes") else ""
    loaded = f"{text.nbytes(m['loaded_bytes'])} loaded in {m['load_seconds']} s{rate}"
    return f"{loaded}, steps {m['step_seconds']} s{peak}"


def _row(d: Document, sides: list[str], k: int) -> list[str]:
    row = [str(k + 1)]
    for name in ("losses", "gradient_norms"):
        row += [f"{d[w][name][k]:.9g}" if d[w][name] else "-" for w in sides]
    row += [", ".join(f"{r:g}" for r in d[w]["lr"][k]) or "-" for w in sides]
    return row + [d[w]["logits"][k][:12] if d[w]["logits"] else "-" for w in sides]


def _two(d: Document, verbose: bool) -> None:
    compared = ", ".join(f"{n} {kind}" for kind, n in d["compared"].items())
    sys.stdout.write(f"compared: {compared}\n")
    tolerance = d["tolerance"]
    how = "bit for bit" if tolerance["mode"] == "bits" else f"within tolerances: {tolerance['why']}"
    if d["equal"]:
        sys.stdout.write(f"equal: {how}\n")
        return
    for which, words in (("cause", "that differs before the step"), ("first", "whose update differs")):
        found = d[which]
        if found is not None:
            where = f"{found['name']}: {found['kind']} {found['what']}"
            sys.stdout.write(f"the first parameter {words}: {text.clean(where)}\n")
    shown = d["differences"] if verbose else d["differences"][:MOST]
    rows = [(x["name"] or "-", x["kind"], x["what"], x["detail"]) for x in shown]
    text.table((("name", "left"), ("kind", "left"), ("what", "left"), ("", "left")), rows)
    more = len(d["differences"]) - len(shown)
    sys.stdout.write(f"not equal: {len(d['differences'])} differences" + (f", {more} not shown\n" if more else "\n"))


def _one(d: Document, verbose: bool) -> None:
    rows = [({True: "yes", False: "NO", None: "-"}[c["ok"]], c["name"], c["detail"]) for c in d["checks"]]
    text.table((("", "left"), ("check", "left"), ("", "left")), rows)
    bad = sum(c["ok"] is False for c in d["checks"])
    sys.stdout.write("all checks hold\n" if not bad else f"{bad} of {len(d['checks'])} checks do not hold\n")
