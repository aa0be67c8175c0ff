"""One metadata a rank, and items as safetensors: what is joined, what is compared, and what is refused."""

import json
import pickle
import shutil

import numpy as np
import pytest

import ckptctl
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import SizeTuple
from tests.support.checkpoints import ckpt, truth
from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder
from tests.support.saving import Chunk, arange, dcp_save, torch_bytes

W = arange(6, 4)


def rank_local(path, ranks):
    """A folder of ranks that saved by themselves; ranks lists each one's {name: (array or value, rows before it)}.

    A rank's metadata lists its own chunks only, with the shape of the whole.
    """
    path.mkdir()
    rows: dict[str, int] = {}
    for items in ranks:
        for name, (value, lo) in items.items():
            if isinstance(value, np.ndarray) and value.ndim:
                rows[name] = max(rows.get(name, 0), lo + len(value))
    for rank, items in enumerate(ranks):
        mine = {("model", n): v for n, (v, _) in items.items() if n != "rng"}
        if "rng" in items:
            mine["rng",] = items["rng"][0]
        dcp_save(path / "one", mine)
        tree = load((path / "one" / ".metadata").read_bytes(), "x").tree
        for key, info in tree.state["storage_data"].items():
            name = key.state["fqn"].removeprefix("model.")
            info.state["relative_path"] = f"__{rank}_0.distcp"
            if name in rows:
                meta = tree.state["state_dict_metadata"][key.state["fqn"]].state
                meta["size"] = SizeTuple((rows[name], *meta["size"][1:]))
                lo = SizeTuple((items[name][1], *[0] * (len(meta["size"]) - 1)))
                meta["chunks"][0].state["offsets"] = key.state["offset"] = lo
        (path / f"__{rank}.metadata").write_bytes(dump(tree))
        (path / "one" / "__0_0.distcp").rename(path / f"__{rank}_0.distcp")
        shutil.rmtree(path / "one")
    return path


def two_ranks(**more):
    return [{"w": (W[:4], 0), "s": (arange(3), 0)}, {"w": (W[4:], 4), "s": (arange(3), 0), **more}]


def test_ranks_are_joined_and_what_all_have_is_taken_once(tmp_path):
    path = rank_local(tmp_path / "run", two_ranks())
    found = document("inspect", path)
    assert (found["variant"], found["layout"]["world_size"]) == ("rank-local", 2)
    report = document("reshard", path, tmp_path / "out", "--dp", "1")
    [line] = [x["detail"] for x in report["fidelity"] if x["part"] == "encoding"]
    assert "rank-local" in line
    out = dcp_folder(tmp_path / "out")
    assert (out.items["model.w"].data, out.items["model.s"].data) == (W.tobytes(), arange(3).tobytes())


def test_a_metadata_file_may_be_named_itself():
    folder = ckpt("torch/dcp_rank_local")
    assert document("inspect", folder / "__1.metadata")["path"] == str(folder)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_without_its_metadata_is_missed(lost, tmp_path):
    path = rank_local(tmp_path / "run", two_ranks())
    (path / f"__{lost}.metadata").unlink()
    error = refused("convert", path, tmp_path / "out", "--to", "torch")
    assert (error["code"], error["what"]) == ("missing-file", f"__{lost}.metadata is missing")


def test_a_last_rank_that_is_gone_altogether_leaves_a_hole(tmp_path):
    path = rank_local(tmp_path / "run", two_ranks())
    for name in ("__1.metadata", "__1_0.distcp"):
        (path / name).unlink()
    error = refused("convert", path, tmp_path / "out", "--to", "torch")
    assert (error["code"], "w (weight)" in error["what"]) == ("tensor-incomplete", True)


