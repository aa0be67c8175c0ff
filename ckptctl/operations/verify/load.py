"""Streams a checkpoint's tensors into torch's, chunk by chunk, and takes their digests on the way.

Host memory is that of the chunks: a tensor never stands in it whole. To a GPU they go through pinned memory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckptctl.core.errors import Damaged
from ckptctl.operations.tensors import TensorReader, typed
from ckptctl.operations.verify.device import torch_dtype
from ckptctl.operations.verify.needs import torch_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.core.tensor import Key
    from ckptctl.operations.verify.device import Device

STAGING_NBYTES = 64 << 20
"""A staging buffer at most; two of them alternate on a GPU."""


@dataclass
class Loader:
    """Reads one checkpoint for one device. Use as a context. memory_nbytes bounds what it holds in host memory."""

    checkpoint: Checkpoint
    device: Device
    memory_nbytes: int
    seconds: float = 0.0
    nbytes: int = 0
    _reader: Any = field(init=False, repr=False)
    _staging: list[Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        torch = torch_module()
        self._reader = TensorReader(self.checkpoint, self.memory_nbytes // 2)
        each = max(1 << 20, min(STAGING_NBYTES, self.memory_nbytes // 8)) // 64 * 64
        pin = self.device.is_cuda
        self._staging = [torch.empty(each, dtype=torch.uint8, pin_memory=pin) for _ in range(2 if pin else 1)]
        self._used: list[Any] = [None] * len(self._staging)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.close()
        self._staging = []

    def fill(self, key: Key, target: Any, forms: Sequence[str] = ()) -> dict[str, str]:
        """The tensor's elements into target, in target's type. Returns the digest of its elements in each of forms.

        forms are names of types: the tensor's own takes its bytes as they are, another its elements after a cast
        (round to nearest even, as torch does). Damaged where target has another shape.
        """
        torch = torch_module()
        tensor = self.checkpoint.tensors[key]
        if target is not None and tuple(target.shape) != tensor.shape:
            raise Damaged(
                f"{key.name} ({key.kind}) is {tensor.shape}, and the model's is {tuple(target.shape)}",
                where=self.checkpoint.root,
                fix="check the config (--model-config)",
                code="shape-mismatch",
            )
        hashers = {form: xxhash.xxh3_128() for form in forms}
        began = time.perf_counter()
        flat = None if target is None else target.detach().view(-1)
        kind = torch_dtype(tensor.dtype.name, key.name) if flat is not None else None
        size = self._staging[0].numel() // tensor.dtype.itemsize * tensor.dtype.itemsize
        for number, (start, data) in enumerate(self._reader.chunks(key, size)):
            for form, hasher in hashers.items():
                hasher.update(_in_form(data, tensor, form))
            if flat is None:
                continue
            slot = number % len(self._staging)
            if self._used[slot] is not None:
                self._used[slot].synchronize()
            staged = self._staging[slot][: data.nbytes]
            staged.numpy()[:] = data
            stop = start + data.nbytes // tensor.dtype.itemsize
            flat[start:stop].copy_(staged.view(kind), non_blocking=self.device.is_cuda)
            if self.device.is_cuda:
                self._used[slot] = torch.cuda.Event()
                self._used[slot].record(torch.cuda.current_stream(self.device.name))
        self.device.synchronize()
        self.seconds += time.perf_counter() - began
        self.nbytes += tensor.nbytes
        return {form: hasher.hexdigest() for form, hasher in hashers.items()}

    def made(self, key: Key, dtype: str, forms: Sequence[str] = ()) -> tuple[Any, dict[str, str]]:
        """A new tensor of that type (torch's name) on the device, filled, and its digests."""
        torch = torch_module()
        tensor = self.checkpoint.tensors[key]
        target = torch.empty(tensor.shape, dtype=torch_dtype(dtype), device=self.device.name)
        return target, self.fill(key, target, forms)


def _in_form(data: Any, tensor: Any, form: str) -> Any:
    from ckptctl.core.dtype import BY_NAME

    if form == tensor.dtype.name:
        return data
    with np.errstate(invalid="ignore", over="ignore"):
        return typed(data, tensor).astype(BY_NAME[form].numpy).view(np.uint8)


def digest_of(value: Any, chunk_nbytes: int = STAGING_NBYTES) -> str:
    """The digest of a torch tensor's bytes, row-major, read from its device chunk by chunk."""
    torch = torch_module()
    hasher = xxhash.xxh3_128()
    flat = value.detach().contiguous().view(-1)
    step = max(1, chunk_nbytes // value.element_size())
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].view(torch.uint8).cpu()
        hasher.update(part.numpy())
    return hasher.hexdigest()
