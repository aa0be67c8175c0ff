"""What valid runs hold that is not so in today's usual ones: files of old versions, settings of each rank's own."""

from __future__ import annotations

import numpy as np
import pytest

from ckptctl.core.values import OrderedPairs
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.formats.deepspeed.test_damage import PARAMS, state
from tests.formats.deepspeed.test_read import stopped
from tests.support.commands import document, good
from tests.support.zero_runs import Saved, numbers, write_run


def old_run(folder, params, cuts):
    """Stage 3 as DeepSpeed 0.4 saved it: a 1 in every place of module, and one list of shapes beside the optimizer."""
    dp, names = 2, list(params)
    groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    for rank in range(dp):
        made = Saved()
        places = {n: made.tensor([1.0]) for n in params} | {"steps": made.tensor([7.0, 8.0])}
        places["tied.weight"] = places["a.weight"]
        tree = {
            "module": OrderedPairs(places),
            "buffer_names": ["steps"],
            "optimizer": None,
            "global_steps": 3,
            "dp_world_size": dp,
            "mp_world_size": 1,
            "ds_version": "0.4.5",
        }
        made.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", tree)
        made = Saved()
        flats = []
        for group in groups:
            slots = [np.resize(params[n].reshape(-1), (dp, -(-params[n].size // dp)))[rank] for n in group]
            flats.append(np.concatenate(slots))
        inner = {
            "state": {i: {"step": 3, "exp_avg": made.tensor(2 * f)} for i, f in enumerate(flats)},
            "param_groups": [{"lr": 0.1, "params": list(range(len(flats)))}],
        }
        tree = {
            "optimizer_state_dict": {
                "zero_stage": 3,
                "partition_count": dp,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": [made.tensor(f) for f in flats],
            },
            "param_shapes": OrderedPairs({n: SizeTuple(p.shape) for n, p in params.items()}),
        }
        made.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", tree)


@pytest.mark.parametrize("cuts", [[], [2]])
def test_stage_three_of_old_versions_is_read(cuts, tmp_path):
    params = {**PARAMS, "scale": numbers(1)}
    old_run(tmp_path / "run", params, cuts)
    held = state(tmp_path / "run")
    for name, values in params.items():
        assert held[name, "weight"] == held[name, "master"] == values.tolist()
        assert held[name, "exp_avg"] == (2 * values).tolist()
    assert held["steps", "buffer"] == [7.0, 8.0]
    assert document("inspect", tmp_path / "run")["ties"] == {"tied.weight": "a.weight"}
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3", "--zero-stage", "2")
    assert state(tmp_path / "out")["b.weight", "exp_avg"] == held["b.weight", "exp_avg"]


def test_old_padded_groups_of_one_list_are_not_cut_by_a_guess(tmp_path):
    """Two flat groups of ZeRO-2, and one list of three shapes, padded: what is in which is not said."""

    def two(tree, made):
        tree["single_partition_of_fp32_groups"] = [made.tensor(numbers(10)), made.tensor(numbers(6))]
        tree["base_optimizer_state"]["state"] = {i: {"step": 3} for i in (0, 1)}
        tree["base_optimizer_state"]["param_groups"][0]["params"] = [0, 1]

    write_run(tmp_path / "run", PARAMS, dp=2, model={"param_shapes": None}, every=two)
    path = tmp_path / "run/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    made = Saved()
    tree = {"zero_stage": 2, "partition_count": 2, "base_optimizer_state": {"state": {}, "param_groups": []}}
    two_of = {
        "state": {i: {"step": 3} for i in (0, 1)},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
    }
    tree |= {"base_optimizer_state": two_of, "ds_version": "0.4.5"}
    tree["single_partition_of_fp32_groups"] = [made.tensor(numbers(10)), made.tensor(numbers(6))]
    shapes = OrderedPairs({n: SizeTuple(p.shape) for n, p in PARAMS.items()})
    made.save(path, {"optimizer_state_dict": tree, "param_shapes": shapes})
    error = stopped(tmp_path / "run", tmp_path)
    assert error["code"] == "param-order"
    assert "2 flat groups" in error["what"]


def test_frozen_parameters_of_more_than_two_tensor_parallel_ranks(tmp_path):
    """Each data-parallel rank's file is compared with the first of its model-parallel rank, and these are not all."""
    whole, base = numbers(6, 2), numbers(3, 2)
    info = {"tp_replicated_parameter_patterns": ["base"], "parameter_with_row_parallelism_patterns": []}
    for mp, mine in enumerate(np.split(whole, 3)):
        made = Saved()
        tree = {
            "module": OrderedPairs({"up.weight": made.tensor([]), "base.weight": made.tensor([])}),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedPairs({"up.weight": SizeTuple(mine.shape)})],
            "frozen_param_shapes": OrderedPairs({"base.weight": SizeTuple(base.shape)}),
            "frozen_param_fragments": OrderedPairs({"base.weight": made.tensor(base.reshape(-1))}),
            "global_steps": 3,
            "dp_world_size": 1,
            "mp_world_size": 3,
            "ds_config": {"zero_optimization": {"stage": 3}},
            "ds_version": "0.19.8",
            "universal_checkpoint_info": info,
        }
        made.save(tmp_path / f"zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt", tree)
        made = Saved()
        inner = {"state": {0: {"step": made.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        tree = {"zero_stage": 3, "partition_count": 1, "optimizer_state_dict": inner}
        tree["fp32_flat_groups"] = [made.tensor(mine.reshape(-1))]
        made.save(tmp_path / f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt", {"optimizer_state_dict": tree})
    held = state(tmp_path)
    assert held["base.weight", "weight"] == base.tolist()
    assert held["up.weight", "weight"] == whole.tolist()


def test_client_state_by_names_that_are_no_text_is_told(tmp_path):
    write_run(tmp_path / "run", PARAMS, model={"epoch": 4})
    made = Saved()
    tree = {"module": OrderedPairs({"a": made.tensor([1.0, 2.0])}), "buffer_names": [], "optimizer": None, 5: {"a": 1}}
    made.save(tmp_path / "alone/mp_rank_00_model_states.pt", {**tree, "global_steps": 3, "dp_world_size": 1})
    assert any("no text" in w and ": 5" in w for w in document("inspect", tmp_path / "alone")["warnings"])
    assert not any("no text" in w for w in document("inspect", tmp_path / "run")["warnings"])
