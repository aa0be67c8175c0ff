"""What stands beside and among the weights of a torch file: objects, arrays in them, bare storages. Nothing is lost."""

import numpy as np
import pytest

from ckptctl.core.values import Global, OrderedPairs, Record
from tests.support.checkpoints import ckpt, digest, run_torch
from tests.support.commands import ckptctl, document, good, refused
from tests.support.format_suite import weights_in
from tests.support.plain import Plain, dcp_folder, nested, torch_tree
from tests.support.saving import arange, torch_save
from tests.support.torchfiles import call, stored, torch_zip, v2

A = arange(4)


def file(path, tree, numel=4):
    """A torch file whose nodes may be calls over the one storage `0`."""
    path.write_bytes(torch_zip(tree, {"0": arange(numel).tobytes()}))
    return path


def tensor(numel=4):
    return v2(stored("0", numel), 0, (numel,), (1,))


@pytest.mark.parametrize("place", ["model", "value"])
@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_an_unknown_call_over_a_storage_is_refused_by_name(to, place, tmp_path):
    odd = call("torch._utils._rebuild_tensor_vX", stored("0", 4), 0, (4,), (1,))
    tree = {
        "model": {"a": tensor(), **({"odd": odd} if place == "model" else {})},
        "extra": [odd] if place == "value" else 1,
    }
    path = file(tmp_path / "x.pt", tree)
    error = refused("convert", path, tmp_path / "out", "--to", to)
    assert error["code"] == "unsupported"
    assert ("model.odd" if place == "model" else "extra") in error["what"]
    assert "_rebuild_tensor_vX" in error["why"]
    assert document("inspect", path)["unsupported"]
    assert refused("diff", path, path)["code"] == "unsupported"


def test_a_file_of_nothing_but_unknown_tensors_says_which(tmp_path):
    path = file(tmp_path / "x.pt", {"a": call("torch._utils._rebuild_tensor_vX", stored("0", 4), 0)})
    for words in (["inspect"], ["ls"], ["convert", tmp_path / "out", "--to", "hf"]):
        error = refused(words[0], path, *words[1:])
        assert (error["code"], "_rebuild_tensor_vX" in error["why"]) == ("unsupported", True)


def wrapped(numel=4):
    return call("my.module.Wrapper", tensor(numel), {"inner": [tensor(numel)]})


def test_an_object_around_a_tensor_is_carried_whole(tmp_path):
    path = file(tmp_path / "x.pt", {"model": {"a": tensor(), "w": wrapped()}, "note": wrapped()})
    good("convert", path, tmp_path / "t", "--to", "torch")
    good("convert", tmp_path / "t", tmp_path / "d", "--to", "dcp")
    for tree in (torch_tree(tmp_path / "t"), nested(dcp_folder(tmp_path / "d"))):
        for found in (tree["model"]["w"], tree["note"]):
            assert (type(found).__module__, type(found).__name__) == ("my.module", "Wrapper")
            first, second = found.args
            assert isinstance(first, Plain)
            assert first.data == second["inner"][0].data == A.tobytes()


def test_a_large_tensor_in_an_object_is_carried_too(tmp_path):
    numel = 20_000  # above what is read as a value
    path = file(
        tmp_path / "x.pt", {"model": {"a": tensor(numel), "w": wrapped(numel)}, "note": (wrapped(numel), 1)}, numel
    )
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        tree = torch_tree(tmp_path / to) if to == "torch" else nested(dcp_folder(tmp_path / to))
        for found in (tree["model"]["w"], tree["note"][0]):
            assert found.args[1]["inner"][0].data == arange(numel).tobytes()


def test_a_folder_of_weights_has_no_place_for_it(tmp_path):
    path = file(tmp_path / "x.pt", {"model": {"a": tensor(), "w": wrapped()}})
    error = refused("convert", path, tmp_path / "out", "--to", "hf")
    assert (error["code"], "my.module.Wrapper" in error["why"]) == ("unsupported", True)
    assert "--exclude 'w'" in error["fix"]
    good("convert", path, tmp_path / "out", "--to", "hf", "--exclude", "w")
    assert weights_in(tmp_path / "out", "hf") == {"a": digest("F32", (4,), A.tobytes())}


def test_other_things_among_the_weights_are_carried_or_said(tmp_path):
    extra = {"_extra_state": None, "block._extra_state": {"scale": 2.0}, "version": 3}
    path = torch_save(tmp_path / "x.pt", {"model": OrderedPairs({"a": A, **extra})})
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
    assert torch_tree(tmp_path / "torch")["model"]["block._extra_state"] == {"scale": 2.0}
    assert dcp_folder(tmp_path / "dcp").items["model.version"] == 3
    report = document("convert", path, tmp_path / "hf", "--to", "hf")
    line = next(line for line in report["fidelity"] if line["part"] == "values among the weights")
    assert line["fate"] == "dropped"
    assert "_extra_state" in line["detail"]


def test_a_bare_storage_among_the_values_is_refused(tmp_path):
    path = file(tmp_path / "x.pt", {"model": {"a": tensor()}, "raw": stored("0", 4)})
    for to in ("torch", "dcp"):
        assert refused("convert", path, tmp_path / to, "--to", to)["code"] == "unsupported"


