"""torch_zip against files that torch wrote, Python's zipfile, and torch itself."""

import io
import itertools
import random
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, Late, Put, Region
from ckptctl.core.tensor import Key
from ckptctl.formats.bytesource import FileBytes, HeldBytes
from ckptctl.formats.zipdir import first_records, read_zip
from ckptctl.formats.zipwrite import torch_zip

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
U8 = BY_NAME["uint8"]


def region(name, data):
    return Region(Key(name), U8, (len(data),), (0,), (len(data),))


def written(segments, data, *, base_index=0, crcs=None):
    """The file that segments make: extents in random order, checksums by zlib. data has regions' bytes by key."""
    crcs = {} if crcs is None else crcs
    parts = [b""] * len(segments)
    order = [i for i, s in enumerate(segments) if not isinstance(s, Late)]
    random.Random(len(segments)).shuffle(order)
    for i in order:
        match segments[i]:
            case Put(known):
                parts[i] = known
            case Fill(n, value, _):
                parts[i] = (value * n)[:n]
            case Region() as r:
                parts[i] = data[r.key.name]
                assert r.crc
                crcs[base_index + i] = zlib.crc32(parts[i])
    for i, s in enumerate(segments):
        if isinstance(s, Late):
            parts[i] = s.make([crcs[k] for k in s.needs])
        assert len(parts[i]) == s.nbytes
    return b"".join(parts)


def again(raw, path="x"):
    """The archive in raw, written anew from its records: storages as regions, the rest as known bytes."""
    directory = read_zip(HeldBytes(raw, path))
    data = {n: raw[r.start : r.start + r.nbytes] for n, r in directory.records.items()}
    records = []
    for full, payload in data.items():
        name = full.removeprefix(directory.root + "/")
        records.append((name, region(full, payload) if name.startswith("data/") else Put(payload)))
    return written(torch_zip(records, directory.root), data)


REAL = [
    "torch/plain_zip",
    "torch/trainer",
    "torch/verl_fsdp2",
    "torch/lightning_ckpt",
    "hf/llama-bin-sharded",
    "megatron/legacy_tp2pp2_distopt_dp2",
]


@pytest.mark.parametrize("layout", REAL)
def test_a_real_file_is_written_again_byte_for_byte(layout):
    if not (FIXTURES / layout).is_dir():
        pytest.skip(f"fixtures/checkpoints/{layout} is not there")
    found = 0
    for path in sorted(p for p in (FIXTURES / layout).rglob("*") if p.is_file()):
        raw = path.read_bytes()
        if raw[:4] == b"PK\3\4" and path.suffix != ".distcp" and b"FB" in raw[:200] and b"constants.pkl" not in raw:
            assert again(raw) == raw, path
            found += 1
    assert found


def test_items_of_a_real_distcp_are_written_again_byte_for_byte():
    path = next((FIXTURES / "torch" / "fsdp2_dp2_dcp").rglob("__0_0.distcp"))
    raw = path.read_bytes()
    starts = [0]
    while (stop := raw.find(b"PK\5\6", starts[-1])) >= 0:
        starts.append(stop + 22)
    assert starts[-1] == len(raw)
    assert len(starts) > 20
    for start, stop in itertools.pairwise(starts):
        with FileBytes(path, start, stop) as item:
            front = first_records(item.read(0, min(2048, item.nbytes)), base=start)
            directory = read_zip(item)
            for name, (at, nbytes) in front.items():
                assert at == start + directory.records[name].start
                assert nbytes in (-1, directory.records[name].nbytes)
            assert "archive/data.pkl" in front
            assert "archive/data/0" in front or "archive/data/0" not in directory.records
        assert again(raw[start:stop]) == raw[start:stop]


def test_zipfile_reads_it_and_two_archives_may_share_a_file():
    data = {"a": b"abc" * 50, "b": b"", "c": b"x"}
    first = torch_zip(
        [("data.pkl", Put(b"N.")), ("data/0", region("a", data["a"])), ("data/1", region("b", b""))],
        "archive",
        base_index=1,
    )
    second = torch_zip(
        [("data.pkl", Put(b"N.")), ("data/0", region("c", data["c"]))], "archive", base_index=1 + len(first)
    )
    raw = written([Put(b"odd"), *first, *second], data)
    one = 3 + sum(s.nbytes for s in first)
    for part, names in ((raw[3:one], {"data/0": data["a"], "data/1": b""}), (raw[one:], {"data/0": data["c"]})):
        with zipfile.ZipFile(io.BytesIO(part)) as archive:
            assert archive.testzip() is None
            for name, payload in names.items():
                assert archive.read(f"archive/{name}") == payload
        starts = [r.start for r in read_zip(HeldBytes(part, "x")).records.values()]
        assert all(s % 64 == 0 for s in starts)


