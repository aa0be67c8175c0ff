"""validate: the broken samples, what each check of its own finds and lets go, selecting, baselines, runs."""

from __future__ import annotations

import hashlib
import json
import shutil
import xml.etree.ElementTree as ET
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from ckptctl.operations import Validation, validate
from ckptctl.report import findings
from ckptctl.report.findings import gitlab
from tests.formats.megatron.test_damaged import replaced
from tests.support.checkpoints import FIXTURES, ckpt
from tests.support.commands import ckptctl, refused
from tests.support.saving import arange, torch_save

BROKEN = FIXTURES / "broken"
EXPECT = json.loads((BROKEN / "expect.json").read_text())
ALSO = {"html-instead.safetensors": "html-page", "zero-bytes.safetensors": "empty-file"}


def report(*words, code=None):
    done = ckptctl("validate", *words, "--output", "json")
    if code is not None:
        assert done.code == code, done.out
    return done.json


def kinds(document):
    return {f["kind"] for f in document["findings"]}


def only(document, kind):
    (found,) = [f for f in document["findings"] if f["kind"] == kind]
    return found


@pytest.mark.parametrize("name", sorted(EXPECT))
def test_each_broken_sample_has_its_findings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = EXPECT[name]["findings"]
    grave = any(w["severity"] == "error" for w in wanted)
    found = report(BROKEN / name, "--level", "values", code=1 if grave else 0)["findings"]
    for want in wanted:
        alike = [f for f in found if f["kind"] in (want["kind"], ALSO.get(name))]
        assert any(f["severity"] == want["severity"] for f in alike), (want, found)
        assert any(want.get("at", "") in json.dumps(f) for f in alike), (want, found)
    if not wanted:
        assert [f for f in found if f["severity"] != "info" and f["kind"] not in ("not-finite", "no-tensors")] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "hf/llama-single",
        "hf/llama-sharded",
        "torch/fsdp2_dp2_dcp",
        "torch/plain_zip",
        "hf/llama-trainer",
        "hf/gpt2-bin",
    ],
)
def test_good_checkpoints_have_no_finding(name):
    try:
        path = ckpt(name)
    except FileNotFoundError:
        pytest.skip("not among the fixtures")
    if not path.exists():
        pytest.skip("not among the fixtures")
    document = report(path, "--level", "values", code=0)
    assert [f for f in document["findings"] if f["severity"] == "error"] == []
    assert document["checked"]["tensors"] > 0
    assert document["checkpoints"][0]["intact"]["answer"] is True
    assert document["checkpoints"][0]["safe"]["answer"] is True


def weights(**more):
    rng = np.random.default_rng(3)
    made = {n: rng.standard_normal((4, 6), dtype=np.float32) for n in ("a.weight", "b.weight")}
    return {**made, **more}


def state(model, **change):
    """A torch checkpoint of Adam over every weight."""
    rng = np.random.default_rng(4)
    states = {
        n: {"step": np.array(3, np.float32), "exp_avg": rng.standard_normal(w.shape).astype(w.dtype),
            "exp_avg_sq": rng.random(w.shape).astype(w.dtype)}
        for n, w in model.items()
    }  # fmt: skip
    for key, value in change.items():
        name, _, kind = key.rpartition(".")
        if value is None:
            del states[name][kind]
        else:
            states[name][kind] = value
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(model)}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "step": 3}


def saved(tmp_path, tree):
    path = tmp_path / "state.pt"
    torch_save(path, tree)
    return path


def test_a_good_state_is_intact_and_resumable(tmp_path):
    document = report(saved(tmp_path, state(weights())), "--level", "values", "--resumable", code=0)
    assert document["findings"] == []
    row = document["checkpoints"][0]
    assert row["resumable"]["answer"] is True
    assert row["resumable"]["lacks"] == ["scheduler", "rng"]
    assert row["step"] == 3


