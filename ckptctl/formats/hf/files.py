"""What lies in a Hugging Face folder: sets of weight files, the one Transformers would take, and what else is there.

Looks at names, indexes and config.json; tensor data is read only by compare_sources, on request.
Source: transformers 5.24.0, modeling_utils.py, _get_resolved_checkpoint_files and _add_variant; peft 0.21.2,
utils/constants.py; torch 2.13.0, distributed/checkpoint/_hf_utils.py.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Damaged, MissingFact, MissingFile, Unrecognised, Unsafe
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.hf.config import CONFIG, read_config
from ckptctl.formats.hf.index import Index, read_index
from ckptctl.formats.jsonscan import short
from ckptctl.formats.paths import why_outside
from ckptctl.formats.st.header import read_header

if TYPE_CHECKING:
    from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_SHARD = re.compile(r"(.+)-([0-9]{5,})-of-([0-9]{5,})(\.safetensors|\.bin)")
_DCP_SHARD = re.compile(r"shard-[0-9]{5,}-(.+-[0-9]{5,}-of-[0-9]{5,}|[^/]+)\.safetensors")
_STANDARD = re.compile(
    r"(?:model(?:\.(?P<a>[^/]+?))?\.safetensors|model\.safetensors\.index(?:\.(?P<b>[^/]+))?\.json"
    r"|pytorch_model(?:\.(?P<c>[^/]+?))?\.bin|pytorch_model\.bin\.index(?:\.(?P<d>[^/]+))?\.json)"
)
_CARRIED = (
    "tokenizer.*",
    "tokenizer_*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "*.py",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    ".gitattributes",
)
_NOT_CARRIED = ("zero_to_fp32.py",)
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One complete set of weights: files, relative to the folder, and the index that names them ("" for none).

    suffix is .safetensors or .bin. missing are files that index or numbering name and that are not there. why is how
    it was found.
    """

    suffix: str
    variant: str
    index: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class HfFolder:
    """sets in Transformers' order of choice, chosen the first of them; None where only something else is there.

    adapter is the weight file of a PEFT adapter ("" where there is none), dcp_shards files of torch's DCP writer that
    hold slices, carried the files to copy unchanged, unreferenced weight files that the chosen set does not name.
    indexes are by file name.
    """

    path: Path
    sets: tuple[WeightSet, ...]
    chosen: WeightSet | None
    indexes: dict[str, Index]
    config: dict[str, Any] | None
    adapter: str
    dcp_shards: tuple[str, ...]
    carried: tuple[str, ...]
    unreferenced: tuple[str, ...]
    warnings: tuple[CkptError, ...]

    def require_files(self) -> WeightSet:
        """The chosen set.

        Raises Unrecognised where there is none, MissingFact where there are several, MissingFile where a file is gone.
        """
        chosen = self.chosen
        for problem in self.warnings:
            if isinstance(problem, MissingFact):
                raise problem
        if chosen is None:
            what = "the folder holds no weights that Transformers would load"
            raise Unrecognised(
                what, where=str(self.path), fix="give the folder that holds model.safetensors or an index"
            )
        if chosen.missing:
            name = chosen.missing[0]
            index = self.indexes.get(chosen.index)
            lost = sum(file in chosen.missing for file in index.weight_map.values()) if index else 0
            held = (
                f"{lost} of {len(index.weight_map)} tensors were in it" if index else "the other files are numbered so"
            )
            if len(chosen.missing) > 1 and index:
                held = f"{lost} of {len(index.weight_map)} tensors were in them"
            total = len(chosen.files) + len(chosen.missing)
            raise MissingFile(
                f"{len(chosen.missing)} of {total} weight files are missing: {short(name)}",
                where=f"{self.path}/{chosen.index}" if chosen.index else str(self.path),
                why=held,
                fix="copy the missing files",
                code="shard-missing",
            )
        return chosen


