"""Tensor-parallel slices of DeepSpeed joined, against NumPy; and what a file says wrongly about them is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import CkptError, Damaged
from ckptctl.core.tensor import Key, PieceTable, Tensor
from ckptctl.formats.deepspeed.slices import Rules, joined

KEY = Key("layer.qkv.weight")


def sub_params(shape, axis, **more):
    entry = {"patterns": [r".*qkv\.weight"], "shape": shape, "partition_dim": axis}
    return {"universal_checkpoint_version": 0.2, "parameter_with_sub_params": [entry], **more}


def widths(*parts):
    return {"universal_checkpoint_version": 0.4, "sub_param_shard_widths": {r".*qkv\.weight": [list(p) for p in parts]}}


EVEN = {
    "sizes": (sub_params(((4, 2, 2), 3), 0), ((2, 2), (1, 1), (1, 1)), 0),
    "sizes of columns": (sub_params((3, (4, 2)), 1), ((2, 2), (1, 1)), 1),
    "a count of equal parts": (sub_params((3, -1), 0), ((2, 2), (2, 2), (2, 2)), 0),
    "one part's size": (sub_params((12, 3), 0), ((6, 6),), 0),
    "widths of each rank": (sub_params(((4, 3), 3), 0, **widths((2, 2), (2, 1))), ((2, 2), (2, 1)), 0),
    "a rank without a part": (sub_params(((5, 2), 3), 0, **widths((3, 2), (2, 0))), ((3, 2), (2, 0)), 0),
    "two halves": ({"parameter_with_2_sub_params_cat_dim_0": [".*qkv"]}, ((3, 3), (3, 3)), 0),
    "two halves of uneven slices": ({"parameter_with_2_sub_params_cat_dim_0": [".*qkv"]}, ((3, 1), (3, 1)), 0),
    "rows": ({"tp_replicated_parameter_patterns": ["norm"]}, ((4, 4),), 0),
    "columns": ({"parameter_with_row_parallelism_patterns": [".*qkv"]}, ((4, 4),), 1),
}


def cut(whole, parts, axis):
    """Each rank's slice: its share of every part, side by side."""
    stops = np.cumsum([sum(p) for p in parts])[:-1]
    shares = [
        np.split(part, np.cumsum(p)[:-1], axis) for part, p in zip(np.split(whole, stops, axis), parts, strict=True)
    ]
    return [np.concatenate([s[rank] for s in shares], axis) for rank in range(len(parts[0]))]


def tensors(slices, *, flat):
    dtype = BY_NAME["float32"]
    return [
        Tensor(KEY, dtype, s.shape, (PieceTable.whole((s.size,) if flat else s.shape, 4, rank, 0),))
        for rank, s in enumerate(slices)
    ]


def elements(tensor, slices):
    """The tensor's elements, by its pieces; -1 where no piece is."""
    out = np.full(tensor.shape, -1, np.float32)
    for piece in (p for table in tensor.pieces for p in table):
        data = np.ascontiguousarray(slices[piece.source]).ravel()[piece.start // 4 :]
        box = np.lib.stride_tricks.as_strided(data, piece.size, piece.strides)
        seen = out.reshape(piece.view)  # a whole parameter's copies keep their flat view
        seen[tuple(slice(a, a + n) for a, n in zip(piece.lo, piece.size, strict=True))] = box
    return out


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("info", "parts", "axis"), EVEN.values(), ids=EVEN)
def test_slices_make_the_tensor_that_they_were_cut_from(info, parts, axis, flat):
    total = sum(map(sum, parts))
    shape = (total, 3) if axis == 0 else (3, total)
    whole = np.arange(total * 3, dtype=np.float32).reshape(shape)
    slices = cut(whole, parts, axis)
    made = joined(KEY, tensors(slices, flat=flat), Rules(info, None, "here"), "here")
    assert made.shape == shape
    assert elements(made, slices).tolist() == whole.tolist()


WRONG = {
    "a pattern that is none": {"parameter_with_row_parallelism_patterns": ["*qkv"]},
    "patterns that are no list": {"parameter_with_row_parallelism_patterns": 7},
    "an axis that is none": sub_params(((4, 4), 3), 2),
    "no shape": sub_params(None, 0),
    "sizes that are none": sub_params(((4, "4"), 3), 0),
    "sizes of another tensor": sub_params(((4, 2), 3), 0),
    "sizes that ranks do not divide": sub_params(((5, 3), 3), 0),
    "a count that does not divide": sub_params((3, -1), 0),
    "no widths where there should be": sub_params(((4, 4), 3), 0, universal_checkpoint_version=0.4),
    "widths of other ranks": sub_params(((4, 4), 3), 0, **widths((2, 1, 1), (4, 0, 0))),
    "widths of other slices": sub_params(((4, 4), 3), 0, **widths((3, 1), (3, 1))),
    "a vocabulary of no size": {"vocabulary_parameter_patterns": [".*qkv"]},
}


@pytest.mark.parametrize("info", WRONG.values(), ids=WRONG)
def test_what_does_not_say_how_slices_are_joined_is_refused(info):
    slices = cut(np.zeros((8, 3), np.float32), ((4, 4),), 0)
    with pytest.raises(CkptError):
        joined(KEY, tensors(slices, flat=False), Rules(info, None, "here"), "here")


def test_slices_without_their_part_of_an_odd_half_are_refused():
    slices = [np.zeros((3, 2), np.float32), np.zeros((5, 2), np.float32)]
    info = {"parameter_with_2_sub_params_cat_dim_0": [".*qkv"]}
    with pytest.raises(Damaged, match="halves"):
        joined(KEY, tensors(slices, flat=False), Rules(info, None, "here"), "here")


def test_rows_that_pad_the_vocabulary_go():
    info = {"vocabulary_parameter_patterns": [".*qkv"], "original_vocab_size": 5}
    whole = np.arange(24, dtype=np.float32).reshape(8, 3)
    slices = cut(whole, ((4, 4),), 0)
    made = joined(KEY, tensors(slices, flat=False), Rules(info, None, "here"), "here")
    assert elements(made, slices).tolist() == whole[:5].tolist()
