"""Loads a checkpoint into its model and trains a few steps, as the run would have gone on: a `Record`.

The model computes in one type; a parameter is updated in its master's where there is one, and in the wider of its own
type and its moments' else, and the model's copy is rounded from it, as mixed-precision runs do. A parameter's state is
loaded when its update is computed (`states`). Without a model, gradients are drawn: the update alone is looked at.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ckptctl.core.checkpoint import MASTER, WEIGHTS
from ckptctl.operations.verify.device import Clock, torch_dtype
from ckptctl.operations.verify.forms import Forms
from ckptctl.operations.verify.load import Loader, digest_of
from ckptctl.operations.verify.model import Built, built
from ckptctl.operations.verify.needs import torch_module
from ckptctl.operations.verify.record import SAMPLES, Record, Trained
from ckptctl.operations.verify.rules import Rule, rule_of
from ckptctl.operations.verify.states import States

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptctl.core.tensor import Key
    from ckptctl.operations.verify.batches import Batch
    from ckptctl.operations.verify.device import Device
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
    types: Mapping[str, str] | None = None
    """Without a model: each parameter's type (torch's name) by name. None: there is a model."""
    around: Callable[[Any], Any] | None = None
    """Called with the model once it is loaded, before the first step: to change how it computes (recomputation)."""


def run(side: Side, forms: Forms, job: Job) -> Record:
    """Load a side that is under the model's names, and train as many steps as there are batches."""
    clock = Clock(job.device)
    job.device.start_measuring()
    record = Record()
    if job.types is not None:
        model = _unbuilt(side, job, job.types)
    else:
        seed = job.seed if job.fresh else None
        model = built(side.config or {}, job.device, job.dtype, layers=job.layers, seed=seed)
    record.measured["build_seconds"] = round(clock.seconds(), 3)
    if job.fresh and model.net is not None:
        record.fresh_loss = _fresh(model, job)
    with Loader(side.checkpoint, job.device, job.memory_nbytes) as loader, tempfile.TemporaryDirectory() as scratch:
        run = _Run(side, forms, job, model, record, loader, Path(scratch))
        run.load()
        if job.around is not None and model.net is not None:
            job.around(model.net)
        clock = Clock(job.device)
        for number, batch in enumerate(job.batches):
            run.step(number, batch)
        spent = clock.seconds()
        run.look_at_the_rest()
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
        _Run(side, Forms(), job, model, Record(), loader, None).load_weights()
    return model


