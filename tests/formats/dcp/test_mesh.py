"""Meshes of two axes: cut as FSDP2 over tensor parallel cuts, told from files, loaded by real torch on any ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.formats.dcp.cut import Mesh, box_of
from tests.support.checkpoints import ckpt, digest, run_torch, truth
from tests.support.commands import document, good, refused
from tests.support.format_suite import tree_bytes
from tests.support.plain import dcp_folder
from tests.support.saving import adamw, arange, dcp_save, torch_save

REAL = "torch/fsdp2_tp2x2_dcp"


# torch 2.13.0, _compute_local_shape_and_global_offset, (rows, first row) by rank: [_StridedShard(0, tp), Shard(0)].
STRIDED = {
    (131, 4, 2): [(17, 0), (17, 66), (17, 17), (17, 83), (17, 34), (17, 100), (15, 51), (14, 117)],
    (131, 2, 3): [(22, 0), (22, 44), (22, 88), (22, 22), (22, 66), (21, 110)],
    (5, 4, 2): [(1, 0), (1, 3), (1, 1), (1, 4), (1, 2), (0, 5), (0, 5), (0, 5)],
    (7, 4, 2): [(1, 0), (1, 4), (1, 1), (1, 5), (1, 2), (1, 6), (1, 3), (0, 7)],
    (3, 3, 2): [(1, 0), (1, 2), (1, 1), (0, 3), (0, 3), (0, 3)],
    (1, 2, 2): [(1, 0), (0, 1), (0, 1), (0, 1)],
}


@pytest.mark.parametrize("case", STRIDED)
def test_rows_that_both_axes_cut_are_torch_s(case):
    rows, dp, tp = case
    mesh = Mesh(dp, tp)
    boxes = [box_of((rows, 4), mesh, rank, 0) for rank in range(mesh.ranks)]
    assert [(b.size[0], b.lo[0]) for b in boxes] == STRIDED[case]
    assert all((b.size[1], b.lo[1]) == (4, 0) for b in boxes)


def test_a_rank_without_rows_of_a_grid_keeps_its_columns():
    """Expected: torch 2.13.0, [Shard(0), Shard(1)] on rank (3, 1) of (4, 2)."""
    assert box_of((2, 4), Mesh(4, 2), 7, 1) == ((2, 2), (0, 2))


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([None, 0, 1]),
)
def test_boxes_hold_every_element_once(shape, dp, tp, axis):
    if axis == 1 and len(shape) < 2:
        axis = 0
    mesh, seen = Mesh(dp, tp), np.zeros(shape, int)
    for rank in range(mesh.ranks):
        box = box_of(tuple(shape), mesh, rank, axis, holder=3)
        if box is not None:
            seen[tuple(slice(a, a + n) for a, n in zip(box.lo, box.size, strict=True))] += 1
    assert (seen == 1).all()


def chunks(path):
    """name -> boxes in the order of the metadata, whichever file holds them."""
    return {n.removeprefix("app."): [c[1:] for c in listed] for n, listed in dcp_folder(path).chunks.items()}


def test_a_model_is_cut_as_torch_cut_the_same_one(tmp_path):
    good("convert", ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "out", "--to", "dcp", "--dp", "2", "--tp", "2")
    ours, theirs = chunks(tmp_path / "out"), chunks(ckpt(REAL))
    assert {n: c for n, c in ours.items() if n in theirs} == theirs
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert files == {".metadata", *(f"__{r}_0.distcp" for r in range(4))}


def test_a_grid_of_chunks_shows_the_mesh(tmp_path):
    assert (
        document("inspect", ckpt(REAL))["layout"] | {"dp": 2, "tp": 2, "world_size": 4}
        == document("inspect", ckpt(REAL))["layout"]
    )
    good("reshard", ckpt(REAL), tmp_path / "same")
    assert chunks(tmp_path / "same") == chunks(ckpt(REAL))
    good("reshard", ckpt(REAL), tmp_path / "one", "--tp", "1")
    found = document("inspect", tmp_path / "one")["layout"]
    assert (found["world_size"], found["tp"]) == (2, None)


@pytest.mark.parametrize("mesh", [(1, 1), (3, 1), (8, 1), (1, 3), (4, 2), (40, 7)])
def test_a_mesh_goes_to_any_other_and_back(mesh, tmp_path):
    dp, tp = map(str, mesh)
    good("reshard", ckpt(REAL), tmp_path / "start", "--dp", "2", "--tp", "2")
    good("reshard", tmp_path / "start", tmp_path / "out", "--dp", dp, "--tp", tp)
    good("reshard", tmp_path / "out", tmp_path / "back", "--dp", "2", "--tp", "2")
    assert tree_bytes(tmp_path / "back") == tree_bytes(tmp_path / "start")
    out = dcp_folder(tmp_path / "out")
    for name, want in truth(REAL)["model"].items():
        assert out.items[f"app.model.{name}"].truth == want


def test_names_without_a_plan_are_cut_over_dp_only(tmp_path):
    model = {"a.q_proj.weight": arange(5, 3), "a.q_proj.bias": arange(5), "a.o_proj.weight": arange(3, 5)}
    model |= {"a.o_proj.bias": arange(3), "a.c_attn.weight": arange(4, 6), "norm.weight": arange(3)}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(list(model), model)})
    report = document("convert", path, tmp_path / "out", "--to", "dcp", "--dp", "2", "--tp", "2")
    found = chunks(tmp_path / "out")
    assert found["model.a.q_proj.weight"] == [((0, 0), (2, 3)), ((3, 0), (1, 3)), ((2, 0), (1, 3)), ((4, 0), (1, 3))]
    assert found["model.a.q_proj.bias"] == [((0,), (2,)), ((3,), (1,)), ((2,), (1,)), ((4,), (1,))]
    grid = [((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (1, 3)), ((2, 3), (1, 2))]
    assert found["model.a.o_proj.weight"] == found["optim.state.a.o_proj.weight.exp_avg"] == grid
    assert found["model.a.o_proj.bias"] == [((0,), (2,)), ((2,), (1,))]
    assert found["model.a.c_attn.weight"] == [((0, 0), (2, 6)), ((2, 0), (2, 6))]
    assert found["optim.state.norm.weight.step"] == [((), ())]
    [line] = [entry["detail"] for entry in report["fidelity"] if entry["part"] == "layout"]
    assert "9 of 18 tensors are cut over tp" in line
    items = dcp_folder(tmp_path / "out").items
    assert all(items[f"model.{n}"].data == w.tobytes() for n, w in model.items())


def test_folders_of_many_ranks_without_rows_are_read(tmp_path):
    """Chunks without elements stand under one key, so that several get one item: that is no overlap."""
    path = dcp_save(tmp_path / "src", {("model", "lm_head.weight"): arange(2, 3), ("model", "b"): arange(1)})
    good("convert", path, tmp_path / "out", "--to", "dcp", "--dp", "5", "--tp", "2")
    assert document("diff", tmp_path / "out", path)["equal"] is True
    good("reshard", tmp_path / "out", tmp_path / "one", "--dp", "1")
    assert dcp_folder(tmp_path / "one").items["model.lm_head.weight"].truth == digest(
        "F32", (2, 3), arange(2, 3).tobytes()
    )


def test_a_mesh_of_nothing_is_wrong_usage(tmp_path):
    refused("convert", ckpt(REAL), tmp_path / "out", "--to", "dcp", "--tp", "0", code=2)
    refused("convert", ckpt(REAL), tmp_path / "out", "--to", "torch", "--tp", "2", code=2)


LOAD = """
import hashlib, json, os, sys, tempfile
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

