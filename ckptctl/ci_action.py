"""`validate` as a step of a CI job: what to do is in the environment, so that no argument is ever a piece of script.

`python -m ckptctl.ci_action [PATH...]`. Variables, each a text, lists one item a line:

    CKPTCTL_PATHS (besides the arguments)   CKPTCTL_LEVEL (header; structure with RESUMABLE)   CKPTCTL_FAIL_ON (error)
    CKPTCTL_SELECT   CKPTCTL_IGNORE   CKPTCTL_BASELINE   CKPTCTL_MODEL_CONFIG   CKPTCTL_RESUMABLE (true, false)
    CKPTCTL_OUTPUT

In a GitHub workflow annotations and the step's summary are written too, and `ok`, `errors`, `warnings` and
`newest-resumable` to GITHUB_OUTPUT.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FLAGS = {"LEVEL": "--level", "FAIL_ON": "--fail-on", "BASELINE": "--baseline", "MODEL_CONFIG": "--model-config"}
_LISTS = {"SELECT": "--select", "IGNORE": "--ignore"}


def arguments(env: Mapping[str, str], paths: Sequence[str], report: str) -> list[str]:
    """The command line that the environment asks for; report is where its JSON goes."""
    words = ["validate", "--no-progress"]
    must_resume = env.get("CKPTCTL_RESUMABLE", "").strip().lower() in ("1", "true", "yes", "on")
    values = {"LEVEL": "structure" if must_resume else "header", "FAIL_ON": "error"}
    values |= {k: v for k in _FLAGS if (v := env.get(f"CKPTCTL_{k}", "").strip())}
    for name, value in values.items():
        words += [_FLAGS[name], value]
    for name, flag in _LISTS.items():
        words += [w for value in _lines(env.get(f"CKPTCTL_{name}", "")) for w in (flag, value)]
    if must_resume:
        words.append("--resumable")
    outputs = _lines(env.get("CKPTCTL_OUTPUT", ""))
    if not any("=" not in o and o != "github" for o in outputs):
        outputs.append("text")
    if env.get("GITHUB_ACTIONS") == "true" and not any(o.partition("=")[0] == "github" for o in outputs):
        outputs.append("github")
    for output in [*outputs, f"json={report}"]:
        words += ["--output", output]
    return [*words, "--", *_lines(env.get("CKPTCTL_PATHS", "")), *paths]


def main(paths: Sequence[str]) -> int:
    """Runs it. Returns the command's exit code."""
    env = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ckptctl-") as folder:
        report = Path(folder) / "report.json"
        code = run(arguments(env, paths, str(report)))
        output = env.get("GITHUB_OUTPUT", "")
        if output and report.is_file():
            document = json.loads(report.read_text(encoding="utf-8"))
            newest = str(document["newest_resumable"] or "")
            if not newest.isprintable():  # a line break would be another output, and without it it is another path
                newest = ""
            lines = [
                f"ok={str(document['ok']).lower()}",
                f"errors={document['counts']['error']}",
                f"warnings={document['counts']['warning']}",
                f"newest-resumable={newest}",
            ]
            with Path(output).open("a", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")
        return code


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
