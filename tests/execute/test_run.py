"""Jobs from sources to a folder or file under its name: bytes, refusals, what is left behind."""

import hashlib
import os
import random
import resource
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import CkptError, Damaged, Mismatch, MissingFile, SourceChanged, Unsafe, Unsupported, Usage
from ckptctl.core.output import OutputFile, Put, Region
from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
from ckptctl.execute import Budget, Job, fitted, job, reread, run, space, work
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from ckptctl.plan.steps import Cast
from tests.support.plans import random_case


def tight(monkeypatch, rng):
    """Buffers of a few bytes, so that small tensors go through every edge of them."""
    chunk, window, gang = rng.choice([16, 100, 1000]), rng.choice([64, 500, 5000]), rng.choice([100, 10000])
    sizes = job.Sizes(1 << 20, chunk, window, gang, 1 << 20, 0, 0)
    monkeypatch.setattr(job, "sizes_of", lambda *_: sizes)


def one_tensor(tmp_path, data, shape=None, dtype="uint8", regions=None, **how):
    """A job that copies one tensor to a file."""
    kind = BY_NAME[dtype]
    shape = shape or (len(data) // kind.itemsize,)
    (tmp_path / "source").write_bytes(data)
    key = Key("t")
    tensor = Tensor(key, kind, shape, (PieceTable.whole(shape, kind.itemsize, 0, 0),))
    sources = [Source("")]
    segments = regions or [Region(key, kind, shape, (0,) * len(shape), shape)]
    plan = Plan((OutputFile("", lambda: segments),), SourceIndex({key: tensor}, sources), **how)
    return Job(plan, check(plan), sources, tmp_path / "source", tmp_path / "made", False)


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_make_the_bytes_that_numpy_makes(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    case = random_case(seed, scale=rng.choice([1, 1, 10, 40]))
    if rng.random() < 0.7:
        tight(monkeypatch, rng)
    outcome = run(case.job(tmp_path), Budget(jobs=rng.randint(1, 4)))
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]
    assert outcome.written_nbytes == sum(map(len, case.wanted.values()))
    for path, crc in outcome.checksums.items():
        assert crc in (None, zlib.crc32(case.wanted[path]))


@pytest.mark.parametrize("direct", [True, False])
def test_long_runs_are_copied_by_the_kernel_or_through_memory(tmp_path, monkeypatch, direct):
    rng = random.Random(1)
    data = rng.randbytes(5 << 20)
    made = one_tensor(tmp_path, data)
    monkeypatch.setattr(work, "DIRECT_NBYTES", 1 << 20 if direct else 1 << 60)
    outcome = run(made)
    assert (tmp_path / "made").read_bytes() == data
    assert outcome.direct_nbytes == (len(data) if direct else 0)
    assert outcome.checksums == {"": None if direct else zlib.crc32(data)}
    assert outcome.read_nbytes == len(data)


@pytest.mark.parametrize(("header", "direct"), [(8, False), (4096, True)])
def test_the_kernel_copies_only_where_pages_agree(tmp_path, header, direct):
    data = random.Random(1).randbytes(3 << 20)
    region = Region(Key("t"), BY_NAME["uint8"], (len(data),), (0,), (len(data),))
    outcome = run(one_tensor(tmp_path, data, regions=[Put(bytes(header)), region]))
    assert (tmp_path / "made").read_bytes() == bytes(header) + data
    assert outcome.direct_nbytes == (len(data) if direct else 0)


def test_asked_for_checksums_are_there_for_all_files(tmp_path):
    data = random.Random(1).randbytes(3 << 20)
    outcome = run(one_tensor(tmp_path, data), checksums=True)
    assert (outcome.checksums, outcome.direct_nbytes) == ({"": zlib.crc32(data)}, 0)


def refusing(number):
    def copy_file_range(*_):
        raise OSError(number, os.strerror(number))

    return copy_file_range


@pytest.mark.parametrize("number", [18, 38, 22, 95])  # EXDEV, ENOSYS, EINVAL, EOPNOTSUPP
def test_where_the_kernel_does_not_copy_memory_does(tmp_path, monkeypatch, number):
    data = random.Random(1).randbytes(3 << 20)
    monkeypatch.setattr(os, "copy_file_range", refusing(number))
    outcome = run(one_tensor(tmp_path, data))
    assert (tmp_path / "made").read_bytes() == data
    assert outcome.direct_nbytes == 0


def test_a_kernel_that_gives_up_in_the_middle_is_helped_out(tmp_path, monkeypatch):
    data = random.Random(1).randbytes(3 << 20)
    real, calls = os.copy_file_range, []

    def some(src, dst, n, a, b):
        calls.append(n)
        if len(calls) > 2:
            raise OSError(18, "no")
        return real(src, dst, 1000, a, b)

    monkeypatch.setattr(os, "copy_file_range", some)
    outcome = run(one_tensor(tmp_path, data), Budget(jobs=1))
    assert (tmp_path / "made").read_bytes() == data
    assert outcome.direct_nbytes == 2000


def test_files_and_folders_are_on_the_disk_before_the_name(tmp_path, monkeypatch, synced):
    case = random_case(3)
    seen = []
    monkeypatch.setattr("ckptctl.execute.target.rename", lambda *_: seen.extend(synced))
    run(case.job(tmp_path))
    out = tmp_path / ".made.ckptctl-partial" / "out" / "made"
    assert {str(out / p) for p in case.wanted} | {str(out)} <= set(seen)
    assert synced[-1] == str(tmp_path)


def test_a_plan_of_empty_files_makes_empty_files(tmp_path):
    plan = Plan((OutputFile("a", list), OutputFile("b/c", lambda: [Put(b"")])), SourceIndex({}, []))
    outcome = run(Job(plan, check(plan), [], tmp_path / "source", tmp_path / "made", True))
    assert [p.stat().st_size for p in (tmp_path / "made/a", tmp_path / "made/b/c")] == [0, 0]
    assert (outcome.written_nbytes, outcome.read_nbytes, outcome.checksums) == (0, 0, {"a": 0, "b/c": 0})


def test_a_plan_without_files_makes_an_empty_folder(tmp_path):
    plan = Plan((), SourceIndex({}, []))
    run(Job(plan, check(plan), [], tmp_path / "source", tmp_path / "made", True))
    assert list((tmp_path / "made").iterdir()) == []


def test_the_source_is_never_written(tmp_path):
    case = random_case(5, scale=10)
    made = case.job(tmp_path)

    def state():
        files = sorted((tmp_path / "source").iterdir())
        return [(p.name, p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files]

    before = state()
    for path in (tmp_path / "source").iterdir():
        path.chmod(0o400)
    run(made)
    assert state() == before


def test_an_existing_target_is_refused(tmp_path):
    case = random_case(7)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "mine").write_text("keep")
    with pytest.raises(Usage, match="already there") as err:
        run(case.job(tmp_path))
    assert err.value.exit_code == 2
    assert (tmp_path / "made" / "mine").read_text() == "keep"


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("old", ["folder", "file", "link", "dangling"])
def test_overwrite_replaces_what_was_there_when_the_new_is_whole(tmp_path, monkeypatch, exchange, old):
    case = random_case(7)
    target = tmp_path / "made"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("x")
    if old == "folder":
        target.mkdir()
        (target / "mine").write_text("gone")
    elif old == "file":
        target.write_text("gone")
    else:
        target.symlink_to("elsewhere" if old == "link" else "nowhere")
    if not exchange:
        monkeypatch.setattr("ckptctl.execute.target.rename", lambda *_: False)

    def stands(_):
        assert os.path.lexists(target)
        assert not (target / "a").exists()

    run(case.job(tmp_path), overwrite=True, before_commit=stands)
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "made", "source"]
    assert (tmp_path / "elsewhere" / "x").read_text() == "x"


