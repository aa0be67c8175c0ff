"""Reads Hugging Face folders and single safetensors files.

Safetensors and `.bin`, whole, numbered, or with an index. Headers only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import ADAPTER, EMA, Checkpoint, Facts, File, UnsafeGlobal
from ckptctl.core.dtype import packed
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import InOnePlace, Key, Source, Tensor
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats import Evidence, Hints
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.hf.adapter import adapted, rank_problems
from ckptctl.formats.hf.config import CONFIG, quantization, read_config
from ckptctl.formats.hf.files import ADAPTER_CONFIG, HfFolder, WeightSet, compare_sources, scan_folder
from ckptctl.formats.hf.index import INDEX_ENDINGS
from ckptctl.formats.hf.shards import read_shards
from ckptctl.formats.jsonscan import short
from ckptctl.formats.st.header import read_header
from ckptctl.formats.st.slices import slices
from ckptctl.formats.state import find
from ckptctl.formats.torchfile.read import open_torch
from ckptctl.formats.torchtensor import aliases, tensor_of, value_of
from ckptctl.formats.wrapping import unwrapped

if TYPE_CHECKING:
    from pathlib import Path


def detect(path: Path) -> Evidence | None:
    """A safetensors file, or a folder with weights by Transformers' names, numbered, or any safetensors."""
    if path.is_file():
        if path.suffix == ".safetensors":
            return Evidence("hf", "its name ends with .safetensors", path)
        if path.name.endswith(INDEX_ENDINGS):
            return Evidence("hf", "it is an index", path.parent)
        return None
    if not path.is_dir():
        return None
    found = scan_folder(path)
    if (path / ADAPTER_CONFIG).is_file():
        return Evidence("hf", f"it holds {ADAPTER_CONFIG}", path)
    if found.chosen is not None:
        what = found.chosen.index or next(iter((*found.chosen.files, *found.chosen.missing)), "weights")
        return Evidence("hf", f"it holds {what}", path)
    if found.dcp_shards:
        return Evidence("hf", f"it holds {found.dcp_shards[0]}, slices of DCP's Hugging Face writer", path)
    return None


@dataclass
class _Reading:
    """Tensors and files of one folder while it is read."""

    root: Path
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    model_values: dict[str, Tree] = field(default_factory=dict)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, file: str) -> None:
        """One tensor; a name that two files hold is damage: loaders differ in which one they take."""
        if name in self.home:
            raise Damaged(
                f"{short(name)} is in two files",
                where=file,
                why=f"it is in {self.home[name]} too",
                fix="remove the file that is out of date",
                code="duplicate-tensor",
            )
        self.home[name] = file
        self.tensors[tensor.key] = tensor


def read(path: Path, hints: Hints) -> Checkpoint:
    """The checkpoint in a folder or one safetensors file. Damaged where index and files disagree."""
    if path.is_file():
        out = _Reading(path.parent)
        _read_safetensors(out, path.name, "")
        return _checkpoint(out, path, "safetensors", None)
    folder = scan_folder(path)
    if folder.dcp_shards and folder.chosen is None:
        return _shards(path, folder, hints)
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path, folder)
    chosen = folder.require_files()
    out = _Reading(path)
    for name in chosen.files:
        if chosen.suffix == ".safetensors":
            _read_safetensors(out, name, name)
        else:
            _read_bin(out, name)
    _agrees(out, folder, chosen)
    for warning in folder.warnings:
        # What a loader would never look at is worth a word; two sets of weights that differ are a reason to stop.
        if warning.code == "two-sources" and "differ" in warning.what:
            raise warning
        out.warnings.append(f"{warning.what}: {warning.why}" if warning.why else warning.what)
    extra = [File(n, (path / n).stat().st_size, "extra") for n in folder.carried]
    out.files += [*extra, *(File(n, (path / n).stat().st_size, "index") for n in folder.indexes)]
    if folder.config is not None:
        out.files.append(File(CONFIG, (path / CONFIG).stat().st_size, "config"))
    variant = "safetensors" if chosen.suffix == ".safetensors" else "bin"
    return _checkpoint(out, path, f"{variant} {chosen.variant}" if chosen.variant else variant, folder)


