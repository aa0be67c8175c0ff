"""Affine maps of tensor-parallel slices, against NumPy: rows dealt out in another order, or held by every rank."""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.formats.deepspeed.slices import Rules, joined
from tests.formats.deepspeed.test_slices import KEY, elements, tensors

PATTERN = r"^layer\.qkv\.weight$"


def strides(shape):
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


def entry(shape, axis, ranks):
    """A map: of each rank the (first row, rows, ranks that hold them) of its runs along the axis, in order."""
    out = {}
    for rank, runs in enumerate(ranks):
        shard = [*shape]
        shard[axis] = sum(n for _, n, _ in runs)
        pieces, at = [], 0
        for first, n, held in runs:
            size = [*shape]
            size[axis] = n
            source, dest = strides(shape), strides(shard)
            pieces.append(
                {
                    "shape": size,
                    "source": [first * source[axis], source],
                    "dest": [at * dest[axis], dest],
                    "locations": held,
                }
            )
            at += n
        out[rank] = {"shard_shape": shard, "pieces": pieces}
    return {"logical_shape": list(shape), "ranks": out}


def info(made, **more):
    return {"universal_checkpoint_version": 0.4, "affine_map": {"version": 1, "params": {PATTERN: made}}, **more}


def cut(whole, axis, ranks):
    return [np.concatenate([np.take(whole, range(a, a + n), axis) for a, n, _ in runs], axis) for runs in ranks]


MAPS = {
    "queries are cut, keys and values everywhere": (
        (10, 3),
        0,
        [[(0, 4, [0]), (8, 2, [0, 1])], [(4, 4, [1]), (8, 2, [0, 1])]],
    ),
    "unevenly": ((10, 3), 0, [[(0, 5, [0]), (8, 2, [0, 1])], [(5, 3, [1]), (8, 2, [0, 1])]]),
    "blocks in another order": ((12, 2), 0, [[(0, 2, [0]), (6, 4, [0])], [(2, 4, [1]), (10, 2, [1])]]),
    "blocks out of order": ((8, 2), 0, [[(6, 2, [0]), (0, 2, [0])], [(4, 2, [1]), (2, 2, [1])]]),
    "columns": ((3, 8), 1, [[(0, 2, [0]), (6, 2, [0])], [(2, 4, [1])]]),
    "a vector": ((10,), 0, [[(0, 4, [0]), (8, 2, [0, 1])], [(4, 4, [1]), (8, 2, [0, 1])]]),
    "three ranks, of which two share": (
        (7, 2),
        0,
        [[(0, 2, [0]), (6, 1, [0, 2])], [(2, 2, [1])], [(4, 2, [2]), (6, 1, [0, 2])]],
    ),
    "a rank without any": ((6, 2), 0, [[(0, 6, [0])], []]),
    "all of it everywhere": ((4, 2), 0, [[(0, 4, [0, 1])], [(0, 4, [0, 1])]]),
}


def slices_of(shape, axis, ranks):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return whole, [cut(whole, axis, [r])[0] if r else np.zeros((0, *shape[1:]), np.float32) for r in ranks]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("shape", "axis", "ranks"), MAPS.values(), ids=MAPS)
def test_slices_make_the_tensor_that_the_map_says(shape, axis, ranks, flat):
    """The patterns beside a map say plain rows, which is wrong, and are not asked."""
    whole, slices = slices_of(shape, axis, ranks)
    made = joined(KEY, tensors(slices, flat=flat), Rules(info(entry(shape, axis, ranks)), None, "here"), "here")
    assert made.shape == shape
    assert elements(made, slices).tolist() == whole.tolist()


