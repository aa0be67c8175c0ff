"""The command line itself: one JSON document whatever happens, exit codes, environment variables, quiet, help."""

import json
import os
import subprocess
import sys

import pytest

import ckptctl as package
from ckptctl import operations
from ckptctl.cli.main import run
from tests.support.checkpoints import ROOT, ckpt
from tests.support.commands import ckptctl, document, good, refused
from tests.support.saving import adamw, arange, hf_save, torch_save


@pytest.fixture
def path(tmp_path):
    model = {"w": arange(4, 3), "b": arange(3)}
    return torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(["w", "b"], model), "step": 3})


def commands(path, tmp_path):
    return {
        "inspect": [path],
        "ls": [path],
        "show": [path, "w"],
        "convert": [path, tmp_path / "c", "--to", "dcp"],
        "reshard": [tmp_path / "c", tmp_path / "r", "--dp", "2"],
        "diff": [path, path],
    }


def test_every_command_prints_one_document_with_its_schema(path, tmp_path):
    for name, words in commands(path, tmp_path).items():
        found = document(name, *words)
        assert found["schema"] == f"ckptctl.{name}/1"


KEYS = {
    "inspect": {
        "schema",
        "path",
        "format",
        "variant",
        "recognised",
        "layout",
        "step",
        "family",
        "kinds",
        "state",
        "state_values",
        "groups",
        "ties",
        "frozen",
        "resumable",
        "why",
        "quantized",
        "adapter",
        "config",
        "unsafe",
        "unknown_globals",
        "unsupported",
        "about",
        "warnings",
        "files",
    },
    "ls": {"schema", "path", "format", "tensors"},
    "show": {"schema", "name", "kind", "dtype", "shape", "slice", "text", "values"},
    "convert": {"schema", "source", "target", "fidelity", "source_bytes", "warnings", "plan", "dry_run", "result"},
    "reshard": {"schema", "source", "target", "fidelity", "source_bytes", "warnings", "plan", "dry_run", "result"},
    "diff": {"schema", "a", "b", "equal", "compared", "differences"},
}


def test_the_keys_of_every_document_are_these(path, tmp_path):
    """Programs rely on them: adding one is fine, and is added here; taking one away is a new schema."""
    for name, words in commands(path, tmp_path).items():
        assert set(document(name, *words)) == KEYS[name], name


