"""Zip directories against Python's zipfile, and against archives that say two things."""

import contextlib
import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.errors import CkptError, Damaged, Unsupported
from ckptctl.formats.bytesource import FileBytes, HeldBytes
from ckptctl.formats.zipdir import first_records, read_zip

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"


def archive(names=("r/data.pkl", "r/data/0", "r/version"), *, method=zipfile.ZIP_STORED, streamed=False, comment=b""):
    """An archive by Python's zipfile; streamed ones have their sizes behind the payload."""
    stream = io.BytesIO()

    class Pipe(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            return stream.write(data)

    with zipfile.ZipFile(Pipe() if streamed else stream, "w", method) as out:
        for i, name in enumerate(names):
            out.writestr(name, bytes([65 + i]) * (40 * i + 3))
        out.comment = comment
    return stream.getvalue()


def read(raw):
    return read_zip(HeldBytes(bytes(raw), "x.pt"))


def patched(raw, offset, data):
    out = bytearray(raw)
    out[offset : offset + len(data)] = data
    return bytes(out)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("comment", [b"", b"a comment"])
def test_archives_of_pythons_zipfile_are_read_alike(method, streamed, comment):
    raw = archive(method=method, streamed=streamed, comment=comment)
    directory = read(raw)
    assert directory.root == "r"
    assert directory.has_checksums
    assert directory.record("version") is directory.records["r/version"]
    assert directory.record("nothing") is None
    with zipfile.ZipFile(io.BytesIO(raw)) as same:
        assert list(directory.records) == same.namelist()
        for info in same.infolist():
            record = directory.records[info.filename]
            assert (record.nbytes, record.compressed_nbytes) == (info.file_size, info.compress_size)
            assert (record.crc, record.method, record.flags) == (info.CRC, info.compress_type, info.flag_bits)
            if method == zipfile.ZIP_STORED:
                assert raw[record.start : record.start + record.nbytes] == same.read(info)


def test_zip64_records_of_pythons_zipfile():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out, out.open("r/data.pkl", "w", force_zip64=True) as member:
        member.write(b"N.")
    assert read(stream.getvalue()).records["r/data.pkl"].nbytes == 2


def test_an_empty_archive_and_names_without_a_root():
    assert read(archive(())).records == {}
    assert read(archive(("data.pkl",))).root == ""
    assert read(archive(("a/b/data.pkl",))).root == ""


@pytest.mark.parametrize("keep", [0, 1, 21, 22, 100, -1, -10, -22])
def test_a_cut_archive_is_called_cut(keep):
    raw = archive()
    with pytest.raises(Damaged) as caught:
        read(raw[:keep])
    assert caught.value.code == "archive-truncated"


def test_the_truncated_sample():
    path = FIXTURES / "broken" / "bin-truncated" / "pytorch_model.bin"
    if not path.is_file():
        pytest.skip("fixtures/checkpoints/broken is not there")
    with FileBytes(path) as source, pytest.raises(Damaged) as caught:
        read_zip(source)
    assert caught.value.code == "archive-truncated"


def test_every_other_pickled_sample_has_a_readable_directory():
    if not (FIXTURES / "broken" / "expect.json").is_file():
        pytest.skip("fixtures/checkpoints/broken is not there")
    cases = json.loads((FIXTURES / "broken" / "expect.json").read_text())
    for name in cases:
        path = FIXTURES / "broken" / name / "pytorch_model.bin"
        if path.is_file() and name not in ("bin-truncated", "bin-raw-pickle-runs-code"):
            with FileBytes(path) as source:
                assert read_zip(source).root in ("pytorch_model", "archive", "t"), name


def bad_offsets():
    """(what, offset, bytes): one field changed of the archive that archive() makes."""
    raw = archive()
    central, end = raw.index(b"PK\1\2"), raw.index(b"PK\5\6")
    second = raw.index(b"PK\3\4", 4)
    yield "local name", 30, b"R"
    yield "local method", 8, b"\x08"
    yield "local flags", 7, b"\x08"
    yield "local crc", 14, b"\x00"
    yield "local size", 18, b"\x02"
    yield "central size", central + 24, b"\x02"
    yield "central crc", central + 16, b"\x00"
    yield "central flags", central + 8, b"\x20"
    yield "central offset", central + 42, struct.pack("<I", second)
    yield "past the records", central + 42, struct.pack("<I", central - 10)
    yield "count", end + 8, b"\x02\x00\x02\x00"
    yield "huge count", end + 8, b"\xf0\xff\xf0\xff"
    yield "directory offset", end + 16, struct.pack("<I", central + 1)
    yield "zip64 announced, not there", end + 16, struct.pack("<I", 0xFFFFFFFF)
    yield "local header", second, b"PK\0\0"
    yield "extra length", 28, b"\xff\xff"
    yield "NUL in a name", 0, raw.replace(b"r/version", b"r/vers\0on")


@pytest.mark.parametrize(("offset", "data"), [pytest.param(*rest, id=what) for what, *rest in bad_offsets()])
def test_two_statements_that_differ_are_refused(offset, data):
    with pytest.raises(Damaged) as caught:
        read(patched(archive(), offset, data))
    assert caught.value.code == "archive-inconsistent"
    assert caught.value.where == "x.pt"


def test_a_descriptor_that_differs_is_refused():
    raw = archive(streamed=True)
    with pytest.raises(Damaged) as caught:
        read(patched(raw, raw.index(b"PK\7\b") + 8, b"\7"))
    assert caught.value.code == "archive-inconsistent"
    assert "descriptor" in caught.value.what


def test_bytes_before_and_behind_the_archive_are_refused():
    with pytest.raises(Damaged) as caught:
        read(archive() + b"more")
    assert caught.value.code == "trailing-bytes"
    with pytest.raises(Damaged) as caught:
        read(b"more" + archive())
    assert caught.value.code == "archive-inconsistent"


def test_encrypted_records_are_refused():
    raw = archive()
    with pytest.raises(Damaged) as caught:
        read(patched(raw, raw.index(b"PK\1\2") + 8, b"\1"))
    assert caught.value.code == "archive-encrypted"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_names_and_overlaps_are_refused():
    with pytest.raises(Damaged) as caught:
        read(archive(("r/data.pkl", "r/data/0", "r/data.pkl")))
    assert caught.value.code == "duplicate-name"
    with pytest.raises(Damaged) as caught:
        read(archive(("a/data.pkl", "b/data.pkl")))
    assert "several pickles" in caught.value.what
    raw = bytearray(archive(("r/a", "r/b")))
    last = raw.rindex(b"PK\1\2")  # a second name for the bytes of the first record
    inner = raw[: raw.index(b"PK\3\4", 4)]
    raw[last + 42 : last + 46] = struct.pack("<I", 0)
    assert inner
    with pytest.raises(Damaged) as caught:
        read(raw)
    assert caught.value.code == "archive-inconsistent"


def test_archives_in_volumes_are_unsupported():
    raw = archive()
    with pytest.raises(Unsupported, match="volumes"):
        read(patched(raw, raw.index(b"PK\5\6") + 4, b"\1"))


def test_a_directory_that_claims_more_than_the_file_takes_no_memory():
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFE, 0xFFFE, 0xFFFFFFF0, 0, 0)
    with pytest.raises(Damaged):
        read(end)