def test_a_record_may_be_several_runs_and_padding():
    data = {"a": b"abc" * 5, "b": b"defg"}
    runs = [
        region("a", data["a"]),
        Fill(7, b"\1\2", "padding"),
        Put(b"known"),
        region("b", data["b"]),
        Fill(0, b"", "none"),
    ]
    raw = written(torch_zip([("data/0", runs), ("version", Put(b"3\n"))], "r"), data)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        assert archive.read("r/data/0") == data["a"] + b"\1\2\1\2\1\2\1" + b"known" + data["b"]


def test_more_records_than_16_bits_count():
    records = [("data.pkl", Put(b"N."))] + [(f"data/{i}", Put(b"")) for i in range(70_000)]
    raw = written(torch_zip(records, "a"), {})
    directory = read_zip(HeldBytes(raw, "x"))
    assert len(directory.records) == 70_001
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert len(archive.namelist()) == 70_001


class Sparse:
    """A file of segments whose regions are zeros, never held."""

    path = "sparse"

    def __init__(self, segments, zeros_crc):
        self.starts, self.parts = [0], []
        for s in segments:
            self.parts.append(
                s.make([zeros_crc] * len(s.needs)) if isinstance(s, Late) else s.data if isinstance(s, Put) else None
            )
            self.starts.append(self.starts[-1] + s.nbytes)
        self.nbytes = self.starts[-1]

    def read(self, start, n):
        assert n < 1 << 20
        out = bytearray(n)
        for at, part in zip(self.starts, self.parts, strict=False):
            lo, hi = max(at, start), min(at + len(part or b""), start + n)
            if part and lo < hi:
                out[lo - start : hi - start] = part[lo - at : hi - at]
        return bytes(out)


def test_more_than_four_gib_as_torch_writes_it():
    # As in a file that torch 2.13.0 wrote with skip_data(materialize_fake_tensors=True).
    n = 2**32 + 5
    big = Region(Key("w"), U8, (n,), (0,), (n,))
    records = [
        ("data.pkl", Put(b"N" * 0x16E + b".")),
        (".format_version", Put(b"1")),
        (".storage_alignment", Put(b"64")),
        ("byteorder", Put(b"little")),
    ]
    records += [
        ("data/0", region("a", b"12345")),
        ("data/1", big),
        ("data/2", region("b", b"1234567")),
        ("data/3", region("c", b"")),
    ]
    records += [("version", Put(b"3\n")), (".data/serialization_id", Put(b"0" * 40))]
    source = Sparse(torch_zip(records, "big"), 0)
    assert source.nbytes == 4294969601
    central = source.read(0x100000600, 0x29F)
    row = central[central.index(b"big/data/1") - 46 :]
    assert row[46 + 10 : 46 + 30] == bytes.fromhex("0100100005000000010000000500000001000000")
    row = central[central.index(b"big/data/2") - 46 :]
    assert row[46 + 10 : 46 + 22] == bytes.fromhex("010008001d04000001000000")
    assert source.read(4294968349 - 24, 24) == bytes.fromhex("504b07080000000005000000010000000500000001000000")
    local = source.read(917, 200)
    assert struct.unpack_from("<HH", local, 26) == (10, 0x43)
    assert local[40:64] == bytes.fromhex("0100100005000000010000000000000000000000" + "46422b00")
    directory = read_zip(source)
    assert directory.records["big/data/1"].nbytes == n
    assert directory.records["big/data/3"].start % 64 == 0


@pytest.mark.parametrize("name", ["", "twice", "x" * 70_000])
def test_impossible_names_are_refused(name):
    with pytest.raises(ValueError, match="record"):
        torch_zip([("twice", Put(b"")), (name, Put(b""))], "r")


def test_torch_reads_it_and_would_have_written_the_same(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch")
    state = {
        "a": torch.arange(1000.0),
        "e": torch.empty(0),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "odd": torch.arange(7, dtype=torch.int8),
    }
    state |= {f"many.{i}": torch.full((i % 70,), i) for i in range(300)}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    raw = path.read_bytes()
    assert again(raw) == raw
    stream = io.BytesIO()
    torch.save(state, stream)
    assert again(stream.getvalue()) == stream.getvalue()
    out = tmp_path / "other.pt"
    out.write_bytes(again(raw))
    for mmap in (False, True):
        loaded = torch.load(out, weights_only=True, mmap=mmap)
        assert all(torch.equal(loaded[k], v) for k, v in state.items())
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert out.stat().st_size == len(raw)
