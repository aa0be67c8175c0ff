"""Two records: what is equal, what differs, which parameter is named."""

from __future__ import annotations

import pytest

from ckptctl.core.checkpoint import Checkpoint, Group, Optimizer
from ckptctl.operations.verify.compare import Measure, compare, of_squares, runs_unlike
from ckptctl.operations.verify.record import Record, Trained
from ckptctl.operations.verify.sides import Side


def record(**change):
    parameters = {}
    for name in ("a", "b"):
        parameters[name] = Trained(
            name, (2,), {"weight": f"{name}0", "exp_avg": f"{name}m"}, {"weight": f"{name}1"}, {"weight": [1.0, 2.0]},
            [0.5], 3.0, 4.0, {"lr": 0.1, "betas": (0.9, 0.95)},
        )  # fmt: skip
    made = Record([4.5], ["l"], [0.7], [[0.1]], parameters)
    for name, value in change.items():
        setattr(made, name, value)
    return made


def found(a, b, measure=None):
    judged = compare(a, b, measure or Measure("float32"))
    return [(d["name"], d["kind"]) for d in judged.differences], judged


def side(scale):
    about = {} if scale is None else {"loss_scaler": {"class": "DynamicLossScaler", "cur_scale": scale}}
    return Side("x", Checkpoint("deepspeed", "", "x", (), {}, about=about), "")


def test_a_loss_scale_that_differs_is_found_and_one_that_is_not_there_is_told():
    assert runs_unlike([side(256), side(256.0)]) == ([], [])
    assert [(d["kind"], d["detail"]) for d in runs_unlike([side(256), side(512)])[0]] == [("loss scale", "256 and 512")]
    assert runs_unlike([side(256), side(None)]) == ([], ["the loss scale is not compared: 256.0 and None"])
    assert runs_unlike([side(1.0), side(None)]) == ([], [])


def grouped(*bases, **more):
    """A side of one parameter a group, with those settings."""
    groups = tuple(Group((f"p{n}",), {"lr": 0.1, **base}) for n, base in enumerate(bases))
    return Side("x", Checkpoint("torch", "", "x", (), {}, optimizer=Optimizer(groups)), "")


@pytest.mark.parametrize("word", ["initial_lr", "max_lr", "min_lr", "lr_mult", "wd_mult"])
def test_what_later_schedules_start_from_is_compared_without_a_schedule(word):
    a, b = grouped({word: 0.5}, {word: 0.5}), grouped({word: 0.5}, {word: 7.0})
    assert runs_unlike([a, a])[0] == []
    assert [(d["name"], d["kind"], d["detail"]) for d in runs_unlike([a, b])[0]] == [
        ("p1", "group", f"{word}: 0.5 and 7.0")
    ]
    assert runs_unlike([a, grouped({}, {})])[0] == []


def test_equal_records_are_equal():
    differences, judged = found(record(), record())
    assert differences == []
    assert judged.equal
    assert judged.compared["loss"] == 1


def test_a_loss_a_digest_a_rate_that_differ():
    assert found(record(), record(losses=[4.5000001]))[0] == [("", "loss")]
    assert found(record(), record(logits=["m"]))[0] == [("", "logits")]
    assert found(record(), record(lr=[[0.2]]))[0] == [("", "lr")]


def test_nan_is_itself():
    nan = float("nan")
    assert found(record(losses=[nan]), record(losses=[nan]))[0] == []
    assert found(record(losses=[nan]), record())[0] == [("", "loss")]


def test_state_that_a_step_needs_and_that_is_not_there_is_told_even_where_both_lack_it():
    lacking = {"incomplete": [("b", "max_exp_avg_sq")]}
    for a, b in ((lacking, lacking), (lacking, {}), ({}, lacking)):
        differences, judged = found(record(**a), record(**b))
        assert differences == [("b", "max_exp_avg_sq")]
        assert judged.cause["what"] == "missing"


def test_the_cause_is_told_from_what_follows_of_it():
    """b's weight is wrong: a's gradient, and so its update, differs too, and comes first."""
    other = record()
    other.parameters["b"].before["weight"] = "x"
    other.parameters["a"].after["weight"] = "y"
    other.parameters["b"].after["weight"] = "z"
    _, judged = found(record(), other)
    assert judged.first["name"] == "a"
    assert judged.cause["name"] == "b"


