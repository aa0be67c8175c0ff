"""Findings of `validate` for people and for machines: text, JUnit, SARIF, GitHub, GitLab. Documents in, texts out."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from ckptctl import __version__
from ckptctl.report.text import clean, json_text
from ckptctl.rules import rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Document = dict[str, Any]
ANNOTATIONS = 10
"""GitHub shows at most ten annotations of each kind a step. Source: docs.github.com, workflow commands, limits."""
_GITHUB = {"error": "error", "warning": "warning", "info": "notice"}
_GITLAB = {"error": "critical", "warning": "minor", "info": "info"}
_SARIF = {"error": "error", "warning": "warning", "info": "note"}
_SHOWN = 40
_LONGEST = 600
"""Characters of a name or sentence."""


def place(found: Document) -> str:
    """Where a finding is, in one line: checkpoint, file, tensor, field."""
    where = found["where"]
    inner = ", ".join(filter(None, (where["file"], short(where["tensor"]), short(where["field"]))))
    return f"{found['checkpoint']}: {inner}" if found["checkpoint"] and inner else found["checkpoint"] or inner


def sentence(found: Document) -> str:
    """What was found, and why, in one line."""
    return f"{short(found['what'])}: {short(found['why'])}" if found["why"] else short(found["what"])


def short(text: str) -> str:
    """A text as people and services can take it: names in a file may have any length. The JSON report has all."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 60]} ... {text[-50:]}"


def _file(found: Document, document: Document) -> str:
    """A path for tools that want one, never outside and never empty."""
    rows = document["checkpoints"]
    base = found["checkpoint"] or (rows[0]["path"] if rows else "")
    file = found["where"]["file"]
    if not file or base.endswith(f"/{file}") or base == file:
        return (base or "checkpoint").lstrip("/")
    return f"{base}/{file}".lstrip("/")


def json_document(document: Document) -> str:
    """The document itself. Made by report.text, which knows what JSON has no word for."""
    return json_text(document) + "\n"


def text(document: Document) -> str:
    """For people: findings by gravity, then the three answers for each checkpoint."""
    lines = []
    for found in document["findings"][:_SHOWN]:
        lines.append(f"{found['severity']}[{found['code']}] {found['kind']}: {clean(short(found['what']))}")
        for label, value in (("where", place(found)), ("why", short(found["why"])), ("fix", found["fix"])):
            if value:
                lines.append(f"  {label:<5}  {clean(value)}")
    hidden = len(document["findings"]) - _SHOWN
    if hidden > 0:
        lines.append(f"... and {hidden} more: --output json has all")
    if lines:
        lines.append("")
    rows = document["checkpoints"]
    if len(rows) == 1:
        lines += _answers(rows[0])
    else:
        lines += _lines(rows)
    if len(rows) > 1:
        newest = document["newest_resumable"] or ("not looked at" if document["level"] == "header" else "none")
        lines.append(f"newest that a run can go on from: {clean(newest)}")
    counts, checked = document["counts"], document["checked"]
    lines.append(
        f"{_count(counts['error'], 'error')}, {_count(counts['warning'], 'warning')}, {counts['info']} info; "
        f"{_count(checked['tensors'], 'tensor')} in {_count(checked['files'], 'file')}, level {document['level']}"
    )
    return "\n".join(lines) + "\n"


_QUESTIONS = ("intact", "safe", "resumable")
_WORDS = {True: "yes", False: "no", None: "-"}


def _answers(row: Document) -> list[str]:
    """One checkpoint's three answers, with what they rest on."""
    lines = [clean(row["path"]) + (f" (step {row['step']})" if row["step"] is not None else "")]
    lines += [f"  {q:<9}  {_WORDS[row[q]['answer']]:<3}  {clean(row[q]['why'])}" for q in _QUESTIONS]
    return lines


def _lines(rows: Sequence[Document]) -> list[str]:
    """A line a checkpoint: its step, the answers, and what the first rests on that is no yes."""
    out: list[tuple[str, ...]] = [("checkpoint", "step", *_QUESTIONS, "")]
    for row in rows:
        answers = [row[q] for q in _QUESTIONS]
        why = next((clean(a["why"]) for a in answers if a["answer"] is not True), "")
        step = "" if row["step"] is None else str(row["step"])
        out.append((clean(row["path"]), step, *(_WORDS[a["answer"]] for a in answers), why))
    widths = [max(len(cells[i]) for cells in out) for i in range(5)]
    return ["  ".join([c.ljust(w) for c, w in zip(cells, widths, strict=False)] + [cells[5]]).rstrip() for cells in out]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _xml(value: str) -> str:
    """Text that XML 1.0 can hold, also in quotes: other characters cannot even be escaped."""
    return escape("".join(c if c in "\t\n" or c.isprintable() else "?" for c in value))


def _quoted(value: str) -> str:
    return f'"{_xml(value)}"'


