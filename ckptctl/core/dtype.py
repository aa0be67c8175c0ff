"""Element types, by bits. No conversion between them is here, and no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    name is torch's, without `torch.`; bits are those of one element; safetensors and storage are its names in a
    safetensors
    header and as a class in a torch pickle ("" where there is none: torch then writes an untyped storage and the
    dtype).
    unit counts the elements that share a block and cannot be cut apart.
    """

    name: str
    bits: int
    safetensors: str = ""
    storage: str = ""
    unit: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element. ValueError for types of less than a byte."""
        if self.bits % 8:
            raise ValueError(f"{self.name} has {self.bits} bits, not whole bytes")
        return self.bits // 8

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a packed tensor of that shape. ValueError where they are not whole."""
        bits = math.prod(shape) * self.bits
        if bits % 8:
            raise ValueError(f"{shape} of {self.name} is {bits} bits, not whole bytes")
        return bits // 8

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy (or ml_dtypes) type with the same bits, little-endian; unsigned bytes where there is none."""
        if self.name in _ML_DTYPES:
            import ml_dtypes

            dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[self.name]))
            return dtype
        if self.name in _NUMPY:
            return np.dtype(_NUMPY[self.name])
        return np.dtype(np.uint8)

    @property
    def is_float(self) -> bool:
        """Whether a cast between this and another float is meaningful."""
        return self.name in ("float64", "float32", "float16", "bfloat16")


def packed(dtype: DType) -> DType:
    """The same type counted in bytes, for elements smaller than a byte: such tensors are moved as whole bytes."""
    return dtype if dtype.bits % 8 == 0 else DType(dtype.name, 8, dtype.safetensors, dtype.storage)


_NUMPY = {
    "bool": "?", "uint8": "u1", "int8": "i1", "int16": "<i2", "uint16": "<u2", "float16": "<f2", "int32": "<i4",
    "uint32": "<u4",
    "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
_ML_DTYPES = {
    "bfloat16": "bfloat16", "float8_e5m2": "float8_e5m2", "float8_e4m3fn": "float8_e4m3fn",
    "float8_e8m0fnu": "float8_e8m0fnu",
    "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip

# Names and bits: safetensors 0.8.0, tensor.rs, enum Dtype; storage classes: torch 2.13.0, torch/storage.py.
DTYPES: tuple[DType, ...] = (
    DType("bool", 8, "BOOL", "BoolStorage"),
    DType("float4_e2m1fn_x2", 4, "F4"),
    DType("float6_e2m3", 6, "F6_E2M3"),
    DType("float6_e3m2", 6, "F6_E3M2"),
    DType("uint8", 8, "U8", "ByteStorage"),
    DType("int8", 8, "I8", "CharStorage"),
    DType("float8_e5m2", 8, "F8_E5M2"),
    DType("float8_e4m3fn", 8, "F8_E4M3"),
    DType("float8_e8m0fnu", 8, "F8_E8M0"),
    DType("float8_e4m3fnuz", 8, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 8, "F8_E5M2FNUZ"),
    DType("int16", 16, "I16", "ShortStorage"),
    DType("uint16", 16, "U16"),
    DType("float16", 16, "F16", "HalfStorage"),
    DType("bfloat16", 16, "BF16", "BFloat16Storage"),
    DType("int32", 32, "I32", "IntStorage"),
    DType("uint32", 32, "U32"),
    DType("float32", 32, "F32", "FloatStorage"),
    DType("complex64", 64, "C64", "ComplexFloatStorage"),
    DType("float64", 64, "F64", "DoubleStorage"),
    DType("int64", 64, "I64", "LongStorage"),
    DType("uint64", 64, "U64"),
    DType("complex128", 128, "", "ComplexDoubleStorage"),
)
BY_NAME: dict[str, DType] = {d.name: d for d in DTYPES}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in DTYPES if d.storage}
