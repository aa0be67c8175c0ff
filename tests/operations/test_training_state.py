"""Training state through conversions: moments, steps, groups, scheduler, counters; carried or refused, never lost."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import ckptctl
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.emit import dump
from tests.support.checkpoints import ckpt, digest, run_torch, truth, truth_config
from tests.support.commands import ckptctl as ckptctl_command
from tests.support.commands import document, good, refused
from tests.support.format_suite import all_digests, digest_of, tree_bytes, weights_in
from tests.support.plain import Plain, dcp_folder, nested, torch_tree
from tests.support.saving import adamw, arange, dcp_save, torch_save

TRAINED = [
    "torch/plain_zip", "torch/plain_legacy", "torch/fsdp2_dp2_dcp", "torch/fsdp2_dp4_dcp", "torch/fsdp2_dp2_bf16_dcp",
    "torch/fsdp2_dp2_flatoptim_dcp", "torch/fsdp2_tp2x2_dcp", "torch/hsdp_2x2_dcp", "torch/dcp_file_per_item",
    "torch/dcp_no_dist", "torch/dcp_zstd",
]  # fmt: skip
DECAYED = {"weight_decay": 0.1, "lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False}


def optimizer_in(path, to):
    """The optimizer of a result, as nested plain data."""
    return torch_tree(path)["optimizer"] if to == "torch" else nested(dcp_folder(path))["optim"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("name", TRAINED)
def test_moments_and_steps_equal_the_run_s_truth(name, to, tmp_path):
    words = ["--dp", "3"] if to == "dcp" else []
    report = document("convert", ckpt(name), tmp_path / "out", "--to", to, *words)
    optimizer = optimizer_in(tmp_path / "out", to)
    with ckptctl.open(ckpt(name)) as view:
        for kind in ("exp_avg", "exp_avg_sq"):
            want = truth(name)[kind]
            got = {n: entry[kind].truth for n, entry in optimizer["state"].items()}
            assert got == {n: digest_of(view.state(n, kind)) for n in want}
            if "bf16" not in name:
                assert got == want
    assert {float(entry["step"].numbers()) for entry in optimizer["state"].values()} == {3.0}
    assert {entry["step"].shape for entry in optimizer["state"].values()} == {()}
    first, *rest = optimizer["param_groups"]
    assert len(rest) == (name != "torch/dcp_file_per_item")  # that run had one group
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in first.items() if k in DECAYED} == DECAYED
    assert sorted(n for g in optimizer["param_groups"] for n in g["params"]) == sorted(optimizer["state"])
    for group in rest:
        assert group["weight_decay"] == 0.0
        assert all(len(optimizer["state"][n]["exp_avg"].shape) == 1 for n in group["params"])
    fates = {line["part"]: line["fate"] for line in report["fidelity"]}
    assert fates["exp_avg"] == fates["exp_avg_sq"] == fates["step"] == fates["param groups"] == "carried"


@pytest.mark.parametrize("name", ["torch/plain_zip", "torch/fsdp2_dp4_dcp", "torch/dcp_zstd"])
def test_a_chain_of_conversions_gives_the_bytes_of_one(name, tmp_path):
    config = ["--model-config", truth_config(name)]
    good("convert", ckpt(name), tmp_path / "one", "--to", "hf", "--no-optimizer", *config)
    at = ckpt(name)
    for number, to in enumerate(["dcp", "torch", "dcp"]):
        good("convert", at, tmp_path / str(number), "--to", to, *(["--dp", str(3 + number)] if to == "dcp" else []))
        at = tmp_path / str(number)
    good("convert", at, tmp_path / "many", "--to", "hf", "--no-optimizer", *config)
    assert tree_bytes(tmp_path / "many") == tree_bytes(tmp_path / "one")


def test_scheduler_random_state_and_counters_are_carried_there_and_back(tmp_path):
    source = ckpt("torch/fsdp2_dp4_dcp")
    report = document("convert", source, tmp_path / "a.pt", "--to", "torch")
    good("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "dcp")
    was, torch, dcp = dcp_folder(source), torch_tree(tmp_path / "a.pt"), nested(dcp_folder(tmp_path / "b"))
    saved = nested(was)
    for name in ("step_size", "gamma", "base_lrs", "last_epoch", "_step_count", "_last_lr"):
        assert torch["scheduler"][name] == dcp["scheduler"][name] == saved["scheduler"][name]
    assert torch["step"] == dcp["step"] == saved["step"] == 3
    assert torch["rng"]["torch"].data == dcp["rng"]["torch"].data == saved["rng"]["torch"].data
    assert torch["rng"]["python"] == saved["rng"]["python"]
    state = torch["rng"]["numpy"][1]
    assert isinstance(state, Plain)
    assert (state.dtype, state.shape) == ("uint32", (624,))
    assert {"part": "NumPy arrays", "fate": "converted"}.items() <= report["fidelity"][-1].items()


def test_a_source_without_state_says_so_and_needs_no_flag(tmp_path):
    report = document("convert", ckpt("hf/llama-single"), tmp_path / "out", "--to", "hf")
    lines = {line["part"]: line["fate"] for line in report["fidelity"]}
    assert lines["optimizer state"] == lines["scheduler"] == lines["random state"] == lines["counters"] == "absent"
    good("convert", ckpt("hf/llama-single"), tmp_path / "again", "--to", "hf", "--no-optimizer")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "again")


def test_state_that_the_target_cannot_hold_stops_it_and_names_the_flag(tmp_path):
    for name in ("torch/plain_zip", "torch/hsdp_2x2_dcp", "torch/fsdp2_dp2_flatoptim_dcp"):
        error = refused("convert", ckpt(name), tmp_path / "out", "--to", "hf")
        assert error["code"] == "state-not-carried"
        assert "--no-optimizer" in error["fix"]
        assert "exp_avg" in error["what"]
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(tmp_path):
    """A small training state as a torch file, with one parameter that is not trained."""
    model = {"embed.weight": arange(5, 3), "norm.weight": arange(3, start=40), "frozen.weight": arange(2, 2)}
    trained = {n: v for n, v in model.items() if n != "frozen.weight"}
    tree = {
        "model": model,
        "optimizer": adamw(list(trained), trained),
        "scheduler": {"last_epoch": 3, "gamma": 0.5, "milestones": [1, 2]},
        "rng": {"torch": arange(16, dtype=np.uint8)},
        "step": 3,
        "note": "kept",
    }
    return SimpleNamespace(path=torch_save(tmp_path / "run.pt", tree), tree=tree, model=model, trained=trained)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_no_optimizer_lets_all_of_it_go_and_says_so(run, to, tmp_path):
    report = document("convert", run.path, tmp_path / "out", "--to", to, "--no-optimizer")
    dropped = {line["part"] for line in report["fidelity"] if line["fate"] == "dropped"}
    assert dropped == {"step", "exp_avg", "exp_avg_sq", "param groups", "scheduler", "random state", "counters"}
    assert set(weights_in(tmp_path / "out", to)) == set(run.model)
    tree = torch_tree(tmp_path / "out") if to == "torch" else nested(dcp_folder(tmp_path / "out"))
    assert set(tree) == {"model", "note"}
    assert tree["note"] == "kept"


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["--only", "norm.*"], {"norm.weight"}),
        (["--only", "norm.*", "--only", "embed.*"], {"norm.weight", "embed.weight"}),
        (["--exclude", "embed.*"], {"norm.weight", "frozen.weight"}),
        (["--only", "*.weight", "--exclude", "frozen*"], {"norm.weight", "embed.weight"}),
        (["--trainable-only"], {"norm.weight", "embed.weight"}),
    ],
)
def test_choosing_weights_chooses_their_state_and_groups(run, to, words, weights, tmp_path):
    report = document("convert", run.path, tmp_path / "out", "--to", to, *words)
    got = weights_in(tmp_path / "out", to)
    assert got == {n: digest("F32", run.model[n].shape, run.model[n].tobytes()) for n in weights}
    optimizer = optimizer_in(tmp_path / "out", to)
    trained = weights & set(run.trained)
    assert set(optimizer["state"]) == trained
    assert [set(g["params"]) for g in optimizer["param_groups"]] == [trained]
    assert any(line["part"] == "weights" and line["fate"] == "dropped" for line in report["fidelity"])
    lost = any(line["part"] == "optimizer state" and line["fate"] == "dropped" for line in report["fidelity"])
    assert lost == (trained != set(run.trained))


@pytest.mark.parametrize("flag", ["--only", "--exclude"])
def test_a_pattern_that_matches_nothing_is_a_mistake(run, flag, tmp_path):
    error = refused("convert", run.path, tmp_path / "out", "--to", "dcp", flag, "nrom.*", code=2)
    assert "nrom.*" in error["what"]
    assert flag in error["what"]
    assert not (tmp_path / "out").exists()


def test_leaving_out_everything_is_refused(run, tmp_path):
    assert refused("convert", run.path, tmp_path / "out", "--to", "dcp", "--exclude", "*")["code"] == "no-tensors"
    bare = torch_save(tmp_path / "bare.pt", run.model)
    assert refused("convert", bare, tmp_path / "out", "--to", "dcp", "--trainable-only")["code"] == "no-tensors"


# ---- integer keys ---------------------------------------------------------------------------------------------------

SHAPES = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4), "b.bias": (2,)}


def keyed(tmp_path, groups, *, shapes=SHAPES, frozen=(), extra=None, names=None, model=None):
    """A torch file whose optimizer is keyed by torch's numbers: groups are lists of names, in the optimizer's order."""
    model = model or {n: arange(*s, start=10 * i) for i, (n, s) in enumerate(shapes.items())}
    order = [n for g in groups for n in g]
    state = adamw([], {i: model[n] for i, n in enumerate(order) if n not in frozen})["state"]
    param_groups, at = [], 0
    for number, g in enumerate(groups):
        group = {"lr": 0.1 * (number + 1), "weight_decay": float(number), "params": list(range(at, at + len(g)))}
        if names:
            group["param_names"] = names[at : at + len(g)]
        param_groups.append(group)
        at += len(g)
    tree = {"model": {**model, **(extra or {})}, "optimizer": {"state": state, "param_groups": param_groups}}
    return torch_save(tmp_path / "keyed.pt", tree), model


def kinds(path, *words):
    """exp_avg by name, in a torch file that a conversion made."""
    out = path.parent / "converted.pt"
    good("convert", path, out, "--to", "torch", "--overwrite", *words)
    tree = torch_tree(out)
    return tree["optimizer"], {n: e["exp_avg"].numbers() for n, e in tree["optimizer"]["state"].items()}


@pytest.mark.parametrize(
    "groups",
    [
        [["a.weight", "a.bias", "b.weight", "b.bias"]],
        [["a.weight", "b.weight"], ["a.bias", "b.bias"]],
        [["a.bias", "b.bias"], ["a.weight", "b.weight"]],
    ],
)
def test_numbers_become_names_where_shapes_leave_one_way(groups, tmp_path):
    path, model = keyed(tmp_path, groups)
    optimizer, got = kinds(path)
    assert [g["params"] for g in optimizer["param_groups"]] == groups
    assert [g["weight_decay"] for g in optimizer["param_groups"]] == [float(i) for i in range(len(groups))]
    assert got.keys() == model.keys()
    for name, value in got.items():
        np.testing.assert_array_equal(value, model[name] + np.float32(0.5))


def test_buffers_among_the_weights_have_no_number(tmp_path):
    extra = {"a.running_mean": arange(7), "a.num_batches_tracked": np.array(3, np.int64)}
    path, model = keyed(tmp_path, [list(SHAPES)], extra=extra)
    _, got = kinds(path)
    assert got.keys() == model.keys()


def test_frozen_parameters_may_be_listed_without_state(tmp_path):
    path, _ = keyed(tmp_path, [list(SHAPES)], frozen={"b.weight"})
    optimizer, got = kinds(path)
    assert optimizer["param_groups"][0]["params"] == list(SHAPES)
    assert set(got) == set(SHAPES) - {"b.weight"}


def test_frozen_parameters_may_be_left_out_of_the_groups(tmp_path):
    path, _ = keyed(tmp_path, [["a.weight", "a.bias", "b.bias"]])
    assert set(kinds(path)[1]) == {"a.weight", "a.bias", "b.bias"}


ALIKE = {"q.weight": (4, 4), "k.weight": (4, 4), "v.weight": (4, 4), "norm": (4,)}


@pytest.mark.parametrize(
    ("groups", "shapes"),
    [
        ([["q.weight", "v.weight", "norm"]], ALIKE),  # which of three equal shapes is left out?
        ([["q.weight", "norm"], ["k.weight", "v.weight"]], ALIKE),  # dealt to two groups
    ],
)
def test_where_several_ways_fit_it_stops_and_names_the_flag(groups, shapes, tmp_path):
    path, _ = keyed(tmp_path, groups, shapes=shapes)
    error = refused("convert", path, tmp_path / "out", "--to", "torch")
    assert (error["code"], "--param-order" in error["fix"]) == ("param-order", True)
    assert not (tmp_path / "out").exists()


def test_what_needs_no_names_does_not_ask_for_them(tmp_path):
    path, model = keyed(tmp_path, [["q.weight", "v.weight", "norm"]], shapes=ALIKE)
    done = ckptctl_command("inspect", path, "--json")
    found = done.json
    assert found["kinds"]["exp_avg"]["tensors"] == 3
    assert found["frozen"] == []
    assert "--param-order" in found["warnings"][0]
    assert {t["name"] for t in document("ls", path, "--kind", "exp_avg")["tensors"]} == {"#0", "#1", "#2"}
    good("convert", path, tmp_path / "hf", "--to", "hf", "--no-optimizer")
    assert set(weights_in(tmp_path / "hf", "hf")) == set(model)
    good("convert", path, tmp_path / "t", "--to", "torch", "--no-optimizer")
    assert document("diff", path, path)["equal"]
    for words in (
        ["diff", path, path, "--optimizer"],
        ["convert", path, tmp_path / "x", "--to", "hf", "--trainable-only", "--no-optimizer"],
    ):
        assert refused(*words)["code"] == "param-order"


def raw_dcp(path, order):
    """A DCP folder of model.state_dict() and optimizer.state_dict() as they are: numbers in a path are text there."""
    model = {n: arange(*s, start=10 * i) for i, (n, s) in enumerate(ALIKE.items())}
    items = {("model", n): v for n, v in model.items()}
    for number, name in enumerate(order):
        items[("optimizer", "state", str(number), "exp_avg")] = model[name] + np.float32(0.5)
    items[("optimizer", "param_groups", 0, "params")] = list(range(len(order)))
    items[("optimizer", "param_groups", 0, "lr")] = 0.1
    return dcp_save(path, items), model


def test_numbers_of_a_dcp_folder_become_names(tmp_path):
    path, model = raw_dcp(tmp_path / "run", list(ALIKE))
    good("convert", path, tmp_path / "t", "--to", "torch")
    optimizer = torch_tree(tmp_path / "t")["optimizer"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": list(ALIKE)}]
    for name, entry in optimizer["state"].items():
        np.testing.assert_array_equal(entry["exp_avg"].numbers(), model[name] + np.float32(0.5))


def test_the_order_of_a_dcp_folder_is_that_of_its_paths(tmp_path):
    """Items stand in the order of the ranks that wrote them; taking it for the model's would swap q, k and v unseen."""
    path, model = raw_dcp(tmp_path / "run", list(ALIKE))
    loaded = load((path / ".metadata").read_bytes(), ".metadata").tree
    state = loaded.state["state_dict_metadata"]
    loaded.state["state_dict_metadata"] = dict(reversed(state.items()))
    (path / ".metadata").write_bytes(dump(loaded))
    good("convert", path, tmp_path / "t", "--to", "torch")
    for name, entry in torch_tree(tmp_path / "t")["optimizer"]["state"].items():
        np.testing.assert_array_equal(entry["exp_avg"].numbers(), model[name] + np.float32(0.5))


