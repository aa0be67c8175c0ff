"""Masters and moments on their way through the steps: loaded when an update is computed, kept until the next.

What is kept stays on the device, or with `offload` in files of a scratch folder. No more than one parameter's state is
held beside what is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER
from ckptctl.operations.verify.device import torch_dtype
from ckptctl.operations.verify.forms import widest
from ckptctl.operations.verify.needs import torch_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptctl.operations.verify.device import Device
    from ckptctl.operations.verify.sides import Side

CHUNK_NBYTES = 64 << 20


@dataclass
class State:
    """What is updated beside (or instead of) the model's own weight, and its moments by kind."""

    master: Any
    moments: dict[str, Any] = field(default_factory=dict)
    is_derived: bool = False
    """Whether the master is the model's own weight, or that widened for the update alone."""
    files: list[tuple[str, Path, tuple[int, ...], Any]] = field(default_factory=list)


@dataclass
class States:
    """The states of one side. made(key, dtype) loads a tensor in a type of torch's."""

    side: Side
    device: Device
    made: Callable[[Any, str], Any]
    scratch: Path | None = None
    """The folder for what is kept between steps; None: on the device."""
    kept: dict[str, State] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    """Each parameter's number in the names of its files: they stay while others' are read and written."""

    def __post_init__(self) -> None:
        self.kinds = self.side.states

    def of(self, name: str, parameter: Any) -> State:
        """A parameter's state: as it was left, or from the checkpoint."""
        found = self.kept.pop(name, None)
        if found is not None:
            return self._back(found, name, parameter)
        stored = self.side.tensor(name)
        if (master := self.side.tensor(name, MASTER)) is not None:
            state = State(self.made(master.key, master.dtype.name))
        else:
            own = _name(parameter)
            state = State(self._widened(name, parameter), {}, stored is not None and stored.dtype.name == own)
        held = _name(state.master)
        state.moments = {kind: self.made(self.side.key(name, kind), held) for kind in self.kinds.get(name, ())}
        return state

    def keep(self, name: str, state: State) -> None:
        """Keep a state until it is asked for again."""
        if state.is_derived:
            state.master = None
        if self.scratch is not None:
            number = self.numbers.setdefault(name, len(self.numbers))
            for kind, value in ((MASTER, state.master), *state.moments.items()):
                if value is not None:
                    file = self.scratch / f"{number}-{kind}"
                    state.files.append((kind, file, tuple(value.shape), value.dtype))
                    _write(value, file)
            state.master, state.moments = None, {}
        self.kept[name] = state

    def _back(self, state: State, name: str, parameter: Any) -> State:
        for kind, file, shape, dtype in state.files:
            value = _read(file, shape, dtype, self.device)
            if kind == MASTER:
                state.master = value
            else:
                state.moments[kind] = value
        state.files = []
        if state.master is None:
            state.master = parameter if self._wide(name, parameter) == _name(parameter) else self._cast(name, parameter)
        return state

    def _widened(self, name: str, parameter: Any) -> Any:
        """What is updated where there is no master: the weight as it is stored, or as wide as its moments."""
        wide, stored = self._wide(name, parameter), self.side.tensor(name)
        if wide == _name(parameter):
            return parameter
        if stored is not None and stored.dtype.name != _name(parameter):
            return self.made(stored.key, wide)  # the model computes in a narrower type than it is stored in
        return self._cast(name, parameter)

    def _cast(self, name: str, parameter: Any) -> Any:
        return parameter.detach().to(torch_dtype(self._wide(name, parameter)))

    def _wide(self, name: str, parameter: Any) -> str:
        stored = self.side.tensor(name)
        types = [_name(parameter) if stored is None else stored.dtype.name]
        types += [t.dtype.name for k in self.kinds.get(name, ()) if (t := self.side.tensor(name, k)) is not None]
        return widest(types)


def _name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _write(value: Any, file: Path) -> None:
    flat = value.detach().contiguous().view(-1).view(torch_module().uint8)
    with file.open("wb") as out:
        for start in range(0, flat.numel(), CHUNK_NBYTES):
            out.write(flat[start : start + CHUNK_NBYTES].cpu().numpy().tobytes())


def _read(file: Path, shape: tuple[int, ...], dtype: Any, device: Device) -> Any:
    torch = torch_module()
    value = torch.empty(shape, dtype=dtype, device=device.name)
    flat = value.view(-1).view(torch.uint8)
    with file.open("rb") as data:
        for start in range(0, flat.numel(), CHUNK_NBYTES):
            part = data.read(min(CHUNK_NBYTES, flat.numel() - start))
            flat[start : start + len(part)].copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
    file.unlink()
    assert math.prod(shape) == value.numel()
    return value
