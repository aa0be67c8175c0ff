"""Trainer folders that lack a file, have more, or fit several orders of parameters."""

import json
import shutil

import numpy as np
import pytest

import ckptctl
from ckptctl.formats.trainer.read import is_complete
from tests.support.checkpoints import ckpt, fixture, run_torch
from tests.support.commands import document, good, refused
from tests.support.plain import torch_tree
from tests.support.saving import adamw, arange, hf_save, torch_save


@pytest.fixture
def folder(tmp_path):
    """A copy of a real one, to change."""
    return shutil.copytree(ckpt("torch/trainer"), tmp_path / "checkpoint-3", copy_function=shutil.copyfile)


def write_optimizer(path, change):
    """optimizer.pt of real torch, with the arrays of the real one, changed."""
    run_torch(
        f"import torch, sys\np = sys.argv[1]\no = torch.load(p)\n{change}\ntorch.save(o, p)", path / "optimizer.pt"
    )


def test_without_an_optimizer_the_weights_are_read_and_that_is_said(folder):
    (folder / "optimizer.pt").unlink()
    found = document("inspect", folder)
    assert (found["step"], found["resumable"]) == (3, False)
    assert any("optimizer.pt is not there" in w for w in found["warnings"])
    error = refused("convert", folder, folder.parent / "out", "--to", "trainer")
    assert error["code"] == "state-not-carried"


def test_without_a_scheduler_it_is_said_that_a_trainer_loads_neither(folder):
    (folder / "scheduler.pt").unlink()
    found = document("inspect", folder)
    assert (found["state"]["scheduler"], found["resumable"]) == ("absent", False)
    assert any("neither" in w for w in found["warnings"])
    report = document("convert", folder, folder.parent / "out", "--to", "trainer")
    assert {"part": "scheduler", "fate": "written"}.items() <= report["fidelity"][-4].items() or any(
        line["part"] == "scheduler" and line["fate"] == "written" for line in report["fidelity"]
    )
    assert torch_tree(folder.parent / "out" / "scheduler.pt")["last_epoch"] == 3


def test_without_a_state_the_step_is_the_optimizer_s(folder):
    (folder / "trainer_state.json").unlink()
    found = document("inspect", folder)
    assert found["step"] == 3
    assert any("interrupted" in w for w in found["warnings"])
    assert not is_complete(folder)


def test_of_a_run_s_steps_the_newest_that_is_complete_is_taken(folder):
    later = shutil.copytree(folder, folder.parent / "checkpoint-6")
    state = json.loads((later / "trainer_state.json").read_text())
    (later / "trainer_state.json").write_text(json.dumps({**state, "global_step": 6}))
    assert document("inspect", folder.parent)["step"] == 6
    (later / "trainer_state.json").unlink()
    assert document("inspect", folder.parent)["path"] == str(folder)
    assert document("inspect", folder.parent, "--step", "6")["path"] == str(later)


def test_the_history_is_kept_whole_and_another_scale_is_carried(folder, tmp_path):
    state = json.loads((folder / "trainer_state.json").read_text())
    state["log_history"] += [{"loss": float("nan"), "step": 3}]
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
    shutil.copy(folder / "scheduler.pt", folder / "scaler.pt")
    good("convert", folder, tmp_path / "t.pt", "--to", "torch")
    good("convert", tmp_path / "t.pt", tmp_path / "back", "--to", "trainer", "--model-config", folder)
    assert (tmp_path / "back" / "trainer_state.json").read_bytes() == (folder / "trainer_state.json").read_bytes()
    assert torch_tree(tmp_path / "back" / "scaler.pt") == torch_tree(folder / "scheduler.pt")


