"""Megatron checkpoints of real runs: every tensor against the digests that the run itself gave, and damaged sets."""

from __future__ import annotations

import hashlib
import pickletools
import shutil
import zipfile

import numpy as np
import pytest

from ckptctl.core.checkpoint import MASTER
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import CkptError, Damaged, MissingFile, Unrecognised
from ckptctl.core.tensor import Key
from ckptctl.formats.megatron import classic_optimizer, dist
from ckptctl.formats.megatron.facts import Facts
from ckptctl.formats.megatron.groups import parts_of
from ckptctl.formats.megatron.model import layer_of, local_name
from ckptctl.operations.naming import as_hub
from ckptctl.operations.opening import Reading, open_checkpoint
from ckptctl.operations.tensors import TensorReader
from tests.support.checkpoints import FIXTURES, SHARED, Truth, ckpt, layouts, shared, truth, truth_config
from tests.support.commands import document, good, refused

EVERY = layouts("megatron", everything=True)
SHIFTED = "megatron/dist_tp1pp1_distopt_full_dp2_buckets"
CLASSIC, TIED, DIST = (
    f"megatron/{n}" for n in ("legacy_tp2pp1_distopt_dp2_bf16", "qwen2_legacy_tp2pp2_tied", "dist_tp1pp2_vpp2")
)


def opened(name, path=None):
    return open_checkpoint(path or ckpt(name), Reading(truth_config(name)))[0]


def digest(reader, key, wide=False):
    tensor = reader.checkpoint.tensors[key]
    array = reader.array(key)
    if wide and tensor.dtype.name == "bfloat16":
        array = np.ascontiguousarray(array).view(BY_NAME["bfloat16"].numpy).astype(np.float32)
    data = np.ascontiguousarray(array).tobytes()
    dtype = "F32" if wide else tensor.dtype.safetensors
    return Truth(dtype, tensor.shape, hashlib.sha256(data).hexdigest())


def truth_of(name):
    return truth(FIXTURES / name if (FIXTURES / name).exists() else SHARED / name)


@pytest.mark.parametrize("name", EVERY)
def test_weights_and_moments_are_those_of_the_run(name):
    checkpoint = as_hub(opened(name), "megatron")
    want = truth_of(name)
    with TensorReader(checkpoint) as reader:
        weights = {}
        for key in checkpoint.tensors:
            if key.kind == "weight":
                master = Key(key.name, MASTER)
                weights[key.name] = digest(reader, master if master in checkpoint.tensors else key)
        assert {n: weights[n] for n in want["model"] if n in weights} == {
            n: t for n, t in want["model"].items() if n in weights
        }
        assert set(want["model"]) - set(weights) <= {"lm_head.weight"}
        if name == SHIFTED:
            return
        for kind in ("exp_avg", "exp_avg_sq"):
            found = {k.name: digest(reader, k) for k in checkpoint.tensors if k.kind == kind}
            assert found == {n: t for n, t in want[kind].items() if n in found}
            assert set(found) == set(weights)


@pytest.mark.parametrize("name", EVERY)
def test_padding_rows_are_those_of_the_run(name):
    checkpoint = as_hub(opened(name), "megatron")
    want = dict(truth_of(name).get("vocabulary_padding", {}).items())
    if not want or name == SHIFTED:
        pytest.skip("the run recorded no padding")
    tensors = {**checkpoint.tensors, **checkpoint.padding}
    held = type(checkpoint)(
        **{f: getattr(checkpoint, f) for f in checkpoint.__dataclass_fields__} | {"tensors": tensors}
    )
    with TensorReader(held) as reader:
        found = {}
        for key in checkpoint.padding:
            section = {"weight": "model"}.get(key.kind, key.kind)
            if key.kind != MASTER and not (key.kind == "weight" and key._replace(kind=MASTER) in checkpoint.padding):
                found[f"{section}.{key.name}"] = digest(reader, key)
            elif key.kind == MASTER:
                found[f"model.{key.name}"] = digest(reader, key)
    assert {n: t for n, t in found.items() if n in want} == {n: t for n, t in want.items() if n in found}
    assert found


