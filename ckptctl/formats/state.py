"""Training state dicts, whatever container held them.

Which part is the model, which the optimizer, and what else there is.

Takes a nested tree whose tensor leaves have `.shape` and `.dtype` and gives names and states; used by torch files and
DCP folders alike.
No bytes are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ckptctl.core.checkpoint import PathKey, part_of
from ckptctl.core.errors import Unsupported
from ckptctl.core.values import Array, Record, Tree

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


@runtime_checkable
class Leaf(Protocol):
    """A tensor in a tree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> Any:
        """Its element type."""


EMA_KEYS = ("ema", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema_params")
"""Averaged copies of the weights: never taken for the model itself."""
IsLeaf = Callable[[Tree], bool]


@dataclass
class Found:
    """What a state dict holds. model and states map names to leaves; rest is by top-level name."""

    model: dict[str, Tree] = field(default_factory=dict)
    model_values: dict[str, Tree] = field(default_factory=dict)
    """Entries of the model's dict that are no tensors (`_extra_state`)."""
    states: dict[PathKey, dict[str, Tree]] = field(default_factory=dict)
    groups: list[dict[str, Tree]] = field(default_factory=list)
    optimizer_options: dict[str, Tree] = field(default_factory=dict)
    has_optimizer: bool = False
    flat_optimizer: bool = False
    rest: dict[str, Tree] = field(default_factory=dict)
    model_path: tuple[PathKey, ...] = ()
    optimizer_path: tuple[PathKey, ...] = ()


def find(root: Tree, is_leaf: IsLeaf) -> Found:
    """The parts of a state dict. A root that is no dict, or holds no tensor, gives a Found without a model.

    Unsupported where several dicts hold tensors and none is known to be the model's: which one it is would be a guess.
    """
    found = Found()
    if not isinstance(root, Mapping):
        return found
    root, prefix = _unwrapped(root, is_leaf, found.rest)
    optimizer_key = next((k for k in OPTIMIZER_KEYS if k in root and _is_optimizer(root[k])), None)
    model_key = _model_key(root, optimizer_key, is_leaf)
    bare = model_key is None
    if model_key is not None:
        found.model_path = (*prefix, model_key)
        _collect(root[model_key], "", found.model, found.model_values, is_leaf)
        _refuse_lists(found.model_values, is_leaf)
    elif _is_bare_optimizer(root):
        found.optimizer_path = prefix
        _optimizer(root, found, is_leaf)
        return found
    elif optimizer_key is None and not any(is_leaf(v) for v in root.values()):
        # A state dict nested by module: every tensor is the model's, and nothing else is there to be told apart.
        averaged = {k: v for k, v in root.items() if k in EMA_KEYS and _holds_tensors(v, is_leaf)}
        values: dict[str, Tree] = {}
        _collect({k: v for k, v in root.items() if k not in averaged}, "", found.model, values, is_leaf)
        if found.model or averaged:
            found.rest.update({_text(k): v for k, v in root.items() if k in values or k in averaged})
            _refuse_more_optimizers(found.rest)
            return found
    is_plain = all(is_leaf(v) for v in root.values())  # a state dict may well have a buffer called `step`
    for key, value in root.items():
        if model_key is not None and key == model_key:
            continue
        if optimizer_key is not None and key == optimizer_key:
            found.optimizer_path = (*prefix, key)
            _optimizer(value[0] if isinstance(value, (list, tuple)) else value, found, is_leaf)
        elif bare and is_leaf(value) and (is_plain or part_of(_text(key)) == "other"):
            _put(found.model, _text(key), value)
        else:
            _put(found.rest, _text(key), value)
    _refuse_more_optimizers(found.rest)
    return found


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
    return any(_holds_tensors(root.get(k), is_leaf) for k in MODEL_KEYS) or any(
        _is_optimizer(root.get(k)) for k in OPTIMIZER_KEYS
    )


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


def _model_key(root: Mapping[Any, Tree], optimizer_key: str | None, is_leaf: IsLeaf) -> Any:
    """The key of the model's dict: by its usual names, else the only dict that holds tensors beside an optimizer."""
    known = next((k for k in MODEL_KEYS if _holds_tensors(root.get(k), is_leaf)), None)
    if known is not None or optimizer_key is None:
        return known
    others = [
        k
        for k, v in root.items()
        if k != optimizer_key and k not in EMA_KEYS and part_of(str(k)) == "other" and _holds_tensors(v, is_leaf)
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


def _is_optimizer(value: Tree) -> bool:
    """Whether it looks like optimizer.state_dict(), nested or with flat keys; a list of one counts."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        return False
    if "state" in value or "param_groups" in value:
        return True
    return any(isinstance(k, str) and k.startswith(("state.", "param_groups.")) for k in value)


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


def _optimizer(tree: Tree, found: Found, is_leaf: IsLeaf) -> None:
    found.has_optimizer = True
    if not isinstance(tree, Mapping):
        return
    state, groups = tree.get("state"), tree.get("param_groups")
    if isinstance(state, Mapping):
        for key, entry in state.items():
            found.states[key if isinstance(key, int) else str(key)] = (
                {str(k): v for k, v in entry.items()} if isinstance(entry, Mapping) else {"": entry}
            )
    if isinstance(groups, (list, tuple)):
        found.groups = [{str(k): v for k, v in g.items()} for g in groups if isinstance(g, Mapping)]
    flat = {k: v for k, v in tree.items() if isinstance(k, str) and k.startswith(("state.", "param_groups."))}
    if flat:
        found.flat_optimizer = True
        _flat_optimizer(flat, found)
    found.optimizer_options = {
        str(k): v for k, v in tree.items() if k not in ("state", "param_groups") and k not in flat
    }


def _flat_optimizer(flat: Mapping[str, Tree], found: Found) -> None:
    """Keys `state.<name>.<kind>` and `param_groups.<name>.<option>`: names may hold dots, kinds and options do not.

    Source: torch 2.13.0, distributed/checkpoint/state_dict.py, _unflatten_optim_state_dict.
    """
    options: dict[str, dict[str, Tree]] = {}
    listed: dict[int, dict[str, Tree]] = {}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if part == "param_groups" and name.isdigit():  # written without paths: the index of a group in its list
            listed.setdefault(int(name), {})[last] = value
            continue
        (found.states.setdefault(name, {}) if part == "state" else options.setdefault(name, {}))[last] = value
    found.groups = [{"params": [], **listed[n]} for n in sorted(listed)]
    if listed and not options:
        found.flat_optimizer = False
        return
    order = {name: i for i, name in enumerate(found.model)}
    names = sorted(options, key=lambda n: order.get(n, len(order)))
    for name in names:
        for group in found.groups:
            if _same({k: v for k, v in group.items() if k != "params"}, options[name]):
                group["params"].append(name)
                break
        else:
            found.groups.append({"params": [name], **options[name]})


def _same(a: Tree, b: Tree) -> bool:
    """Equal settings, by type and value: 0 and 0.0 and False are three settings."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)


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
