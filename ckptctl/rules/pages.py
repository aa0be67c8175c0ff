"""The rules as pages of docs/rules, one a code, and their list. Texts out; `python -m ckptctl.rules.pages DIR` writes.

What is in a page stands in rules.toml: correct it there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.rules.registry import rules

if TYPE_CHECKING:
    from ckptctl.rules.registry import Rule

_QUESTIONS = {"intact": "is it intact", "safe": "is it safe", "resumable": "can a run go on from it"}
_GROUPS = {
    "0": "Files",
    "1": "Safetensors",
    "2": "Torch files",
    "3": "Safety",
    "4": "Folders and indexes",
    "5": "The model and its config",
    "6": "Ranks and distributed checkpoints",
    "7": "Training state",
    "8": "Values",
}


def page(rule: Rule) -> str:
    """One rule's page."""
    return (
        f"# {rule.code} {rule.kind}\n\n{_sentence(rule.title)}\n\n"
        f"| | |\n|---|---|\n| severity | {rule.severity} |\n"
        f"| an error answers no to | {_QUESTIONS[rule.question]} |\n\n"
        f"## Cause\n\n{rule.cause}\n\n## What to do\n\n{rule.cure}\n\n"
        f"## To leave it out\n\n`ckptctl validate --ignore {rule.code}`, or `--ignore {rule.kind}`. "
        "All rules are in [the list](index.md).\n"
    )


def index() -> str:
    """The list of all rules."""
    lines = [
        "# What validate can find",
        "",
        "One code a kind of finding; codes stay what they are. The severity is the usual one: where a finding may be",
        "graver, or less grave, its page says when. `--select` and `--ignore` take a code, the beginning of one",
        "(`CK1`), or a kind.",
    ]
    group = ""
    for rule in rules():
        if rule.code[2] != group:
            group = rule.code[2]
            lines += ["", f"## {_GROUPS[group]}", "", "| code | kind | severity | |", "|---|---|---|---|"]
        lines.append(f"| [{rule.code}]({rule.code}.md) | `{rule.kind}` | {rule.severity} | {rule.title} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    return {"index.md": index(), **{f"{r.code}.md": page(r) for r in rules()}}


def _sentence(title: str) -> str:
    start = title if title.startswith("`") else title[0].upper() + title[1:]
    return start + "."


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in pages().items():
        (folder / name).write_text(made, encoding="utf-8")
