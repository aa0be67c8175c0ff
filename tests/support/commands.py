"""The command line run in this process, and what came of it. Nothing of it is mocked."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from ckptctl.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path


class Done(NamedTuple):
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as one JSON document; fails where it is anything else, NaN and Infinity among it."""

        def refuse(word: str) -> Any:
            raise AssertionError(f"{word} is no JSON")

        document = json.loads(self.out, parse_constant=refuse)
        assert isinstance(document, dict)
        return document

    @property
    def error(self) -> dict[str, Any]:
        """The document's error."""
        return self.json["error"]


def ckptctl(*words: str | Path, **env: str) -> Done:
    """Runs a command with env added to the environment. Fails on a traceback, and on an error without a word."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CKPTCTL_")} | {"COLUMNS": "200", "NO_COLOR": "1"}
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean | env, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run([str(w) for w in words])
    done = Done(code, out.getvalue(), err.getvalue())
    assert "Traceback" not in done.err, done.err
    assert "internal error" not in done.err, done.err
    assert code in (0, 1, 2, 3, 4, 5), done
    if code not in (0, 1):
        assert done.err.strip(), f"exit {code} without a word: {words}"
    return done


def good(*words: str | Path, **env: str) -> Done:
    """Runs a command that must succeed."""
    done = ckptctl(*words, **env)
    assert done.code == 0, f"{words}: exit {done.code}\n{done.out}\n{done.err}"
    return done


def document(*words: str | Path, **env: str) -> dict[str, Any]:
    """The JSON of a command that must succeed."""
    return good(*words, "--json", **env).json


def refused(*words: str | Path, code: int = 3, **env: str) -> dict[str, Any]:
    """The error of a command that must fail with that exit code. stdout holds one JSON document and nothing else."""
    done = ckptctl(*words, "--json", **env)
    assert done.code == code, f"{words}: exit {done.code}, not {code}\n{done.out}\n{done.err}"
    error = done.error
    assert error["exit_code"] == code
    assert error["what"]
    assert error["code"] in done.err
    return error
