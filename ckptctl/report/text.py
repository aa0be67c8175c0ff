"""Results as text: tables on a terminal, plain lines in a pipe. Takes the documents that `--json` prints."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.errors import CkptError

Document = dict[str, Any]
_LINES, _WIDTH = 60, 100
MOST_FROZEN = 6
"""Frozen weights that are named; `--json` has all."""


def nbytes(n: int | None) -> str:
    """Bytes as people read them: 1.5 MiB."""
    if n is None:
        return "?"
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return str(n)


def json_text(value: Any) -> str:
    """A document as JSON, in ASCII whatever names it holds. NaN and infinities are text: JSON has no word for them."""
    return json.dumps(_finite(value), indent=2, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def show_error(error: CkptError, *, as_json: bool, command: str) -> None:
    """An error: what, where, why and what to do, on stderr; with as_json the document too, on stdout."""
    if as_json:
        document = {
            "schema": f"ckptctl.{command or 'error'}/1",
            "error": {"exit_code": error.exit_code, **error.as_dict()},
        }
        sys.stdout.write(json_text(document) + "\n")
    lines = [f"error[{error.code}]: {clean(error.what)}"]
    lines += [
        f"  {label:<5}  {clean(value)}"
        for label, value in (("where", error.where), ("why", error.why), ("fix", error.fix))
        if value
    ]
    sys.stderr.write("\n".join(lines) + "\n")


def clean(value: str) -> str:
    """Text of a file on one line without control characters: a name in a hostile file must not drive the terminal."""
    return "".join(c if c.isprintable() else "?" for c in value.replace("\n", " "))


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> None:
    """A table: columns are (title, "left" or "right")."""
    cells = [[clean(str(c)) for c in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max([len(title), *(len(r[i]) for r in cells)]) for i, (title, _) in enumerate(columns)]
        for row in [[t for t, _ in columns], *cells]:
            line = "  ".join(
                c.rjust(w) if columns[i][1] == "right" else c.ljust(w)
                for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            sys.stdout.write(line.rstrip() + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, side in columns:
        grid.add_column(title, justify="right" if side == "right" else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    Console().print(grid)


def pairs(lines: Sequence[tuple[str, Any]]) -> None:
    """Names and values, a line each."""
    width = max(len(k) for k, _ in lines)
    for key, value in lines:
        sys.stdout.write(f"{key:<{width}}  {clean(str(value))}\n")


def inspect(d: Document, verbose: bool = False) -> None:
    """The text of `inspect`."""
    layout = ", ".join(f"{k} {v}" for k, v in d["layout"].items() if v)
    pairs(
        [
            ("format", d["format"] + (f" ({d['variant']})" if d["variant"] else "")),
            ("recognised", d["recognised"]),
            ("path", d["path"]),
            ("layout", layout or "one place"),
            ("step", "-" if d["step"] is None else d["step"]),
            ("model", d["family"] or "not said (no config)"),
            *([("quantized", d["quantized"])] if d["quantized"] else []),
            *([("adapter", _adapter(d["adapter"]))] if d["adapter"] else []),
            ("size", f"{nbytes(sum(f['bytes'] for f in d['files']))} in {len(d['files'])} files"),
            ("resumable", ("yes" if d["resumable"] else "no") + f": {d['why']}"),
        ]
    )
    sys.stdout.write("\n")
    rows = [
        (k, v["tensors"], f"{v['numel']:,}", nbytes(v["bytes"]), ", ".join(v["dtypes"])) for k, v in d["kinds"].items()
    ]
    table((("kind", "left"), ("tensors", "right"), ("elements", "right"), ("size", "right"), ("types", "left")), rows)
    sys.stdout.write("\n")
    table((("training state", "left"), ("", "left")), list(d["state"].items()))
    if d["state_values"]:
        sys.stdout.write("\nits values\n")
        cut(_tree(d["state_values"]), "--json has all")
    if d["groups"]:
        sys.stdout.write("\n")
        table(
            (("group", "right"), ("parameters", "right"), ("settings", "left")),
            [
                (i, g["parameters"], ", ".join(f"{k} {v}" for k, v in g["settings"].items()))
                for i, g in enumerate(d["groups"])
            ],
        )
    for alias, owner in d["ties"].items():
        sys.stdout.write(f"tied: {clean(alias)} is {clean(owner)}\n")
    frozen = d.get("frozen", [])
    if frozen:
        more = ", ..." if len(frozen) > MOST_FROZEN else ""
        sys.stdout.write(f"frozen: {len(frozen)} weights: {', '.join(map(clean, frozen[:MOST_FROZEN]))}{more}\n")
    about = [(k.replace("_", " "), said_of(v)) for k, v in d.get("about", {}).items() if v not in (None, [], {}, "")]
    if about:
        sys.stdout.write("\n")
        table((("besides", "left"), ("", "left")), about)
    for u in d["unsafe"]:
        sys.stdout.write(f"UNSAFE: {clean(u['file'])} names {clean(u['global'])}: {clean(u['why'])}\n")
    for w in d["warnings"]:
        sys.stderr.write(f"warning: {clean(w)}\n")
    if "tensors" in d:
        sys.stdout.write("\n")
        _tensors(d["tensors"])


def _tree(node: Document, indent: str = "  ") -> list[str]:
    """Nested values, a line each."""
    lines = []
    for key, value in node.items():
        is_branch = isinstance(value, dict) and value
        said = clean(said_of(value))
        said = said if len(said) <= _WIDTH else f"{said[:_WIDTH]}..."
        lines.append(f"{indent}{clean(str(key))}" + ("" if is_branch else f": {said}"))
        if is_branch:
            lines += _tree(value, f"{indent}  ")
    return lines


def cut(lines: Sequence[str], more: str) -> None:
    """Writes lines, as many as a person reads."""
    for line in lines[:_LINES]:
        sys.stdout.write(f"{line}\n")
    if len(lines) > _LINES:
        sys.stdout.write(f"  ... and {len(lines) - _LINES} more lines: {more}\n")


def said_of(value: Any) -> str:
    """Plain data on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {said_of(v)}" for k, v in value.items())
    return ", ".join(map(said_of, value)) if isinstance(value, list) else str(value)