def test_reshard_needs_no_names(tmp_path):
    path, _ = raw_dcp(tmp_path / "run", ["q.weight", "v.weight", "norm"])
    assert refused("convert", path, tmp_path / "t", "--to", "torch")["code"] == "param-order"
    good("reshard", path, tmp_path / "out", "--dp", "3")
    was, now = dcp_folder(path), dcp_folder(tmp_path / "out")
    assert (now.items, now.paths) == (was.items, was.paths)


RAW = """
import sys, torch
import torch.distributed.checkpoint as dcp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=sys.argv[1], no_dist=True)
torch.save({n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}, sys.argv[2])
"""


@pytest.mark.real
def test_a_raw_optimizer_that_torch_saved_keeps_its_names(tmp_path):
    run_torch(RAW, tmp_path / "run", tmp_path / "truth.pt")
    good("convert", tmp_path / "run", tmp_path / "t", "--to", "torch")
    want = torch_tree(tmp_path / "truth.pt")
    got = torch_tree(tmp_path / "t")["optimizer"]["state"]
    assert {n: e["exp_avg"].data for n, e in got.items()} == {n: t.data for n, t in want.items()}


def test_an_optimizer_by_itself_is_one(tmp_path):
    """`optimizer.pt`: its moments must not pass for weights."""
    for tree in (adamw([0], {0: arange(2)}), {"optimizer": adamw([0], {0: arange(2)})}, adamw(["a"], {"a": arange(2)})):
        path = torch_save(tmp_path / "optimizer.pt", tree)
        found = document("inspect", path)
        assert set(found["kinds"]) == {"step", "exp_avg", "exp_avg_sq"}
        assert found["state"]["weights"] == "absent"
        for words in (["--to", "torch"], ["--to", "hf", "--no-optimizer"]):
            assert refused("convert", path, tmp_path / "out", *words)["code"] in ("no-tensors", "param-order")


