"""The Trainer's two groups and its scheduler's state: numbers by hand."""

import pytest

from ckptctl.core.checkpoint import Group, Optimizer
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.formats.trainer.groups import scheduler, two_groups

ORDER = [("emb", True), ("b", False), ("w", True), ("norm", False)]


def optimizer(*groups):
    return Optimizer(tuple(Group(tuple(names.split()), options) for names, options in groups))


def test_one_group_is_split_by_what_decays_and_both_keep_its_settings():
    two = two_groups(optimizer(("norm w b emb", {"lr": 2.0, "weight_decay": 0.1})), ORDER, "x")
    assert [g.params for g in two.groups] == [("emb", "w"), ("b", "norm")]
    assert [g.options for g in two.groups] == [{"lr": 2.0, "weight_decay": 0.1}] * 2
    assert two.origins == (0, 0)
    assert two.lines[0].fate == "converted"


def test_the_trainer_s_own_groups_stay_and_nothing_is_said():
    two = two_groups(optimizer(("emb w", {"lr": 1.0}), ("b norm", {"lr": 1.0, "weight_decay": 0.0})), ORDER, "x")
    assert [g.params for g in two.groups] == [("emb", "w"), ("b", "norm")]
    assert (two.origins, two.lines) == ((0, 1), ())


def test_groups_of_equal_settings_become_one():
    two = two_groups(optimizer(("emb", {"lr": 1.0, "name": "e"}), ("w", {"lr": 1.0}), ("b norm", {})), ORDER, "x")
    assert two.groups[0].params == ("emb", "w")
    assert two.origins == (0, 2)


def test_a_frozen_parameter_has_no_number_and_a_group_may_be_empty():
    two = two_groups(optimizer(("w emb", {"lr": 1.0})), ORDER, "x")
    assert [g.params for g in two.groups] == [("emb", "w"), ()]
    assert two.groups[1].options == {"lr": 1.0}


@pytest.mark.parametrize(
    ("a", "b", "word"), [({"lr": 1.0}, {"lr": 2.0}, "lr"), ({"eps": 0}, {"eps": 0.0}, "eps"), ({}, {"k": 1}, "k")]
)
def test_settings_that_differ_within_one_of_the_two_stop_it_by_name(a, b, word):
    with pytest.raises(Unsupported, match="emb and w have different settings") as err:
        two_groups(optimizer(("emb", a), ("w b norm", b)), ORDER, "x")
    assert f"({word})" in err.value.what


def test_a_parameter_that_is_none_of_the_model_s_stops_it_by_name():
    with pytest.raises(Unsupported, match="lora_A"):
        two_groups(optimizer(("emb w lora_A", {})), ORDER, "x")


@pytest.mark.parametrize("given", [optimizer(), optimizer(("", {"lr": 1.0}))])
def test_without_groups_or_members_nothing_is_guessed(given):
    with pytest.raises(MissingFact):
        two_groups(given, ORDER, "x")


def lambda_state(*rates):
    many = list(rates)
    return {"base_lrs": many, "last_epoch": 7, "_step_count": 8, "_last_lr": many, "lr_lambdas": [None] * len(many)}


def test_a_lambda_scheduler_is_carried_with_its_rates_by_group():
    two = two_groups(optimizer(("b norm", {"lr": 1.0}), ("emb w", {"lr": 2.0})), ORDER, "x")
    state, used, line = scheduler({"scheduler": lambda_state(1.0, 2.0)}, two, 5, 2)
    assert state == lambda_state(2.0, 1.0)
    assert (used, line.fate) == (("scheduler",), "carried")


def test_one_rate_serves_both_groups():
    two = two_groups(optimizer(("emb w b norm", {"lr": 1.0})), ORDER, "x")
    assert scheduler({"lr_scheduler": [lambda_state(3.0)]}, two, 5, 1)[0] == lambda_state(3.0, 3.0)


def test_another_scheduler_gives_its_place_to_counters_and_rates():
    two = two_groups(optimizer(("emb w", {"lr": 0.5, "initial_lr": 1.0}), ("b norm", {"lr": 0.25})), ORDER, "x")
    state, used, line = scheduler({"scheduler": {"T_max": 10, "last_epoch": 5, "base_lrs": [1.0, 1.0]}}, two, 5, 2)
    assert (used, line.fate) == (("scheduler",), "converted")
    assert (state["base_lrs"], state["_last_lr"], state["last_epoch"], state["_step_count"]) == (
        [1.0, 0.25],
        [0.5, 0.25],
        5,
        6,
    )
    none, used, line = scheduler({}, two, 5, 2)
    assert (none, used, line.fate) == (state, (), "written")
