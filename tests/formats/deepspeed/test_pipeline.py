"""Pipelines: tied layers, tensor-parallel slices of layers, names that the user gives, layers that are not there."""

from __future__ import annotations

import numpy as np
import pytest

import ckptctl
from ckptctl.core.values import OrderedPairs
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.formats.deepspeed.test_read import config_of, copied, source, stopped
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.torchfiles import stored, torch_zip, v2

PIPE = "deepspeed/pipe-pp2-dp2-zero1-bf16"


class Saved:
    """A torch file while it is made by hand."""

    def __init__(self):
        self.storages = {}

    def tensor(self, values):
        array = np.asarray(values, np.float32)
        key = str(len(self.storages))
        self.storages[key] = array.tobytes()
        steps = tuple(int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim))
        return v2(stored(key, array.size), 0, array.shape, steps)

    def save(self, path, tree):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(torch_zip(tree, self.storages))


def numbers(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write_layer(folder, layer, tensors, text=""):
    made = Saved()
    made.save(folder / f"layer_{layer:02d}{text}-model_states.pt", {n: made.tensor(t) for n, t in tensors.items()})


def write_stage(folder, mp, params, world, info=None):
    """A stage's model file, and its one shard of float32 weights and both moments (twice and thrice the weights)."""
    model = {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedPairs({n: SizeTuple(t.shape) for n, t in params.items()})],
        "global_steps": 3,
        "dp_world_size": 1,
        "mp_world_size": world,
        "ds_config": {"zero_optimization": {"stage": 1}},
        **({"universal_checkpoint_info": info} if info else {}),
    }
    made = Saved()
    made.save(folder / f"mp_rank_{mp:02d}_model_states.pt", model)
    made = Saved()
    flat = np.concatenate([t.reshape(-1) for t in params.values()])
    padded = np.concatenate([flat, np.zeros(len(flat) % 2, np.float32)])
    state = {"step": made.tensor(3.0), "exp_avg": made.tensor(2 * padded), "exp_avg_sq": made.tensor(3 * padded)}
    inner = {
        "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "single_partition_of_fp32_groups": [made.tensor(flat)],
        "zero_stage": 1,
        "partition_count": [1],
        "ds_version": "0.19.8",
    }
    made.save(folder / f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt", {"optimizer_state_dict": inner})


def tied_pipeline(folder, *, second=None):
    """Two stages that share an embedding; second is what the last stage's optimizer has for it."""
    embed, a, b = numbers((5, 3), 1), numbers((3, 3), 2), numbers((3, 3), 3)
    write_layer(folder, 0, {"weight": embed})
    write_layer(folder, 1, {"lin.weight": a})
    write_layer(folder, 2, {})
    write_layer(folder, 3, {"lin.weight": b})
    write_stage(folder, 0, {"tied_modules.embed.weight": embed, "1.lin.weight": a}, 2)
    write_stage(folder, 1, {"tied_modules.embed.weight": embed if second is None else second, "3.lin.weight": b}, 2)
    return embed, b


def test_a_tied_layer_s_state_is_that_of_the_layer_which_holds_it(tmp_path):
    embed, b = tied_pipeline(tmp_path / "a")
    with ckptctl.open(tmp_path / "a") as view:
        assert {t.name for t in view.tensors()} == {"0.weight", "1.lin.weight", "3.lin.weight"}
        for kind, factor in (("weight", 1), ("master", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
            assert (view.state("0.weight", kind).numpy() == factor * embed).all()
            assert (view.state("3.lin.weight", kind).numpy() == factor * b).all()


def test_layers_have_the_names_that_the_user_gives(tmp_path):
    embed, _ = tied_pipeline(tmp_path / "a")
    names = tmp_path / "names"
    names.write_text("# layer and name\n0 model.embed\n1 model.blocks.0\n\n3 model.blocks.1\n")
    good("convert", tmp_path / "a", tmp_path / "t.pt", "--to", "torch", "--layer-names", names)
    with ckptctl.open(tmp_path / "t.pt") as view:
        assert (view.state("model.embed.weight", "exp_avg").numpy() == 2 * embed).all()
        assert "model.blocks.1.lin.weight" in dict(view.items())
    good("reshard", tmp_path / "a", tmp_path / "r", "--dp", "2", "--layer-names", names)
    assert document("diff", tmp_path / "t.pt", tmp_path / "r", "--optimizer")["equal"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7 model.x", "names 7"),
        ("0", "a line is a layer and its name"),
        ("0 a\n0 b", "each layer once"),
        ("1 a\n3 a", "would be called a.lin.weight"),
    ],
)
def test_names_that_do_not_fit_are_wrong_usage(text, said, tmp_path):
    tied_pipeline(tmp_path / "a")
    (tmp_path / "names").write_text(text)
    error = refused("inspect", tmp_path / "a", "--layer-names", tmp_path / "names", code=2)
    assert said in error["what"]


def test_layer_names_are_for_pipelines(tmp_path):
    (tmp_path / "names").write_text("0 a")
    error = refused("inspect", source("torch/trainer"), "--layer-names", tmp_path / "names", code=2)
    assert "for pipelines" in error["what"]


def test_stages_that_differ_in_a_tied_layer_s_shape_are_damage(tmp_path):
    tied_pipeline(tmp_path / "a", second=numbers((3, 5), 1))
    assert stopped(tmp_path / "a", tmp_path)["code"] == "mixed-saves"


@pytest.mark.parametrize("lost", [1, 3])
def test_a_layer_that_is_not_there_is_named(lost, tmp_path):
    tied_pipeline(tmp_path / "a")
    (tmp_path / "a" / f"layer_0{lost}-model_states.pt").unlink()
    error = stopped(tmp_path / "a", tmp_path)
    assert error["code"] == "missing-file"
    assert error["what"] == f"the file of layer {lost} is not there"


INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r"\d+\.down\.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.weight"],
}