def test_optimizers_under_names_of_their_own_are_not_lost(tmp_path):
    model = {"a": arange(2)}
    one = adamw(["a"], model)
    for extra in ({"optimizers": [one, one]}, {"optimizer_g": one}, {"optimizer": one, "optimizer_g": one}):
        path = torch_save(tmp_path / "x.pt", {"model": model, **extra})
        for to in ("hf", "torch", "dcp"):
            error = refused("convert", path, tmp_path / "out", "--to", to)
            assert (error["code"], list(extra)[-1] in error["what"]) == ("unsupported", True)


def test_an_average_of_the_weights_is_state_too(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a": arange(2)}, "ema": {"a": arange(2, start=5)}})
    error = refused("convert", path, tmp_path / "out", "--to", "hf")
    assert (error["code"], "ema" in error["what"]) == ("state-not-carried", True)
    good("convert", path, tmp_path / "t", "--to", "torch")
    assert torch_tree(tmp_path / "t")["ema"]["a"].numbers().tolist() == [5, 6]
    good("convert", path, tmp_path / "out", "--to", "hf", "--no-optimizer")


def test_an_order_that_the_shapes_do_not_allow_is_refused(tmp_path):
    shapes = {"a": (2, 3), "b": (3, 2)}
    path, _ = keyed(tmp_path, [["b", "a"]], shapes=shapes)
    assert refused("convert", path, tmp_path / "out", "--to", "torch")["code"] == "param-order"


def test_a_given_order_is_taken_and_checked(tmp_path):
    order = ["v.weight", "k.weight", "norm"]
    path, model = keyed(tmp_path, [order], shapes=ALIKE)
    file = tmp_path / "order.txt"
    file.write_text("# the optimizer's order\nv.weight\nk.weight\n\nnorm\n")
    _, got = kinds(path, "--param-order", file)
    assert list(got) == order
    for name, value in got.items():
        np.testing.assert_array_equal(value, model[name] + np.float32(0.5))
    for text in (
        "v.weight\nk.weight\n",
        "v.weight\nv.weight\nnorm\n",
        "v.weight\nnorm\nk.weight\n",
        "v.weight\nx\nnorm\n",
    ):
        file.write_text(text)
        error = refused("convert", path, tmp_path / "out", "--to", "torch", "--param-order", file)
        assert error["code"] == "param-order", error
    error = refused("convert", path, tmp_path / "out", "--to", "torch", "--param-order", tmp_path / "none.txt")
    assert error["code"] == "missing-file"


def test_names_that_the_groups_record_are_taken(tmp_path):
    order = ["v.weight", "k.weight", "norm"]
    path, model = keyed(tmp_path, [order], shapes=ALIKE, names=order)
    _, got = kinds(path)
    assert list(got) == order
    np.testing.assert_array_equal(got["v.weight"], model["v.weight"] + np.float32(0.5))


def test_tied_weights_have_one_number(tmp_path):
    weight = arange(4, 3)
    model = {"embed.weight": weight, "norm": arange(3), "head.weight": weight}
    path, _ = keyed(tmp_path, [["embed.weight", "norm"]], model=model)
    assert list(kinds(path)[1]) == ["embed.weight", "norm"]


def test_state_of_a_number_in_no_group_is_damage(tmp_path):
    model = {"a": arange(2), "b": arange(3)}
    tree = {"model": model, "optimizer": adamw([0], {0: model["a"], 7: model["b"]})}
    path = torch_save(tmp_path / "x.pt", tree)
    assert refused("convert", path, tmp_path / "out", "--to", "torch")["code"] in ("optimizer-ids", "param-order")


def test_a_parameter_in_two_groups_is_damage(tmp_path):
    model = {"a": arange(2), "b": arange(3)}
    optimizer = adamw(["a", "b"], model)
    optimizer["param_groups"].append({"lr": 1.0, "params": ["b"]})
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    assert refused("convert", path, tmp_path / "out", "--to", "torch")["code"] == "optimizer-groups"


def test_index_keys_gives_torch_s_numbers(run, tmp_path):
    good("convert", run.path, tmp_path / "out", "--to", "torch", "--index-keys")
    optimizer = torch_tree(tmp_path / "out")["optimizer"]
    assert list(optimizer["state"]) == [0, 1]
    assert optimizer["param_groups"][0]["params"] == [0, 1]
    assert optimizer["state"][1]["exp_avg"].shape == (3,)
    # And back: the numbers are names again, since the shapes leave one way.
    assert set(kinds(tmp_path / "out")[1]) == set(run.trained)


# ---- names and keys -------------------------------------------------------------------------------------------------

ODD = {"state": (2, 3), "layers.0.param_groups.weight": (3,), "model.state.exp_avg": (4,), "optim.step": (2,)}


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_names_that_look_like_keys_are_names(to, tmp_path):
    model = {n: arange(*s, start=i) for i, (n, s) in enumerate(ODD.items())}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(list(model), model)})
    good("convert", path, tmp_path / "out", "--to", to)
    assert set(weights_in(tmp_path / "out", to)) == set(ODD)
    with ckptctl.open(path) as old, ckptctl.open(tmp_path / "out") as new:
        assert all_digests(old) == all_digests(new)


