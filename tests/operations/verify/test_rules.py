"""A parameter's update has the bits of torch's own optimizer that was loaded with the same state."""

from __future__ import annotations

import pytest

from ckptctl.core.errors import Unsupported
from ckptctl.operations.verify.rules import rule_of
from tests.support.checkpoints import needs_torch

RULES = [
    ("AdamW", {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    ("AdamW", {"lr": 1e-3, "amsgrad": True}),
    ("Adam", {"lr": 1e-3, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.9, "centered": True}),
]


@needs_torch
@pytest.mark.parametrize(("name", "options"), RULES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_an_update_is_torch_s(name, options):
    import torch

    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(5, 7))
    optimizer = getattr(torch.optim, name)([theirs], foreach=False, **options)
    gradients = [torch.randn(5, 7) for _ in range(5)]
    for g in gradients[:3]:
        theirs.grad = g.clone()
        optimizer.step()
    kept = {k: v.clone() for k, v in optimizer.state[theirs].items() if torch.is_tensor(v)}
    step = float(kept.pop("step", torch.tensor(3.0)))
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    if name == "Adam":
        group["decoupled_weight_decay"] = False
    rule = rule_of(set(kept), group)
    ours = theirs.detach().clone()
    for g in gradients[3:]:
        theirs.grad = g.clone()
        optimizer.step()
        step = rule.update(ours, g.clone(), kept, step, rule.settings(group))
    assert torch.equal(ours, theirs.detach())
    for kind, value in kept.items():
        assert torch.equal(value, optimizer.state[theirs][kind])
    assert step == 5


@needs_torch
def test_adam_without_bias_correction_is_what_its_formula_says():
    import torch

    rule = rule_of({"exp_avg", "exp_avg_sq"}, {"betas": (0.5, 0.75)})
    settings = rule.settings(
        {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.0, "weight_decay": 0.5, "bias_correction": False}
    )
    p, state = torch.tensor([2.0]), {"exp_avg": torch.tensor([1.0]), "exp_avg_sq": torch.tensor([4.0])}
    assert rule.update(p, torch.tensor([2.0]), state, 7, settings) == 8
    assert state["exp_avg"].item() == 1.5
    assert state["exp_avg_sq"].item() == 4.0
    assert p.item() == pytest.approx(2.0 - 0.5 * (1.5 / 2.0 + 0.5 * 2.0))


@pytest.mark.parametrize("kinds", [{"exp_avg"}, {"row", "column"}, {"exp_avg", "exp_avg_sq", "exp_avg_diff"}, set()])
def test_an_optimizer_that_is_not_known_is_refused(kinds):
    with pytest.raises(Unsupported, match="next step"):
        rule_of(kinds, {"lr": 1e-3})


def test_settings_that_a_file_does_not_say_are_named():
    rule = rule_of({"exp_avg", "exp_avg_sq"}, {})
    assert rule.unsaid({"lr": 1e-3}) == ["betas", "eps", "weight_decay"]