def _unbuilt(side: Side, job: Job, types: Mapping[str, str]) -> Built:
    """The parameters of a checkpoint, and no model around them."""
    torch = torch_module()
    ties = side.checkpoint.ties
    made: dict[str, dict[str, Any]] = {"weight": {}, "buffer": {}}
    for key, tensor in side.checkpoint.tensors.items():
        if key.kind in WEIGHTS and key.name not in ties:
            kind = torch_dtype(types.get(key.name, tensor.dtype.name), key.name)
            made[key.kind][key.name] = torch.empty(tensor.shape, dtype=kind, device=job.device.name)
    return Built(None, made["weight"], made["buffer"], dict(ties), 0, 0, 0)


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
        self, side: Side, forms: Forms, job: Job, model: Built, record: Record, loader: Loader, scratch: Path | None
    ) -> None:
        self.side, self.forms, self.job, self.model = side, forms, job, model
        self.record, self.loader = record, loader
        self.states = States(side, job.device, self._made, scratch if job.offload else None)
        self.options = side.settings
        self.rules: dict[str, Rule] = {}
        self.done: set[Key] = set()
        self.steps = dict(side.steps)

    # -- loading

    def load(self) -> None:
        """The weights, and how each parameter is trained."""
        self.load_weights()
        trains, kinds = self.side.trains, self.states.kinds
        without: dict[str, list[str]] = {}
        for name, parameter in self.model.parameters.items():
            is_trained = parameter.is_floating_point() and (not trains or name in self.options or name in kinds)
            parameter.requires_grad_(is_trained)
            if not is_trained:
                continue
            record, options = self.record.parameters[name], self.options.get(name, {})
            record.settings = {}
            if trains:
                rule = rule_of(kinds.get(name, ()), options, self.side.checkpoint.root)
                unsaid = rule.unsaid(options)
                record.settings = {k: v for k, v in rule.settings(options).items() if k not in unsaid}
                record.step_before = self.steps.get(name, 0.0)
                lacking = rule.lacking(kinds.get(name, ()), record.settings)
                self.record.incomplete += [(name, kind) for kind in lacking]
                if unsaid:
                    without.setdefault(", ".join(unsaid), []).append(name)
                elif not lacking:
                    self.rules[name] = rule
        for words, names in without.items():
            self.record.notes.append(
                f"{self.side.path} does not say {words} of {len(names)} parameters ({names[0]}): their state is "
                "compared before the step, and no update is made"
            )
        self._second_copies()

    def load_weights(self) -> None:
        """The model's parameters and buffers, each once."""
        seconds: dict[str, list[str]] = {}
        for alias, owner in self.model.ties.items():
            seconds.setdefault(owner, []).append(alias)
        with torch_module().no_grad():
            for name, value in {**self.model.parameters, **self.model.buffers}.items():
                self.record.parameters[name] = Trained(name, tuple(value.shape))
                stored = next((n for n in (name, *seconds.get(name, ())) if self.side.tensor(n) is not None), None)
                self._fill(self.side.key(name, MASTER) if stored is None else self.side.key(stored), value)

    def look_at_the_rest(self) -> None:
        """Digests of what no step has asked for: what the model has no place for, states of what is not trained."""
        mine = {*self.model.parameters, *self.model.buffers}
        for (name, kind), (key, _) in self.forms.taken.items():
            if name not in mine:
                self.record.left_out.append(f"{name} ({kind})")
            if key not in self.done:
                self._digest(key, None)

    def _second_copies(self) -> None:
        """A tied parameter that is stored under two names, with bytes of its own under each, must be one."""
        for alias, owner in self.model.ties.items():
            second, first = self.side.tensor(alias), self.side.tensor(owner)
            if second is None or first is None or self.side.checkpoint.ties.get(alias) == owner:
                continue
            digests = [self.loader.fill(t.key, None, (t.dtype.name,)) for t in (first, second)]
            if digests[0] != digests[1]:
                self.record.untied.append((alias, owner))

    def _made(self, key: Key, dtype: str) -> Any:
        """A new tensor on the device, loaded, with the vocabulary's padding where that is wanted."""
        torch = torch_module()
        rows, *rest = self.side.checkpoint.tensors[key].shape or (0,)
        shape = self.side.checkpoint.tensors[key].shape
        if (padding := self.side.padding_of(key)) is not None:
            shape = (rows + padding.shape[0], *rest)
        target = torch.empty(shape, dtype=torch_dtype(dtype), device=self.job.device.name)
        self._fill(key, target)
        return target

    def _fill(self, key: Key, target: Any) -> None:
        """A tensor into target, with the padding after it, and the digests of both."""
        padding = self.side.padding_of(key)
        if padding is None or not padding.shape[0]:
            self._digest(key, target)
            return
        rows = self.side.checkpoint.tensors[key].shape[0]
        self._digest(key, target[:rows])
        self._digest(padding.key, target[rows:])

    def _digest(self, key: Key, target: Any) -> None:
        wanted = [] if key in self.done else self.forms.of(key)
        digests = self.loader.fill(key, target, tuple(dict.fromkeys(form for _, _, form in wanted)))
        self.done.add(key)
        for name, kind, form in wanted:
            into = self.record.parameters.setdefault(name, Trained(name, self.side.checkpoint.tensors[key].shape))
            into.before[kind] = digests[form]

    # -- one step

    def step(self, number: int, batch: Batch) -> None:
        """Forward, backward, and each parameter's update in the model's order."""
        record, is_last = self.record, number == len(self.job.batches) - 1
        if self.model.net is None:
            self._draw_gradients(number)
        else:
            self._backward(number, batch)
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
            if is_last:  # of what is frozen too: a framework may have touched it
                trained.after["weight"] = digest_of(parameter)
                trained.samples["weight"] = samples_of(parameter)
        record.lr.append(sorted(rates, reverse=True))

    def _backward(self, number: int, batch: Batch) -> None:
        torch, record = torch_module(), self.record
        torch.manual_seed(self.job.seed + number)
        out = forward(self.model.net, batch, self.job.device)
        (out.loss * self.job.scale if self.job.scale != 1 else out.loss).backward()
        record.losses.append(float(out.loss.detach()))
        record.logits.append(digest_of(out.logits))
        record.finite = record.finite and bool(torch.isfinite(out.logits).all())

    def _draw_gradients(self, number: int) -> None:
        """Gradients of the size of a small model's, by seed, step and name: the same for every checkpoint."""
        torch = torch_module()
        for name, parameter in self.model.parameters.items():
            if parameter.requires_grad:
                seed = xxhash.xxh64_intdigest(f"{self.job.seed}/{number}/{name}".encode()) >> 1
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 1e-2
                parameter.grad = drawn.to(device=self.job.device.name, dtype=parameter.dtype)

    def _norm(self, parameter: Any) -> float | None:
        torch = torch_module()
        if parameter.grad is None:
            return None
        scale = 1.0 if self.model.net is None else self.job.scale
        return float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) / scale

    def _update(self, name: str, parameter: Any, number: int, factor: float, is_last: bool) -> float:
        rule, trained = self.rules[name], self.record.parameters[name]
        settings = dict(trained.settings or {})
        if number < len(self.job.rates):
            settings["lr"] = self.job.rates[number](settings | {"group": self.options.get(name, {})})
        state = self.states.of(name, parameter)
        updated = state.master
        gradient = parameter.grad.to(updated.dtype)
        if self.job.scale != 1 and self.model.net is not None:
            gradient = gradient / self.job.scale
        if factor != 1:
            gradient = gradient * factor
        before = updated.detach().clone() if is_last else None
        self.steps[name] = rule.update(updated, gradient, state.moments, self.steps.get(name, 0.0), settings)
        if updated is not parameter:
            with torch_module().no_grad():
                parameter.copy_(updated)
        if not is_last:
            self.states.keep(name, state)
            return float(settings["lr"])
        trained.step_after = self.steps[name]
        if updated.numel():
            change = (before - updated.detach()).double()
            trained.update_rms = float(change.pow(2).mean().sqrt()) / (float(settings["lr"]) or 1.0)
        for kind, value in ((MASTER, updated), *state.moments.items()):
            if value is not parameter:
                trained.after[kind] = digest_of(value)
                trained.samples[kind] = samples_of(value)
        return float(settings["lr"])


def samples_of(value: Any) -> list[float]:
    """Numbers spread evenly over a tensor: the first, the last, and what is between them at equal distances."""
    torch = torch_module()
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return []
    count = min(SAMPLES, flat.numel())
    at = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
    return [float(x) for x in flat[at].double().cpu()]
