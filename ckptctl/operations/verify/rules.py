"""Which optimizer a checkpoint's state is of, and its next step by torch's own classes.

Adam and AdamW, SGD with momentum, Adagrad and RMSprop are told by the kinds of state and the group's settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported
from ckptctl.operations.verify.needs import torch_module

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
        "bias_correction": True,
    },
    "sgd": {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    },
    "adagrad": {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False},
    "rmsprop": {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "maximize": False,
    },
}
"""What a step takes of a group's settings, and what it takes where the group does not say."""
_NEEDED: dict[str, tuple[str, ...]] = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr",),
    "adagrad": ("lr",),
    "rmsprop": ("lr",),
}
_KINDS: dict[str, set[str]] = {
    "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "sgd": {"momentum_buffer"},
    "adagrad": {"sum"},
    "rmsprop": {"square_avg", "momentum_buffer", "grad_avg"},
}
_OWN = {"adam": "exp_avg_sq", "adagrad": "sum", "rmsprop": "square_avg"}
"""A kind of state that no other rule has."""
CALLED = {"adam": "AdamW or Adam", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


@dataclass(frozen=True, slots=True)
class Rule:
    """How a run's parameters are updated."""

    name: str

    def unsaid(self, options: Mapping[str, Any]) -> list[str]:
        """Settings that a step cannot do without, and that the group does not have."""
        return [k for k in _NEEDED[self.name] if not isinstance(options.get(k), (int, float, list, tuple))]

    def lacking(self, kinds: Collection[str], settings: Mapping[str, Any]) -> list[str]:
        """Kinds of state that a step cannot do without, where a parameter has some of its state and not all.

        None at all is a parameter before its first step; SGD makes its one kind when it is not there.
        """
        if not kinds:
            return []
        needed = {
            "adam": ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings.get("amsgrad") else [])],
            "rmsprop": [
                "square_avg",
                *(["momentum_buffer"] if settings.get("momentum") else []),
                *(["grad_avg"] if settings.get("centered") else []),
            ],
        }
        return [k for k in needed.get(self.name, ()) if k not in kinds]

    @property
    def called(self) -> str:
        """For people."""
        return CALLED[self.name]

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What decides a parameter's step, of its group's settings."""
        own = {k: options[k] for k in _DEFAULTS[self.name] if options.get(k) is not None}
        if "adam_w_mode" in options and "decoupled_weight_decay" not in options:
            own["decoupled_weight_decay"] = bool(options["adam_w_mode"])
        out = {**_DEFAULTS[self.name], **own}
        if "betas" in out:
            out["betas"] = tuple(float(b) for b in out["betas"])
        return {k: bool(v) if isinstance(_DEFAULTS[self.name][k], bool) else v for k, v in out.items()}

    def update(
        self, parameter: Any, gradient: Any, state: dict[str, Any], step: float, settings: Mapping[str, Any]
    ) -> float:
        """Update a parameter and its state in place, in the parameter's own type. Returns step + 1: the updates it had.

        state has moments by kind; those that are not there yet are made, as in a parameter's first step.
        """
        torch = torch_module()
        parameter.grad = gradient
        if self.name == "adam" and not settings["bias_correction"]:
            return self._uncorrected(parameter, state, step, settings)
        rest = {k: v for k, v in settings.items() if k not in ("decoupled_weight_decay", "bias_correction")}
        if self.name == "adam":
            kind = torch.optim.AdamW if settings["decoupled_weight_decay"] else torch.optim.Adam
        else:
            kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}[self.name]
        optimizer = kind([parameter], foreach=False, **rest)
        if state:
            held = dict(state)
            if self.name != "sgd":
                held["step"] = torch.tensor(float(step), dtype=torch.float32)
            optimizer.state[parameter] = held
        optimizer.step()
        after = optimizer.state[parameter]
        state.clear()
        state.update({k: v for k, v in after.items() if k != "step" and v is not None})
        parameter.grad = None
        return step + 1

    @staticmethod
    def _uncorrected(parameter: Any, state: dict[str, Any], step: float, settings: Mapping[str, Any]) -> float:
        """Adam without bias correction, which only fused optimizers offer.

        Source: NVIDIA apex, csrc/multi_tensor_adam.cu, with bias_correction 0.
        """
        torch = torch_module()
        first, second = settings["betas"]
        with torch.no_grad():
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind not in state:
                    state[kind] = torch.zeros_like(parameter)
            gradient, decay = parameter.grad, settings["weight_decay"]
            if not settings["decoupled_weight_decay"]:
                gradient = gradient.add(parameter, alpha=decay)
            state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + settings["eps"])
            if settings["decoupled_weight_decay"]:
                update = update + decay * parameter
            parameter.add_(update, alpha=-settings["lr"])
        parameter.grad = None
        return step + 1


def rule_of(kinds: Collection[str], options: Mapping[str, Any], where: str = "") -> Rule:
    """The rule of an optimizer with those kinds of state and those settings. Unsupported where none is known."""
    found = next((name for name, own in _OWN.items() if own in kinds), None)
    if found is None and (set(kinds) <= {"momentum_buffer"}):
        found = "adam" if "betas" in options else "sgd" if "momentum" in options or kinds else None
    unknown = set(kinds) - _KINDS.get(found or "", set())
    if found is None or unknown:
        raise Unsupported(
            "how the next step of this optimizer is computed is not known here",
            where=where,
            why=f"its state has {', '.join(sorted(unknown or kinds)) or 'nothing'}; known are "
            + "; ".join(f"{CALLED[n]}: {', '.join(sorted(k))}" for n, k in _KINDS.items()),
            fix="--no-optimizer verifies loss, logits and gradients alone",
            code="optimizer-unknown",
        )
    return Rule(found)