def test_groups_and_steps_of_every_parameter():
    checkpoint = as_hub(opened(CLASSIC), "megatron")
    decay, none = checkpoint.optimizer.groups
    assert (decay.options["weight_decay"], none.options["weight_decay"]) == (0.1, 0.0)
    assert all(n.endswith("norm.weight") for n in none.params)
    assert "model.layers.3.self_attn.k_proj.weight" in decay.params
    assert len(decay.params) + len(none.params) == len([k for k in checkpoint.tensors if k.kind == "weight"])
    assert {v for (_, kind), v in checkpoint.optimizer.scalars.items() if kind == "step"} == {3}


def test_inspect_says_mesh_and_training_state():
    got = document("inspect", ckpt(DIST))
    assert (got["format"], got["variant"], got["step"]) == ("megatron", "torch_dist", 3)
    assert {a: n for a, n in got["layout"].items() if n} == {
        "tp": 1,
        "pp": 2,
        "vpp": 2,
        "ep": 1,
        "dp": 1,
        "world_size": 2,
    }
    assert got["resumable"]


def test_names_of_hugging_face_need_the_config(tmp_path):
    error = refused("convert", ckpt(DIST), tmp_path / "out", "--to", "dcp")
    assert error["code"] == "model-config"


# ---- damaged sets ---------------------------------------------------------------------------------------------------


def copied(name, tmp_path):
    shutil.copytree(ckpt(name), tmp_path / "run", ignore=shutil.ignore_patterns("truth"))
    for p in (tmp_path / "run").rglob("*"):
        p.chmod(0o755 if p.is_dir() else 0o644)
    return tmp_path / "run"


def test_a_missing_rank_is_named(tmp_path):
    run = copied(TIED, tmp_path)
    shutil.rmtree(run / "iter_0000003" / "mp_rank_01_000")
    with pytest.raises(MissingFile, match="1 of 4 ranks are missing: mp_rank_01_000"):
        opened(TIED, run)


def test_a_rank_too_many_is_refused(tmp_path):
    run = copied(TIED, tmp_path)
    shutil.copytree(run / "iter_0000003" / "mp_rank_01_000", run / "iter_0000003" / "mp_rank_02_000")
    with pytest.raises(Damaged, match="mp_rank_02_000: no rank of tp=2, pp=2"):
        opened(TIED, run)


def test_norms_that_differ_over_ranks_are_refused(tmp_path):
    run = copied(CLASSIC, tmp_path)
    file = run / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt"
    with TensorReader(opened(CLASSIC, run)) as reader:
        norm = reader.array(Key("decoder.layers.2.input_layernorm.weight")).tobytes()
    data = file.read_bytes()
    at = data.index(norm)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(
        Damaged, match=r"decoder\.layers\.2\.input_layernorm\.weight \(weight\) is not the same on all ranks"
    ):
        opened(CLASSIC, run)


def place_of_iteration(file):
    """The byte of the number that the file's dict has under `iteration`: the last of that name in the pickle."""
    data = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        pickle = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    names, last, before = {}, 0, None
    for op, value, position in pickletools.genops(pickle):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            names[value] = before
            continue
        if op.name == "BININT1" and before == "iteration":
            last = position
        before = value if op.name == "BINUNICODE" else names.get(value) if "BINGET" in op.name else None
    return data.index(pickle) + last + 1


def test_ranks_of_different_iterations_are_refused(tmp_path):
    run = copied(TIED, tmp_path)
    file = run / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    data, at = bytearray(file.read_bytes()), place_of_iteration(file)
    assert data[at] == 3
    data[at] = 4
    file.write_bytes(data)
    with pytest.raises(Damaged, match="ranks are of different iterations"):
        opened(TIED, run)