def scan_folder(path: Path, *, variant: str | None = None) -> HfFolder:
    """What is in a folder. variant asks for that one (fp16, ...); None takes the plain files, else the only variant.

    Raises Damaged, Unsafe or Unsupported for an index or a config.json that cannot be used, Unrecognised where path
    is no folder.
    """
    try:
        names = sorted(p.name for p in path.iterdir())
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise Unrecognised("the folder cannot be read", where=str(path), why=why, fix="check the path") from err
    config = read_config(path / CONFIG) if CONFIG in names else None
    warnings: list[CkptError] = []
    indexes: dict[str, Index] = {}
    dcp = tuple(n for n in names if _DCP_SHARD.fullmatch(n))
    sets = _explicit(path, config, indexes) + _standard(path, names, indexes, variant)
    adapter = next((n for n in _ADAPTER_WEIGHTS if n in names), "") if ADAPTER_CONFIG in names else ""
    if not sets and not dcp and variant is None:
        sets = _unnamed(names, adapter)
    for a, b in itertools.pairwise(sets):
        if a.variant == b.variant and a.why != "config.json":
            try:
                problem = compare_sources(path, a, b)
            except CkptError as err:  # the reader meets it again, if it takes that file
                problem = _two(path, "two sets of weights lie side by side", f"{err.where}: {err.what}")
            warnings += [problem] if problem else []
    variants = sorted({s.variant for s in sets})
    chosen = sets[0] if sets else None
    if len(variants) > 1 and variants[0]:
        what = f"the folder holds the variants {', '.join(variants)} and no plain weights"
        why, fix = "nothing says which one is meant", "give a folder with one of them"
        warnings.append(MissingFact(what, where=str(path), why=why, fix=fix, code="several-variants"))
        chosen = None
    for index in indexes.values():
        warnings += index.warnings
    used = {f for s in sets for f in s.files} | set(dcp) | {adapter}
    shards = [n for n in names if (n.endswith(".safetensors") or _SHARD.fullmatch(n)) and n not in used]
    left = tuple(n for n in shards if n not in _ADAPTER_WEIGHTS)
    if chosen is not None and chosen.index:
        for n in left:
            what, why = f"the weight file {short(n)} is not in the index", f"{chosen.index} does not name it"
            fix = "remove it, if it is from an earlier save"
            warnings.append(Damaged(what, where=f"{path}/{n}", why=why, fix=fix, code="unreferenced-shard"))
    carried = _carried(path, names)
    return HfFolder(path, tuple(sets), chosen, indexes, config, adapter, dcp, carried, left, tuple(warnings))


def _explicit(path: Path, config: dict[str, Any] | None, indexes: dict[str, Index]) -> list[WeightSet]:
    """The file that config.json's transformers_weights names, before all others."""
    name = (config or {}).get("transformers_weights")
    if not isinstance(name, str) or not name:
        return []
    if why := why_outside(name):
        what = f"transformers_weights leaves the folder: {short(name)}"
        raise Unsafe(what, where=f"{path}/{CONFIG}", why=why, fix="correct it, if you trust it", code="path-escapes")
    if name.endswith(".safetensors.index.json"):
        return [_by_index(path, name, ".safetensors", "", indexes, "config.json")]
    there = (path / name).is_file()
    return [WeightSet(".safetensors", "", "", (name,) if there else (), () if there else (name,), "config.json")]


def _standard(path: Path, names: list[str], indexes: dict[str, Index], variant: str | None) -> list[WeightSet]:
    """Sets under the names that Transformers looks for, in its order; plain ones first, then by variant."""
    variants: set[str] = set()
    for name in names:
        found = _STANDARD.fullmatch(name)
        if found and not _SHARD.fullmatch(name):
            variants.add(next((v for v in found.groups() if v), ""))
    wanted = sorted(variants) if variant is None else [variant]
    if variant is None and "" in variants:
        wanted = [""]
    sets: list[WeightSet] = []
    for v in wanted:
        dotted = f".{v}" if v else ""
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            single, index = f"{stem}{dotted}{suffix}", f"{stem}{suffix}.index{dotted}.json"
            if single in names and (path / single).is_file():
                sets.append(WeightSet(suffix, v, "", (single,), (), "single file"))
            if index in names and (path / index).is_file():
                sets.append(_by_index(path, index, suffix, v, indexes, "index"))
    return sets


