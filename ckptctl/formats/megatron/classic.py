"""Reads a classic folder: a file of weights, optimizer and random state for each tensor-, pipeline-, expert-rank.

The optimizer's part is in classic_optimizer. Reads pickles and directories of the files, and small tensors that ranks
hold alike to compare them.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, MissingFile
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.megatron import classic_optimizer, model, predicted, runconfig
from ckptctl.formats.megatron.collect import Whole
from ckptctl.formats.megatron.facts import Facts, of_namespace
from ckptctl.formats.megatron.found import Found, require_parts, require_states
from ckptctl.formats.megatron.groups import Param, parts_of
from ckptctl.formats.megatron.rankfile import FileAt, RankFile, opened_file, put
from ckptctl.formats.megatron.ranks import OPTIMIZER_FILE, Rank, by_rank, model_file, rank_folders
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchtensor import read_leaves

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping
    from pathlib import Path

    from ckptctl.formats import Hints

_RANDOM = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""A rank's random states as old files have them, each under a key of its own."""
_CHUNK = re.compile(r"model(\d{1,6})")
_TOP = ("args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state")


def read(path: Path, hints: Hints) -> Found:
    """All ranks' files of one iteration. MissingFile for ranks that are not there; Damaged where they contradict."""
    folders = rank_folders(path)
    first = model_file(folders[0]) if folders else None
    if first is None:
        raise MissingFile("no rank's file of weights is there", where=str(path), fix="copy the folder again")
    with FileBytes(first, name=_name(path, first)) as reader:
        facts = _facts(open_torch(reader))
    version = 0.0
    if not facts.args:
        args, where = runconfig.args_beside(path)
        facts, version = Facts(args, where or facts.where), 3.0 if args else 0.0
    facts = replace(facts, given=hints.facts.config or {})
    facts.require_known()
    in_release = path.name == "release"
    files = {
        rank: FileAt(file, _name(path, file), beside=None if in_release else file.parent / OPTIMIZER_FILE)
        for rank, file in by_rank(path, facts).items()
    }
    whole = Whole(hints.replica, hints.verify_replicas)
    return read_files(
        files, Found(facts, "classic", whole, version=version, weights_only=hints.weights_only), str(path)
    )


def read_files(files: Mapping[Rank, FileAt], out: Found, where: str) -> Found:
    """The files of all ranks of a mesh. As read."""
    said: dict[str, Tree] = {}
    data: dict[str, Counter[tuple[int, int]]] = {}
    for rank, file in files.items():
        said[file.name], data[file.name] = _rank(file, rank, out)
    _require_own_places(said)
    _require_own_data(data)
    _require_layers(out, where)
    if out.stateless and out.has_optimizer:
        raise MissingFile(
            f"{out.stateless} ranks have no optimizer's state, others do",
            where=where,
            why=f"it lies in their {OPTIMIZER_FILE}" if out.distributed else "",
            fix="copy the files of all ranks",
            code="optimizer-missing",
        )
    if out.stateless:
        out.warnings.append(f"no rank has the optimizer's moments: {OPTIMIZER_FILE} is not there")
    out.tensors = dict(out.whole.tensors())
    (require_states if out.distributed else require_parts)(out, where)
    out.warnings += out.whole.warnings()
    return out


def _name(path: Path, file: Path) -> str:
    return str(file.relative_to(path))


def _facts(opened: TorchFile) -> Facts:
    root = opened.root
    if not isinstance(root, dict):
        if opened.unsafe:
            return Facts({}, opened.path)
        raise Damaged("a rank's file holds no dict", where=opened.path, code="root-damaged")
    return of_namespace(root.get("args"), opened.path)


# ---- one rank -------------------------------------------------------------------------------------------------------


def _rank(file: FileAt, rank: Rank, out: Found) -> tuple[Tree, Counter[tuple[int, int]]]:
    """Takes a rank's files. Returns its number in the whole run by its own account, and (CRC-32, bytes) of its data."""
    with ExitStack() as stack:
        reader = stack.enter_context(file.open())
        opened = opened_file(reader, out, file.archive)
        root = opened.root
        if not isinstance(root, dict):
            return None, Counter()  # unsafe: nothing of it is taken
        records = opened.directory.records.values() if opened.directory is not None else ()
        data = Counter((r.crc, r.nbytes) for r in records if r.crc)
        _require_same_save(root, opened, out)
        here = RankFile(rank, {}, [], {}, {}, opened, reader, len(out.sources) - 1, file.start)
        _model(root, here, out)
        if _is_bare(root):
            return None, data
        tree, beside = None if out.weights_only else root.get("optimizer"), file.beside
        if tree is not None and beside is not None:
            parts = parts_of(tree, opened.path)
            out.add_scaler([p.rest for p in parts], reader)
            if beside.is_file():
                out.distributed = out.has_optimizer = True
                name = f"{file.name.rpartition('/')[0]}/{beside.name}"
                flat = stack.enter_context(FileBytes(beside, name=name))
                classic_optimizer.distributed(parts, here, flat, out)
            elif any(p.state for p in parts):
                out.has_optimizer = True
                classic_optimizer.plain(parts, here, out)
            else:
                out.stateless += 1
        _values(root, rank, reader, out)
        return _facts(opened).args.get("rank"), data