def _adapter(a: Document) -> str:
    """An adapter in one line."""
    targets = a["target_modules"] if isinstance(a["target_modules"], list) else [a["target_modules"] or "not said"]
    parts = [str(a["type"]), *(f"{k} {a[k]}" for k in ("rank", "alpha") if a[k] is not None)]
    parts += [word for word, key in (("rsLoRA", "rslora"), ("DoRA", "dora")) if a[key]]
    parts += ["other ranks for some modules"] if a["rank_pattern"] else []
    saved = f"; whole {', '.join(map(str, a['modules_to_save']))}" if a["modules_to_save"] else ""
    return f"{', '.join(parts)}; of {', '.join(map(str, targets))}{saved}; base {a['base'] or 'not said'}"


def _tensors(tensors: Sequence[Document]) -> None:
    rows = [
        (t["name"], t["kind"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", nbytes(t["bytes"]), t["pieces"])
        for t in tensors
    ]
    table(
        (
            ("name", "left"),
            ("kind", "left"),
            ("type", "left"),
            ("shape", "left"),
            ("size", "right"),
            ("pieces", "right"),
        ),
        rows,
    )


def ls(d: Document, verbose: bool = False) -> None:
    """The text of `ls`."""
    _tensors(d["tensors"])
    total = sum(t["bytes"] for t in d["tensors"])
    sys.stdout.write(f"{len(d['tensors'])} tensors, {nbytes(total)}\n")


def show_tensor(d: Document, verbose: bool = False) -> None:
    """The text of `show`."""
    if "value" in d:
        sys.stdout.write(json_text(d["value"]) + "\n")
        return
    pairs(
        [
            ("name", d["name"]),
            ("kind", d["kind"]),
            ("type", d["dtype"]),
            ("shape", d["shape"]),
            *([("slice", d["slice"])] if d["slice"] else []),
        ]
    )
    if d.get("stats"):
        sys.stdout.write("\n")
        pairs(list(d["stats"].items()))
    if d.get("npy"):
        sys.stdout.write(f"written to {d['npy']}\n")
    elif "text" in d:
        sys.stdout.write("\n" + d["text"] + "\n")


def convert(d: Document, verbose: bool = False) -> None:
    """The text of `convert` and `reshard`: the fidelity report, then what was done, or would be."""
    plan = d["plan"]
    table(
        (("part", "left"), ("fate", "left"), ("detail", "left")),
        [(line["part"], line["fate"], line["detail"]) for line in d["fidelity"]],
    )
    for w in d["warnings"]:
        sys.stderr.write(f"warning: {clean(w)}\n")
    sys.stdout.write("\n")
    if d.get("key_map") and (d["dry_run"] or verbose):
        rows = [(", ".join(m["from"]), m["to"]) for m in d["key_map"]]
        table((("name in the source", "left"), ("becomes", "left")), rows)
        sys.stdout.write("\n")
    if d["dry_run"] or verbose:
        casts = ", ".join(f"{k}: {n:,} elements" for k, n in plan["casts"].items()) or "none"
        pairs(
            [
                ("would read" if d["dry_run"] else "read", nbytes(plan["read_bytes"])),
                (
                    "would write" if d["dry_run"] else "wrote",
                    f"{nbytes(plan['written_bytes'])} in {plan['files']} files",
                ),
                (
                    "copies",
                    f"{plan['copies']:,} ({plan['strided_copies']:,} strided; "
                    f"shortest run {plan['shortest_run_bytes']} bytes; "
                    f"source read {plan['reread_factor']} times)",
                ),
                ("source", _source_bytes(d["source_bytes"])),
                ("casts", casts),
                (
                    "memory",
                    f"at most {nbytes(plan['memory_bytes'])} for data; index {nbytes(plan['index_memory_bytes'])}",
                ),
                ("disk", f"{nbytes(plan['space_needed_bytes'])} needed, {nbytes(plan['space_free_bytes'])} free"),
            ]
        )
    if d["dry_run"]:
        sys.stdout.write("nothing was written (--dry-run)\n")
        return
    result = d["result"]
    rate = result["written_bytes"] / max(result["seconds"], 1e-9)
    resumed = f", {nbytes(result['resumed_bytes'])} of it before" if result["resumed_bytes"] else ""
    sys.stdout.write(
        f"wrote {nbytes(plan['written_bytes'])}{resumed} to {d['target']['path']} "
        f"in {result['seconds']:.1f} s ({nbytes(int(rate))}/s)\n"
    )
    if "verify" in d:
        found = d["verify"]
        how = "bit for bit" if found["tolerance"]["mode"] == "bits" else "within tolerances"
        sys.stdout.write(f"verified: the next step from it is the source's, {how}\n")
        for note in found["notes"]:
            sys.stdout.write(f"note: {clean(note)}\n")


def strip(d: Document, verbose: bool = False) -> None:
    """The text of `strip`: as convert's, and what was saved."""
    convert(d, verbose)
    saved = d["saved"]
    share = 100 * saved["bytes"] / max(1, saved["before_bytes"])
    would = "would save" if d["dry_run"] else "saved"
    sys.stdout.write(
        f"{would} {nbytes(saved['bytes'])} ({share:.0f}%): {nbytes(saved['before_bytes'])} before, "
        f"{nbytes(saved['after_bytes'])} after\n"
    )


def push(d: Document, verbose: bool = False) -> None:
    """The text of `push`: what became of each part, what was sent, and where it is."""
    rows = [(line["part"], line["fate"], line["detail"]) for line in d["fidelity"]]
    if rows:
        table((("part", "left"), ("fate", "left"), ("detail", "left")), rows)
        sys.stdout.write("\n")
    for w in d["warnings"]:
        sys.stderr.write(f"warning: {clean(w)}\n")
    if d["files"] and (d["dry_run"] or verbose):
        files = [(f["path"], nbytes(f["bytes"]), f["state"]) for f in d["files"]]
        table((("file", "left"), ("size", "right"), ("state", "left")), files)
        sys.stdout.write("\n")
    for path in d["deleted"]:
        sys.stdout.write(f"{'would delete' if d['dry_run'] else 'deleted'} on the Hub: {clean(path)}\n")
    sent, there = d["sent"], d["there"]
    count = "" if sent["files"] is None else f" in {sent['files']} files"
    beside = f"; {nbytes(there['bytes'])} in {there['files']} files is there" if there["files"] else ""
    if d["dry_run"]:
        sys.stdout.write(f"would send {nbytes(sent['bytes'])}{count}{beside}\nnothing was sent (--dry-run)\n")
        return
    sys.stdout.write(f"sent {nbytes(sent['bytes'])}{count}{beside}\n")
    pull = d["pull_request"]
    where = pull["url"] if pull else f"{d['target']['url']} ({d['target']['revision']}, commit {d['commit'][:12]})"
    sys.stdout.write(f"{d['verified']['files']} files compared with the Hub's by size and hash: equal\n{where}\n")


def _source_bytes(spent: Document) -> str:
    dropped = ", ".join(f"{nbytes(n)} {kind}" for kind, n in spent["dropped"].items()) or "nothing"
    gaps = f"{nbytes(spent['gaps'])} {spent['gap_reason']}"
    return f"{nbytes(spent['total'])}: {nbytes(spent['used'])} used, dropped {dropped}, {gaps}"