def test_what_before_commit_raises_stops_the_commit(tmp_path):
    case = random_case(7)

    def look(path):
        assert {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} == set(case.wanted)
        raise Damaged("seen")

    with pytest.raises(Damaged, match="seen"):
        run(case.job(tmp_path), before_commit=look)
    assert not (tmp_path / "made").exists()
    outcome = run(case.job(tmp_path), resume=True)
    assert outcome.resumed_nbytes == sum(map(len, case.wanted.values()))
    assert case.found(tmp_path) == case.wanted


def test_a_result_that_is_not_what_it_should_be_is_removed(tmp_path):
    case = random_case(7)

    def look(_):
        raise Mismatch("other")

    with pytest.raises(Mismatch, match="other"):
        run(case.job(tmp_path), before_commit=look)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_target_that_turns_up_meanwhile_is_not_replaced(tmp_path):
    case = random_case(7)
    with pytest.raises(Usage, match=r"already there|turned up"):
        run(case.job(tmp_path), before_commit=lambda _: (tmp_path / "made").write_text("mine"))
    assert (tmp_path / "made").read_text() == "mine"


def test_source_and_target_must_be_apart(tmp_path):
    case = random_case(7)
    made = case.job(tmp_path)
    (tmp_path / "link").symlink_to("source")
    wrong = ["source", "source/inside", "link", "link/inside", "."]
    for name in wrong:
        with pytest.raises(Usage):
            run(replace(made, target=tmp_path / name), overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "source"]