def _adapter(path: Path, folder: HfFolder) -> Checkpoint:
    """A PEFT adapter: its tensors under their own names, and its configuration as a value.

    A folder that holds a whole model too is refused: Transformers would take the adapter and load the base from
    elsewhere. Source: transformers 5.24.0, modeling_utils.py, from_pretrained, _adapter_model_path.
    """
    if folder.chosen is not None:
        raise Unsupported(
            "the folder holds a model and an adapter",
            where=str(path),
            why=f"{(*folder.chosen.files, *folder.chosen.missing)[0]} and {ADAPTER_CONFIG}: loaders take the adapter",
            fix="put one of them into a folder of its own; `convert --merge-adapter` joins the two",
            code="model-and-adapter",
        )
    config = read_config(path / ADAPTER_CONFIG, ADAPTER_CONFIG)
    if not folder.adapter:
        raise MissingFile(
            "the adapter's weights are not there",
            where=str(path),
            why=f"{ADAPTER_CONFIG} is there, adapter_model.safetensors and adapter_model.bin are not",
            fix="copy them",
            code="adapter-missing",
        )
    if not isinstance(config.get("peft_type"), str):
        raise Damaged(
            f"{ADAPTER_CONFIG} does not say which kind of adapter it is",
            where=str(path),
            why=f"peft_type is {short(str(config.get('peft_type')))}",
            fix="copy it again",
            code="adapter-config",
        )
    out = _Reading(path)
    kind = "safetensors" if folder.adapter.endswith(".safetensors") else "bin"
    _read_safetensors(out, folder.adapter, folder.adapter) if kind == "safetensors" else _read_bin(out, folder.adapter)
    if kind == "safetensors" and (path / "adapter_model.bin").is_file():
        out.warnings.append("adapter_model.bin lies beside adapter_model.safetensors, which is taken, as PEFT does")
    out.values[ADAPTER] = config
    carried = (ADAPTER_CONFIG, *folder.carried)
    out.files += [File(n, (path / n).stat().st_size, "config" if n == ADAPTER_CONFIG else "extra") for n in carried]
    if folder.config is not None:
        out.files.append(File(CONFIG, (path / CONFIG).stat().st_size, "config"))
    checkpoint = _checkpoint(out, path, f"adapter {kind}", replace(folder, carried=carried))
    warned = (f"{p.what}: {p.why} ({p.where})" for p in _rank_problems(checkpoint))
    return replace(checkpoint, warnings=(*checkpoint.warnings, *warned))


def _rank_problems(checkpoint: Checkpoint) -> list[Damaged]:
    """What is wrong with a LoRA adapter's factors by their shapes."""
    if checkpoint.adapter is None or checkpoint.adapter["peft_type"].upper() != "LORA":
        return []
    return rank_problems(checkpoint, adapted(k.name for k in checkpoint.tensors))


def require_one_source(path: Path) -> None:
    """Damaged where two sets of weights lie side by side and differ by a byte: loaders would take one in silence.

    Damaged, too, for an adapter whose factors do not fit each other: no loader takes it.
    """
    if not path.is_dir():
        return
    if (path / ADAPTER_CONFIG).is_file():
        wrong = _rank_problems(read(path, Hints()))
        if wrong:
            raise wrong[0]
    sets = scan_folder(path).sets
    for a, b in itertools.pairwise(sets):
        if a.suffix == b.suffix == ".safetensors" and a.variant == b.variant:
            problem = compare_sources(path, a, b, values=True)
            if problem is not None:
                raise problem


def _shards(path: Path, folder: HfFolder, hints: Hints) -> Checkpoint:
    """The checkpoint of a folder that holds slices only."""
    facts = hints.facts
    if facts.config is None and folder.config is not None:
        facts = Facts(folder.config, read_whole(path / CONFIG), CONFIG)
    config = folder.config if folder.config is not None else facts.config
    found = read_shards(path, folder.dcp_shards, config)
    out = _Reading(path, found.tensors, sources=found.sources, files=found.files, metadata=found.metadata)
    out.warnings += found.warnings
    out.files += [File(n, (path / n).stat().st_size, "extra") for n in folder.carried]
    if folder.config is not None:
        out.files.append(File(CONFIG, (path / CONFIG).stat().st_size, "config"))
    return replace(_checkpoint(out, path, "safetensors sharded", folder), layout={"world_size": found.ranks})


