"""What every rank of a native run shares: its job, the model, the optimizer, and what is told of the steps.

Runs in the framework's own interpreter, as `ckptctl_native.RUNNER`: the standard library and torch only, no ckptctl.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Data = dict[str, Any]
_CHUNK_NBYTES = 64 << 20


class Session:
    """A framework with a checkpoint loaded into it. A runner's own class fills in what differs.

    net is the bare model, whose parameter names are those of the record; optimizer is torch's, None for weights alone.
    """

    framework = ""
    version = ""
    net: Any = None
    optimizer: Any = None
    notes: tuple[str, ...] = ()

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """(loss, logits or None) of a forward pass."""
        out = self.net(**batch, use_cache=False)
        return out.loss, out.logits

    def backward(self, loss: Any) -> None:
        """The backward pass."""
        loss.backward()

    def update(self) -> None:
        """One step of the optimizer, and no gradients afterwards."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.net.zero_grad(set_to_none=True)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """(name, whole gradient) of each trained parameter; a collective."""
        for name, parameter in self.net.named_parameters():
            if parameter.grad is not None:
                yield name, whole(parameter.grad)

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """(name, kind, whole tensor) of weights, masters and moments; a collective."""
        for name, parameter in self.net.named_parameters():
            yield name, "weight", whole(parameter.detach())
            held = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
            for kind, value in held.items():
                if hasattr(value, "ndim") and kind != "step" and value is not None:
                    yield name, kind, whole(value.detach())

    def updates(self) -> dict[str, float]:
        """How often each parameter was updated."""
        if self.optimizer is None:
            return {}
        held = {n: self.optimizer.state.get(p, {}) for n, p in self.net.named_parameters()}
        return {n: float(s["step"]) for n, s in held.items() if "step" in s}

    def groups(self) -> list[Data]:
        """The optimizer's groups, whose lr the next step takes."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    def clip(self, largest: float) -> None:
        """Scale all gradients so that their norm is at most that."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.net.parameters(), largest)


class Story:
    """What is told of the steps; rank 0 writes it down. Tensors come one at a time, and only numbers are kept."""

    def __init__(self, job: Data) -> None:
        self.job = job
        self.done = False
        self.seconds = 0.0
        self.told: Data = {
            "losses": [], "logits": [], "gradient_norms": [], "lr": [], "parameters": {}, "finite": True, "notes": [],
            "types": {}, "settings": [], "unset": [], "digests": "xxh3" if _has_xxhash() else "sha256",
        }  # fmt: skip

    @property
    def number(self) -> int:
        """Steps that are done."""
        return len(self.told["losses"])

    def parameter(self, name: str) -> Data:
        """What is told of one parameter."""
        fresh: Data = {"before": {}, "after": {}, "samples": {}, "norms": {}, "gradient_norms": [], "shape": []}
        return self.told["parameters"].setdefault(name, fresh)  # type: ignore[no-any-return]

    def loaded(self, session: Session) -> None:
        """The state that the framework made of the checkpoint."""
        self.told |= {"framework": session.framework, "version": session.version, "notes": list(session.notes)}
        for name, kind, value in session.state():
            one = self.parameter(name)
            one["before"][kind] = digest(value)
            self.told["types"][kind] = str(value.dtype).removeprefix("torch.")
            if kind == "weight":
                one["shape"] = list(value.shape)
                if value.numel() and bool(value.isnan().all()):
                    self.told["unset"].append(name)
        for name, step in session.updates().items():
            self.parameter(name)["step_before"] = step
        self.told["settings"] = [
            {k: v for k, v in group.items() if isinstance(v, (bool, int, float, list, tuple)) and k != "params"}
            for group in session.groups()
        ]

    def forward_done(self, loss: float, logits: Any) -> None:
        """A forward pass."""
        self.told["losses"].append(loss)
        self.told["logits"].append(digest(whole(logits.detach())) if logits is not None else "")
        if not math.isfinite(loss):
            self.told["finite"] = False

    def backward_done(self, session: Session) -> None:
        """A backward pass: norms of the gradients."""
        norms = {name: norm(g) for name, g in session.gradients()}
        for name in names_of(session):
            self.parameter(name)["gradient_norms"].append(norms.get(name))
        total = math.sqrt(sum(n * n for n in norms.values()))
        self.told["gradient_norms"].append(total)
        self.told["finite"] = self.told["finite"] and math.isfinite(total)
        self.told["lr"].append(sorted({float(g["lr"]) for g in session.groups()}, reverse=True))

    def step_done(self, session: Session) -> None:
        """A step: after the last one, the state that it left."""
        if self.number < len(self.job["batches"]) or self.done:
            return
        self.done = True
        self.told["notes"] = list(session.notes)
        for name, kind, value in session.state():
            one = self.parameter(name)
            one["after"][kind], one["samples"][kind] = digest(value), samples(value, self.job["samples"])
            one["norms"][kind] = norm(value)
        for name, step in session.updates().items():
            self.parameter(name)["step_after"] = step


def follow(make: Callable[[Data], Session]) -> None:
    """A runner whose steps are ours to make: load, then forward, backward and update for each batch."""

    def steps(job: Data, story: Story) -> None:
        session = make(job)
        story.loaded(session)
        start = time.perf_counter()
        for number, batch in enumerate(job["batches"]):
            import torch

            torch.manual_seed(job["seed"] + number)
            set_rates(session.groups(), job, number)
            loss, logits = session.loss(tensors(batch, job))
            session.backward(loss)
            story.forward_done(float(loss.detach()), logits)
            story.backward_done(session)
            if job["clip"]:
                session.clip(job["clip"])
            session.update()
            story.step_done(session)
        story.seconds = time.perf_counter() - start

    run(steps)


def run(steps: Callable[[Data, Story], None]) -> None:
    """A runner's main: does the steps, writes the story or what went wrong, and ends this process."""
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    status = 1
    try:
        _die_with(int(os.environ["CKPTCTL_PARENT"]), job["folder"])
        _settle(job, rank)
        story = Story(job)
        steps(job, story)
        if rank == 0:
            story.told["seconds"] = round(story.seconds, 3)
            written = Path(job["folder"]) / "story.part"
            written.write_text(json.dumps(story.told))
            written.replace(Path(job["folder"]) / "story.json")
        wait_for_all()
        status = 0
    except BaseException as error:
        told = {"kind": type(error).__name__, "text": str(error), "where": traceback.format_exc()[-6000:]}
        (Path(job["folder"]) / f"error{rank}.json").write_text(json.dumps(told))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # frameworks leave threads and groups behind that wait for each other at exit


