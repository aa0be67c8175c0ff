"""Sources: ranges of files, and zstd members small, large, cut off and broken, made by zstandard."""

import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Event, Thread

import pytest
import zstandard

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import CkptError, Damaged, MissingFile, NoSpace, Unsupported
from ckptctl.core.output import OutputFile, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.execute import Budget, Job, job, run, space
from ckptctl.execute.files import OpenFiles
from ckptctl.execute.memory import Memory, Stopped, buffer
from ckptctl.execute.sources import Sources
from ckptctl.execute.stream import Reads
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from tests.support.plans import stop_after

U1 = BY_NAME["uint8"]


def opened(tmp_path, sources, *, decoded=1 << 20, member=1 << 19, room=lambda: 1 << 30):
    (tmp_path / "scratch").mkdir(exist_ok=True)
    sizes = {s.path: (tmp_path / s.path).stat().st_size for s in sources}
    return Sources(tmp_path, sources, sizes, tmp_path / "scratch", decoded, member, room)


def read(sources, number, start, n):
    out = bytearray(n)
    sources.read(number, start, [memoryview(out)], n)
    return bytes(out)


def frames(data, parts=1, known=True):
    """Data as several frames; known: each says how long it is."""
    step = len(data) // parts + 1
    packer = zstandard.ZstdCompressor(write_content_size=known)
    if known:
        return b"".join(packer.compress(data[a : a + step]) for a in range(0, max(len(data), 1), step))
    out = b""
    for a in range(0, max(len(data), 1), step):
        stream = packer.compressobj()
        out += stream.compress(data[a : a + step]) + stream.flush()
    return out


def test_a_range_of_a_file_is_counted_from_its_start_and_ends_at_its_stop(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    with opened(tmp_path, [Source("f", 2, 7)]) as sources:
        assert read(sources, 0, 1, 4) == b"3456"
        for start, n in ((1, 5), (-1, 2), (6, 1)):
            with pytest.raises(Damaged, match="ends too early"):
                read(sources, 0, start, n)
        assert sources.read_nbytes == 4


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (5, 3), (11, None), (-1, 3)])
def test_a_range_outside_its_file_is_damaged(tmp_path, start, stop):
    (tmp_path / "f").write_bytes(b"0123456789")
    with opened(tmp_path, [Source("f", start, stop)]) as sources, pytest.raises(Damaged):
        read(sources, 0, 0, 1)


