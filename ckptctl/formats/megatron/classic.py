"""Reads a classic folder: a file of weights, optimizer and random state for each tensor-, pipeline-, expert-rank.

Reads pickles and directories of the files, and small tensors that ranks hold alike to compare them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import Group, Optimizer, UnsafeGlobal
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import Key, Source, Tensor
from ckptctl.core.values import Array, TensorRef, Tree
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.megatron import model
from ckptctl.formats.megatron.buffers import Buffer, buffer
from ckptctl.formats.megatron.collect import Span, Whole
from ckptctl.formats.megatron.facts import Facts, of_namespace
from ckptctl.formats.megatron.groups import Param, Part, members, parts_of, settings
from ckptctl.formats.megatron.ranks import OPTIMIZER_FILE, Rank, by_rank, model_file, rank_folders
from ckptctl.formats.torchfile.read import TorchFile, open_torch
from ckptctl.formats.torchtensor import VALUE_LIMIT, map_leaves, read_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ckptctl.formats import Hints

STATE_KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Names in distrib_optim.pt -> kinds."""
_TOP = ("args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state")


@dataclass
class Found:
    """What the files of a checkpoint hold, before names and vocabulary are seen to."""

    facts: Facts
    variant: str
    whole: Whole = field(default_factory=Whole)
    sources: list[Source] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    groups: list[tuple[dict[str, Tree], list[str]]] = field(default_factory=list)
    steps: dict[str, Tree] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    native: dict[str, Tree] = field(default_factory=dict)
    unsafe: list[UnsafeGlobal] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    unsupported: list[tuple[str, str]] = field(default_factory=list)
    fused: bool = False
    distributed: bool = False
    layer_keys: bool = False
    has_optimizer: bool = False
    stateless: int = 0
    """Ranks with an optimizer and without its moments."""
    layers: set[int] = field(default_factory=set)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    iteration: int | None = None
    warnings: list[str] = field(default_factory=list)
    damaged_state: str = ""

    @property
    def spec(self) -> str:
        """Whose layers the names are: te or local."""
        return "te" if self.fused else "local"


def read(path: Path, hints: Hints) -> Found:
    """All ranks' files of one iteration. MissingFile for ranks that are not there; Damaged where they contradict."""
    folders = rank_folders(path)
    first = model_file(folders[0]) if folders else None
    if first is None:
        raise MissingFile("no rank's file of weights is there", where=str(path), fix="copy the folder again")
    with FileBytes(first, name=_name(path, first)) as reader:
        opened = open_torch(reader)
        facts = replace(_facts(opened), given=hints.facts.config or {})
    facts.require_known()
    out = Found(facts, "classic")
    for rank, file in by_rank(path, facts).items():
        _rank(path, file, rank, out)
    _require_layers(out, str(path))
    if out.stateless and out.has_optimizer:
        raise MissingFile(
            f"{out.stateless} ranks have no optimizer's state, others do",
            where=str(path),
            why=f"it lies in their {OPTIMIZER_FILE}" if out.distributed else "",
            fix="copy the files of all ranks",
            code="optimizer-missing",
        )
    if out.stateless:
        out.warnings.append(f"no rank has the optimizer's moments: {OPTIMIZER_FILE} is not there")
    out.tensors = dict(out.whole.tensors())
    if out.whole.uncompared:
        out.warnings.append(f"{out.whole.uncompared} large tensors that several ranks hold alike were not compared")
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


@dataclass
class _Here:
    """One rank's file while it is read."""

    rank: Rank
    spot: dict[int, model.Spot]
    params: list[Param]
    refs: dict[tuple[int, str], TensorRef]
    shapes: dict[int, dict[str, tuple[int, ...]]]
    opened: TorchFile
    reader: FileBytes
    number: int


