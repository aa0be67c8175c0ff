"""The docs say what the program does: commands and options have their place, examples run and print what is shown."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ckptctl.core import errors
from tests.support.checkpoints import ROOT
from tests.support.hub_server import HubServer

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "commands").glob("*.md"))
NEEDS_TORCH = "ckptctl verify"
"""What examples say that can only be run where torch is installed."""


def commands() -> dict[str, Any]:
    """The program's commands by name, from its own description of itself; skips while there is no command line."""
    if importlib.util.find_spec("ckptctl.cli.main") is None:
        pytest.skip("there is no command line yet")
    import typer

    from ckptctl.cli.main import app

    return {name: command for name, command in typer.main.get_command(app).commands.items() if not command.hidden}


def options(command: Any) -> set[str]:
    """Every visible long option of a command, and the short ones that have no long form."""
    found = set()
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        flags = [name for name in names if name.startswith("-")]
        if flags and not getattr(parameter, "hidden", False):
            found |= {name for name in flags if name.startswith("--")} or set(flags)
    return found - {"--help"}


def test_every_command_has_a_page():
    assert set(commands()) <= {page.stem for page in PAGES}


def test_every_page_is_of_a_command():
    assert {page.stem for page in PAGES} <= set(commands())


def test_every_option_is_on_its_command_s_page():
    missing = []
    for name, command in commands().items():
        page = DOCS / "commands" / f"{name}.md"
        text = page.read_text() if page.exists() else ""
        missing += [f"{name} {option}" for option in sorted(options(command)) if f"`{option}" not in text]
    assert missing == []


def test_no_page_names_an_option_that_is_not_there():
    known = {name: options(command) | {"--help"} for name, command in commands().items()}
    everywhere = set().union(*known.values()) | {"--version", "--install-completion", "--show-completion"}
    wrong = []
    for page in PAGES:
        rows = re.findall(r"^\| `(--[a-z0-9-]+)", page.read_text(), re.M)
        wrong += [f"{page.name}: {option}" for option in rows if option not in known[page.stem]]
        words = re.findall(r"`(--[a-z][a-z0-9-]+)", page.read_text())
        wrong += [f"{page.name}: {option}" for option in words if option not in everywhere]
    assert wrong == []


def test_every_flag_has_an_environment_variable_of_its_name():
    odd = []
    for name, command in commands().items():
        for parameter in command.params:
            flags = {o[2:].replace("-", "_") for o in parameter.opts if o.startswith("--")}
            want = {f"CKPTCTL_{name}_{flag}".upper() for flag in flags}
            given = parameter.envvar or f"CKPTCTL_{name}_{parameter.name}".upper()
            if flags and want.isdisjoint({given} if isinstance(given, str) else set(given)):
                odd.append(f"{sorted(want)[0]} is {given}")
    assert odd == []


class Example(NamedTuple):
    """A command line in a page's console block, and the lines shown below it; `...` stands for anything."""

    page: str
    line: str
    shown: str


def examples(page: Path) -> list[list[Example]]:
    """The console blocks of a page, each a list of examples that run one after the other in one folder."""
    blocks = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.M | re.S):
        found: list[Example] = []
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            head, _, shown = part.replace("\\\n", " ").partition("\n")
            found.append(Example(page.name, head, shown.rstrip()))
        blocks.append(found)
    return blocks


def matches(shown: str, printed: str) -> bool:
    """Whether what was printed is what is shown, line by line; `...` is any text, and alone on a line any lines."""
    parts = [[re.escape(part) for part in line.rstrip().split("...")] for line in shown.split("\n")]
    lines = [r"(?s:.*)" if not "".join(part).strip("\\ ") and len(part) > 1 else ".*".join(part) for part in parts]
    pattern = "\n".join(lines)
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.rstrip().split("\n"))) is not None


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a ... c\nd", "a b c\nd  \n", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\nd", "a\nb\nd", False),
        ("a", "ab", False),
    ],
)
def test_what_is_shown_is_compared_with_what_is_printed(shown, printed, same):
    assert matches(shown, printed) is same


@pytest.fixture
def console(tmp_path):
    """Runs a line of an example in a folder that has fixtures/ in it; gives its exit code and what it printed.

    The Hub is one on the loopback, without a repository.
    """
    commands()
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    programs = tmp_path / ".bin"
    programs.mkdir()
    for name, what in (("ckptctl", "-m ckptctl"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {what} "$@"\n')
        (programs / name).chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTCTL_")}
    for name in [k for k in env if k.startswith("HF_") or k.lower().endswith("_proxy")]:
        del env[name]
    env |= {"PATH": f"{programs}{os.pathsep}{env['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "110", "NO_COLOR": "1"}

    def run(line: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    with HubServer(tmp_path / ".hub") as hub:  # so that no example asks anybody else
        env |= hub.environment(tmp_path / ".home")
        yield run


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.stem)
def test_every_example_runs_and_prints_what_is_shown(page, console):
    blocks = examples(page) if page.exists() else []
    if page.parent.name == "commands":
        assert blocks, (
            f"{page.name} has no example: a ```console block with lines that start with `$ ckptctl {page.stem}`"
        )
        assert any(page.stem in example.line.split() for block in blocks for example in block)
    for block in blocks:
        if any(NEEDS_TORCH in e.line for e in block) and importlib.util.find_spec("torch") is None:
            continue
        for example in block:
            if example.line.startswith(("make ", "pip ", "python3 -m venv", "git ")):
                continue
            code, printed = console(example.line)
            assert code == 0, f"$ {example.line}\nexit code {code}\n{printed}"
            same = matches(example.shown, printed)
            assert same, f"$ {example.line}\n{printed}\n--- is not what {page.name} shows:\n{example.shown}"


def test_python_examples_run_and_print_what_is_shown(console, tmp_path):
    page = (DOCS / "python-api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == page.count("```python")
    for source, shown in blocks:
        (tmp_path / "example.py").write_text(source)
        code, printed = console("python -W error example.py")
        assert code == 0, printed
        assert printed == shown


def test_the_demo_finds_every_byte_equal():
    commands()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    demo = [sys.executable, str(ROOT / "fixtures" / "demo.py")]
    done = subprocess.run(demo, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 39 tensors are there, and every byte is equal" in done.stdout


def error_classes() -> dict[str, type[errors.CkptError]]:
    return {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.CkptError)}


def test_every_error_is_documented_with_its_code_and_exit_code():
    rows = re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \| (\d+) \|", (DOCS / "exit-codes.md").read_text(), re.M)
    assert {name: (code, int(exit_code)) for code, name, exit_code in rows} == {
        name: (c.code, c.exit_code) for name, c in error_classes().items()
    }


def test_every_exit_code_of_an_error_is_documented():
    codes = {int(c) for c in re.findall(r"^\| (\d+) \|", (DOCS / "exit-codes.md").read_text(), re.M)}
    assert {c.exit_code for c in error_classes().values()} <= codes
    assert {0, 1, 2, 3, 5, 130} <= codes


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "fixtures" / "README.md", *DOCS.rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        local = [target for target in targets if "://" not in target]
        broken += [f"{page.relative_to(ROOT)}: {t}" for t in local if not (page.parent / t).exists()]
    assert broken == []