def test_values_of_every_kind_come_back_as_they_were(tmp_path):
    values = {
        "none": None,
        "truth": True,
        "int": 2**70,
        "float": float("inf"),
        "nan": float("nan"),
        "text": "\u00e9\x00",
        "bytes": b"\x00\xff",
        "tuple": (1, (2, "x")),
        "list": [1, [2]],
        "set": {1, 2},
        "complex": 1 + 2j,
        "nested": {"a": {"b": 1}},
        "empty": {},
        "array": arange(3, dtype=np.int64),
        "scalar": np.array(7, np.uint8),
        "empty_array": arange(0),
        "ordered": OrderedPairs(z=1, a=2),
        "dtype": Global("torch", "bfloat16"),
        "device": Record(Global("torch", "device"), ("cpu",)),
    }
    path = torch_save(tmp_path / "x.pt", {"model": {"a": A}, "extra": values})
    good("convert", path, tmp_path / "t", "--to", "torch")
    good("convert", tmp_path / "t", tmp_path / "d", "--to", "dcp")
    good("convert", tmp_path / "d", tmp_path / "t2", "--to", "torch")
    was = torch_tree(path)["extra"]
    for tree in (torch_tree(tmp_path / "t"), torch_tree(tmp_path / "t2")):
        got = tree["extra"]
        assert list(got) == list(was)
        for name, value in was.items():
            if isinstance(value, Plain):
                assert got[name][:3] == value[:3], name
            elif name == "ordered":
                assert list(got[name].items()) == list(value.items())  # DCP keeps no classes of dicts
            elif name == "device":
                assert got[name].args == value.args
            else:
                assert repr(got[name]) == repr(value), name


