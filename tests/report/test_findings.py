"""Reports of findings: each form says the same, parses as what it is, and holds hostile names."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ckptctl.report.findings import WRITERS, github, gitlab, junit, sarif, summary, text
from ckptctl.report.outputs import FORMS
from tests.support.checkpoints import FIXTURES
from tests.support.commands import ckptctl
from tests.support.saving import torch_save

BROKEN = FIXTURES / "broken"


@pytest.fixture
def document():
    done = ckptctl("validate", BROKEN / "config-layers-mismatch", BROKEN / "ok-minimal.safetensors", "--json")
    assert done.code == 1
    return done.json


def test_every_form_has_a_writer():
    assert set(FORMS) == set(WRITERS)


def test_junit_counts_what_it_lists(document):
    root = ET.fromstring(junit(document))
    suites = root.findall("testsuite")
    assert [s.get("name") for s in suites] == [row["path"] for row in document["checkpoints"]]
    for suite in suites:
        cases = suite.findall("testcase")
        assert int(suite.get("tests")) == len(cases)
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
    assert int(root.get("failures")) == document["counts"]["error"] + document["counts"]["warning"] == 9


def test_sarif_is_what_the_standard_asks_for(document):
    """The required properties of SARIF 2.1.0 (3.13, 3.14, 3.18, 3.19, 3.27) and the values it allows."""
    log = json.loads(sarif(document))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    ids = [r["id"] for r in run["tool"]["driver"]["rules"]]
    assert run["tool"]["driver"]["name"] == "ckptctl"
    assert len(ids) == len(set(ids))
    assert len(run["results"]) == len(document["findings"])
    for result in run["results"]:
        assert result["level"] in ("none", "note", "warning", "error")
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["message"]["text"]
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"[A-Za-z0-9/._~%-]+", uri)
        assert not uri.startswith("/")


def test_github_shows_ten_at_most_and_the_summary_all(document):
    many = {**document, "findings": document["findings"] * 2}
    lines = github(many).splitlines()
    assert len(lines) == 10
    assert all(re.fullmatch(r"::(error|warning|notice) file=[^:,]+,title=[^:,]+::.+", line) for line in lines)
    assert summary(many).count("| error |") == len(many["findings"])
    assert "**no**" in summary(many)


def test_gitlab_s_report_is_a_list_of_issues(document):
    for issue in json.loads(gitlab(document)):
        assert set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert issue["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert issue["location"]["lines"]["begin"] == 1


def test_text_says_the_answers_of_each(document):
    made = text(document)
    lines = made.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("checkpoint "))
    assert lines[head].split() == ["checkpoint", "step", "intact", "safe", "resumable"]
    for row, line in zip(document["checkpoints"], lines[head + 1 :], strict=False):
        words = ["no" if row[q]["answer"] is False else "yes" for q in ("intact", "safe", "resumable")]
        assert line.split()[:4] == [row["path"], *words]
    (alone,) = [text({**document, "checkpoints": document["checkpoints"][:1]})]
    assert alone.count("  intact     ") == 1
    assert "error[CK507] tensor-missing" in made
    assert made.endswith("level structure\n")


def test_several_reports_are_written_at_once(tmp_path):
    files = {form: tmp_path / f"r.{form}" for form in ("json", "junit", "sarif", "gitlab")}
    words = [w for form, file in files.items() for w in ("--output", f"{form}={file}")]
    step = tmp_path / "summary.md"
    done = ckptctl(
        "validate", BROKEN / "overlap.safetensors", *words, "--output", "github", "--output", "text",
        GITHUB_STEP_SUMMARY=str(step),
    )  # fmt: skip
    assert done.code == 1
    assert "::error file=" in done.out
    assert "error[CK118] overlap" in done.out
    assert all(file.stat().st_size for file in files.values())
    assert "### ckptctl validate" in step.read_text()
    assert json.loads(files["json"].read_text())["ok"] is False


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    done = ckptctl("validate", BROKEN / "ok-minimal.safetensors", "--output", f"json={tmp_path / 'no' / 'r.json'}")
    assert done.code == 3
    assert "cannot be written" in done.err


def test_names_of_a_hostile_file_drive_nothing(tmp_path):
    name = "w\x1b[31m\n::error::x<script>|`%0A\x00"
    torch_save(tmp_path / "state.pt", {name: np.array([np.nan], np.float32), "v": np.ones((2, 2), np.float32)})
    words = ["validate", tmp_path / "state.pt", "--level", "values"]
    document = ckptctl(*words, "--json").json
    assert any(f["where"]["tensor"] == name for f in document["findings"])
    ET.fromstring(junit(document))
    for made in (text(document), github(document), summary(document)):
        assert "\x1b" not in made
        assert "\x00" not in made
    assert all(line.startswith(("::warning", "::notice")) for line in github(document).splitlines())
    assert "<script>" not in summary(document)
