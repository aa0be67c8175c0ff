"""Damaged, hostile and foreign checkpoints on the command line: exit codes and sentences; nothing runs."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.checkpoints import FIXTURES, ROOT, ckpt, fixture
from tests.support.commands import ckptctl, document, refused
from tests.support.saving import arange, dcp_save, torch_save

BROKEN = FIXTURES / "broken"
CASES = sorted(p.name for p in BROKEN.iterdir() if p.name not in ("README.md", "expect.json"))
EXPECT = json.loads((BROKEN / "expect.json").read_text())
MARKER = "ckptctl-pickle-ran"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Code in a hostile pickle would make a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARKER).exists()
    assert not (ROOT / MARKER).exists()


def errors_of(name):
    """Codes of the faults that make a case unusable, as expect.json says."""
    return [f["kind"] for f in EXPECT[name]["findings"] if f["severity"] == "error"] if name in EXPECT else []


@pytest.mark.parametrize("name", CASES)
def test_no_case_ends_in_a_traceback_or_runs_code(name, tmp_path):
    path = BROKEN / name
    inspected = ckptctl("inspect", path, "--json")
    assert inspected.code in (0, 3)
    if inspected.code:
        assert inspected.error["what"]
    for to in ("hf", "torch", "dcp"):
        done = ckptctl("convert", path, tmp_path / to, "--to", to, "--json")
        assert done.code in (0, 3)
        assert (tmp_path / to).exists() == (done.code == 0)
    for words in (
        ["ls", path],
        ["show", path, "lm_head.weight"],
        ["diff", path, path],
        ["diff", path, ckpt("hf/llama-single")],
    ):
        for more in ([], ["--json"]):
            assert ckptctl(*words, *more).code in (0, 1, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        p for p in ("hf", "torch", "dcp") if (tmp_path / p).exists()
    )


# Not for a reader of bytes: what a config says of layers, checksums that torch does not look at, files no loader takes.
BYTES_ARE_FINE = {
    "config-layers-mismatch", "untied-without-lm-head", "config-shape-mismatch", "tied-with-different-lm-head",
    "bin-crc-wrong",
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in CASES if errors_of(n) and n not in BYTES_ARE_FINE])
def test_each_fault_is_told_by_its_code(name, tmp_path):
    error = refused("convert", BROKEN / name, tmp_path / "out", "--to", "torch")
    alike = {
        "header-truncated": {"empty-file"}, "header-too-large": {"html-page"},
        "pickle-unknown-global": {"unsupported"},
    }  # fmt: skip
    wanted = {k for kind in errors_of(name) for k in {kind, *alike.get(kind, ())}}
    assert error["code"] in wanted, (error, wanted)
    assert error["where"], error


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("ok-") and n != "ok-empty.safetensors"])
def test_good_ones_are_good(name, tmp_path):
    document("inspect", BROKEN / name)
    document("convert", BROKEN / name, tmp_path / "out", "--to", "torch")
    assert document("diff", BROKEN / name, tmp_path / "out")["equal"]


def test_a_file_without_tensors_is_no_success(tmp_path):
    for words in (["inspect"], ["ls"], ["convert", tmp_path / "out", "--to", "torch"]):
        command, *rest = words
        assert refused(command, BROKEN / "ok-empty.safetensors", *rest)["code"] == "no-tensors"


def test_a_warning_is_told_and_does_not_stop(tmp_path):
    for name in ("mixed-dtypes", "nan-weights"):
        done = ckptctl("convert", BROKEN / name, tmp_path / name, "--to", "torch")
        assert done.code == 0
    done = ckptctl("inspect", BROKEN / "header-leading-space.safetensors")
    assert "warning" in done.err
    for name in ("tensor-in-two-shards", "stale-single-file-beside-index"):
        assert "warning" in ckptctl("inspect", BROKEN / name).err


def test_tied_weights_that_differ_stop_a_folder_s_conversion(tmp_path):
    error = refused("convert", BROKEN / "tied-with-different-lm-head", tmp_path / "out", "--to", "hf")
    assert error["code"] == "tied-tensors-differ"
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_does_not_fit_stops_a_folder_s_conversion(tmp_path):
    error = refused("convert", BROKEN / "config-shape-mismatch", tmp_path / "out", "--to", "hf")
    assert error["code"] == "shape-differs-from-config"


HOSTILE = [n for n in CASES if "runs" in n]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_shown_and_refused(name, tmp_path):
    assert HOSTILE == ["bin-raw-pickle-runs-code", "bin-runs-code", "bin-runs-system"]
    found = document("inspect", BROKEN / name)
    assert found["unsafe"]
    assert found["unsafe"][0]["file"] == "pytorch_model.bin"
    assert found["resumable"] is False
    text = ckptctl("inspect", BROKEN / name)
    assert "UNSAFE" in text.out
    assert found["unsafe"][0]["global"] in text.out
    for words in (
        ["convert", BROKEN / name, "out", "--to", "hf"],
        ["show", BROKEN / name, "w"],
        ["diff", BROKEN / name, BROKEN / name],
    ):
        error = refused(*words)
        assert error["code"] == "pickle-calls-code"
        assert found["unsafe"][0]["global"] in error["what"]


FOREIGN = {}
BESIDE = {
    "orbax/pytree-ocdbt": "Orbax",
    "orbax/manager-composite": "Orbax",
    "orbax/flax-msgpack-params/flax_model.msgpack": "msgpack",
    "colossalai/ddp-sharded": "ColossalAI",
}


@pytest.mark.real
@pytest.mark.parametrize("name", [*BESIDE])
def test_frameworks_that_are_not_read_yet_are_named(name, tmp_path):
    word = BESIDE[name]
    path = ckpt(name)
    for words in (
        ["inspect", path],
        ["convert", path, tmp_path / "out", "--to", "hf"],
        ["diff", path, path],
        ["ls", path],
    ):
        error = refused(*words)
        assert error["code"] == "unsupported", error
        assert word.lower() in f"{error['what']} {error['why']}".lower(), error
        assert error["fix"], error
    assert not (tmp_path / "out").exists()


@pytest.mark.real
def test_one_rank_s_file_is_not_taken_for_the_whole(tmp_path):
    folder = fixture("torch/verl_fsdp2") / "ckpt"
    for rank, name in enumerate(("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt")):
        error = refused("convert", folder / name, tmp_path / "out", "--to", "hf")
        said = f"the file holds rank {rank}'s part of a checkpoint of 2 ranks"
        assert (error["code"], error["what"]) == ("rank-missing", said)


@pytest.mark.real
def test_single_files_of_foreign_folders_are_still_readable(tmp_path):
    """A Trainer folder's weights file says nothing of an optimizer: given by itself it is what it is."""
    file = ckpt("torch/trainer") / "model.safetensors"
    assert document("inspect", file)["kinds"]["weight"]["tensors"] == 21


