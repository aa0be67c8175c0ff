"""An Accelerate folder loaded by `accelerator.load_state`: FSDP over the ranks that saved it, or one process."""

from __future__ import annotations

import os
from typing import Any

from .rank import Session, follow, layers_of, model_of, optimizer_of


class Accelerated(Session):
    """An Accelerator with a prepared model and optimizer. Source: Accelerate 1.14, accelerator.py, load_state."""

    framework = "Accelerate"

    def __init__(self, job: dict[str, Any]) -> None:
        import accelerate

        self.version = accelerate.__version__
        self.plan = job["accelerate"]
        net = model_of(job)
        self.accelerator = (
            self._sharded(job, net) if self.plan["fsdp"] else accelerate.Accelerator(cpu=job["device"] == "cpu")
        )
        optimizer = optimizer_of(net.named_parameters(), job)
        self.net, self.wrapped = self.accelerator.prepare(net, optimizer)
        self.accelerator.load_state(job["path"], **({"strict": False} if job["ties"] else {}))
        self.optimizer = self.wrapped.optimizer

    def _sharded(self, job: dict[str, Any], net: Any) -> Any:
        """An Accelerator with FSDP. It turns FSDP on only where it sees an accelerator: on a CPU its state is told."""
        import torch
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION=str(self.plan["fsdp"]))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=self.plan["fsdp"],
            reshard_after_forward=True,
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


if __name__ == "__main__":
    follow(Accelerated)