def test_every_command_fails_with_one_document_too(tmp_path):
    gone = tmp_path / "gone"
    for name, words in commands(gone, tmp_path).items():
        done = ckptctl(name, *words, "--json")
        assert done.code == 3
        assert done.json["schema"] == f"ckptctl.{name}/1"
        assert set(done.json["error"]) == {"exit_code", "code", "what", "where", "why", "fix"}
        assert done.err.startswith("error[")
        plain = ckptctl(name, *words)
        assert (plain.code, plain.out) == (3, "")
        assert plain.err == done.err


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--json"],
        ["inspect", "--json"],
        ["inspect", "--nope", "--json"],
        ["nope", "--json"],
        ["--nope", "--json"],
        ["convert", "a", "b", "--to", "dcp", "--dp", "x", "--json"],
        ["convert", "a", "b", "--to", "dcp", "--jobs", "-1", "--json"],
        ["convert", "a", "b", "--to", "--json"],
        ["diff", "a", "--json"],
        ["show", "a", "--json"],
        ["ls", "a", "b", "c", "--json"],
    ],
)
def test_wrong_usage_is_a_document_and_exit_code_2(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ckptctl(*words)
    assert done.code == 2
    assert done.error["code"] == "usage"
    assert done.error["what"]
    assert done.error["fix"]


def test_without_json_stdout_is_empty_on_failure(path, tmp_path):
    done = ckptctl("convert", path, tmp_path / "out", "--to", "hf")
    assert (done.code, done.out) == (3, "")
    assert "state-not-carried" in done.err
    assert "--no-optimizer" in done.err


def test_flags_may_come_from_the_environment(path, tmp_path):
    good("convert", path, tmp_path / "a", CKPTCTL_CONVERT_TO="dcp", CKPTCTL_CONVERT_DP="2")
    assert document("inspect", tmp_path / "a")["layout"]["world_size"] == 2
    good("convert", path, tmp_path / "b", "--to", "hf", CKPTCTL_CONVERT_TO="dcp", CKPTCTL_CONVERT_NO_OPTIMIZER="1")
    assert (tmp_path / "b" / "model.safetensors").is_file()
    assert ckptctl("inspect", path, CKPTCTL_INSPECT_JSON="1").json["format"] == "torch"
    assert ckptctl("inspect", tmp_path / "none", CKPTCTL_INSPECT_JSON="1").error["code"] == "unrecognised"
    done = ckptctl("convert", path, tmp_path / "c", CKPTCTL_CONVERT_TO="dcp", CKPTCTL_CONVERT_DP="many")
    assert done.code == 2


def test_json_of_another_command_s_environment_is_not_ours(tmp_path):
    done = ckptctl("inspect", tmp_path / "none", CKPTCTL_LS_JSON="1")
    assert done.out == ""


def test_quiet_says_nothing_and_json_is_printed_all_the_same(path, tmp_path):
    done = good("convert", path, tmp_path / "a", "--to", "dcp", "--quiet")
    assert (done.out, done.err) == ("", "")
    assert good("convert", path, tmp_path / "b", "--to", "dcp", "--quiet", "--json").json["dry_run"] is False
    done = ckptctl("diff", path, tmp_path / "a", "-q")
    assert (done.code, done.out) == (0, "")
    assert ckptctl("convert", path, tmp_path / "a", "--to", "dcp", "-q").err


def test_verbose_tells_of_the_plan(path, tmp_path):
    assert "copies" not in good("convert", path, tmp_path / "a", "--to", "dcp").out
    assert "copies" in good("convert", path, tmp_path / "b", "--to", "dcp", "-v").out


def test_nothing_of_progress_is_written_where_nobody_looks(path, tmp_path):
    assert good("convert", path, tmp_path / "a", "--to", "dcp").err == ""


def test_version_and_help():
    for flag in ("--version", "-V"):
        assert good(flag).out == f"ckptctl {package.__version__}\n"
    assert "convert" in good("--help").out
    for name in ("inspect", "ls", "show", "convert", "reshard", "diff"):
        for flag in ("--help", "-h"):
            assert "Example: ckptctl" in good(name, flag).out


def test_a_report_that_cannot_be_written_is_told_in_words(path, tmp_path):
    for flag in ("--report", "--plan-out"):
        for file in (tmp_path / "no" / "such" / "file", tmp_path):
            error = refused("convert", path, tmp_path / "out", "--to", "dcp", flag, file, code=2)
            assert f"{flag} {file}" in error["what"]
            assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_made_is_told_in_words(path, tmp_path):
    (tmp_path / "file").write_text("")
    error = refused("convert", path, tmp_path / "file" / "out", "--to", "dcp")
    assert error["what"]
    good("convert", path, tmp_path / "no" / "such" / "out", "--to", "dcp")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_names_that_the_terminal_has_no_letters_for(encoding, tmp_path):
    path = torch_save(tmp_path / "x.pt", {"gewicht\u00fc\u4e2d": arange(2), "lone\ud800": arange(1)})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    for words in (
        ["ls", path],
        ["ls", path, "--json"],
        ["inspect", path, "--tensors"],
        ["show", path, "lone"],
        ["diff", path, path],
    ):
        done = subprocess.run([sys.executable, "-m", "ckptctl", *map(str, words)], env=env, capture_output=True)
        assert done.returncode in (0, 3), done.stderr
        assert b"Traceback" not in done.stderr
    names = [t["name"] for t in json.loads(done_json(path, env))["tensors"]]
    assert names == ["gewicht\u00fc\u4e2d", "lone\ud800"]


def done_json(path, env):
    words = [sys.executable, "-m", "ckptctl", "ls", str(path), "--json"]
    return subprocess.run(words, env=env, capture_output=True, check=True).stdout


def test_lone_surrogates_in_names_end_in_words_where_a_format_cannot_hold_them(tmp_path):
    path = torch_save(tmp_path / "x.pt", {"lone\ud800": arange(1)})
    for to in ("hf", "torch", "dcp"):
        assert ckptctl("convert", path, tmp_path / to, "--to", to, "--json").code in (0, 3)


@pytest.mark.real
def test_ctrl_c_is_130_and_leaves_nothing_at_the_target(tmp_path):
    """Interrupted at once, wherever it is by then."""
    import signal
    import time

    path = hf_save(tmp_path / "big", {f"w{i}": arange(1 << 20, start=i) for i in range(24)})
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [
        sys.executable,
        "-m",
        "ckptctl",
        "convert",
        str(path),
        str(tmp_path / "out"),
        "--to",
        "torch",
        "--jobs",
        "1",
        "--memory",
        "16MiB",
    ]
    codes = set()
    for wait in (0.35, 0.6):
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=60)
        codes.add(process.returncode)
        if process.returncode == 130:
            assert not (tmp_path / "out").exists()
            assert b"Traceback" not in err
        (tmp_path / "out").unlink(missing_ok=True)
    assert codes <= {0, 130, -signal.SIGINT}


def test_ctrl_c_says_what_is_kept(path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(operations, "inspect", stop, raising=False)
    assert run(["inspect", str(path)]) == 130
    assert "--resume" in capsys.readouterr().err


def test_inspect_and_convert_import_no_torch(path, tmp_path):
    """A module called torch (and others) that ends the process stands first on the path."""
    for name in ("torch", "transformers", "deepspeed", "pandas", "huggingface_hub"):
        (tmp_path / "traps" / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / "traps" / f"{name}.py").write_text("import os\nos._exit(99)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "traps"), str(ROOT)])}
    for number, words in enumerate(
        [
            ["inspect", path],
            ["ls", path],
            ["show", path, "w", "--stats"],
            ["diff", path, path],
            ["convert", path, tmp_path / "o", "--to", "dcp"],
            ["convert", ckpt("torch/dcp_zstd"), tmp_path / "h", "--to", "hf", "--no-optimizer", "--dtype", "bfloat16"],
            ["inspect", ckpt("hf/qwen2-bin")],
        ]
    ):
        done = subprocess.run([sys.executable, "-m", "ckptctl", *map(str, words)], env=env, capture_output=True)
        assert done.returncode == 0, (number, done.stderr)


def test_help_has_every_exit_code_of_the_docs():
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    codes = [row.split("|")[1].strip() for row in page.split("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    said = " ".join(good("--help").out.split())
    assert "4" in codes
    assert [code for code in codes if f" {code} " not in said.partition("Exit codes:")[2]] == []
