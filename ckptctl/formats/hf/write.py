"""A Hugging Face folder as output files: safetensors, index, config.json and what belongs beside them.

Nothing is written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import ADAPTER
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import OutputFile, Put
from ckptctl.formats.carry import Carried
from ckptctl.formats.hf.config import CONFIG, DTYPE_KEYS
from ckptctl.formats.hf.files import ADAPTER_CONFIG
from ckptctl.formats.hf.index import index_bytes, shard_names, split
from ckptctl.formats.st.write import safetensors_segments
from ckptctl.formats.target import Choices, Content, Item, Line, Written

if TYPE_CHECKING:
    from ckptctl.core.checkpoint import Checkpoint, Facts

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def write(content: Content, choices: Choices) -> Written:
    """The folder that from_pretrained loads.

    One safetensors file or numbered ones with an index, and config.json where there is one.
    """
    adapter = is_adapter(content)
    weights = {n: i for n, i in content.weights.items() if n not in content.collapsed}
    for name, item in weights.items():
        _name(name)
        if not item.dtype.safetensors:
            raise Unsupported(
                f"{name} is {item.dtype.name}, which safetensors cannot hold",
                fix=f"leave it out (--exclude '{name}'), or convert to torch or dcp",
            )
    metadata = {**content.source.metadata, "format": "pt"}
    # PEFT knows no adapter in several files.
    most = sum(i.nbytes for i in weights.values()) if adapter else choices.max_shard_nbytes
    shards = split([(n, i.nbytes) for n, i in weights.items()], max(1, most)) or [[]]
    stem = "adapter_model" if adapter else "model"
    files = [
        _file(name, [(n, weights[n]) for n in names], metadata)
        for name, names in zip(shard_names(len(shards), stem), shards, strict=True)
    ]
    lines: list[Line] = []
    if len(shards) > 1:
        where = {n: f for f, names in zip(shard_names(len(shards)), shards, strict=True) for n in names}
        total = sum(i.nbytes for i in weights.values())
        count = sum(i.tensor.numel for i in weights.values())
        text = index_bytes(where, total, count)
        files.append(OutputFile("model.safetensors.index.json", lambda: [Put(text)]))
    if not choices.bare:
        files += _adapter_config(content, lines) if adapter else _config(content, weights, lines)
    if choices.bare:
        return Written(tuple(files), True, tuple(lines))
    extra = _extras(content.source, lines)
    return Written((*files, *extra.files), True, tuple(lines), extra.tensors, extra.sources)


def is_adapter(content: Content) -> bool:
    """Whether the result is an adapter's folder, not a model's."""
    return ADAPTER in content.values and content.source.adapter is not None


def _adapter_config(content: Content, lines: list[Line]) -> list[OutputFile]:
    """adapter_config.json where it is no file of the source (that one is moved byte for byte, with the extra files).

    The base's config.json goes along where it lies in the adapter's folder. Source: peft 0.21.2, config.py,
    save_pretrained: indent 2, sorted keys.
    """
    source, files = content.source, []
    if ADAPTER_CONFIG not in source.extras:
        text = json.dumps(source.adapter or {}, indent=2, sort_keys=True).encode()
        files.append(OutputFile(ADAPTER_CONFIG, lambda: [Put(text)]))
        lines.append(Line(ADAPTER_CONFIG, "carried", "from the values of the source"))
    if source.facts.config_text and source.facts.origin == CONFIG:
        files.append(OutputFile(CONFIG, lambda: [Put(source.facts.config_text)]))
        lines.append(Line(CONFIG, "carried", "it lies beside the adapter"))
    return files


def _name(name: str) -> None:
    """Unsupported for a name that a safetensors header cannot hold."""
    try:
        name.encode()
    except UnicodeEncodeError as err:
        raise Unsupported(
            "a tensor's name is no text that UTF-8 can hold",
            where=repr(name),
            why=err.reason,
            fix="leave it out with --only",
        ) from err
    if name == "__metadata__":
        raise Unsupported(
            "a tensor is called __metadata__, a name that safetensors keeps for itself",
            fix="leave it out with --exclude",
        )


def _file(path: str, items: list[tuple[str, Item]], metadata: dict[str, str]) -> OutputFile:
    def segments() -> list[Any]:
        shapes = {n: i.tensor.shown for n, i in items}
        return safetensors_segments([(n, i.region()) for n, i in items], metadata, shapes)

    return OutputFile(path, segments)


def _config(content: Content, weights: dict[str, Item], lines: list[Line]) -> list[OutputFile]:
    facts = content.source.facts
    if facts.config is None:
        lines.append(Line(CONFIG, "absent", "from_pretrained needs one: give --model-config DIR|FILE"))
        return []
    _fits(content, weights)
    text, changed = _agreeing(facts, weights)
    lines.append(Line(CONFIG, "converted" if changed else "carried", "; ".join([f"from {facts.origin}", *changed])))
    return [OutputFile(CONFIG, lambda: [Put(text)])]


def _agreeing(facts: Facts, weights: dict[str, Item]) -> tuple[bytes, list[str]]:
    """config.json's text with a dtype that is the weights' own, and each changed field."""
    assert facts.config is not None
    counts: dict[str, int] = {}
    for item in weights.values():
        if item.dtype.is_float:
            counts[item.dtype.name] = counts.get(item.dtype.name, 0) + item.nbytes
    if not counts:
        return facts.config_text, []
    dtype = max(counts, key=lambda d: counts[d])
    config = dict(facts.config)
    changed = []
    for key in DTYPE_KEYS:
        said = config.get(key)
        if isinstance(said, str) and said.removeprefix("torch.") != dtype and "quantization_config" not in config:
            changed.append(f"{key} {said} -> {dtype}, as the weights are")
            config[key] = dtype
    if not changed and facts.config_text:
        return facts.config_text, []
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), changed


def _fits(content: Content, weights: dict[str, Item]) -> None:
    """The config must describe these weights: sizes that contradict it would load as another model, or not at all."""
    config = content.source.facts.config or {}
    origin = content.source.facts.origin
    vocab, hidden = config.get("vocab_size"), config.get("hidden_size", config.get("n_embd"))
    for name, item in weights.items():
        if not name.endswith(EMBEDDINGS) or len(item.shape) != 2 or "position" in name:
            continue
        for field, said, has in (("vocab_size", vocab, item.shape[0]), ("hidden_size", hidden, item.shape[1])):
            if isinstance(said, int) and said != has:
                raise Unsupported(
                    f"the config's {field} is {said}, but {name} has {has}",
                    where=origin,
                    why="a folder with both would not load",
                    fix="give this model's own config with --model-config",
                    code="shape-differs-from-config",
                )


def _extras(source: Checkpoint, lines: list[Line]) -> Carried:
    """Tokenizer, generation settings and the like, byte for byte."""
    out = Carried(source)
    for name in source.extras:
        if name != CONFIG:
            out.add(name, Path(name).relative_to(source.extras_root).as_posix())
    if out.files:
        lines.append(Line("tokenizer and other files", "carried", ", ".join(f.path for f in out.files)))
    return out
