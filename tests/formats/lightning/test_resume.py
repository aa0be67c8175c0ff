"""Real Lightning goes on from what is written, with the losses of the run that was not interrupted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.checkpoints import run_torch
from tests.support.commands import document, good

if TYPE_CHECKING:
    from pathlib import Path

RUN = """
import json
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.filterwarnings("ignore")
STEPS, AT = 6, 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, 1, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = Net(), []

    def configure_optimizers(self):
        groups = [
            {"params": [p for p in self.net.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.net.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        opt = torch.optim.AdamW(groups, lr=0.01)
        plan = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plan, "interval": "step"}}

    def training_step(self, batch, index):
        loss = (self.net(batch[:, :5]) - batch[:, 5:]).square().mean()
        self.losses.append(loss.item())
        return loss


class Rows(torch.utils.data.Dataset):
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        return torch.randn(6, generator=torch.Generator().manual_seed(self.first + i))


def trainer(folder, *callbacks):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        default_root_dir=folder,
    )


def save(folder):
    module = Module()
    keeper = ModelCheckpoint(dirpath=folder, every_n_train_steps=AT, save_top_k=-1, filename="{step}")
    trainer(folder, keeper).fit(module, torch.utils.data.DataLoader(Rows(0), batch_size=1))
    return module.losses[AT:]


def go(file):
    module = Module()
    run = trainer(file.parent)
    run.fit(module, torch.utils.data.DataLoader(Rows(AT), batch_size=1), ckpt_path=str(file))
    assert run.global_step == STEPS, run.global_step
    return module.losses


torch.set_num_threads(1)
paths = [Path(p) for p in sys.argv[2:]]
print(json.dumps(save(paths[0]) if sys.argv[1] == "save" else [go(p) for p in paths]))
"""
"""`save DIR` trains, saves at step 3 and prints the losses of steps 4 to 6; `go FILE...` resumes from each file."""


def lightning(what: str, *paths: Path) -> list[Any]:
    """What the run prints; skips where there is no Lightning."""
    if run_torch("import importlib.util as u; print(u.find_spec('lightning') is not None)").strip() != "True":
        pytest.skip("needs lightning beside torch")
    return json.loads(run_torch(RUN, what, *paths).splitlines()[-1])


def test_lightning_goes_on_with_the_same_losses(tmp_path):
    want = lightning("save", tmp_path / "run")
    saved = tmp_path / "run" / "step=3.ckpt"
    good("convert", saved, tmp_path / "same.ckpt", "--to", "lightning")
    good("convert", saved, tmp_path / "dcp", "--to", "dcp", "--dp", "2")
    made = document("convert", tmp_path / "dcp", tmp_path / "new.ckpt", "--to", "lightning", "--module-prefix", "net")
    assert {"part": "names", "fate": "written", "detail": "under net."} in made["fidelity"]
    good("convert", saved, tmp_path / "plain.pt", "--to", "torch")
    plain = [tmp_path / "plain.pt", tmp_path / "t.ckpt"]
    good("convert", *plain, "--to", "lightning", "--module-prefix", "net", "--no-optimizer")
    good("convert", *plain, "--to", "lightning", "--module-prefix", "net", "--overwrite")
    assert document("diff", saved, tmp_path / "t.ckpt", "--optimizer")["equal"]
    assert lightning("go", saved, *(tmp_path / f"{n}.ckpt" for n in ("same", "new", "t"))) == [want] * 4
