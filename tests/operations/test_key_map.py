"""Key maps: a model under private names and shapes becomes one that NumPy makes of the same arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckptctl
from ckptctl import operations
from ckptctl.core.errors import Usage
from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder
from tests.support.saving import Chunk, adamw, arange, dcp_save

RULES = """
[[rename]]
from = "net.embed.{p}"
to = "model.embed_tokens.{p}"

[[rename]]
from = "net.blocks.{l}.norm.weight"
to = "model.layers.{l}.input_layernorm.weight"

[[split]]
from = "net.blocks.{l}.qkv.weight"
to = ["model.layers.{l}.q.weight", "model.layers.{l}.k.weight", "model.layers.{l}.v.weight"]
sizes = [4, 2, 2]

[[concat]]
from = ["net.blocks.{l}.gate.weight", "net.blocks.{l}.up.weight"]
to = "model.layers.{l}.gate_up.weight"
axis = 1

[[transpose]]
from = "net.blocks.{l}.fc.weight"
to = "model.layers.{l}.fc.weight"

[[permute]]
from = "net.blocks.{l}.wq.weight"
to = "model.layers.{l}.q2.weight"
view = [2, -1, 2, 3]
axes = [0, 2, 1, 3]
"""
SHAPES = {"norm": (4,), "qkv": (8, 4), "gate": (3, 4), "up": (3, 5), "fc": (3, 7), "wq": (12, 3)}


def private():
    out = {"net.embed.weight": arange(5, 4)}
    for layer in range(2):
        for i, (name, shape) in enumerate(SHAPES.items()):
            out[f"net.blocks.{layer}.{name}.weight"] = arange(*shape, start=1000 * layer + 100 * i)
    return out


def public(weights):
    """What the rules say, by NumPy."""
    out = {"model.embed_tokens.weight": weights["net.embed.weight"]}
    for layer in range(2):
        old = {n: weights[f"net.blocks.{layer}.{n}.weight"] for n in SHAPES}
        new = {"input_layernorm": old["norm"], "q": old["qkv"][:4], "k": old["qkv"][4:6], "v": old["qkv"][6:],
               "gate_up": np.concatenate([old["gate"], old["up"]], axis=1), "fc": old["fc"].T,
               "q2": old["wq"].reshape(2, 3, 2, 3).transpose(0, 2, 1, 3).reshape(12, 3)}  # fmt: skip
        out |= {f"model.layers.{layer}.{n}.weight": v for n, v in new.items()}
    return out


def saved(folder, weights, cut=None):
    items = {("model", n): v for n, v in weights.items()}
    optimizer = adamw(list(weights), weights)
    items |= {("optim", "state", n, k): v for n, e in optimizer["state"].items() for k, v in e.items()}
    items |= {("optim", "param_groups", 0, k): v for k, v in optimizer["param_groups"][0].items()}
    return dcp_save(folder, items, cut)


def written(tmp_path, text=RULES, name="map.toml"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_of_rule_does_what_numpy_does_for_weights_and_moments(tmp_path, ranks):
    weights = private()
    cut = None
    if ranks > 1:
        rows = [((i * 3, 0), (min(3, 8 - i * 3), 4)) for i in range(ranks)]
        cut = {
            f"model.net.blocks.{n}.qkv.weight": [Chunk(f"__{i}_0.distcp", *r) for i, r in enumerate(rows)]
            for n in (0, 1)
        }
    saved(tmp_path / "in", weights, cut)
    good("convert", tmp_path / "in", tmp_path / "o", "--to", "dcp", "--key-map", written(tmp_path))
    want = saved(tmp_path / "want", public(weights))
    a, b = dcp_folder(tmp_path / "o").items, dcp_folder(want).items
    arrays = [{n: (v.shape, v.data) for n, v in x.items() if hasattr(v, "data")} for x in (a, b)]
    assert arrays[0] == arrays[1]
    assert set(a["optim.param_groups.0.params"]) == set(public(weights))
    assert document("diff", tmp_path / "in", want, "--optimizer", "--key-map", written(tmp_path))["equal"]


def test_every_reading_command_shows_the_new_names(tmp_path):
    saved(tmp_path / "in", private())
    words = [tmp_path / "in", "--key-map", written(tmp_path)]
    names = {t["name"] for t in document("ls", *words)["tensors"]}
    assert names == set(public(private()))
    assert document("inspect", *words)["kinds"]["weight"]["tensors"] == len(names)
    good("show", words[0], "model.layers.1.fc.weight", *words[1:])
    view = ckptctl.open(words[0], key_map=words[2])
    assert (view["model.layers.1.fc.weight"].numpy() == private()["net.blocks.1.fc.weight"].T).all()


def test_a_dry_run_lists_what_becomes_of_what(tmp_path):
    saved(tmp_path / "in", private())
    words = ["convert", tmp_path / "in", tmp_path / "o", "--to", "torch", "--key-map", written(tmp_path), "--dry-run"]
    listed = {m["to"]: m["from"] for m in document(*words)["key_map"]}
    assert listed["model.layers.0.k.weight"] == ["net.blocks.0.qkv.weight"]
    assert listed["model.layers.1.gate_up.weight"] == ["net.blocks.1.gate.weight", "net.blocks.1.up.weight"]
    assert set(listed) == set(public(private()))
    assert "net.blocks.0.qkv.weight" in good(*words).out


def test_names_that_no_rule_maps_are_all_in_one_message(tmp_path):
    saved(tmp_path / "in", private())
    text = '[[rename]]\nfrom = "net.embed.weight"\nto = "e"\n'
    error = refused("ls", tmp_path / "in", "--key-map", written(tmp_path, text), code=2)
    assert error["code"] == "key-map-unmapped"
    assert error["why"].split(", ") == [n for n in private() if n != "net.embed.weight"]
    kept = document("ls", tmp_path / "in", "--key-map", written(tmp_path, 'unmapped = "keep"\n' + text))["tensors"]
    assert {t["name"] for t in kept} == {*private(), "e"} - {"net.embed.weight"}


def test_json_says_the_same(tmp_path):
    saved(tmp_path / "in", private())
    rules = {"rename": [{"from": "net.{x*}", "to": "model.{x*}"}]}
    listed = document("ls", tmp_path / "in", "--key-map", written(tmp_path, json.dumps(rules), "map.json"))["tensors"]
    assert {t["name"] for t in listed} == {n.replace("net.", "model.") for n in private()}


ONE = '[[rename]]\nfrom = "net.{x*}"\nto = "a.{x*}"\n'
WRONG = {
    "rename = 3": "no list",
    "[[move]]\nfrom = 'a'\nto = 'b'": "no rule 'move'",
    "[[rename]]\nfrom = 'a'\nto = 'b'\nwith = 1": "the key 'with'",
    "[[rename]]\nfrom = 'a'": "to of rename 1",
    "[[rename]]\nfrom = ['a', 'b']\nto = 'c'": "from of rename 1 names 2",
    "[[split]]\nfrom = 'a'\nto = ['c']": "to of split 1 names 1",
    "[[rename]]\nfrom = 'a.{l}'\nto = 'b'": "other variables",
    "[[rename]]\nfrom = 'a.{l'\nto = 'b.{l'": "no pattern",
    "[[permute]]\nfrom = 'a'\nto = 'b'\nview = [2, 3]\naxes = [0, 0]": "an order of its axes",
    "[[split]]\nfrom = 'a'\nto = ['b', 'c']\naxis = 'x'": "axis of split 1",
    "unmapped = 'drop'\n" + ONE: "unmapped is 'drop'",
    "": "no rule in it",
    "= =": "no TOML",
    ONE + "[[rename]]\nfrom = 'net.embed.weight'\nto = 'e'": "is matched by",
    ONE + "[[rename]]\nfrom = 'nothing'\nto = 'e'": "matches no name",
    "unmapped = 'keep'\n[[split]]\nfrom = 'net.embed.weight'\nto = ['a', 'b']": "for 2 equal parts",
    "unmapped = 'keep'\n[[split]]\nfrom = 'net.embed.weight'\nto = ['a', 'b']\nsizes = [2, 2]": "sizes [2, 2]",
    "unmapped = 'keep'\n[[concat]]\nfrom = ['net.embed.weight', 'net.blocks.0.fc.weight']\nto = 'a'": "differ on other",
    "unmapped = 'keep'\n[[concat]]\nfrom = ['net.embed.weight', 'absent']\nto = 'a'": "absent, which is not there",
    "unmapped = 'keep'\n[[transpose]]\nfrom = 'net.blocks.{l}.norm.weight'\nto = 'a.{l}'": "two axes",
    "unmapped = 'keep'\n[[permute]]\nfrom = 'net.embed.weight'\nto = 'b'\nview = [3, -1]\naxes = [1, 0]": "same",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_makes_no_sense_is_wrong_usage_with_the_word_that_is_wrong(tmp_path, text):
    saved(tmp_path / "in", private())
    error = refused("ls", tmp_path / "in", "--key-map", written(tmp_path, text), code=2)
    assert WRONG[text] in error["what"] + error["fix"]


def test_two_names_that_become_one_are_refused(tmp_path):
    saved(tmp_path / "in", private())
    text = 'unmapped = "keep"\n[[rename]]\nfrom = "net.blocks.{l}.fc.weight"\nto = "net.embed.weight"\n'.replace(
        "{l}", "0"
    )
    assert refused("ls", tmp_path / "in", "--key-map", written(tmp_path, text))["code"] == "duplicate-name"


def test_a_file_that_is_not_there_is_said(tmp_path):
    saved(tmp_path / "in", private())
    assert refused("ls", tmp_path / "in", "--key-map", tmp_path / "no.toml")["code"] == "missing-file"


def test_reshard_keeps_names(tmp_path):
    saved(tmp_path / "in", private())
    reading = operations.Reading(key_map=written(tmp_path))
    with pytest.raises(Usage, match="reshard keeps"):
        operations.reshard(tmp_path / "in", tmp_path / "o", reading, dp=2)