def swapped(folder, a, b):
    (folder / a).rename(folder / "aside")
    (folder / b).rename(folder / a)
    (folder / "aside").rename(folder / b)


FLOAT32 = "megatron/legacy_tp2pp2_distopt_dp2"
SWAPS = [(CLASSIC, "mp_rank_00", "mp_rank_01"), (TIED, "mp_rank_00_001", "mp_rank_01_001")]
SWAPS += [
    (FLOAT32, "mp_rank_00_000", "mp_rank_01_000"),
    ("megatron/mixtral_legacy_ep2", "mp_rank_00_000", "mp_rank_00_001"),
]


@pytest.mark.parametrize(("name", "a", "b"), SWAPS)
def test_folders_under_each_other_s_names_are_refused(name, a, b, tmp_path):
    run = copied(name, tmp_path)
    swapped(run / "iter_0000003", a, b)
    with pytest.raises(CkptError) as caught:
        opened(name, run)
    # where replicated norms differ by what each rank trained, that is seen first
    assert caught.value.code in ("ranks-differ", "replicas-differ")
    assert a in caught.value.where


def test_a_rank_copied_over_another_is_refused(tmp_path):
    """A float32 run's norms are the same on both tensor-parallel ranks: their args alone tell the copy."""
    ranks = copied(FLOAT32, tmp_path) / "iter_0000003"
    for file in (ranks / "mp_rank_00_000").iterdir():
        shutil.copy(file, ranks / "mp_rank_01_000" / file.name)
    with pytest.raises(CkptError, match="hold the same rank") as caught:
        opened(FLOAT32, ranks.parent)
    assert caught.value.code == "ranks-differ"


def test_a_rank_copied_over_another_is_refused_where_no_number_tells(tmp_path):
    """Two ranks only: both then say the same number, as converters' files do."""
    ranks = copied("megatron/legacy_tp2pp1", tmp_path) / "iter_0000003"
    for file in (ranks / "mp_rank_00").iterdir():
        shutil.copy(file, ranks / "mp_rank_01" / file.name)
    with pytest.raises(CkptError, match="two ranks' files hold the same data") as caught:
        opened("megatron/legacy_tp2pp1", ranks.parent)
    assert caught.value.code == "ranks-differ"


def test_buffers_of_another_rank_are_refused(tmp_path):
    """A float32 run's buffers say whose they are by its copies of the weights alone."""
    run = copied(FLOAT32, tmp_path)
    file = "distrib_optim.pt"
    swapped(run / "iter_0000003", f"mp_rank_00_001/{file}", f"mp_rank_01_001/{file}")
    with pytest.raises(CkptError) as caught:
        opened(FLOAT32, run)
    assert caught.value.code == "masters-differ"
    for at in (run / "iter_0000003").glob(f"*/{file}"):
        at.unlink()
    assert opened(FLOAT32, run).optimizer is None


def test_optimizer_of_some_ranks_is_refused_of_none_is_told(tmp_path):
    run = copied(CLASSIC, tmp_path)
    (run / "iter_0000003" / "mp_rank_01" / "distrib_optim.pt").unlink()
    with pytest.raises(CkptError) as caught:
        opened(CLASSIC, run)
    assert caught.value.code == "optimizer-missing"
    (run / "iter_0000003" / "mp_rank_00" / "distrib_optim.pt").unlink()
    checkpoint = opened(CLASSIC, run)
    assert checkpoint.optimizer is None
    assert "no rank has the optimizer's moments" in " ".join(checkpoint.warnings)


