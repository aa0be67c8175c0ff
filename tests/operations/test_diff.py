"""diff: every way in which two checkpoints may differ, and that nothing else is one."""

import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import ckptctl, document, good, refused
from tests.support.saving import adamw, arange, dcp_save, hf_save, torch_save


def compare(tmp_path, a, b, *words, code=None):
    """The document for two state dicts."""
    paths = [torch_save(tmp_path / f"{n}.pt", tree) for n, tree in (("a", a), ("b", b))]
    done = ckptctl("diff", *paths, *words, "--json")
    found = done.json
    assert done.code == (0 if found["equal"] else 1)
    assert found["equal"] == (not found["differences"])
    return found


def whats(found):
    return [(d["name"], d["kind"], d["what"]) for d in found["differences"]]


def test_equal_bytes_are_equal(tmp_path):
    found = compare(tmp_path, {"w": arange(3, 3)}, {"w": arange(3, 3)})
    assert (found["equal"], found["compared"]) == (True, {"weight": 1})


def test_a_value_is_named_with_its_first_place(tmp_path):
    other = arange(3, 3)
    other[1, 2] = 50
    other[2, 2] = 60
    found = compare(tmp_path, {"w": arange(3, 3)}, {"w": other})
    assert whats(found) == [("w", "weight", "value")]
    assert found["differences"][0]["detail"] == "2 of 9 elements; the first at [1, 2]: 5.0 and 50.0"


def test_shapes_types_and_names(tmp_path):
    a = {"same": arange(2), "shape": arange(4), "type": arange(4), "gone": arange(1)}
    b = {"same": arange(2), "shape": arange(2, 2), "type": arange(4, dtype=np.float64), "new": arange(1, start=5)}
    found = compare(tmp_path, a, b)
    assert whats(found) == [
        ("shape", "weight", "shape"),
        ("type", "weight", "dtype"),
        ("gone", "weight", "only-in-a"),
        ("new", "weight", "only-in-b"),
    ]


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_ignore_dtype_widens_and_is_exact(narrow, wide, tmp_path):
    values = np.array([1.5, -0.0, 0.0, np.inf, 2.0**-14], np.float32)
    a, b = {"w": values.astype(narrow)}, {"w": values.astype(narrow).astype(wide)}
    assert whats(compare(tmp_path, a, b)) == [("w", "weight", "dtype")]
    assert compare(tmp_path, a, b, "--ignore-dtype")["equal"]
    assert compare(tmp_path, b, a, "--ignore-dtype")["equal"]
    b["w"][0] = np.nextafter(b["w"][0], 2, dtype=wide)
    assert whats(compare(tmp_path, a, b, "--ignore-dtype")) == [("w", "weight", "value")]


def test_integers_are_not_widened(tmp_path):
    found = compare(tmp_path, {"w": arange(2, dtype=np.int32)}, {"w": arange(2, dtype=np.int64)}, "--ignore-dtype")
    assert whats(found) == [("w", "weight", "dtype")]