def _require_own_places(said: Mapping[str, Tree]) -> None:
    """Damaged where ranks, in order of stage, expert- and tensor-parallel rank, are not in the order of the run's.

    Numbers are told apart only where every file has its own: converters write one for all.
    Source: Megatron-LM core_v0.16.1, core/parallel_state.py, initialize_model_parallel (order tp-cp-ep-dp-pp, or
    tp-cp-ep-pp-dp); ranks that write have the data-parallel rank 0.
    """
    numbers = {file: n for file, n in said.items() if type(n) is int}
    if len(numbers) < len(said) or len(set(numbers.values())) == 1:
        return
    twice = _first_alike(numbers)
    if twice is not None:
        raise Damaged(
            "two ranks' folders hold the same rank",
            where=", ".join(twice),
            why=f"by their args both are of rank {numbers[twice[0]]} of the run, and others have ranks of their own",
            fix="copy the step again: one of them was copied over the other",
            code="ranks-differ",
        )
    for (file, number), (after, other) in pairwise(numbers.items()):
        if number > other:
            raise Damaged(
                "ranks' folders have each other's names",
                where=f"{file}, {after}",
                why=f"by their args they are of rank {number} and {other} of the run",
                fix="give the folders their ranks' names, or copy the step again",
                code="ranks-differ",
            )


def _require_own_data(data: Mapping[str, Counter[tuple[int, int]]]) -> None:
    """Damaged where two ranks' files hold the same bytes in every record: each has slices of its own."""
    twice = _first_alike({file: frozenset(records.items()) for file, records in data.items() if len(records) > 1})
    if twice is not None:
        raise Damaged(
            "two ranks' files hold the same data",
            where=", ".join(twice),
            why=f"all {sum(data[twice[0]].values())} records have equal checksums and sizes",
            fix="copy the step again: one of them was copied over the other",
            code="ranks-differ",
        )


def _first_alike(values: Mapping[str, Hashable]) -> tuple[str, str] | None:
    """The first two names that have the same value."""
    seen: dict[Hashable, str] = {}
    for name, value in values.items():
        if value in seen:
            return seen[value], name
        seen[value] = name
    return None


def _require_same_save(root: Mapping[Any, Tree], opened: TorchFile, out: Found) -> None:
    """Damaged where a rank's file is of another iteration."""
    value = root.get("iteration", root.get("total_iters"))
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if len(out.sources) > 1 and number != out.iteration:
        raise Damaged(
            "ranks are of different iterations",
            where=opened.path,
            why=f"it says {number}, {out.sources[0].path} says {out.iteration}",
            fix="take all ranks' files from one save",
            code="ranks-differ",
        )
    out.iteration = number


def _chunks(root: Mapping[Any, Tree], vpp: int, where: str) -> Iterator[tuple[int, Mapping[str, Tree]]]:
    """Each chunk of layers of a rank: model, or model0, model1, ... A stage without layers may lack its own.

    Damaged where there are more than args say: their layers would be let go.
    """
    more = [k for k in root if (n := _CHUNK.fullmatch(str(k))) and int(n[1]) >= (vpp if "model" not in root else 0)]
    if more:
        raise Damaged(
            f"a rank's file has {more[0]}, and args say {vpp} chunks a stage",
            where=where,
            why="each chunk has layers of its own, and how many there are says which",
            fix="take a checkpoint whose args are whole",
            code="args-missing" if vpp == 1 else "args-damaged",
        )
    if isinstance(root.get("model"), dict):
        yield 0, root["model"]
        return
    found = [(c, root[f"model{c}"]) for c in range(vpp) if isinstance(root.get(f"model{c}"), dict)]
    if not found:
        if isinstance(root.get("state_dict"), dict):
            yield 0, root["state_dict"]
            return
        if _is_bare(root):
            yield 0, root
            return
        raise Damaged(
            "a rank's file has no model",
            where=where,
            why=f"it has {', '.join(map(str, list(root)[:8]))}",
            code="model-missing",
        )
    yield from found


def _is_bare(root: Mapping[Any, Tree]) -> bool:
    """Whether a file is the weights by name and nothing else, as NeMo's archives have them."""
    return bool(root) and all(isinstance(v, TensorRef) or str(k).endswith("_extra_state") for k, v in root.items())


