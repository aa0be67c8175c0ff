"""DCP folders that are written: how they are cut, what they are called, and that real torch loads them."""

import json

import numpy as np
import pytest

from ckptctl.formats.dcp.cut import rows_of
from tests.support.checkpoints import ckpt, digest, run_torch, truth, truth_config
from tests.support.commands import document, good, refused
from tests.support.format_suite import tree_bytes
from tests.support.plain import Plain, dcp_folder, nested
from tests.support.saving import adamw, arange, dcp_save, torch_save


@pytest.mark.parametrize(
    ("rows", "ranks", "want"),
    [
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (131, 4, [(0, 33), (33, 66), (66, 99), (99, 131)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (1, 1, [(0, 1)]),
    ],
)
def test_rows_of_ranks_are_those_of_torch_chunk(rows, ranks, want):
    """Expected: torch.chunk, whose missing parts FSDP2 takes as empty."""
    assert [rows_of(rows, r, ranks) for r in range(ranks)] == want


def test_names_and_paths_are_those_of_get_state_dict(tmp_path):
    model = {"a.w": arange(4, 2), "b": arange(3)}
    tree = {
        "model": model,
        "optimizer": adamw(list(model), model),
        "scheduler": {"last_epoch": 1, "lrs": [0.1]},
        "step": 4,
    }
    good("convert", torch_save(tmp_path / "x.pt", tree), tmp_path / "out", "--to", "dcp", "--dp", "2")
    out = dcp_folder(tmp_path / "out")
    assert out.paths["model.a.w"] == ("model", "a.w")
    assert out.paths["optim.state.a.w.exp_avg"] == ("optim", "state", "a.w", "exp_avg")
    assert out.paths["optim.param_groups.0.lr"] == ("optim", "param_groups", 0, "lr")
    assert out.paths["scheduler.lrs"] == ("scheduler", "lrs")
    assert set(out.items) == set(out.paths)
    assert out.items["optim.param_groups.0.params"] == ["a.w", "b"]
    assert out.items["optim.param_groups.0.betas"] == (0.9, 0.999)
    assert out.items["step"] == 4
    assert out.chunks["model.a.w"] == [("__0_0.distcp", (0, 0), (2, 2)), ("__1_0.distcp", (2, 0), (2, 2))]
    assert out.chunks["model.b"] == [("__0_0.distcp", (0,), (2,)), ("__1_0.distcp", (2,), (1,))]
    assert out.chunks["optim.state.a.w.step"] == [("__0_0.distcp", (), ())]


def test_torch_s_own_paths_are_the_same(tmp_path):
    """What the converted folder is called is what torch called it when it saved the same run."""
    good("convert", ckpt("torch/plain_zip"), tmp_path / "out", "--to", "dcp", "--dp", "2")
    ours, theirs = dcp_folder(tmp_path / "out"), dcp_folder(ckpt("torch/fsdp2_dp2_dcp"))
    was = {n.removeprefix("app."): tuple(p[1:]) for n, p in theirs.paths.items()}
    mine = {n: p for n, p in ours.paths.items() if p[0] in ("model", "optim")}
    extra = {n for n in mine if n not in was}
    assert {n.rpartition(".")[2] for n in extra} <= {"initial_lr"}
    assert {n: p for n, p in mine.items() if n in was} == was
    cut = {n.removeprefix("app."): sorted(c[1:] for c in chunks) for n, chunks in theirs.chunks.items()}
    steps = {n for n in cut if n.endswith(".step")}
    assert {n: sorted(c[1:] for c in chunks) for n, chunks in ours.chunks.items() if n in cut and n not in steps} == {
        n: c for n, c in cut.items() if n not in steps
    }


WAYS = [
    ("torch/fsdp2_dp4_dcp", 1),
    ("torch/fsdp2_dp4_dcp", 3),
    ("torch/fsdp2_dp4_dcp", 7),
    ("torch/fsdp2_dp2_flatoptim_dcp", 3),
    ("torch/dcp_zstd", 7),
    ("torch/fsdp2_tp2x2_dcp", 3),
]


@pytest.mark.parametrize(("name", "ranks"), WAYS)
def test_reshard_keeps_every_item_under_its_own_name(name, ranks, tmp_path):
    before = dcp_folder(ckpt(name)) if "zstd" not in name else None
    good("reshard", ckpt(name), tmp_path / "out", "--dp", str(ranks))
    after = dcp_folder(tmp_path / "out")
    if before is not None:
        assert after.paths == before.paths
        assert {n: v for n, v in after.items.items() if isinstance(v, Plain)} == {
            n: v for n, v in before.items.items() if isinstance(v, Plain)
        }
        plain = {n for n, v in before.items.items() if isinstance(v, (int, float, str, bool, list, type(None)))}
        assert {n: after.items[n] for n in plain} == {n: before.items[n] for n in plain}
    for chunks in after.chunks.values():
        assert all(file in {f"__{r}_0.distcp" for r in range(ranks)} for file, _, _ in chunks)
    found = document("inspect", tmp_path / "out")
    assert found["layout"]["world_size"] == ranks
    want = truth(name)["model"]
    prefix = next(n for n in after.items if n.endswith("model.lm_head.weight")).removesuffix("lm_head.weight")
    assert {n: after.items[prefix + n].truth for n in want} == want


def test_there_and_back_is_byte_for_byte_the_same(tmp_path):
    good("reshard", ckpt("torch/fsdp2_dp4_dcp"), tmp_path / "two", "--dp", "2")
    good("reshard", tmp_path / "two", tmp_path / "seven", "--dp", "7")
    good("reshard", tmp_path / "seven", tmp_path / "again", "--dp", "2")
    assert tree_bytes(tmp_path / "again") == tree_bytes(tmp_path / "two")


def test_reshard_without_flags_keeps_the_number_of_ranks(tmp_path):
    good("reshard", ckpt("torch/hsdp_2x2_dcp"), tmp_path / "out")
    assert document("inspect", tmp_path / "out")["layout"]["world_size"] == 4


def test_reshard_refuses_what_has_no_layout(tmp_path):
    assert refused("reshard", ckpt("torch/plain_zip"), tmp_path / "out", "--dp", "2")["code"] == "unsupported"
    refused("reshard", ckpt("hf/llama-single"), tmp_path / "out", "--dp", "2", code=2)
    refused("reshard", ckpt("torch/hsdp_2x2_dcp"), tmp_path / "out", "--max-shard-size", "1MB", code=2)
    refused("reshard", ckpt("torch/hsdp_2x2_dcp"), tmp_path / "out", "--dp", "0", code=2)


def test_reshard_of_a_folder_changes_its_files(tmp_path):
    good("reshard", ckpt("hf/llama-single"), tmp_path / "out", "--max-shard-size", "100KB")
    good("reshard", tmp_path / "out", tmp_path / "one")
    original = (ckpt("hf/llama-single") / "model.safetensors").read_bytes()
    assert (tmp_path / "one" / "model.safetensors").read_bytes()[-100_000:] == original[-100_000:]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_more_ranks_than_rows_gives_empty_chunks(tmp_path):
    path = dcp_save(tmp_path / "src", {("model", "w"): arange(2, 3), ("model", "s"): arange(1).reshape(())})
    good("convert", path, tmp_path / "out", "--to", "dcp", "--dp", "5")
    out = dcp_folder(tmp_path / "out")
    assert [c[1:] for c in out.chunks["model.w"]] == [((0, 0), (1, 3)), ((1, 0), (1, 3)), *[((2, 0), (0, 3))] * 3]
    assert out.items["model.w"].truth == digest("F32", (2, 3), arange(2, 3).tobytes())


LOAD = """
import hashlib, json, sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader

def digest(t):
    data = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(t.dtype)[6:], list(t.shape), hashlib.sha256(data).hexdigest()]

def visit(found, path, node):
    if isinstance(node, torch.Tensor):
        found[path] = digest(node) if node.numel() else [str(node.dtype)[6:], list(node.shape), ""]
    elif isinstance(node, dict):
        for k, v in node.items():
            visit(found, f"{path}.{k}" if path else str(k), v)
    elif isinstance(node, (list, tuple)):
        for i, v in enumerate(node):
            visit(found, f"{path}.{i}", v)
    else:
        found[path] = repr(node)

out = []
for folder in sys.argv[1:]:
    whole, found = {}, {}
    reader = FileSystemReader(folder)
    _load_state_dict(whole, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    visit(found, "", whole)
    out.append(found)
print(json.dumps(out))
"""


@pytest.mark.real
def test_real_torch_loads_what_is_written(tmp_path):
    source, folders = ckpt("torch/fsdp2_dp4_dcp"), []
    for how in ("convert", "reshard"):
        for ranks in ("1", "3", "7"):
            folders.append(tmp_path / f"{how}{ranks}")
            good(how, source, folders[-1], *(["--to", "dcp"] if how == "convert" else []), "--dp", ranks)
    was, *got = json.loads(run_torch(LOAD, source, *folders))
    renamed = {n.replace("optimizer.", "optim.", 1) if n.startswith("optimizer.") else n: v for n, v in was.items()}
    assert got == [renamed] * 3 + [was] * 3


RESUME = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.from_pretrained(sys.argv[2])
torch.manual_seed(1)
model = AutoModelForCausalLM.from_config(config)
decay = [p for p in model.parameters() if p.ndim > 1]
other = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=5.0)
weights, optim = get_state_dict(model, optimizer)
state = {"model": weights, "optim": optim}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
step = {int(s["step"]) for s in optimizer.state.values()}
total = float(sum(s["exp_avg"].double().abs().sum() for s in optimizer.state.values()))
print(json.dumps([sorted(step), [g["lr"] for g in optimizer.param_groups], total]))
"""


@pytest.mark.real
def test_a_real_optimizer_takes_the_state(tmp_path):
    good("convert", ckpt("torch/plain_zip"), tmp_path / "out", "--to", "dcp", "--dp", "3")
    steps, rates, total = json.loads(run_torch(RESUME, tmp_path / "out", truth_config("torch/plain_zip")))
    assert steps == [3]
    assert rates == [1e-3, 1e-3]
    state = nested(dcp_folder(tmp_path / "out"))["optim"]["state"]
    assert total == pytest.approx(sum(np.abs(e["exp_avg"].numbers().astype(np.float64)).sum() for e in state.values()))
