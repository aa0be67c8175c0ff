"""An Accelerate folder loaded by `accelerator.load_state`, with FSDP over the ranks that saved it, or in one process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .rank import Session, follow, layers_of, model_of, optimizer_of, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

WRAPPER = "_fsdp_wrapped_module."


class Accelerated(Session):
    """An Accelerator with a prepared model and optimizer. Source: Accelerate 1.14, accelerator.py, load_state."""

    framework = "Accelerate"

    def __init__(self, job: dict[str, Any]) -> None:
        import accelerate

        self.version = accelerate.__version__
        self.plan = job["accelerate"]
        net = model_of(job)
        names = [n for n, _ in net.named_parameters()]
        self.accelerator = self._sharded(job, net) if self.plan["fsdp"] else accelerate.Accelerator(cpu=job["device"] == "cpu")
        if self.plan["fsdp"] == 1:
            self._prepare_fsdp1(job, net)
        else:
            optimizer = optimizer_of(net.named_parameters(), job)
            self.net, self.wrapped = self.accelerator.prepare(net, optimizer)
        self.accelerator.load_state(job["path"], **({"strict": False} if job["ties"] else {}))
        self.optimizer = self.wrapped.optimizer
        self.names = names

    def _sharded(self, job: dict[str, Any], net: Any) -> Any:
        """An Accelerator with FSDP. It turns FSDP on only where it sees an accelerator: on a CPU its state is told."""
        import torch
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION=str(self.plan["fsdp"]))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=self.plan["fsdp"],
            reshard_after_forward=True if self.plan["fsdp"] == 2 else "FULL_SHARD",
            state_dict_type="FULL_STATE_DICT" if self.plan["full"] else "SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(layers_of(net)[0]).__name__],
            cpu_ram_efficient_loading=False,
            use_orig_params=True,
        )
        accelerator = Accelerator(cpu=job["device"] == "cpu", fsdp_plugin=plugin)
        if job["device"] == "cpu":
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):  # noqa: SLF001
                shared.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
            AcceleratorState._shared_state["fsdp_plugin"] = plugin  # noqa: SLF001
        return accelerator

    def _prepare_fsdp1(self, job: dict[str, Any], net: Any) -> None:
        """FSDP1 wraps first: the optimizer is over what the wrapped model has."""
        self.net = self.accelerator.prepare(net)
        named = [(n.replace(WRAPPER, ""), p) for n, p in self.net.named_parameters()]
        self.wrapped = self.accelerator.prepare(optimizer_of(named, job))

    def backward(self, loss: Any) -> None:
        """The Accelerator's."""
        self.accelerator.backward(loss)

    def update(self) -> None:
        """The prepared optimizer's step."""
        self.wrapped.step()
        self.wrapped.zero_grad()

    def clip(self, largest: float) -> None:
        """The Accelerator's."""
        self.accelerator.clip_grad_norm_(self.net.parameters(), largest)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """Whole gradients. FSDP1 keeps a rank's part of each, flat: they are joined, without a shape."""
        for name, parameter in self.net.named_parameters():
            if self.plan["fsdp"] == 1:
                joined = _joined(parameter.grad if parameter.grad is not None else parameter.detach()[:0])
                if joined.numel():
                    yield name.replace(WRAPPER, ""), joined
            elif parameter.grad is not None:
                yield name, whole(parameter.grad)

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """Weights and moments, each whole."""
        if self.plan["fsdp"] != 1:
            yield from super().state()
            return
        for name, parameter in self.net.named_parameters():
            own = name.replace(WRAPPER, "")
            yield own, "weight", _joined(parameter.detach())
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if hasattr(value, "ndim") and kind != "step":
                    yield own, kind, _joined(value.detach())

    def updates(self) -> dict[str, float]:
        """By name. Under FSDP1 a rank without a part of a parameter has no count of it."""
        return {n.replace(WRAPPER, ""): s for n, s in super().updates().items()}


def _joined(part: Any) -> Any:
    """The parts of all ranks, one after the other, flat; a collective."""
    import torch
    import torch.distributed as dist

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.reshape(-1).cpu())
    return torch.cat(parts)


if __name__ == "__main__":
    follow(Accelerated)
