"""A small model under two namings and any byte layout: what the planner's property tests convert between.

A *form* says how one native tensor is made of hub tensors: its value by NumPy, and its parts. A *cut* says which boxes
of the native tensor are written one after another in which file. Both are written twice, once as arrays and once as
geometry: the arrays are the expected values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from hypothesis import strategies as st

from ckptctl.core.compose import compose
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, OutputFile, Put, Region
from ckptctl.core.tensor import Key, Part, Piece, Source, dense_strides
from ckptctl.plan.index import SourceIndex
from tests.support.bruteforce import tensor
from tests.support.geometry import cuts, even, views

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptctl.core.dtype import DType
    from ckptctl.core.output import Segment
    from ckptctl.core.tensor import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""view, lo, size."""


class Form(NamedTuple):
    """One native tensor: name, shape, parts (none: the hub tensor of that name), and its value, given the hub's."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    value: Callable[[Mapping[str, np.ndarray]], np.ndarray]

    @property
    def whole(self) -> tuple[Part, ...]:
        """The parts, a trivial one where there are none."""
        zero = (0,) * len(self.shape)
        same = Part(Key(self.name), self.shape, zero, self.shape, self.shape, zero, tuple(range(len(self.shape))))
        return self.parts or (same,)


class Model(NamedTuple):
    """Shapes of hub tensors, and two namings of them."""

    shapes: dict[str, tuple[int, ...]]
    plain: tuple[Form, ...]
    fused: tuple[Form, ...]


def _same(name: str, shape: tuple[int, ...]) -> Form:
    return Form(name, shape, (), lambda hub: hub[name])


def _box(name: str, view: tuple[int, ...], lo: tuple[int, ...], size: tuple[int, ...]) -> Part:
    """A part whose axes keep their order and which is the whole hub tensor."""
    return Part(Key(name), view, lo, size, size, (0,) * len(size), tuple(range(len(size))))


def attention(g: int, m: int, d: int, h: int) -> Model:
    """Separate q, k, v; or one tensor by query group: m query heads, a key head, a value head, each d rows."""
    shapes = {"q": (g * m * d, h), "k": (g * d, h), "v": (g * d, h)}
    view = (g, m + 2, d, h)
    parts = (
        _box("q", view, (0, 0, 0, 0), (g, m, d, h)),
        _box("k", view, (0, m, 0, 0), (g, 1, d, h)),
        _box("v", view, (0, m + 1, 0, 0), (g, 1, d, h)),
    )

    def value(hub: Mapping[str, np.ndarray]) -> np.ndarray:
        rows = []
        for i in range(g):
            rows += [
                hub["q"][i * m * d : (i + 1) * m * d],
                hub["k"][i * d : (i + 1) * d],
                hub["v"][i * d : (i + 1) * d],
            ]
        return np.concatenate(rows)

    fused = Form("qkv", (g * (m + 2) * d, h), parts, value)
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (fused,))


def gated(f: int, h: int, *, name: str = "") -> Model:
    """Separate gate and up, or one above the other."""
    shapes = {f"{name}gate": (f, h), f"{name}up": (f, h)}
    parts = tuple(_box(n, (2, f, h), (i, 0, 0), (1, f, h)) for i, n in enumerate(shapes))
    fused = Form(f"{name}gate_up", (2 * f, h), parts, lambda hub: np.concatenate([hub[n] for n in shapes]))
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (fused,))


def experts(e: int, f: int, h: int, *, turned: bool) -> Model:
    """A gate and an up matrix an expert, or all stacked; turned: each (in, out)."""
    shapes = {f"{w}{i}": (f, h) for i in range(e) for w in ("gate", "up")}
    parts = []
    for i in range(e):
        for s, w in enumerate(("gate", "up")):
            if turned:
                view, lo, size = (e, h, 2, f), (i, 0, s, 0), (1, h, 1, f)
                parts.append(Part(Key(f"{w}{i}"), view, lo, size, (1, 1, f, h), (0, 0, 0, 0), (0, 3, 1, 2)))
            else:
                parts.append(_box(f"{w}{i}", (e, 2, f, h), (i, s, 0, 0), (1, 1, f, h)))

    def value(hub: Mapping[str, np.ndarray]) -> np.ndarray:
        stacked = np.stack([np.concatenate([hub[f"gate{i}"], hub[f"up{i}"]]) for i in range(e)])
        return stacked.transpose(0, 2, 1) if turned else stacked

    form = Form("experts", (e, h, 2 * f) if turned else (e, 2 * f, h), tuple(parts), value)
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (form,))


def rotary(heads: int, half: int, h: int) -> Model:
    """Heads in half-split order, or with their pairs interleaved."""
    shape = (heads * 2 * half, h)
    part = Part(
        Key("q"), (heads, half, 2, h), (0,) * 4, (heads, half, 2, h), (heads, 2, half, h), (0,) * 4, (0, 2, 1, 3)
    )
    other = Form(
        "wq", shape, (part,), lambda hub: hub["q"].reshape(heads, 2, half, h).transpose(0, 2, 1, 3).reshape(shape)
    )
    return Model({"q": shape}, (_same("q", shape),), (other,))


def conv1d(h: int, n: int) -> Model:
    """Three (out, in) matrices, or one (in, 3 * out), as GPT-2 keeps them."""
    shapes = dict.fromkeys(("q", "k", "v"), (n, h))
    parts = tuple(
        Part(Key(name), (h, 3, n), (0, i, 0), (h, 1, n), (n, 1, h), (0, 0, 0), (2, 1, 0))
        for i, name in enumerate(shapes)
    )
    fused = Form("c_attn", (h, 3 * n), parts, lambda hub: np.concatenate([hub[n] for n in shapes]).T)
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (fused,))


def layers(count: int, rows: int, h: int) -> Model:
    """A tensor a layer, or all layers as a first axis."""
    shapes = {f"l{i}": (rows, h) for i in range(count)}
    parts = tuple(_box(n, (count, rows, h), (i, 0, 0), (1, rows, h)) for i, n in enumerate(shapes))
    form = Form("stack", (count, rows, h), parts, lambda hub: np.stack([hub[n] for n in shapes]))
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (form,))


def vocabulary(true: int, padding: int, h: int) -> Model:
    """True rows and padding apart, or in one tensor."""
    shapes = {"rows": (true, h), "pad": (padding, h)}
    view = (true + padding, h)
    parts = (_box("rows", view, (0, 0), (true, h)), _box("pad", view, (true, 0), (padding, h)))
    form = Form("embed", view, parts, lambda hub: np.concatenate([hub["rows"], hub["pad"]]))
    return Model(shapes, tuple(_same(n, s) for n, s in shapes.items()), (form,))


def odd(shape: tuple[int, ...]) -> Model:
    """One tensor of any shape, under the same name on both sides."""
    return Model({"t": shape}, (_same("t", shape),), (_same("t", shape),))


small = st.integers(1, 4)
models = st.one_of(
    st.builds(attention, small, small, st.integers(1, 3), st.integers(1, 5)),
    st.builds(gated, st.integers(1, 7), st.integers(1, 5)),
    st.builds(experts, small, st.integers(1, 4), st.integers(1, 4), turned=st.booleans()),
    st.builds(rotary, small, small, st.integers(1, 5)),
    st.builds(conv1d, st.integers(1, 6), st.integers(1, 6)),
    st.builds(layers, small, small, small),
    st.builds(vocabulary, st.integers(1, 13), st.integers(0, 5), st.integers(1, 4)),
    st.builds(odd, st.lists(st.integers(0, 5), max_size=3).map(tuple)),
)


def values(model: Model, dtype: DType, seed: int) -> dict[str, np.ndarray]:
    """Random bits for every hub tensor, as unsigned integers of the same size: NaNs and negative zeros among them."""
    rng = np.random.default_rng(seed)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    return {n: rng.integers(0, np.iinfo(kind).max, s, kind, endpoint=True) for n, s in model.shapes.items()}


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor as boxes, one a rank: whole, by an axis of some view, in flat runs, or in a grid. Some are empty."""
    numel = math.prod(shape)
    zero = (0,) * len(shape)
    if numel == 0:
        return [(shape, zero, shape)]
    kind = draw(st.sampled_from(["whole", "axis", "flat", "zero", "grid"]))
    if kind == "whole":
        return [(shape, zero, shape)]
    if kind == "flat":
        return [((numel,), (a,), (b - a,)) for a, b in draw(cuts(numel, most=6))]
    if kind == "zero":
        return [((numel,), (a,), (b - a,)) for a, b in even(numel, draw(st.integers(1, numel + 2)))]
    view = draw(st.one_of(st.just(shape), views(numel)))
    if not view:
        return [(view, (), ())]
    axes = draw(st.permutations(range(len(view))))[: 1 if kind == "axis" else 2]
    out: list[Box] = [(view, (0,) * len(view), view)]
    for axis in axes:
        slots = draw(st.one_of(cuts(view[axis], most=4), st.just(even(view[axis], 3))))
        out = [(view, _with(lo, axis, a), _with(size, axis, b - a)) for _, lo, size in out for a, b in slots]
    return draw(st.permutations(out))


