"""Index files of sharded weights: reading one safely, writing one as Transformers does, splitting.

Source: transformers 5.24.0, modeling_utils.py, save_pretrained and _get_resolved_checkpoint_files; huggingface_hub
2.4.0, serialization/_base.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Damaged, Unsafe, Unsupported
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.jsonscan import Scan, short
from ckptctl.formats.paths import why_outside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ckptctl.core.errors import Severity

INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
_INDEX_LIMIT = 1 << 26
"""Bytes of an index that are read: half a million tensors."""
_METADATA_LIMIT = 1 << 20
_PROBLEM_LIMIT = 200
_MIB = 1 << 20
_SEVERITY: dict[str, Severity] = {
    "total-size-missing": "warning",
    "total-size-mismatch": "warning",
    "duplicate-metadata-key": "warning",
}


@dataclass(frozen=True, slots=True)
class Index:
    """weight_map is tensor name -> file, relative to the index's folder and inside it. metadata is as it stands."""

    path: str
    weight_map: dict[str, str]
    metadata: dict[str, Any]
    warnings: tuple[CkptError, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files it names, each once, in the order of their first tensor."""
        return tuple(dict.fromkeys(self.weight_map.values()))

    @property
    def total_size(self) -> int | None:
        """Bytes of all tensors as the index says, None where it says nothing usable. Some writers give a float.

        A float that is no whole number counts MiB, as ColossalAI does.
        Source: ColossalAI 0.5.0, colossalai/checkpoint_io/utils.py, calculate_tensor_size.
        """
        value = self.metadata.get("total_size")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e999:
            return None
        if value == int(value):
            return int(value)
        return int(value * _MIB) if value * _MIB == int(value * _MIB) else None

    def check_total(self, nbytes: int) -> CkptError | None:
        """A warning where the shards hold nbytes of tensors and the index says another number."""
        said = self.total_size
        if said is None or said == nbytes or (isinstance(self.metadata["total_size"], float) and said * _MIB == nbytes):
            return None
        what = f"the index says {said - nbytes:+,} bytes against what the shards hold"
        why = f"metadata.total_size is {said:,}, the tensors are {nbytes:,} bytes"
        return Damaged(what, where=self.path, why=why, fix="write the index again", code="total-size-mismatch")


@dataclass(slots=True)
class _Draft:
    path: str
    weight_map: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] | None = None
    problems: list[CkptError] = field(default_factory=list)

    def note(self, code: str, what: str, why: str, fix: str = "write the index again", at: str = "") -> None:
        """Adds a problem; at is the tensor or field."""
        if len(self.problems) < _PROBLEM_LIMIT:
            kind = Unsafe if code == "path-escapes" else Damaged
            where = f"{self.path}, {at[:200]}" if at else self.path
            self.problems.append(kind(what, where=where, why=why, fix=fix, code=code))


def read_index(path: Path, name: str = "", problems: list[CkptError] | None = None) -> Index:
    """An index file. name is what messages call it (default: path).

    With problems, all that is wrong (the first 200 of it; see severity()) is put there, and what could be read is
    given; otherwise the first that is an error is raised. A missing or odd metadata.total_size is a warning.

    Raises Damaged (index-not-json, duplicate-name, ...), Unsafe (path-escapes) or Unsupported (over 64 MiB).
    """
    draft = _examine(path, name or str(path))
    if problems is not None:
        problems.extend(draft.problems)
    else:
        for problem in draft.problems:
            if severity(problem) == "error":
                raise problem
    return Index(draft.path, draft.weight_map, draft.metadata or {}, tuple(draft.problems))


def severity(problem: CkptError) -> Severity:
    """Error or warning: whether a problem of an index makes it unusable."""
    return _SEVERITY.get(problem.code, "error")


def _examine(path: Path, name: str) -> _Draft:
    draft = _Draft(name)
    try:
        with FileBytes(path, name=name) as source:
            if source.nbytes > _INDEX_LIMIT:
                raise Unsupported(
                    f"the index is over {_INDEX_LIMIT:,} bytes", where=name, why=f"{source.nbytes:,} bytes"
                )
            text = source.read(0, source.nbytes)
        if text.startswith(b"version https://git-lfs.github.com/spec/"):
            what = "the index is a Git LFS pointer"
            raise Damaged(what, where=name, fix="run `git lfs pull`", code="lfs-pointer")
        scan = Scan(text, name, noun="the index", code="index-not-json")
        scan.check_utf8("index-not-json")
        _parse(scan, draft)
    except CkptError as err:
        draft.problems.append(err)
    return draft


def _parse(scan: Scan, draft: _Draft) -> None:
    p = scan.space(0)
    if scan.byte(p) != b"{":
        scan.fail(p, "an object is wanted")
    seen: set[str] = set()
    more, p = scan.opened(p)
    while more:
        key, p = scan.key(p)
        if key in seen:
            draft.note(
                "duplicate-name", f"{short(key)} stands twice in the index", "JSON readers differ in which they take"
            )
        seen.add(key)
        if key == "weight_map":
            p = _weight_map(scan, p, draft)
        else:
            after = scan.skip(p)
            if key == "metadata":
                draft.metadata = _metadata(scan.text[p:after], draft)
            p = after
        more, p = scan.next(p, b"}")
    scan.stop(p)
    if "weight_map" not in seen:
        draft.note("index-no-weight-map", "the index has no weight_map", f"its keys are {sorted(seen)[:8]}")
    said = (draft.metadata or {}).get("total_size")
    if said is None:
        why = "Transformers 5 refuses such an index" if draft.metadata is None else "readers check the shards with it"
        draft.note("total-size-missing", "the index has no metadata.total_size", why)
    elif Index("", {}, {"total_size": said}).total_size is None:
        why = f"it is {json.dumps(said)[:60]}; a whole number of bytes is wanted"
        draft.note("total-size-mismatch", "metadata.total_size is no number of bytes", why, at="metadata.total_size")


def _weight_map(scan: Scan, p: int, draft: _Draft) -> int:
    if scan.byte(p) != b"{":
        after = scan.skip(p)
        what = "weight_map must be an object of file names"
        draft.note("index-no-weight-map", what, f"{scan.shown(p, after)} is there")
        return after
    draft.weight_map, others, twice, p = scan.texts(p)
    for name in others:
        what = f"weight_map has no file name for {short(name)}"
        draft.note("index-no-weight-map", what, "a text is wanted", at=name)
    for name in twice:
        draft.note(
            "duplicate-name", f"{short(name)} stands twice in weight_map", "readers take one of the two", at=name
        )
    share = dict.fromkeys(draft.weight_map.values(), "")  # one text a file, not one a tensor
    for file in share:
        share[file] = why_outside(file)
    files = {file: file for file in share}
    for name, file in draft.weight_map.items():
        draft.weight_map[name] = files[file]
        if share[file]:
            what = f"the file of {short(name)} leaves the folder: {short(file)}"
            draft.note("path-escapes", what, share[file], "correct the index, if you trust it", at=name)
    return p


def _metadata(text: bytes, draft: _Draft) -> dict[str, Any] | None:
    if len(text) > _METADATA_LIMIT:
        why = f"{len(text):,} bytes"
        raise Unsupported("the metadata of the index is over 1 MiB", where=draft.path, why=why)
    try:
        value = json.loads(text)
    except ValueError as err:  # an integer of over 4300 digits, or half a character
        draft.note("index-not-json", "the metadata of the index cannot be read", str(err), at="metadata")
        return None
    if not isinstance(value, dict):
        draft.note("total-size-missing", "the metadata of the index is no object", f"it is {json.dumps(value)[:60]}")
        return {}
    return value


def index_bytes(weight_map: Mapping[str, str], total_size: int, total_parameters: int | None = None) -> bytes:
    """The text of an index as Transformers writes it: indent 2, keys sorted, a newline at the end.

    Source: transformers 5.24.0, modeling_utils.py, save_pretrained.
    """
    metadata = {"total_size": total_size} | ({} if total_parameters is None else {"total_parameters": total_parameters})
    tree = {"metadata": metadata, "weight_map": dict(weight_map)}
    return (json.dumps(tree, indent=2, sort_keys=True) + "\n").encode()


def split(sizes: Iterable[tuple[str, int]], max_nbytes: int) -> list[list[str]]:
    """Names by file, from (name, bytes) in the state dict's order.

    A tensor over the limit has a file of its own, which stands before the file that is being filled then.
    Source: huggingface_hub 2.4.0, serialization/_base.py, split_state_dict_into_shards_factory.
    """
    if max_nbytes < 1:
        raise ValueError(f"max_nbytes must be at least 1, it is {max_nbytes}")
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > max_nbytes:
            files.append([name])
            continue
        if filled + nbytes > max_nbytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*files, current] if current else files


def shard_names(count: int, stem: str = "model", suffix: str = ".safetensors") -> list[str]:
    """File names of count files: the plain name for one, model-00001-of-00003.safetensors and so on for more."""
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{i:05d}-of-{count:05d}{suffix}" for i in range(1, count + 1)]
