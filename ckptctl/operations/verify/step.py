"""Loads a checkpoint into its model and trains a few steps, as the run would have gone on: a `Record`.

The model computes in one type; a parameter is updated in its master's where there is one, and in the wider of its own
type and its moments' else, and the model's copy is rounded from it, as mixed-precision runs do. A parameter's state is
loaded when its step is computed, and let go after the last one: no more than one parameter's is held where one step is
trained. For several steps it stays on the device, or in files of a scratch folder (`offload`).
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER
from ckptctl.operations.verify.device import Clock
from ckptctl.operations.verify.forms import Forms, widest
from ckptctl.operations.verify.load import Loader, digest_of
from ckptctl.operations.verify.model import built
from ckptctl.operations.verify.needs import torch_module
from ckptctl.operations.verify.record import SAMPLES, Record, Trained
from ckptctl.operations.verify.rules import Rule, rule_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptctl.operations.verify.batches import Batch
    from ckptctl.operations.verify.device import Device
    from ckptctl.operations.verify.model import Built
    from ckptctl.operations.verify.sides import Side


@dataclass(frozen=True)
class Job:
    """How a side is run. dtype is torch's name of the type to compute in; rates[k] gives step k's lr of a group's lr.

    clip: the largest norm of all gradients (0: as they are). scale: what the loss is multiplied by before its gradient
    is taken, and gradients divided by after (fp16). fresh: the first batch's loss under weights drawn anew, too.
    """

    device: Device
    dtype: str
    batches: Sequence[Batch]
    rates: Sequence[Callable[[Mapping[str, Any]], float]] = ()
    layers: int | None = None
    memory_nbytes: int = 512 << 20
    offload: bool = False
    clip: float = 0.0
    scale: float = 1.0
    seed: int = 1234
    fresh: bool = False
    around: Callable[[Any], Any] | None = None
    """Called with the model once it is loaded, before the first step: to change how it computes (recomputation)."""


@dataclass
class _State:
    """One parameter's master and moments, on the device or in files."""

    master: Any
    moments: dict[str, Any] = field(default_factory=dict)
    is_derived: bool = False
    """Whether the master is the model's own weight, widened for the update alone."""
    files: list[tuple[str, Path, tuple[int, ...], Any]] = field(default_factory=list)


def run(side: Side, forms: Forms, job: Job) -> Record:
    """Load a side that is under the model's names, and train as many steps as there are batches."""
    clock = Clock(job.device)
    job.device.start_measuring()
    record = Record()
    model = built(side.config or {}, job.device, job.dtype, layers=job.layers, seed=job.seed if job.fresh else None)
    record.measured["build_seconds"] = round(clock.seconds(), 3)
    if job.fresh:
        record.fresh_loss = _fresh(model, job)
    with Loader(side.checkpoint, job.device, job.memory_nbytes) as loader, tempfile.TemporaryDirectory() as scratch:
        run = _Run(side, forms, job, model, record, loader, Path(scratch))
        run.load()
        if job.around is not None:
            job.around(model.net)
        clock = Clock(job.device)
        for number, batch in enumerate(job.batches):
            run.step(number, batch)
        spent = clock.seconds()
        record.measured |= {
            "load_seconds": round(loader.seconds, 3),
            "loaded_bytes": loader.nbytes,
            "load_gb_per_second": round(loader.nbytes / 1e9 / loader.seconds, 3) if loader.seconds else None,
            "step_seconds": round(spent, 3),
            "peak_device_bytes": job.device.peak_nbytes(),
        }
    return record


def loaded(side: Side, job: Job) -> Built:
    """The model of a side with the side's weights in it, and nothing of its optimizer: for runs of one's own."""
    model = built(side.config or {}, job.device, job.dtype, layers=job.layers, seed=None)
    with Loader(side.checkpoint, job.device, job.memory_nbytes) as loader:
        _Run(side, Forms(), job, model, Record(), loader, Path()).load_weights()
    return model


def forward(net: Any, batch: Batch, device: Device) -> Any:
    """What the model says of a batch: `.loss`, the mean over predicted tokens, and `.logits`."""
    torch = torch_module()

    def put(array: Any) -> Any:
        return torch.from_numpy(array).to(device.name)

    given = {"input_ids": put(batch.input_ids), "labels": put(batch.labels)}
    if batch.attention_mask is not None:
        given["attention_mask"] = put(batch.attention_mask)
    return net(**given, use_cache=False)


def _fresh(model: Built, job: Job) -> float:
    torch = torch_module()
    with torch.no_grad():
        return float(forward(model.net, job.batches[0], job.device).loss)


