"""A torch.distributed checkpoint (DCP) loaded into FSDP2 by torch's own loader, over as many ranks as saved it."""

from __future__ import annotations

from typing import Any

from .loading import load_file
from .rank import Session, follow, layers_of, model_of, optimizer_of, start_group


class Fsdp(Session):
    """FSDP2: a fully_shard for each decoder layer and one for the rest. Source: torch 2.13.0, distributed/fsdp."""

    framework = "FSDP2 and torch.distributed.checkpoint"

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        start_group(job)
        self.version = torch.__version__
        mesh = init_device_mesh(job["device"], (job["world"],), mesh_dim_names=("dp",))
        self.net = model_of(job)
        for layer in layers_of(self.net):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimizer = optimizer_of(self.net.named_parameters(), job)
        if job["files"]:
            self._load_files(job)
        else:
            self._load_dcp(job)

    def _load_files(self, job: dict[str, Any]) -> None:
        """A file a rank, with the state dicts as torch.save pickled them (verl's folders).

        DTensor is among what torch's weights-only loader makes, once it is imported.
        """
        import torch

        files = job["files"][torch.distributed.get_rank()]
        self.net.load_state_dict(load_file(files["model"], job["device"]))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(load_file(files["optimizer"], job["device"]))

    def _load_dcp(self, job: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as states

        plan = job["dcp"]
        options = states.StateDictOptions(flatten_optimizer_state_dict=plan["flat"])
        if self.optimizer is None:
            model = states.get_model_state_dict(self.net)
            dcp.load(_nested({}, plan["model"], model), checkpoint_id=job["path"])
            states.set_model_state_dict(self.net, model)
            return
        model, optim = states.get_state_dict(self.net, self.optimizer, options=options)
        kept = optim if plan["groups"] else {"state": optim["state"]}
        for folder, parts in plan["folders"].items():
            wanted: dict[str, Any] = {}
            if "model" in parts:
                _nested(wanted, plan["model"], model)
            if "optim" in parts:
                _nested(wanted, plan["optim"], kept)
            dcp.load(wanted, checkpoint_id=f"{job['path']}/{folder}" if folder else job["path"])
        states.set_state_dict(self.net, self.optimizer, model_state_dict=model, optim_state_dict=optim, options=options)


def _nested(into: dict[str, Any], path: list[str], value: dict[str, Any]) -> dict[str, Any]:
    """Put a state dict where the checkpoint has it."""
    if not path:
        into.update(value)
        return into
    at = into
    for word in path[:-1]:
        at = at.setdefault(word, {})
    at[path[-1]] = value
    return into


if __name__ == "__main__":
    follow(Fsdp)