@pytest.mark.parametrize("name", ["", "/", "..", "x/.."])
def test_a_target_without_a_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    made = random_case(7).job(tmp_path / "below")
    with pytest.raises(Usage):
        run(replace(made, target=Path(name)), overwrite=True)


def test_a_source_file_linked_from_inside_the_target_is_not_replaced(tmp_path):
    case = random_case(7)
    made = case.job(tmp_path)
    (tmp_path / "made").mkdir()
    for path in (tmp_path / "source").iterdir():
        path.rename(tmp_path / "made" / path.name)
        path.symlink_to(tmp_path / "made" / path.name)
    with pytest.raises(Usage, match="inside the target"):
        run(made, overwrite=True)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a//b", "a/./b", "a\0b"])
def test_files_that_would_leave_the_target_are_refused(tmp_path, path):
    plan = Plan((OutputFile(path, lambda: [Put(b"x")]),), SourceIndex({}, []))
    with pytest.raises(Unsafe):
        run(Job(plan, check(plan), [], tmp_path / "source", tmp_path / "made", True))
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_on_one_target_second_is_told(tmp_path):
    case = random_case(7)
    made = case.job(tmp_path)

    def second(_):
        for resume in (False, True):
            with pytest.raises(CkptError) as err:
                run(made, resume=resume)
            assert (err.value.code, err.value.exit_code) == ("busy", 3)

    run(made, before_commit=second)
    assert case.found(tmp_path) == case.wanted


def test_a_vanished_source_is_named(tmp_path):
    case = random_case(7)
    made = case.job(tmp_path)
    gone = next(iter(job.used_sources(case.plan)))
    (tmp_path / "source" / str(gone)).unlink()
    with pytest.raises(MissingFile) as err:
        run(made)
    assert str(gone) in err.value.where
    assert not (tmp_path / "made").exists()


def test_a_source_that_is_cut_short_is_damaged(tmp_path):
    data = random.Random(1).randbytes(3 << 20)
    made = one_tensor(tmp_path, data)
    os.truncate(tmp_path / "source", 2 << 20)
    with pytest.raises(Damaged, match="ends too early") as err:
        run(made)
    assert str(tmp_path / "source") in err.value.where


def test_a_source_that_shrinks_while_it_is_read_is_damaged(tmp_path, monkeypatch):
    data = random.Random(1).randbytes(3 << 20)
    made = one_tensor(tmp_path, data)
    real = work.Worker.do

    def do(self, gang):
        os.truncate(tmp_path / "source", 1 << 20)
        return real(self, gang)

    monkeypatch.setattr(work.Worker, "do", do)
    for direct in (1 << 20, 1 << 60):
        monkeypatch.setattr(work, "DIRECT_NBYTES", direct)
        (tmp_path / "source").write_bytes(data)
        with pytest.raises(Damaged, match="ends too early"):
            run(made)


def test_a_source_that_is_written_to_meanwhile_is_noticed(tmp_path, monkeypatch):
    case = random_case(7)
    made = case.job(tmp_path)
    real = work.Worker.do

    def do(self, gang):
        path = tmp_path / "source" / str(job.used_sources(case.plan)[0])
        os.utime(path, (1, 1))
        return real(self, gang)

    monkeypatch.setattr(work.Worker, "do", do)
    with pytest.raises(SourceChanged) as err:
        run(made)
    assert "1000000000 ns" in err.value.why
    assert not (tmp_path / "made").exists()


def test_a_source_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    data = random.Random(1).randbytes(1 << 10)
    made = one_tensor(tmp_path, data)
    real = os.preadv

    def preadv(fd, views, at):
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path / "source":
            raise OSError(5, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CkptError) as err:
        run(made)
    assert (err.value.code, err.value.where) == ("read-failed", str(tmp_path / "source"))


