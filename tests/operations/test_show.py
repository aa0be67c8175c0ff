"""show: values, slices, statistics, .npy files, and values of the training state."""

import json

import ml_dtypes
import numpy as np
import pytest

from ckptctl.operations.showing import parse_index, select
from tests.support.commands import document, good, refused
from tests.support.saving import Strided, adamw, arange, dcp_save, torch_save

W = arange(6, 5)


@pytest.fixture
def path(tmp_path):
    model = {
        "w": W,
        "s": np.array(2.5, np.float32),
        "e": arange(0, 3),
        "h": arange(4, dtype=ml_dtypes.bfloat16),
        "t": Strided(W, 0, (5, 6), (1, 5)),
    }
    tree = {
        "model": model,
        "optimizer": adamw(["w"], {"w": W}),
        "scheduler": {"a.b": {"c": 1}, "a": {"d": [1, 2]}, "none": None},
    }
    return torch_save(tmp_path / "x.pt", tree | {"step": 3})


@pytest.mark.parametrize(
    "text", ["0:4, :3", "2", "-1", "...", "..., 1", "1:6:2, ::3", ":, -2", "4:2", "[0, 0]", "3, ...", "-3:-1"]
)
def test_slices_are_numpy_s(path, text):
    got = document("show", path, "w", f"--slice={text}")
    want = eval(f"W[{text.strip('[]')}]")
    assert got["values"] == want.tolist()
    assert (
        document("show", path, "t", f"--slice={text}")["values"]
        == eval(f"W.reshape(-1)[:30].reshape(6, 5).T[{text.strip('[]')}]").tolist()
        if text not in ("4:2",)
        else True
    )


@pytest.mark.parametrize("text", ["7", "0, 9", "x", "1.5", "::-1", "0,0,0", "..., ...", "1:2:0", ":::"])
def test_slices_that_do_not_fit_are_mistakes(path, text):
    refused("show", path, "w", f"--slice={text}", code=2)


def test_values_types_and_kinds(path):
    found = document("show", path, "w")
    assert (found["dtype"], found["shape"], found["kind"], found["values"]) == ("float32", [6, 5], "weight", W.tolist())
    assert document("show", path, "w", "--kind", "exp_avg")["values"] == (W + 0.5).tolist()
    assert document("show", path, "s")["values"] == 2.5
    assert document("show", path, "e")["values"] == []
    assert document("show", path, "h")["values"] == [0.0, 1.0, 2.0, 3.0]


def test_a_large_tensor_is_shown_in_part(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"w": arange(100, 100)})
    found = document("show", path, "w")
    assert "values" not in found
    assert "the first 8 x 8" in found["text"]


def test_statistics(tmp_path):
    values = np.array([1, -3, 0, -0.0, np.nan, np.inf, -np.inf, 4], np.float32)
    path = torch_save(
        tmp_path / "x.pt",
        {
            "w": values,
            "n": np.full(3, np.nan, np.float32),
            "c": np.array([3 + 4j], np.complex64),
            "i": arange(5, dtype=np.int64),
            "b": np.array([True, False]),
            "e": arange(0),
        },
    )
    found = document("show", path, "w", "--stats")["stats"]
    assert found == {
        "elements": 8,
        "min": -3.0,
        "max": 4.0,
        "mean": 0.4,
        "norm": 26**0.5,
        "nan": 1,
        "inf": 2,
        "zero": 2,
    }
    assert document("show", path, "w", "--stats", "--slice", "0:2")["stats"]["mean"] == -1.0
    assert document("show", path, "n", "--stats")["stats"]["min"] is None
    assert document("show", path, "c", "--stats")["stats"]["max"] == 5.0
    assert document("show", path, "i", "--stats")["stats"]["mean"] == 2.0
    assert document("show", path, "b", "--stats")["stats"]["zero"] == 1
    assert document("show", path, "e", "--stats")["stats"]["elements"] == 0