def test_files_that_are_nothing_are_unrecognised(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "null.pt").write_bytes(bytes(100))
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "gone")
    for name in ("a.txt", "empty", "null.pt", "text.pt", "dangling.pt", "none"):
        error = refused("inspect", tmp_path / name)
        assert error["code"] in (
            "unrecognised",
            "damaged",
            "lfs-pointer",
            "missing-file",
            "system",
            "pickle-damaged",
        ), error
        assert refused("convert", tmp_path / name, tmp_path / "out", "--to", "hf")["code"] == error["code"]


@pytest.mark.parametrize("from_", ["hf", "dcp", "torch"])
def test_a_format_that_is_forced_on_another_fails_in_words(from_, tmp_path):
    paths = [
        ckpt("torch/plain_zip"),
        ckpt("torch/hsdp_2x2_dcp"),
        ckpt("hf/llama-single"),
        ckpt("hf/llama-single") / "model.safetensors",
    ]
    for path in paths:
        assert ckptctl("inspect", path, "--from", from_, "--json").code in (0, 3)
    refused("inspect", paths[0], "--from", "nemo", code=2)
    refused("inspect", tmp_path / "none", "--from", from_)


ESCAPE = "w\x1b[31m\x07\r\n\u202ered"


def test_names_that_would_drive_a_terminal_are_printed_inert(tmp_path):
    path = torch_save(tmp_path / "x.pt", {ESCAPE: arange(2), "b": arange(3)})
    folder = dcp_save(tmp_path / "dcp", {("model", ESCAPE): arange(2)})
    other = torch_save(tmp_path / "y.pt", {ESCAPE: arange(2) + 1})
    runs = [
        ckptctl("inspect", path, "--tensors"),
        ckptctl("ls", path),
        ckptctl("ls", folder),
        ckptctl("diff", path, other),
        ckptctl("show", path, ESCAPE),
        ckptctl("show", path, "w\x1b"),
        ckptctl("convert", path, tmp_path / "o", "--to", "hf", "--dry-run"),
        ckptctl("convert", path, tmp_path / "o", "--to", "dcp", "--only", ESCAPE + "*", "-v"),
    ]
    for done in runs:
        for c in ("\x1b", "\x07", "\r", "\u202e"):
            assert c not in done.out + done.err, done
    assert json.loads(ckptctl("ls", path, "--json").out)["tensors"][0]["name"] == ESCAPE


def test_broken_pipes_and_closed_outputs_are_no_errors():
    words = [sys.executable, "-m", "ckptctl", "ls", str(ckpt("hf/mixtral-single"))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_folder_without_rights_is_told(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    shutil.copytree(ckpt("hf/llama-single"), tmp_path / "src")
    (tmp_path / "src" / "model.safetensors").chmod(0)
    assert refused("inspect", tmp_path / "src")["code"] in ("system", "read-failed")
