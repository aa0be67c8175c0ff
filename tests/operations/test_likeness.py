"""--like for results without a run's arguments: layout and order of parameters of a checkpoint."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import document, good, refused

TORCH, DEEPSPEED, DCP = "torch/fsdp2_dp2_dcp", "deepspeed/zero3-dp4-fp32", "torch/fsdp2_tp2x2_dcp"


def test_a_deepspeed_folder_is_like_another(tmp_path):
    flags = ("--to", "deepspeed", "--like", ckpt(DEEPSPEED), "--model-config", truth_config(TORCH))
    good("convert", ckpt(TORCH), tmp_path / "out", *flags)
    told = document("inspect", tmp_path / "out")
    assert (told["layout"]["dp"], told["layout"]["zero_stage"]) == (4, 3)
    good("convert", ckpt(TORCH), tmp_path / "two", *flags, "--dp", "2", "--zero-stage", "1")
    told = document("inspect", tmp_path / "two")
    assert (told["layout"]["dp"], told["layout"]["zero_stage"]) == (2, 1)


def test_a_deepspeed_folder_is_cut_like_another(tmp_path):
    good("convert", ckpt(DEEPSPEED), tmp_path / "one", "--to", "deepspeed", "--dp", "3", "--zero-stage", "2")
    good("reshard", ckpt(DEEPSPEED), tmp_path / "out", "--like", tmp_path / "one")
    told = document("inspect", tmp_path / "out")
    assert (told["layout"]["dp"], told["layout"]["zero_stage"]) == (3, 2)
    good("convert", ckpt(DEEPSPEED), tmp_path / "whole", "--to", "deepspeed", "--universal")
    good("reshard", ckpt(DEEPSPEED), tmp_path / "again", "--like", tmp_path / "whole")
    assert document("inspect", tmp_path / "again")["variant"] == "universal"


def test_a_dcp_is_cut_like_another(tmp_path):
    good("reshard", ckpt(TORCH), tmp_path / "out", "--like", ckpt(DCP))
    told = document("inspect", tmp_path / "out")
    assert {k: told["layout"][k] for k in ("dp", "tp", "world_size")} == {"dp": 2, "tp": 2, "world_size": 4}


@pytest.mark.parametrize("to", ["deepspeed", "dcp"])
def test_a_checkpoint_of_another_format_is_refused(to, tmp_path):
    like = {"deepspeed": DCP, "dcp": DEEPSPEED}[to]
    flags = ("--to", to, "--like", ckpt(like), "--model-config", truth_config(TORCH))
    error = refused("convert", ckpt(TORCH), tmp_path / "out", *flags)
    assert "--like: a checkpoint of" in error["what"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ("zero1-dp2-bf16", "does not train model.layers.2"),
        ("zero2-dp2-bf16", "trains model.embed_tokens.weight, which"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_its_parameters(like, said, tmp_path):
    """Fewer layers; and parameters that the source's run kept frozen."""
    source = ckpt("deepspeed/zero2-dp4-bf16-groups-frozen")
    error = refused("reshard", source, tmp_path / "out", "--like", ckpt(f"deepspeed/{like}"))
    assert error["code"] == "like-differs"
    assert said in error["what"]
    assert "--param-order" not in str(error)