def test_counts_and_settings_are_told():
    other = record()
    other.parameters["a"].step_before = 2.0
    other.parameters["b"].settings = {"lr": 0.1, "betas": [0.9, 0.999]}
    differences, judged = found(record(), other)
    assert differences == [("a", "step"), ("b", "group")]
    assert "3 and 2 updates" in judged.differences[0]["detail"]


def test_lists_and_tuples_of_the_same_numbers_are_equal():
    other = record()
    other.parameters["b"].settings = {"lr": 0.1, "betas": [0.9, 0.95]}
    assert found(record(), other)[0] == []


def test_a_parameter_on_one_side_only_is_told():
    other = record()
    del other.parameters["b"]
    assert found(record(), other)[0] == [("b", "weight")]


def test_a_master_on_one_side_is_the_other_s_weight():
    other = record()
    for p in other.parameters.values():
        p.after["master"] = p.after["weight"]
    assert found(record(), other)[0] == []
    other.parameters["a"].after["master"] = "x"
    assert found(record(), other)[0] == [("a", "master")]


def test_within_tolerance_only_where_types_differ():
    other = record()
    other.parameters["a"].after["weight"] = "x"
    other.parameters["a"].samples["weight"] = [1.0, 2.0078125]
    assert found(record(), other)[0] == [("a", "updated weight")]
    wide = Measure("bfloat16", widths={"a": "bfloat16"})
    assert found(record(), other, wide)[0] == []
    other.parameters["a"].samples["weight"] = [1.0, 2.25]
    assert found(record(), other, wide)[0] == [("a", "updated weight")]
    other.parameters["a"].before["weight"] = "y"  # what was loaded has no tolerance
    assert ("a", "weight") in found(record(), other, wide)[0]


def by_another_program(weight, squares, moment=0.5):
    """What differs where another program's step left those samples: of weights (1, 2), squares and moments (0.5, 1)."""
    made = []
    for w, m in (([1.0, 2.0], 0.5), (weight, moment)):
        one = record()
        a = one.parameters["a"]
        a.settings = {"lr": 1e-3, "eps": 1e-8}
        a.after |= {"weight": f"{w}", "exp_avg": f"{m}", "exp_avg_sq": "v"}
        a.samples = {"weight": w, "exp_avg": [m, 1.0], "exp_avg_sq": squares}
        made.append(one)
    return [kind for _, kind in found(*made, Measure("float32", exact=False))[0]]


def test_another_program_s_update_may_be_off_by_what_rounding_makes_of_it():
    """lr 1e-3. Weights are off by 1e-5 of 2 at most, and by 2 lr 2^-13 times (largest root + eps) / (own + eps)."""
    even = [1e-4, 1e-4]
    assert by_another_program([1.0 + 2.0e-5, 2.0], even) == []
    assert by_another_program([1.0 + 2.1e-5, 2.0], even) == ["updated weight"]
    # The first element's gradients are 100 times smaller: 2e-5 + 2 * 1e-3 * 100 / 8192 = 4.4e-5.
    assert by_another_program([1.0 + 4.3e-5, 2.0], [1e-8, 1e-4]) == []
    assert by_another_program([1.0 + 4.6e-5, 2.0], [1e-8, 1e-4]) == ["updated weight"]
    assert by_another_program([1.0, 2.0 + 4.3e-5], [1e-8, 1e-4]) == ["updated weight"]
    # It has no gradient but rounding: twice the learning rate, whichever way each step went.
    assert by_another_program([1.0 + 2.0e-3, 2.0], [0.0, 1e-4]) == []
    assert by_another_program([1.0 + 2.1e-3, 2.0], [0.0, 1e-4]) == ["updated weight"]
    assert by_another_program([float("nan"), 2.0], [0.0, 1e-4]) == ["updated weight"]


def test_another_program_s_moments_are_off_by_what_its_gradients_are():
    assert by_another_program([1.0, 2.0], [1.0, 1.0], 0.5 + 1.2e-4) == []
    assert by_another_program([1.0, 2.0], [1.0, 1.0], 0.5 + 1.3e-4) == ["updated exp_avg"]
    assert of_squares(0.5) == pytest.approx(1.5**2 - 1)


def test_untied_copies_are_told():
    assert found(record(), record(untied=[("head", "a")]))[0] == [("head", "weight")]
