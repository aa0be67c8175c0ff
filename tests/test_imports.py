"""Imports point down, the pure parts do no IO, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

import ckptctl
from tests.support.checkpoints import ROOT

PACKAGE = ROOT / "ckptctl"

# What each folder of the package may import of the others. cli -> operations -> the middle -> core. In the middle,
# naming maps are data for formats and plan, and the executor runs plans; formats know neither plan nor execute.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "names": {"core"},
    "plan": {"core", "names"},
    "rules": {"core"},
    "remote": {"core"},
    "formats": {"core", "names", "checksum", "remote"},
    "execute": {"core", "plan", "checksum", "remote"},
    "report": {"core", "rules"},
    "operations": {"core", "names", "plan", "formats", "execute", "report", "rules", "checksum", "remote"},
    "cli": {"core", "operations", "report", "rules"},
    # Modules beside the folders.
    "checksum": set(),
    "api": {"core", "operations", "remote"},
    "ci_action": {"cli"},
    "__main__": {"core", "cli"},
    "__init__": {"core", "api"},
}
# Modules that open, move or start things. The value types and the planner have no use for them.
IO = {"asyncio", "fcntl", "glob", "http", "io", "mmap", "multiprocessing", "os", "pathlib", "select", "shutil"}
IO |= {"socket", "ssl", "subprocess", "tempfile"}
HEAVY = {"torch", "transformers", "deepspeed", "megatron", "huggingface_hub", "accelerate", "lightning", "pyarrow"}


class Import(NamedTuple):
    """One name that a module imports. when is "load", "call" (inside a function) or "never" (for type checkers)."""

    name: str
    line: int
    when: str


class Module(NamedTuple):
    """One file of the package; folder is the part of the package it is in, its own name where it is in none."""

    path: str
    folder: str
    source: str


def imports_of(module: Module) -> list[Import]:
    """Every import of a module, relative ones made absolute."""
    found: list[Import] = []
    package = module.path.split("/")[:-1]

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, when) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = (
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                if node.level
                else [node.module]
            )
            found.extend(Import(".".join([*base, alias.name]), node.lineno, when) for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and when == "load":
            when = "call"
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, "never" if typing and child in node.body else when)

    visit(ast.parse(module.source), "load")
    return found


def modules(*folders: str) -> list[Module]:
    """Every module of ckptctl, or those of some folders."""
    out = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        folder = parts[0].removesuffix(".py")
        if not folders or folder in folders:
            out.append(Module(path.relative_to(ROOT).as_posix(), folder, path.read_text()))
    return out


def upward(module: Module) -> list[str]:
    """What a module imports of ckptctl and may not, for types only or not."""
    wrong = []
    for name, line, _ in imports_of(module):
        parts = name.split(".")
        known = parts[0] == "ckptctl" and len(parts) > 1 and parts[1] in ALLOWED
        if known and parts[1] not in {module.folder, *ALLOWED[module.folder]}:
            wrong.append(f"{module.path}:{line} imports {name}: {module.folder} is not above {parts[1]}")
    return wrong


def test_every_folder_has_a_place_in_the_order():
    assert {module.folder for module in modules()} <= set(ALLOWED)


def test_no_import_points_upward():
    assert [wrong for module in modules(*ALLOWED) for wrong in upward(module)] == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("core", "from ckptctl.plan import planner"),
        ("core", "def f():\n    import ckptctl.formats.hf"),
        ("core", "from ..plan import planner"),
        ("core", "if TYPE_CHECKING:\n    from ckptctl.report import text"),
        ("plan", "from ckptctl import execute"),
        ("formats", "from ckptctl.execute.local import run"),
        ("report", "import ckptctl.operations.inspect"),
        ("operations", "from ckptctl.cli.main import app"),
    ],
)
def test_an_upward_import_is_seen(folder, line):
    assert upward(Module(f"ckptctl/{folder}/x.py", folder, line))


def test_core_and_plan_do_no_io():
    wrong = []
    for module in modules("core", "plan"):
        for name, line, when in imports_of(module):
            if when != "never" and name.split(".")[0] in IO:
                wrong.append(f"{module.path}:{line} imports {name}")
        calls = [n for n in ast.walk(ast.parse(module.source)) if isinstance(n, ast.Call)]
        names = [(ast.unparse(call.func), call.lineno) for call in calls]
        wrong += [f"{module.path}:{line} calls {name}" for name, line in names if name in ("open", "print", "input")]
    assert wrong == []


def test_core_imports_only_the_standard_library_and_numpy():
    wrong = []
    for module in modules("core"):
        for name, line, when in imports_of(module):
            first = name.split(".")[0]
            if first not in {*sys.stdlib_module_names, "numpy", "ckptctl"} and (first, when) != ("ml_dtypes", "call"):
                wrong.append(f"{module.path}:{line} imports {name}")
    assert wrong == []


def test_frameworks_are_imported_inside_the_function_that_needs_them():
    wrong = [
        f"{module.path}:{i.line} imports {i.name} when it is loaded"
        for module in modules()
        for i in imports_of(module)
        if i.when == "load" and i.name.split(".")[0] in HEAVY
    ]
    assert wrong == []


@pytest.fixture
def traps(tmp_path) -> dict[str, str]:
    """An environment in which importing anything heavy ends the process with exit code 99."""
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(99)\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_a_trap_catches_an_import(traps):
    assert subprocess.run([sys.executable, "-c", "import torch"], env=traps, check=False).returncode == 99


def test_importing_the_package_loads_nothing_heavy(traps):
    assert subprocess.run([sys.executable, "-c", "import ckptctl"], env=traps, check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "--help"], ["convert", "--help"]])
def test_the_command_line_starts_without_anything_heavy(traps, arguments):
    if not (PACKAGE / "__main__.py").exists():
        pytest.skip("there is no command line yet")
    done = subprocess.run(
        [sys.executable, "-m", "ckptctl", *arguments], env=traps, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    if arguments == ["--version"]:
        assert ckptctl.__version__ in done.stdout