def test_what_several_ranks_hold_is_there_to_compare():
    shape, axis, ranks = MAPS["queries are cut, keys and values everywhere"]
    whole, slices = slices_of(shape, axis, ranks)
    slices[1][-1] = 99
    made = joined(KEY, tensors(slices, flat=True), Rules(info(entry(shape, axis, ranks)), None, "here"), "here")
    assert elements(made, slices).tolist() == whole.tolist()
    (copy,) = made.replicas
    other = elements(type(made)(made.key, made.dtype, made.shape, copy), slices)
    assert other[:9].tolist() == whole[:9].tolist()
    assert other[9].tolist() == [99, 99, 99]


def damaged(**how):
    shape, axis, ranks = MAPS["unevenly"]
    made = entry(shape, axis, ranks)
    return made | how


def piece(**how):
    made = damaged()
    made["ranks"][0]["pieces"][0] |= how
    return made


WRONG = {
    "no ranks": damaged(ranks={}),
    "another rank": damaged(ranks={0: damaged()["ranks"][0], 2: damaged()["ranks"][1]}),
    "no shape": damaged(logical_shape=None),
    "more rows": damaged(logical_shape=[12, 3]),
    "rows of another width": damaged(logical_shape=[10, 4]),
    "nothing": None,
    "a piece elsewhere": piece(dest=[3, [3, 1]]),
    "a piece between rows": piece(source=[1, [3, 1]]),
    "a piece twice": piece(source=[15, [3, 1]]),
    "a piece without strides": piece(source=[0, []]),
    "a piece of other axes": piece(shape=[5]),
    "a negative place": piece(source=[-3, [3, 1]]),
}


@pytest.mark.parametrize("made", WRONG.values(), ids=WRONG)
def test_a_map_that_does_not_fit_its_slices_is_refused(made):
    _, slices = slices_of(*MAPS["unevenly"])
    with pytest.raises(CkptError):
        joined(KEY, tensors(slices, flat=False), Rules(info(made), None, "here"), "here")


@pytest.mark.parametrize(
    "said",
    [
        info(piece(scale=0.5)),
        info(piece(source=[0, [1, 10]])),
        {"affine_map": {"version": 2, "params": {}}},
        {"autotp_unsupported_parameter_patterns": {PATTERN: "its blocks are interleaved"}},
    ],
)
def test_what_cannot_be_put_together_is_never_joined_row_by_row(said):
    _, slices = slices_of(*MAPS["unevenly"])
    with pytest.raises(Unsupported):
        joined(KEY, tensors(slices, flat=False), Rules(said, None, "here"), "here")


@pytest.mark.parametrize(
    "said", [{"affine_map": 3}, {"affine_map": {"params": {"*": {}}}}, {"autotp_unsupported_parameter_patterns": 3}]
)
def test_maps_that_are_none_are_damage(said):
    _, slices = slices_of(*MAPS["unevenly"])
    with pytest.raises(Damaged):
        joined(KEY, tensors(slices, flat=False), Rules(said, None, "here"), "here")


def test_columns_are_not_counted_as_rows_of_the_vocabulary():
    shape, axis, ranks = (4, 8), 1, [[(0, 5, [0])], [(5, 3, [1])]]
    whole, slices = slices_of(shape, axis, ranks)
    said = info(entry(shape, axis, ranks), vocabulary_parameter_patterns=[PATTERN], original_vocab_size=3)
    made = joined(KEY, tensors(slices, flat=False), Rules(said, None, "here"), "here")
    assert elements(made, slices).tolist() == whole[:3].tolist()
    said = info(entry(shape, axis, ranks), vocabulary_parameter_patterns=[PATTERN], original_vocab_size=6)
    made = joined(KEY, tensors(slices, flat=False), Rules(said, None, "here"), "here")
    assert elements(made, slices).tolist() == whole.tolist()


def test_slices_without_elements_are_joined():
    shape, axis, ranks = (4, 0), 0, [[(0, 2, [0])], [(2, 2, [1])]]
    _, slices = slices_of(shape, axis, ranks)
    made = joined(KEY, tensors(slices, flat=False), Rules(info(entry(shape, axis, ranks)), None, "here"), "here")
    assert made.shape == shape
