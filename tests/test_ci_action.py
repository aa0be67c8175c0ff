"""The step of a CI job: settings come from the environment, results go where the job looks for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ckptctl import ci_action
from ckptctl.ci_action import arguments
from tests.support.checkpoints import FIXTURES, ROOT

BROKEN = FIXTURES / "broken"


def step(*paths, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTCTL_", "GITHUB_", "INPUT_"))}
    done = subprocess.run(
        [sys.executable, "-m", "ckptctl.ci_action", *map(str, paths)], cwd=ROOT, env={**clean, "NO_COLOR": "1", **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def test_headers_are_enough_unless_a_run_is_to_go_on():
    for env, level in (({}, "header"), ({"CKPTCTL_RESUMABLE": "true"}, "structure"), ({"CKPTCTL_LEVEL": ""}, "header")):
        assert arguments(env, [], "r.json")[2:4] == ["--level", level]


def test_the_environment_becomes_flags():
    env = {
        "CKPTCTL_PATHS": "a b\n\n c\n", "CKPTCTL_LEVEL": "values", "CKPTCTL_IGNORE": "CK4\ngap",
        "CKPTCTL_RESUMABLE": "true", "CKPTCTL_OUTPUT": "sarif=x.sarif",
    }  # fmt: skip
    assert arguments(env, ["d"], "r.json") == [
        "validate", "--no-progress", "--level", "values", "--fail-on", "error", "--ignore", "CK4", "--ignore", "gap",
        "--resumable", "--output", "sarif=x.sarif", "--output", "text", "--output", "json=r.json", "--",
        "a b", "c", "d",
    ]  # fmt: skip


def test_a_good_and_a_bad_file(tmp_path):
    out, summary = tmp_path / "out", tmp_path / "summary"
    env = {"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": str(summary)}
    assert step(BROKEN / "ok-minimal.safetensors", **env).returncode == 0
    assert out.read_text() == "ok=true\nerrors=0\nwarnings=0\nnewest-resumable=\n"
    out.unlink()
    done = step(CKPTCTL_PATHS=f"{BROKEN / 'overlap.safetensors'}\n{BROKEN / 'gap-at-start.safetensors'}", **env)
    assert done.returncode == 1
    assert done.stdout.count("::error ") == 2
    assert out.read_text().startswith("ok=false\nerrors=2\n")
    assert summary.read_text().count("### ckptctl validate") == 2


@pytest.mark.parametrize("words", [["--help"], ["$(touch ran)"], ["-x"]], ids=str)
def test_a_path_is_never_an_option_or_a_piece_of_script(words, tmp_path):
    assert step(*words).returncode == 3
    assert not (ROOT / "ran").exists()


def test_no_path_is_wrong_usage():
    assert step().returncode == 2


def test_hook_is_given_files_that_may_hold_pickles():
    pattern = re.search(r"^  files: (.*)$", (ROOT / ".pre-commit-hooks.yaml").read_text(), re.MULTILINE).group(1)
    text = "safetensors bin pt pth ckpt pkl pickle joblib dill npy npz distcp nemo index.json"
    assert [name for name in (f"a.{ending}" for ending in text.split()) if not re.search(pattern, name)] == []
    assert not any(re.search(pattern, name) for name in ("a.py", "config.json", "a.pt.md"))


def test_hooks_and_action_name_what_is_there():
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    action = (ROOT / "action.yml").read_text()
    assert "entry: python -m ckptctl.ci_action" in hooks
    assert "python -m ckptctl.ci_action" in action
    scripts = [part.split("\n    - ")[0] for part in action.split(" run:")[1:]]
    assert len(scripts) == 3
    for variable in re.findall(r"CKPTCTL_[A-Z_]+(?=: )", action):
        assert variable in (ci_action.__doc__ or ""), variable
    assert not any("${{" in script for script in scripts)
