"""Whole runs over tensor-parallel ranks, made by hand: universal folders of them, and ranks that hold none of some."""

from __future__ import annotations

import numpy as np

import ckptctl
from ckptctl.core.values import OrderedPairs
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.formats.deepspeed.test_damage import state
from tests.formats.deepspeed.test_read import stopped
from tests.support.commands import good
from tests.support.zero_runs import Saved, numbers, write_model, write_shards

WHOLE = {
    "up.weight": numbers(6, 4),
    "down.weight": numbers(4, 6),
    "norm.weight": numbers(4),
    "base.weight": numbers(8, 3),
}
AXES = {"up.weight": 0, "down.weight": 1, "base.weight": 0}
INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r"down\.weight"],
    "tp_replicated_parameter_patterns": [r"norm\.weight"],
}
FROZEN = "base.weight"


def sliced(whole, first):
    """Two ranks' slices: the first has so many rows or columns of each."""
    return [
        {n: np.split(p, [first[n]], AXES[n])[rank] if n in AXES else p for n, p in whole.items()} for rank in (0, 1)
    ]


def universal(folder, *, flat=False):
    """What ds_to_universal makes of two ranks: frozen parameters are the first rank's slice."""
    slices = sliced(WHOLE, {"up.weight": 3, "down.weight": 2, "base.weight": 4})
    step = folder / "global_step3_universal"
    for rank, mine in enumerate(slices):
        trained = {n: SizeTuple(p.shape) for n, p in mine.items() if n != FROZEN}
        write_model(
            step / f"mp_rank_{rank:02d}_model_states.pt",
            mine,
            1,
            param_shapes=[OrderedPairs(trained)],
            frozen_param_shapes=OrderedPairs({FROZEN: SizeTuple(mine[FROZEN].shape)}),
            mp_world_size=2,
            universal_checkpoint_info=INFO,
        )
    for name, values in WHOLE.items():
        kinds = {"fp32": values, "exp_avg": 2 * values} if name != FROZEN else {"fp32": slices[0][FROZEN]}
        for kind, array in kinds.items():
            made = Saved()
            made.save(step / "zero" / name / f"{kind}.pt", {"param": made.tensor(array.reshape(-1) if flat else array)})
    made = Saved()
    made.save(step / "zero" / "optimizer_state.pt", {"param_groups": [{"lr": 0.1, "params": [0]}], "zero_stage": 2})
    (folder / "latest_universal").write_text(step.name)


def test_a_universal_folder_of_sliced_ranks_is_whole(tmp_path):
    universal(tmp_path / "run")
    held = state(tmp_path / "run")
    for name, values in WHOLE.items():
        assert held[name, "weight"] == values.tolist()
        if name != FROZEN:
            assert held[name, "master"] == values.tolist()
            assert held[name, "exp_avg"] == (2 * values).tolist()
    good("reshard", tmp_path / "run", tmp_path / "out", "--dp", "3", "--zero-stage", "3")
    assert state(tmp_path / "out") == held


def test_flat_tensors_of_sliced_parameters_are_refused(tmp_path):
    universal(tmp_path / "run", flat=True)
    assert stopped(tmp_path / "run", tmp_path)["code"] == "zero-layout"


def test_a_rank_without_any_element_of_a_parameter_has_no_state_of_it(tmp_path):
    """Heads that do not divide: AutoTP gives one rank all columns, and DeepSpeed's optimizer leaves the others' out."""
    whole = {n: p for n, p in WHOLE.items() if n != FROZEN}
    for rank, mine in enumerate(sliced(whole, {"up.weight": 3, "down.weight": 6})):
        trained = {n: p for n, p in mine.items() if p.size}
        shapes = [OrderedPairs({n: SizeTuple(p.shape) for n, p in trained.items()})]
        more = {"param_shapes": shapes, "mp_world_size": 2, "universal_checkpoint_info": INFO}
        write_model(tmp_path / f"run/mp_rank_{rank:02d}_model_states.pt", mine, 1, **more)
        write_shards(tmp_path / "run", trained, 1, mp=rank)
    held = state(tmp_path / "run")
    for name, values in whole.items():
        assert held[name, "weight"] == held[name, "master"] == values.tolist()
        assert held[name, "exp_avg"] == (2 * values).tolist()
    with ckptctl.open(tmp_path / "run") as view:
        assert view["down.weight"].shape == (4, 6)


def test_slices_of_different_types_are_refused(tmp_path):
    """One's bytes would be taken for the other's type."""
    for rank, mine in enumerate(sliced(WHOLE, {"up.weight": 3, "down.weight": 2, "base.weight": 4})):
        more = {"mp_world_size": 2, "universal_checkpoint_info": INFO}
        if rank:
            made = Saved()
            halves = OrderedPairs({n: made.half(p) for n, p in mine.items()})
            made.save(tmp_path / "two/mp_rank_01_model_states.pt", {"module": halves, "global_steps": 3, **more})
        else:
            write_model(tmp_path / "two/mp_rank_00_model_states.pt", mine, 1, **more, dp_world_size=None)
    assert stopped(tmp_path / "two", tmp_path)["code"] == "mixed-saves"


def test_a_buffer_of_sliced_ranks_is_one(tmp_path):
    """AutoTP's patterns have parameters alone: it was taken for slices, and laid twice in a row."""
    info = {**INFO, "tp_replicated_parameter_patterns": ["norm"]}
    for rank in (0, 1):
        params = {"norm.weight": WHOLE["norm.weight"]}
        shapes = [OrderedPairs({n: SizeTuple(p.shape) for n, p in params.items()})]
        more = {"param_shapes": shapes, "mp_world_size": 2, "buffer_names": ["gain"], "universal_checkpoint_info": info}
        write_model(tmp_path / f"run/mp_rank_{rank:02d}_model_states.pt", {**params, "gain": numbers(3)}, 1, **more)
        write_shards(tmp_path / "run", params, 1, mp=rank)
    held = state(tmp_path / "run")
    assert held["gain", "buffer"] == numbers(3).tolist()
    assert held["norm.weight", "weight"] == WHOLE["norm.weight"].tolist()
