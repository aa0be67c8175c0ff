"""Speed and peak memory of conversions, beside `cp` of the same bytes and torch's own tool, in the same run.

    python benchmarks/run.py [--size 2GB] [--rounds 9] [--python-torch PYTHON] [--work DIR] [--no-write]

Each round does every job once, in turn; a job's output is deleted after it, and the disk is synced before the next one
starts, outside the clock. Reported are minima and medians over the rounds, and the ratio to `cp` and fsync of the copy.
A single pair of times says little: copying the same file takes up to six times longer when the system must first find
memory for it. The table goes into docs/performance.md, between its markers. Needs about three times --size of disk.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
START, STOP = "<!-- benchmark: start -->", "<!-- benchmark: stop -->"


@dataclass
class Job:
    """One thing that is measured. like names the copy whose bytes it must read and write, "" for none."""

    name: str
    moved: int
    command: list[str]
    like: str = ""
    sync: bool = False
    seconds: list[float] = field(default_factory=list)
    unsynced: list[float] = field(default_factory=list)
    peak: int = 0


def run(command: list[str], quiet: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of one command; ends the benchmark where it fails."""
    with quiet.open("wb") as log:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{quiet.read_text(errors='replace')}")
    return seconds, usage.ru_maxrss * 1024


def fsync(path: Path) -> None:
    """Wait until a file, or every file of a folder, is on the disk."""
    for file in [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a file or folder, and let the disk settle."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def free_memory() -> int:
    """Bytes that the system could give, 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def nbytes(path: Path) -> int:
    """Bytes of a folder's files."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def make_jobs(work: Path, python_torch: str | None) -> list[Job]:
    """The source, the files that cp copies, and the jobs in the order of a round."""
    source, config, target = work / "source" / "ckpt", work / "source" / "config", str(work / "out")
    total = nbytes(source)
    ckptctl = [sys.executable, "-m", "ckptctl"]
    to_hf = [*ckptctl, "convert", str(source), target, "--to", "hf", "--model-config", str(config), "--no-optimizer"]
    to_dcp = [*ckptctl, "convert", str(source), target, "--to", "dcp", "--model-config", str(config)]
    remove(work / "out")
    run([*to_hf, "--quiet"], work / "log")
    weights = nbytes(work / "out")
    remove(work / "out")
    plain = work / "weights"
    with plain.open("wb") as out, (source / "__0_0.distcp").open("rb") as data:
        while out.tell() < weights:
            chunk = data.read(min(2**24, weights - out.tell()))
            out.write(chunk)
            if not chunk:
                data.seek(0)
    small, all_of_it = "`cp` of as many bytes as the weights", "`cp -r` of the checkpoint"
    jobs = [
        Job(small, weights, ["cp", str(plain), target], sync=True),
        Job("`ckptctl convert --to hf --no-optimizer`", weights, [*to_hf, "--quiet"], like=small),
        Job(all_of_it, total, ["cp", "-r", str(source), target], sync=True),
        Job("`ckptctl convert --to dcp`", total, [*to_dcp, "--quiet"], like=all_of_it),
    ]
    if python_torch:
        tool = [python_torch, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(source), target]
        jobs.append(Job("torch `dcp_to_torch` (no sync)", total, tool, like=all_of_it))
    return jobs


def measure(jobs: list[Job], work: Path, rounds: int, say: Callable[[str], None]) -> None:
    """All rounds."""
    target = work / "out"
    for number in range(rounds):
        for job in jobs:
            remove(target)
            seconds, peak = run(job.command, work / "log")
            job.peak = max(job.peak, peak)
            if job.sync:
                job.unsynced.append(seconds)
                began = time.perf_counter()
                fsync(target)
                seconds += time.perf_counter() - began
            job.seconds.append(seconds)
        say(f"round {number + 1} of {rounds}: " + ", ".join(f"{job.seconds[-1]:.2f}" for job in jobs) + " s")
    remove(target)


def table(jobs: list[Job], idle: int) -> str:
    """The jobs as a Markdown table."""
    rows = [
        "| job | bytes | min s | median s | GB/s at best | of `cp` + sync: min, median | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    copies = {job.name: job for job in jobs if job.sync}
    for job in jobs:
        best, middle = min(job.seconds), statistics.median(job.seconds)
        name, ratio, memory = job.name, "", f"{max(0, job.peak - idle) / 2**20:.0f} MiB"
        if job.sync:
            name, memory = f"{job.name}, then fsync", ""
        else:
            like = copies[job.like].seconds
            ratio = f"{best / min(like):.2f}, {middle / statistics.median(like):.2f}"
        size = f"{job.moved / 1e9:.2f} GB"
        rows.append(
            f"| {name} | {size} | {best:.2f} | {middle:.2f} | {job.moved / best / 1e9:.2f} | {ratio} | {memory} |"
        )
        if job.sync:
            low, mid = min(job.unsynced), statistics.median(job.unsynced)
            rows.append(f"| … without the sync | {size} | {low:.2f} | {mid:.2f} | {job.moved / low / 1e9:.2f} | | |")
    return "\n".join(rows)


def into_page(text: str, start: str, stop: str) -> None:
    """Put a table between two marks of docs/performance.md, in place of the last one."""
    page = PAGE.read_text()
    head, tail = page.partition(start)[0], page.partition(stop)[2]
    PAGE.write_text(f"{head}{start}\n\n{text}\n\n{stop}{tail}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", default="2GB", help="weights and both moments together (default: 2GB)")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python-torch", help="a Python with torch, to measure its tool too")
    parser.add_argument(
        "--work", type=Path, help="a folder on the disk to measure (default: the system's temporary one)"
    )
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=arguments.work) as folder:
        work = Path(folder)
        make = [sys.executable, str(ROOT / "benchmarks" / "make_synthetic.py"), str(work / "source")]
        run([*make, "--size", arguments.size, "--ranks", arguments.ranks], work / "log")
        print((work / "log").read_text().partition(": ")[2].strip(), flush=True)
        _, idle = run([sys.executable, "-c", "pass"], work / "log")
        jobs = make_jobs(work, arguments.python_torch)
        free = [free_memory()]
        measure(jobs, work, arguments.rounds, lambda line: print(line, flush=True))
        free.append(free_memory())
    about = (
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {arguments.ranks} ranks, {arguments.rounds} rounds; "
        f"{free[0] / 2**30:.1f} GiB of memory free at the start and {free[1] / 2**30:.1f} GiB at the end. "
        f"Peak memory is above that of an idle interpreter ({idle / 2**20:.0f} MiB)."
    )
    text = f"{about}\n\n{table(jobs, idle)}"
    print(text)
    if not arguments.no_write:
        into_page(text, START, STOP)


if __name__ == "__main__":
    main()