def junit(document: Document) -> str:
    """JUnit's XML: a suite a checkpoint, or run with findings of its own; a case a finding, and one that passes."""
    suites = []
    names = [row["path"] for row in document["checkpoints"]]
    names += dict.fromkeys(f["checkpoint"] for f in document["findings"] if f["checkpoint"] not in ("", *names))
    total = failed = 0
    for name in names:
        mine = [f for f in document["findings"] if (f["checkpoint"] or names[0]) == name]
        cases = []
        for found in mine:
            head = f"    <testcase classname={_quoted(found['kind'])} name={_quoted(place(found) or name)}"
            if found["severity"] == "info":
                cases.append(f"{head}><system-out>{_xml(sentence(found))}</system-out></testcase>")
                continue
            failed += 1
            body = f"{sentence(found)}\n{found['fix']}"
            message = _quoted(short(found["what"]))
            cases.append(
                f"{head}><failure type={_quoted(found['code'])} message={message}>{_xml(body)}</failure></testcase>"
            )
        cases.append(f'    <testcase classname="ckptctl" name={_quoted(f"{name} was looked at")}/>')
        failures = sum(f["severity"] != "info" for f in mine)
        total += len(cases)
        suites.append(
            f'  <testsuite name={_quoted(name)} tests="{len(cases)}" failures="{failures}" errors="0">\n'
            + "\n".join(cases)
            + "\n  </testsuite>"
        )
    head = f'<testsuites name="ckptctl validate" tests="{total}" failures="{failed}" errors="0">'
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + head + "\n" + "\n".join(suites) + "\n</testsuites>\n"


def sarif(document: Document) -> str:
    """SARIF 2.1.0. Source: OASIS, Static Analysis Results Interchange Format 2.1.0, 3.27 result, 3.49 descriptor."""
    used = sorted({f["code"] for f in document["findings"]})
    known = {r.code: r for r in rules()}
    described = [
        {
            "id": code,
            "name": "".join(w.capitalize() for w in known[code].kind.split("-")),
            "shortDescription": {"text": known[code].title},
            "fullDescription": {"text": known[code].cause},
            "help": {"text": known[code].cure},
            "defaultConfiguration": {"level": _SARIF[known[code].severity]},
        }
        for code in used
    ]
    results = []
    for found in document["findings"]:
        location: Document = {
            "physicalLocation": {"artifactLocation": {"uri": _uri(_file(found, document))}, "region": {"startLine": 1}}
        }
        if found["where"]["tensor"] or found["where"]["field"]:
            name = short(found["where"]["tensor"] or found["where"]["field"])
            location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "member"}]
        results.append(
            {
                "ruleId": found["code"],
                "ruleIndex": used.index(found["code"]),
                "level": _SARIF[found["severity"]],
                "message": {"text": sentence(found)},
                "locations": [location],
                "partialFingerprints": {"ckptctl/v1": found["fingerprint"]},
            }
        )
    driver = {"name": "ckptctl", "version": __version__, "rules": described}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}],
    }
    return json.dumps(log, indent=2) + "\n"


def _uri(path: str) -> str:
    from urllib.parse import quote

    scheme = next((s for s in ("hf://",) if path.startswith(s)), "")
    return scheme + quote(path.removeprefix(scheme).encode("utf-8", "surrogatepass"))


def github(document: Document) -> str:
    """Workflow commands, one annotation a finding, the gravest first. The step summary has all: see summary()."""
    lines = []
    for found in document["findings"][:ANNOTATIONS]:
        file = _property(_file(found, document))
        title = _property(f"{found['code']} {found['kind']}")
        message = f"{place(found)}: {sentence(found)}" if place(found) else sentence(found)
        lines.append(f"::{_GITHUB[found['severity']]} file={file},title={title}::{_data(message)}")
    return "".join(f"{line}\n" for line in lines)


def _data(value: str) -> str:
    return clean(value).replace("%", "%25")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")


def summary(document: Document) -> str:
    """A page in Markdown for GITHUB_STEP_SUMMARY: the answers, then the findings."""
    lines = ["### ckptctl validate", "", "| checkpoint | intact | safe | resumable |", "|---|---|---|---|"]
    for row in document["checkpoints"]:
        words = [{True: "yes", False: "**no**", None: "-"}[row[q]["answer"]] for q in ("intact", "safe", "resumable")]
        lines.append(f"| {_cell(row['path'])} | {' | '.join(words)} |")
    if document["findings"]:
        lines += ["", "| severity | rule | where | what |", "|---|---|---|---|"]
        lines += [
            f"| {f['severity']} | {f['code']} {f['kind']} | {_cell(place(f))} | {_cell(sentence(f))} |"
            for f in document["findings"][:200]
        ]
    return "\n".join(lines) + "\n"


def _cell(value: str) -> str:
    shown = clean(value).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
    return f"`{shown}`" if shown else ""


def gitlab(document: Document) -> str:
    """GitLab's code quality report. Source: docs.gitlab.com, ci/testing/code_quality, report format."""
    report = [
        {
            "description": sentence(f) if not f["where"]["tensor"] else f"{short(f['where']['tensor'])}: {sentence(f)}",
            "check_name": f"{f['code']} {f['kind']}",
            "fingerprint": f["fingerprint"],
            "severity": _GITLAB[f["severity"]],
            "location": {"path": _file(f, document), "lines": {"begin": 1}},
        }
        for f in document["findings"]
    ]
    return json.dumps(report, indent=2) + "\n"


WRITERS: dict[str, Callable[[Document], str]] = {
    "text": text,
    "json": json_document,
    "junit": junit,
    "sarif": sarif,
    "github": github,
    "gitlab": gitlab,
}
"""What --output takes."""
