"""Universal folders: a folder a parameter under zero/, a file a state; groups in zero/optimizer_state.pt.

Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, checkpoint/universal_checkpoint.py; real folders of stages 1-3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import MASTER, Group
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged, MissingFile, Unsupported
from ckptctl.core.tensor import Key, PieceTable, Tensor
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.deepspeed.build import cast_of, is_placeholder
from ckptctl.formats.deepspeed.modelfile import ModelFile, read_model
from ckptctl.formats.deepspeed.opened import dense, plain_object, whole_number
from ckptctl.formats.deepspeed.slices import Rules, joined
from ckptctl.formats.deepspeed.teamed import module_slices
from ckptctl.formats.torchtensor import aliases, tensor_of

if TYPE_CHECKING:
    from pathlib import Path

    from ckptctl.formats.deepspeed.build import Build
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.opened import Opened

FP32 = "fp32"
STATE_FILE = "optimizer_state.pt"
_STRUCTURE = frozenset(
    {
        "optimizer_state_dict",
        "fp32_flat_groups",
        "param_groups",
        "zero_stage",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "ds_version",
        "universal_checkpoint_info",
        "ds_zero_partition_groups",
    }
)


def read(build: Build) -> None:
    """Everything of a universal folder."""
    files = build.files
    models = _models(build)
    shapes = {n: s for m in models for g in m.shapes or () for n, s in g.items()}
    frozen = {n: s for m in models for n, s in (m.frozen or {}).items()}
    module = {n: r for m in models for n, r in (m.module or {}).items()}
    shared = {a: b for m in models for a, b in build.believed(m).items()}
    zero = files.root / files.where("zero")
    names = _names(zero)
    known = bool(shapes)
    tp = _slices(models)
    copies: dict[str, Tensor] = {}
    for name in names:
        entries = _states(build, zero, name, {**frozen, **shapes}, module, whole=tp > 1)
        if (known and name not in shapes) or name in shared:
            # Frozen parameters, aliases and buffers have the model file's value, upcast, under fp32 alone.
            if FP32 in entries:
                copies[name] = entries[FP32]
            continue
        for kind, tensor in entries.items():
            key = Key(name, MASTER if kind == FP32 else kind)
            build.tensors[key] = Tensor(key, tensor.dtype, tensor.shape, tensor.pieces, trainable=True)
    _require_files(build, models)
    if models:
        build.take_values(models[0])
    if tp > 1:
        _sliced(build, models[:tp], set(copies) - set(shared))
    for model in models:
        if tp == 1:
            build.weights(model)
        build.model_values.update(model.module_values)
    for name, tensor in copies.items():
        if Key(name) in build.tensors or Key(name, "buffer") in build.tensors or name in shared or name in build.ties:
            continue
        ref = module.get(name)
        dtype = ref.dtype if ref is not None else BY_NAME[models[0].run_dtype if models else "float32"]
        build.put(cast_of(tensor, name, dtype))
    for model in models:
        build.derive(model)
    if not models:
        for key, master in list(build.tensors.items()):
            if key.kind == MASTER:
                build.put(cast_of(master, key.name, master.dtype))
    _optimizer(build, zero, models)
    build.variant = "universal"
    build.layout |= {"tp": 1, "pp": 1, "ep": 1}
    build.about |= {"dtype": models[0].run_dtype if models else None}


def _slices(models: list[ModelFile]) -> int:
    """How many tensor-parallel ranks' model files there are: by what they say, else by the parameters they share."""
    if len(models) < 2:
        return 1
    if models[0].tp:
        return models[0].tp
    names = [{n for g in m.shapes or () for n in g} for m in models]
    return sum(2 * len(n & names[0]) > len(names[0]) for n in names)


def _sliced(build: Build, team: list[ModelFile], untrained: set[str]) -> None:
    """What a run of several tensor-parallel ranks has beside its trained parameters, which are whole under zero/.

    Buffers, ties, and parameters that do not train: of these ds_to_universal takes the first rank's slice for all.
    """
    first = team[0]
    module = first.module or {}
    for name in (n for n in module if n in first.buffers):
        build.put(tensor_of(Key(name, "buffer"), module[name], first.source))
    first.shared.update({a: o for a, o in aliases(module).items() if a not in first.shared})
    rules = Rules(next((m.universal for m in team if m.universal), {}), build.facts.config, first.path)
    weights = module_slices(team)
    for name in sorted(untrained):
        if any(name in w for w in weights) and name not in first.buffers and name not in first.shared:
            build.put(joined(Key(name), [w.get(name) for w in weights], rules, first.path))


