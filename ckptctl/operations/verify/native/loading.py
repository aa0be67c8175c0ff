"""A torch.save file in a native run, by torch's weights-only loader: the one place here where torch reads a pickle."""

from __future__ import annotations

from typing import Any

SAFE_SINCE = (2, 6)
"""Torch's version from which the weights-only loader keeps its word. Source: CVE-2025-32434, mended in torch 2.6.0."""


def load_file(path: str, device: str) -> Any:
    """The file's tree. Of what its pickle names, torch makes plain data, tensors and NumPy arrays, and calls no more.

    RuntimeError with a torch whose weights-only loader could be made to run code. The pickles were scanned before.
    """
    import torch

    version = torch.__version__
    if tuple(int(n) for n in version.split(".")[:2]) < SAFE_SINCE:
        raise RuntimeError(f"torch {version}: below 2.6 a crafted file can run code in its weights-only loader")
    with torch.serialization.safe_globals(_numpy_names()):
        return torch.load(path, map_location=device, weights_only=True)  # noqa: TID251 (scanned, and nothing is called)


def _numpy_names() -> list[Any]:
    """What random states of NumPy need beside tensors; Transformers and Accelerate allow the same."""
    import numpy

    core = numpy._core if hasattr(numpy, "_core") else numpy.core  # noqa: SLF001
    return [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]  # noqa: SLF001
