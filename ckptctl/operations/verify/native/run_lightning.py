"""A Lightning checkpoint taken up by `Trainer.fit(ckpt_path=...)`: a file in one process, a folder over its ranks."""

from __future__ import annotations

import time
from typing import Any

from .rank import Session, Story, layers_of, model_of, optimizer_of, run, set_rates, tensors


class Held(Session):
    """Lightning's model and optimizer, seen from its hooks."""

    framework = "Lightning"


def steps(job: dict[str, Any], story: Story) -> None:
    """Lightning's own loop, from where the checkpoint stands, for as many steps as there are batches."""
    import lightning
    import torch

    plan = job["lightning"]
    session = Held()
    session.version = lightning.__version__
    inner = model_of(job)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """The model under the name that the checkpoint has it."""

        def __init__(self) -> None:
            super().__init__()
            if plan["module"]:
                setattr(self, plan["module"], inner)
            else:
                for name, child in inner.named_children():
                    setattr(self, name, child)
            session.net = inner

        def configure_model(self) -> None:
            if plan["sharded"] and not any(hasattr(p, "full_tensor") for p in inner.parameters()):
                from torch.distributed.fsdp import fully_shard

                mesh = self.device_mesh["data_parallel"]
                for layer in layers_of(inner):
                    fully_shard(layer, mesh=mesh)
                fully_shard(inner, mesh=mesh)

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(inner.named_parameters(), job)
            session.optimizer = optimizer
            flat = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _Deaf(flat), "interval": "step"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            """Nothing: the rates of each step come with the job."""

        def training_step(self, *_: Any) -> Any:
            number = story.number
            if not number:
                session.optimizer = _bare(self.trainer.optimizers[0])
                story.loaded(session)
            torch.manual_seed(job["seed"] + number)
            set_rates(session.groups(), job, number)
            out = inner(**tensors(job["batches"][number], job), use_cache=False)
            story.forward_done(float(out.loss.detach()), out.logits)
            return out.loss

        def on_before_optimizer_step(self, *_: Any) -> None:
            story.backward_done(session)

    class After(lightning.Callback):  # type: ignore[misc]
        """The state after the last step."""

        def on_train_batch_end(self, *_: Any) -> None:
            story.step_done(session)

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
        """As many as are asked for: the batch of a step is the job's."""

        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> int:
            return index

    strategy: Any = "auto"
    if plan["sharded"]:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(
            data_parallel_size=job["world"], tensor_parallel_size=1, save_distributed_checkpoint=True
        )
    trainer = lightning.Trainer(
        accelerator="cpu" if job["device"] == "cpu" else "gpu", devices=job["world"], strategy=strategy,
        max_steps=plan["step"] + len(job["batches"]), logger=False, enable_progress_bar=False, barebones=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[After()], use_distributed_sampler=False,
        gradient_clip_val=job["clip"] or None,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
    start = time.perf_counter()
    trainer.fit(Module(), loader, ckpt_path=job["path"])
    story.seconds = time.perf_counter() - start
    if not story.done:
        raise RuntimeError(f"Lightning made {story.number} steps of {len(job['batches'])}")


def _bare(optimizer: Any) -> Any:
    """The optimizer inside Lightning's."""
    return getattr(optimizer, "_optimizer", optimizer)


class _Deaf:
    """A scheduler that takes any state: which curve the run's had stands in its own program."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.optimizer = inner.optimizer

    def step(self, *_: Any) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Whatever it is."""

    def get_last_lr(self) -> list[float]:
        """The rates as they are."""
        return [float(g["lr"]) for g in self.optimizer.param_groups]


if __name__ == "__main__":
    run(steps)