def _require_files(build: Build, models: list[ModelFile]) -> None:
    """MissingFile where a parameter of the optimizer has no file of what others of its flat group have.

    A group that never got a gradient has no states at all.
    """
    kinds: dict[str, set[str]] = {}
    for key in build.tensors:
        kinds.setdefault(key.name, set()).add(key.kind)
    for name, kind in build.scalars:
        kinds.setdefault(name, set()).add(kind)
    for group in (g for m in models for g in m.shapes or ()):
        every = {MASTER, *(k for n in group for k in kinds.get(n, ()))}
        for name, shape in group.items():
            lost = sorted(every - kinds.get(name, set()), key=lambda kind: (kind != MASTER, kind))
            if lost and 0 not in shape:
                file = f"{name}/{FP32 if lost[0] == MASTER else lost[0]}.pt"
                raise MissingFile(
                    f"zero/{file} is not there",
                    where=build.files.where("zero"),
                    why=f"by the model file's param_shapes the optimizer has {name}, as others of its group",
                    fix="copy it from where the folder was made, or make the folder again",
                )


def _models(build: Build) -> list[ModelFile]:
    """The model files: one a model-parallel rank. At stage 3 one of each is enough."""
    files = build.files
    paths = list(files.models.values())
    if not paths:
        first: dict[int, str] = {}
        for (_, mp), path in sorted(files.shard_models.items()):
            first.setdefault(mp, path)
        paths = list(first.values())
    out = []
    for path in paths:
        with build.pile.open(path) as opened:
            out.append(read_model(opened))
    return out


