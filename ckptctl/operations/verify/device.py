"""Where a step is computed: the device, its settings for equal bits, and what is measured on it."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported, Usage
from ckptctl.operations.verify.needs import torch_module

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
"""What --dtype takes, and torch's name of it."""


def dtype_named(word: str) -> str:
    """--dtype as torch names it; "" for auto. Usage for another word."""
    if word in ("", "auto", "source"):
        return ""
    if word not in DTYPES:
        raise Usage(f"--dtype {word}: there is no such type to compute in", fix="auto, fp32, bf16 or fp16")
    return DTYPES[word]


@dataclass(frozen=True, slots=True)
class Device:
    """A device of torch, by its name (cpu, cuda:0), and what to call it in a report."""

    name: str
    called: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU of torch's cuda backend."""
        return self.name.startswith("cuda")

    def synchronize(self) -> None:
        """Wait until everything that was started has ended."""
        if self.is_cuda:
            torch_module().cuda.synchronize(self.name)

    def start_measuring(self) -> None:
        """Peak memory counts from here."""
        if self.is_cuda:
            torch_module().cuda.reset_peak_memory_stats(self.name)

    def peak_nbytes(self) -> int | None:
        """Most device memory held since start_measuring; None on a CPU, where it is the process's own."""
        return int(torch_module().cuda.max_memory_allocated(self.name)) if self.is_cuda else None

    def free_nbytes(self) -> int | None:
        """Free device memory now; None on a CPU."""
        return int(torch_module().cuda.mem_get_info(self.name)[0]) if self.is_cuda else None


def device_named(word: str) -> Device:
    """--device: auto, cpu, cuda or cuda:N. Usage for another word, Unsupported where no such GPU is there."""
    kind, _, number = word.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise Usage(f"--device {word}: there is no such device", fix="auto, cpu, cuda or cuda:N")
    torch = torch_module()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return Device("cpu", f"cpu, {torch.get_num_threads()} threads")
    index = int(number or 0)
    if index >= count:
        raise Unsupported(
            f"--device {word}: torch sees {count} GPUs here",
            fix="--device cpu computes the same on the CPU",
            code="no-device",
        )
    return Device(f"cuda:{index}", str(torch.cuda.get_device_name(index)))


@contextmanager
def deterministic(device: Device) -> Iterator[None]:
    """Settings under which one step has the same bits whenever it is computed on one device; put back at the end.

    Source: torch 2.13.0, docs/source/notes/randomness.rst.
    """
    torch = torch_module()
    if device.is_cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
    kept = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.random.get_rng_state(),
    )
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        torch.set_float32_matmul_precision(kept[2])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = kept[3], kept[4]
        torch.random.set_rng_state(kept[5])


def torch_dtype(name: str, what: str = "") -> Any:
    """Torch's type of a name of ours. Unsupported where torch has none."""
    found = getattr(torch_module(), name, None)
    if found is None or not isinstance(found, torch_module().dtype):
        raise Unsupported(f"torch has no type {name}", where=what)
    return found


class Clock:
    """Seconds since it was made, with the device's work waited for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds until now."""
        self._device.synchronize()
        return time.perf_counter() - self._start
