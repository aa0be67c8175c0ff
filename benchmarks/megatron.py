"""Speed and peak memory of resharding a Megatron checkpoint, beside `cp -r` of the same bytes, in turns.

    python benchmarks/megatron.py [--size 2GB] [--rounds 5] [--work DIR]

The source is made here: weights, masters and both moments of a Llama-shaped model in float32, tp 2 pp 2, classic ranks
with the distributed optimizer. How rounds and tables are made is in run.py. Needs about three times --size of disk.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
from pathlib import Path

from run import ROOT, Job, free_memory, measure, nbytes, remove, run, table

MESHES = {
    "`reshard --tp 1 --pp 4`, classic": ["--tp", "1", "--pp", "4"],
    "`reshard --tp 4 --pp 1`, classic": ["--tp", "4", "--pp", "1"],
    "`reshard --tp 1 --pp 1 --megatron-format torch_dist`": [
        "--tp",
        "1",
        "--pp",
        "1",
        "--megatron-format",
        "torch_dist",
    ],
    "`reshard --dp 4`, tp and pp kept": ["--dp", "4"],
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", default="2GB", help="weights and both moments together (default: 2GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--work", type=Path, help="a folder on the disk to measure (default: the system's temporary one)"
    )
    arguments = parser.parse_args()
    ckptctl = [sys.executable, "-m", "ckptctl"]
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=arguments.work) as folder:
        work = Path(folder)
        make = [sys.executable, str(ROOT / "benchmarks" / "make_synthetic.py"), str(work / "made")]
        run([*make, "--size", arguments.size, "--ranks", "2", "--by", "4"], work / "log")
        config, source, target = str(work / "made" / "config"), work / "source", str(work / "out")
        mesh = ["--tp", "2", "--pp", "2", "--dp", "2", "--megatron-format", "torch", "--vocab-divisor", "8"]
        there = ["convert", str(work / "made" / "ckpt"), str(source), "--to", "megatron", *mesh]
        run([*ckptctl, *there, "--model-config", config, "--quiet"], work / "log")
        remove(work / "made" / "ckpt")
        total = nbytes(source)
        _, idle = run([sys.executable, "-c", "pass"], work / "log")
        copy = "`cp -r` of the checkpoint"
        jobs = [Job(copy, total, ["cp", "-r", str(source), target], sync=True)]
        for name, flags in MESHES.items():
            words = [*ckptctl, "reshard", str(source), target, *flags, "--model-config", config, "--quiet"]
            jobs.append(Job(name, total, words, like=copy))
        free = free_memory()
        measure(jobs, work, arguments.rounds, lambda line: print(line, flush=True))
    print(
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {arguments.rounds} rounds; {free / 2**30:.1f} GiB of memory free at the "
        f"start. Peak memory is above that of an idle interpreter ({idle / 2**20:.0f} MiB).\n\n{table(jobs, idle)}"
    )


if __name__ == "__main__":
    main()