def test_infinities_and_nans_are_valid_json(tmp_path):
    path = torch_save(
        tmp_path / "x.pt",
        {"model": {"w": np.array([np.nan, np.inf], np.float32)}, "loss": float("nan"), "best": float("-inf")},
    )
    for words in (["show", path, "w"], ["show", path, "loss"], ["show", path, "best"], ["inspect", path]):
        assert document(*words)


@pytest.mark.parametrize("name", ["w", "h", "s", "e", "t"])
def test_npy_files_hold_the_elements(path, name, tmp_path):
    found = document("show", path, name, "--npy", tmp_path / "a.npy")
    assert found["npy"] == str(tmp_path / "a.npy")
    array = np.load(tmp_path / "a.npy", allow_pickle=False)
    if name == "h":
        assert array.dtype == np.uint16
        assert array.view(ml_dtypes.bfloat16).tolist() == [0, 1, 2, 3]
    else:
        assert (
            array.tolist()
            == {"w": W, "s": np.float32(2.5), "e": arange(0, 3), "t": W.reshape(-1).reshape(6, 5).T}[name].tolist()
        )
    good("show", path, "w", "--slice", "1, 2:4", "--npy", tmp_path / "b.npy")
    assert np.load(tmp_path / "b.npy").tolist() == W[1, 2:4].tolist()


def test_more_than_memory_allows_is_refused_before_it_is_read(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"w": np.zeros((600, 10_000), np.float32)})
    refused("show", path, "w", "--npy", tmp_path / "a.npy", "--memory", "16MiB", code=2)
    good("show", path, "w", "--npy", tmp_path / "a.npy", "--memory", "16MiB", "--slice", "0:10")
    good("show", path, "w", "--stats", "--memory", "16MiB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduler.a.b.c", 1),
        ("scheduler.a.d", [1, 2]),
        ("scheduler.none", None),
        ("step", 3),
        ("scheduler.a.b", {"c": 1}),
    ],
)
def test_values_by_name(path, name, value):
    assert document("show", path, name)["value"] == value


def test_groups_are_values_too(path):
    groups = document("show", path, "param_groups")["value"]
    assert groups[0]["params"] == ["w"]
    assert groups[0]["betas"] == [0.9, 0.999]


def test_a_name_that_is_not_there_has_its_neighbours_told(path):
    assert "near to it: w" in refused("show", path, "ww")["why"]
    assert "exp_avg" in refused("show", path, "w", "--kind", "exp_avgs")["why"]
    refused("show", path, "scheduler.x")


def test_a_slice_across_chunks(tmp_path):
    from tests.support.saving import Chunk

    cut = {"model.w": [Chunk("__0_0.distcp", (0, 0), (2, 5)), Chunk("__1_0.distcp", (2, 0), (4, 5))]}
    path = dcp_save(tmp_path / "run", {("model", "w"): W}, cut)
    assert document("show", path, "w", "--slice", "1:4, ::2")["values"] == W[1:4, ::2].tolist()


def test_indexes_are_parsed_and_resolved_as_numpy_does():
    assert parse_index("0:4, :8") == (slice(0, 4), slice(None, 8))
    shape = (7, 5, 3)
    array = np.arange(105).reshape(shape)
    for index in (3, -1, slice(1, None, 2), (0, 1, 2), (..., 0), (slice(None), -1), (2, ...), (slice(5, 2),), ()):
        chosen = select(index, shape)
        box = array[tuple(slice(a, a + n) for a, n in zip(chosen.lo, chosen.size, strict=True))]
        got = box[tuple(0 if a in chosen.dropped else slice(None, None, s) for a, s in enumerate(chosen.steps))]
        np.testing.assert_array_equal(got, array[index])
    for index in (7, (0, 0, 0, 0), slice(None, None, -1), "x", 1.0, [1, 2]):
        with pytest.raises(IndexError):
            select(index, shape)


def test_text_of_a_tensor(path):
    out = good("show", path, "w", "--slice", "0").out
    assert "[0., 1., 2., 3., 4.]" in out
    assert json.loads(json.dumps(out))
