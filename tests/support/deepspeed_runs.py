"""Real DeepSpeed on the CPU: runs that save, and runs that go on from what was written. A script; needs DeepSpeed.

    python deepspeed_runs.py JOBS.json RESULTS.json

JOBS.json is a list of jobs; see Job. Ranks are forked (gloo); jobs of one number of ranks run one after another in the
same ones. All ranks are fed the same batch, so that averaged gradients do not depend on their number (but for three,
whose sum of three is divided by three).
RESULTS.json gets, for each, {losses: of steps 4 to 6, state: {"<name> <kind>": SHA-256 of its float32 bytes}} or
{error: ...}. The state of a run that saves is that at the save, of one that loads that after the load, as DeepSpeed's
own API gathers it from the live optimizer: nothing is taken from files.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
KINDS = ("exp_avg", "exp_avg_sq")
VOCABULARY, WIDTH = 37, 12

# A job: {dp, stage, dtype: fp32|bf16|fp16, groups: one|two|three, frozen, tied, empty, save: FOLDER or load: FOLDER,
#         universal, zero: {more of zero_optimization}, config: {more of the configuration}}
Job = dict[str, Any]


def net_of(job: Job):
    """A small language model with an odd vocabulary, a buffer, and, where asked for, a tied head."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH, bias=False)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.register_buffer("gain", torch.full((3,), 0.5))
            if job.get("empty"):
                self.nothing = nn.Parameter(torch.zeros(0, 4))
            if job.get("tied"):
                self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            scores = self.head(x) * self.scale * self.gain.sum()
            return nn.functional.cross_entropy(scores[:, :-1].reshape(-1, VOCABULARY).float(), ids[:, 1:].reshape(-1))

    torch.manual_seed(11)
    net = Net()
    if job.get("frozen"):
        net.blocks[0].up.weight.requires_grad_(False)
        net.blocks[1].norm.bias.requires_grad_(False)
    if job.get("load") and not (job.get("universal") and job.get("frozen")):
        # Numbers that only the checkpoint can put right. A universal load leaves frozen parameters as they are.
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    return net


def groups_of(net, kind: str) -> list:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    if kind == "one":
        return [{"params": [p for _, p in named]}]
    ends = [p for n, p in named if n.startswith(("embed", "head"))] if kind == "three" else []
    rest = [p for n, p in named if not any(p is e for e in ends)]
    out = [{"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.1}]
    out += [{"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    return [{"params": ends, "lr": 5e-3, "weight_decay": 0.01}, *out] if ends else out


def config_of(job: Job) -> dict[str, Any]:
    out = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000000,
        # The linear layer that stage 3 puts in torch's place rounds otherwise, and stays for the jobs that follow.
        "zero_optimization": {"stage": job["stage"], "memory_efficient_linear": False, **job.get("zero", {})},
        **job.get("config", {}),
    }
    if job["dtype"] != "fp32":
        out[job["dtype"]] = {"enabled": True} | ({"initial_scale_power": 8} if job["dtype"] == "fp16" else {})
    if job.get("universal"):
        out["checkpoint"] = {"load_universal": True}
    return out


def steps(engine, first: int, last: int) -> list[float]:
    import torch

    losses = []
    for step in range(first, last + 1):
        ids = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(100 + step))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_of(engine, net) -> dict[str, str]:
    """Digests of weights (in the run's type), masters and moments, by name and kind. Every rank must call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out: dict[str, str] = {}

    def put(name: str, kind: str, tensor) -> None:
        if tensor is not None:
            out[f"{name} {kind}"] = hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()

    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # done once, in the first group's step, when the other groups have no state yet
        engine.optimizer._hp_optimizer_states_linked = False
        link()
    whole = not engine.zero_optimization() and type(engine.optimizer).__name__ != "BF16_Optimizer"
    for name, p in net.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            put(name, "weight", p.data)
        if p.requires_grad and not whole and getattr(p, "ds_numel", p.numel()):
            put(name, "master", safe_get_full_fp32_param(p))
            for kind in KINDS:
                put(name, kind, safe_get_full_optimizer_state(p, kind))
    for name, b in net.named_buffers():
        put(name, "buffer", b)
    if whole:
        names = {id(p): n for n, p in net.named_parameters()}
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        lows = getattr(engine.optimizer, "fp16_groups", None)
        for number, group in enumerate(inner.param_groups):
            for at, p in enumerate(group["params"]):
                name = names[id(lows[number][at] if lows is not None else p)]
                put(name, "master", p.data)
                for kind in KINDS:
                    put(name, kind, inner.state[p].get(kind))
    return out


def worker(job: Job) -> dict[str, Any]:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    if job["dtype"] == "fp16":
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = net_of(job)
    opt = torch.optim.AdamW(groups_of(net, job.get("groups", "one")), lr=1e-2, betas=(0.9, 0.95), foreach=False)
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config_of(job))
    if job.get("load"):
        path, _ = engine.load_checkpoint(job["load"], **job.get("flags", {}))
        if path is None:
            raise RuntimeError("nothing was loaded")
        state = state_of(engine, net)
    else:
        steps(engine, 1, 3)
        engine.save_checkpoint(job["save"], client_state={"mine": {"seen": 3, "at": 0.5}})
        state = state_of(engine, net)
    losses = steps(engine, 4, 6)
    settings = [{k: g[k] for k in ("lr", "weight_decay", "eps")} for g in engine.optimizer.param_groups]
    return {"losses": losses, "state": state, "settings": settings, "global_steps": engine.global_steps}


def run(jobs: list[Job]) -> list[dict[str, Any]]:
    """Jobs of one number of ranks, in forked ranks: what rank 0 says of each. After an error new ranks do the rest."""
    out: list[dict[str, Any]] = []
    while len(out) < len(jobs):
        out += _world(jobs[len(out) :])
    return out


def _world(jobs: list[Job]) -> list[dict[str, Any]]:
    """The first of the jobs: all of them, or those to the first that fails, with what its ranks say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(jobs[0]["dp"]):
            child = os.fork()
            if not child:
                _rank(jobs, rank, port, Path(scratch))
            children.append(child)
        status = {}
        while children:
            ended, code = os.wait()
            children.remove(ended)
            status[ended] = code
            if code:
                for other in children:
                    os.kill(other, 9)
        said = Path(scratch) / "results"
        out = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        if len(out) < len(jobs):
            errors = sorted(Path(scratch).glob("error*"))
            why = errors[0].read_text()[-3000:] if errors else f"a rank ended with {status}"
            out.append({"error": why})
        return out


def _rank(jobs: list[Job], rank: int, port: int, scratch: Path) -> None:
    code = 1
    try:
        log = os.open(scratch / f"log{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        dp = str(jobs[0]["dp"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=dp, LOCAL_WORLD_SIZE=dp)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for job in jobs:
            said = worker(job)
            if rank == 0:
                with (scratch / "results").open("a") as out:
                    out.write(json.dumps(said) + "\n")
        code = 0
    except BaseException:
        (scratch / f"error{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    import deepspeed  # noqa: F401  (once, before the forks)

    out: dict[int, dict[str, Any]] = {}
    for dp in sorted({job["dp"] for job in jobs}):
        numbers = [n for n, job in enumerate(jobs) if job["dp"] == dp]
        out |= dict(zip(numbers, run([jobs[n] for n in numbers]), strict=True))
    Path(sys.argv[2]).write_text(json.dumps([out[n] for n in range(len(jobs))]))


if __name__ == "__main__":
    main()
