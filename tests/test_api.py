"""The Python API: a lazy mapping, reading only what is asked for, and the commands as functions."""

import os
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

import ckptctl
from ckptctl.core.errors import StateNotCarried, Unrecognised, Unsafe, Unsupported, Usage
from tests.support.checkpoints import FIXTURES, ckpt, digests, truth, truth_config
from tests.support.saving import Chunk, Strided, adamw, arange, dcp_save, hf_save, torch_save

W = arange(6, 5)


@pytest.fixture
def path(tmp_path):
    model = {"w": W, "h": arange(4, dtype=ml_dtypes.bfloat16), "s": np.array(2, np.int64)}
    tree = {"model": model, "optimizer": adamw(["w", "h"], {"w": W}), "scheduler": {"last_epoch": 3}, "step": 3}
    return torch_save(tmp_path / "x.pt", tree)


def test_a_checkpoint_is_a_mapping_of_names_to_handles(path):
    with ckptctl.open(path) as c:
        assert isinstance(c, Mapping)
        assert (list(c), len(c), "w" in c, "x" in c) == (["w", "h", "s"], 3, True, False)
        assert (c.format, c.step, c.kinds) == ("torch", 3, ("weight", "step", "exp_avg", "exp_avg_sq"))
        assert c.values["scheduler"] == {"last_epoch": 3}
        assert c.config is None
        assert dict(c.items()).keys() == {"w", "h", "s"}
        assert {(t.name, t.kind) for t in c.tensors()} >= {("w", "weight"), ("w", "exp_avg")}
        with pytest.raises(KeyError):
            c["x"]
        with pytest.raises(KeyError):
            c.state("w", "exp_avgs")


def test_a_handle_tells_without_reading_and_reads_when_asked(path):
    with ckptctl.open(path) as c:
        w = c["w"]
        assert (w.name, w.kind, w.shape, w.dtype, w.nbytes, len(w)) == ("w", "weight", (6, 5), "float32", 120, 6)
        np.testing.assert_array_equal(w.numpy(), W)
        np.testing.assert_array_equal(np.asarray(w), W)
        assert np.asarray(w, dtype=np.float64).dtype == np.float64
        np.testing.assert_array_equal(w[1:4, ::2], W[1:4, ::2])
        np.testing.assert_array_equal(w[..., -1], W[..., -1])
        assert w[2, 3] == W[2, 3]
        assert c["h"].numpy().dtype == ml_dtypes.bfloat16
        assert c["s"][()] == 2
        assert w.statistics()["max"] == 29.0
        np.testing.assert_array_equal(c.state("w", "exp_avg").numpy(), W + np.float32(0.5))
        for index in (6, (0, 0, 0), slice(None, None, -1), "x", 1.5):
            with pytest.raises(IndexError):
                w[index]
        with pytest.raises(TypeError):
            len(c["s"])


@pytest.fixture
def counted(monkeypatch):
    """Bytes that were read from files, by every call that reads."""
    total = [0]
    for name in ("pread", "preadv", "read", "readv"):
        real = getattr(os, name)

        def call(fd, what, *more, _real=real, _name=name):
            got = _real(fd, what, *more)
            total[0] += got if isinstance(got, int) else len(got)
            return got

        monkeypatch.setattr(os, name, call)
    return total


@pytest.mark.parametrize("kind", ["hf", "torch", "dcp"])
def test_a_slice_reads_only_what_it_needs(kind, counted, tmp_path):
    big = np.arange(1 << 22, dtype=np.float32).reshape(2048, 2048)  # 16 MiB
    if kind == "hf":
        path = hf_save(tmp_path / "x", {"w": big})
    elif kind == "torch":
        path = torch_save(tmp_path / "x.pt", {"w": big})
    else:
        half = [Chunk(f"__{i}_0.distcp", (1024 * i, 0), (1024, 2048)) for i in range(2)]
        path = dcp_save(tmp_path / "x", {("model", "w"): big}, {"model.w": half})
    counted[0] = 0
    with ckptctl.open(path) as c:
        opened = counted[0]
        assert opened < 100_000
        np.testing.assert_array_equal(c["w"][7:9], big[7:9])
        assert counted[0] - opened < 100_000
        before = counted[0]
        assert c["w"][2000, 5] == big[2000, 5]
        assert counted[0] - before < 100_000
    ckptctl.inspect(path)
    assert counted[0] < 500_000


def test_views_are_sliced_through_their_strides(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"t": Strided(W, 0, (5, 6), (1, 5)), "e": Strided(W, 3, (4, 2), (0, 1))})
    with ckptctl.open(path) as c:
        np.testing.assert_array_equal(c["t"].numpy(), W.T)
        np.testing.assert_array_equal(c["t"][1:3, 2:], W.T[1:3, 2:])
        np.testing.assert_array_equal(c["e"].numpy(), np.broadcast_to(W.reshape(-1)[3:5], (4, 2)))