def _flat(tree: Mapping[Any, Tree], prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """Entries of a model's dict by dotted names; old versions nest them."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not name.endswith("_extra_state"):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _model(root: Mapping[Any, Tree], here: RankFile, out: Found) -> None:
    """Takes a rank's weights, chunk by chunk."""
    facts, rank, opened = out.facts, here.rank, here.opened
    said = root.get("checkpoint_version", out.version)
    version = float(said) if isinstance(said, (int, float)) else 0.0
    for chunk, tree in _chunks(root, facts.vpp, opened.path):
        names = {k: (model.local_name(k), v) for k, v in _flat(tree)}
        out.fused = out.fused or any(model.is_fused(k) for k, (_, v) in names.items() if isinstance(v, TensorRef))
        refs = _tensors(names, opened, out)
        _extra_state(names, opened.path, out)
        shapes = {n: v.shape for n, v in refs.items()}
        predicted.require_readable(shapes, facts, opened.path)
        spot = model.Spot(
            rank.tp,
            facts.tp,
            facts.first_layer(rank.pp, chunk),
            rank.ep * (facts.experts // facts.ep),
            opened.path,
            version,
            facts.number("num_attention_heads", 0),
            rank.tp % facts.etp,
            facts.etp,
            facts.experts // facts.ep,
        )
        here.spot[chunk], here.shapes[chunk] = spot, shapes
        for name, ref in refs.items():
            here.refs[chunk, name] = ref
            if not model.is_buffer(name):
                here.params.append(Param(name, ref.shape, chunk, ref.dtype.name))
            layer = model.layer_of(name)
            if layer is not None:
                out.layers.add(layer + spot.first_layer)
            put(name, chunk, "weight", here.span(ref), 0, ref.shape, here, out)


def _tensors(names: Mapping[str, tuple[str, Tree]], opened: TorchFile, out: Found) -> dict[str, TensorRef]:
    """The weights by their names here. What is no tensor is told, and Damaged where two have one name."""
    refs: dict[str, TensorRef] = {}
    called: dict[str, str] = {}
    for key, (name, value) in names.items():
        if name.endswith("_extra_state") or value is None:
            continue
        if not isinstance(value, TensorRef):
            out.unsupported.append((f"{opened.path}: {key}", "it stands among the weights and is no plain tensor"))
            continue
        if name in refs:
            raise Damaged(
                f"{called[name]} and {key} are one parameter",
                where=opened.path,
                why="which of the two the run has is in no file",
                code="duplicate-tensor",
            )
        refs[name], called[name] = value, key
    return refs


def _extra_state(names: Mapping[str, tuple[str, Tree]], where: str, out: Found) -> None:
    """What stands among the weights and is none: nothing is lost where it is empty, as without FP8."""
    held = [k for k, (n, v) in names.items() if n.endswith("_extra_state") and not _is_empty(v)]
    if held:
        out.warnings.append(f"{where}: {len(held)} _extra_state entries (FP8 scales) are not read, such as {held[0]}")


def _is_empty(value: Tree) -> bool:
    return value is None or (isinstance(value, TensorRef) and value.numel == 0)


# ---- the rest -------------------------------------------------------------------------------------------------------


def _values(root: Mapping[Any, Tree], rank: Rank, reader: FileBytes, out: Found) -> None:
    """Scheduler and counters of the first rank; what only Megatron takes, and every rank's random state."""
    flat = {k: root[k] for k in _RANDOM if k in root}
    states = root.get("rng_state", [flat] if len(flat) == len(_RANDOM) else None)
    if states is not None:
        out.native.setdefault("rng_state", {})[rank.pp, rank.tp, rank.ep] = read_leaves(states, reader)
    if "args" in out.native:
        return  # not the first
    out.native["args"] = root.get("args")
    out.native["checkpoint_version"] = root.get("checkpoint_version", 0)
    for name in ("opt_param_scheduler", "lr_scheduler"):
        if root.get(name) is not None:
            out.values["opt_param_scheduler"] = read_leaves(root[name], reader)
    for key, tree in root.items():
        if key not in (*_TOP, *_RANDOM) and not str(key).startswith("model") and key != "state_dict":
            out.values[str(key)] = read_leaves(tree, reader)


def _require_layers(out: Found, where: str) -> None:
    """Damaged where ranks do not have every layer once."""
    total = out.facts.optional("num_layers")
    want = set(range(total if total is not None else len(out.layers)))
    if out.layers and out.layers != want:
        missing = sorted(want - out.layers) or sorted(out.layers - want)
        raise Damaged(
            f"the ranks' layers are not 0 to {len(want) - 1}: {missing[:6]}",
            where=where,
            why=f"pp={out.facts.pp}, {out.facts.vpp} chunks a stage",
            fix="check that all ranks' files are of one save",
            code="layers-missing",
        )
