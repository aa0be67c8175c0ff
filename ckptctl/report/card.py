"""A model card: README.md with metadata for the Hub, made of what was read and done. Documents in, text out.

A card that somebody wrote keeps every word: the part of ckptctl stands between two marks, and is replaced alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.report.text import nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START, STOP = "<!-- ckptctl: from here -->", "<!-- ckptctl: to here -->"
_BLOCK = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:\r?\n)?---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
}
"""The task that a class of Transformers is for. Source: transformers 5.24.0, pipelines/__init__.py, SUPPORTED_TASKS."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the card tells. Rows are (what, value); fidelity is what `convert` reports; command what was typed."""

    title: str
    metadata: Mapping[str, str | Sequence[str]]
    rows: Sequence[tuple[str, str]]
    fidelity: Sequence[Mapping[str, str]]
    command: str
    heading: str = "Checkpoint"


def metadata(config: Mapping[str, Any] | None, adapter: Mapping[str, Any] | None) -> dict[str, str | list[str]]:
    """What a model's config.json and an adapter's configuration tell the Hub. Nothing is guessed: no licence."""
    out: dict[str, str | list[str]] = {}
    if adapter is not None:
        out["library_name"] = "peft"
        base = adapter.get("base_model_name_or_path")
        if isinstance(base, str) and _REPO.fullmatch(base):
            out["base_model"] = base
        return out
    family = (config or {}).get("model_type")
    if not isinstance(family, str) or not _PLAIN.fullmatch(family):
        return {"tags": ["safetensors"]}
    out["library_name"] = "transformers"
    classes = (config or {}).get("architectures")
    first = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    task = next((t for ending, t in _PIPELINES.items() if first.endswith(ending)), "")
    if task:
        out["pipeline_tag"] = task
    out["tags"] = [family]
    return out


def rows(inspected: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parameters, types and what else a document of `inspect` tells of the weights that are pushed."""
    weights = inspected["kinds"].get("weight", {"numel": 0, "dtypes": [], "bytes": 0, "tensors": 0})
    out = [
        ("parameters", f"{weights['numel']:,} in {weights['tensors']:,} tensors"),
        ("dtype", ", ".join(weights["dtypes"]) or "none"),
        ("size of the weights", nbytes(weights["bytes"])),
    ]
    if inspected["quantized"]:
        out.append(("quantization", inspected["quantized"] + ": numbers are packed, and counted as they are stored"))
    if inspected["family"]:
        out.append(("family", inspected["family"]))
    state = [k for k in inspected["kinds"] if k not in ("weight", "buffer")]
    out.append(("training state", ", ".join(state) if state else "none"))
    return out


def source_rows(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format, layout and step of a document of `inspect` about the source."""
    layout = ", ".join(f"{axis} {size}" for axis, size in source["layout"].items() if size is not None)
    variant = f" ({source['variant']})" if source["variant"] and source["variant"] != source["format"] else ""
    step = "unknown" if source["step"] is None else str(source["step"])
    return [("source format", source["format"] + variant), ("source layout", layout or "one file set"), ("step", step)]


def card(facts: Facts, old: str | None = None) -> str:
    """The README.md: a new one, or old completed. Metadata that old has stays as it is; what lacks is added."""
    part = f"{START}\n\n{_section(facts)}\n{STOP}\n"
    if old is None:
        return f"{_front(facts.metadata)}# {escaped(facts.title)}\n\n{part}"
    old = old.removeprefix("\ufeff")
    found = _BLOCK.match(old)
    body = old[found.end() :] if found else old
    head = _completed(found[1], facts.metadata) if found else _front(facts.metadata)
    before, start, rest = body.partition(START)
    _, stop, after = rest.partition(STOP)
    if start and stop:
        return f"{head}{before}{part}{after.removeprefix(chr(10))}"
    gap = "" if body.endswith("\n\n") or not body else "\n" if body.endswith("\n") else "\n\n"
    return f"{head}{body}{gap}{part}"


def _front(fields: Mapping[str, str | Sequence[str]]) -> str:
    return f"---\n{_yaml(fields)}---\n\n" if fields else ""


def _completed(block: str, fields: Mapping[str, str | Sequence[str]]) -> str:
    """The metadata as they are, and the fields that they lack below. A line with a key at its start is a field."""
    there = set(re.findall(r"^[\"']?([\w-]+)[\"']?[ \t]*:", block, re.M))
    lacking = {name: value for name, value in fields.items() if name not in there}
    text = block.rstrip("\r\n")
    plain = not text or re.search(r"^[\w\"'-]+[ \t]*:", text, re.M)  # `{a: b}` on one line is not added to
    return f"---\n{text}\n{_yaml(lacking) if plain else ''}---\n" if text else f"---\n{_yaml(lacking)}---\n"


def _yaml(fields: Mapping[str, str | Sequence[str]]) -> str:
    """Text and lists of text as YAML."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, str):
            lines.append(f"{name}: {_scalar(value)}")
        else:
            lines += [f"{name}:", *(f"- {_scalar(one)}" for one in value)]
    return "".join(f"{line}\n" for line in lines)


def _scalar(text: str) -> str:
    is_word = text.lower() in ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return text if _PLAIN.fullmatch(text) and not is_word else "'" + text.replace("'", "''") + "'"


def _section(facts: Facts) -> str:
    lines = [f"## {escaped(facts.heading)}", "", "| | |", "|---|---|"]
    lines += [f"| {escaped(name)} | {escaped(value)} |" for name, value in facts.rows]
    if facts.fidelity:
        lines += ["", "### What became of each part", "", "| part | fate | detail |", "|---|---|---|"]
        lines += [f"| {escaped(f['part'])} | {escaped(f['fate'])} | {escaped(f['detail'])} |" for f in facts.fidelity]
    lines += ["", "### Command", "", f"    {one_line(facts.command)}", ""]
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Text without line breaks and control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", one_line(text))
