"""Placeholders, and what is kept of small reads, against bytes in memory; no network."""

import io
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.errors import CkptError, Damaged
from ckptctl.formats.bytesource import FileBytes, read_whole
from ckptctl.remote import places
from ckptctl.remote.folder import ENDS_NBYTES, Folder, Listed


class Held:
    """A file in memory that tells what was read of it."""

    def __init__(self, data: bytes, fails: int = 0):
        self.data, self.asked, self.fails, self.lock = data, [], fails, threading.Lock()

    def stream(self, start, stop=None):
        with self.lock:
            if self.fails:
                self.fails -= 1
                raise CkptError("not now", code="hub-unreachable")
            self.asked.append((start, stop))
        return HeldStream(self.data, start)


class HeldStream:
    def __init__(self, data, start):
        self.data = io.BytesIO(data)
        self.data.seek(start)

    def fill(self, views, check):
        for view in views:
            check()
            assert self.data.readinto(view) == len(view)

    def close(self):
        pass


@pytest.fixture
def make():
    made = []

    def place(files: dict[str, Held], **sizes: int) -> Folder:
        listed = [Listed(n, sizes.get(n, len(f.data)), f"id-{n}", f) for n, f in files.items()]
        made.append(Folder("hf://o/n@c", "n@c", listed))
        return made[-1]

    yield place
    for folder in made:
        folder.close()


def data_of(n: int) -> bytes:
    return bytes((i * 131 + (i >> 8) * 7 + 3) % 256 for i in range(n))


def test_placeholders_have_names_and_sizes_and_no_block_of_the_disk(make):
    folder = make({"a.bin": Held(data_of(10)), "deep/er/b.bin": Held(b""), "c": Held(b"x" * 100_000)})
    root = Path(folder.root)
    assert sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()) == [
        "a.bin",
        "c",
        "deep/er/b.bin",
    ]
    assert [(root / n).stat().st_size for n in ("a.bin", "deep/er/b.bin", "c")] == [10, 0, 100_000]
    assert (root / "c").stat().st_blocks == 0


def test_reading_by_the_placeholders_path_gives_the_files_bytes(make):
    data = data_of(300_000)
    folder = make({"a/b.bin": Held(data)})
    path = Path(folder.root) / "a" / "b.bin"
    with FileBytes(path) as source:
        assert source.nbytes == 300_000
        assert source.read(0, 8) == data[:8]
        assert source.read(150_000, 5) == data[150_000:150_005]
        assert source.read(299_999, 1) == data[-1:]
        buffer = bytearray(70_000)
        source.into(123_456, memoryview(buffer))
        assert buffer == data[123_456:193_456]
        with pytest.raises(Damaged):
            source.read(299_999, 2)
    with FileBytes(path, 100, 200) as part:
        assert part.nbytes == 100
        assert part.read(0, 100) == data[100:200]
    assert read_whole(path, 50) == data[:50]
    with pytest.raises(Damaged):
        FileBytes(path, 0, 300_001)


def test_nothing_opens_a_placeholder_as_a_file(make):
    folder = make({"a.bin": Held(data_of(10))})
    path = Path(folder.root) / "a.bin"
    for opened in (path.read_bytes, lambda: os.open(str(path), os.O_RDONLY), path.read_text):
        with pytest.raises(CkptError) as raised:
            opened()
        assert raised.value.code == "not-by-range"
        assert raised.value.where == "hf://o/n@c/a.bin"
    with pytest.raises(CkptError):
        (path.parent / ".." / path.parent.name / "a.bin").read_bytes()


def test_the_head_is_read_once_and_a_longer_one_goes_on_where_it_stopped(make):
    held = Held(data_of(400_000))
    folder = make({"a": held})
    file = places.at(f"{folder.root}/a")
    assert file.read(0, 8) == held.data[:8]
    assert file.read(8, 1000) == held.data[8:1008]
    assert file.read(8, 90_000) == held.data[8:90_008]
    assert file.read(0, 90_008) == held.data[:90_008]
    assert held.asked == [(0, ENDS_NBYTES), (ENDS_NBYTES, 90_008)]


def test_the_tail_is_read_once(make):
    held = Held(data_of(400_000))
    file = places.at(f"{make({'a': held}).root}/a")
    assert file.read(400_000 - 22, 22) == held.data[-22:]
    assert file.read(400_000 - 5000, 4000) == held.data[-5000:-1000]
    assert held.asked == [(400_000 - ENDS_NBYTES, 400_000)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300_000), st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 100_000)), max_size=12))