def _with(index: tuple[int, ...], axis: int, n: int) -> tuple[int, ...]:
    return (*index[:axis], n, *index[axis + 1 :])


class Layout(NamedTuple):
    """Which box of which form is in which file: files hold boxes one after another, pads bytes before each."""

    forms: tuple[Form, ...]
    boxes: tuple[tuple[Form, int, int, Box], ...]
    """form, file, padding bytes before, box."""
    n_files: int


@st.composite
def layout(draw: st.DrawFn, forms: tuple[Form, ...]) -> Layout:
    """Any layout of these forms over one to four files."""
    n_files = draw(st.integers(1, 4))
    out = [
        (form, draw(st.integers(0, n_files - 1)), draw(st.sampled_from([0, 0, 1, 3, 8])), box)
        for form in forms
        for box in draw(cut(form.shape))
    ]
    return Layout(forms, tuple(draw(st.permutations(out)) if draw(st.booleans()) else out), n_files)


def written(layout: Layout, hub: Mapping[str, np.ndarray], pad: bytes = b"\xee") -> list[bytes]:
    """The files of a layout, by NumPy alone."""
    files = [b""] * layout.n_files
    for form, file, before, (view, lo, size) in layout.boxes:
        value = np.ascontiguousarray(form.value(hub)).reshape(view)
        shard = value[tuple(slice(a, a + n) for a, n in zip(lo, size, strict=True))]
        files[file] += pad * before + np.ascontiguousarray(shard).tobytes()
    return files


