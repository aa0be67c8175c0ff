"""Hostile pickles: every one is found unsafe, none of the good ones is, nothing runs; other scanners find no more.

The comparison needs picklescan and hayward: installed here, or a Python that has both in CKPTCTL_SCANNERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from ckptctl.operations import Validation, validate
from tests.support.checkpoints import ROOT
from tests.support.hostile import GOOD, HOSTILE

SCAN = """
import json, logging, pathlib, subprocess, sys
from picklescan.scanner import scan_file_path
logging.disable(logging.CRITICAL)
folder, report = pathlib.Path(sys.argv[1]), sys.argv[2]
found = {"picklescan": [f.name for f in sorted(folder.iterdir()) if scan_file_path(str(f)).issues_count]}
words = ["scan", str(folder), "-f", "json", "-o", report, "--quiet", "--fail-on", "never"]
subprocess.run([sys.executable, "-m", "hayward", *words], check=True, capture_output=True)
grave = [f for f in json.loads(pathlib.Path(report).read_text())["findings"] if f["severity"] != "info"]
found["hayward"] = sorted({pathlib.Path(f["file"]).name for f in grave})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    for name, data in {**HOSTILE, **{f"good-{n}": d for n, d in GOOD.items()}}.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def answers(files):
    document = validate(sorted(files.iterdir()), Validation("header"))
    return {row["path"].rpartition("/")[2]: row["safe"]["answer"] for row in document["checkpoints"]}


def test_there_are_many():
    assert len(HOSTILE) >= 150
    assert len(set(HOSTILE.values())) >= 165  # some differ in their names only


def test_every_hostile_one_is_unsafe_and_no_good_one_is(answers):
    assert [n for n in HOSTILE if answers[n] is not False] == []
    assert [n for n in GOOD if answers[f"good-{n}"] is not True] == []


def test_the_page_says_how_many():
    page = (ROOT / "docs" / "commands" / "validate.md").read_text()
    said = re.search(r"(\d+) hostile pickles and (\d+) good ones", page)
    assert (int(said[1]), int(said[2])) == (len(HOSTILE), len(GOOD))


def test_other_scanners_find_no_more(files, answers, tmp_path):
    python = os.environ.get("CKPTCTL_SCANNERS_PYTHON", sys.executable)
    have = subprocess.run([python, "-c", "import picklescan, hayward"], capture_output=True, check=False)
    if have.returncode:
        pytest.skip("needs picklescan and hayward: install them, or name a Python in CKPTCTL_SCANNERS_PYTHON")
    words = [python, "-c", SCAN, str(files), str(tmp_path / "report.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "commands" / "validate.md").read_text()
    for scanner, names in json.loads(done.stdout).items():
        assert [n for n in names if answers[n] is not False] == []
        row = re.search(rf"\| {scanner} [0-9.]+[^|]* \| (\d+) \|", page)
        assert int(row[1]) == len(set(names) & set(HOSTILE)), scanner