def _checkpoint(out: _Reading, path: Path, variant: str, folder: HfFolder | None) -> Checkpoint:
    facts, method = Facts(), ""
    config = folder.config if folder is not None else None
    if folder is not None and config is not None:
        facts = Facts(config, read_whole(path / CONFIG), CONFIG)
        packed_by = quantization(config)
        method = packed_by.method or "unknown method" if packed_by else ""
    return Checkpoint(
        "hf",
        variant,
        str(path),
        tuple(out.sources),
        out.tensors,
        values=out.values,
        model_values=out.model_values,
        ties=out.ties,
        facts=facts,
        files=tuple(out.files),
        extras=folder.carried if folder is not None else (),
        metadata=out.metadata,
        unsafe=tuple(out.unsafe),
        unknown_globals=tuple(sorted(out.unknown)),
        unsupported=tuple(out.unsupported),
        warnings=tuple(out.warnings),
        quantized=method,
        gap_reason="headers",
    )


def _read_safetensors(out: _Reading, name: str, source: str) -> None:
    with FileBytes(out.root / name, name=name) as reader:
        header = read_header(reader)
        out.files.append(File(name, reader.nbytes))
        if slices(header, name) is not None:
            raise Unsupported(
                "the file holds one rank's slices of tensors (DCP's Hugging Face writer)",
                where=name,
                why="DCP_SHARDING_INFO is in its header",
                fix="give the folder that holds all ranks' files",
            )
    number = len(out.sources)
    out.sources.append(Source(source))
    out.warnings += [f"{name}: {w.what}" for w in header.warnings]
    out.metadata.update({k: v for k, v in header.metadata.items() if k not in ("DCP_VERSION", "DCP_SHARDING_INFO")})
    for tensor_name, e in header.entries.items():
        key = Key(tensor_name)
        dtype = packed(e.dtype)
        if dtype is e.dtype:
            tensor = Tensor(key, dtype, e.shape, InOnePlace(e.shape, dtype.itemsize, number, e.start_byte))
        else:
            flat = (e.nbytes,)
            tensor = Tensor(key, dtype, flat, InOnePlace(flat, 1, number, e.start_byte), logical=e.shape)
        out.add(tensor_name, tensor, name)


def _read_bin(out: _Reading, name: str) -> None:
    with FileBytes(out.root / name, name=name) as reader:
        opened = open_torch(reader)
        found = find(opened.root, lambda tree: isinstance(tree, TensorRef), averages=True)
        out.files.append(File(name, reader.nbytes))
        number = len(out.sources)
        out.sources.append(Source(name))
        if found.has_optimizer:
            raise Unsupported(
                "the file holds more than weights: an optimizer",
                where=name,
                why="a folder's weights are read here",
                fix=f"give the file itself: {out.root / name}",
            )
        for kept, values in ((out.values, found.rest), (out.model_values, found.model_values)):
            kept.update({n: value_of(v, n, reader, out.tensors, number) for n, v in values.items()})
    out.unsafe += [UnsafeGlobal(name, str(f.name), f.why) for f in opened.unsafe]
    out.unknown.update(str(f.name) for f in opened.unknown)
    out.unsupported += [(f"{name}: {where}", why) for where, why in opened.unsupported]
    for tensor_name, ref in found.model.items():
        out.add(tensor_name, tensor_of(Key(tensor_name), ref, number), name)
    for tensor_name, ref in found.ema.items():
        out.tensors[Key(tensor_name, EMA)] = tensor_of(Key(tensor_name, EMA), ref, number)
    out.ties.update(aliases(found.model))
    out.warnings += [f"{name}: {text}" for text in unwrapped(found)]


def _agrees(out: _Reading, folder: HfFolder, chosen: WeightSet) -> None:
    """Index and files must tell the same: each entry in its file, and each tensor in the index."""
    index = folder.indexes.get(chosen.index)
    if index is None:
        return
    for name, file in index.weight_map.items():
        if name not in out.home:
            raise Damaged(
                f"{short(name)} is in no file",
                where=file,
                why=f"{chosen.index} says it is in {file}",
                fix="copy the file again, or make the index anew",
                code="tensor-not-in-shard",
            )
        if out.home[name] != file:
            raise Damaged(
                f"{short(name)} is not in the file that the index names",
                where=file,
                why=f"it is in {out.home[name]}",
                fix="make the index anew",
                code="tensor-not-in-shard",
            )
    for name, file in out.home.items():
        if name not in index.weight_map:
            raise Damaged(
                f"the index lacks {short(name)}",
                where=chosen.index,
                why=f"{file} holds it",
                fix="make the index anew",
                code="tensor-not-in-index",
            )
