"""How much memory a step takes: on a GPU what its allocator says, on a CPU the bytes of tensors that are alive.

A CPU has no allocator that tells, and the process's size says little of a small model. Every tensor that an operation
makes is seen by a
dispatch mode; its storage counts from then until it is freed. That is the same for every run of the same step,
whatever the
machine. Scratch memory inside a kernel is not seen.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Gauge:
    """Bytes above those at the start: alive now, and the most there were."""

    now_nbytes: int = 0
    peak_nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """So many more bytes are alive; fewer, where the number is negative."""
        self.now_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.now_nbytes)

    def read(self) -> int:
        """Bytes alive now."""
        return self.now_nbytes


@dataclass(slots=True)
class _CudaGauge(Gauge):
    """The same, by the allocator of a GPU."""

    device: Any = None
    start_nbytes: int = 0

    def read(self) -> int:
        import torch

        torch.cuda.synchronize(self.device)
        self.now_nbytes = int(torch.cuda.memory_allocated(self.device)) - self.start_nbytes
        self.peak_nbytes = int(torch.cuda.max_memory_allocated(self.device)) - self.start_nbytes
        return self.now_nbytes


@contextmanager
def gauge(device: Any) -> Iterator[Gauge]:
    """Measures what is done inside, on one device; the peak stands when it is left."""
    with _on_cuda(device) if device.type == "cuda" else _on_cpu() as found:
        yield found


@contextmanager
def _on_cuda(device: Any) -> Iterator[Gauge]:
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = _CudaGauge(device=device, start_nbytes=int(torch.cuda.memory_allocated(device)))
    yield found
    found.read()


@contextmanager
def _on_cpu() -> Iterator[Gauge]:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = Gauge()
    known: dict[int, Any] = {}

    class Seen(TorchDispatchMode):  # type: ignore[misc]
        """Counts each storage once, when the first tensor on it comes out of an operation."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            inputs = None
            for tensor in tree_leaves(out):
                if not hasattr(tensor, "untyped_storage"):
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata in known:  # noqa: SLF001 (its identity; Python objects of one storage come and go)
                    continue
                if inputs is None:
                    given = (t.untyped_storage() for t in tree_leaves((args, kwargs)) if hasattr(t, "dtype"))
                    inputs = {s._cdata for s in given}  # noqa: SLF001
                if storage._cdata not in inputs:  # noqa: SLF001 (a view of, or a write into, what was there before)
                    _count(found, known, storage)
            return out

    with Seen():
        yield found


def _count(found: Gauge, known: dict[int, Any], storage: Any) -> None:
    identity, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001
    if not nbytes:
        return

    def freed(_: object) -> None:
        known.pop(identity, None)
        found.add(-nbytes)

    known[identity] = weakref.ref(storage, freed)
    found.add(nbytes)
