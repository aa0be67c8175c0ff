"""One torch file as segments, as torch's weights-only loader reads it.

It holds `{model, optimizer: {state, param_groups}, scheduler, ...}`.
The pickle is made here from the value tree; tensor bytes are regions. State is keyed by name; with index_keys by
torch's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, Optimizer, PathKey
from ckptctl.core.dtype import BY_NAME, DType
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.core.output import Fill, OutputFile, Put, Region, Segment
from ckptctl.core.tensor import Key, dense_strides
from ckptctl.core.values import Array, Global, Held, OrderedPairs, Record, Storage, TensorRef, Tree
from ckptctl.formats.order import numbered
from ckptctl.formats.pickles.emit import dump, storage_class
from ckptctl.formats.pickles.nodes import NumpyArray
from ckptctl.formats.target import Choices, Content, Item, Line, Written
from ckptctl.formats.zipwrite import torch_zip

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = "archive"
Payloads = Put | Region | Sequence[Put | Region | Fill]
"""What fills a storage: bytes, a tensor or a part of one, or several back to back."""


@dataclass
class TorchTree:
    """A tree for torch.save while it is made: storages by key, with what fills each."""

    plain: bool = False
    held: Mapping[tuple[str, str], Item] = field(default_factory=dict)
    fills: dict[str, Payloads] = field(default_factory=dict)
    made: dict[tuple[Key, str], Storage] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)

    def tensor(self, item: Item, region: Region | None = None) -> TensorRef:
        """A tensor of the target; the same source tensor twice is one storage (ties)."""
        region = region or item.region(crc=True)
        if item.tensor.logical is not None:
            raise Unsupported(
                f"{item.key.name} is {item.dtype.name}, which torch files hold in another shape",
                fix=f"leave it out with --exclude '{item.key.name}'",
            )
        storage = self.made.get((item.key, item.dtype.name)) if region.size == item.shape else None
        if storage is None:
            storage = self.new_storage(region.dtype, region.numel, region.nbytes, region)
            if region.size == item.shape:
                self.made[item.key, item.dtype.name] = storage
        return TensorRef(storage, item.dtype, 0, region.size, dense_strides(region.size, 1))

    def packed(self, dtype: DType, shape: tuple[int, ...], fill: Sequence[Put | Region | Fill]) -> TensorRef:
        """A tensor in a storage of its own, filled by several runs back to back."""
        numel = math.prod(shape)
        storage = self.new_storage(dtype, numel, dtype.nbytes(shape), fill)
        return TensorRef(storage, dtype, 0, shape, dense_strides(shape, 1))

    def array(self, value: Array) -> TensorRef:
        """A value's small tensor: its bytes stand in the plan."""
        dtype = BY_NAME[value.dtype]
        storage = self.new_storage(dtype, len(value.data) // dtype.itemsize, len(value.data), Put(value.data))
        return TensorRef(storage, dtype, 0, value.shape, dense_strides(value.shape, 1))

    def _numpy(self, value: NumpyArray) -> Tree:
        """A NumPy array as a tensor of the same bits, a NumPy scalar as a number.

        Left as it is where torch has no such type.
        """
        import numpy as np

        dtype = np.dtype(value.dtype)
        name = dtype.newbyteorder("=").name
        if name not in BY_NAME or dtype.byteorder == ">":
            return value
        if value.scalar:
            return np.frombuffer(value.data, dtype)[0].item()
        return self.array(Array(name, value.shape, value.data))

    def new_storage(self, dtype: DType, numel: int, nbytes: int, fill: Payloads) -> Storage:
        """A storage under the next number; torch has no class for some dtypes, whose storages are then untyped."""
        typed = bool(dtype.storage)
        storage = Storage(str(len(self.fills)), dtype if typed else None, numel if typed else nbytes, nbytes=nbytes)
        self.fills[storage.key], self.storages[storage.key] = fill, storage
        return storage

    def value(self, tree: Tree) -> Tree:
        """A value tree with its arrays as tensors; NumPy's too where plain is set, since weights_only refuses them."""
        if isinstance(tree, Held):
            return self.tensor(self.held[tree.name, tree.kind])
        if isinstance(tree, NumpyArray):
            return self._numpy(tree) if self.plain else tree
        if isinstance(tree, Array):
            return self.array(tree)
        if isinstance(tree, OrderedPairs):
            out = OrderedPairs({k: self.value(v) for k, v in tree.items()})
            out.attributes = tree.attributes
            return out
        if isinstance(tree, dict):
            return {k: self.value(v) for k, v in tree.items()}
        if isinstance(tree, list):
            return [self.value(v) for v in tree]
        if type(tree) is tuple:
            return tuple(self.value(v) for v in tree)
        if isinstance(tree, Record):
            return self._record(tree)
        return tree

    def _record(self, tree: Record) -> Record:
        """An object with the arrays in it as tensors. One object stays one, and may hold itself."""
        known = self.records.get(id(tree))
        if known is None:
            known = Record(tree.func, how=tree.how, has_state=tree.has_state)
            self.records[id(tree)] = known
            known.args, known.kwargs, known.state = map(self.value, (tree.args, tree.kwargs, tree.state))
            known.items = [self.value(v) for v in tree.items]
            known.pairs = [(self.value(k), self.value(v)) for k, v in tree.pairs]
        return known

    def _fill(self, storage: Storage) -> Payloads:
        """What fills a storage that was made here. Unsupported for another: its key is a number of the source's."""
        if self.storages.get(storage.key) is not storage:
            raise Unsupported(
                "a value holds tensor data in a way that is not known here",
                why="a storage without a tensor, or a tensor more than 200 levels deep",
                fix="leave it out of the source",
            )
        return self.fills[storage.key]

    def segments(self, tree: Tree, *, root: str = ROOT, base_index: int = 0, full: bool = True) -> list[Segment]:
        """The archive that holds the tree: pickle, storages in order of the pickle, version.

        Full adds the records of torch 2.13.
        """
        if isinstance(tree, TensorRef) and tree.offset == 0 and tree.stride == dense_strides(tree.shape, 1):
            pickle = packed_tensor_pickle(tree.dtype, tree.shape)
            return self._archive(pickle, [self._fill(tree.storage)], root, base_index, full)
        order: list[Storage] = []
        numbers: dict[int, str] = {}

        def persistent(storage: Storage) -> Tree:
            if id(storage) not in numbers:
                numbers[id(storage)] = str(len(order))
                order.append(storage)
            return ("storage", storage_class(storage), numbers[id(storage)], "cpu", storage.numel)

        pickle = dump(tree, persistent)
        return self._archive(pickle, [self._fill(s) for s in order], root, base_index, full)

    def _archive(
        self, pickle: bytes, fills: Sequence[Payloads], root: str, base_index: int, full: bool
    ) -> list[Segment]:
        records: list[tuple[str, Payloads]] = [("data.pkl", Put(pickle))]
        if full:
            records += [(".format_version", Put(b"1")), (".storage_alignment", Put(b"64"))]
        records.append(("byteorder", Put(b"little")))
        records += [(f"data/{number}", fill) for number, fill in enumerate(fills)]
        records.append(("version", Put(b"3\n")))
        return torch_zip(records, root, base_index=base_index)


@lru_cache(maxsize=4096)
def packed_tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The pickle of one packed tensor in a storage of its own: what most items of a DCP hold, and few differ."""
    made = TorchTree()
    numel = math.prod(shape)
    storage = made.new_storage(dtype, numel, numel * dtype.itemsize, Put(b""))
    pid = ("storage", storage_class(storage), "0", "cpu", storage.numel)
    return dump(TensorRef(storage, dtype, 0, shape, dense_strides(shape, 1)), lambda _: pid)


def write(content: Content, choices: Choices) -> Written:
    """One zip file.

    Pickled objects that torch's weights-only loader refuses are carried all the same, and reported.
    """
    lines: list[Line] = []
    if choices.index_keys:
        instead = "without --index-keys names are written, which need no order"
        content, told = numbered(content, choices.param_order, instead)
        lines += told

    def segments() -> list[Segment]:
        made = TorchTree(plain=True, held=content.held)
        return made.segments(_tree(content, choices, made))

    if any("NumPy" in name for tree in content.values.values() for name in _refused(tree)):
        lines.append(
            Line(
                "NumPy arrays",
                "converted",
                "to torch tensors of the same bits, which torch's weights-only loader takes",
            )
        )
    refused = sorted({name for tree in content.values.values() for name in _refused(tree) if "NumPy" not in name})
    if refused:
        lines.append(
            Line("torch.load", "carried", f"weights_only=True refuses this file: it holds {', '.join(refused[:4])}")
        )
    if _names_without_group(content):
        lines.append(
            Line(
                "param groups",
                "filled",
                "one group that lists the parameters with state, without settings: give lr and the rest yourself",
            )
        )
    return Written((OutputFile("", segments),), False, tuple(lines))


def _names_without_group(content: Content) -> list[str]:
    """Parameters with state where the source keeps no groups at all: a loader still has to learn which they are."""
    if content.optimizer is not None and content.optimizer.groups:
        return []
    scalars = content.optimizer.scalars if content.optimizer is not None else {}
    return list(dict.fromkeys(name for name, _ in (*content.states, *scalars)))


def _tree(content: Content, choices: Choices, made: TorchTree) -> Tree:
    model = OrderedPairs({name: made.tensor(content.weights[content.ties.get(name, name)]) for name in content.weights})
    model.update({name: made.value(v) for name, v in content.model_values.items()})
    root = _around(model, content.source.model_path) if choices.own_names else {"model": model}
    averaged = averages(content)
    if content.optimizer is not None or len(content.states) > len(averaged):
        root["optimizer"] = _optimizer(content, choices, made)
    if averaged:
        root[EMA] = OrderedPairs({name: made.tensor(item) for name, item in averaged.items()})
    for name, value in content.values.items():
        if name in root:
            raise Unsupported(
                f"a value of the source is called {name}, as a part of the result is",
                fix="leave it out of the source, or convert to dcp",
            )
        root[name] = made.value(value)
    return root


def _around(model: OrderedPairs, path: Sequence[PathKey]) -> dict[str, Tree]:
    """The root with the model's dict under the source's own keys; the dict itself where the source is that."""
    at: Tree = model
    for key in reversed(path):
        at = {key: at}
    return at if isinstance(at, OrderedPairs) else dict(at)


def _optimizer(content: Content, choices: Choices, made: TorchTree) -> Tree:
    optimizer = content.optimizer or Optimizer(())
    states = merged_states(content, optimizer, made.tensor, made.value)
    order = [n for g in optimizer.groups for n in g.params]
    numbers: Mapping[str, int | str] = (
        {n: i for i, n in enumerate(order)} if choices.index_keys else {n: n for n in (*order, *states)}
    )
    lost = [n for n in states if n not in numbers]
    if lost:
        raise MissingFact(
            f"--index-keys: {lost[0]} is in no param group, so it has no number",
            fix="leave --index-keys out: state is then keyed by name",
        )
    groups = [
        {**{k: made.value(v) for k, v in g.options.items()}, "params": [numbers[p] for p in g.params]}
        for g in optimizer.groups
    ]
    if without := _names_without_group(content):
        groups = [{"params": [numbers[n] for n in without]}]
    return {
        "state": {numbers[n]: entry for n, entry in states.items()},
        "param_groups": groups,
        **{k: made.value(v) for k, v in optimizer.options.items()},
    }


def averages(content: Content) -> dict[str, Item]:
    """The averaged weights, by name: no state of an optimizer, though they stand among the states."""
    return {name: item for (name, kind), item in content.states.items() if kind == EMA}


def merged_states(
    content: Content, optimizer: Optimizer, tensor: Callable[[Item], Tree], value: Callable[[Tree], Tree]
) -> dict[str, dict[str, Tree]]:
    """By parameter, its states, tensors and plain values alike.

    Parameters as the groups list them, then as the source does.

    A step that is shared is given to each by itself.
    """
    out: dict[str, dict[str, Tree]] = {}
    for (name, kind), item in content.states.items():
        if kind != EMA:
            out.setdefault(name, {})[kind] = tensor(item)
    for (name, kind), scalar in optimizer.scalars.items():
        out.setdefault(name, {})[kind] = value(scalar)
    order = dict.fromkeys(n for g in optimizer.groups for n in g.params if n in out)
    return {name: dict(sorted(out[name].items(), key=lambda kv: kv[0] != "step")) for name in {**order, **out}}


_ALLOWED = ("torch.", "collections.OrderedDict", "collections.Counter", "_codecs.encode")


def _refused(tree: Tree) -> set[str]:
    """Names in a value that torch's weights_only reader does not know: NumPy arrays, records of classes."""
    out: set[str] = set()
    stack, seen = [tree], set()
    while stack:
        at = stack.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, NumpyArray):
            out.add("NumPy arrays")
        elif isinstance(at, Record):
            if not at.cls.startswith(_ALLOWED):
                out.add(at.cls or "an object")
            stack += [at.args, at.state, *at.items]
        elif isinstance(at, Global) and not str(at).startswith(_ALLOWED):
            out.add(str(at))
        elif isinstance(at, dict):
            stack += at.values()
        elif isinstance(at, (list, tuple, set, frozenset)):
            stack += at
            if isinstance(at, frozenset):
                out.add("frozensets")
    return out
