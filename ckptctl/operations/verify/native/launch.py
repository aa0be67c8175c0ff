"""Starts the ranks of a native run and brings back what they tell. Nothing stays behind: no process, no file.

Ranks get the environment that torchrun gives. Each is a process group of its own, ended as a whole; one that loses this
process ends itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import CkptError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_START = (
    "import runpy, sys, types\n"
    "package = types.ModuleType('ckptctl_native')\n"
    "package.__path__ = [sys.argv.pop(1)]\n"
    "sys.modules['ckptctl_native'] = package\n"
    "runpy.run_module('ckptctl_native.' + sys.argv.pop(1), run_name='__main__', alter_sys=False)\n"
)
"""Runs a module of this folder without importing ckptctl, whose needs another interpreter may not have."""
_GRACE_S = 3.0
"""How long the other ranks may still tell what happened after one has failed."""
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """Where ranks run: the interpreter, cpu or cuda, and how long they may take, in seconds."""

    python: str = sys.executable
    device: str = "cpu"
    timeout_s: float = 900.0


def run_ranks(
    runner: str,
    job: Mapping[str, Any],
    world: int,
    how: Launch,
    *,
    use: Callable[[Path, dict[str, Any]], Any] = lambda folder, told: told,
) -> Any:
    """What rank 0 tells after a run of `runner` (a module of this folder) over world ranks.

    use makes something of it, and of the folder that the ranks wrote to, before that is gone.

    Raises CkptError (native-failed) with the framework's own words where a rank fails, native-timeout where one does
    not end. A port that was taken meanwhile is tried again.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(_PortTaken):
            return _run(runner, job, world, how, use)
    return _run(runner, job, world, how, use)


class _PortTaken(CkptError):
    """Somebody took the port between our look at it and the ranks' use."""

    code = "native-failed"


def _run(
    runner: str,
    job: Mapping[str, Any],
    world: int,
    how: Launch,
    use: Callable[[Path, dict[str, Any]], Any],
) -> Any:
    with tempfile.TemporaryDirectory(prefix="ckptctl-native-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "job.json").write_text(json.dumps({**job, "folder": scratch, "world": world}))
        port = _free_port()
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):  # one by one: those that were started are to be ended, whatever comes
                ranks.append(_start(runner, folder, rank, world, port, how))  # noqa: PERF401
            trouble = _wait(ranks, how.timeout_s)
        finally:
            for process in ranks:
                _end(process)
        if trouble:
            raise _failure(folder, runner, trouble, how)
        try:
            found: dict[str, Any] = json.loads((folder / "story.json").read_text())
        except (OSError, ValueError) as err:
            raise _failure(folder, runner, "it ended without telling its numbers", how) from err
        return use(folder, found)


def _start(runner: str, folder: Path, rank: int, world: int, port: int, how: Launch) -> subprocess.Popen[bytes]:
    home = folder / f"rank{rank}"
    home.mkdir()
    with (folder / f"rank{rank}.log").open("wb") as log:
        try:
            return subprocess.Popen(  # noqa: S603 (a module of this package, and a file that we wrote)
                [
                    how.python,
                    "-W",
                    "ignore",
                    "-c",
                    _START,
                    str(Path(__file__).parent),
                    runner,
                    str(folder / "job.json"),
                ],
                cwd=home,
                env=_environment(rank, world, port, how),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as err:
            raise CkptError(
                f"--python {how.python} does not start", why=err.strerror or str(err), code="native-failed"
            ) from err


def _environment(rank: int, world: int, port: int, how: Launch) -> dict[str, str]:
    """What torchrun sets, and what keeps a run here: no network, no GPU where none is asked for."""
    out = dict(os.environ)
    out |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    out |= {"GROUP_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    out |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "CKPTCTL_PARENT": str(os.getpid())}
    out |= {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "WANDB_MODE": "disabled",
        "DO_NOT_TRACK": "1",
    }
    if how.device == "cpu":
        out |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
        out.setdefault("OMP_NUM_THREADS", "1")
        out.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    return out


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Until all have ended; "" where all went well, else what is wrong."""
    stop = time.monotonic() + timeout_s
    failed: float | None = None
    while True:
        codes = [p.poll() for p in ranks]
        if all(c is not None for c in codes):
            bad = [r for r, c in enumerate(codes) if c]
            return f"rank {bad[0]} ended with {_ending(codes[bad[0]])}" if bad else ""
        now = time.monotonic()
        if failed is None and any(codes):
            failed = now
        if failed is not None and now > failed + _GRACE_S:
            rank = next(r for r, c in enumerate(codes) if c)
            return f"rank {rank} ended with {_ending(codes[rank])}"
        if now > stop:
            return f"timeout: ranks {[r for r, c in enumerate(codes) if c is None]} had not ended after {timeout_s:g} s"
        time.sleep(0.05)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a rank and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(folder: Path, runner: str, trouble: str, how: Launch) -> CkptError:
    """The framework's own words: the first rank's error, else the end of its log."""
    told = [json.loads(f.read_text()) for f in sorted(folder.glob("error*.json")) if f.stat().st_size]
    first = next((t for t in told if not _is_echo(t)), told[0] if told else None)
    logs = "\n".join(f.read_text(errors="replace")[-4000:] for f in sorted(folder.glob("rank*.log")))
    if "EADDRINUSE" in logs or "address already in use" in logs.lower():
        return _PortTaken("the ranks found their port taken")
    if first is not None and first["kind"] in ("ModuleNotFoundError", "ImportError"):
        return missing(first["text"], runner, how)
    why = f"{first['kind']}: {first['text']}" if first is not None else " | ".join(logs.split("\n")[-3:])
    is_late = trouble.startswith("timeout")
    return CkptError(
        "the framework's own run took too long" if is_late else "the framework's own run failed",
        where=runner.removeprefix("run_"),
        why=f"{trouble}; {' '.join(why.split())[:800]}" if why else trouble,
        fix="give more time: --native-timeout" if is_late else "the framework itself cannot go on from this here",
        code="native-timeout" if is_late else "native-failed",
    )


def _is_echo(told: Mapping[str, Any]) -> bool:
    """Whether a rank only says that another is gone."""
    text = told["text"].lower()
    return any(w in text for w in ("connection closed by peer", "connection reset", "broken pipe"))


INSTALL = {
    "run_deepspeed": "pip install deepspeed transformers",
    "run_fsdp": "pip install torch transformers",
    "run_torch": "pip install torch transformers",
    "run_transformers": "pip install torch transformers",
    "run_trainer": "pip install transformers accelerate",
    "run_accelerate": "pip install transformers accelerate",
    "run_lightning": "pip install lightning transformers",
    "run_megatron": "pip install megatron-core transformers six, and a checkout of Megatron-LM on PYTHONPATH",
}
"""What installs what a runner needs."""


def missing(text: str, runner: str, how: Launch) -> Unsupported:
    """A framework that is not there, with the line that installs it."""
    return Unsupported(
        f"--native needs a framework that is not installed: {text}",
        where=how.python,
        fix=f"install it: {INSTALL[runner]}; or name an interpreter that has it: --python",
        code="needs-install",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
