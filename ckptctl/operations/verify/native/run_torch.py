"""A torch.save file loaded by torch's own loader and load_state_dict, in one process."""

from __future__ import annotations

from typing import Any

from .loading import load_file
from .rank import Session, follow, model_of, optimizer_of


class Plain(Session):
    """Plain torch, one process."""

    framework = "torch.load and load_state_dict"

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        self.version = torch.__version__
        self.net = model_of(job)
        self.optimizer = optimizer_of(self.net.named_parameters(), job)
        saved = load_file(job["path"], job["device"])
        weights = saved
        for word in job["torch"]["model"]:
            weights = weights[word]
        prefix = job["torch"]["prefix"]
        weights = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        tied = self.net.load_state_dict(weights, strict=False)
        lacking = [n for n in tied.missing_keys if n not in job["ties"]]
        if lacking or tied.unexpected_keys:
            raise RuntimeError(f"load_state_dict: missing {lacking[:4]}, unexpected {list(tied.unexpected_keys)[:4]}")
        if self.optimizer is not None:
            self._load_optimizer(saved, job)

    def _load_optimizer(self, saved: Any, job: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states

        held = saved
        for word in job["torch"]["optimizer"]:
            held = held[word]
        for entries in held["state"].values():  # one tensor that several parameters share would count for each
            entries.update({k: v.clone() for k, v in entries.items() if hasattr(v, "clone")})
        if held["state"] and isinstance(next(iter(held["state"])), str):
            states.set_optimizer_state_dict(self.net, self.optimizer, optim_state_dict=held)
        else:
            self.optimizer.load_state_dict(held)


if __name__ == "__main__":
    follow(Plain)