def wait_for_all() -> None:
    """Until every rank is here, where there are several."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _die_with(parent: int, folder: str = "") -> None:
    """End this process, and what it started, when the one that started it is gone: nothing else would.

    The job's folder goes too: who made it can no longer remove it.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if os.getpgrp() != os.getpid():
            os._exit(70)
        command = [sys.executable, "-I", "-S", "-c", _LAST, str(os.getpid()), folder]
        subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)  # noqa: S603 (our own lines)

    threading.Thread(target=watch, daemon=True).start()


_LAST = (
    "import os, shutil, signal, sys, time\n"
    "group, folder = int(sys.argv[1]), sys.argv[2]\n"
    "os.killpg(group, signal.SIGKILL)\n"
    "for _ in range(100):\n"
    "    if not folder or not os.path.exists(folder): break\n"
    "    shutil.rmtree(folder, ignore_errors=True)\n"
    "    time.sleep(0.1)\n"
)
"""Ends a group of processes, and removes a folder into which another group may still write for a moment."""


def _settle(job: Data, rank: int) -> None:
    """Seeds, threads and settings under which a step has the same bits each time."""
    import torch

    random.seed(job["seed"])
    torch.manual_seed(job["seed"])
    if job["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, job["threads"]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("highest")


def start_group(job: Data) -> None:
    """The process group of all ranks: gloo on the CPU, nccl on GPUs."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if job["device"] == "cuda" else "gloo")


def model_of(job: Data) -> Any:
    """The Transformers model of the job's config, in the type that the run keeps weights in, on the rank's device.

    Its weights are NaN, so that whatever the load leaves out shows.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    data = {k: v for k, v in job["config"].items() if k != "model_type"}
    config = transformers.CONFIG_MAPPING[job["config"]["model_type"]].from_dict(data)
    config.use_cache = False
    if job["architecture"]:
        kind = getattr(transformers, job["architecture"])
    else:
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
    net = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)  # noqa: SLF001
    net = net.to(getattr(torch, job["dtype"])).to(job["device"])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(math.nan)
    frozen = set(job["frozen"])
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name not in frozen)
    net.train()
    return net


