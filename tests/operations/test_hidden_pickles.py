"""Pickles under names that say nothing, in archives within archives: found, or the answer says that nobody looked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib

import pytest

from ckptctl.core.errors import Unrecognised
from ckptctl.operations import Validation, validate
from tests.support.hostile import GOOD, archive, by_name

CALL = by_name("os.system") + b"(S'x'\ntR."
CALL_2 = b"\x80\x02" + CALL


def tarred(mode="w", **members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as made:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zipped(method=zipfile.ZIP_STORED, **members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, data in members.items():
            made.writestr(name.replace("__", "."), data)
    return out.getvalue()


HOSTILE = {
    "upper.PT": CALL,
    "mixed.Pkl": CALL_2,
    "no-ending": CALL_2,
    "plain.sav": CALL,
    "weights.h5": CALL_2,
    "some.zip": zipped(x__pkl=CALL),
    "some.keras": zipped(x__pkl=CALL),
    "nested.pt": archive(inner__zip=zipped(x__pkl=CALL)),
    "nested-deflated.pt": archive(zipfile.ZIP_DEFLATED, inner__zip=zipped(x__pkl=CALL)),
    "run.pkl.gz": gzip.compress(CALL),
    "gz-in-gz.joblib": gzip.compress(gzip.compress(CALL)),
    "gz-in.pt": archive(x__gz=gzip.compress(CALL)),
    "second-stream.joblib": gzip.compress(b"") + gzip.compress(CALL),
    "cut-in-two.joblib": gzip.compress(CALL[:9]) + gzip.compress(CALL[9:]),
    "second-stream.bz2.pkl": bz2.compress(b"") + bz2.compress(CALL_2),
    "second-stream.xz.pkl": lzma.compress(b"") + lzma.compress(CALL_2),
    "bad-sum-gz.joblib": gzip.compress(CALL)[:-8] + b"wrong sum",
    "bad-sum-zlib.joblib": zlib.compress(CALL)[:-4] + b"sums",
    "bad-sum-xz.joblib": lzma.compress(CALL)[:-6] + b"wrongs",
    "bad-later.joblib": gzip.compress(CALL + bytes(1 << 20))[:-300] + b"\xff" * 300,
    "kept.tar": tarred(x__pkl=CALL),
    "kept.tgz": tarred("w:gz", x__pkl=CALL),
    "old.nemo": tarred(model_weights__ckpt=archive(data__pkl=CALL_2)),
    "old-gz.nemo": tarred("w:gz", model_weights__ckpt=archive(data__pkl=CALL_2)),
}


def answer(path, level="header"):
    return validate([path], Validation(level))["checkpoints"][0]["safe"]["answer"]


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_are_found_whatever_the_file_is_called(tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    assert answer(tmp_path) is False
    assert answer(tmp_path / name) is False


@pytest.mark.parametrize("packed", [lambda data: data, lambda data: gzip.compress(data, 1)])
def test_a_pickle_that_goes_on_beyond_what_is_read_is_not_called_safe(tmp_path, monkeypatch, packed):
    monkeypatch.setattr("ckptctl.operations.checks.pickled._MEMBER_LIMIT", 1 << 16)
    (tmp_path / "model.pt").write_bytes(GOOD["tensor.pt"])
    long = b"\x80\x04\x8e" + (1 << 17).to_bytes(8, "little") + bytes(1 << 17)  # BINBYTES8
    (tmp_path / "numbers.dat").write_bytes(b"\x93NUMPY" + bytes(1 << 17))
    assert answer(tmp_path) is True
    (tmp_path / "long.dat").write_bytes(packed(long + b"0" + CALL))
    assert answer(tmp_path) is None


@pytest.mark.parametrize("magic", [b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"])
def test_what_cannot_be_decompressed_here_is_not_called_safe(tmp_path, magic):
    (tmp_path / "model.pt").write_bytes(GOOD["tensor.pt"])
    (tmp_path / "more.joblib").write_bytes(magic + bytes(40))
    assert answer(tmp_path) is None


def test_files_that_are_none_are_let_go(tmp_path):
    (tmp_path / "model.pt").write_bytes(GOOD["tensor.pt"])
    texts = {"cities.txt": b"cats\ndogs\n", "notes": b"(see below)\n", "data.h5": b"\x89HDF\r\n\x1a\n" + bytes(600)}
    for name, data in {**texts, "logs.tar": tarred(log__txt=b"x"), "empty.tar": tarred()}.items():
        (tmp_path / name).write_bytes(data)
    found = validate([tmp_path], Validation("structure"))
    assert found["findings"] == []
    assert found["checkpoints"][0]["safe"]["answer"] is True


def test_an_archive_that_cannot_be_read_is_not_called_safe(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as made:
        made.writestr("a/data.pkl", b"\x80\x02}.")
        with pytest.warns(UserWarning, match="Duplicate"):
            made.writestr("a/data.pkl", CALL_2)
    found = validate([tmp_path], Validation("header"))["checkpoints"][0]
    assert found["intact"]["answer"] is False
    assert found["safe"]["answer"] is None
    assert "model.pt could not be looked at" in found["safe"]["why"]


@pytest.mark.parametrize("file", ["", "README.md", "config.json", "model.safetensors.tmp"])
def test_a_folder_without_a_checkpoint_is_not_whole_at_any_level(tmp_path, file):
    if file:
        (tmp_path / file).write_bytes(b"{}")
    for level in ("header", "structure"):
        with pytest.raises(Unrecognised):
            validate([tmp_path], Validation(level))


def test_a_json_file_by_itself_is_looked_at(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    assert validate([tmp_path / "config.json"], Validation("header"))["ok"]


def test_a_linked_folder_is_told_and_not_called_safe(tmp_path):
    there = tmp_path / "there"
    (there / "inside").mkdir(parents=True)
    (there / "model.pt").write_bytes(GOOD["tensor.pt"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.pkl").write_bytes(CALL)
    (there / "inside" / "more").symlink_to(tmp_path / "elsewhere")
    found = validate([there], Validation("header"))
    assert [(f["kind"], f["where"]["file"]) for f in found["findings"]] == [("link-escapes", "inside/more")]
    assert found["checkpoints"][0]["safe"]["answer"] is None