def test_random_states_of_ranks_are_one_value_and_go_to_a_trainer_alone(folder, tmp_path):
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    assert document("inspect", folder)["layout"]["world_size"] == 2
    good("convert", folder, tmp_path / "out", "--to", "trainer")
    assert {p.name for p in (tmp_path / "out").glob("rng*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_an_unknown_family_leaves_numbers_and_says_why(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "architectures": ["Mine"]}))
    assert any("'mine' is not known" in w for w in document("inspect", folder)["warnings"])
    error = refused("convert", folder, tmp_path / "out", "--to", "torch")
    assert (error["code"], "--param-order" in error["fix"]) == ("param-order", True)
    good("convert", folder, tmp_path / "hf", "--to", "hf", "--no-optimizer")
    with ckptctl.open(ckpt("torch/trainer")) as view:
        order = [n for g in view.checkpoint.optimizer.groups for n in g.params]
    (tmp_path / "order.txt").write_text("\n".join(order))
    good("convert", folder, tmp_path / "a.pt", "--to", "torch", "--param-order", tmp_path / "order.txt")
    good("convert", ckpt("torch/trainer"), tmp_path / "b.pt", "--to", "torch")
    a, b = (torch_tree(tmp_path / n)["optimizer"] for n in ("a.pt", "b.pt"))
    assert {n: t["exp_avg"].truth for n, t in a["state"].items()} == {
        n: t["exp_avg"].truth for n, t in b["state"].items()
    }
    good("convert", folder, tmp_path / "t", "--to", "trainer", "--param-order", tmp_path / "order.txt")
    assert (
        torch_tree(tmp_path / "t" / "optimizer.pt")["param_groups"]
        == torch_tree(folder / "optimizer.pt")["param_groups"]
    )


def test_a_config_of_another_model_leaves_numbers(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert any("model.layers.2" in w for w in document("inspect", folder)["warnings"])


def test_a_frozen_layer_among_equal_ones_could_be_either(folder):
    """One of two equal layers was not trained, and nothing says which."""
    change = (
        "d, n = o['param_groups']\n"
        "drop = [*range(1, 8), 16, 17]\n"
        "keep = [i for i in d['params'] + n['params'] if i not in drop]\n"
        "new = {i: k for k, i in enumerate(keep)}\n"
        "o['state'] = {new[i]: v for i, v in o['state'].items() if i in new}\n"
        "for g in (d, n): g['params'] = [new[i] for i in g['params'] if i in new]"
    )
    write_optimizer(folder, change)
    assert any("more than one order" in w for w in document("inspect", folder)["warnings"])
    assert refused("convert", folder, folder.parent / "out", "--to", "dcp")["code"] == "param-order"


def test_a_frozen_embedding_can_only_be_the_first(folder, tmp_path):
    change = (
        "d, n = o['param_groups']\n"
        "o['state'] = {i - 1: v for i, v in o['state'].items() if i}\n"
        "d['params'] = [i - 1 for i in d['params'] if i]; n['params'] = [i - 1 for i in n['params']]"
    )
    write_optimizer(folder, change)
    found = document("inspect", folder)
    assert found["frozen"] == ["model.embed_tokens.weight"]
    good("convert", folder, tmp_path / "out", "--to", "trainer")
    old, new = torch_tree(folder / "optimizer.pt"), torch_tree(tmp_path / "out" / "optimizer.pt")
    assert new["param_groups"] == old["param_groups"]
    assert [v["exp_avg"].truth for v in new["state"].values()] == [v["exp_avg"].truth for v in old["state"].values()]


def test_states_of_other_shapes_are_not_taken_for_a_parameter_s(folder):
    """Adafactor's rows and columns tell no shape: numbers stay numbers."""
    change = (
        "for v in o['state'].values():\n"
        "    m = v.pop('exp_avg_sq'); v.pop('exp_avg')\n"
        "    v.update(exp_avg_sq_row=m.sum(-1), exp_avg_sq_col=m.sum(0)) if m.ndim == 2 else v.update(exp_avg_sq=m)"
    )
    write_optimizer(folder, change)
    assert refused("convert", folder, folder.parent / "out", "--to", "torch")["code"] == "param-order"
    assert np.array([document("inspect", folder)["step"]]) == 3


def test_what_is_no_optimizer_is_refused_by_name(folder):
    shutil.copy(fixture("hf/mixtral-trainer") / "scheduler.pt", folder / "optimizer.pt")
    error = refused("inspect", folder)
    assert (error["code"], error["where"]) == ("unsupported", "optimizer.pt")


def test_arguments_that_would_run_code_are_seen(folder):
    broken = fixture("broken/bin-runs-code") / "pytorch_model.bin"
    shutil.copy(broken, folder / "training_args.bin")
    found = document("inspect", folder)
    assert found["unsafe"][0]["file"] == "training_args.bin"
    assert refused("convert", folder, folder.parent / "out", "--to", "hf")["code"] == "pickle-calls-code"


def test_arguments_that_nobody_can_read_stop_nothing_and_go_nowhere(folder):
    (folder / "training_args.bin").write_bytes(b"no pickle")
    found = document("inspect", folder)
    assert any("training_args.bin cannot be read" in w for w in found["warnings"])
    good("convert", folder, folder.parent / "out", "--to", "trainer")
    assert not (folder.parent / "out" / "training_args.bin").exists()


def test_arguments_left_behind_are_a_line_of_the_report(folder):
    report = document("convert", folder, folder.parent / "out.pt", "--to", "torch")["fidelity"]
    assert [(x["fate"], "training_args.bin" in x["detail"]) for x in report if x["part"] == "other files"] == [
        ("dropped", True)
    ]


def test_an_adapter_s_numbers_are_not_named_after_a_whole_model(folder):
    adapter = fixture("hf/llama-lora") / "adapter"
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    for file in adapter.iterdir():
        shutil.copyfile(file, folder / file.name)
    done = document("inspect", folder)
    assert any("numbers and no names" in w for w in done["warnings"])
    assert refused("convert", folder, folder.parent / "out", "--to", "torch")["code"] == "param-order"


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"])
def test_a_folder_saved_under_fsdp_is_never_taken_for_weights_alone(name, folder):
    (folder / name).mkdir()
    error = refused("convert", folder, folder.parent / "out", "--to", "hf", "--no-optimizer")
    assert (error["code"], name in error["why"]) == ("unsupported", True)


def neox(layers=1, h=8, inner=12, vocab=10):
    """Parameters of a gpt_neox in the order that its modules register them, by hand; the head as its files call it."""
    out = {"gpt_neox.embed_in.weight": (vocab, h)}
    for i in range(layers):
        at = f"gpt_neox.layers.{i}."
        out |= {f"{at}{norm}_layernorm.{x}": (h,) for norm in ("input", "post_attention") for x in ("weight", "bias")}
        out |= {f"{at}attention.query_key_value.weight": (3 * h, h), f"{at}attention.query_key_value.bias": (3 * h,)}
        out |= {f"{at}attention.dense.weight": (h, h), f"{at}attention.dense.bias": (h,)}
        out |= {f"{at}mlp.dense_h_to_4h.weight": (inner, h), f"{at}mlp.dense_h_to_4h.bias": (inner,)}
        out |= {f"{at}mlp.dense_4h_to_h.weight": (h, inner), f"{at}mlp.dense_4h_to_h.bias": (h,)}
    return out | {
        "gpt_neox.final_layer_norm.weight": (h,),
        "gpt_neox.final_layer_norm.bias": (h,),
        "embed_out.weight": (vocab, h),
    }


def test_a_head_that_only_one_namespace_calls_otherwise_leaves_no_order_open(tmp_path):
    shapes = neox()
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 8,
        "intermediate_size": 12,
        "vocab_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": False,
    }
    weights = {n: arange(*s, start=100 * i) for i, (n, s) in enumerate(shapes.items())}
    path = hf_save(tmp_path / "checkpoint-3", weights, config)
    groups = [[n for n, s in shapes.items() if len(s) > 1], [n for n, s in shapes.items() if len(s) == 1]]
    numbers = {n: i for i, n in enumerate(n for g in groups for n in g)}
    saved = adamw([], {numbers[n]: weights[n] for n in numbers})
    one = {k: v for k, v in saved["param_groups"][0].items() if k != "params"}
    saved["param_groups"] = [{**one, "params": [numbers[n] for n in g]} for g in groups]
    torch_save(path / "optimizer.pt", saved)
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    good("convert", path, tmp_path / "out.pt", "--to", "torch", "--names", "disk")
    state = torch_tree(tmp_path / "out.pt")["optimizer"]["state"]
    want = {n: (w + np.float32(0.5)).tobytes() for n, w in weights.items()}
    assert {n: e["exp_avg"].data for n, e in state.items()} == want
