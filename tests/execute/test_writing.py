"""Output bytes past the page cache: the same bytes, whatever the places, lengths and memory of the writes."""

from __future__ import annotations

import errno
import itertools
import os
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ckptctl.execute import writing
from ckptctl.execute.memory import aligned, buffer
from ckptctl.execute.system import file_system
from ckptctl.execute.writing import PAGE, Writer

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 1 << 20


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is large enough, and the cache is found slow at once."""
    monkeypatch.setattr(writing, "DIRECT_LEAST_NBYTES", 1)
    monkeypatch.setattr(writing, "LOOK_NBYTES", 1)
    monkeypatch.setattr(writing, "SLOW_SECONDS", 0.0)


def _target(folder: Path) -> str:
    path = folder / "out"
    path.write_bytes(bytes(SIZE))
    return os.fspath(path)


def _pieces(random: Random) -> list[tuple[int, int]]:
    """Stretches that cover a file, in any order: pages, parts of pages, single bytes."""
    cuts = {
        0,
        SIZE,
        *(random.randrange(SIZE) for _ in range(40)),
        *(PAGE * random.randrange(SIZE // PAGE) for _ in "12"),
    }
    cuts |= {c + 1 for c in list(cuts) if c < SIZE}
    edges = sorted(cuts)
    out = list(itertools.pairwise(edges))
    random.shuffle(out)
    return out


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lies_alike", [True, False])
def test_bytes_are_those_that_were_given(tmp_path: Path, seed: int, lies_alike: bool) -> None:
    random = Random(seed)
    wanted = np.frombuffer(random.randbytes(SIZE), np.uint8)
    path = _target(tmp_path)
    with Writer([path], [SIZE]) as writer:
        for start, stop in _pieces(random):
            memory = aligned(start if lies_alike else start + 1, stop - start)
            memory[:] = wanted[start:stop]
            writer.write(0, memory.data, start)
            writer.written(0, start, stop - start)
    assert (tmp_path / "out").read_bytes() == wanted.tobytes()


@pytest.mark.usefixtures("past")
def test_whole_pages_are_written_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _target(tmp_path)
    if file_system(path) not in {0xEF53, 0x58465342}:
        pytest.skip("the temporary folder's file system is not written directly")
    flags: list[int] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, f, *rest: flags.append(f) or real(p, f, *rest))
    with Writer([path], [SIZE]) as writer:
        writer.write(0, buffer(PAGE * 80).data, 0)  # through the cache: nothing is known yet
        assert not any(f & os.O_DIRECT for f in flags)
        writer.write(0, buffer(PAGE * 80).data, PAGE * 80)
        assert any(f & os.O_DIRECT for f in flags)


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize("when", ["open", "pwrite"])
def test_a_system_that_cannot_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path, flag = _target(tmp_path), getattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(writing, "file_system", lambda _: 0xEF53)
    direct: set[int] = set()
    real_open, real_pwrite = os.open, os.pwrite

    def opened(p: str, flags: int, *rest: int) -> int:
        if when == "open" and flags & flag:
            raise OSError(errno.EINVAL, "no direct writes here")
        fd = real_open(p, flags, *rest)
        if flags & flag:
            direct.add(fd)
        return fd

    def pwrite(fd: int, data: memoryview, start: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "not aligned as this disk wants it")
        return real_pwrite(fd, data, start)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = buffer(SIZE)
    data[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    with Writer([path], [SIZE]) as writer:
        for start in range(0, SIZE, SIZE // 4):
            writer.write(0, data[start : start + SIZE // 4].data, start)
    assert (tmp_path / "out").read_bytes() == data.tobytes()


@pytest.mark.usefixtures("past")
def test_a_full_disk_is_no_reason_to_try_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = _target(tmp_path), []

    def pwrite(fd: int, data: memoryview, start: int) -> int:
        calls.append(start)
        raise OSError(errno.ENOSPC, "full")

    with Writer([path], [SIZE]) as writer:
        writer.took(1.0, 1)
        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="full"):
            writer.write(0, buffer(PAGE * 80).data, 0)
        monkeypatch.undo()
    assert calls == [0]


def test_one_hiccup_decides_nothing() -> None:
    writer = Writer([], [])
    writer.took(0.1, 1 << 20)
    for _ in range(300):
        writer.took(0.0004, 1 << 20)
    assert not writer._is_past
    for _ in range(300):
        writer.took(0.003, 1 << 20)
    assert writer._is_past