def optimizer_of(named: Iterable[tuple[str, Any]], job: Data) -> Any:
    """An optimizer of torch over the checkpoint's groups, None where it has none."""
    import torch

    if not job["groups"]:
        return None
    by_name = dict(named)
    missing = [n for g in job["groups"] for n in g["params"] if n not in by_name]
    if missing:
        raise RuntimeError(f"the model has no parameter {missing[0]}, which the optimizer's groups list")
    groups = []
    for group in job["groups"]:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in group["settings"].items()}
        groups.append({"params": [by_name[n] for n in group["params"]], **settings})
    kind = getattr(torch.optim, job["optimizer"])
    return kind(groups, foreach=False)


def layers_of(net: Any) -> list[Any]:
    """The decoder layers: the heaviest outermost list of modules."""
    from torch.nn import ModuleList

    lists = {n: m for n, m in net.named_modules() if isinstance(m, ModuleList) and len(m)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    if not outer:
        return []
    weights = {n: sum(p.numel() for p in m.parameters()) for n, m in outer.items()}
    return list(outer[max(outer, key=lambda n: weights[n])])


def tensors(batch: Mapping[str, Any], job: Data) -> dict[str, Any]:
    """A batch's lists as tensors on the rank's device. Every rank takes the whole batch."""
    import torch

    return {k: torch.tensor(v, dtype=torch.int64, device=job["device"]) for k, v in batch.items()}


def set_rates(groups: list[Data], job: Data, number: int) -> None:
    """The learning rates of a step, where the job says them for each of its groups."""
    if number < len(job["rates"]) and len(job["rates"][number]) == len(groups):
        for group, rate in zip(groups, job["rates"][number]):  # noqa: B905 (older Pythons run this too)
            group["lr"] = rate


def names_of(session: Session) -> list[str]:
    """Every parameter's name, in the model's order."""
    return [n for n, _ in session.net.named_parameters()]


def whole(value: Any) -> Any:
    """All of a tensor that lies on several ranks; a collective for those."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def norm(value: Any) -> float:
    """The Euclidean norm, summed in float64."""
    import torch

    return float(torch.linalg.vector_norm(value.detach().double()))


def samples(value: Any, most: int) -> list[float]:
    """Numbers spread evenly over a tensor: the first, the last, and what is between them at equal distances."""
    import torch

    flat = value.detach().reshape(-1)
    count = min(most, flat.numel())
    if not count:
        return []
    at = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    return [float(x) for x in flat[at].double().cpu()]


def _has_xxhash() -> bool:
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return False
    return True


def digest(value: Any) -> str:
    """A digest of a tensor's bytes, row-major."""
    import torch

    if _has_xxhash():
        import xxhash

        hasher: Any = xxhash.xxh3_128()
    else:
        hasher = hashlib.sha256()
    flat = value.detach().contiguous().reshape(-1)
    step = max(1, _CHUNK_NBYTES // value.element_size())
    for start in range(0, flat.numel(), step):
        hasher.update(flat[start : start + step].view(torch.uint8).cpu().numpy().tobytes())
    return str(hasher.hexdigest())
