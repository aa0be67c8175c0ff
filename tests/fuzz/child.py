"""The child process of the fuzz: damages files and works on them, within limits. Prints how many rounds it made."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from ckptctl import operations
from ckptctl.core.errors import CkptError

ADDRESS_SPACE = 3 << 30
PYTHON_PEAK = 600 << 20
WORDS = (
    b"numel",
    b"torch",
    b"data/0",
    b"FloatStorage",
    b"data_offsets",
    b"F32",
    b"shape",
    b"weight",
    b"archive",
    b"storage",
    b"__0_0.distcp",
    b"optim",
)


def damage(rng: random.Random, data: bytearray) -> str:
    """One change of a file's bytes; says which."""
    n = len(data)
    how = rng.choice(("bit", "byte", "cut", "block", "zero", "number", "word", "insert", "delete", "tail"))
    at = rng.randrange(n) if rng.random() < 0.5 else rng.randrange(min(n, 4096))
    match how:
        case "bit":
            for _ in range(rng.choice((1, 1, 4))):
                data[rng.randrange(n) if rng.random() < 0.3 else at] ^= 1 << rng.randrange(8)
        case "byte":
            data[at] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
        case "cut":
            del data[at:]
        case "block":
            size = rng.randrange(1, 512)
            other = rng.randrange(n)
            data[at : at + size] = data[other : other + size]
        case "zero":
            size = min(rng.randrange(1, 512), n - at)
            data[at : at + size] = bytes(size)
        case "number":
            value = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, n, n - 1, n + 1))
            form = rng.choice(("<Q", "<I", "<H"))
            data[at : at + struct.calcsize(form)] = struct.pack(form, value & (256 ** struct.calcsize(form) - 1))
        case "word":
            word = rng.choice(WORDS)
            place = data.find(word, at)
            if place >= 0:
                data[place : place + len(word)] = rng.choice(WORDS)[: len(word)].ljust(len(word), b"x")
        case "insert":
            data[at:at] = rng.randbytes(rng.randrange(1, 64))
        case "delete":
            del data[at : at + rng.randrange(1, 64)]
        case "tail":
            data += rng.randbytes(rng.randrange(1, 2000))
    return f"{how} at {at}"


def work(path: Path, out: Path) -> None:
    """All that reads a checkpoint. A CkptError is an answer."""
    jobs = (
        lambda: operations.inspect(path, tensors=True),
        lambda: operations.convert(path, out / "hf", operations.Conversion("hf", no_optimizer=True)),
        lambda: operations.convert(path, out / "torch", operations.Conversion("torch")),
        lambda: operations.convert(path, out / "dcp", operations.Conversion("dcp", dp=2)),
        lambda: operations.diff(path, path, operations.Comparison(optimizer=True, state=True)),
    )
    for job in jobs:
        try:
            job()
        except CkptError as error:
            if not error.what:
                raise AssertionError("an error without a message") from error


def main() -> int:
    seed, first, seconds, scratch, *sources = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    until, number = time.monotonic() + float(seconds), int(first)
    made = 0
    while time.monotonic() < until:
        rng = random.Random(f"{seed}/{number}")
        source = Path(rng.choice(sources))
        base = source / "ckpt" if (source / "ckpt").is_dir() else source
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            copy = Path(folder) / "in"
            shutil.copytree(base, copy, ignore=shutil.ignore_patterns("truth*"))
            files = sorted(p for p in copy.rglob("*") if p.is_file())
            victim = rng.choice([p for p in files if p.stat().st_size])
            data = bytearray(victim.read_bytes())
            changes = [damage(rng, data) for _ in range(rng.choice((1, 1, 1, 2, 3))) if data]
            victim.write_bytes(data)
            what = f"round {number}: {source.name}/{victim.name}, {', '.join(changes)}"
            signal.alarm(60)  # a hang ends the process, and says where by the round printed before
            sys.stdout.write(what + "\n")
            sys.stdout.flush()
            if number % 8 == 0:  # it makes everything several times slower
                tracemalloc.start()
            work(next(iter(copy.glob("*.pt")), copy) if source.name.startswith("plain") else copy, Path(folder))
            peak = tracemalloc.get_traced_memory()[1] if tracemalloc.is_tracing() else 0
            tracemalloc.stop()
            signal.alarm(0)
            if peak > PYTHON_PEAK:
                raise AssertionError(f"{what}: {peak >> 20} MiB")
        number += 1
        made += 1
    sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