def test_a_nan_equals_itself_and_a_negative_zero_is_not_zero(tmp_path):
    odd = np.array([0x7FC12345, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert compare(tmp_path, {"w": odd}, {"w": odd.copy()})["equal"]
    assert compare(tmp_path, {"w": odd}, {"w": odd.copy()}, "--ignore-dtype")["equal"]
    payload = np.array([0x7FC12346, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    assert whats(compare(tmp_path, {"w": odd}, {"w": payload})) == [("w", "weight", "value")]
    zeros = compare(tmp_path, {"w": np.zeros(3, np.float32)}, {"w": np.array([0.0, -0.0, 0.0], np.float32)})
    assert zeros["differences"][0]["detail"] == "1 of 3 elements; the first at [1]: 0.0 and -0.0"


def state(**changes):
    model = {"a": arange(2, 2), "b": arange(3)}
    tree = {
        "model": model,
        "optimizer": adamw(list(model), model),
        "scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2]},
        "step": 3,
    }
    tree["rng"] = {"torch": arange(8, dtype=np.uint8)}
    for path, value in changes.items():
        *keys, last = path.split("__")
        at = tree
        for key in keys:
            at = at[int(key) if isinstance(at, list) else key]
        at[last] = value
    return tree


OPTIMIZER = {
    "moment": ({"optimizer__state__b__exp_avg": arange(3)}, ("b", "exp_avg", "value")),
    "moment's type": ({"optimizer__state__b__exp_avg": arange(3, dtype=np.float64)}, ("b", "exp_avg", "dtype")),
    "step": ({"optimizer__state__b__step": np.array(4, np.float32)}, ("b", "step", "value")),
    "setting": ({"optimizer__param_groups__0__lr": 0.5}, ("a", "group", "value")),
    "flag": ({"optimizer__param_groups__0__amsgrad": True}, ("a", "group", "value")),
    "member": ({"optimizer__param_groups__0__params": ["a"]}, ("b", "group", "only-in-a")),
}


@pytest.mark.parametrize("case", OPTIMIZER)
def test_the_optimizer_is_compared_when_asked(case, tmp_path):
    change, want = OPTIMIZER[case]
    assert compare(tmp_path, state(), state(**change))["equal"]
    found = compare(tmp_path, state(), state(**change), "--optimizer")
    assert want in whats(found)
    assert {d["kind"] for d in found["differences"]} == {want[1]}


def test_that_torchs_adam_corrects_the_bias_needs_no_word(tmp_path):
    """A fused Adam has a setting for it, torch's has none and does it always."""
    torchs = {"optimizer__param_groups__0__amsgrad": False}
    said = {**torchs, "optimizer__param_groups__0__bias_correction": True}
    assert compare(tmp_path, state(**torchs), state(**said), "--optimizer")["equal"]
    assert compare(tmp_path, state(**said), state(**torchs), "--optimizer")["equal"]
    without = state(**torchs, optimizer__param_groups__0__bias_correction=False)
    assert ("a", "group", "value") in whats(compare(tmp_path, state(**torchs), without, "--optimizer"))


STATE = {
    "scheduler": ({"scheduler__last_epoch": 4}, ("scheduler.last_epoch", "scheduler", "value")),
    "list": ({"scheduler__lrs": [0.1, 0.3]}, ("scheduler.lrs", "scheduler", "value")),
    "counter": ({"step": 4}, ("step", "counters", "value")),
    "random state": ({"rng__torch": arange(8, dtype=np.uint8, start=1)}, ("rng.torch", "rng", "value")),
    "new": ({"epoch": 1}, ("epoch", "counters", "only-in-b")),
    "a flag is no number": ({"scheduler__last_epoch": True}, ("scheduler.last_epoch", "scheduler", "value")),
}


@pytest.mark.parametrize("case", STATE)
def test_the_rest_is_compared_when_asked(case, tmp_path):
    change, want = STATE[case]
    assert compare(tmp_path, state(), state(**change))["equal"]
    assert compare(tmp_path, state(), state(**change), "--optimizer")["equal"]
    assert whats(compare(tmp_path, state(), state(**change), "--state")) == [want]


def test_all_of_a_state_against_itself(tmp_path):
    found = compare(tmp_path, state(), state(), "--optimizer", "--state")
    assert found["equal"]
    assert found["compared"] == {
        "weight": 2,
        "exp_avg": 2,
        "exp_avg_sq": 2,
        "step": 2,
        "group settings": 2,
        "scheduler": 2,
        "counters": 1,
        "rng": 1,
    }


def test_an_optimizer_on_one_side_only(tmp_path):
    weights = {"model": state()["model"]}
    found = compare(tmp_path, state(), weights, "--optimizer")
    assert ("param_groups", "group", "only-in-a") in whats(found)
    assert ("a", "exp_avg", "only-in-a") in whats(found)
    assert ("a", "step", "only-in-a") in whats(found)
    assert compare(tmp_path, weights, weights, "--optimizer", "--state")["equal"]


def test_only_looks_at_what_matches(tmp_path):
    a, b = {"x.w": arange(2), "y.w": arange(2)}, {"x.w": arange(2), "y.w": arange(2, start=1)}
    assert compare(tmp_path, a, b, "--only", "x.*")["equal"]
    assert not compare(tmp_path, a, b, "--only", "x.*", "--only", "y.*")["equal"]


@pytest.mark.parametrize("case", [c for c in OPTIMIZER if OPTIMIZER[c][1][0] == "b"])
def test_only_is_for_every_part_of_the_optimizer(case, tmp_path):
    change, _ = OPTIMIZER[case]
    assert compare(tmp_path, state(), state(**change), "--optimizer", "--only", "a")["equal"]
    assert not compare(tmp_path, state(), state(**change), "--optimizer", "--only", "b")["equal"]


def test_what_one_side_alone_has_is_not_counted_as_compared(tmp_path):
    found = compare(tmp_path, state(optimizer__state__b__note="x"), state(), "--optimizer")
    assert whats(found) == [("b", "note", "only-in-a")]
    assert "note" not in found["compared"]


def test_a_pattern_that_matches_nothing_compares_nothing_and_is_a_mistake(tmp_path):
    paths = [torch_save(tmp_path / f"{n}.pt", {"w": arange(2)}) for n in "ab"]
    assert "zzz" in refused("diff", *paths, "--only", "zzz*", code=2)["what"]


def test_across_formats_and_cuts(tmp_path):
    source = ckpt("torch/fsdp2_dp4_dcp")
    good("convert", source, tmp_path / "t", "--to", "torch")
    good("reshard", source, tmp_path / "d", "--dp", "3")
    for other in ("t", "d"):
        found = document("diff", source, tmp_path / other, "--optimizer", "--state")
        assert found["equal"], found["differences"]
        assert found["compared"]["exp_avg"] == 21
    assert ckptctl("diff", source, ckpt("torch/hsdp_2x2_dcp"), "--optimizer").code in (0, 1)


def test_a_tied_head_stands_for_its_embedding(tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    embedding = arange(3, 2)
    a = hf_save(tmp_path / "a", {"model.embed_tokens.weight": embedding}, config)
    b = torch_save(tmp_path / "b.pt", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.copy()})
    assert document("diff", a, b)["equal"]
    assert document("diff", b, a)["equal"]
    c = torch_save(
        tmp_path / "c.pt", {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + np.float32(1)}
    )
    assert whats(ckptctl("diff", a, c, "--json").json) == [("lm_head.weight", "weight", "value")]


def test_weights_or_masters(tmp_path):
    """A run in bfloat16 that keeps float32 masters, here as DCP has them: a state called master."""
    master = arange(2, 2) / np.float32(3)
    items = {("model", "w"): master.astype(ml_dtypes.bfloat16), ("optim", "state", "w", "master"): master}
    items[("optim", "param_groups", 0, "params")] = ["w"]
    path = dcp_save(tmp_path / "run", items)
    other = torch_save(tmp_path / "x.pt", {"w": master})
    assert whats(ckptctl("diff", path, other, "--json").json) == [("w", "weight", "dtype")]
    assert document("diff", path, other, "--weights", "master")["equal"]
    refused("diff", path, other, "--weights", "best", code=2)
    good("convert", path, tmp_path / "out", "--to", "hf", "--no-optimizer", "--weights", "master")
    assert document("diff", tmp_path / "out", other)["equal"]
    report = document("convert", path, tmp_path / "again", "--to", "hf", "--no-optimizer", "--weights", "master")
    assert "1 masters, 0 weights as stored" in report["fidelity"][0]["detail"]


def test_large_tensors_are_compared_to_their_last_element(tmp_path):
    a = np.zeros((3, 1_500_000), np.float32)  # several strides of the comparison
    b = a.copy()
    b[2, -1] = 1
    found = compare(tmp_path, {"w": a}, {"w": b}, "--memory", "16MiB")
    assert found["differences"][0]["detail"].startswith("1 of 4500000 elements; the first at [2, 1499999]")


@pytest.mark.real
def test_a_run_against_itself_saved_in_other_ways(tmp_path):
    config = ["--model-config", truth_config("torch/plain_zip")]
    good("convert", ckpt("torch/plain_zip"), tmp_path / "hf", "--to", "hf", "--no-optimizer", *config)
    assert document("diff", ckpt("torch/plain_zip"), tmp_path / "hf")["equal"]
    assert document("diff", ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "hf")["equal"]


def test_a_difference_says_how_far_apart(tmp_path):
    a, b = {"w": np.array([[1, 2], [3, 4]], np.float32)}, {"w": np.array([[1, 2], [3.5, 8]], np.float32)}
    found = compare(tmp_path, a, b)["differences"][0]
    numbers = {k: found[k] for k in ("elements", "differing", "max_abs", "max_rel", "max_ulp", "first")}
    assert numbers == {
        "elements": 4, "differing": 2, "max_abs": 4.0, "max_rel": 0.5, "max_ulp": 1 << 23,
        "first": {"index": [1, 0], "a": 3.0, "b": 3.5},
    }  # fmt: skip


def test_a_tolerance_counts_what_it_lets_pass(tmp_path):
    a, b = {"w": np.array([1, 100], np.float32)}, {"w": np.array([1.001, 101], np.float32)}
    assert not compare(tmp_path, a, b, "--atol", "0.01")["equal"]
    found = compare(tmp_path, a, b, "--atol", "0.01", "--rtol", "0.01")
    assert (found["equal"], found["within_tolerance"]) == (True, 2)
    assert refused("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--rtol", "-1", code=2)["code"] == "usage"
    assert refused("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--atol", "nan", code=2)["code"] == "usage"


def test_a_tensor_under_another_name_is_renamed(tmp_path):
    a = {"old": arange(3), "zero.a": np.zeros(2, np.float32), "zero.b": np.zeros(2, np.float32), "same": arange(2)}
    b = {"new": arange(3), "zero.c": np.zeros(2, np.float32), "same": arange(2)}
    found = compare(tmp_path, a, b)
    assert whats(found) == [
        ("old", "weight", "renamed"),
        ("zero.a", "weight", "only-in-a"),
        ("zero.b", "weight", "only-in-a"),
        ("zero.c", "weight", "only-in-b"),
    ]
    assert found["differences"][0]["to"] == "new"
    b["new"] = arange(3, start=1)
    assert ("old", "weight", "only-in-a") in whats(compare(tmp_path, a, b))


def test_stats_by_layer(tmp_path):
    a = {
        "layers.0.w": np.array([3, 0], np.float32),
        "layers.0.v": np.array([4], np.float32),
        "head": np.ones(1, np.float32),
    }
    b = {**a, "layers.0.v": np.array([-4], np.float32)}
    stats = compare(tmp_path, a, b, "--stats")["stats"]
    assert stats["layers"][0] == {
        "layer": "layers.0", "kind": "weight", "norm_a": 5.0, "norm_b": 5.0, "norm_difference": 8.0, "cosine": -7 / 25,
    }  # fmt: skip
    first = stats["tensors"][0]
    assert (first["name"], first["layer"], first["module"]) == ("layers.0.w", "layers.0", "w")