class _Run:
    """One side on its way through the steps."""

    def __init__(
        self, side: Side, forms: Forms, job: Job, model: Built, record: Record, loader: Loader, scratch: Path
    ) -> None:
        self.side, self.forms, self.job, self.model = side, forms, job, model
        self.record, self.loader, self.scratch = record, loader, scratch
        self.states: dict[str, _State] = {}
        self.options, self.kinds = side.settings, side.states
        self.rules: dict[str, Rule] = {}
        self.done: set[Any] = set()
        self.steps = dict(side.steps)

    def load(self) -> None:
        """The weights, and digests of what is no part of the model."""
        self.load_weights()
        optimizer = self.side.trains
        for name, parameter in self.model.parameters.items():
            trained = not optimizer or name in self.options or name in self.kinds
            parameter.requires_grad_(trained)
            if trained and optimizer:
                options = self.options.get(name, {})
                self.rules[name] = rule_of(self.kinds.get(name, ()), options, self.side.checkpoint.root)
                self.record.parameters[name].settings = self.rules[name].settings(options)
                self.record.parameters[name].step_before = self.steps.get(name, 0.0)
            elif trained:
                self.record.parameters[name].settings = {}
        mine = {*self.model.parameters, *self.model.buffers}
        for (name, _), (key, _form) in self.forms.taken.items():
            if name not in mine and key not in self.done:
                self.record.left_out.append(f"{key.name} ({key.kind})")
                self._take(key, None)
        self._second_copies()

    def load_weights(self) -> None:
        """The model's parameters and buffers, each once."""
        torch = torch_module()
        seconds: dict[str, list[str]] = {}
        for alias, owner in self.model.ties.items():
            seconds.setdefault(owner, []).append(alias)
        with torch.no_grad():
            for name, value in {**self.model.parameters, **self.model.buffers}.items():
                self.record.parameters[name] = Trained(name, tuple(value.shape))
                stored = next((n for n in (name, *seconds.get(name, ())) if self.side.tensor(n) is not None), None)
                if stored is not None:
                    self._take(self.side.key(stored), value)
                else:
                    self._take(self.side.key(name, MASTER), value)

    def _second_copies(self) -> None:
        """A tied parameter that is stored under two names, with bytes of its own under each, must be one."""
        for alias, owner in self.model.ties.items():
            second, first = self.side.tensor(alias), self.side.tensor(owner)
            if second is None or first is None or self.side.checkpoint.ties.get(alias) == owner:
                continue
            digests = [self.loader.fill(t.key, None, (t.dtype.name,)) for t in (first, second)]
            if digests[0] != digests[1]:
                self.record.untied.append((alias, owner))

    def _take(self, key: Any, target: Any) -> None:
        """A tensor into target, and its digests into the record."""
        wanted = [] if key in self.done else self.forms.of(key)
        digests = self.loader.fill(key, target, tuple(dict.fromkeys(form for _, _, form in wanted)))
        self._keep(key, wanted, digests)

    def _keep(self, key: Any, wanted: list[tuple[str, str, str]], digests: Mapping[str, str]) -> None:
        self.done.add(key)
        for name, kind, form in wanted:
            into = self.record.parameters.setdefault(name, Trained(name, self.side.checkpoint.tensors[key].shape))
            into.before[kind] = digests[form]

    # -- one step

    def step(self, number: int, batch: Batch) -> None:
        """Forward, backward, and each parameter's update in the model's order."""
        torch = torch_module()
        torch.manual_seed(self.job.seed + number)
        out = forward(self.model.net, batch, self.job.device)
        (out.loss * self.job.scale if self.job.scale != 1 else out.loss).backward()
        record, is_last = self.record, number == len(self.job.batches) - 1
        record.losses.append(float(out.loss.detach()))
        record.logits.append(digest_of(out.logits))
        record.finite = record.finite and bool(torch.isfinite(out.logits).all())
        del out
        norms = {n: self._norm(p) for n, p in self.model.parameters.items()}
        total = math.sqrt(sum(n * n for n in norms.values() if n is not None))
        record.gradient_norms.append(total)
        record.finite = record.finite and math.isfinite(total)
        factor = min(1.0, self.job.clip / (total + 1e-6)) if self.job.clip else 1.0
        rates = set()
        for name, parameter in self.model.parameters.items():
            trained = record.parameters[name]
            trained.gradient_norms.append(norms[name])
            if name in self.rules and parameter.grad is not None:
                rates.add(self._update(name, parameter, number, factor, is_last))
            parameter.grad = None
            if is_last and parameter.requires_grad:
                trained.after["weight"] = digest_of(parameter)
                trained.samples["weight"] = samples_of(parameter)
        record.lr.append(sorted(rates, reverse=True))

    def _norm(self, parameter: Any) -> float | None:
        torch = torch_module()
        if parameter.grad is None:
            return None
        return float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) / self.job.scale

    def _update(self, name: str, parameter: Any, number: int, factor: float, is_last: bool) -> float:
        torch = torch_module()
        rule, trained = self.rules[name], self.record.parameters[name]
        settings = dict(trained.settings or {})
        if number < len(self.job.rates):
            settings["lr"] = self.job.rates[number](settings | {"group": self.options.get(name, {})})
        state = self._state(name, parameter)
        updated = state.master
        gradient = parameter.grad.to(updated.dtype)
        if self.job.scale != 1:
            gradient = gradient / self.job.scale
        if factor != 1:
            gradient = gradient * factor
        before = updated.detach().clone() if is_last else None
        self.steps[name] = rule.update(updated, gradient, state.moments, self.steps.get(name, 0.0), settings)
        with torch.no_grad():
            if updated is not parameter:
                parameter.copy_(updated)
        if is_last:
            trained.step_after = self.steps[name]
            rate = float(settings["lr"]) or 1.0
            if updated.numel():
                trained.update_rms = float((before - updated.detach()).double().pow(2).mean().sqrt()) / rate
            for kind, value in ((MASTER, updated), *state.moments.items()):
                if value is not parameter:
                    trained.after[kind] = digest_of(value)
                    trained.samples[kind] = samples_of(value)
            self.states.pop(name, None)
        else:
            self._park(name, state, parameter)
        return float(settings["lr"])

    def _state(self, name: str, parameter: Any) -> _State:
        """The parameter's master and moments: as they were left, or from the checkpoint."""
        torch = torch_module()
        found = self.states.get(name)
        if found is not None:
            for kind, file, shape, dtype in found.files:
                size = math.prod(shape)
                value = (
                    torch.from_file(str(file), shared=False, size=size, dtype=dtype)
                    if size
                    else torch.empty(0, dtype=dtype)
                )
                value = value.view(shape).to(self.job.device.name)
                if kind == MASTER:
                    found.master = value
                else:
                    found.moments[kind] = value
            found.files = []
            if found.master is None:
                found.master = self._widened(name, parameter)
            return found
        kinds = self.kinds.get(name, ())
        has_master = self.side.tensor(name, MASTER) is not None
        if has_master:
            master = self._made(name, MASTER, self.side.checkpoint.tensors[self.side.key(name, MASTER)].dtype.name)
        else:
            master = self._widened(name, parameter)
        held = str(master.dtype).removeprefix("torch.")
        stored = self.side.tensor(name)
        is_derived = not has_master and stored is not None and stored.dtype.name == self.job.dtype
        return _State(master, {kind: self._made(name, kind, held) for kind in kinds}, is_derived)

    def _widened(self, name: str, parameter: Any) -> Any:
        """What is updated where there is no master: the weight as it is stored, or as wide as its moments."""
        torch = torch_module()
        stored = self.side.tensor(name)
        own = str(parameter.dtype).removeprefix("torch.")
        types = [stored.dtype.name if stored is not None else own]
        types += [t.dtype.name for k in self.kinds.get(name, ()) if (t := self.side.tensor(name, k)) is not None]
        wide = widest(types)
        if wide == own:
            return parameter
        if stored is not None and stored.dtype.name != own and name not in self.states:
            return self.loader.made(stored.key, wide)[0]  # the model computes in a narrower type than it is stored in
        return parameter.detach().to(getattr(torch, wide))

    def _made(self, name: str, kind: str, dtype: str) -> Any:
        key = self.side.key(name, kind)
        wanted = [] if key in self.done else self.forms.of(key)
        value, digests = self.loader.made(key, dtype, tuple(dict.fromkeys(form for _, _, form in wanted)))
        self._keep(key, wanted, digests)
        return value

    def _park(self, name: str, state: _State, parameter: Any) -> None:
        """Keep a parameter's state until the next step."""
        self.states[name] = state
        if state.is_derived:
            state.master = None
        if not self.job.offload:
            return
        for kind, value in ((MASTER, state.master), *state.moments.items()):
            if value is not None:
                file = self.scratch / f"{list(self.model.parameters).index(name)}-{kind}"
                state.files.append((kind, file, tuple(value.shape), value.dtype))
                _write(value, file)
        state.master, state.moments = None, {}


def _write(value: Any, file: Path) -> None:
    torch = torch_module()
    flat = value.detach().contiguous().view(-1).view(torch.uint8)
    with file.open("wb") as out:
        for start in range(0, flat.numel(), 64 << 20):
            out.write(flat[start : start + (64 << 20)].cpu().numpy().tobytes())


def samples_of(value: Any) -> list[float]:
    """Numbers spread evenly over a tensor: the first, the last, and what is between them at equal distances."""
    torch = torch_module()
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return []
    count = min(SAMPLES, flat.numel())
    at = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    return [float(x) for x in flat[at].double().cpu()]