class Counting(HeldBytes):
    reads = 0
    taken = 0

    def read(self, start, n):
        self.reads += 1
        self.taken += n
        return super().read(start, n)


def test_many_records_take_few_reads_and_large_ones_no_payload():
    small = Counting(archive([f"r/data/{i}" for i in range(60)]), "x")
    assert len(read_zip(small).records) == 60
    assert small.reads < 10
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        for i in range(20):
            out.writestr(f"r/data/{i}", bytes(300_000))
    large = Counting(stream.getvalue(), "x")
    assert len(read_zip(large).records) == 20
    assert large.taken < 200_000


def test_first_records_need_no_directory_and_stop_where_the_prefix_does():
    raw = archive(streamed=True)
    whole = read(raw).records
    assert first_records(raw, 1000) == {n: (1000 + r.start, r.nbytes) for n, r in whole.items()}
    start = whole["r/data/0"].start
    assert first_records(raw[: start + 1])["r/data/0"] == (start, -1)
    assert "r/data/0" not in first_records(raw[: start - 1])
    assert first_records(archive())["r/data/0"][1] == 43


def test_a_payload_that_looks_like_a_descriptor_is_not_taken_for_one():
    payload = b"abcd" + b"PK\7\b" + struct.pack("<III", 0x12345678, 4, 4) + b"more"
    crc = zipfile.crc32(payload)
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, 3, 0) + b"r/a"
    raw = local + payload + struct.pack("<4sIII", b"PK\7\b", crc, len(payload), len(payload)) + b"PK\1\2"
    assert first_records(raw) == {"r/a": (33, len(payload))}


@pytest.mark.parametrize("prefix", [b"", b"PK\3\4", b"PK\5\6" + bytes(18), b"\x80\x02}."])
def test_no_record_at_the_front_is_damage(prefix):
    with pytest.raises(Damaged) as caught:
        first_records(prefix)
    assert caught.value.code == "archive-inconsistent"


SAMPLES = [archive(), archive(streamed=True), archive(comment=b"PK\5\6"), archive(method=zipfile.ZIP_DEFLATED)]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(-40, 40),
)
def test_changed_archives_give_no_other_errors(raw, edits, cut):
    for offset, data in edits:
        raw = patched(raw, min(offset, len(raw)), data)
    raw = raw[: len(raw) + cut] if cut < 0 else raw + bytes(cut)
    source = HeldBytes(raw, "x")
    with contextlib.suppress(CkptError):
        directory = read_zip(source)
        for record in directory.records.values():
            assert 0 <= record.start <= record.start + record.compressed_nbytes <= len(raw)
    with contextlib.suppress(CkptError):
        for start, nbytes in first_records(raw, 5).values():
            assert 5 <= start <= 5 + len(raw)
            assert start + nbytes <= 5 + len(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_give_no_other_errors(raw):
    for call in (lambda: read(raw), lambda: first_records(b"PK\3\4" + raw)):
        with contextlib.suppress(CkptError):
            call()
