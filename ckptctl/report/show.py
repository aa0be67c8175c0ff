"""One result on stdout: as one JSON document, or as text for people."""

from __future__ import annotations

import sys
from typing import Any

from ckptctl.report import text
from ckptctl.report.differences import diff
from ckptctl.report.verify import verify

RENDERERS = {
    "ckptctl.inspect": text.inspect,
    "ckptctl.ls": text.ls,
    "ckptctl.show": text.show_tensor,
    "ckptctl.convert": text.convert,
    "ckptctl.reshard": text.convert,
    "ckptctl.diff": diff,
    "ckptctl.strip": text.strip,
    "ckptctl.verify": verify,
    "ckptctl.push": text.push,
}


def show(document: dict[str, Any], *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
    """Print a result. JSON is printed whatever quiet says: it was asked for."""
    if as_json:
        sys.stdout.write(text.json_text(document) + "\n")
    elif not quiet:
        RENDERERS[document["schema"].split("/")[0]](document, verbose)
