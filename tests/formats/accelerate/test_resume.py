"""Real Accelerate goes on from what is written, with the losses of the run that was not interrupted.

FSDP2 on two processes of one CPU. The run is made here: three steps, a save by Accelerate itself, three more.
"""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import torch_python
from tests.support.commands import document, good

if TYPE_CHECKING:
    from pathlib import Path

RUN = """
import json
import os
import sys
import warnings

os.environ.update(RANK=sys.argv[1], LOCAL_RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=sys.argv[2], ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
warnings.filterwarnings("ignore")
import accelerate.state
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

WHAT, FOLDERS = sys.argv[3], sys.argv[4:]
torch.set_num_threads(1)


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.lin, self.norm = torch.nn.Linear(5, size), torch.nn.LayerNorm(size)
        self.out = torch.nn.Linear(size, 5, bias=False)

    def forward(self, x):
        return x + self.out(torch.tanh(self.norm(self.lin(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.blocks, self.head = torch.nn.ModuleList([Block(7), Block(3)]), torch.nn.Linear(5, 1)
        self.blocks[0].norm.bias.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared():
    # Accelerate has FSDP for accelerators alone: its state is told that this one is such a run.
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False, use_orig_params=True,
    )
    run = Accelerator(cpu=True, fsdp_plugin=plugin)
    for shared in (accelerate.state.AcceleratorState._shared_state, accelerate.state.PartialState._shared_state):
        shared.update(distributed_type=DistributedType.FSDP, device=torch.device("cpu"))
    accelerate.state.AcceleratorState._shared_state["fsdp_plugin"] = plugin
    net = Net()
    if WHAT == "go":
        with torch.no_grad():  # a load that does nothing shows
            [p.zero_() for p in net.parameters()]
    trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    groups = [{"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=0.05)
    return run, *run.prepare(net, opt, torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5))


def steps(run, net, opt, plan, first, last):
    losses = []
    for step in range(first, last + 1):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        run.backward(loss)
        opt.step()
        plan.scheduler.step()  # Accelerate's own wrapper steps once a process
        opt.zero_grad()
        losses.append(loss.item())
    return losses


run, *parts = prepared()
if WHAT == "save":
    steps(run, *parts, 1, 3)
    run.save_state(FOLDERS[0])
    out = steps(run, *parts, 4, 6)
else:
    run.load_state(FOLDERS[0])
    out = steps(run, *parts, 4, 6)
if sys.argv[1] == "0":
    print("LOSSES " + json.dumps(out), flush=True)
os._exit(0)
"""
"""`RANK PORT save DIR` trains, saves at step 3 and prints the losses of steps 4 to 6; `go DIR` resumes."""


def accelerate(what: str, folder: Path) -> list[float]:
    """The losses of steps 4 to 6; skips where there is no Accelerate."""
    python = torch_python()
    if python is None:
        pytest.skip("needs a Python with torch: install it, or name one in CKPTCTL_TORCH_PYTHON")
    if subprocess.run([python, "-c", "import accelerate"], capture_output=True, check=False).returncode:
        pytest.skip("needs accelerate beside torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [[python, "-c", RUN, str(rank), port, what, str(folder)] for rank in range(2)]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(w, stdout=pipe, stderr=pipe, text=True) for w in words]
    try:
        outs = [r.communicate(timeout=300) for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    assert [r.returncode for r in ranks] == [0, 0], outs[0][1][-2000:] + outs[1][1][-2000:]
    return json.loads(next(x for x in outs[0][0].splitlines() if x.startswith("LOSSES ")).removeprefix("LOSSES "))


@pytest.mark.real
def test_accelerate_goes_on_with_the_same_losses_by_way_of_a_torch_file(tmp_path):
    want = accelerate("save", tmp_path / "run")
    assert len(want) == 3
    good("convert", tmp_path / "run", tmp_path / "t.pt", "--to", "torch")
    good("convert", tmp_path / "t.pt", tmp_path / "back", "--to", "accelerate", "--dp", "3")
    assert document("diff", tmp_path / "run", tmp_path / "back", "--optimizer")["equal"]
    assert accelerate("go", tmp_path / "back") == want