def run(rank, world, folders, store, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for folder in folders:
        meta = dcp.FileSystemReader(folder).read_metadata()
        state = {}
        for name, m in meta.state_dict_metadata.items():
            if isinstance(m, TensorStorageMetadata):
                full = torch.full(m.size, -7, dtype=m.properties.dtype)
                state[name] = distribute_tensor(full, mesh, [Shard(0)]) if full.ndim else full
        dcp.load(state, checkpoint_id=folder)
        sums = {}
        for name, t in state.items():
            t = t.full_tensor() if isinstance(t, DTensor) else t
            sums[name] = hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        found.append(sums)
    if rank == 0:
        with open(out, "w") as f:
            json.dump(found, f)
    dist.destroy_process_group()

if __name__ == "__main__":
    world, folders = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as work:
        mp.start_processes(run, (world, folders, work + "/store", work + "/out"), nprocs=world, start_method="fork")
        print(open(work + "/out").read())
"""


@pytest.mark.real
@pytest.mark.parametrize("world", ["1", "2", "3"])
def test_real_torch_loads_every_mesh_on_any_number_of_ranks(world, tmp_path):
    folders = []
    for dp, tp in (("2", "2"), ("1", "4"), ("3", "2"), ("40", "3")):
        folders.append(tmp_path / f"{dp}x{tp}")
        good("convert", ckpt("torch/fsdp2_dp2_dcp"), folders[-1], "--to", "dcp", "--dp", dp, "--tp", tp)
    wanted = truth("torch/fsdp2_dp2_dcp")
    for got in json.loads(run_torch(LOAD, world, *folders)):
        for name, want in wanted["model"].items():
            assert got[f"model.{name}"] == want.sha256
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, want in wanted[kind].items():
                assert got[f"optim.state.{name}.{kind}"] == want.sha256
