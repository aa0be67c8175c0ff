"""Speed and peak memory on a real DeepSpeed checkpoint, beside `cp` and DeepSpeed's own two scripts, in the same run.

    python benchmarks/deepspeed.py --python-torch PYTHON [--rounds 3] [--layers 12] [--work DIR] [--no-write]

PYTHON must have torch and deepspeed. It makes the checkpoint: ZeRO-2, two ranks, bfloat16, one step of a small batch,
4 GB with the default of 16 layers (268 million parameters). Then every job runs once a round, in turn, as in
benchmarks/run.py. The table goes into docs/performance.md, between its markers. Needs about 15 GB of disk.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from run import Job, free_memory, into_page, measure, nbytes, run

START, STOP = "<!-- deepspeed benchmark: start -->", "<!-- deepspeed benchmark: stop -->"
MAKE = """
import os, socket, sys
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
import deepspeed, torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y = x + self.o(self.q(y) * torch.sigmoid(self.k(y)) + self.v(y))
        return y + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self, layers, width=1024, inner=2816, vocabulary=32000):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, inner) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x)[0].float(), ids[0])


def rank(number):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(1)
    net = Net(int(sys.argv[2]))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config)
    engine.backward(engine(torch.arange(8).reshape(1, 8)))
    engine.step()
    engine.save_checkpoint(sys.argv[1])
    torch.distributed.barrier()
    os._exit(0)


children = []
for number in range(2):
    child = os.fork()
    if not child:
        try:
            rank(number)
        finally:
            os._exit(1)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children))
"""
CP = "`cp -r` of the checkpoint"
FP32, OUR_FP32 = "`zero_to_fp32.py --safe_serialization`", "`ckptctl convert --to hf --dtype float32 --weights master`"
UNIVERSAL, OUR_UNIVERSAL = "`ds_to_universal`", "`ckptctl convert --to deepspeed --universal`"
RESHARD = "`ckptctl reshard --dp 3`"


def make_jobs(source: Path, target: Path, python: str) -> list[Job]:
    """The jobs in the order of a round."""
    ours = [sys.executable, "-m", "ckptctl"]
    step, total = source / (source / "latest").read_text(), nbytes(source)
    optimizer = sum(p.stat().st_size for p in step.glob("*optim_states.pt"))
    to_hf = ["--to", "hf", "--dtype", "float32", "--weights", "master", "--no-optimizer", "--bare", "--quiet"]
    real_universal = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(step), "--output_folder", str(target / "universal")]
    real_fp32 = [python, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(target), "--safe_serialization"]
    return [
        Job(CP, total, ["cp", "-r", str(source), str(target)], sync=True),
        Job(RESHARD, total, [*ours, "reshard", str(source), str(target), "--dp", "3", "--quiet"], like=CP),
        Job(FP32, optimizer // 3, real_fp32, like=CP),
        Job(OUR_FP32, optimizer // 3, [*ours, "convert", str(source), str(target), *to_hf], like=CP),
        Job(UNIVERSAL, optimizer, [python, *real_universal, *folders], like=CP),
        Job(
            OUR_UNIVERSAL,
            total,
            [*ours, "convert", str(source), str(target), "--to", "deepspeed", "--universal", "--quiet"],
            like=CP,
        ),
    ]


def table(jobs: list[Job], idle: int) -> str:
    """The jobs as a Markdown table; the last column is how many times faster than DeepSpeed's own script."""
    named = {job.name: job for job in jobs}
    rows = [
        "| job | min s | median s | of `cp` + sync: min, median | peak memory | than DeepSpeed's: min, median |",
        "|---|---|---|---|---|---|",
    ]
    for job in jobs:
        best, middle = min(job.seconds), statistics.median(job.seconds)
        if job.sync:
            low, mid = min(job.unsynced), statistics.median(job.unsynced)
            rows += [f"| {job.name}, then fsync | {best:.2f} | {middle:.2f} | | | |"]
            rows += [f"| … without the sync | {low:.2f} | {mid:.2f} | | | |"]
            continue
        like = named[job.like].seconds
        ratio = f"{best / min(like):.2f}, {middle / statistics.median(like):.2f}"
        other = named.get({OUR_FP32: FP32, OUR_UNIVERSAL: UNIVERSAL}.get(job.name, ""))
        faster = ""
        if other is not None:
            faster = f"{min(other.seconds) / best:.1f}, {statistics.median(other.seconds) / middle:.1f} times as fast"
        memory = f"{max(0, job.peak - idle) / 2**20:.0f} MiB"
        rows.append(f"| {job.name} | {best:.2f} | {middle:.2f} | {ratio} | {memory} | {faster} |")
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python-torch", required=True, help="a Python with torch and deepspeed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", default="16")
    parser.add_argument(
        "--work", type=Path, help="a folder on the disk to measure (default: the system's temporary one)"
    )
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # both sides as they are where they are installed
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=arguments.work) as folder:
        work = Path(folder)
        source = work / "source"
        run([arguments.python_torch, "-c", MAKE, str(source), arguments.layers], work / "log")
        print(f"made {nbytes(source) / 1e9:.2f} GB", flush=True)
        size = nbytes(source)
        _, idle = run([sys.executable, "-c", "pass"], work / "log")
        jobs = make_jobs(source, work / "out", arguments.python_torch)
        free = free_memory()
        measure(jobs, work, arguments.rounds, lambda line: print(line, flush=True))
    about = (
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; a checkpoint of {size / 1e9:.2f} GB made by real DeepSpeed (ZeRO-2, two "
        f"ranks, bfloat16); {arguments.rounds} rounds in turns; {free / 2**30:.1f} GiB of memory free at the start. "
        f"Peak memory is that of the largest process, above an idle interpreter ({idle / 2**20:.0f} MiB)."
    )
    text = f"{about}\n\n{table(jobs, idle)}"
    print(text)
    if not arguments.no_write:
        into_page(text, START, STOP)


if __name__ == "__main__":
    main()