def _names(zero: Path) -> list[str]:
    """Parameters: folders with fp32.pt, by their path below zero/ (a slash in a name makes a folder inside one)."""
    out, stack = [], [zero]
    while stack:
        folder = stack.pop()
        if folder != zero and (folder / f"{FP32}.pt").is_file():
            out.append(folder.relative_to(zero).as_posix())
        stack += [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
    return sorted(out)


def _states(
    build: Build, zero: Path, name: str, shapes: dict[str, Shape], module: dict[str, TensorRef], *, whole: bool
) -> dict[str, Tensor]:
    """The files of one parameter, by state: what the loader takes too. Numbers go to the scalars.

    whole: shapes are those of slices, which the files have put together.
    """
    out: dict[str, Tensor] = {}
    for file in sorted((zero / name).glob("*.pt"), key=lambda p: (p.stem != FP32, p.name)):
        kind = file.stem
        with build.pile.open(file.relative_to(build.files.root).as_posix()) as opened:
            tree = opened.root.get("param") if isinstance(opened.root, dict) else opened.root
            if not isinstance(tree, TensorRef):
                build.scalars[name, kind] = opened.value(f"{name}.{kind}", tree)
                continue
            shape = shapes.get(name) or (module[name].shape if name in module else None)
            if whole:
                if shape is not None and len(tree.shape) not in (0, len(shape)):
                    raise _misshapen(opened, Key(name, kind), tree.shape, shape)
                shape = None
            if shape == (0,) and is_placeholder(module.get(name)):
                shape = None
            out[kind] = _shaped(opened, Key(name, kind), tree, shape, out.get(FP32))
    return out


def _shaped(opened: Opened, key: Key, ref: TensorRef, shape: Shape | None, fp32: Tensor | None) -> Tensor:
    """A tensor in its parameter's shape: from stage 3 it is flat, and the shape is the model file's."""
    if key.kind == "step" or ref.shape == ():
        return tensor_of(key, ref, opened.number)
    want = shape if shape is not None else fp32.shape if fp32 is not None else ref.shape
    if ref.shape == want:
        return tensor_of(key, ref, opened.number)
    if ref.shape == (math.prod(want),) and dense(ref):
        start = ref.storage.start_byte + ref.offset * ref.dtype.itemsize
        table = PieceTable.whole((ref.numel,), ref.dtype.itemsize, opened.number, start)
        return Tensor(key, ref.dtype, want, (table,))
    raise _misshapen(opened, key, ref.shape, want)


def _misshapen(opened: Opened, key: Key, shape: Shape, want: Shape) -> Damaged:
    return Damaged(
        f"{key.kind} of {key.name} has shape {shape}, the parameter {want}",
        where=opened.path,
        fix="a padded vocabulary, or slices that were not joined, are not read: make the folder again",
        code="zero-layout",
    )


def _optimizer(build: Build, zero: Path, models: list[ModelFile]) -> None:
    """Groups and steps of zero/optimizer_state.pt. Its flat tensors are one rank's, and of no use."""
    path = (zero / STATE_FILE).relative_to(build.files.root).as_posix()
    if not (zero / STATE_FILE).is_file():
        build.warnings.append(f"{path} is not there: settings of the param groups are in no file")
        return
    with build.pile.open(path) as opened:
        tree = opened.mapping(opened.root, "the optimizer's state")
        nested = tree.get("optimizer_state_dict")
        inner = nested if isinstance(nested, dict) else {}
        nested_groups, groups = _dicts(inner.get("param_groups")), _dicts(tree.get("param_groups"))
        stage = whole_number(tree.get("zero_stage"))
        if nested_groups and len(groups) != len(nested_groups):
            groups = nested_groups
        listed = groups or nested_groups  # the same in both, but that the nested ones list sub-groups
        members = _members(build, models, nested_groups or listed, nested=bool(nested_groups))
        for number, group in enumerate(listed):
            options = {str(k): opened.value(f"group.{k}", v) for k, v in group.items() if k != "params"}
            build.groups.append(Group(members[number] if members else (), options))
        if not members and listed:
            build.warnings.append("which parameters each param group has is in no file")
        state = inner.get("state")
        first = state.get(0) if isinstance(state, dict) else None
        step = first.get("step") if isinstance(first, dict) else None
        trained = [k.name for k in build.tensors if k.kind == MASTER]
        if step is not None:
            for name in trained:
                if (name, "step") in build.scalars or Key(name, "step") in build.tensors:
                    continue
                if isinstance(step, TensorRef):
                    build.tensors[Key(name, "step")] = opened.tensor(Key(name, "step"), step)
                else:
                    build.scalars[name, "step"] = opened.value("step", step)
        rest: dict[str, Tree] = {
            str(k): plain_object(v) for k, v in tree.items() if k not in _STRUCTURE and not _holds_tensor(v)
        }
        if rest:
            own = build.values.setdefault("deepspeed", {})
            own.update({k: opened.value(f"deepspeed.{k}", v) for k, v in rest.items() if k not in own})
        build.about |= {"made_from_stage": stage, "ds_version": tree.get("ds_version")}


def _dicts(tree: Tree) -> list[dict[str, Tree]]:
    return [dict(g) for g in tree if isinstance(g, dict)] if isinstance(tree, (list, tuple)) else []


def _holds_tensor(tree: Tree) -> bool:
    return isinstance(tree, TensorRef) or (isinstance(tree, list) and any(isinstance(v, TensorRef) for v in tree))


def _members(
    build: Build, models: list[ModelFile], groups: list[dict[str, Tree]], *, nested: bool
) -> list[tuple[str, ...]]:
    """The names of each group: param_shapes is by group, or (stage 3) by the sub-groups that a group lists."""
    if not groups:
        return []
    trained = {k.name for k in build.tensors if k.kind == MASTER}
    if not models or models[0].shapes is None:
        if len(groups) == 1:
            build.order_known = False
            return [tuple(sorted(trained))]
        return []
    out: list[list[str]] = [[] for _ in groups]
    for model in models:
        shapes = model.shapes or []
        for number, group in enumerate(groups):
            params = group.get("params")
            numbers = list(params) if nested and isinstance(params, (list, tuple)) else [number]
            if not all(type(i) is int and i < len(shapes) for i in numbers):
                raise Unsupported(
                    "the param groups of the folder are not those of the model file",
                    where=build.files.where("zero"),
                    why=f"group {number} lists {numbers[:6]}, param_shapes has {len(shapes)} entries",
                )
            out[number] += [n for i in numbers for n in shapes[i] if n not in out[number]]
    return [tuple(n for n in names if n in trained) for names in out]