def test_reads_that_stop_early_are_gone_on_with(tmp_path, monkeypatch):
    case = random_case(11, scale=40)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][: max(1, len(views[0]) // 2)]], at))
    run(case.job(tmp_path))
    assert case.found(tmp_path) == case.wanted


def test_progress_ends_with_all_bytes(tmp_path):
    case = random_case(11, scale=40)
    told = []
    run(case.job(tmp_path), progress=told.append)
    total = sum(map(len, case.wanted.values()))
    assert (told[-1].done_nbytes, told[-1].total_nbytes) == (total, total)
    assert told[-1].peak_rss_nbytes > 1 << 20


def test_a_run_in_another_thread_works_without_signals(tmp_path):
    case = random_case(11)
    thread = threading.Thread(target=run, args=(case.job(tmp_path),))
    thread.start()
    thread.join()
    assert case.found(tmp_path) == case.wanted


def test_thousands_of_sources_need_few_descriptors(tmp_path):
    n = 600
    root = tmp_path / "source"
    root.mkdir()
    for i in range(n):
        (root / str(i)).write_bytes(bytes([i % 251]) * 3)
    tensors, key = {}, Key("t")
    columns = np.arange(n, dtype=np.int64)
    table = PieceTable(
        (3 * n,), 1, columns[:, None] * 3, np.full((n, 1), 3, np.int64), columns.astype(np.int32), columns * 0, None
    )
    tensors[key] = Tensor(key, BY_NAME["uint8"], (3 * n,), (table,))
    sources = [Source(str(i)) for i in range(n)]
    segments = [Region(key, BY_NAME["uint8"], (3 * n,), (0,), (3 * n,))]
    files = tuple(OutputFile(str(i), lambda: segments) for i in range(20))
    plan = Plan(files, SourceIndex(tensors, sources), extent_nbytes=700)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 160, hard))
    try:
        run(Job(plan, check(plan), sources, root, tmp_path / "made", True), Budget(jobs=4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wanted = b"".join(bytes([i % 251]) * 3 for i in range(n))
    assert {p.read_bytes() for p in (tmp_path / "made").iterdir()} == {wanted}
    assert len(list(Path("/proc/self/fd").iterdir())) == used


def test_a_cast_of_integers_is_unsupported(tmp_path):
    made = one_tensor(tmp_path, b"12345678", dtype="int64")
    made = replace(made, plan=replace(made.plan, casts=frozenset([Cast("int64", "float32")])))
    with pytest.raises(Unsupported, match="int64 cannot be cast"):
        run(made)


def test_space_counts_the_result_and_leaves_nothing(tmp_path):
    case = random_case(7)
    need, free = space(replace(case.job(tmp_path), target=tmp_path / "not" / "there"))
    assert need == sum(map(len, case.wanted.values()))
    found = os.statvfs(tmp_path)
    assert abs(free - found.f_bavail * found.f_frsize) < 1 << 30
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def columns_job(tmp_path, tp):
    """A matrix cut to tp files by columns: each file's extents stretch over the whole source."""
    n = 2048
    data = np.arange(n * n, dtype="<u4").reshape(n, n)
    (tmp_path / "source").write_bytes(data.tobytes())
    key, kind = Key("t"), BY_NAME["uint32"]
    tensor = Tensor(key, kind, (n, n), (PieceTable.whole((n, n), 4, 0, 0),))
    w = n // tp
    files = tuple(OutputFile(str(r), lambda r=r: [Region(key, kind, (n, n), (0, r * w), (n, w))]) for r in range(tp))
    plan = Plan(files, SourceIndex({key: tensor}, [Source("")]), extent_nbytes=1 << 19)
    made = Job(plan, check(plan), [Source("")], tmp_path / "source", tmp_path / "made", True)
    return made, {str(r): np.ascontiguousarray(data[:, r * w : (r + 1) * w]).tobytes() for r in range(tp)}


def test_a_gang_reads_each_stretch_once(tmp_path):
    made, wanted = columns_job(tmp_path, 8)
    outcome = run(made)
    assert {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()} == wanted
    assert outcome.read_nbytes == 16 << 20
    assert reread(made, Budget()) == 1.0


def test_extents_shrink_where_gangs_would_read_a_stretch_often(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "sizes_of", lambda *_: job.Sizes(8 << 20, 1 << 16, 1 << 20, 1 << 20, 1 << 19, 0, 0))
    monkeypatch.setattr(job, "LEAST_EXTENT_NBYTES", 1 << 16)
    made, wanted = columns_job(tmp_path, 8)
    assert 3.9 < reread(made, Budget()) <= 4.0
    assert fitted(made, Budget()).plan.extent_nbytes == 1 << 17
    outcome = run(made)
    assert {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()} == wanted
    assert outcome.read_nbytes <= 1.25 * (16 << 20)
