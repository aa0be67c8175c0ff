"""Reads NeMo 1 archives (`.nemo`) in place: an uncompressed tar with a config and weights, classic or distributed.

Members are read where they lie in the archive; nothing is unpacked.
Source: NeMo 1.23, nemo/core/connectors/save_restore_connector.py, nemo/collections/nlp/parts/nlp_overrides.py.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import Source
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.formats.dcp.metadata import NAME, ByteItem, Chunks, Index, read_index
from ckptctl.formats.megatron import classic, dist, runconfig, yamltext, zarr
from ckptctl.formats.megatron.collect import Whole
from ckptctl.formats.megatron.facts import Facts
from ckptctl.formats.megatron.found import Found
from ckptctl.formats.megatron.rankfile import FileAt
from ckptctl.formats.megatron.ranks import Rank, folder_names, mesh_said, ranks_missing
from ckptctl.formats.torchfile.sniff import is_tar

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.formats import Hints

CONFIG, WEIGHTS, FOLDER = "model_config.yaml", "model_weights.ckpt", "model_weights/"
_GZIP = b"\x1f\x8b"
_MOST_MEMBERS = 1 << 22


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive: its first byte, and how many it has."""

    start: int
    nbytes: int


def is_archive(path: Path) -> bool:
    """Whether a file is called a NeMo archive and begins as a tar or a gzip file does."""
    if path.suffix != ".nemo" or not path.is_file():
        return False
    head = read_whole(path, 512)
    return head[:2] == _GZIP or is_tar(head)


def members_of(path: Path) -> dict[str, Member]:
    """The archive's files by name. Unsupported where it is compressed, Damaged where it is no tar."""
    if read_whole(path, 2) == _GZIP:
        raise Unsupported(
            "the archive is compressed with gzip: its members cannot be read in place",
            where=str(path),
            fix=f"decompress it first: gunzip -c {path.name} > plain.nemo",
            code="codec",
        )
    out: dict[str, Member] = {}
    try:
        with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for count, info in enumerate(tar):
                if count >= _MOST_MEMBERS:
                    raise Damaged("the archive has too many members", where=str(path), code="archive-damaged")
                if info.isreg() and not info.issparse():
                    out[info.name.removeprefix("./")] = Member(info.offset_data, info.size)
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError, RecursionError) as err:
        raise Damaged(
            "the archive is no whole tar", where=str(path), why=str(err), fix="copy it again", code="archive-damaged"
        ) from err
    size = path.stat().st_size
    short = next((n for n, m in out.items() if m.start + m.nbytes > size), None)
    if short is not None:
        raise Damaged(
            f"{short} goes past the archive's end", where=str(path), fix="copy it again", code="data-truncated"
        )
    return out


def read(path: Path, hints: Hints) -> Found:
    """The model of an archive. MissingFile where it lacks its config or weights."""
    members = members_of(path)
    facts = _facts(path, members, hints)
    if any(n.startswith(FOLDER) for n in members):
        return _distributed(
            path, {n.removeprefix(FOLDER): m for n, m in members.items() if n.startswith(FOLDER)}, facts, hints
        )
    files = _ranks(path, members, facts)
    sizes = [(path.name, path.stat().st_size)]
    whole = Whole(hints.replica, hints.verify_replicas)
    out = Found(facts, "nemo", whole, version=3.0, sizes=sizes, weights_only=hints.weights_only)
    return classic.read_files(files, out, str(path))


def _open(path: Path, member: Member, name: str) -> FileBytes:
    return FileBytes(path, member.start, member.start + member.nbytes, name=f"{path.name}, {name}")


def _facts(path: Path, members: dict[str, Member], hints: Hints) -> Facts:
    member = members.get(CONFIG)
    if member is None:
        raise MissingFile(f"{CONFIG} is not in the archive", where=str(path), why="it says how the model is cut")
    if member.nbytes > yamltext.LIMIT:
        raise Damaged(f"{CONFIG} is too long", where=str(path), code="yaml")
    with _open(path, member, CONFIG) as reader:
        text = reader.read(0, member.nbytes).decode("utf-8", "replace")
    where = f"{path.name}, {CONFIG}"
    args = runconfig.args_of(yamltext.parsed(text, where), where)
    if args.get("megatron_legacy"):
        raise Unsupported(
            "the model's rows of query, key and value are in the order of old Megatron (megatron_legacy)",
            where=where,
            fix="save it with a NeMo of 1.20 or later and megatron_legacy off",
        )
    facts = Facts(args, where, hints.facts.config or {})
    facts.require_known()
    return facts


