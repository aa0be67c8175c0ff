"""Element types have the sizes that NumPy, ml_dtypes and the safetensors library know."""

import json
import struct

import numpy as np
import pytest
import safetensors

from ckptctl.core.dtype import BY_NAME, BY_SAFETENSORS, BY_STORAGE, DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_whole_byte_types_have_the_size_of_their_numpy_type(dtype):
    if dtype.bits % 8 == 0:
        assert dtype.numpy.itemsize * 8 == dtype.bits
        assert dtype.numpy.byteorder != ">"
    else:
        assert dtype.numpy == np.dtype(np.uint8)


def test_names_are_unique():
    for table, name in ((BY_NAME, "name"), (BY_SAFETENSORS, "safetensors"), (BY_STORAGE, "storage")):
        assert len(table) == sum(bool(getattr(d, name)) for d in DTYPES)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.safetensors], ids=lambda d: d.name)
def test_the_safetensors_library_takes_the_name_with_that_size(dtype, tmp_path):
    nbytes = dtype.nbytes((8,))
    header = json.dumps({"t": {"dtype": dtype.safetensors, "shape": [8], "data_offsets": [0, nbytes]}})
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(nbytes))
    with safetensors.safe_open(path, "np") as file:
        found = file.get_slice("t")
        assert (found.get_dtype(), found.get_shape()) == (dtype.safetensors, [8])


def test_only_the_four_floats_are_cast():
    assert {d.name for d in DTYPES if d.is_float} == {"float64", "float32", "float16", "bfloat16"}
