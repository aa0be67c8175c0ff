"""`.metadata` and items that lie: each fault is told by name, nothing is written, and no code runs."""

import json
import pickle
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckptctl.core.values import Global, Record
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.support.commands import ckptctl, document, good, refused
from tests.support.plain import dcp_folder
from tests.support.saving import Chunk, arange, dcp_save, torch_bytes

W = arange(6, 4)
CUT = {"model.w": [Chunk("__0_0.distcp", (0, 0), (4, 4)), Chunk("__1_0.distcp", (4, 0), (2, 4))]}


@pytest.fixture
def folder(tmp_path):
    """A good folder of two ranks: one tensor in two chunks, one whole, an object."""
    return dcp_save(tmp_path / "run", {("model", "w"): W, ("model", "b"): arange(3), ("step",): 5}, CUT)


class Parts(NamedTuple):
    """The metadata as nodes that a test may change."""

    tree: Any

    @property
    def state(self):
        return self.tree.state["state_dict_metadata"]

    @property
    def storage(self):
        return self.tree.state["storage_data"]

    def info(self, name, number=0):
        """The place of a chunk: a dict of relative_path, offset, length."""
        found = [i.state for k, i in self.storage.items() if k.state["fqn"] == name]
        return found[number]

    def chunks(self, name):
        return self.state[name].state["chunks"]

    def drop(self, name, number=0):
        keys = [k for k in self.storage if k.state["fqn"] == name]
        del self.storage[keys[number]]


def change(folder, how):
    """Rewrite the metadata."""
    loaded = load((folder / ".metadata").read_bytes(), ".metadata")
    how(Parts(loaded.tree))
    (folder / ".metadata").write_bytes(dump(loaded.tree))


def set_chunk(parts, name, number, lo=None, size=None):
    chunk = parts.chunks(name)[number].state
    if lo is not None:
        for key in parts.storage:
            if key.state["fqn"] == name and tuple(key.state["offset"]) == tuple(chunk["offsets"]):
                key.state["offset"] = SizeTuple(lo)
        chunk["offsets"] = SizeTuple(lo)
    if size is not None:
        chunk["sizes"] = SizeTuple(size)


def dtype(parts, name, to):
    properties = parts.state[name].state["properties"]
    properties.state = (Global("torch", to), *properties.state[1:])


