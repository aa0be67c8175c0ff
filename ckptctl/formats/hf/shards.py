"""Folders of torch's DCP writer for Hugging Face: each rank's slices in safetensors files of its own. Headers only.

The size of a whole tensor is in no file. It is taken to be the largest offset + size of its slices, which must tile
that box; that a last shard is missing is seen by the shapes that config.json asks for, and by nothing else.
Source: torch 2.13.0, distributed/checkpoint/hf_storage.py, HuggingFaceStorageWriter(save_distributed=True).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptctl.core.checkpoint import File
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.jsonscan import short
from ckptctl.formats.st.header import read_header
from ckptctl.formats.st.slices import OWN_METADATA, slices
from ckptctl.names import NAMESPACES, family, head_and_embedding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ckptctl.core.dtype import DType

_NAME = re.compile(r"shard-([0-9]{5,})-(?:.+-([0-9]{5,})-of-([0-9]{5,})|.+)\.safetensors")
NOT_PROVEN = (
    "no file says how large the tensors are: that the last shards are missing could not be seen"
    " (--model-config gives the shapes)"
)


@dataclass
class Shards:
    """What a folder's shards hold: tensors over all of them, in the order of the first file that has each."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    ranks: int = 0


@dataclass(slots=True)
class _Draft:
    """One tensor while files are read: (source, first byte, offsets, shape) of each slice."""

    dtype: DType
    file: str
    rows: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def read_shards(path: Path, names: Sequence[str], config: Mapping[str, Any] | None = None) -> Shards:
    """The tensors of a folder whose shard files are names. config is the model's, where known: it asks for shapes.

    MissingFile where a file's own name says that another is there; Damaged where slices contradict each other, leave a
    hole, or make another shape than the model's.
    """
    out = Shards(ranks=_require_numbers(path, names))
    gap = _gap(path, names)
    drafts: dict[str, _Draft] = {}
    for name in names:
        with FileBytes(path / name, name=name) as reader:
            header = read_header(reader)
            out.files.append(File(name, reader.nbytes))
        number = len(out.sources)
        out.sources.append(Source(name))
        out.warnings += [f"{name}: {w.what}" for w in header.warnings]
        out.metadata.update({k: v for k, v in header.metadata.items() if k not in OWN_METADATA})
        offsets = slices(header, name)
        if offsets is None:
            raise Damaged(
                "a shard of DCP's writer does not say where its slices belong",
                where=name,
                why="DCP_SHARDING_INFO is not in its header",
                fix="copy the file again",
                code="dcp-sharding-info",
            )
        for tensor, e in header.entries.items():
            if e.dtype.bits % 8:
                raise Unsupported(f"slices of {short(tensor)} have elements of {e.dtype.bits} bits", where=name)
            draft = drafts.setdefault(tensor, _Draft(e.dtype, name))
            if draft.dtype is not e.dtype or (draft.rows and len(draft.rows[0][3]) != len(e.shape)):
                raise Damaged(
                    f"slices of {short(tensor)} have another type or number of axes",
                    where=name,
                    why=f"{e.dtype.name} {e.shape} here, {draft.dtype.name} {draft.rows[0][3]} in {draft.file}",
                    fix="remove what is left of an earlier save",
                    code="dcp-sharding-info",
                )
            draft.rows.append((number, e.start_byte, offsets[tensor], e.shape))
    for tensor, draft in drafts.items():
        out.tensors[Key(tensor)] = _tensor(tensor, draft)
    shapes = model_shapes(config, drafts) if config is not None else {}
    lost = _agree(out, shapes)
    if gap is not None and (not shapes or lost):
        raise gap
    if lost:
        out.warnings.append(f"{len(lost)} tensors of the model are not there: {', '.join(map(short, lost[:3]))}")
    return out