def test_a_file_that_vanishes_is_missing(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    with opened(tmp_path, [Source("f")]) as sources:
        (tmp_path / "f").unlink()
        with pytest.raises(MissingFile) as err:
            read(sources, 0, 0, 1)
    assert err.value.where == str(tmp_path / "f")


def test_an_unknown_codec_is_unsupported(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    with opened(tmp_path, [Source("f", codec="lz4")]) as sources, pytest.raises(Unsupported, match="lz4"):
        read(sources, 0, 0, 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_members_decode_in_memory_or_to_scratch(tmp_path, known, parts, size):
    data = (random.Random(1).randbytes(1000) * (size // 1000 + 1))[:size]
    packed = frames(data, parts, known)
    (tmp_path / "f").write_bytes(b"head" + packed + b"tail")
    source = Source("f", 4, 4 + len(packed), "zstd", size if known else -1)
    with opened(tmp_path, [source]) as sources:
        for start, n in ((0, size), (size // 2, size // 3), (size, 0)):
            assert read(sources, 0, start, n) == data[start : start + n]
        with pytest.raises(Damaged, match="ends too early"):
            read(sources, 0, size, 1)
        assert sources.read_nbytes == len(packed)
        scratch = [p.stat().st_size for p in (tmp_path / "scratch").iterdir()]
        assert scratch == ([size] if size > 1 << 19 else [])


def test_members_that_do_not_fit_together_are_decoded_again(tmp_path):
    data = [bytes([i]) * 400_000 for i in range(4)]
    packed = [frames(d) for d in data]
    (tmp_path / "f").write_bytes(b"".join(packed))
    at = [sum(map(len, packed[:i])) for i in range(5)]
    made = [Source("f", at[i], at[i + 1], "zstd", 400_000) for i in range(4)]
    with opened(tmp_path, made) as sources:
        for _ in range(3):
            for i in range(4):
                assert read(sources, i, 399_999, 1) == bytes([i])
        assert sources.read_nbytes == 3 * len(b"".join(packed))
        for _ in range(3):
            read(sources, 3, 0, 1)
            read(sources, 2, 0, 1)
        assert sources.read_nbytes == 3 * len(b"".join(packed))


@pytest.mark.parametrize(
    ("how", "known"),
    [*product(["cut", "flipped", "header", "nothing"], [True, False]), ("more", True), ("less", True)],
)
def test_broken_members_are_damaged(tmp_path, how, known):
    data = random.Random(1).randbytes(50_000)
    compressor = zstandard.ZstdCompressor(write_checksum=True, write_content_size=known)
    packed = bytearray(compressor.compress(data))
    size = len(data)
    if how == "cut":
        del packed[-1000:]
    elif how == "flipped":
        packed[len(packed) // 2] ^= 1
    elif how == "header":
        packed[0] ^= 1
    elif how == "nothing":
        packed = bytearray(b"no frame at all")
    else:
        size += 1 if how == "more" else -1
    (tmp_path / "f").write_bytes(packed)
    source = Source("f", codec="zstd", decoded_nbytes=size if known else -1)
    with opened(tmp_path, [source]) as sources, pytest.raises(Damaged) as err:
        read(sources, 0, 0, 10)
    assert (err.value.code, err.value.where) == ("compressed-corrupt", str(tmp_path / "f"))


@pytest.mark.parametrize("known", [1000, -1])
def test_a_bomb_stops_at_its_named_size_or_the_free_space(tmp_path, known):
    stream = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 20)
    packed = b"".join(stream.compress(zeros) for _ in range(300)) + stream.flush()
    (tmp_path / "f").write_bytes(packed)
    assert len(packed) < 40_000
    source = Source("f", codec="zstd", decoded_nbytes=known)

    def used():
        return sum(p.stat().st_size for p in (tmp_path / "scratch").iterdir())

    with opened(tmp_path, [source], room=lambda: (30 << 20) - used()) as sources, pytest.raises(CkptError) as err:
        read(sources, 0, 0, 10)
    assert isinstance(err.value, Damaged if known > 0 else NoSpace)
    assert used() <= 30 << 20


def test_a_frame_that_wants_too_much_memory_is_unsupported(tmp_path):
    how = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    packed = zstandard.ZstdCompressor(compression_params=how).compressobj()
    (tmp_path / "f").write_bytes(packed.compress(random.Random(1).randbytes(1000)) + packed.flush())
    source = Source("f", codec="zstd", decoded_nbytes=1000)
    with opened(tmp_path, [source]) as sources, pytest.raises(Unsupported, match="more memory") as err:
        read(sources, 0, 0, 10)
    assert "--memory" in err.value.fix


def member_job(tmp_path, sizes, extent_nbytes=5000):
    rng = random.Random(1)
    data = [rng.randbytes(n) for n in sizes]
    (tmp_path / "source").mkdir()
    tensors, sources, segments = {}, [], []
    for i, d in enumerate(data):
        (tmp_path / "source" / str(i)).write_bytes(frames(d, 2))
        sources.append(Source(str(i), codec="zstd", decoded_nbytes=len(d)))
        key = Key(str(i))
        tensors[key] = Tensor(key, U1, (len(d),), (PieceTable.whole((len(d),), 1, i, 0),))
        segments.append(Region(key, U1, (len(d),), (0,), (len(d),)))
    plan = Plan((OutputFile("", lambda: segments),), SourceIndex(tensors, sources), extent_nbytes=extent_nbytes)
    return Job(plan, check(plan), sources, tmp_path / "source", tmp_path / "made", False), b"".join(data)


def test_a_job_over_members(tmp_path, monkeypatch):
    made, wanted = member_job(tmp_path, [10, 30_000, 200_000, 0, 90_000])
    sizes = job.Sizes(1 << 20, 1000, 4000, 20_000, 1 << 20, 100_000, 50_000)
    monkeypatch.setattr(job, "sizes_of", lambda *_: sizes)
    assert space(made)[0] == len(wanted) + 290_000
    run(made, Budget(jobs=3))
    assert (tmp_path / "made").read_bytes() == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


def test_a_job_over_members_is_stopped_and_resumed(tmp_path, monkeypatch):
    made, wanted = member_job(tmp_path, [10, 30_000, 200_000, 0, 90_000])
    sizes = job.Sizes(1 << 20, 1000, 4000, 20_000, 1 << 20, 100_000, 50_000)
    monkeypatch.setattr(job, "sizes_of", lambda *_: sizes)
    with monkeypatch.context() as patch:
        stop_after(patch, 20)
        with pytest.raises(KeyboardInterrupt):
            run(made, Budget(jobs=1))
    assert run(made, resume=True).resumed_nbytes == 20 * 5000
    assert (tmp_path / "made").read_bytes() == wanted


def test_decoding_stops_with_the_job(tmp_path):
    (tmp_path / "f").write_bytes(frames(bytes(50 << 20)))
    with opened(tmp_path, [Source("f", codec="zstd", decoded_nbytes=50 << 20)]) as sources:
        calls = []

        def go_on():
            calls.append(1)
            if len(calls) == 3:
                raise Stopped

        sources.go_on = go_on
        with pytest.raises(Stopped):
            read(sources, 0, 0, 10)
    assert len(calls) == 3


def test_neighbours_are_read_at_once_and_far_bytes_are_not(tmp_path):
    data = random.Random(1).randbytes(1 << 20)
    (tmp_path / "f").write_bytes(data)
    out = memoryview(bytearray(60_000))
    with opened(tmp_path, [Source("f")]) as sources:
        reads = Reads(sources)
        calls = []
        real = sources.read
        sources.read = lambda *a: (calls.append(a), real(*a))
        runs = [(0, 100), (100, 100), (300, 50), (4000, 10), (500_000, 30_000), (531_000, 100), (600_000, 10)]
        at = 0
        for start, n in runs:
            reads.add(0, start, n, out, at)
            at += n + 1
        reads.flush()
        at = 0
        for start, n in runs:
            assert out[at : at + n] == data[start : start + n]
            at += n + 1
        assert [(c[1], c[3]) for c in calls] == [(0, 4010), (500_000, 31_100), (600_000, 10)]


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_open_files_stay_few_and_those_in_use_stay_open(tmp_path):
    for i in range(20):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    before = descriptors()
    with OpenFiles(os.O_RDONLY, limit=4) as files, files.use(str(tmp_path / "0")) as held:
        for i in range(20):
            with files.use(str(tmp_path / str(i))) as fd:
                assert os.pread(fd, 9, 0) == bytes([i])
            assert descriptors() <= before + 5
        assert os.pread(held, 9, 0) == b"\0"
    assert descriptors() == before


def test_memory_is_given_out_up_to_its_size():
    stop, order = Event(), []
    memory = Memory(10, stop)

    def late():
        with memory.held(5):
            order.append("late")

    thread = Thread(target=late)
    with memory.held(7):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    with memory.held(100):
        order.append("more than all")
    assert order == ["first", "late", "more than all"]
    with memory.held(10):
        stop.set()
        with pytest.raises(Stopped), memory.held(1):
            pass


def test_buffers_go_back_to_the_system():
    def resident():
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    held = buffer(64 << 20)
    held[:] = 1
    assert resident() - before > 60 << 20
    del held
    assert resident() - before < 8 << 20
    assert len(buffer(0)) == 0


def test_a_job_of_members_with_wrong_sizes_is_damaged(tmp_path):
    made, _ = member_job(tmp_path, [10, 30_000])
    wrong = [made.sources[0], replace(made.sources[1], decoded_nbytes=40_000)]
    with pytest.raises(Damaged, match="cannot be decoded"):
        run(replace(made, sources=wrong))
    assert not (tmp_path / "made").exists()
