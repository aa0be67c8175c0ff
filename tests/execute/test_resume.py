"""Jobs that are stopped: by signals, by kill -9 at any moment, by a full disk; and what --resume does and refuses."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from ckptctl.core.errors import CkptError, Interrupted, NoSpace, SourceChanged
from ckptctl.core.output import OutputFile, Put
from ckptctl.execute import Budget, Job, journal, run, target, work
from ckptctl.plan.check import check
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import Plan
from tests.support.checkpoints import ROOT
from tests.support.plans import random_case, stop_after

PARTIAL = ".made.ckptctl-partial"


def stopped(tmp_path, monkeypatch, seed=16, n=5):
    """A case whose job was stopped after n gangs."""
    case = random_case(seed, scale=20, extent_nbytes=300)
    with monkeypatch.context() as patch:
        stop_after(patch, n)
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path), Budget(jobs=1))
    assert not (tmp_path / "made").exists()
    assert (tmp_path / PARTIAL / "journal.jsonl").exists()
    return case


def lines(tmp_path):
    return (tmp_path / PARTIAL / "journal.jsonl").read_bytes().splitlines(keepends=True)


def test_a_stopped_job_goes_on_where_it_was(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch)
    held = [json.loads(line) for line in lines(tmp_path)[1:]]
    outcome = run(case.job(tmp_path), resume=True)
    assert case.found(tmp_path) == case.wanted
    assert outcome.resumed_nbytes == sum(stop - start for _, start, stop, *_ in held) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


def test_without_resume_a_stopped_job_starts_anew(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch)
    (tmp_path / PARTIAL / "out" / "made" / "stray").write_text("from another job")
    assert run(case.job(tmp_path)).resumed_nbytes == 0
    assert case.found(tmp_path) == case.wanted


def test_resume_without_a_journal_starts_anew_and_says_so(tmp_path):
    case = random_case(16)
    outcome = run(case.job(tmp_path), resume=True)
    assert outcome.notes == ("there was no interrupted job to go on with: started anew",)
    assert case.found(tmp_path) == case.wanted


@pytest.mark.parametrize(
    "torn", [b"[0,1", b'[0,1,2,"x"]\n', b"\0" * 20, b"null\n", b"[" * 5000 + b"\n", b"\xff\n", b"{}\n"]
)
def test_a_torn_last_line_is_ignored(tmp_path, monkeypatch, torn):
    case = stopped(tmp_path, monkeypatch)
    with (tmp_path / PARTIAL / "journal.jsonl").open("ab") as file:
        file.write(torn)
    assert run(case.job(tmp_path), resume=True).resumed_nbytes > 0
    assert case.found(tmp_path) == case.wanted


def test_a_torn_first_line_means_there_is_no_journal(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch)
    (tmp_path / PARTIAL / "journal.jsonl").write_bytes(lines(tmp_path)[0][:-9])
    outcome = run(case.job(tmp_path), resume=True)
    assert (outcome.resumed_nbytes, len(outcome.notes)) == (0, 1)
    assert case.found(tmp_path) == case.wanted


def test_a_lost_output_file_is_made_again(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch, n=40)
    for path in (tmp_path / PARTIAL / "out").rglob("file*"):
        path.unlink()
    assert run(case.job(tmp_path), resume=True).resumed_nbytes == 0
    assert case.found(tmp_path) == case.wanted


def test_after_a_restart_of_the_machine_only_verified_extents_are_kept(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch, n=8)
    held = [json.loads(line) for line in lines(tmp_path)[1:]]
    number, start, stop, *_ = held[2]
    path = tmp_path / PARTIAL / "out" / "made" / case.plan.files[number].path
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(journal, "boot_id", lambda: "another")
        outcome = run(case.job(tmp_path), resume=True)
    assert outcome.resumed_nbytes == sum(b - a for _, a, b, *_ in held) - (stop - start)
    assert case.found(tmp_path) == case.wanted


def test_after_a_restart_extents_without_checksum_are_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "DIRECT_NBYTES", 1)
    monkeypatch.setattr(work, "DIRECT_ALIGNMENT", 1)
    case = stopped(tmp_path, monkeypatch, seed=17, n=70)
    held = [json.loads(line) for line in lines(tmp_path)[1:]]
    sure = sum(b - a for _, a, b, _, crc in held if crc is not None)
    monkeypatch.setattr(journal, "boot_id", lambda: "")
    outcome = run(case.job(tmp_path), resume=True)
    assert outcome.resumed_nbytes == sure < sum(b - a for _, a, b, *_ in held)
    assert case.found(tmp_path) == case.wanted


def changed(case, made, what, tmp_path):
    if what == "fingerprint":
        return replace(made, fingerprint={"test": 2}), "fingerprint test: 1 then, 2 now"
    if what == "plan":
        file = case.plan.files[0]
        more = replace(
            case.plan, files=(OutputFile(file.path, lambda: [*file.segments, Put(b"x")]), *case.plan.files[1:])
        )
        return replace(made, plan=more, totals=check(more)), "the plan"
    if what == "extents":
        more = replace(case.plan, extent_nbytes=301)
        return replace(made, plan=more, totals=check(more)), "the size of extents (--memory): 300 then, 301 now"
    path = tmp_path / "source" / str(journal.used_sources(case.plan)[0])
    if what == "time":
        os.utime(path, (5, 5))
        return made, f"sources {path.name} mtime_ns"
    if what == "bytes":
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return made, f"sources {path.name} ends"
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["fingerprint", "plan", "extents", "time", "bytes"])
def test_another_job_does_not_go_on(tmp_path, monkeypatch, what):
    case = stopped(tmp_path, monkeypatch)
    made, why = changed(case, case.job(tmp_path), what, tmp_path)
    with pytest.raises(SourceChanged) as err:
        run(made, resume=True)
    assert why in err.value.why
    assert (tmp_path / PARTIAL / "out").exists()
    assert not (tmp_path / "made").exists()


def test_another_version_does_not_go_on(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch)
    monkeypatch.setattr("ckptctl.__version__", "99.0")
    with pytest.raises(SourceChanged, match="not the one") as err:
        run(case.job(tmp_path), resume=True)
    assert '"99.0" now' in err.value.why


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_killed_between_the_rename_and_cleaning_up(tmp_path, monkeypatch, overwrite, resume):
    case = random_case(16)
    if overwrite:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "old").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(target.Partial, "discard", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path), overwrite=overwrite)
    assert case.found(tmp_path) == case.wanted
    if resume:
        outcome = run(case.job(tmp_path), resume=True, overwrite=overwrite)
        assert outcome.notes == ("the interrupted job was already complete",)
    else:
        with pytest.raises(CkptError, match="already there"):
            run(case.job(tmp_path))
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_killed_while_it_cleans_up(tmp_path, monkeypatch, overwrite, resume):
    """The folder has its last name, and a part of it is gone; the journal goes last."""
    case = random_case(16)
    if overwrite:
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "old").write_text("old")
    with monkeypatch.context() as patch:
        real = target._remove

        def remove(path):
            if path.name == ".made.ckptctl-old":
                raise KeyboardInterrupt
            real(path)

        patch.setattr(target, "_remove", remove)
        patch.setattr(target.Partial, "_settle", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path), overwrite=overwrite)
    assert case.found(tmp_path) == case.wanted
    assert [p.name for p in (tmp_path / ".made.ckptctl-old").iterdir()] == ["journal.jsonl"]
    if resume:
        outcome = run(case.job(tmp_path), resume=True)
        assert outcome.notes == ("the interrupted job was already complete",)
    else:
        with pytest.raises(CkptError, match="already there"):
            run(case.job(tmp_path))
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


def test_another_job_does_not_take_a_finished_one_for_its_own(tmp_path, monkeypatch):
    case = random_case(16)
    with monkeypatch.context() as patch:
        patch.setattr(target, "remove_old", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path))
    with pytest.raises(SourceChanged):
        run(replace(case.job(tmp_path), fingerprint={"conversion": "another"}), resume=True)
    assert case.found(tmp_path) == case.wanted


def test_a_source_that_was_rewritten_with_its_size_and_time_put_back_is_another(tmp_path, monkeypatch):
    case = stopped(tmp_path, monkeypatch)
    file = next(p for p in sorted((tmp_path / "source").rglob("*")) if p.is_file())
    status = file.stat()
    file.write_bytes(file.read_bytes())  # the ends are the same, too
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SourceChanged, match="not the one") as err:
        run(case.job(tmp_path), resume=True)
    assert "ctime_ns" in err.value.why


def test_dots_behind_a_folder_that_is_not_there_leave_none(tmp_path):
    case = random_case(16)
    run(replace(case.job(tmp_path), target=tmp_path / "sub" / ".." / "made"))
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


def test_killed_between_two_renames_brings_the_old_target_back(tmp_path, monkeypatch):
    case = random_case(16)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(target, "rename", lambda *_: False)
        real = target.Path.rename

        def rename(self, to):
            if self.parent.name == "out":
                raise KeyboardInterrupt
            return real(self, to)

        patch.setattr(target.Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path), overwrite=True)
    assert not (tmp_path / "made").exists()
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            run(case.job(tmp_path), overwrite=True)
    assert (tmp_path / "made" / "old").read_text() == "old"
    run(case.job(tmp_path), overwrite=True)
    assert case.found(tmp_path) == case.wanted


CHILD = textwrap.dedent("""
    import os, random, signal, sys, time
    from pathlib import Path
    from ckptctl.execute import Budget, run, work
    from tests.support.plans import random_case, stop_after

    folder, seed, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so do theirs
    os.fsync = lambda fd: None
    real = os.pwrite

    def pwrite(fd, data, at):
        time.sleep(pause)
        # Not all at once: a kill finds half-written extents.
        n = real(fd, data[: len(data) // 2 + 1], at)
        return n if n == len(data) else n + real(fd, data[n:], at + n)

    os.pwrite = pwrite
    case = random_case(seed, scale=20, extent_nbytes=400)
    print("go", flush=True)
    outcome = run(case.job(folder), Budget(jobs=2), resume=True)
    print(outcome.resumed_nbytes, flush=True)
""")


def child(tmp_path, seed, pause=0.002):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(seed), str(pause)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def forked(case, tmp_path, rng):
    """A child that writes slowly and in halves, so that a kill finds half-written extents; killed at some moment."""
    pid = os.fork()
    if not pid:
        real = os.pwrite

        def pwrite(fd, data, at):
            time.sleep(0.002)
            n = real(fd, data[: len(data) // 2 + 1], at)
            return n if n == len(data) else n + real(fd, data[n:], at + n)

        os.pwrite = pwrite
        try:
            run(case.job(tmp_path), Budget(jobs=2), resume=True)
        finally:
            os._exit(0)
    time.sleep(rng.uniform(0, 0.15))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_killed_at_twenty_moments_and_resumed(tmp_path):
    rng, held = random.Random(1), []
    case = random_case(16, scale=20, extent_nbytes=400)
    case.job(tmp_path)
    for _ in range(20):
        forked(case, tmp_path, rng)
        if (tmp_path / "made").exists():
            assert case.found(tmp_path) == case.wanted
            shutil.rmtree(tmp_path / "made")
            shutil.rmtree(tmp_path / PARTIAL, ignore_errors=True)
        held.append(len(lines(tmp_path)) if (tmp_path / PARTIAL / "journal.jsonl").exists() else 0)
    assert max(held) > 20
    run(case.job(tmp_path), resume=True)
    assert case.found(tmp_path) == case.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_promptly_and_resume_goes_on(tmp_path, number):
    seed = 16
    case = random_case(seed, scale=20, extent_nbytes=400)
    with child(tmp_path, seed, 0.02) as process:
        assert process.stdout.readline() == "go\n"
        begun = time.monotonic()
        while not (tmp_path / PARTIAL / "journal.jsonl").exists() or len(lines(tmp_path)) < 4:
            assert process.poll() is None
            assert time.monotonic() - begun < 60
            time.sleep(0.01)
        started = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 10
    assert ("Interrupted" if number == signal.SIGTERM else "KeyboardInterrupt") in err
    assert not (tmp_path / "made").exists()
    assert run(case.job(tmp_path), Budget(jobs=2), resume=True).resumed_nbytes > 0
    assert case.found(tmp_path) == case.wanted


def test_sigterm_is_resumable_and_the_old_handler_comes_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    case = random_case(16)
    with pytest.raises(Interrupted, match="told to stop") as err:
        run(case.job(tmp_path), before_commit=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert (err.value.exit_code, signal.getsignal(signal.SIGTERM)) == (5, before)


def full_after(monkeypatch, n, code=errno.ENOSPC):
    real, left = os.pwrite, [n]

    def pwrite(fd, data, at):
        if left[0] < len(data):
            raise OSError(code, os.strerror(code))
        left[0] -= len(data)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_leaves_nothing_and_resume_goes_on(tmp_path, monkeypatch, code):
    case = random_case(16, scale=20, extent_nbytes=300)
    with monkeypatch.context() as patch:
        full_after(patch, 2000, code)
        with pytest.raises(NoSpace) as err:
            run(case.job(tmp_path), Budget(jobs=2))
    assert (err.value.exit_code, "--resume" in err.value.fix) == (3, True)
    assert not (tmp_path / "made").exists()
    assert run(case.job(tmp_path), resume=True).resumed_nbytes > 0
    assert case.found(tmp_path) == case.wanted


def test_a_limit_on_file_size_is_no_space(tmp_path):
    case = random_case(16, scale=20, extent_nbytes=300)
    made = case.job(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(NoSpace):
            run(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert not (tmp_path / "made").exists()
    run(made, resume=True)
    assert case.found(tmp_path) == case.wanted


def test_too_little_space_is_said_before_the_first_byte(tmp_path, monkeypatch):
    case = random_case(16, scale=20)
    monkeypatch.setattr(target, "free_nbytes", lambda _: 10)
    with pytest.raises(NoSpace, match="are needed, 10 are free") as err:
        run(case.job(tmp_path))
    assert str(sum(map(len, case.wanted.values()))) in err.value.what
    assert not (tmp_path / PARTIAL / "out").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_really_full_disk(tmp_path, small_disk):
    data = random.Random(1).randbytes(200_000)
    plan = Plan((OutputFile("a", lambda: [Put(data)]), OutputFile("b", lambda: [Put(b"x")])), SourceIndex({}, []))
    made = Job(plan, check(plan), [], tmp_path / "source", small_disk / "made", True)
    (small_disk / "other").write_bytes(bytes(100_000))
    with pytest.raises(NoSpace):
        run(made)
    assert not (small_disk / "made").exists()
    (small_disk / "other").unlink()
    run(made, resume=True)
    assert (small_disk / "made" / "a").read_bytes() == data


def test_the_same_disk_filling_up_while_the_job_runs(tmp_path, small_disk, monkeypatch):
    data = random.Random(1).randbytes(200_000)
    plan = Plan((OutputFile("", lambda: [Put(data)]),), SourceIndex({}, []), extent_nbytes=20_000)
    made = Job(plan, check(plan), [], tmp_path / "source", small_disk / "made", False)
    # Without blocks taken beforehand, as on file systems that cannot.
    monkeypatch.setattr(target, "allocate", os.ftruncate)
    monkeypatch.setattr(target, "free_nbytes", lambda _: 1 << 40)
    (small_disk / "other").write_bytes(bytes(100_000))
    with pytest.raises(NoSpace):
        run(made)
    assert not (small_disk / "made").exists()
    (small_disk / "other").unlink()
    assert run(made, resume=True).resumed_nbytes > 0
    assert (small_disk / "made").read_bytes() == data


def test_a_folder_without_rights_is_said(tmp_path):
    plan = Plan((OutputFile("", lambda: [Put(b"x")]),), SourceIndex({}, []))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CkptError) as err:
        run(Job(plan, check(plan), [], tmp_path / "source", tmp_path / "file" / "made", False))
    assert err.value.code == "write-failed"