FAULTS = {
    "a chunk has no item": (lambda p: p.drop("model.w", 1), "metadata-damaged", "model.w"),
    "an object has no item": (lambda p: p.drop("step"), "metadata-damaged", "step"),
    "a hole between chunks": (lambda p: p.chunks("model.w").pop(), "tensor-incomplete", "w (weight)"),
    "chunks overlap": (lambda p: set_chunk(p, "model.w", 1, lo=(3, 0)), None, "w (weight)"),
    "a chunk past the shape": (lambda p: set_chunk(p, "model.w", 1, lo=(5, 0)), "metadata-damaged", "model.w"),
    "a chunk at a negative row": (lambda p: set_chunk(p, "model.w", 1, lo=(-1, 0)), "metadata-damaged", "model.w"),
    "a chunk of another rank": (lambda p: set_chunk(p, "model.w", 1, size=(2, 4, 1)), "metadata-damaged", "model.w"),
    "an item of another shape": (lambda p: set_chunk(p, "model.w", 1, size=(2, 3)), None, "model.w"),
    "an item of another type": (lambda p: dtype(p, "model.w", "int32"), "item-differs", "model.w"),
    "a type that there is not": (lambda p: dtype(p, "model.w", "float5"), "unknown-dtype", "float5"),
    "a file that is not there": (
        lambda p: p.info("model.w").update(relative_path="__9_0.distcp"),
        "missing-file",
        "__9_0.distcp",
    ),
    "a file outside": (
        lambda p: p.info("model.w").update(relative_path="../run/__0_0.distcp"),
        "path-escapes",
        "../run",
    ),
    "an absolute file": (
        lambda p: p.info("model.w").update(relative_path="/etc/hostname"),
        "path-escapes",
        "/etc/hostname",
    ),
    "an object's file outside": (
        lambda p: p.info("step").update(relative_path="a/../../x"),
        "path-escapes",
        "a/../../x",
    ),
    "an item past its file": (lambda p: p.info("model.w").update(offset=10**9), "data-truncated", "model.w"),
    "an object past its file": (lambda p: p.info("step").update(length=10**9), "data-truncated", "step"),
    "an item at a negative byte": (lambda p: p.info("model.w").update(offset=-5), "bad-offsets", "model.w"),
    "an item at a fraction": (lambda p: p.info("model.w").update(offset=0.5), "bad-offsets", "model.w"),
    "an item too short": (lambda p: p.info("model.w").update(length=300), "data-truncated", "model.w"),
    "a shape beyond memory": (
        lambda p: p.state["model.w"].state.update(size=SizeTuple((2**40, 2**40))),
        "size-overflow",
        "model.w",
    ),
    "a shape that is text": (lambda p: p.state["model.w"].state.update(size="6,4"), "bad-shape", "model.w"),
    "no storage_data": (lambda p: p.tree.state.pop("storage_data"), "metadata-damaged", ""),
    "no chunks": (lambda p: p.state["model.w"].state.update(chunks=[]), "tensor-incomplete", "w (weight)"),
    "a name in another's way": (
        lambda p: p.tree.state["planner_data"].update({"model.b": ("model", "w", "b")}),
        "metadata-damaged",
        "model",
    ),
    "an unknown encoding": (
        lambda p: p.info("model.w").update(transform_descriptors=["stream.lz4/1"]),
        "unsupported",
        "lz4",
    ),
    "an object for a tensor": (lambda p: p.state.update({"model.w": Record(Global("x", "Y"), (), "newobj")}), None, ""),
    "a tensor for an object": (lambda p: p.state.update({"step": 5}), "metadata-damaged", "step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_the_metadata_is_told(fault, folder, tmp_path):
    how, code, word = FAULTS[fault]
    change(folder, how)
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert code in (None, error["code"]), error
    assert word in " ".join(map(str, error.values())), error
    assert error["where"] or error["why"], error
    assert not (tmp_path / "out").exists()
    for words in (["inspect"], ["ls"], ["diff", folder]):
        assert ckptctl(*words, folder, "--json").code in (0, 3)


def test_the_good_folder_is_good(folder, tmp_path):
    good("convert", folder, tmp_path / "out", "--to", "hf")
    change(folder, lambda p: None)
    good("convert", folder, tmp_path / "again", "--to", "dcp")
    assert dcp_folder(tmp_path / "again").items["step"] == 5


def test_a_hole_and_an_overlap_are_told_apart(folder, tmp_path):
    change(folder, FAULTS["a hole between chunks"][0])
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert (error["code"], "16 elements" in error["why"]) == ("tensor-incomplete", True)
    shutil.rmtree(folder)
    twice = [CUT["model.w"][0], Chunk("__2_0.distcp", (3, 0), (2, 4))]
    dcp_save(folder, {("model", "w"): W}, {"model.w": twice})
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert (error["code"], "same elements" in error["why"]) == ("tensor-incomplete", True)


class Runs:
    def __reduce__(self):
        return (eval, ("open('ckptctl-pickle-ran', 'w')",))


@pytest.mark.parametrize("place", ["metadata", "object", "item"])
def test_code_in_a_pickle_is_reported_and_never_run(place, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if place == "metadata":
        tree = {"state_dict_metadata": {}, "storage_data": {}, "planner_data": Runs()}
        (folder / ".metadata").write_bytes(pickle.dumps(tree))
    else:
        evil = torch_bytes(pickle.dumps({"a": Runs()}, 2))
        name = "step" if place == "object" else "model.b"

        def put(parts):
            info = parts.info(name)
            data = (folder / "__0_0.distcp").read_bytes()
            info.update(offset=len(data), length=len(evil))
            (folder / "__0_0.distcp").write_bytes(data + evil)

        change(folder, put)
    for words in (["convert", folder, "out", "--to", "torch"], ["show", folder, "b"], ["diff", folder, folder]):
        assert refused(*words)["code"] in ("pickle-calls-code", "unsupported", "storage-missing", "unrecognised")
    if place == "object":
        found = document("inspect", folder)
        assert [u["global"].rpartition(".")[2] for u in found["unsafe"]] == ["eval"]
        assert found["resumable"] is False
    else:
        assert ckptctl("inspect", folder).code in (0, 3)
    assert not (tmp_path / "ckptctl-pickle-ran").exists()
    assert not (tmp_path / "out").exists()


def test_an_item_whose_pickle_disagrees_is_not_taken(folder, tmp_path):
    """torch's own loader would cast or leave a hole: the item says float64, the metadata float32."""
    other = torch_bytes(W[:4].astype(np.float64))

    def put(parts):
        data = (folder / "__0_0.distcp").read_bytes()
        parts.info("model.w").update(offset=len(data), length=len(other))
        (folder / "__0_0.distcp").write_bytes(data + other)

    change(folder, put)
    error = refused("convert", folder, tmp_path / "out", "--to", "hf")
    assert error["code"] == "item-differs"
    assert "float64" in error["why"]


def test_zstd_that_is_no_zstd_or_a_bomb_is_refused(folder, tmp_path):
    import zstandard

    frame = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    for data in (b"\x00" * 500, frame, frame[:40]):

        def put(parts, data=data):
            (folder / "z.distcp").write_bytes(data)
            info = parts.info("model.w")
            info.update(relative_path="z.distcp", offset=0, length=len(data), transform_descriptors=["stream.zstd/1"])
            parts.info("model.w", 1).update(transform_descriptors=["stream.zstd/1"])

        change(folder, put)
        error = refused("convert", folder, tmp_path / "out", "--to", "hf")
        assert error["code"] in ("archive-truncated", "damaged", "storage-missing"), error


def test_a_folder_without_paths_is_read_by_its_names(tmp_path):
    model = {"model.w": W, "optim.state.w.exp_avg": W + np.float32(1), "optim.param_groups.w.lr": 0.1}
    path = dcp_save(tmp_path / "run", {(n,): v for n, v in model.items()}, paths=False)
    found = document("inspect", path, "--tensors")
    assert json.dumps(found)
    assert sum(k["tensors"] for k in found["kinds"].values()) == 2


@pytest.mark.parametrize("seed", range(40))
def test_mutated_metadata_never_ends_in_a_traceback(seed, folder, tmp_path):
    rng = np.random.default_rng(seed)
    data = bytearray((folder / ".metadata").read_bytes())
    for _ in range(rng.integers(1, 6)):
        at = int(rng.integers(len(data)))
        how = int(rng.integers(3))
        if how == 0:
            data[at] = int(rng.integers(256))
        elif how == 1:
            del data[at : at + int(rng.integers(1, 9))]
        else:
            data[at:at] = bytes(rng.integers(0, 256, int(rng.integers(1, 5)), np.uint8))
    (folder / ".metadata").write_bytes(bytes(data))
    assert ckptctl("inspect", folder, "--json").code in (0, 3)
    assert ckptctl("convert", folder, tmp_path / "out", "--to", "torch", "--json").code in (0, 3)


@pytest.mark.parametrize("state", [5, (1, 2), "text", None, [3]])
def test_the_place_of_an_item_that_is_no_dict_is_damage(state, folder, tmp_path):
    """A changed byte may make any opcode of what was a dict."""

    def spoil(parts):
        next(iter(parts.storage.values())).state = state

    change(folder, spoil)
    assert refused("inspect", folder)["code"] == "pickle-damaged"


def test_bytes_behind_the_pickle_are_damage(folder):
    """The pickle ends early where a byte becomes that of STOP: what was read by then may look whole."""
    file = folder / ".metadata"
    data = file.read_bytes()
    assert data.endswith(b"b.")
    file.write_bytes(data[:-2] + b"..")
    assert refused("inspect", folder)["code"] == "trailing-bytes"
