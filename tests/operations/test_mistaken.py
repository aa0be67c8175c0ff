"""Parts of a file that could pass for others: each is what it is, or the file is refused, never in silence."""

import json

import numpy as np
import pytest

from tests.support.commands import ckptctl, document, good, refused
from tests.support.plain import torch_tree
from tests.support.saving import Strided, adamw, arange, dcp_save, hf_save, torch_save

BIG = (300, 100)  # too large to be a value
MODEL = {"a.w": arange(4, 3)}
OPTIMIZER = adamw(["a.w"], {"a.w": arange(4, 3)})


@pytest.mark.parametrize(
    "more",
    [
        {"optimizers": [OPTIMIZER, OPTIMIZER]},
        {"optimizer_g": OPTIMIZER, "optimizer_d": OPTIMIZER},
        {"optimizer": {"g": OPTIMIZER, "d": OPTIMIZER}},
        {"optimizer": OPTIMIZER, "discriminator_optimizer": OPTIMIZER},
    ],
    ids=["a list", "two names", "a dict of two", "a second beside"],
)
@pytest.mark.parametrize("words", [["--to", "hf", "--no-optimizer"], ["--to", "torch"]])
def test_a_second_optimizer_is_no_value_that_may_be_let_go(more, words, tmp_path):
    path = torch_save(tmp_path / "s.pt", {"model": MODEL, **more})
    assert "optimizer" in refused("convert", path, tmp_path / "out", *words)["what"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["weight", "buffer", "other", "file"])
def test_a_state_of_a_weight_s_name_does_not_replace_the_weight(kind, tmp_path):
    optimizer = {
        "state": {"a.w": {"step": 1, kind: arange(4, 3, start=50)}},
        "param_groups": [{"lr": 0.1, "params": ["a.w"]}],
    }
    path = torch_save(tmp_path / "s.pt", {"model": MODEL, "optimizer": optimizer})
    for to in ("torch", "dcp"):
        assert kind in refused("convert", path, tmp_path / to, "--to", to)["what"]


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"a": {"b": arange(2)}, "a.b": arange(3)}},
        {"model": {1: arange(2), "1": arange(3)}},
        {1: arange(2), "1": arange(3)},
        {"model": MODEL, 1: "x", "1": "y"},
    ],
)
def test_keys_that_would_have_one_name_are_refused(tree, tmp_path):
    path = torch_save(tmp_path / "s.pt", tree)
    assert refused("convert", path, tmp_path / "out", "--to", "torch")["code"] == "duplicate-name"


def test_large_tensors_at_paths_that_meet_stay_apart(tmp_path):
    one, two = arange(*BIG), arange(*BIG, start=7)
    path = torch_save(tmp_path / "s.pt", {"model": MODEL, "ema": {"w.x": one, "w": {"x": two}}})
    good("convert", path, tmp_path / "out", "--to", "torch")
    ema = torch_tree(tmp_path / "out")["ema"]
    assert ema["w.x"].numbers()[0, 0] == 0
    assert ema["w"]["x"].numbers()[0, 0] == 7


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_tensors_among_the_settings_of_groups_stay_with_their_group(to, tmp_path):
    groups = [
        {"lr": arange(), "mask": arange(*BIG), "params": ["a"]},
        {"lr": arange(start=9), "mask": arange(*BIG, start=5), "params": ["b"]},
    ]
    model = {"a": arange(2), "b": arange(3)}
    path = torch_save(tmp_path / "s.pt", {"model": model, "optimizer": {"state": {}, "param_groups": groups}})
    good("convert", path, tmp_path / "out", "--to", to)
    good("convert", tmp_path / "out", tmp_path / "back", "--to", "torch")
    got = torch_tree(tmp_path / "back")["optimizer"]["param_groups"]
    assert [g["lr"].numbers().item() for g in got] == [0, 9]
    assert [g["mask"].numbers()[0, 0] for g in got] == [0, 5]
    assert good("diff", path, tmp_path / "out", "--optimizer", "--state")


