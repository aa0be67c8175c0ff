"""A Trainer's folder taken up by `Trainer.train(resume_from_checkpoint=...)`, in one process."""

from __future__ import annotations

import time
from typing import Any

from .rank import Session, Story, model_of, optimizer_of, run, set_rates


class Held(Session):
    """The Trainer's model and optimizer, seen from its callbacks."""

    framework = "Transformers' Trainer"

    def __init__(self, net: Any, optimizer: Any, version: str) -> None:
        self.net, self.optimizer, self.version = net, optimizer, version


class Rows:
    """Every step's rows, one after the other; as many in all as the run has steps, for an epoch without an end."""

    def __init__(self, job: dict[str, Any], skipped: int) -> None:
        self.batches, self.skipped = job["batches"], skipped
        self.rows = len(job["batches"][0]["input_ids"])

    def __len__(self) -> int:
        return (self.skipped + len(self.batches)) * self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        batch = self.batches[index // self.rows % len(self.batches)]
        return {k: torch.tensor(v[index % self.rows]) for k, v in batch.items()}


def steps(job: dict[str, Any], story: Story) -> None:
    """The Trainer's own loop, from where the checkpoint stands, for as many steps as there are batches."""
    import torch
    import transformers

    plan = job["trainer"]
    net = model_of(job)
    optimizer = optimizer_of(net.named_parameters(), job)
    rows = Rows(job, plan["step"])
    held: dict[str, Held] = {}

    class Told(transformers.Trainer):  # type: ignore[misc]
        """The Trainer, with the rows in their order, and what happens told."""

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            """A flat one: which curve the run had stands in no tensor. The rates of each step come with the job."""
            self.lr_scheduler = transformers.get_constant_schedule(optimizer or self.optimizer)
            return self.lr_scheduler

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            torch.manual_seed(job["seed"] + story.number)
            out = model(**inputs, use_cache=False)
            story.forward_done(float(out.loss.detach()), out.logits)
            return out.loss

        def training_step(self, *args: Any, **named: Any) -> Any:
            if "session" not in held:
                inner = getattr(self.optimizer, "optimizer", self.optimizer)
                held["session"] = Held(net, inner, transformers.__version__)
                story.loaded(held["session"])
            set_rates(held["session"].groups(), job, story.number)
            loss = super().training_step(*args, **named)
            story.backward_done(held["session"])
            return loss

    class AfterStep(transformers.TrainerCallback):  # type: ignore[misc]
        """The state after the last step."""

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            story.step_done(held["session"])

    arguments = transformers.TrainingArguments(
        output_dir="out", use_cpu=job["device"] == "cpu", per_device_train_batch_size=rows.rows,
        max_steps=plan["step"] + len(job["batches"]), save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, max_grad_norm=job["clip"], seed=job["seed"], ignore_data_skip=True, full_determinism=False,
        remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Told(model=net, args=arguments, train_dataset=rows, optimizers=(optimizer, None), callbacks=[AfterStep()])
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=job["path"])
    story.seconds = time.perf_counter() - start
    if not story.done:
        raise RuntimeError(f"the Trainer made {story.number} steps of {len(job['batches'])}")


if __name__ == "__main__":
    run(steps)