@pytest.mark.parametrize("n", [3, 300_000])
def test_replicas_that_differ_are_refused(n, tmp_path):
    """Small ones are compared by their bytes, those over 1 MiB by the checksums in their archives."""
    a = arange(n)
    b = a.copy()
    b[n // 2] = np.nan
    for name, other in (("same", a.copy()), ("other", b)):
        path = rank_local(tmp_path / name, [{"w": (a, 0)}, {"w": (other, 0)}])
        if name == "same":
            good("convert", path, tmp_path / "good", "--to", "torch")
            continue
        error = refused("convert", path, tmp_path / "out", "--to", "torch")
        assert (error["code"], "__0_0.distcp" in error["why"]) == ("replicas-differ", True)


def test_random_state_of_each_rank_is_the_lowest_rank_s_with_a_word(tmp_path):
    path = rank_local(tmp_path / "run", [{"w": (W, 0), "rng": ([1, 2], 0)}, {"w": (W, 0), "rng": ([3, 4], 0)}])
    found = document("inspect", path)
    assert any("rng differs between ranks" in w for w in found["warnings"])
    good("convert", path, tmp_path / "out", "--to", "dcp")
    assert dcp_folder(tmp_path / "out").items["rng"] == [1, 2]


def test_an_object_of_the_model_that_differs_is_refused(tmp_path):
    path = rank_local(tmp_path / "run", [{"w": (W, 0), "extra": ("a", 0)}, {"w": (W, 0), "extra": ("b", 0)}])
    assert refused("inspect", path)["code"] == "replicas-differ"


def test_ranks_that_disagree_about_a_shape_are_refused(tmp_path):
    path = rank_local(tmp_path / "run", two_ranks())
    tree = load((path / "__1.metadata").read_bytes(), "x").tree
    tree.state["state_dict_metadata"]["model.w"].state["size"] = SizeTuple((7, 4))
    (path / "__1.metadata").write_bytes(dump(tree))
    error = refused("convert", path, tmp_path / "out", "--to", "torch")
    assert (error["code"], "model.w" in error["what"]) == ("metadata-damaged", True)


def test_a_common_metadata_is_taken_before_those_of_ranks(tmp_path):
    path = dcp_save(tmp_path / "run", {("model", "w"): W})
    (path / "__7.metadata").write_bytes(pickle.dumps({"left": "from an earlier save"}))
    found = document("inspect", path)
    assert found["variant"] == ""
    assert any("__7.metadata" in w for w in found["warnings"])


# ---- items as safetensors -----------------------------------------------------------------------------------------


@pytest.fixture
def blobs(tmp_path):
    """A copy of a real folder of safetensors items, to be damaged."""
    shutil.copytree(ckpt("torch/dcp_safetensors"), tmp_path / "run")
    return tmp_path / "run"


def header_of(file):
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def rewrite(file, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


NAME = "model.model.embed_tokens.weight"


def moved(header):
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    info[NAME]["saved_offsets"] = [5, 0]
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)


def renamed(header):
    header["x"] = header.pop(NAME)
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({**info, "x": info[NAME]})


def reshaped(header):
    header[NAME]["shape"] = [32, 66]


@pytest.mark.parametrize("how", [moved, renamed, reshaped])
def test_a_blob_that_the_metadata_does_not_mean_is_refused(how, blobs, tmp_path):
    """torch keeps one slice a name in a blob: a second one of the same tensor would have taken its place."""
    header, data = header_of(blobs / "__0_0.distcp")
    how(header)
    rewrite(blobs / "__0_0.distcp", header, data)
    error = refused("convert", blobs, tmp_path / "out", "--to", "torch")
    assert (error["code"], NAME in error["what"]) == ("item-differs", True)


def test_a_blob_that_ends_early_is_refused(blobs, tmp_path):
    data = (blobs / "__1_0.distcp").read_bytes()
    (blobs / "__1_0.distcp").write_bytes(data[:-100])
    assert refused("convert", blobs, tmp_path / "out", "--to", "torch")["code"] == "data-truncated"


def test_what_is_written_of_safetensors_items_says_so(blobs, tmp_path):
    report = document("reshard", blobs, tmp_path / "out", "--dp", "3", "--tp", "2")
    assert any("safetensors" in x["detail"] for x in report["fidelity"] if x["part"] == "encoding")
    out = dcp_folder(tmp_path / "out")
    for name, want in truth("torch/dcp_safetensors")["model"].items():
        assert out.items[f"model.{name}"].truth == want
    with ckptctl.open(blobs) as view:
        assert view.step == 3


# ---- items apart --------------------------------------------------------------------------------------------------


def shared(path, name, place):
    """The folder with an item's place changed by place(offset, length) -> (offset, length)."""
    tree = load((path / ".metadata").read_bytes(), "x").tree
    for key, info in tree.state["storage_data"].items():
        if key.state["fqn"] == name:
            info.state["offset"], info.state["length"] = place(info.state["offset"], info.state["length"])
    (path / ".metadata").write_bytes(dump(tree))


@pytest.mark.parametrize(
    "place",
    [lambda at, n: (0, n), lambda at, n: (at - 1, n + 1), lambda at, n: (at - 600, n)],
    ids=["the first item again", "one byte of the item before", "most of it"],
)
def test_items_that_share_bytes_are_refused(place, tmp_path):
    path = dcp_save(tmp_path / "run", {("model", "a"): arange(300), ("model", "b"): arange(300), ("step",): 5})
    good("convert", path, tmp_path / "good", "--to", "torch")
    shared(path, "model.b", place)
    for words in (["inspect", path], ["convert", path, tmp_path / "out", "--to", "torch"]):
        error = refused(*words)
        assert (error["code"], error["where"]) == ("overlap", "__0_0.distcp")
    assert not (tmp_path / "out").exists()


def test_an_object_that_shares_bytes_with_a_tensor_is_refused(tmp_path):
    path = dcp_save(tmp_path / "run", {("model", "a"): arange(300), ("step",): 5})
    whole = (path / "__0_0.distcp").read_bytes()
    shared(path, "step", lambda at, n: (whole.index(torch_bytes(arange(300))[:4]), n))
    assert refused("inspect", path)["code"] in ("overlap", "archive-truncated")


def test_items_of_one_offset_in_two_files_share_nothing(tmp_path):
    cut = {"model.w": [Chunk("__0_0.distcp", (0, 0), (3, 4)), Chunk("__1_0.distcp", (3, 0), (3, 4))]}
    path = dcp_save(tmp_path / "run", {("model", "w"): W}, cut)
    good("convert", path, tmp_path / "out", "--to", "torch")