@pytest.mark.parametrize(("text", "error"), [("7", MissingFile), ("soon", Damaged), ("release", MissingFile)])
def test_a_tracker_that_names_nothing(tmp_path, text, error):
    run = copied(TIED, tmp_path)
    (run / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(error):
        opened(TIED, run)


def test_an_empty_iteration_is_no_checkpoint(tmp_path):
    run = copied(TIED, tmp_path)
    shutil.rmtree(run / "iter_0000003")
    (run / "iter_0000003").mkdir()
    with pytest.raises(Unrecognised, match="iter_0000003 holds no Megatron checkpoint"):
        opened(TIED, run)


def test_a_smaller_embedding_than_the_config_says(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        (truth_config(TIED) / "config.json").read_text().replace('"vocab_size": 131', '"vocab_size": 999')
    )
    with pytest.raises(Damaged, match="144 rows, the vocabulary 999"):
        open_checkpoint(ckpt(TIED), Reading(config))


def test_moments_that_the_real_writer_shifted_are_refused(tmp_path):
    shared(SHIFTED)
    error = refused("convert", ckpt(SHIFTED), tmp_path / "out", "--to", "dcp", "--model-config", truth_config(SHIFTED))
    assert "shifted" in error["why"]
    good("diff", ckpt(SHIFTED), ckpt(SHIFTED), "--optimizer")  # as it lies, a copy equals it


# ---- what no run writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_model_parallel_size": 1 << 40},
        {"pipeline_model_parallel_size": 1 << 30},
        {"num_layers": 1 << 40},
        {"num_layers": "four"},
        {"num_layers": True, "pipeline_model_parallel_size": -1},
        {"num_experts": 10**7},
    ],
)
def test_args_that_nobody_runs_are_refused_before_anything_is_counted_out(args):
    with pytest.raises(Damaged) as caught:
        Facts(args).require_known()
    assert caught.value.code == "args-damaged"


@pytest.mark.parametrize(
    "tree",
    [7, {}, {"param_groups": [1]}, {"optimizer": {"param_groups": None}}, [{"state": {}}], {"optimizer": [1]}],
)
def test_optimizers_of_another_shape_are_refused(tree):
    with pytest.raises(CkptError):
        parts_of(tree, "here")


def test_names_with_endless_numbers_are_names_like_others():
    name = f"decoder.layers.{'9' * 5000}.mlp.linear_fc1.weight"
    assert local_name(name) == name
    assert layer_of(name) is None


# ---- state that is not all there -------------------------------------------------------------------------------------


def lacking(monkeypatch, module, name, cut):
    """What a reader's function gives, less a part."""
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *words: cut(real(*words)))


@pytest.mark.parametrize("group", [0, 3])
def test_an_object_of_a_stage_that_is_not_in_the_index_is_missed(group, monkeypatch):
    name = "megatron/dist_tp2pp2_distopt_dpzero_dp2"
    shared(name)

    def cut(index):
        gone = [n for n in index.items if f"dp_group_idx_{group}.param_state" in n or "dp_group_idx_2.param" in n]
        assert gone
        index.items = {n: v for n, v in index.items.items() if n not in gone}
        return index

    lacking(monkeypatch, dist, "read_index", cut)
    with pytest.raises(CkptError):
        opened(name)


def test_moments_of_a_parameter_that_are_not_in_the_index_are_missed(monkeypatch):
    name = "megatron/dist_tp2pp2_distopt_full_dp2"
    shared(name)

    def cut(index):
        del index.items[next(n for n in index.items if ".exp_avg_sq." in n)]
        return index

    lacking(monkeypatch, dist, "read_index", cut)
    with pytest.raises(Damaged, match="have no exp_avg_sq, others have"):
        opened(name)


def test_a_chunk_without_a_buffer_is_missed(monkeypatch):
    name = "megatron/legacy_tp1pp2_vpp2_distopt_dp2"
    shared(name)

    def cut(file):
        if isinstance(file.root, dict) and 1 in file.root:
            del file.root[1]
        return file

    lacking(monkeypatch, classic_optimizer, "opened_file", cut)
    with pytest.raises(Damaged, match="parameters have no"):
        opened(name)