def test_notebooks_show_a_table_in_which_names_are_only_text(tmp_path):
    path = torch_save(tmp_path / "<b>.pt", {"<script>alert(1)</script>": W, "a&b": W})
    with ckptctl.open(path) as c:
        html = c._repr_html_()
        assert "<script>" not in html
        assert "<b>" not in html
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
        assert "a&amp;b" in html
        assert repr(c["a&b"]) == "<weight a&b: float32 (6, 5)>"
        assert "torch, 2 weights" in repr(c)


def test_a_long_table_is_cut(tmp_path):
    path = torch_save(tmp_path / "x.pt", {f"w{i}": arange(1) for i in range(130)})
    with ckptctl.open(path) as c:
        assert c._repr_html_().count("<tr>") == 101
        assert "and 30 more" in c._repr_html_()


def test_commands_are_functions(path, tmp_path):
    assert ckptctl.inspect(path)["schema"] == "ckptctl.inspect/1"
    assert len(ckptctl.inspect(path, tensors=True)["tensors"]) == 6
    report = ckptctl.convert(path, tmp_path / "d", to="dcp", dp=2)
    assert report["schema"] == "ckptctl.convert/1"
    assert ckptctl.reshard(tmp_path / "d", tmp_path / "r", dp=3)["schema"] == "ckptctl.reshard/1"
    assert ckptctl.diff(path, tmp_path / "r", optimizer=True, state=True)["equal"]
    seen = []
    ckptctl.convert(
        path, tmp_path / "h", to="hf", no_optimizer=True, dtype="bfloat16", only=("w",), progress=seen.append
    )
    assert digests(tmp_path / "h")["w"].dtype == "BF16"
    assert seen[-1].done_nbytes == seen[-1].total_nbytes
    ckptctl.convert(path, tmp_path / "h", to="torch", dry_run=True)
    assert (tmp_path / "h").is_dir()
    ckptctl.convert(path, tmp_path / "h", to="torch", overwrite=True)
    assert (tmp_path / "h").is_file()


def test_failures_are_errors_with_all_their_parts(path, tmp_path):
    with pytest.raises(StateNotCarried) as caught:
        ckptctl.convert(path, tmp_path / "h", to="hf")
    assert "--no-optimizer" in caught.value.fix
    assert caught.value.as_dict()["code"] == "state-not-carried"
    with pytest.raises(Usage):
        ckptctl.convert(path, tmp_path / "h", to="gguf")
    with pytest.raises(TypeError):
        ckptctl.convert(path, tmp_path / "h", to="hf", nope=1)
    with pytest.raises(Unrecognised):
        ckptctl.open(tmp_path / "none")
    with pytest.raises(Unsafe):
        ckptctl.open(FIXTURES / "broken" / "bin-runs-code")
    with pytest.raises(ckptctl.CkptError):
        ckptctl.diff(path, tmp_path / "none")
    assert list(tmp_path.iterdir()) == [path]


def test_conjugated_tensors_are_not_given_out(tmp_path):
    view = Strided(arange(4, dtype=np.complex64), 0, (4,), (1,), ({"conj": True},))
    path = torch_save(tmp_path / "x.pt", {"c": view})
    with ckptctl.open(path) as c:
        assert c["c"].shape == (4,)
        for read in (c["c"].numpy, c["c"].statistics, lambda: c["c"][0]):
            with pytest.raises(Unsupported):
                read()


@pytest.mark.real
def test_a_real_run_through_the_api(tmp_path):
    with ckptctl.open(ckpt("torch/fsdp2_tp2x2_dcp"), model_config=truth_config("torch/fsdp2_tp2x2_dcp")) as c:
        assert len(c) == 39
        assert c.config["model_type"] == "llama"
        whole = c["model.layers.1.self_attn.q_proj.weight"].numpy()
        np.testing.assert_array_equal(c["model.layers.1.self_attn.q_proj.weight"][10:20, 3], whole[10:20, 3])
        assert c["lm_head.weight"].shape == truth("torch/fsdp2_tp2x2_dcp")["model"]["lm_head.weight"].shape


def test_names_of_the_package_are_there():
    assert set(dir(ckptctl)) == set(ckptctl.__all__)
    for name in ckptctl.__all__:
        assert getattr(ckptctl, name) is not None
    with pytest.raises(AttributeError):
        ckptctl.nope()


def test_reshard_takes_the_commands_layout_flags(tmp_path):
    done = ckptctl.reshard(ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "out", dp=2, tp=2)
    assert done["target"]["layout"] == {"dp": 2, "tp": 2}
    with pytest.raises(Usage, match="--pp"):
        ckptctl.reshard(ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "no", pp=3)
    assert not (tmp_path / "no").exists()
