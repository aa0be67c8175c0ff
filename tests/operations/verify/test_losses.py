"""The losses that verify shows for the steps after a save are those that the real run recorded."""

from __future__ import annotations

import pytest

from ckptctl import operations
from tests.operations.verify.made import folder_of, recorded, reference_batch, verified
from tests.support.checkpoints import ckpt, needs_torch

pytestmark = needs_torch

IN_FLOAT32 = [
    "torch/plain_legacy",
    "torch/fsdp2_tp2x2_dcp",
    "torch/trainer",
    "torch/lightning_ckpt",
    "torch/torchtitan_dcp",
    "torch/verl_fsdp1",
    "megatron/legacy_tp2pp2_distopt_dp2",
    "megatron/dist_tp1pp2_vpp2",
    "megatron/qwen2_legacy_tp2pp2_tied",
    # Beside the repository: other families, pipelines, ZeRO in float32.
    "megatron/gpt2_legacy_tp2pp1",
    "megatron/qwen3_legacy_tp2pp1",
    "megatron/mixtral_dist_ep2_distopt_full",
    "deepspeed/zero3-dp4-fp32",
    "deepspeed/pipe-pp2-dp1-fp32",
    "deepspeed/zero2-dp2-fp32-qwen2-tied",
]
IN_16_BITS = [
    "deepspeed/zero1-dp2-bf16",
    "deepspeed/zero3-dp2-bf16-qwen2-tied",
    "deepspeed/pipe-pp2-dp2-zero1-bf16",
    "deepspeed/universal-zero1-dp2-bf16-fp32acc",
    "megatron/legacy_tp2pp1_distopt_dp2_bf16",
    "torch/fsdp2_dp2_bf16_dcp",
    "deepspeed/zero2-dp2-fp16",
]


def after_the_save(layout, tmp_path, **what):
    source = ckpt(layout)  # skips where the layout is not there
    batch = operations.Batches(reference_batch(tmp_path, 4, 5, 6))
    return verified(source, None, layout if (folder_of(layout) / "truth" / "config.json").exists() else "",
                    batch=batch, steps=3, **what)  # fmt: skip


@pytest.mark.parametrize("layout", IN_FLOAT32)
def test_losses_after_the_save_are_the_run_s(layout, tmp_path):
    found = after_the_save(layout, tmp_path)
    assert found["a"]["losses"] == pytest.approx(recorded(layout), abs=2e-5, rel=0)
    assert found["device"]["dtype"] == "float32"


@pytest.mark.parametrize("layout", IN_16_BITS)
def test_losses_of_16_bit_runs_are_the_run_s_within_their_type(layout, tmp_path):
    found = after_the_save(layout, tmp_path)
    assert found["a"]["losses"] == pytest.approx(recorded(layout), abs=5e-4, rel=0)
    assert found["device"]["dtype"] in ("bfloat16", "float16")


def test_deepspeed_s_warmup_goes_on_by_the_configuration_in_its_files(tmp_path):
    """total 20, warmup 4, from 0 to 1e-3: after three steps the count is 2, so the rates are 2/4, 3/4, 4/4."""
    found = after_the_save("deepspeed/zero1-dp2-bf16", tmp_path)
    assert found["a"]["lr"] == [[pytest.approx(5e-4)], [pytest.approx(7.5e-4)], [pytest.approx(1e-3)]]


def test_offload_and_other_memory_change_nothing(tmp_path):
    found = [
        after_the_save("deepspeed/zero1-dp2-bf16", tmp_path, **w) for w in ({}, {"offload": True, "memory": "16MiB"})
    ]
    assert found[0]["a"]["losses"] == found[1]["a"]["losses"]
    assert found[0]["a"]["logits"] == found[1]["a"]["logits"]


def test_megatron_s_padding_is_trained_as_the_run_did_and_left_out_where_asked(tmp_path):
    layout = "megatron/legacy_tp2pp2_distopt_dp2"
    padded, true = after_the_save(layout, tmp_path), after_the_save(layout, tmp_path, vocabulary="true")
    assert padded["padding_rows"] == 13
    assert true["padding_rows"] == 0
    import json

    said = json.loads((folder_of(layout) / "truth" / "losses.json").read_text())
    assert true["a"]["losses"][0] == pytest.approx(said["eval_at_save_real_vocabulary"]["4"], abs=2e-5, rel=0)