def source_of(layout: Layout, model: Model, dtype: DType) -> SourceIndex:
    """The index of a layout as a source: its boxes as pieces of hub tensors."""
    at = [0] * layout.n_files
    found: dict[str, list[Piece]] = {name: [] for name in model.shapes}
    for form, file, before, (view, lo, size) in layout.boxes:
        piece = Piece(view, lo, size, file, at[file] + before, dense_strides(size, dtype.itemsize))
        at[file] += before + math.prod(size) * dtype.itemsize
        for part in form.whole:
            found[part.hub.name] += compose(part, piece)
    tensors: dict[Key, Tensor] = {Key(n): tensor(Key(n), dtype, model.shapes[n], pieces) for n, pieces in found.items()}
    return SourceIndex(tensors, [Source(f"f{i}") for i in range(layout.n_files)])


def target_of(layout: Layout, dtype: DType, pad: bytes = b"\xee") -> tuple[OutputFile, ...]:
    """The output files of a layout as a target."""
    files: list[list[Segment]] = [[] for _ in range(layout.n_files)]
    for i, (form, file, before, (view, lo, size)) in enumerate(layout.boxes):
        files[file].append(Put(pad * before) if i % 2 else Fill(before, pad, "alignment"))
        files[file].append(Region(Key(form.name), dtype, view, lo, size, form.parts))
    return tuple(OutputFile(f"f{i}", lambda segments=segments: segments) for i, segments in enumerate(files))


dtypes = st.sampled_from([BY_NAME[n] for n in ("uint8", "bfloat16", "float32", "float64")])


@st.composite
def conversions(draw: st.DrawFn) -> tuple[Model, DType, dict[str, np.ndarray], Layout, Layout, int]:
    """A model with its values, a layout on either side (each under either naming), and an extent's bytes."""
    model, dtype = draw(models), draw(dtypes)
    hub = values(model, dtype, draw(st.integers(0, 2**32 - 1)))
    a, b = (draw(layout(draw(st.sampled_from([model.plain, model.fused])))) for _ in range(2))
    return model, dtype, hub, a, b, draw(st.sampled_from([1, 5, 16, 37, 64, 1 << 20]))
