"""Bytes that wait for checksums: real zip archives, written in any order; zipfile and zlib are the judges."""

import io
import random
import zipfile
import zlib
from dataclasses import replace

import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, Late, OutputFile, Put, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.execute import Budget, Job, run, work
from ckptctl.formats.zipwrite import torch_zip
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan


def archives(tmp_path, items=1, seed=1, extent_nbytes=3000):
    """A job for a file of torch zips one after another, as a .distcp has them, and the size and records of each."""
    rng = random.Random(seed)
    u1 = BY_NAME["uint8"]
    tensors, segments, wanted, source = {}, [], [], b""
    for item in range(items):
        records, held = [], {}
        for i in range(rng.randint(1, 5)):
            data = rng.randbytes(rng.choice([0, 1, 100, 9000]))
            key, n = Key(f"{item}.{i}"), len(data)
            tensors[key] = Tensor(key, u1, (n,), (PieceTable.whole((n,), 1, 0, len(source)),))
            source += data
            parts = (
                [Region(key, u1, (n,), (0,), (n,))]
                if n < 200
                else [
                    Region(key, u1, (n,), (0,), (n // 3,)),
                    Region(key, u1, (n,), (n // 3,), (n - n // 3,)),
                    Fill(7, b"ab", ""),
                ]
            )
            records.append((f"data/{i}", parts))
            held[f"data/{i}"] = data + (b"" if n < 200 else b"abababa")
        records.append(("version", Put(b"3\n")))
        made = torch_zip(records, "archive", base_index=len(segments))
        segments += made
        held["version"] = b"3\n"
        wanted.append((sum(s.nbytes for s in made), {f"archive/{k}": v for k, v in held.items()}))
    (tmp_path / "source").write_bytes(source)
    plan = Plan((OutputFile("", lambda: segments),), SourceIndex(tensors, [Source("")]), extent_nbytes=extent_nbytes)
    return Job(plan, check(plan), [Source("")], tmp_path / "source", tmp_path / "made", False), wanted


def assert_archives(data, wanted):
    """Every archive, cut out of the file, is whole and holds its records."""
    assert sum(n for n, _ in wanted) == len(data)
    for nbytes, records in wanted:
        archive = zipfile.ZipFile(io.BytesIO(data[:nbytes]))
        assert archive.testzip() is None
        assert {n: archive.read(n) for n in archive.namelist()} == records
        data = data[nbytes:]


@pytest.mark.parametrize("items", [1, 6])
@pytest.mark.parametrize("seed", range(5))
def test_archives_are_whole_whatever_the_order(tmp_path, monkeypatch, items, seed):
    made, wanted = archives(tmp_path, items, seed, extent_nbytes=random.Random(seed).choice([64, 1000, 1 << 20]))
    rng = random.Random(seed)

    def shuffled(plan, *_):
        order = list(plan.extents())
        rng.shuffle(order)
        return iter([(e,) for e in order])

    monkeypatch.setattr("ckptctl.execute.local.gangs", shuffled)
    outcome = run(made, Budget(jobs=3))
    data = (tmp_path / "made").read_bytes()
    assert_archives(data, wanted)
    assert outcome.checksums == {"": zlib.crc32(data)}


def test_late_bytes_count_in_a_files_checksum(tmp_path):
    data = random.Random(1).randbytes(5000)
    (tmp_path / "source").write_bytes(data)
    u1, key = BY_NAME["uint8"], Key("t")
    tensor = Tensor(key, u1, (5000,), (PieceTable.whole((5000,), 1, 0, 0),))
    seen = []

    def make(crcs):
        seen.append(list(crcs))
        return b"".join(c.to_bytes(4, "big") for c in crcs)

    segments = [
        Late(8, (1, 3), make),
        Region(key, u1, (5000,), (100,), (4900,)),
        Put(b"xyz"),
        Fill(10, b"pq", ""),
        Late(4, (2,), make),
        Put(b"!"),
    ]
    plan = Plan((OutputFile("", lambda: segments),), SourceIndex({key: tensor}, [Source("")]), extent_nbytes=999)
    outcome = run(Job(plan, check(plan), [Source("")], tmp_path / "source", tmp_path / "made", False))
    crcs = [zlib.crc32(b) for b in (data[100:], b"pqpqpqpqpq", b"xyz")]
    wanted = [c.to_bytes(4, "big") for c in crcs]
    assert (tmp_path / "made").read_bytes() == wanted[0] + wanted[1] + data[100:] + b"xyz" + b"pq" * 5 + wanted[
        2
    ] + b"!"
    assert seen == [crcs[:2], crcs[2:]]
    assert outcome.checksums == {"": zlib.crc32((tmp_path / "made").read_bytes())}


def test_a_checksum_that_is_wanted_keeps_bytes_from_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "DIRECT_NBYTES", 1)
    monkeypatch.setattr(work, "DIRECT_ALIGNMENT", 1)
    made, wanted = archives(tmp_path, 2)
    outcome = run(made)
    assert_archives((tmp_path / "made").read_bytes(), wanted)
    region = sum(s.nbytes for s in made.plan.files[0].segments if isinstance(s, Region))
    assert outcome.direct_nbytes <= (made.plan.files[0].nbytes - region)


def test_late_bytes_of_another_length_are_a_mistake_of_the_plan(tmp_path):
    plan = Plan((OutputFile("", lambda: [Put(b"x"), Late(3, (0,), lambda _: b"12")]),), SourceIndex({}, []))
    with pytest.raises(ValueError, match="2 bytes, not 3"):
        run(Job(plan, check(plan), [], tmp_path / "source", tmp_path / "made", False))
    assert not (tmp_path / "made").exists()


def test_a_resumed_archive_is_whole(tmp_path, monkeypatch):
    made, wanted = archives(tmp_path, 3)
    real, calls = work.Worker.do, []

    def do(self, gang):
        calls.append(gang)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, gang)

    monkeypatch.setattr(work.Worker, "do", do)
    with pytest.raises(KeyboardInterrupt):
        run(made, Budget(jobs=1))
    assert not (tmp_path / "made").exists()
    outcome = run(replace(made), Budget(jobs=2), resume=True)
    assert_archives((tmp_path / "made").read_bytes(), wanted)
    assert outcome.resumed_nbytes == 3 * 3000
    assert outcome.checksums == {"": zlib.crc32((tmp_path / "made").read_bytes())}