def test_an_averaged_model_is_never_the_model(tmp_path):
    path = torch_save(tmp_path / "s.pt", {"ema": {"a.w": arange(*BIG)}, "epoch": 3})
    refused("convert", path, tmp_path / "out", "--to", "hf")


def test_buffers_of_a_state_dict_may_be_called_like_counters(tmp_path):
    path = torch_save(tmp_path / "s.pt", {"step": arange(2), "epoch": arange(3, 3), "w": arange(2)})
    assert {t["name"] for t in document("ls", path)["tensors"]} == {"step", "epoch", "w"}


@pytest.mark.parametrize(
    "tree", [{"model": {"w": arange(2), "list": [arange(2)]}}, {"model": {"w": arange(2), "pair": (arange(2), 1)}}]
)
def test_tensors_without_names_in_the_model_are_refused(tree, tmp_path):
    refused("convert", torch_save(tmp_path / "s.pt", tree), tmp_path / "out", "--to", "hf")


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_value_called_like_a_part_of_the_result_is_refused(to, tmp_path):
    path = torch_save(tmp_path / "s.pt", {"state_dict": {"w": arange(2)}, "model": "llama"})
    assert "called model" in refused("convert", path, tmp_path / "out", "--to", to)["what"]


def test_trainable_only_keeps_every_name_of_a_weight(tmp_path):
    shared = arange(4, 3)
    model = {"model.embed_tokens.weight": shared, "x": arange(2), "lm_head.weight": shared}
    optimizer = adamw(["model.embed_tokens.weight"], {"model.embed_tokens.weight": arange(4, 3)})
    path = torch_save(tmp_path / "s.pt", {"model": model, "optimizer": optimizer})
    good("convert", path, tmp_path / "out", "--to", "hf", "--trainable-only", "--no-optimizer")
    names = {t["name"] for t in document("ls", tmp_path / "out")["tensors"]}
    assert names == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("flag", ["--report", "--plan-out"])
def test_side_files_never_overwrite_the_source(flag, tmp_path):
    path = torch_save(tmp_path / "s.pt", MODEL)
    before = path.read_bytes()
    assert refused("convert", path, tmp_path / "out", "--to", "torch", flag, path, code=2)["code"] == "usage"
    assert refused("convert", path, tmp_path / "out", "--to", "torch", flag, tmp_path / "no" / "r", code=2)
    assert path.read_bytes() == before
    assert not (tmp_path / "out").exists()


def changed(tree, *keys, value):
    """A copy of nested dicts and lists with one place changed."""
    if not keys:
        return value
    copy = list(tree) if isinstance(tree, list) else dict(tree)
    copy[keys[0]] = changed(copy[keys[0]], *keys[1:], value=value)
    return copy


RUN = {
    "model": MODEL,
    "optimizer": {
        "state": {"a.w": {"step": 3, "exp_avg": arange(4, 3), "note": 1}},
        "param_groups": [{"lr": arange(), "params": ["a.w"]}],
        "own": {"seed": 1},
    },
    "best": 1.0,
    "data": {"at": [1, 2]},
    "ema": {"a.w": arange(*BIG)},
}


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("optimizer", "state", "a.w", "step"), 2**53 + 1),
        (("optimizer", "state", "a.w", "note"), 2),
        (("optimizer", "param_groups", 0, "lr"), arange(start=1)),
        (("optimizer", "own", "seed"), 2),
        (("best",), 2.0),
        (("data", "at"), [1, 3]),
        (("ema", "a.w"), arange(*BIG, start=1)),
    ],
)
def test_diff_sees_a_change_in_any_part_that_is_carried(keys, value, tmp_path):
    one = torch_save(
        tmp_path / "a.pt", changed(RUN, "optimizer", "state", "a.w", "step", value=2**53) if "step" in keys else RUN
    )
    two = torch_save(tmp_path / "b.pt", changed(RUN, *keys, value=value))
    assert good("diff", one, one, "--optimizer", "--state")
    done = ckptctl("diff", one, two, "--optimizer", "--state", "--json")
    assert done.code == 1, done
    assert len(json.loads(done.out)["differences"]) == 1