def test_numbers_as_keys_become_text_in_dcp_and_it_is_said(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a": A}, "scheduler": {"milestones": {10: 1, 20: 2}}})
    report = document("convert", path, tmp_path / "d", "--to", "dcp")
    line = next(line for line in report["fidelity"] if line["part"] == "values")
    assert (line["fate"], "scheduler.milestones" in line["detail"]) == ("converted", True)
    assert set(dcp_folder(tmp_path / "d").items) == {"model.a", "scheduler.milestones.10", "scheduler.milestones.20"}
    report = document("convert", path, tmp_path / "t", "--to", "torch")
    assert not [line for line in report["fidelity"] if line["fate"] == "converted"]
    assert torch_tree(tmp_path / "t")["scheduler"]["milestones"] == {10: 1, 20: 2}


def test_names_that_would_collide_in_dcp_are_refused(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a": A}, "s": {"x.y": 1, "x": {"y": 2}}})
    assert refused("convert", path, tmp_path / "d", "--to", "dcp")["code"] == "duplicate-name"


def test_deep_and_looping_values_end_in_words(tmp_path):
    deep = {"leaf": tensor()}
    for _ in range(500):
        deep = {"d": deep}
    loop = {}
    loop["self"] = loop
    twice = {}
    twice["a"], twice["b"] = twice, [twice, twice]
    for number, value in enumerate((deep, [loop], loop, twice)):
        path = file(tmp_path / f"{number}.pt", {"model": {"a": tensor()}, "extra": value})
        for to in ("torch", "dcp", "hf"):
            done = ckptctl("convert", path, tmp_path / f"{number}{to}", "--to", to)
            assert done.code in (0, 3), done
        assert ckptctl("show", path, "extra", "--json").code in (0, 3)
        assert ckptctl("inspect", path, "--json").code in (0, 3)
        assert ckptctl("diff", path, path, "--state").code in (0, 3)


def test_values_that_show_alike_and_are_not_differ(tmp_path):
    """bytes of equal length, objects of one class, what is deep in lists: all of it is compared."""
    device = [Record(Global("torch", "device"), ("cuda", n)) for n in (0, 1)]
    deep = [[1], [2]]
    for _ in range(60):
        deep = [[d] for d in deep]
    for number, (a, b) in enumerate([(b"\0\1", b"\0\2"), device, deep, ([{"x": b"a"}], [{"x": b"b"}])]):
        paths = [
            file(tmp_path / f"{number}{n}.pt", {"model": {"a": tensor()}, "extra": v}) for n, v in (("a", a), ("b", b))
        ]
        found = ckptctl("diff", *paths, "--state", "--json")
        assert found.code == 1, found
        assert [d["name"] for d in found.json["differences"]] == ["extra"]
        assert ckptctl("diff", paths[0], paths[0], "--state").code == 0


def test_not_a_number_inside_of_values_is_equal_to_itself(tmp_path):
    path = file(tmp_path / "x.pt", {"model": {"a": tensor()}, "extra": [{"x": float("nan")}]})
    assert ckptctl("diff", path, path, "--state").code == 0


def test_a_file_that_is_one_tensor_or_a_list_of_them(tmp_path):
    good("convert", torch_save(tmp_path / "one.pt", A), tmp_path / "one", "--to", "hf")
    assert set(weights_in(tmp_path / "one", "hf")) == {"tensor"}
    good("convert", torch_save(tmp_path / "list.pt", [A, arange(2)]), tmp_path / "list", "--to", "hf")
    assert set(weights_in(tmp_path / "list", "hf")) == {"0", "1"}


def test_a_pickled_module_is_refused_by_its_class(tmp_path):
    module = Record(Global("my.module", "Net"), (), "newobj", state={"_parameters": {"w": tensor()}}, has_state=True)
    for tree in (module, {"model": module}):
        error = refused("convert", file(tmp_path / "x.pt", tree), tmp_path / "out", "--to", "hf")
        assert "Net" in f"{error['what']} {error['why']}", error


SHAPES_OF_FILES = {
    "bare": (lambda m: m, {"a", "b.c"}),
    "state_dict": (lambda m: {"state_dict": m, "epoch": 3}, {"a", "b.c"}),
    "model_state_dict": (lambda m: {"model_state_dict": m, "loss": 0.5}, {"a", "b.c"}),
    "one level down": (lambda m: {"app": {"model": m, "optim": {"state": {}, "param_groups": []}}}, {"a", "b.c"}),
    "nested modules": (lambda m: {"enc": {"a": m["a"]}, "dec": {"b": {"c": m["b.c"]}}}, {"enc.a", "dec.b.c"}),
    "ordered": (lambda m: OrderedPairs(m), {"a", "b.c"}),
}


@pytest.mark.parametrize("shape", SHAPES_OF_FILES)
def test_where_the_model_stands_in_a_file(shape, tmp_path):
    make, names = SHAPES_OF_FILES[shape]
    path = torch_save(tmp_path / "x.pt", make({"a": arange(2), "b.c": arange(3)}))
    good("convert", path, tmp_path / "out", "--to", "hf", "--no-optimizer")
    assert set(weights_in(tmp_path / "out", "hf")) == names


def test_two_models_in_one_file_are_not_mixed(tmp_path):
    path = torch_save(
        tmp_path / "x.pt", {"generator": {"a": A}, "critic": {"a": A}, "optimizer": {"state": {}, "param_groups": []}}
    )
    error = refused("convert", path, tmp_path / "out", "--to", "hf")
    assert error["code"] == "unsupported"
    assert "generator" in f"{error['what']} {error['why']}"


def test_an_average_beside_the_model_is_not_taken_for_it(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"model": {"a": A}, "ema": {"a": A + np.float32(1)}})
    good("convert", path, tmp_path / "t", "--to", "torch")
    assert weights_in(tmp_path / "t", "torch") == {"a": digest("F32", (4,), A.tobytes())}
    assert torch_tree(tmp_path / "t")["ema"]["a"].data == (A + np.float32(1)).tobytes()


LOADS = """
import sys, torch
found = torch.load(sys.argv[1], weights_only=True)
print(sorted(found), type(found["model"]).__name__, found["optimizer"]["param_groups"][0]["betas"])
"""


@pytest.mark.real
def test_real_torch_loads_the_result_with_weights_only(tmp_path):
    good("convert", ckpt("torch/fsdp2_dp4_dcp"), tmp_path / "t", "--to", "torch")
    printed = run_torch(LOADS, tmp_path / "t")
    assert printed == "['model', 'optimizer', 'rng', 'scheduler', 'step'] OrderedDict (0.9, 0.95)\n"


def test_bin_folders_keep_what_is_no_weight_or_say_so(tmp_path):
    (tmp_path / "a").mkdir()
    torch_save(tmp_path / "a" / "pytorch_model.bin", {"w": A, "note": "text"})
    report = document("convert", tmp_path / "a", tmp_path / "out", "--to", "hf")
    assert any("note" in line["detail"] and line["fate"] == "dropped" for line in report["fidelity"])
    good("convert", tmp_path / "a", tmp_path / "t", "--to", "torch")
    (tmp_path / "b").mkdir()
    tree = {"model": {"w": A}, "optimizer": {"state": {"w": {"exp_avg": A}}, "param_groups": [{"params": ["w"]}]}}
    torch_save(tmp_path / "b" / "pytorch_model.bin", tree)
    error = refused("convert", tmp_path / "b", tmp_path / "no", "--to", "hf", "--no-optimizer")
    assert (error["code"], "optimizer" in error["what"]) == ("unsupported", True)
    good("convert", tmp_path / "b" / "pytorch_model.bin", tmp_path / "yes", "--to", "hf", "--no-optimizer")


def test_two_moments_on_one_memory_are_told(tmp_path):
    """FSDP1's full optimizer state on the CPU: exp_avg has the values of exp_avg_sq."""
    one = arange(4)
    state = {"w": {"exp_avg": one, "exp_avg_sq": one}, "v": {"exp_avg": arange(2), "exp_avg_sq": arange(2)}}
    tree = {"model": {"w": arange(4), "v": arange(2)}, "optimizer": {"state": state, "param_groups": []}}
    found = document("inspect", torch_save(tmp_path / "a.pt", tree))
    assert [w for w in found["warnings"] if "1 of 2 parameters" in w]
    assert document("inspect", ckpt("torch/plain_zip"))["warnings"] == []
