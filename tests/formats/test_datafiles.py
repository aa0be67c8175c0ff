"""Data files of a folder: few are open at once, and one that is in use stays readable."""

from pathlib import Path

import pytest

from ckptctl.core.errors import MissingFile
from ckptctl.formats.datafiles import OPEN_FILES, DataFiles


def open_now():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def folder(path, count):
    for i in range(count):
        (path / f"{i}.bin").write_bytes(bytes([i % 251] * 3))
    return DataFiles(path, [f"{i}.bin" for i in range(count)])


def test_a_file_that_someone_reads_stays_open_while_others_are_asked_for(tmp_path):
    """Threads share these files: one that is let go of may be in another's hands."""
    files = folder(tmp_path, 2 * OPEN_FILES)
    first = files.get(0)
    for number in range(1, 2 * OPEN_FILES):
        assert files.get(number).read(0, 3) == bytes([number % 251] * 3)
    assert first.read(0, 3) == bytes(3)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's list of open files")
def test_few_files_are_open_at_once(tmp_path):
    files, before = folder(tmp_path, 3 * OPEN_FILES), open_now()
    for number in range(3 * OPEN_FILES):
        files.get(number)
    assert open_now() - before <= OPEN_FILES
    files.close()
    assert open_now() <= before


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingFile, match=r"^1\.bin is missing"):
        DataFiles(tmp_path, ["0.bin", "1.bin"]).full(1)