def test_a_result_larger_than_the_disk_is_refused_at_once(tmp_path):
    wide = Strided(np.arange(4, dtype=np.float32), 0, (1 << 21, 1 << 21), (0, 0))
    path = torch_save(tmp_path / "s.pt", {"w": wide})
    assert refused("convert", path, tmp_path / "out", "--to", "hf")["code"] == "no-space"


@pytest.mark.parametrize("wrapper", [(), ("app",)])
@pytest.mark.parametrize("more", [{}, {("dataloader", "pos"): 3}, {("config", "x"): 1}])
def test_an_index_without_paths_keeps_moments_apart_from_weights(wrapper, more, tmp_path):
    items = {
        ("model", "model.a.w"): arange(4, 3),
        ("model", "lm_head.w"): arange(2),
        ("optim", "state", "model.a.w", "exp_avg"): arange(4, 3, start=20),
        ("optim", "state", "model.a.w", "step"): arange(),
        ("optim", "param_groups", 0, "lr"): 0.1,
        ("optim", "param_groups", 0, "params"): ["model.a.w"],
        **more,
    }
    folder = dcp_save(tmp_path / "in", {(*wrapper, *k): v for k, v in items.items()}, paths=False)
    good("convert", folder, tmp_path / "out", "--to", "hf", "--no-optimizer")
    assert {t["name"] for t in document("ls", tmp_path / "out")["tensors"]} == {"model.a.w", "lm_head.w"}
    kinds = document("inspect", folder)["kinds"]
    assert {k: v["tensors"] for k, v in kinds.items()} == {"weight": 2, "exp_avg": 1, "step": 1}


def test_an_index_without_paths_and_bare_names_is_told_by_the_optimizer(tmp_path):
    items = {
        ("model.a.w",): arange(4, 3),
        ("lm_head.w",): arange(2),
        ("optimizer", "state", "model.a.w", "exp_avg"): arange(4, 3, start=20),
        ("optimizer", "param_groups", 0, "lr"): 0.1,
    }
    folder = dcp_save(tmp_path / "in", items, paths=False)
    tensors = document("ls", folder)["tensors"]
    assert {(t["name"], t["kind"]) for t in tensors} == {
        ("model.a.w", "weight"),
        ("lm_head.w", "weight"),
        ("model.a.w", "exp_avg"),
    }
    items = {("net.a.w",): arange(2), ("opt_g.param_groups.0.lr",): 0.1, ("opt_g.state.net.a.w.exp_avg",): arange(2)}
    refused("inspect", dcp_save(tmp_path / "odd", items, paths=False))


# ---- weights that are not there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_placeholders_of_zero3_are_never_written_as_weights(to, tmp_path):
    tensors = {"model.norm.weight": np.ones(4, np.float32), "model.embed_tokens.weight": np.empty(0, np.float32)}
    source = hf_save(tmp_path / "src", tensors, {"model_type": "llama", "vocab_size": 9, "hidden_size": 4})
    error = refused("convert", source, tmp_path / "out", "--to", to)
    assert (error["code"], "1 of 2" in error["what"]) == ("placeholders", True)
    assert any("placeholders" in w for w in document("inspect", source)["warnings"])
    good("convert", source, tmp_path / "out", "--to", to, "--exclude", "*embed*")


def test_empty_tensors_of_no_known_model_are_tensors(tmp_path):
    source = hf_save(tmp_path / "src", {"a.weight": np.empty(0, np.float32), "b": np.ones(3, np.float32)})
    good("convert", source, tmp_path / "out", "--to", "torch")