def test_flat_keys_of_an_optimizer_are_read(tmp_path):
    """As torch's flatten_optimizer_state_dict writes them: names with dots between `state.` and the kind."""
    model = {"a.state.b": arange(2, 2), "c": arange(3)}
    optim = {}
    for name, value in model.items():
        optim |= {f"state.{name}.exp_avg": value + np.float32(1), f"state.{name}.step": np.array(2, np.float32)}
        optim |= {f"param_groups.{name}.lr": 0.1, f"param_groups.{name}.weight_decay": 0.0 if name == "c" else 0.5}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optim": optim})
    report = document("convert", path, tmp_path / "out", "--to", "torch")
    tree = torch_tree(tmp_path / "out")["optimizer"]
    assert tree["param_groups"] == [
        {"lr": 0.1, "weight_decay": 0.5, "params": ["a.state.b"]},
        {"lr": 0.1, "weight_decay": 0.0, "params": ["c"]},
    ]
    np.testing.assert_array_equal(tree["state"]["a.state.b"]["exp_avg"].numbers(), model["a.state.b"] + 1)
    assert "equal settings" in next(line["detail"] for line in report["fidelity"] if line["part"] == "param groups")


def test_a_dcp_folder_one_level_down_is_read_the_same(tmp_path):
    model = {"a": arange(4, 2)}
    items = {("app", "model", "a"): model["a"], ("app", "optim", "state", "a", "exp_avg"): model["a"] + np.float32(1)}
    items |= {("app", "optim", "param_groups", 0, "params"): ["a"], ("app", "optim", "param_groups", 0, "lr"): 0.1}
    dcp_save(tmp_path / "run", items)
    found = document("inspect", tmp_path / "run")
    assert found["kinds"].keys() == {"weight", "exp_avg"}
    assert found["groups"] == [{"parameters": 1, "settings": {"lr": 0.1}}]


def test_what_stands_beside_state_and_groups_is_carried(tmp_path):
    model = {"a": arange(2)}
    optimizer = adamw(["a"], model) | {"loss_scale": {"value": 4.0}}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        assert optimizer_in(tmp_path / to, to)["loss_scale"] == {"value": 4.0}


def test_plain_numbers_in_states_are_carried(tmp_path):
    model = {"a": arange(2)}
    optimizer = {
        "state": {"a": {"step": 7, "exp_avg": model["a"], "buf": None}},
        "param_groups": [{"lr": 1, "params": ["a"]}],
    }
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": optimizer})
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        state = optimizer_in(tmp_path / to, to)["state"]["a"]
        assert (state["step"], state["buf"]) == (7, None)
    assert document("inspect", path)["step"] == 7


def test_the_report_goes_to_a_file_too(run, tmp_path):
    report = document("convert", run.path, tmp_path / "out", "--to", "dcp", "--report", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report
