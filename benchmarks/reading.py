"""Speed and peak memory of `validate` and `diff`, beside `cat FILE >/dev/null` of the same bytes, in the same run.

    python benchmarks/reading.py [--size 2GB] [--rounds 5] [--work DIR] [--no-write]

Three jobs read headers: a folder of 1,000 safetensors files, 1,000 torch files, and a sparse folder of 1 TB (200 files,
100,000 tensors and their index; its data are holes). The others read values that are in the page cache: a safetensors
file of bfloat16 weights, a distributed checkpoint of float32 weights and both moments, and comparisons of two folders
of each. Their speed is that without the command's start, which is measured by itself. Jobs
take turns, so that a slow minute of the machine meets all of them. The table goes into docs/performance.md. --size is
what each of the two kinds has in bytes; about four times as much disk, and memory for the cache, is needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.run import ROOT, free_memory, into_page, nbytes, run
from ckptctl.core.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

START, STOP = "<!-- reading: start -->", "<!-- reading: stop -->"
_BLOCK = 1 << 22


class Job(NamedTuple):
    """One thing that is measured; moved bytes are read by it.

    like names the `cat` of as many, start the same command on next to nothing.
    """

    name: str
    moved: int
    command: list[str]
    like: str = ""
    start: str = ""


def header_of(tensors: dict[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """A safetensors header: name -> (type, shape, bytes), back to back."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def sparse_folder(folder: Path, files: int, tensors: int, total: int) -> None:
    """A folder of weights whose data are holes: `tensors` matrices of bfloat16 in `files` files, about total bytes."""
    folder.mkdir()
    side = int((total / tensors / 2) ** 0.5) // 8 * 8
    where: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        mine = {
            f"model.layers.{t // 100}.mlp.experts.{t % 100}.up_proj.weight": ("BF16", (side, side), 2 * side * side)
            for t in range(number * tensors // files, (number + 1) * tensors // files)
        }
        head = header_of(mine)
        with (folder / name).open("wb") as stream:
            stream.write(head)
            stream.truncate(len(head) + sum(m[2] for m in mine.values()))
        where |= dict.fromkeys(mine, name)
    index = {"metadata": {"total_size": tensors * 2 * side * side}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text('{"model_type": "other", "dtype": "bfloat16"}')


def noise(dtype: str, size: int, seed: int) -> Iterator[bytes]:
    """Bytes of normal numbers of a type, one block made and repeated."""
    import numpy as np

    block = np.random.default_rng(seed).standard_normal(_BLOCK // 4, dtype=np.float32) * np.float32(0.02)
    data = block.tobytes() if dtype == "F32" else (block.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    while size > 0:
        yield data[:size]
        size -= len(data)


def weights_folder(folder: Path, size: int) -> None:
    """One safetensors file of bfloat16 weights, 64 MiB each."""
    folder.mkdir()
    count = max(1, size // (64 << 20))
    mine = {f"model.layers.{i}.weight": ("BF16", (8192, 4096), 64 << 20) for i in range(count)}
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header_of(mine))
        for i in range(count):
            for part in noise("BF16", 64 << 20, i):
                stream.write(part)
    (folder / "config.json").write_text('{"model_type": "other", "dtype": "bfloat16"}')


def state_folder(folder: Path, size: int, work: Path) -> None:
    """A distributed checkpoint of float32 weights and both moments, by make_synthetic.py."""
    make = [sys.executable, str(ROOT / "benchmarks" / "make_synthetic.py"), str(folder), "--size", str(size)]
    run(make, work / "log")


def many_files(folder: Path, source: Path, count: int) -> None:
    """As many copies of a small file, each under its own name."""
    folder.mkdir()
    for number in range(count):
        shutil.copy(source, folder / f"part-{number:04}{source.suffix}")


def make_all(work: Path, size: int) -> None:
    """Everything that is read."""
    small = ROOT / "fixtures" / "checkpoints"
    many_files(work / "safetensors", small / "broken" / "ok-minimal.safetensors", 1000)
    many_files(work / "torch", next(small.glob("torch/plain_zip/**/*.pt")), 1000)
    sparse_folder(work / "tera", 200, 100_000, 10**12)
    weights_folder(work / "weights", size)
    state_folder(work / "state", size, work)
    for name in ("weights", "state"):
        shutil.copytree(work / name, work / f"{name}-copy")


def make_jobs(work: Path) -> list[Job]:
    """The jobs in the order of a round."""
    ckptctl = [sys.executable, "-m", "ckptctl"]
    header = [*ckptctl, "validate", "--level", "header", "--quiet"]
    values = [*ckptctl, "validate", "--level", "values", "--quiet"]
    jobs = [
        Job("`validate --level header`, 1,000 safetensors files", 0, [*header, str(work / "safetensors")]),
        Job("`validate --level header`, 1,000 torch files", 0, [*header, str(work / "torch")]),
        Job("`validate --level header`, 1 TB in 200 files, 100,000 tensors", 0, [*header, str(work / "tera")]),
    ]
    minimal = str(ROOT / "fixtures" / "checkpoints" / "broken" / "ok-minimal.safetensors")
    jobs += [
        Job("`validate --level values` of a file of a few bytes", 0, [*values, minimal]),
        Job("`diff` of such a file with itself", 0, [*ckptctl, "diff", minimal, minimal, "--quiet"]),
    ]
    starts = [job.name for job in jobs[-2:]]
    for name, what in (("weights", "bfloat16 weights (safetensors)"), ("state", "float32 state (DCP)")):
        folder, copy = work / name, work / f"{name}-copy"
        if name == "state":
            folder, copy = folder / "ckpt", copy / "ckpt"
        cat = f"`cat`, {what}"
        files = [str(p) for f in (folder, copy) for p in sorted(f.rglob("*")) if p.is_file()]
        mine = files[: len(files) // 2]
        more = ["--optimizer"] if name == "state" else []
        jobs += [
            Job(cat, nbytes(folder), ["sh", "-c", 'cat "$@" >/dev/null', "sh", *mine]),
            Job(f"`validate --level values`, {what}", nbytes(folder), [*values, str(folder)], cat, starts[0]),
            Job(f"{cat}, both sides", 2 * nbytes(folder), ["sh", "-c", 'cat "$@" >/dev/null', "sh", *files]),
            Job(
                f"`diff`, {what}",
                2 * nbytes(folder),
                [*ckptctl, "diff", str(folder), str(copy), *more, "--quiet"],
                f"{cat}, both sides",
                starts[1],
            ),
        ]
    return jobs


def table(jobs: list[Job], seconds: dict[str, list[float]], peaks: dict[str, int], idle: int) -> str:
    """The jobs as a Markdown table."""
    rows = [
        "| job | bytes | min s | median s | GB/s, without the start | of `cat`'s: best, median | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for job in jobs:
        took = seconds[job.name]
        best, middle = min(took), statistics.median(took)
        start = seconds.get(job.start, [0.0])
        net = best - min(start), middle - statistics.median(start)
        speed = f"{job.moved / net[0] / 1e9:.1f}" if job.moved else ""
        size = f"{job.moved / 1e9:.2f} GB" if job.moved else ""
        share = ""
        if job.like:
            other = seconds[job.like]
            share = f"{min(other) / net[0]:.2f}, {statistics.median(other) / net[1]:.2f}"
        memory = f"{max(0, peaks[job.name] - idle) / 2**20:.0f} MiB" if "ckptctl" in job.command else ""
        rows.append(f"| {job.name} | {size} | {best:.2f} | {middle:.2f} | {speed} | {share} | {memory} |")
    return "\n".join(rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", default="2GB", help="bytes of each kind of values (default: 2GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="a folder to work in (default: the system's temporary one)")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-", dir=arguments.work) as folder:
        work = Path(folder)
        # By a process of its own: what a command's peak memory is counted from is that of its parent.
        maker = multiprocessing.Process(target=make_all, args=(work, parse_size(arguments.size, "--size")))
        maker.start()
        maker.join()
        jobs = make_jobs(work)
        _, idle = run([sys.executable, "-c", "pass"], work / "log")
        seconds: dict[str, list[float]] = {job.name: [] for job in jobs}
        peaks = dict.fromkeys(seconds, 0)
        for job in jobs:  # once outside the clock: what is read lies in the page cache from here on
            run(job.command, work / "log")
        for number in range(arguments.rounds):
            for job in jobs:
                took, peak = run(job.command, work / "log")
                seconds[job.name].append(took)
                peaks[job.name] = max(peaks[job.name], peak)
            line = ", ".join(f"{s[-1]:.2f}" for s in seconds.values())
            print(f"round {number + 1} of {arguments.rounds}: {line} s", flush=True)
    about = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {arguments.rounds} rounds; "
        f"{free_memory() / 2**30:.1f} GiB of memory free. "
        f"Peak memory is above that of an idle interpreter ({idle / 2**20:.0f} MiB)."
    )
    text = f"{about}\n\n{table(jobs, seconds, peaks, idle)}"
    print(text)
    if not arguments.no_write:
        into_page(text, START, STOP)


if __name__ == "__main__":
    main()