def _rank(path: Path, file: Path, rank: Rank, out: Found) -> None:
    with ExitStack() as stack:
        reader = stack.enter_context(FileBytes(file, name=_name(path, file)))
        opened = _opened(reader, out)
        root = opened.root
        if not isinstance(root, dict):
            return  # unsafe: nothing of it is taken
        _require_same_save(root, opened, out)
        here = _model(root, rank, opened, reader, len(out.sources) - 1, out)
        tree = root.get("optimizer")
        beside = file.parent / OPTIMIZER_FILE
        if tree is not None and file.parent.parent.name != "release":
            parts = parts_of(tree, opened.path)
            if beside.is_file():
                out.distributed = out.has_optimizer = True
                flat = stack.enter_context(FileBytes(beside, name=_name(path, beside)))
                _distributed(parts, here, flat, out)
            elif any(p.state for p in parts):
                out.has_optimizer = True
                _plain(parts, here, out)
            else:
                out.stateless += 1
        _values(root, rank, reader, out)


def _opened(reader: FileBytes, out: Found) -> TorchFile:
    opened = open_torch(reader)
    out.sources.append(Source(reader.path))
    out.sizes.append((reader.path, reader.nbytes))
    out.unsafe += [UnsafeGlobal(reader.path, str(f.name), f.why) for f in opened.unsafe]
    out.unknown.update(str(f.name) for f in opened.unknown)
    out.unsupported += [(f"{reader.path}: {where}", why) for where, why in opened.unsupported]
    return opened


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
    """Each chunk of layers of a rank: model, or model0, model1, ... A stage without layers may lack its own."""
    if isinstance(root.get("model"), dict):
        yield 0, root["model"]
        return
    found = [(c, root[f"model{c}"]) for c in range(vpp) if isinstance(root.get(f"model{c}"), dict)]
    if not found:
        if isinstance(root.get("state_dict"), dict):
            yield 0, root["state_dict"]
            return
        raise Damaged(
            "a rank's file has no model",
            where=where,
            why=f"it has {', '.join(map(str, list(root)[:8]))}",
            code="model-missing",
        )
    yield from found


