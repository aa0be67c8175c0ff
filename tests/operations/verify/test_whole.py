"""verify as a whole: other sizes, other ways, and conversions that are verified before they are put in place."""

from __future__ import annotations

import json

import pytest

import ckptctl
from ckptctl import operations
from ckptctl.core.errors import Damaged, Usage
from ckptctl.operations.verify.batches import batches
from tests.operations.verify.made import converted, reading_of, verified
from tests.support.checkpoints import ckpt, needs_torch
from tests.support.commands import ckptctl as command

pytestmark = needs_torch
LAYOUT = "torch/plain_legacy"
CONFIG = "--model-config"


def config_of(layout):
    return [CONFIG, str(reading_of(layout).model_config)]


@pytest.mark.parametrize(
    ("layout", "to", "more"),
    [
        ("torch/fsdp1_local", "megatron", {"tp": 2, "pp": 2}),
        ("deepspeed/zero3-dp2-bf16-qwen2-tied", "dcp", {}),
        ("megatron/qwen2_legacy_tp2pp2_tied", "deepspeed", {"zero_stage": 3, "dp": 3}),
        ("hf/mixtral-trainer", "megatron", {"ep": 2}),
        ("torch/fsdp2_dp2_bf16_dcp", "deepspeed", {"dp": 2}),
        ("deepspeed/zero1-dp2-bf16", "trainer", {"weights": "master", "dtype": "float32"}),
    ],
)
def test_a_conversion_trains_as_its_source(layout, to, more, tmp_path):
    given = "" if reading_of(layout).model_config is None else layout
    found = verified(
        ckpt(layout), converted(layout, tmp_path / "out", to, **more), given, same_settings=to == "megatron"
    )
    assert found["equal"], found["differences"][:5]
    widened = layout == "torch/fsdp2_dp2_bf16_dcp"  # DeepSpeed's masters and moments are float32, the run's were not
    assert found["tolerance"]["mode"] == ("tolerance" if widened else "bits")


def test_a_model_that_transformers_has_not_is_verified_without_it(tmp_path):
    layout = "deepspeed/moe-ep2-dp4-zero2-bf16"
    out = converted(layout, tmp_path / "out", "dcp")
    found = verified(ckpt(layout), out, no_model=True, steps=2)
    assert found["equal"], found["differences"][:5]
    assert found["a"]["losses"] == []
    assert found["compared"]["exp_avg"] == 40


def test_numbers_of_a_trainer_s_two_groups_get_the_names_of_a_run_that_has_one(tmp_path):
    """Saved without its frozen embedding, so that no config tells the order: the other side's names do."""
    layout = "deepspeed/zero2-dp2-bf16-frozen-excluded"
    out = converted(layout, tmp_path / "out", "trainer", weights="master", dtype="float32")
    found = verified(ckpt(layout), out, layout, no_model=True)
    assert found["equal"], found["differences"][:5]
    assert found["compared"]["exp_avg"] == 20


def test_fewer_layers_are_said(tmp_path):
    found = verified(ckpt(LAYOUT), ckpt(LAYOUT), LAYOUT, layers=1)
    assert found["equal"]
    assert found["layers"] == {"run": 1, "of": 2}
    assert any("the first 1 of 2 layers" in n for n in found["notes"])


def test_one_checkpoint_is_held_against_its_own_records(tmp_path):
    found = verified(ckpt("torch/trainer"), None, "torch/trainer")
    assert found["equal"] is True
    assert {"the loss that the run recorded", "the optimizer's count is the run's step"} <= {
        c["name"] for c in found["checks"]
    }


def test_a_step_that_is_not_the_run_s_is_found_in_one_checkpoint(tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(ckpt("torch/trainer"), copy)
    state = json.loads((copy / "trainer_state.json").read_text())
    (copy / "trainer_state.json").write_text(json.dumps({**state, "global_step": 7}))
    found = verified(copy, None, "torch/trainer")
    assert found["equal"] is False
    assert [c["name"] for c in found["checks"] if c["ok"] is False] == ["the optimizer's count is the run's step"]


def test_a_conversion_is_verified_before_it_has_its_name(tmp_path):
    done = command(
        "convert", ckpt(LAYOUT), tmp_path / "out", "--to", "megatron", "--verify", "--json", *config_of(LAYOUT)
    )
    assert done.code == 0, done
    assert done.json["verify"]["equal"] is True
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("words", [("convert", "torch/plain_legacy", "--to", "torch"),
                                   ("convert", "torch/plain_legacy", "--to", "torch", "--overwrite"),
                                   ("reshard", "torch/fsdp2_dp4_dcp", "--dp", "3")])  # fmt: skip
def test_a_result_that_differs_is_not_put_in_place(words, tmp_path, monkeypatch):
    from ckptctl.operations.verify import before

    right, (name, layout, *flags) = before.verify, words

    def other_source(src, result, what, reading):
        return right(ckpt("torch/fsdp1_local_flat"), result, what, reading)  # the same model of another optimizer

    monkeypatch.setattr(before, "verify", other_source)
    there = "--overwrite" in flags
    if there:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("old")
    done = command(name, ckpt(layout), tmp_path / "out", *flags, "--verify", "--json", *config_of(layout))
    assert done.code == 1, done
    assert done.error["code"] == "verify-differs"
    assert "does not train" in done.error["what"]
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == (
        ["out", "out/mine"] if there else []
    )


def test_weights_that_were_rounded_on_purpose_are_verified_as_such(tmp_path):
    words = ("--to", "hf", "--no-optimizer", "--dtype", "bfloat16", "--verify", "--quiet")
    assert command("convert", ckpt(LAYOUT), tmp_path / "out", *words, *config_of(LAYOUT)).code == 0


@pytest.mark.parametrize("flags", [("--only", "*norm*"), ("--exclude", "lm_head*")])
def test_what_is_another_model_is_not_verified(flags, tmp_path):
    done = command("convert", ckpt(LAYOUT), tmp_path / "out", "--to", "hf", "--no-optimizer", "--verify", *flags)
    assert done.code == 2
    assert not (tmp_path / "out").exists()


def test_the_python_api_gives_the_same_document():
    found = ckptctl.verify(ckpt(LAYOUT), model_config=reading_of(LAYOUT).model_config, rows=1, columns=8)
    assert found["schema"] == "ckptctl.verify/1"
    assert found["equal"] is True


def test_text_is_cut_into_batches_by_a_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", "a", "step", "is", "made", "of", "many"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.jsonl").write_text('"a step is made"\n\n{"text": "of many a step made of many"}\n')
    given = operations.Batches(data=tmp_path / "text.jsonl", tokenizer=tmp_path / "tokenizer", rows=2, columns=4)
    (batch,) = batches(given, 1, 131)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 1, 2]]
    with pytest.raises(Usage, match="has 11 tokens"):
        batches(given, 2, 131)
    assert verified(ckpt(LAYOUT), None, LAYOUT, batch=given)["equal"] is True


def test_an_optimizer_that_its_writer_damaged_is_refused_and_the_weights_are_not():
    layout = "megatron/dist_tp1pp1_distopt_full_dp2_buckets"
    with pytest.raises(Damaged, match="not that of the parameters"):
        verified(ckpt(layout), None, layout)
    assert verified(ckpt(layout), None, layout, no_optimizer=True)["equal"] is True