def test_any_reads_in_any_order_are_right_and_no_byte_is_asked_for_twice(size, reads):
    held = Held(data_of(size))
    folder = Folder("hf://o/n@c", "n@c", [Listed("a", size, "id", held)])
    try:
        file = places.at(f"{folder.root}/a")
        for start, n in reads:
            n = min(n, size - start)
            if n >= 0:
                assert file.read(start, n) == held.data[start : start + n]
        asked = sorted(held.asked)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(asked))
    finally:
        folder.close()


def test_expected_ranges_come_together(make):
    held = Held(data_of(3_000_000))
    file = places.at(f"{make({'a': held}).root}/a")
    file.expect([(i * 200_000, i * 200_000 + 100) for i in range(15)])
    count = len(held.asked)
    assert 12 <= count <= 15
    for i in range(15):
        assert file.read(i * 200_000, 100) == held.data[i * 200_000 : i * 200_000 + 100]
    assert len(held.asked) == count


def test_expected_ranges_that_fail_say_so(make):
    held = Held(data_of(3_000_000), fails=100)
    file = places.at(f"{make({'a': held}).root}/a")
    with pytest.raises(CkptError, match="not now"):
        file.expect([(i * 200_000, i * 200_000 + 100) for i in range(15)])


def test_the_heads_of_a_series_are_fetched_ahead_once(make):
    files = {f"m-{i:03d}.bin": Held(data_of(200_000 + i)) for i in range(40)}
    other = Held(data_of(200_000))
    folder = make({**files, "other.bin": other})
    for name, held in files.items():
        assert places.at(f"{folder.root}/{name}").read(0, 100) == held.data[:100]
    assert all(f.asked == [(0, ENDS_NBYTES)] for f in files.values())
    assert other.asked == []


def test_what_fails_ahead_is_asked_for_again_by_its_reader(make):
    files = {f"m-{i:03d}.bin": Held(data_of(100 + i), fails=int(i > 0)) for i in range(6)}
    folder = make(files)
    places.at(f"{folder.root}/m-000.bin").read(0, 10)
    for name, held in files.items():
        for _ in range(3):
            try:
                assert places.at(f"{folder.root}/{name}").read(0, 10) == held.data[:10]
                break
            except CkptError:
                continue
        else:
            raise AssertionError(name)


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a//b", "", ".", "a\0b", "a/", "a\\..\\b"])
def test_a_listed_path_that_leads_elsewhere_is_refused(make, name):
    with pytest.raises(CkptError) as raised:
        make({name: Held(b"x")})
    assert raised.value.code == "hub-answer"


@pytest.mark.parametrize("files", [{"a": Held(b"x"), "a/b": Held(b"y")}, {"x" * 300: Held(b"x")}])
def test_files_that_cannot_be_here_are_an_error(make, files):
    with pytest.raises(CkptError) as raised:
        make(files)
    assert raised.value.code == "hub-file-not-placed"


@pytest.mark.parametrize("size", [1 << 62, 1 << 70])
def test_a_size_that_no_file_has_is_an_error(make, size):
    with pytest.raises(CkptError) as raised:
        make({"a": Held(b"x")}, a=size)
    assert raised.value.code == "hub-file-not-placed"


def test_texts_and_documents_name_the_address(make):
    folder = make({"a.bin": Held(b"x")})
    told = {"path": folder.root, "files": [f"{folder.root}/a.bin", 3, None], "n": {"x": (1, "b")}}
    shown = {"path": "hf://o/n@c", "files": ["hf://o/n@c/a.bin", 3, None], "n": {"x": [1, "b"]}}
    assert places.shown_in(told) == shown
    assert places.address_of(f"{folder.root}/a.bin") == "hf://o/n@c/a.bin"
    assert places.address_of("/somewhere/else") == ""


def test_what_a_killed_process_left_is_removed_by_the_next(make, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, fresh = tmp_path / "ckptctl-hub-left", tmp_path / "ckptctl-hub-fresh"
    for folder in (left, fresh):
        (folder / "n@c").mkdir(parents=True)
        (folder / "cache").write_bytes(b"")
    used = make({"a": Held(b"x")})
    for folder in (left, Path(used.root).parent):
        os.utime(folder, (1, 1))
    make({"a": Held(b"x")})
    assert not left.exists()
    assert fresh.exists()
    assert Path(used.root).exists()


def test_nothing_is_left_when_it_is_closed(make):
    folder = make({"a.bin": Held(b"x")})
    root = Path(folder.root)
    folder.close()
    assert not root.parent.exists()
    assert places.at(root / "a.bin") is None