def _require_numbers(path: Path, names: Sequence[str]) -> int:
    """How many ranks there are by the names. MissingFile where numbers leave one out."""
    ranks: set[int] = set()
    parts: dict[int, set[int]] = {}
    for name in names:
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        ranks.add(int(found[1]))
        if found[3]:
            parts.setdefault(int(found[3]), set()).add(int(found[2]))
    if len(parts) > 1:
        raise Damaged(
            "the folder holds shards of several saves",
            where=str(path),
            why=f"their names count {' and '.join(map(str, sorted(parts)))} files",
            fix="remove what is left of an earlier save",
            code="dcp-sharding-info",
        )
    for count, there in parts.items():
        gone = next((i for i in range(1, count + 1) if i not in there), None)
        if gone is not None:
            raise MissingFile(
                f"file {gone} of {count} is missing",
                where=str(path),
                why=f"no shard-...-{gone:05d}-of-{count:05d}.safetensors is there",
                fix="copy the missing files",
                code="shard-missing",
            )
    return max(ranks, default=0)


def _gap(path: Path, names: Sequence[str]) -> MissingFile | None:
    """What is wrong where a rank between others has no file: only its whole tensors could be missing unseen."""
    ranks = {int(m[1]) for n in names if (m := _NAME.fullmatch(n))}
    lost = sorted(set(range(1, max(ranks, default=0) + 1)) - ranks)
    if not lost:
        return None
    return MissingFile(
        f"the shards of rank {lost[0] - 1} are missing",
        where=str(path),
        why=f"shard-{lost[0]:05d}-... is not there, shard-{max(ranks):05d}-... is",
        fix="copy the missing files; if that rank wrote none, --model-config gives the shapes that prove it",
        code="shard-missing",
    )


def _tensor(name: str, draft: _Draft) -> Tensor:
    """One tensor of its slices. Damaged where they do not fill the box that they reach."""
    axes = len(draft.rows[0][3])
    lo = np.array([r[2] for r in draft.rows], np.int64).reshape(len(draft.rows), axes)
    size = np.array([r[3] for r in draft.rows], np.int64).reshape(len(draft.rows), axes)
    shape = tuple((lo + size).max(axis=0).tolist())
    volume = int(size.prod(axis=1).sum()) if axes else len(draft.rows)
    whole = int(np.prod(np.array(shape, object))) if axes else 1
    if volume != whole:
        more = "more than" if volume > whole else "only"
        raise Damaged(
            f"the slices of {short(name)} do not tile it",
            where=draft.file,
            why=f"they reach {shape}, {whole} elements, and hold {more} {volume}",
            fix="copy the missing shards, and remove what is left of an earlier save",
            code="tensor-incomplete",
        )
    source = np.array([r[0] for r in draft.rows], np.int32)
    start = np.array([r[1] for r in draft.rows], np.int64)
    table = PieceTable(shape, draft.dtype.itemsize, lo, size, source, start)
    return Tensor(Key(name), draft.dtype, shape, (table,))


def _agree(out: Shards, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The model's tensors that are not there. Damaged where its config asks for another shape of one that is."""
    if not shapes:
        out.warnings.append(NOT_PROVEN)
        return []
    for key, tensor in out.tensors.items():
        want = shapes.get(key.name)
        if want is not None and want != tensor.shape:
            raise Damaged(
                f"the slices of {short(key.name)} make another shape than the model's",
                where=str(out.files[0].path),
                why=f"they make {tensor.shape}, config.json asks for {want}: shards may be missing",
                fix="copy all shards; if the config is another model's, give the right one",
                code="tensor-incomplete",
            )
    unproven = [k.name for k in out.tensors if k.name not in shapes]
    if unproven:
        out.warnings.append(f"{len(unproven)} tensors ({short(unproven[0])}, ...): {NOT_PROVEN}")
    there = {k.name for k in out.tensors}
    return [n for n in shapes if n not in there]


def model_shapes(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that a config's model has, in the namespace that names are of.

    {} for a family that is not known here, and for a config that describes no model.
    """
    there = set(names)
    model = family(config)
    best: dict[str, tuple[int, ...]] = {}
    try:
        for namespace in NAMESPACES if model is not None else ():
            assert model is not None
            found = {p.name: p.shape for p in (*model.parameters(namespace), *model.buffers(namespace))}
            if len(there & set(found)) > len(there & set(best)):
                best = found
    except Damaged:
        return {}
    pair = head_and_embedding(there)
    if pair is not None and pair[1] in best:
        best.setdefault(pair[0], best[pair[1]])
    return best