MODEL = weights()
NAN = np.array([[1, np.nan, np.inf], [0, -np.inf, 2]], np.float32)
VALUES = [
    ("not-finite", "warning", state({**MODEL, "c.weight": NAN}), "c.weight"),
    ("all-zero", "warning", state({**MODEL, "c.weight": np.zeros((2, 3), np.float32)}), "c.weight"),
    ("constant", "info", state({**MODEL, "c.weight": np.full((2, 3), 0.5, np.float32)}), "c.weight"),
    ("absurd-magnitude", "warning", state({**MODEL, "c.weight": np.array([[1, -3e30]], np.float32)}), "c.weight"),
    ("negative-second-moment", "error", state(MODEL, **{"a.weight.exp_avg_sq": -np.ones((4, 6), "f4")}), "a.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "severity", "tree", "tensor"), VALUES, ids=[v[0] for v in VALUES])
def test_values_that_no_training_gives_are_found_when_values_are_read(kind, severity, tree, tensor, tmp_path):
    path = saved(tmp_path, tree)
    assert kind not in kinds(report(path))
    found = only(report(path, "--level", "values", code=1 if severity == "error" else 0), kind)
    assert (found["severity"], found["where"]["tensor"]) == (severity, tensor)


def test_nan_and_infinities_are_counted_and_the_first_is_named(tmp_path):
    found = only(report(saved(tmp_path, state({**MODEL, "c.weight": NAN})), "--level", "values"), "not-finite")
    assert "1 NaN" in found["what"]
    assert "2 infinity" in found["what"]
    assert "[0, 1]" in found["why"]


def test_what_begins_at_zero_or_one_is_let_go(tmp_path):
    fine = {
        "c.bias": np.zeros(4, "f4"), "norm.weight": np.ones(4, np.float32), "x.lora_B.weight": np.zeros((2, 2), "f4"),
        "empty": np.zeros((0, 3), np.float32), "scalar": np.zeros((), np.float32), "count": np.zeros((2, 2), np.int64),
    }  # fmt: skip
    assert report(saved(tmp_path, {**MODEL, **fine}), "--level", "values", code=0)["findings"] == []


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_the_bits_of_every_float_type_are_judged_alike(dtype, tmp_path):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    good = rng.standard_normal((9, 7)).astype(np.float32).astype(kind)
    bad = good.copy()
    bad[3, 2] = np.nan
    negative_zero = np.array([[-0.0, 0.0]], np.float32).astype(kind)
    for name, array, wanted in (("good", good, 0), ("bad", bad, 1), ("zeros", negative_zero, 0)):
        folder = tmp_path / name
        folder.mkdir()
        safetensors.numpy.save_file({"w": array}, folder / "model.safetensors", metadata={"format": "pt"})
        document = report(folder, "--level", "values", code=0)
        assert ("not-finite" in kinds(document)) == bool(wanted)
        assert "constant" not in kinds(document)


def test_a_large_tensor_is_scanned_to_its_end(tmp_path):
    w = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    w[-1] = np.nan
    safetensors.numpy.save_file({"w": w}, tmp_path / "model.safetensors")
    found = only(report(tmp_path, "--level", "values"), "not-finite")
    assert "[299999]" in found["why"]


def test_moments_that_are_one_are_an_error(tmp_path):
    same = np.random.default_rng(9).random((4, 6)).astype(np.float32)
    tree = state(MODEL, **{"a.weight.exp_avg": same, "a.weight.exp_avg_sq": same.copy()})
    found = only(report(saved(tmp_path, tree), "--level", "values", code=1), "moments-equal")
    assert "1 of 2" in found["what"]


def test_moments_before_the_first_update_are_both_zero_and_fine(tmp_path):
    zero = np.zeros((4, 6), np.float32)
    tree = state(MODEL, **{"a.weight.exp_avg": zero, "a.weight.exp_avg_sq": zero.copy()})
    assert report(saved(tmp_path, tree), "--level", "values", code=0)["findings"] == []


def test_half_of_a_state_is_an_error_and_none_is_not(tmp_path):
    tree = state(MODEL, **{"b.weight.exp_avg_sq": None})
    document = report(saved(tmp_path, tree), code=1)
    assert only(document, "state-part-missing")["where"]["tensor"] == "b.weight"
    assert document["checkpoints"][0]["resumable"]["answer"] is False
    tree = state(MODEL)
    del tree["optimizer"]["state"]["b.weight"]
    document = report(saved(tmp_path, tree), code=0)
    assert only(document, "state-absent-for-some")["severity"] == "info"
    assert document["checkpoints"][0]["resumable"]["answer"] is True


def test_masters_must_round_to_their_weights(tmp_path):
    import ml_dtypes

    master = np.random.default_rng(5).standard_normal((4, 6)).astype(np.float32)
    for change, code in ((0.0, 0), (0.5, 1)):
        low = master.astype(ml_dtypes.bfloat16)
        tree = state({"a.weight": low}, **{"a.weight.master": master + np.float32(change)})
        for kind in ("exp_avg", "exp_avg_sq"):
            tree["optimizer"]["state"]["a.weight"][kind] = np.abs(master) * (1 if kind == "exp_avg" else 2)
        document = report(saved(tmp_path, tree), "--level", "values")
        if not any(r == "master" for r in _kinds_of(tmp_path / "state.pt")):
            pytest.skip("masters are read under another name")
        assert ("masters-differ" in kinds(document)) == bool(code)


def _kinds_of(path):
    return ckptctl("inspect", path, "--json").json["kinds"]


def test_weights_alone_are_intact_and_resumable_only_where_asked(tmp_path):
    path = saved(tmp_path, MODEL)
    document = report(path, code=0)
    assert document["checkpoints"][0]["intact"]["answer"] is True
    assert document["checkpoints"][0]["resumable"] == {
        "answer": False, "why": "no moments, no groups",
        "loader": "torch.load, and load_state_dict of model and optimizer",
        "lacks": ["moments", "groups", "scheduler", "rng", "counters"],
    }  # fmt: skip
    assert only(report(path, "--resumable", code=1), "not-resumable")["severity"] == "error"


def test_the_header_level_reads_no_model_and_says_so(tmp_path):
    row = report(saved(tmp_path, state(MODEL)), "--level", "header", code=0)["checkpoints"][0]
    assert row["resumable"]["answer"] is None
    assert row["intact"]["answer"] is True


def test_every_file_is_told_of_when_several_are_cut(tmp_path):
    shutil.copytree(BROKEN / "ok-sharded", tmp_path / "m")
    cut = sorted((tmp_path / "m").glob("*.safetensors"))[:2]
    for file in cut:
        file.write_bytes(file.read_bytes()[:-3])
    document = report(tmp_path / "m", code=1)
    assert {f["where"]["file"] for f in document["findings"] if f["kind"] == "data-truncated"} == {f.name for f in cut}


def test_files_that_are_not_what_they_seem_are_named_as_what_they_are(tmp_path):
    shutil.copytree(BROKEN / "ok-sharded", tmp_path / "m")
    (tmp_path / "m" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "m" / "scheduler.pt").write_text("<html>no</html>")
    (tmp_path / "m" / "vocab.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tmp_path / "m" / "extra.json").write_text("{")
    (tmp_path / "m" / "x.safetensors.tmp").write_bytes(b"1")
    (tmp_path / "m" / "modeling.py").write_text("")
    (tmp_path / "m" / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere.txt").write_text("x")
    (tmp_path / "m" / "notes.txt").symlink_to(tmp_path / "elsewhere.txt")
    document = report(tmp_path / "m", "--level", "header", code=1)
    assert {(f["kind"], f["where"]["file"]) for f in document["findings"]} >= {
        ("empty-file", "optimizer.pt"), ("html-page", "scheduler.pt"), ("lfs-pointer", "vocab.json"),
        ("config-not-json", "extra.json"), ("temporary-file", "x.safetensors.tmp"), ("carries-code", "modeling.py"),
        ("broken-link", "gone.safetensors"), ("link-escapes", "notes.txt"),
    }  # fmt: skip


def test_the_hub_s_cache_is_no_link_that_escapes(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    data = (BROKEN / "ok-minimal.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    assert report(snapshot, "--checksums", code=0)["findings"] == []
    (blobs / digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert kinds(report(snapshot, code=0)) == set()
    assert only(report(snapshot, "--checksums", code=1), "checksum-mismatch")["where"]["file"] == "model.safetensors"


def test_a_list_of_checksums_beside_the_files_is_checked(tmp_path):
    data = (BROKEN / "ok-minimal.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    (tmp_path / "SHA256SUMS").write_text(
        f"{hashlib.sha256(data).hexdigest()}  model.safetensors\n{'0' * 64}  gone.bin\n"
    )
    document = report(tmp_path, "--checksums", code=1)
    assert [(f["kind"], f["where"]["file"]) for f in document["findings"]] == [("missing-file", "gone.bin")]


def test_checksums_of_files_that_have_none_are_told(tmp_path):
    shutil.copy(BROKEN / "ok-minimal.safetensors", tmp_path)
    found = only(report(tmp_path, "--checksums", code=0), "reader-note")
    assert (found["severity"], "--checksums compared nothing" in found["what"]) == ("info", True)


def test_a_list_of_checksums_that_is_a_broken_link_is_a_finding(tmp_path):
    shutil.copy(BROKEN / "ok-minimal.safetensors", tmp_path)
    (tmp_path / "SHA256SUMS").symlink_to("gone")
    assert kinds(report(tmp_path, "--checksums", code=1)) == {"broken-link"}


def test_a_list_of_checksums_that_is_not_read_is_told(tmp_path):
    shutil.copy(BROKEN / "ok-minimal.safetensors", tmp_path)
    with (tmp_path / "SHA256SUMS").open("wb") as stream:
        stream.truncate(1 << 25)
    found = only(report(tmp_path, "--checksums"), "reader-note")
    assert (found["severity"], found["where"]["file"]) == ("warning", "SHA256SUMS")


def test_against_another_copy_every_file_is_compared(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        shutil.copytree(BROKEN / "ok-sharded", folder)
    assert report(a, "--against", b, code=0)["findings"] == []
    file = sorted(a.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (b / "more.txt").write_text("x")
    document = report(a, "--against", b, code=1)
    assert {(f["kind"], f["where"]["file"]) for f in document["findings"]} == {
        ("checksum-mismatch", file.name), ("file-missing-beside", "more.txt"),
    }  # fmt: skip
    assert f"byte {len(data) - 1:,}" in only(document, "checksum-mismatch")["why"]


def hub_answers(folder):
    """What the Hub says of a folder's files: the tree, and the model with its blobs."""
    tree, siblings = [], []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        sha = hashlib.sha256(data).hexdigest()
        in_lfs = file.suffix == ".safetensors"
        tree.append(
            {"type": "file", "oid": git, "size": len(data), "path": file.name}
            | ({"oid": "0" * 40, "lfs": {"oid": sha, "size": len(data), "pointerSize": 134}} if in_lfs else {})
        )
        siblings.append(
            {"rfilename": file.name, "blobId": git}
            | ({"blobId": "0" * 40, "lfs": {"sha256": sha, "size": len(data)}} if in_lfs else {})
        )
    return tree, {"id": "a/b", "siblings": siblings}


def test_against_a_list_of_checksums_and_the_hub_s_answers(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(BROKEN / "ok-sharded", folder)
    tree, model = hub_answers(folder)
    plain = "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in folder.iterdir())
    lists = {"sums.txt": plain, "tree.json": json.dumps(tree), "model.json": json.dumps(model)}
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
        assert report(folder, "--against", tmp_path / name, code=0)["findings"] == []
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    for name in lists:
        document = report(folder, "--against", tmp_path / name, code=1)
        assert {(f["kind"], f["where"]["file"]) for f in document["findings"]} == {
            ("checksum-mismatch", shard.name), ("checksum-mismatch", "config.json"),
        }  # fmt: skip
    shard.unlink()
    assert "missing-file" in kinds(report(folder, "--against", tmp_path / "tree.json", code=1))
    for text in ("", "[]", "{", '{"a": 1}', "[1]", "no sums\n", '[{"path": "../x", "lfs": {"oid": "0"}}]'):
        (tmp_path / "bad").write_text(text)
        assert ckptctl("validate", folder, "--against", tmp_path / "bad").code == 2


def test_a_changed_byte_of_a_torch_file_is_found_by_its_checksum(tmp_path):
    path = saved(tmp_path, state(MODEL))
    assert report(path, "--level", "values", code=0)["findings"] == []
    data = bytearray(path.read_bytes())
    at = data.find(MODEL["b.weight"].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert "checksum-mismatch" not in kinds(report(path))
    assert "b.weight" in only(report(path, "--level", "values", code=1), "checksum-mismatch")["where"]["tensor"]


def test_a_distributed_checkpoint_without_a_file_is_not_intact(tmp_path):
    shutil.copytree(ckpt("torch/fsdp2_dp2_dcp"), tmp_path / "d")
    assert report(tmp_path / "d", "--level", "values", code=0)["checked"]["tensors"] == 4 * 39
    victim = sorted((tmp_path / "d").glob("*.distcp"))[0]
    victim.write_bytes(victim.read_bytes()[:-40])
    assert victim.name in json.dumps(report(tmp_path / "d", code=1))
    victim.unlink()
    document = report(tmp_path / "d", code=1)
    assert victim.name in json.dumps(document["findings"])
    assert document["checkpoints"][0]["intact"]["answer"] is False


def run_of(tmp_path):
    for step in (2, 10):
        folder = tmp_path / f"step_{step}"
        folder.mkdir(parents=True)
        torch_save(folder / "state.pt", {**state(MODEL), "step": step})
    return tmp_path


def test_a_run_is_one_checkpoint_a_step_and_the_newest_good_one_is_named(tmp_path):
    run = run_of(tmp_path)
    document = report(run, code=0)
    assert [row["step"] for row in document["checkpoints"]] == [2, 10]
    assert document["newest_resumable"] == str(run / "step_10")
    file = run / "step_10" / "state.pt"
    file.write_bytes(file.read_bytes()[:-100])
    document = report(run, code=1)
    assert document["newest_resumable"] == str(run / "step_2")
    assert {f["checkpoint"] for f in document["findings"]} == {str(run / "step_10")}


def test_a_tracker_that_names_no_step_is_a_finding_of_its_run(tmp_path):
    runs = [run_of(tmp_path / n) for n in ("a", "b")]
    for run in runs:
        (run / "latest").write_text("step_12")
    page = tmp_path / "junit.xml"
    document = report(*runs, "--output", f"junit={page}", code=1)
    told = [f for f in document["findings"] if f["kind"] == "tracker-names-missing-step"]
    assert [f["checkpoint"] for f in told] == list(map(str, runs))
    assert len({f["fingerprint"] for f in told}) == 2
    uris = [issue["location"]["path"] for issue in json.loads(gitlab(document))]
    assert uris == [f"{run}/latest".lstrip("/") for run in runs]
    failed = [s.get("name") for s in ET.parse(page).iter("testsuite") if int(s.get("failures"))]
    assert failed == list(map(str, runs))
    assert report(*runs, "--ignore", "tracker-names-missing-step", code=0)["findings"] == []


def test_several_paths_are_one_report(tmp_path):
    document = report(BROKEN / "ok-minimal.safetensors", BROKEN / "overlap.safetensors", code=1)
    assert [row["intact"]["answer"] for row in document["checkpoints"]] == [True, False]
    assert {f["checkpoint"] for f in document["findings"]} == {str(BROKEN / "overlap.safetensors")}


def test_rules_are_selected_and_ignored_by_code_kind_and_beginning():
    path = BROKEN / "tensor-in-two-shards"
    assert kinds(report(path)) == {"duplicate-tensor", "unreferenced-shard"}
    assert kinds(report(path, "--select", "unreferenced-shard")) == {"unreferenced-shard"}
    assert kinds(report(path, "--ignore", "CK407")) == {"duplicate-tensor"}
    assert kinds(report(path, "--ignore", "CK4")) == set()
    assert report(path, "--fail-on", "warning", code=1)["ok"] is False
    assert report(path, "--fail-on", "warning", "--ignore", "CK4", code=0)["ok"] is True


def test_many_lesser_findings_of_a_kind_hide_no_graver_one(tmp_path):
    names = [b"cmine\nC%d\n" % n for n in range(250)] + [b"ctorch\nno_such_function\n"]
    (tmp_path / "x.pkl").write_bytes(b"(" + b"".join(names) + b"t.")
    document = report(tmp_path / "x.pkl", "--level", "header", code=1)
    assert [f["where"]["field"] for f in document["findings"] if f["severity"] == "error"] == ["torch.no_such_function"]
    (more,) = [f for f in document["findings"] if f["severity"] == "info"]
    assert more["what"].startswith("50 more")
    words = ("--level", "header", "--ignore", "pickle-unknown-global")
    assert report(tmp_path / "x.pkl", *words, code=0)["findings"] == []


def test_what_is_ignored_answers_neither_yes_nor_no():
    path = BROKEN / "bin-crc-wrong"
    row = report(path, "--level", "values", code=1)["checkpoints"][0]
    assert row["intact"]["answer"] is False
    row = report(path, "--level", "values", "--ignore", "checksum-mismatch", code=0)["checkpoints"][0]
    assert row["intact"]["answer"] is None
    assert row["intact"]["why"] == "1 error left out as asked for (--ignore)"


def test_a_baseline_hides_what_it_has_and_nothing_else(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(BROKEN / "index-wrong-file", path)
    assert ckptctl("validate", path, "--output", f"json={tmp_path / 'b.json'}", "--output", "text").code == 1
    document = report(path, "--baseline", tmp_path / "b.json", code=0)
    assert document["findings"] == []
    assert document["suppressed"] == {"baseline": 2}
    (path / "config.json").write_text("{")
    assert kinds(report(path, "--baseline", tmp_path / "b.json", code=1)) == {"config-not-json"}


def test_a_hostile_file_is_intact_and_not_safe():
    row = report(BROKEN / "bin-runs-system", "--level", "values", code=1)["checkpoints"][0]
    assert row["safe"]["answer"] is False
    assert "system" in row["safe"]["why"]
    assert row["intact"]["answer"] is True
    assert row["resumable"]["answer"] is False


def test_nothing_there_or_not_read_is_no_answer(tmp_path):
    assert refused("validate", tmp_path / "gone")["code"] == "unrecognised"
    (tmp_path / "empty").mkdir()
    assert refused("validate", tmp_path / "empty")["code"] == "unrecognised"
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert refused("validate", tmp_path / "x.gguf")["code"] == "unsupported"


@pytest.mark.parametrize(
    "words",
    [
        ["--level", "deep"], ["--fail-on", "never"], ["--select", "CK9"], ["--ignore", "nothing"], ["--output", "xml"],
        ["--output", "json", "--output", "sarif"], ["--baseline", "gone.json"], ["--against", "gone"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_flags_are_usage(words):
    assert ckptctl("validate", BROKEN / "ok-sharded", *words).code == 2


def test_a_config_that_is_not_there_is_the_user_s_mistake():
    assert ckptctl("validate", BROKEN / "ok-sharded", "--model-config", "gone").code == 3


def stack_global(module, name):
    """A pickle that calls module.name("x")."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    return b"\x80\x04" + texts + b"\x93\x8c\x01x\x85R."


@pytest.mark.parametrize(
    "dotted",
    [
        "os.system", "posix.system", "nt.system", "subprocess.Popen", "builtins.eval", "builtins.exec",
        "builtins.compile", "builtins.__import__", "builtins.open", "socket.socket",
        "webbrowser.open", "runpy.run_path", "pickle.loads",
        "importlib.import_module", "shutil.rmtree", "requests.api.get", "http.client.HTTPSConnection", "sys.exit",
        "pty.spawn", "timeit.timeit", "cProfile.run", "code.interact", "ctypes.CDLL", "asyncio.run", "torch.load",
        "torch.hub.load", "operator.attrgetter", "functools.partial", "pip.main", "pydoc.pipepager", "trace.Trace",
        "logging.config._resolve", "marshal.loads", "zipimport.zipimporter", "uuid._popen", "numpy.load",
        "types.CodeType", "urllib.request.urlopen", "multiprocessing.Process", "bdb.Bdb",
    ],
)  # fmt: skip
def test_hostile_pickles_are_not_safe_and_run_nothing(dotted, tmp_path):
    module, _, name = dotted.rpartition(".")
    (tmp_path / "x.pkl").write_bytes(stack_global(module, name))
    document = report(tmp_path / "x.pkl", "--level", "header", code=1)
    assert only(document, "pickle-calls-code")["where"]["field"] == dotted
    assert document["checkpoints"][0]["safe"]["answer"] is False


CALL = b"cos\nsystem\n(S'x'\ntR"


@pytest.mark.parametrize("tail", [b"", b"\xff\xff.", b"(((", b"t."], ids=repr)
@pytest.mark.parametrize("head", [b"", b"\x80\x02", b"\x80\x02}.", b"\x80\x04\x95" + bytes(8)], ids=repr)
@pytest.mark.parametrize("name", ["x.bin", "x.pkl", "x.pt", "main", "member"])
def test_what_a_broken_pickle_runs_before_it_breaks_is_not_safe(name, head, tail, tmp_path):
    """pickle.loads runs each call when it comes to it, whatever follows."""
    raw, whole = head + CALL + tail, b"\x80\x02}."
    inside = {"main": {"a/data.pkl": raw}, "member": {"a/data.pkl": whole, "a/other.pkl": raw}}.get(name)
    file = tmp_path / (f"{name}.pt" if inside else name)
    if inside is None:
        file.write_bytes(raw)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            for member, data in inside.items():
                archive.writestr(member, data)
    if inside and head.endswith(b"."):
        return  # a reader of a member stops behind the first pickle; one of a file goes on
    document = report(file, "--level", "header", code=1)
    assert only(document, "pickle-calls-code")["where"]["field"] == "os.system"
    assert document["checkpoints"][0]["safe"]["answer"] is False


def test_a_pickle_in_an_archive_that_is_not_looked_at_is_told(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/other.pkl", CALL + b".", zipfile.ZIP_BZIP2)
    found = only(report(tmp_path / "a.pt", "--level", "header"), "unsupported")
    assert (found["severity"], found["where"]["field"]) == ("warning", "a/other.pkl")


def test_a_second_pickle_in_an_archive_is_looked_at_too(tmp_path):
    from tests.support.torchfiles import torch_zip

    (tmp_path / "a.pt").write_bytes(torch_zip({}, {}, other__pkl=stack_global("os", "system")))
    assert "pickle-calls-code" in kinds(report(tmp_path / "a.pt", "--level", "header", code=1))
    (tmp_path / "b.pt").write_bytes(torch_zip({}, {}, other__pkl=b"no pickle"))
    assert report(tmp_path / "b.pt", "--level", "header", code=0)["findings"] == []


def test_the_newest_step_is_the_one_that_the_run_calls_so(tmp_path):
    # Copies of one save: their files all count step 3.
    for number in (3, 20, 100):
        shutil.copytree(FIXTURES / "torch" / "fsdp2_dp2_dcp" / "ckpt", tmp_path / f"step_{number}")
    (tmp_path / "step_100" / "__0_0.distcp").unlink()
    found = validate([tmp_path])
    assert found["newest_resumable"] == str(tmp_path / "step_20")
    at_header = validate([tmp_path], Validation("header"))
    assert at_header["newest_resumable"] is None
    assert "newest that a run can go on from: not looked at" in findings.text(at_header)


@pytest.mark.parametrize(
    ("kind", "case", "question"),
    [
        ("header-truncated", "header-length-past-end.safetensors", "intact"),
        ("CK2", "bin-truncated", "intact"),
        ("pickle-calls-code", "bin-runs-code", "safe"),
    ],
)
def test_an_error_that_is_left_out_makes_no_yes(kind, case, question):
    row = report(BROKEN / case, "--level", "header", "--ignore", kind, code=0)["checkpoints"][0]
    assert row[question]["answer"] is None


@pytest.mark.parametrize("text", ['{"findings": {}}', '{"findings": "no"}', "{}", "[]", '{"findings": [1]}', "\x00"])
def test_what_is_no_report_is_no_baseline(text, tmp_path):
    (tmp_path / "base.json").write_text(text)
    error = refused("validate", BROKEN / "ok-minimal.safetensors", "--baseline", tmp_path / "base.json", code=2)
    assert "--baseline" in error["what"]


def test_an_optimizer_s_index_lists_parameters(tmp_path):
    """ColossalAI's: an index of parameters by number, sizes in MiB. Nothing of it is an error."""
    save = {f"{n}": {"step": 3.0, "exp_avg": arange(2), "exp_avg_sq": arange(2)} for n in range(3)}
    torch_save(tmp_path / "pytorch_optim-00001.bin", save)
    index = {"metadata": {"total_size": 48 / 2**20}, "weight_map": dict.fromkeys(save, "pytorch_optim-00001.bin")}
    (tmp_path / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    assert report(tmp_path, "--level", "header", code=0)["findings"] == []
    index["weight_map"]["3"] = "pytorch_optim-00001.bin"
    (tmp_path / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    (found,) = report(tmp_path, "--level", "header", code=1)["findings"]
    assert (found["kind"], found["where"]["tensor"]) == ("tensor-not-in-shard", "3")


def test_a_data_file_of_a_distributed_checkpoint_by_itself_is_refused(tmp_path):
    source = next(ckpt("torch/fsdp2_dp2_dcp").rglob("__0_0.distcp"))
    shutil.copy(source, tmp_path / "__0_0.distcp")
    for level in ("header", "structure"):
        error = refused("validate", tmp_path / "__0_0.distcp", "--level", level)
        assert ".metadata" in error["why"]
        report(source, "--level", level, code=0)


def test_a_checkpoint_whose_optimizer_is_not_known_was_not_looked_at(tmp_path):
    run = shutil.copytree(ckpt("megatron/qwen2_legacy_tp2pp2_tied"), tmp_path / "run")
    for file in run.rglob("model_optim_rng.pt"):
        replaced(file, b"param_groups", b"param_groupz")
    assert refused("validate", run)["code"] == "optimizer-unknown"


@pytest.mark.parametrize(("name", "data"), [("x.gguf", b"GGUF\3\0\0\0"), ("x.h5", b"\x89HDF\r\n\x1a\n")])
def test_what_is_known_and_not_read_is_exit_code_3_at_every_level(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    for level in ("header", "structure"):
        assert "which this version does not read yet" in refused("validate", tmp_path / name, "--level", level)["what"]


def test_a_model_beside_what_is_not_read_is_not_taken_for_the_whole(tmp_path):
    """ColossalAI's folder has a Hugging Face model in it: one level up that would be all that is seen."""
    shutil.copytree(ckpt("hf/llama-single"), tmp_path / "step" / "model")
    (tmp_path / "step" / "optimizer").mkdir()
    for path in (tmp_path, tmp_path / "step"):
        refused("validate", path, "--level", "structure")
        refused("inspect", path)


@pytest.mark.parametrize("flag", ["--resumable", "--verify-replicas"])
def test_what_headers_do_not_tell_is_not_promised(flag):
    error = refused("validate", BROKEN / "ok-minimal.safetensors", "--level", "header", flag, code=2)
    assert error["what"].startswith(flag)