def _by_index(path: Path, name: str, suffix: str, variant: str, indexes: dict[str, Index], why: str) -> WeightSet:
    index = indexes[name] = read_index(path / name)
    there = {f: (path / f).is_file() for f in index.files}
    files = tuple(f for f, is_there in there.items() if is_there)
    return WeightSet(suffix, variant, name, files, tuple(f for f in there if not there[f]), why)


def _unnamed(names: list[str], adapter: str) -> list[WeightSet]:
    """Sets under other names: numbered files without an index, then whatever safetensors files there are."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        found = _SHARD.fullmatch(name)
        if found:
            groups.setdefault((found[1], found[3], found[4]), []).append(name)
    sets = []
    for (stem, count, suffix), files in sorted(groups.items(), key=lambda item: item[0][2] == ".bin"):
        n, width = int(count), len(count)
        expected = [f"{stem}-{i:0{width}d}-of-{count}{suffix}" for i in range(1, n + 1)] if n <= 100_000 else files
        missing = tuple(f for f in expected if f not in files)
        sets.append(WeightSet(suffix, "", "", tuple(files), missing, "numbered files without an index"))
    if sets:
        return sets
    loose = tuple(n for n in names if n.endswith(".safetensors") and n not in (adapter, *_ADAPTER_WEIGHTS))
    return [WeightSet(".safetensors", "", "", loose, (), "safetensors files without an index")] if loose else []


def _carried(path: Path, names: list[str]) -> tuple[str, ...]:
    nested = [p.relative_to(path).as_posix() for p in sorted(path.glob("additional_chat_templates/*.jinja"))]
    return tuple(
        n
        for n in [*names, *nested]
        if any(fnmatchcase(n, pattern) for pattern in _CARRIED) and n not in _NOT_CARRIED and (path / n).is_file()
    )


def compare_sources(path: Path, a: WeightSet, b: WeightSet, *, values: bool = False) -> CkptError | None:
    """What is wrong with two sets in one folder, of which a loader takes the first; None where they are equal.

    Its code is two-sources. Names, dtypes and shapes are compared; with values the bytes, too. Without it, and for
    .bin files, equal headers are still reported, since nobody has compared the bytes.
    """
    shown = f"{a.index or a.files[0]} is taken, {b.index or 'the other'} is not"
    if a.suffix == ".safetensors" == b.suffix:
        left, right = _tensors(path, a), _tensors(path, b)
        differ = sorted(n for n in left.keys() | right.keys() if left.get(n, ("",))[:-1] != right.get(n, ("",))[:-1])
        if differ:
            names = ", ".join(map(short, differ[:3]))
            why = f"{len(differ)} tensors are in one only, or of another dtype or shape: {names}; {shown}"
            return _two(path, "two sets of weights lie side by side and differ", why)
        if values:
            changed = next((n for n in sorted(left) if not _equal_bytes(path, left[n], right[n])), None)
            if changed is None:
                return None
            return _two(
                path,
                "two sets of weights lie side by side and differ",
                f"tensor {short(changed)}, by its bytes; {shown}",
            )
    return _two(path, "two sets of weights lie side by side", f"their bytes were not compared; {shown}")


def _two(path: Path, what: str, why: str) -> CkptError:
    return Damaged(what, where=str(path), why=why, fix="remove the one that is out of date", code="two-sources")


def _tensors(path: Path, weights: WeightSet) -> dict[str, tuple[str, tuple[int, ...], tuple[str, int, int]]]:
    """Name -> (dtype, shape, (file, first byte, bytes)) from the headers of a set."""
    out: dict[str, tuple[str, tuple[int, ...], tuple[str, int, int]]] = {}
    for file in weights.files:
        with FileBytes(path / file) as source:
            header = read_header(source)
        for name, e in header.entries.items():
            out[name] = (e.dtype.name, e.shape, (file, e.start_byte, e.nbytes))
    return out


def _equal_bytes(path: Path, a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    (file_a, start_a, nbytes), (file_b, start_b, _) = a[-1], b[-1]
    with FileBytes(path / file_a) as left, FileBytes(path / file_b) as right:
        for at in range(0, nbytes, _BLOCK):
            n = min(_BLOCK, nbytes - at)
            if left.read(start_a + at, n) != right.read(start_b + at, n):
                return False
    return True
