"""Batches: drawn by a seed, read from files, and what is no batch is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ckptctl.core.errors import MissingFile, Usage
from ckptctl.operations.verify.batches import Wanted, batches


def test_drawn_batches_depend_on_seed_and_step_alone():
    one, two = batches(Wanted(), 2, 131), batches(Wanted(), 2, 131)
    assert [b.input_ids.tolist() for b in one] == [b.input_ids.tolist() for b in two]
    assert one[0].input_ids.tolist() != one[1].input_ids.tolist()
    assert one[0].input_ids.shape == (4, 32)
    assert batches(Wanted(seed=7), 1, 131)[0].input_ids.tolist() != one[0].input_ids.tolist()


def test_files_of_three_kinds_give_the_same_batches(tmp_path):
    from safetensors.numpy import save_file

    ids = np.arange(24).reshape(2, 3, 4)
    labels = np.where(ids % 2, ids, -100)
    np.savez(tmp_path / "b.npz", input_ids=ids, labels=labels)
    save_file({"input_ids": ids, "labels": labels}, tmp_path / "b.safetensors")
    steps = [{"input_ids": i.tolist(), "labels": x.tolist()} for i, x in zip(ids, labels, strict=True)]
    (tmp_path / "b.json").write_text(json.dumps(steps))
    for name in ("b.npz", "b.safetensors", "b.json"):
        found = batches(Wanted(tmp_path / name), 2, 131)
        assert [b.input_ids.tolist() for b in found] == ids.tolist()
        assert [b.labels.tolist() for b in found] == labels.tolist()


def test_one_step_may_be_without_the_axis_of_steps(tmp_path):
    (tmp_path / "b.json").write_text('{"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 0]]}')
    (found,) = batches(Wanted(tmp_path / "b.json"), 1, 131)
    assert found.labels.tolist() == [[1, 2, 3]]
    assert found.attention_mask.tolist() == [[1, 1, 0]]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.json", b"{"),
        ("b.json", b"[]"),
        ("b.json", b"[3]"),
        ("b.json", b'{"labels": [[1, 2]]}'),
        ("b.json", b'{"input_ids": [[1.5, 2]]}'),
        ("b.json", b'{"input_ids": [[1, 2], [3]]}'),
        ("b.json", b'{"input_ids": [[1]]}'),
        ("b.json", b'{"input_ids": [1, 2]}'),
        ("b.json", b'{"input_ids": [[1, 2]], "labels": [[1, 2, 3]]}'),
        ("b.json", b'{"input_ids": [[1, 500]]}'),
        ("b.json", b'{"input_ids": [[1, -1]]}'),
        ("b.json", b'{"input_ids": [[1, 99999999999999999999999]]}'),
        ("b.json", b"[" * 5000),
        ("b.npz", b"not a zip"),
        ("b.npz", b"PK\x05\x06" + b"\0" * 18),
        ("b.safetensors", b"\xff" * 16),
        ("b.txt", b"1 2 3"),
    ],
)
def test_what_is_no_batch_is_wrong_usage(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Usage):
        batches(Wanted(tmp_path / name), 1, 131)


def test_a_file_that_is_not_there_is_missing(tmp_path):
    with pytest.raises(MissingFile):
        batches(Wanted(tmp_path / "b.npz"), 1, 131)


def test_fewer_batches_than_steps_are_refused(tmp_path):
    (tmp_path / "b.json").write_text('{"input_ids": [[1, 2, 3]]}')
    with pytest.raises(Usage, match="has 1 batches"):
        batches(Wanted(tmp_path / "b.json"), 2, 131)


@pytest.mark.parametrize(
    ("labels", "why"),
    [([1, 2, 99], "label 99"), ([1, 2, -7], "label -7"), ([-100] * 3, "no label"), ([1, -100, -100], "no label")],
)
def test_labels_that_are_no_tokens_and_batches_without_a_loss_are_refused(labels, why, tmp_path):
    file = tmp_path / "batch.json"
    file.write_text(json.dumps({"input_ids": [[1, 2, 3]], "labels": [labels]}))
    with pytest.raises(Usage, match=why):
        batches(Wanted(file), 1, 50)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ([[0, 0, 0], [0, 0, 0]], "zeros in row 0"),
        ([[1, 1, 1], [0, 0, 0]], "zeros in row 1"),
        ([[1, 2, 1], [1, 1, 1]], "has 2 in"),
        ([[1, -1, 1], [1, 1, 1]], "has -1 in"),
    ],
)
def test_a_mask_that_lets_nothing_be_seen_is_refused(mask, why, tmp_path):
    file = tmp_path / "batch.json"
    step = {"input_ids": [[1, 2, 3]] * 2, "attention_mask": mask}
    file.write_text(json.dumps(step))
    with pytest.raises(Usage, match=why):
        batches(Wanted(file), 1, 50)


def test_a_row_that_is_padding_alone_may_be_masked(tmp_path):
    file = tmp_path / "batch.json"
    step = {"input_ids": [[1, 2, 3]] * 2, "labels": [[1, 2, 3], [-100] * 3], "attention_mask": [[1, 1, 0], [0, 0, 0]]}
    file.write_text(json.dumps(step))
    assert len(batches(Wanted(file), 1, 50)) == 1
