"""Training state dicts, whatever container held them.

Which part is the model, which the optimizer, and what else there is.

Takes a nested tree whose tensor leaves have `.shape` and `.dtype` and gives names and states; used by torch files and
DCP folders alike.
No bytes are read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptctl.core.checkpoint import STEP_NAMES, Facts, PathKey, part_of
from ckptctl.core.errors import Unsupported
from ckptctl.core.values import Array, Record, Tree
from ckptctl.formats import optimizers, wrapping

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "network", "net", "weights", "params")
OPTIMIZER_KEYS = (
    "optimizer",
    "optim",
    "optimizer_state_dict",
    "optim_state_dict",
    "optimizers",
    "optimizer_states",
    "opt",
)
NUMBERED = re.compile(r"optimizer_(\d+)")
"""One optimizer of several, each under a key of its own: Lightning's sharded folders."""
EMA_KEYS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema_params")
"""Averaged copies of the weights: never taken for the model itself.

Where every name and shape of one is the model's, it is tensors of kind ema, else a value.
"""
IsLeaf = Callable[[Tree], bool]
"""Whether a node of the tree is a tensor. One has a shape."""


@dataclass
class Found:
    """What a state dict holds. model and states map names to leaves; rest is by top-level name."""

    model: dict[str, Tree] = field(default_factory=dict)
    model_values: dict[str, Tree] = field(default_factory=dict)
    """Entries of the model's dict that are no tensors (`_extra_state`)."""
    states: dict[PathKey, dict[str, Tree]] = field(default_factory=dict)
    groups: list[dict[str, Tree]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    """Which optimizer each group is of, where there are several; shorter than groups where they are the first's."""
    ema: dict[str, Tree] = field(default_factory=dict)
    """The averaged weights, by the model's names."""
    wrappers: tuple[str, ...] = ()
    """Words of wrappers that stood in names and were taken out of them."""
    optimizer_options: dict[str, Tree] = field(default_factory=dict)
    has_optimizer: bool = False
    flat_optimizer: bool = False
    rest: dict[str, Tree] = field(default_factory=dict)
    model_path: tuple[PathKey, ...] = ()
    optimizer_path: tuple[PathKey, ...] = ()


def find(root: Tree, is_leaf: IsLeaf, *, averages: bool = False) -> Found:
    """The parts of a state dict. A root that is no dict, or holds no tensor, gives a Found without a model.

    averages: averaged weights go to Found.ema where they are the model's, for readers that take them from there.

    Unsupported where several dicts hold tensors and none is known to be the model's: which one it is would be a guess.
    """
    found = Found()
    if not isinstance(root, Mapping):
        return found
    root, prefix = _unwrapped(root, is_leaf, found.rest)
    _parts(root, prefix, found, is_leaf)
    _refuse_more_optimizers(found.rest)
    wrapping.take_out(found)
    if averages:
        _averaged(found, is_leaf)
    return found


def _parts(root: Mapping[Any, Tree], prefix: tuple[PathKey, ...], found: Found, is_leaf: IsLeaf) -> None:
    """Puts each entry of the root where it belongs: model, optimizers, or the rest."""
    optimizer_keys = _optimizer_keys(root)
    model_key = _model_key(root, optimizer_keys, is_leaf)
    bare = model_key is None
    if model_key is not None:
        found.model_path = (*prefix, model_key)
        _collect(root[model_key], "", found.model, found.model_values, is_leaf)
        _refuse_lists(found.model_values, is_leaf)
    elif _is_bare_optimizer(root):
        found.optimizer_path = prefix
        optimizers.join(found, [root])
        return
    elif not optimizer_keys and not any(is_leaf(v) for v in root.values()):
        # A state dict nested by module: every tensor is the model's, and nothing else is there to be told apart.
        averaged = {k: v for k, v in root.items() if k in EMA_KEYS and _holds_tensors(v, is_leaf)}
        values: dict[str, Tree] = {}
        _collect({k: v for k, v in root.items() if k not in averaged}, "", found.model, values, is_leaf)
        if found.model or averaged:
            found.rest.update({_text(k): v for k, v in root.items() if k in values or k in averaged})
            return
    is_plain = all(is_leaf(v) for v in root.values())  # a state dict may well have a buffer called `step`
    joined: list[Tree] = []
    for key, value in root.items():
        if model_key is not None and key == model_key:
            continue
        if key in optimizer_keys:
            found.optimizer_path = found.optimizer_path or (*prefix, key)
        elif bare and is_leaf(value) and (is_plain or part_of(_text(key)) == "other"):
            _put(found.model, _text(key), value)
        else:
            _put(found.rest, _text(key), value)
    for key in optimizer_keys:
        joined += root[key] if isinstance(root[key], (list, tuple)) else [root[key]]
    if joined:
        optimizers.join(found, joined)


def _averaged(found: Found, is_leaf: IsLeaf) -> None:
    """Averaged weights that are the model's, name by name and shape by shape, become Found.ema; others stay a value."""
    for key in EMA_KEYS:
        value = found.rest.get(key)
        if not isinstance(value, Mapping) or not value or not all(map(is_leaf, value.values())):
            continue
        names = wrapping.names(map(_text, value))
        if all(n in found.model and found.model[n].shape == value[raw].shape for raw, n in names.items()):
            found.ema = {names[raw]: leaf for raw, leaf in value.items()}
            del found.rest[key]
            return


def _text(key: object) -> str:
    """A key of a dict as a name."""
    return key if isinstance(key, str) else str(key)


def _put(into: dict[str, Tree], name: str, value: Tree) -> None:
    """Add under a name. Unsupported where two keys would have one name: one of the two would be lost."""
    if name in into:
        raise Unsupported(
            f"two entries of the file would both be called {name!r}",
            why="its dicts have keys that differ only by type, or by where their dots stand",
            fix="rename one of them where the file is made",
            code="duplicate-name",
        )
    into[name] = value


def _refuse_lists(values: Mapping[str, Tree], is_leaf: IsLeaf) -> None:
    """Unsupported for tensors in lists of a model's dict: they have no names there."""
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and any(is_leaf(v) or _holds_tensors(v, is_leaf) for v in value):
            raise Unsupported(
                f"the model's dict holds a list of tensors ({name})",
                why="tensors in a list have no names",
                fix="save a dict of names instead",
            )


def _refuse_more_optimizers(rest: Mapping[str, Tree]) -> None:
    """Unsupported for a second optimizer: its moments would pass for values that a target may let go."""
    for name, value in rest.items():
        inner = (
            list(value)
            if isinstance(value, (list, tuple))
            else list(value.values())
            if isinstance(value, Mapping)
            else []
        )
        if _has_groups(value) or any(map(_has_groups, inner)):
            raise Unsupported(
                f"the file holds more than one optimizer, or one under a name that is not known ({name})",
                why=f"known names are {', '.join(OPTIMIZER_KEYS)}",
                fix="this version carries one model with one optimizer: save them apart",
            )


def _has_groups(value: Tree) -> bool:
    """Whether it is what optimizer.state_dict() gives."""
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _is_bare_optimizer(root: Mapping[Any, Tree]) -> bool:
    """Whether it is optimizer.state_dict() by itself."""
    groups = root.get("param_groups")
    if not isinstance(root.get("state"), Mapping) or not isinstance(groups, (list, tuple)):
        return False
    return all(isinstance(g, Mapping) and "params" in g for g in groups)


def _holds_tensors(value: Tree, is_leaf: IsLeaf) -> bool:
    return isinstance(value, Mapping) and any(True for _ in _leaves(value, is_leaf))


def _is_training_state(root: Mapping[Any, Tree], is_leaf: IsLeaf) -> bool:
    """Whether a dict has a model's dict or an optimizer's among its values, by their usual names."""
    return any(_holds_tensors(root.get(k), is_leaf) for k in MODEL_KEYS) or bool(_optimizer_keys(root))


def _unwrapped(
    root: Mapping[Any, Tree], is_leaf: IsLeaf, rest: dict[str, Tree]
) -> tuple[Mapping[Any, Tree], tuple[PathKey, ...]]:
    """Goes down while the training state is one level deeper ("app"); what stands beside it is put into rest."""
    prefix: tuple[PathKey, ...] = ()
    for _ in range(4):
        if _is_training_state(root, is_leaf):
            break
        inner = [k for k, v in root.items() if isinstance(v, Mapping) and _is_training_state(v, is_leaf)]
        beside = {str(k): v for k, v in root.items() if k not in inner}
        if len(inner) != 1 or any(is_leaf(v) or _holds_tensors(v, is_leaf) for v in beside.values()):
            break
        rest.update(beside)
        prefix = (*prefix, inner[0])
        root = root[inner[0]]
    return root, prefix


def _optimizer_keys(root: Mapping[Any, Tree]) -> list[Any]:
    """The keys of the optimizers: the first of the usual names, and those that are numbered, by number."""
    usual = next((k for k in OPTIMIZER_KEYS if k in root and optimizers.is_optimizer(root[k])), None)
    numbered = [(int(m[1]), k) for k in root if isinstance(k, str) and (m := NUMBERED.fullmatch(k))]
    several = [k for _, k in sorted(numbered) if optimizers.is_optimizer(root[k])]
    return [*([] if usual is None else [usual]), *several]


def _model_key(root: Mapping[Any, Tree], optimizer_keys: Sequence[Any], is_leaf: IsLeaf) -> Any:
    """The key of the model's dict: by its usual names, else the only dict that holds tensors beside an optimizer."""
    known = next((k for k in MODEL_KEYS if _holds_tensors(root.get(k), is_leaf)), None)
    if known is not None or not optimizer_keys:
        return known
    others = [
        k
        for k, v in root.items()
        if k not in optimizer_keys and k not in EMA_KEYS and part_of(str(k)) == "other" and _holds_tensors(v, is_leaf)
    ]
    loose = [k for k, v in root.items() if is_leaf(v) and part_of(str(k)) == "other"]
    if len(others) > 1:
        raise Unsupported(
            "several dicts of the file hold tensors, and none is called as the model's usually is",
            why=f"they are {', '.join(map(str, others[:6]))}",
            fix=f"save the one that is the model's under one of {', '.join(MODEL_KEYS)}",
        )
    return others[0] if others and not loose else None


def _leaves(tree: Tree, is_leaf: IsLeaf) -> Iterator[Tree]:
    stack = [tree]
    while stack:
        at = stack.pop()
        if is_leaf(at):
            yield at
        elif isinstance(at, Mapping):
            stack.extend(at.values())


def _collect(
    tree: Mapping[Any, Tree], prefix: str, tensors: dict[str, Tree], values: dict[str, Tree], is_leaf: IsLeaf
) -> None:
    """Tensors and other values of a (possibly nested) model dict under dotted names."""
    stack = [(prefix, tree)]
    while stack:
        at, inner = stack.pop(0)
        for key, value in inner.items():
            name = f"{at}.{key}" if at else _text(key)
            if name in tensors or name in values:
                _put(tensors, name, value) if name in tensors else _put(values, name, value)
            if is_leaf(value):
                tensors[name] = value
            elif isinstance(value, Mapping) and any(True for _ in _leaves(value, is_leaf)):
                stack.append((name, value))
            else:
                values[name] = value


# ---- values ---------------------------------------------------------------------------------------------------------


def plain(tree: Tree) -> Any:
    """A config inside a pickle as JSON data; what JSON cannot say becomes text."""
    if isinstance(tree, dict):
        return {str(k): plain(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(v) for v in tree]
    return (
        tree
        if tree is None or isinstance(tree, (bool, int, float, str))
        else str(tree.cls if isinstance(tree, Record) else tree)
    )


def config_in(values: Mapping[str, Tree], where: str) -> Facts:
    """What a model's config among the values says; nothing where there is none. where is the file, for reports."""
    config = values.get("config")
    if isinstance(config, dict) and isinstance(config.get("model_type"), str):
        return Facts.of(plain(config), f"{where} (config)")
    return Facts()


def counted(values: Mapping[str, Tree]) -> int | None:
    """The step that a counter at the top of a state says, by its usual names; None where there is none."""
    return next((step for name in STEP_NAMES if (step := number(values.get(name))) is not None), None)


def number(value: Tree) -> int | None:
    """A step as a whole number: an integer, or a 0-d tensor or array of one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return int(value) if value == int(value) else None
    if isinstance(value, Array) and len(value.data) and value.dtype in ("float32", "float64", "int64", "int32"):
        import numpy as np

        got = np.frombuffer(value.data, np.dtype(value.dtype))
        return int(got[0]) if len(got) == 1 else None
    return None
