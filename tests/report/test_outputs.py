"""Where reports go: never over a checkpoint's file, never two into one."""

from __future__ import annotations

import shutil

import pytest

from tests.support.checkpoints import FIXTURES
from tests.support.commands import ckptctl, refused

GOOD = FIXTURES / "broken" / "ok-minimal.safetensors"
FORMS = ("text", "json", "junit", "sarif", "github", "gitlab")


@pytest.mark.parametrize(
    ("command", "form"), [*(("validate", form) for form in FORMS), ("inspect", "html"), ("diff", "html")]
)
def test_a_report_is_not_written_over_a_checkpoint(command, form, tmp_path):
    mine = shutil.copy(GOOD, tmp_path / "model.safetensors")
    paths = [mine, mine] if command == "diff" else [mine]
    error = refused(command, *paths, "--output", f"{form}={mine}", code=2)
    assert error["why"] == "what it holds is not a report of ckptctl"
    assert mine.read_bytes() == GOOD.read_bytes()


@pytest.mark.parametrize(
    "mine", [b"[] # kept", b":: a note", b"\x89PNG\r\n\x1a\n", b"<!doctype html><title>mine</title>"]
)
def test_what_begins_like_a_report_and_is_none_stays(mine, tmp_path):
    file = tmp_path / "mine"
    file.write_bytes(mine)
    for command in (["validate", GOOD, "--output", f"json={file}"], ["inspect", GOOD, "--output", f"html={file}"]):
        assert refused(*command, code=2)["why"] == "what it holds is not a report of ckptctl"
    assert file.read_bytes() == mine


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("path", [GOOD, FIXTURES / "broken" / "gap-at-start.safetensors"])
def test_a_report_takes_the_place_of_any_other(path, first, tmp_path):
    file = tmp_path / "report"
    file.touch()
    for form in (first, "json", first):
        assert ckptctl("validate", path, "--output", f"{form}={file}", "--quiet").code in (0, 1)


def test_a_page_takes_the_place_of_a_page(tmp_path):
    for _ in range(2):
        assert ckptctl("inspect", GOOD, "--output", f"html={tmp_path / 'x.html'}").code == 0


def test_two_reports_want_two_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in (tmp_path / "a", tmp_path / "b" / ".." / "a", tmp_path / "link"):
        (tmp_path / "b").mkdir(exist_ok=True)
        words = ("--output", f"json={tmp_path / 'a'}", "--output", f"sarif={other}")
        assert "another report" in refused("validate", GOOD, *words, code=2)["what"]
