"""A folder's weight files against its indexes: what is promised, what is there, what is left over. Headers only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import CkptError
from ckptctl.formats.hf.files import compare_sources, scan_folder
from ckptctl.formats.hf.index import INDEX_ENDINGS

if TYPE_CHECKING:
    from ckptctl.formats.hf.files import HfFolder
    from ckptctl.formats.hf.index import Index
    from ckptctl.operations.checks.found import Found, Level

_STATES = "pytorch_optim"


def check_folder(found: Found, level: Level) -> None:
    """Checks every index of the folder against the files, and the sets of weights in its root against each other."""
    for name, index in found.indexes.items():
        _index(found, name, index, level)
    if any(f.endswith((".safetensors", ".bin", *INDEX_ENDINGS)) and "/" not in f for f in found.files):
        try:
            folder = scan_folder(found.root)
        except CkptError as err:
            found.error(err)
            return
        _sets(found, folder, level)


def _index(found: Found, name: str, index: Index, level: Level) -> None:
    prefix = name.rpartition("/")[0]
    prefix = f"{prefix}/" if prefix else ""
    there = set(found.files)
    promised: dict[str, list[str]] = {}
    for tensor, file in index.weight_map.items():
        promised.setdefault(prefix + file, []).append(tensor)
    for file, tensors in promised.items():
        if file not in there:
            what = f"the file is not there; {len(tensors)} of {len(index.weight_map)} tensors were in it"
            found.note("shard-missing", what, file=file, why=f"{name} names it: {', '.join(tensors[:3])}, ...")
            continue
        if file in found.unreadable or file not in found.names:
            continue
        names = _indexed(name, found.names[file])
        held = set(names)
        for tensor in tensors:
            if tensor not in held:
                why = f"{name} says it is in {file}"
                found.note("tensor-not-in-shard", "the file does not hold it", file=file, tensor=tensor, why=why)
        for tensor in names:
            home = index.weight_map.get(tensor)
            if home is not None and prefix + home == file:
                continue
            if home is not None and tensor in _indexed(name, found.names.get(prefix + home, ())):
                _twice(found, tensor, file, prefix + home, level)
                continue
            why = f"{name} says it is in {home}" if home else f"{name} does not name it"
            found.note(
                "tensor-not-in-index",
                "the index does not say that the file holds it",
                file=file,
                tensor=tensor,
                why=why,
            )
    if name.endswith(".safetensors.index.json") and all(f in found.headers for f in promised):
        nbytes = sum(e.nbytes for f in promised for e in found.headers[f].entries.values())
        problem = index.check_total(nbytes)
        if problem is not None:
            found.note("total-size-mismatch", problem.what, file=name, field="metadata.total_size", why=problem.why)
    suffix = ".safetensors" if ".safetensors." in name else ".bin"
    _left_over(
        found, name, index, {f for f in there if f.startswith(prefix) and "/" not in f[len(prefix) :]}, suffix, level
    )


def _indexed(index: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """What an index lists of a file: its tensors; of an optimizer's file its parameters, each with several tensors.

    Source: ColossalAI 0.5.0, colossalai/checkpoint_io/utils.py, STATES_NAME and StateDictSharder.append_optim_param.
    """
    if not index.rpartition("/")[2].startswith(_STATES):
        return names
    return tuple(dict.fromkeys(n.partition(".")[0] for n in names))


def _left_over(found: Found, name: str, index: Index, beside: set[str], suffix: str, level: Level) -> None:
    """Weight files beside an index that hold tensors which it finds elsewhere."""
    prefix = name.rpartition("/")[0]
    prefix = f"{prefix}/" if prefix else ""
    named = {prefix + f for f in index.weight_map.values()}
    for file in sorted(beside - named):
        if not file.endswith(suffix) or file in found.unreadable or "-of-" not in file:
            continue
        why = f"{name} does not name it"
        found.note("unreferenced-shard", "the index does not name the file", file=file, why=why)
        for tensor in found.names.get(file, ()):
            if tensor in index.weight_map:
                _twice(found, tensor, file, prefix + index.weight_map[tensor], level)


def _twice(found: Found, tensor: str, file: str, other: str, level: Level) -> None:
    """Two files hold one name: whether alike, as far as the level allows to look."""
    a, b = (found.headers[f].entries.get(tensor) if f in found.headers else None for f in (file, other))
    why = f"{other} holds it too"
    if a is not None and b is not None:
        if (a.dtype.name, a.shape) != (b.dtype.name, b.shape):
            why += f", as {b.dtype.name} {list(b.shape)}; here it is {a.dtype.name} {list(a.shape)}"
        elif level == "values":
            why += ", with the same bytes" if _equal(found, (file, a), (other, b)) else ", with other bytes"
    found.note("duplicate-tensor", "two files hold it", file=file, tensor=tensor, why=why)


def _equal(found: Found, *places: tuple[str, object]) -> bool:
    from ckptctl.formats.bytesource import FileBytes
    from ckptctl.formats.st.header import StEntry

    (file_a, a), (file_b, b) = places
    assert isinstance(a, StEntry)
    assert isinstance(b, StEntry)
    try:
        with FileBytes(found.root / file_a) as left, FileBytes(found.root / file_b) as right:
            return all(
                left.read(a.start_byte + at, n) == right.read(b.start_byte + at, n)
                for at in range(0, a.nbytes, 1 << 22)
                for n in (min(1 << 22, a.nbytes - at),)
            )
    except CkptError:
        return False


def _sets(found: Found, folder: HfFolder, level: Level) -> None:
    """Two sets of weights of which a loader takes one; numbers in file names that leave some out."""
    for problem in folder.warnings:
        if problem.code == "two-sources":
            _two(found, folder, level)
        elif problem.code == "unreferenced-shard":
            file = problem.where.rpartition("/")[2]
            if file not in found.unreadable:
                found.error(problem, file, "warning")
        elif problem.code == "several-variants":
            found.error(problem, severity="error")
    for weights in folder.sets:
        if not weights.index:
            for file in weights.missing:
                found.note("shard-missing", "the file is not there", file=file, why="the other files are numbered so")


def _two(found: Found, folder: HfFolder, level: Level) -> None:
    for a, b in zip(folder.sets, folder.sets[1:], strict=False):
        if a.variant != b.variant or any(f in found.unreadable for f in (*a.files, *b.files)):
            continue
        try:
            problem = compare_sources(folder.path, a, b, values=level == "values")
        except CkptError as err:
            found.error(err)
            continue
        if problem is not None:
            severity = "error" if "differ" in problem.what else "warning"
            found.note("two-sources", problem.what, file=b.index or b.files[0], why=problem.why, severity=severity)  # type: ignore[arg-type]