def _flat(tree: Mapping[Any, Tree], prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """Entries of a model's dict by dotted names; old versions nest them."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not name.endswith("_extra_state"):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _model(
    root: Mapping[Any, Tree], rank: Rank, opened: TorchFile, reader: FileBytes, number: int, out: Found
) -> _Here:
    facts = out.facts
    version = root.get("checkpoint_version", 0)
    version = float(version) if isinstance(version, (int, float)) else 0.0
    here = _Here(rank, {}, [], {}, {}, opened, reader, number)
    for chunk, tree in _chunks(root, facts.vpp, opened.path):
        names = {k: (model.local_name(k), v) for k, v in _flat(tree)}
        out.fused = out.fused or any(model.is_fused(k) for k, (_, v) in names.items() if isinstance(v, TensorRef))
        refs = {n: v for n, v in names.values() if isinstance(v, TensorRef) and not n.endswith("_extra_state")}
        _extra_state(names, opened.path, out)
        shapes = {n: v.shape for n, v in refs.items()}
        spot = model.Spot(
            rank.tp,
            facts.tp,
            facts.first_layer(rank.pp, chunk),
            rank.ep * (facts.experts // facts.ep),
            opened.path,
            version,
            facts.number("num_attention_heads", 0),
        )
        here.spot[chunk], here.shapes[chunk] = spot, shapes
        for name, ref in refs.items():
            here.refs[chunk, name] = ref
            if not model.is_buffer(name):
                here.params.append(Param(name, ref.shape, chunk, ref.dtype.name))
            layer = model.layer_of(name)
            if layer is not None:
                out.layers.add(layer + spot.first_layer)
            _put(name, chunk, "weight", Span(ref, number, opened, reader), 0, ref.shape, here, out)
    return here


def _extra_state(names: Mapping[str, tuple[str, Tree]], where: str, out: Found) -> None:
    """What stands among the weights and is none: nothing is lost where it is empty, as without FP8."""
    held = [k for k, (n, v) in names.items() if n.endswith("_extra_state") and not _is_empty(v)]
    if held:
        out.warnings.append(f"{where}: {len(held)} _extra_state entries (FP8 scales) are not read, such as {held[0]}")


def _is_empty(value: Tree) -> bool:
    return value is None or (isinstance(value, TensorRef) and value.numel == 0)


def _put(
    name: str, chunk: int, kind: str, span: Span, offset: int, shape: tuple[int, ...], here: _Here, out: Found
) -> None:
    """A tensor of a rank under its whole name; which further copy it is, where other ranks hold it too."""
    facts, rank = out.facts, here.rank
    for place in model.places(name, shape, here.spot[chunk], here.shapes[chunk]):
        head = place.name == model.HEAD and facts.tied and facts.pp > 1
        first = not head and (place.cut or rank.tp == 0) and (place.is_expert or rank.ep == 0)
        copy = None if first else (head, -1 if place.cut else rank.tp, -1 if place.is_expert else rank.ep)
        if head:
            place = replace(place, name=model.EMBEDDING)
        alike = (not place.cut and facts.tp > 1) or (not place.is_expert and facts.ep > 1)
        tied = facts.tied and facts.pp > 1 and place.name == model.EMBEDDING
        out.whole.put(place, kind, span, copy, offset=offset, compare=alike or tied)


# ---- the optimizer --------------------------------------------------------------------------------------------------


def _whole_names(params: list[Param], here: _Here, out: Found) -> list[str]:
    names = []
    for p in params:
        for place in model.places(p.name, p.shape, here.spot[p.chunk], here.shapes[p.chunk]):
            tied = place.name == model.HEAD and out.facts.tied
            names.append(model.EMBEDDING if tied else place.name)
    return names


def _grouped(part: Part, found: list[list[Param]], here: _Here, out: Found) -> None:
    """Adds a rank's groups to those of the others: equal settings are one group."""
    for group, params in zip(part.groups, found, strict=True):
        options, names = settings(group), _whole_names(params, here, out)
        known = next((g for g in out.groups if repr(g[0]) == repr(options)), None)
        if known is None:
            known = (options, [])
            out.groups.append(known)
        have = set(known[1])
        known[1].extend(n for n in names if n not in have)
        step = group.get("step")
        if step is not None:
            for n in names:
                _stepped(n, step.item() if hasattr(step, "item") else step, here, out)


def _stepped(name: str, step: Tree, here: _Here, out: Found) -> None:
    """A parameter's count of updates, which all ranks must say alike."""
    said = out.steps.setdefault(name, step)
    if said != step:
        raise Damaged(
            f"ranks do not agree on the optimizer's step of {name}",
            where=here.opened.path,
            why=f"{step} here, {said} elsewhere",
            fix="take all ranks' files from one save",
            code="ranks-differ",
        )


def _plain(parts: list[Part], here: _Here, out: Found) -> None:
    apart = out.facts.ep > 1
    for part in parts:
        found = members(part, here.params, experts_apart=apart, where=here.opened.path)
        _grouped(part, found, here, out)
        for number, (group, params) in enumerate(zip(part.groups, found, strict=True)):
            listed = group.get("params")
            ids = listed if isinstance(listed, list) else []
            for identity, param in zip(ids, params, strict=True):
                _state(identity, param, part, here, out)
            if number < len(part.masters):
                _masters(part.masters[number], params, here, out)


def _state(identity: Tree, param: Param, part: Part, here: _Here, out: Found) -> None:
    entry = part.state.get(identity) if isinstance(identity, (int, str)) else None
    for kind, value in entry.items() if isinstance(entry, dict) else ():
        if kind == "step":
            step = read_array(value, here.reader) if isinstance(value, TensorRef) else value
            number = number_of(step)
            for name in _whole_names([param], here, out):
                _stepped(name, number, here, out)
        elif isinstance(value, TensorRef):
            if value.shape != param.shape:
                raise Damaged(
                    f"{kind} of {param.name} is {value.shape}, the parameter {param.shape}",
                    where=here.opened.path,
                    why="parameters are numbered by decay and order, which then does not hold here",
                    fix="take the weights alone with --no-optimizer",
                    code="optimizer-groups",
                )
            span = Span(value, here.number, here.opened, here.reader)
            _put(param.name, param.chunk, str(kind), span, 0, value.shape, here, out)


def number_of(value: Tree) -> Tree:
    """A count that was saved as a 0-d tensor, as the number that it is."""
    if isinstance(value, Array) and len(value.data) <= 16:
        import numpy as np

        from ckptctl.core.dtype import BY_NAME

        if value.dtype in BY_NAME:
            number = np.frombuffer(value.data, BY_NAME[value.dtype].numpy)[0].item()
            return int(number) if float(number).is_integer() else number
    return value


def _masters(masters: Tree, params: list[Param], here: _Here, out: Found) -> None:
    """Float32 copies of a group's 16-bit parameters, in its order."""
    halves = [p for p in params if p.dtype in ("bfloat16", "float16")]
    if not isinstance(masters, (list, tuple)) or len(masters) != len(halves):
        raise Unsupported(
            f"a group has {len(halves)} 16-bit parameters and {len(masters or ())} float32 copies",
            where=here.opened.path,
            fix="take the weights alone with --no-optimizer",
            code="optimizer-groups",
        )
    for param, value in zip(halves, masters, strict=True):
        if not isinstance(value, TensorRef) or value.shape != param.shape:
            raise Damaged(
                f"the float32 copy of {param.name} is not of its shape", where=here.opened.path, code="optimizer-groups"
            )
        span = Span(value, here.number, here.opened, here.reader)
        _put(param.name, param.chunk, "master", span, 0, value.shape, here, out)


def _distributed(parts: list[Part], here: _Here, reader: FileBytes, out: Found) -> None:
    """Moments and masters of the distributed optimizer: one flat buffer a chunk, type, and kind of expert."""
    opened = _opened(reader, out)
    number = len(out.sources) - 1
    for part in parts:
        found = members(part, here.params, experts_apart=out.facts.ep > 1, where=here.opened.path)
        _grouped(part, found, here, out)
    trees = opened.root if isinstance(opened.root, list) else [opened.root]
    for position, tree in enumerate(trees):
        if tree is None:
            continue  # dense state under expert parallelism: in the files of the first expert rank only
        if not isinstance(tree, dict):
            raise Damaged("the optimizer's buffers are no dict", where=opened.path, code="optimizer-damaged")
        experts = position > 0 if len(trees) > 1 else None
        for chunk, buffers in tree.items():
            if isinstance(chunk, int) and isinstance(buffers, dict):
                for types, states in buffers.items():
                    dtype = str(types[0] if isinstance(types, tuple) else types).removeprefix("torch.")
                    params = [p for p in here.params if p.chunk == chunk and p.dtype == dtype]
                    if out.facts.ep > 1:
                        params = [p for p in params if model.is_expert(p.name) == bool(experts)]
                    _buffer(states, params, here, opened, reader, number, out)


def _buffer(
    states: Tree, params: list[Param], here: _Here, opened: TorchFile, reader: FileBytes, number: int, out: Found
) -> None:
    if not isinstance(states, dict):
        raise Unsupported(
            "the optimizer's buffers are kept by bucket, as before February 2024",
            where=opened.path,
            fix="load the run with --ckpt-convert-update-legacy-dist-opt-format and save it again",
            code="optimizer-unknown",
        )
    placed = laid_out(params, here.rank.pp, out.facts)
    said = states.get("numel_unpadded")
    if said != placed.numel:
        raise Unsupported(
            f"a buffer of the distributed optimizer has {said} elements, {placed.numel} by the model's order",
            where=opened.path,
            why="where each parameter lies in it is in no file, and follows from their order and sizes",
            fix="take the weights alone with --no-optimizer",
            code="optimizer-buffers",
        )
    _require_in_place(params, placed, here)
    for key, value in states.items():
        if not isinstance(value, TensorRef):
            continue
        kind = STATE_KEYS.get(str(key), str(key))
        if value.shape != (placed.numel,):
            raise Damaged(
                f"{key} of a buffer has shape {value.shape}, not ({placed.numel},)",
                where=opened.path,
                code="optimizer-buffers",
            )
        span = Span(value, number, opened, reader)
        for p in params:
            if kind == "master" and p.dtype == "float32":
                continue  # the weight itself: in float32 the run updates it in place
            _put(p.name, p.chunk, kind, span, placed.joined(_member(p)), p.shape, here, out)


def _member(param: Param) -> str:
    return f"{param.chunk}:{param.name}"


def laid_out(params: list[Param], pp_rank: int, facts: Facts) -> Buffer:
    """The buffer of a chunk's parameters. Only the first chunk of the first stage is split in buckets.

    Source: core_v0.16.1, core/distributed/distributed_data_parallel.py (`disable_bucketing or pp_rank > 0`).
    """
    dp = facts.number("data_parallel_size", 1) * facts.number("context_parallel_size", 1)
    shared = facts.tied and facts.pp > 1
    if params and model.is_expert(params[0].name) and facts.ep > 1:
        dp = max(1, dp // facts.ep)
    sizes = []
    for p in params:
        numel = 1
        for n in p.shape:
            numel *= n
        sizes.append((_member(p), numel, shared and p.name in model.VOCABULARY))
    first = all(p.chunk == 0 for p in params) and pp_rank == 0
    busbw = facts.flag("ddp_pad_buckets_for_high_nccl_busbw")
    return buffer(sizes, dp, facts.bucket_numel(dp) if first else None, busbw=busbw)


def _require_in_place(params: list[Param], placed: Buffer, here: _Here) -> None:
    """The model's tensors are views of the run's buffer: where they lie in it proves the order, or contradicts it."""
    refs = {_member(p): here.refs[p.chunk, p.name] for p in params}
    storages = {id(r.storage) for r in refs.values()}
    if len(storages) != 1 or len(refs) < 2:
        return
    for name, ref in refs.items():
        if ref.offset != placed.in_run(name):
            raise Unsupported(
                f"{name.partition(':')[2]} lies at element {ref.offset} of the run's buffer, and should at "
                f"{placed.in_run(name)}",
                where=here.opened.path,
                why="where each parameter lies in the optimizer's buffers follows from their order and sizes",
                fix="take the weights alone with --no-optimizer",
                code="optimizer-buffers",
            )


# ---- the rest -------------------------------------------------------------------------------------------------------


def _values(root: Mapping[Any, Tree], rank: Rank, reader: FileBytes, out: Found) -> None:
    """Scheduler and counters of the first rank; what only Megatron takes, and every rank's random state."""

    def value(tree: Tree) -> Tree:
        return map_leaves(tree, lambda ref, _: read_array(ref, reader, VALUE_LIMIT))

    if "rng_state" in root:
        out.native.setdefault("rng_state", {})[rank.pp, rank.tp, rank.ep] = value(root["rng_state"])
    if len(out.native) > 1:
        return
    out.native["args"] = root.get("args")
    out.native["checkpoint_version"] = root.get("checkpoint_version", 0)
    for name in ("opt_param_scheduler", "lr_scheduler"):
        if root.get(name) is not None:
            out.values["opt_param_scheduler"] = value(root[name])
    for key, tree in root.items():
        if key not in _TOP and not str(key).startswith("model") and key != "state_dict":
            out.values[str(key)] = value(tree)


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


def optimizer_of(found: Found, kinds: Mapping[str, set[str]]) -> Optimizer | None:
    """Groups and steps; kinds are the names that have each kind of state."""
    if not found.has_optimizer:
        return None
    stateful = set().union(*kinds.values(), set())
    groups = []
    for options, names in found.groups:
        groups.append(Group(tuple(sorted(names, key=model.order)), options))
    scalars = {(n, "step"): s for n, s in found.steps.items() if n in stateful}
    return Optimizer(tuple(groups), scalars, keyed="integers")