def _ranks(path: Path, members: dict[str, Member], facts: Facts) -> dict[Rank, FileAt]:
    """The file of weights of every rank, in order. MissingFile naming those that are not there."""
    out: dict[Rank, FileAt] = {}
    missing = []
    for pp, ep, tp in product(range(facts.pp), range(facts.ep), range(facts.tp)):
        rank = Rank(tp, pp, ep)
        names = [f"{f}/{WEIGHTS}" for f in folder_names(rank, facts)]
        if facts.tp * facts.pp * facts.ep == 1:
            names.append(WEIGHTS)
        name = next((n for n in names if n in members), None)
        if name is None:
            missing.append(names[0])
            continue
        member = members[name]
        stop = member.start + member.nbytes
        out[rank] = FileAt(path, f"{path.name}, {name}", member.start, stop, archive=path.stat().st_size)
    if missing:
        count = facts.tp * facts.pp * facts.ep
        raise ranks_missing(missing, count, str(path), f"{CONFIG} says {mesh_said(facts)}")
    return out


def _distributed(path: Path, members: dict[str, Member], facts: Facts, hints: Hints) -> Found:
    common = members.get(dist.COMMON)
    if common is None:
        raise MissingFile(f"{FOLDER}{dist.COMMON} is not in the archive", where=str(path))
    with _open(path, common, dist.COMMON) as reader:
        opened, root = dist.common_of(reader)
    backend = members.get(zarr.BACKEND)
    if backend is not None and zarr.says_zarr(_bytes(path, backend, zarr.BACKEND)):
        sizes = {n: m.nbytes for n, m in sorted(members.items()) if "/" in n}
        index = zarr.index_of(sizes, lambda name: _bytes(path, members[name], name), str(path))
    elif NAME in members:
        with _open(path, members[NAME], NAME) as reader:
            index = read_index(reader)
    else:
        raise MissingFile(f"{FOLDER}{NAME} is not in the archive", where=str(path))
    own = [(path.name, path.stat().st_size)]
    out = Found(facts, "nemo", fused=True, sizes=own, weights_only=hints.weights_only)
    out.sources.append(Source(""))
    return dist.read_parts(opened, root, _shifted(index, path, members), path.parent, out)


def _bytes(path: Path, member: Member, name: str) -> bytes:
    with _open(path, member, name) as reader:
        return reader.read(0, min(member.nbytes, 1 << 20))


def _shifted(index: Index, path: Path, members: dict[str, Member]) -> Index:
    """An index of the archive's members as one of the archive itself. MissingFile for files that it lacks."""
    lacking = [n for n in index.files if n not in members]
    if lacking:
        raise MissingFile(f"{FOLDER}{lacking[0]} is not in the archive", where=str(path), why="the index names it")
    starts = np.array([members[n].start for n in index.files] or [0], np.int64)
    sizes = np.array([members[n].nbytes for n in index.files] or [0], np.int64)
    items: dict[str, Chunks | ByteItem] = {}
    for name, item in index.items.items():
        if isinstance(item, ByteItem):
            _require_inside(name, item.offset + item.length <= sizes[item.file], path)
            items[name] = replace(item, file=0, offset=item.offset + int(starts[item.file]))
        else:
            _require_inside(name, bool((item.offset + item.length <= sizes[item.file]).all()), path)
            items[name] = replace(item, file=np.zeros_like(item.file), offset=item.offset + starts[item.file])
    return Index(items, index.paths, [path.name], index.unsafe, index.warnings)


def _require_inside(name: str, inside: bool, path: Path) -> None:
    if not inside:
        raise Damaged(f"an item of {name} goes past the end of its file", where=str(path), code="data-truncated")