def sliced_pipeline(folder, info=INFO):
    """One stage of two tensor-parallel ranks."""
    up, down, norm = numbers((4, 3), 1), numbers((3, 4), 2), numbers((3,), 3)
    for tp in range(2):
        mine = {"up.weight": up[2 * tp : 2 * tp + 2], "down.weight": down[:, 2 * tp : 2 * tp + 2], "norm.weight": norm}
        write_layer(folder, 0, mine, f"-model_0{tp}")
        write_stage(folder, tp, {f"0.{n}": np.ascontiguousarray(t) for n, t in mine.items()}, 2, info)
    return {"up.weight": up, "down.weight": down, "norm.weight": norm}


def test_slices_of_layers_are_joined_as_the_checkpoint_s_patterns_say(tmp_path):
    want = sliced_pipeline(tmp_path / "a")
    with ckptctl.open(tmp_path / "a") as view:
        for name, tensor in want.items():
            assert (view.state(f"0.{name}", "weight").numpy() == tensor).all(), name
            assert (view.state(f"0.{name}", "exp_avg").numpy() == 2 * tensor).all(), name
    assert document("inspect", tmp_path / "a")["layout"]["tp"] == 2


def test_slices_of_layers_without_patterns_are_refused(tmp_path):
    sliced_pipeline(tmp_path / "a", info=None)
    assert stopped(tmp_path / "a", tmp_path)["code"] == "slice-axis"


def test_a_layer_s_slice_that_is_not_there_is_named(tmp_path):
    sliced_pipeline(tmp_path / "a")
    write_layer(tmp_path / "a", 1, {"x": numbers((2,), 1)}, "-model_00")
    error = stopped(tmp_path / "a", tmp_path)
    assert error["code"] == "missing-file"
    assert "layer_01-model_01-model_states.pt" in error["fix"]


@pytest.mark.real
def test_names_by_the_user_are_those_of_the_family(tmp_path):
    names = tmp_path / "names"
    names.write_text("0 model.embed_tokens\n1 model.layers.0\n2 model.layers.1\n3 model.norm\n4 lm_head\n")
    good("convert", source(PIPE), tmp_path / "a", "--to", "torch", "--layer-names", names)
    good("convert", source(PIPE), tmp_path / "b", "--to", "torch", "--model-config", config_of(PIPE))
    assert document("diff", tmp_path / "a", tmp_path / "b", "--optimizer")["equal"]


@pytest.mark.real
def test_names_by_the_user_are_taken_wherever_a_source_is_read(tmp_path):
    names = tmp_path / "names"
    names.write_text("0 model.embed_tokens\n1 model.layers.0\n2 model.layers.1\n3 model.norm\n4 lm_head\n")
    assert document("validate", source(PIPE), "--layer-names", names)["ok"]
    good("strip", source(PIPE), tmp_path / "a", "--layer-names", names)
    with ckptctl.open(tmp_path / "a") as view, ckptctl.open(source(PIPE), layer_names=names) as other:
        assert set(dict(view.items())) == set(dict(other.items()))
        assert "model.layers.1.mlp.up_proj.weight" in dict(view.items())
    assert ckptctl.diff(source(PIPE), tmp_path / "a", layer_names=names)["equal"]
    wrong = tmp_path / "wrong"
    wrong.write_text("7 x")
    for words in (["validate", source(PIPE)], ["strip", source(PIPE), tmp_path / "b"], ["verify", source(PIPE)]):
        done = command(*words, "--layer-names", wrong)
        assert done.code == 2 or (words[0] == "verify" and "needs torch" in done.err)


@pytest.mark.real
def test_a_missing_layer_of_a_real_pipeline_is_named(tmp_path):
    path = copied(PIPE, tmp_path) / "global_step3"
    (path / "layer_02-model_states.pt").unlink()
    assert stopped(path, tmp_path)["what"] == "the file of layer 2 is not there"
