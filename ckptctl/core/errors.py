"""Every error a user can meet, as one tree. No printing here: the command line shows them.

CkptError                 exit 3, a problem the user can act on
|-- Usage                 exit 2, flags that contradict each other, or a target that is already there
|-- Unrecognised          nothing known lies at the path
|-- Damaged               bytes contradict metadata, or end too early
|-- MissingFile           a file that the checkpoint's own metadata names is not there
|-- MissingFact           a number that decides a layout is in no file; names the flag that gives it
|-- Unsupported           legitimate, but not expressed by this tool
|-- Unsafe                a pickle asks for something that would run code, or a path leaves the checkpoint
|-- StateNotCarried       the target cannot hold the source's training state
|-- NoSpace               the disk has less room than the result needs
|-- SourceChanged         the source or the plan is not the one that the interrupted job had
|-- Denied                exit 4, the Hub does not know this user, or gives them no right to it
|-- Interrupted           exit 5, stopped, and can go on with --resume
`-- Mismatch              exit 1, two things that should be equal are not
"""

from __future__ import annotations

from typing import Literal

Severity = Literal["error", "warning", "info"]
"""How grave a fault is, for readers that go on past it."""


class CkptError(Exception):
    """A problem the user can act on: shown without a traceback. Subclasses set exit_code and code."""

    exit_code = 3
    code = "failed"

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "", code: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix
        if code:
            self.code = code

    def as_dict(self) -> dict[str, str]:
        """What `--json` prints under `error`."""
        return {"code": self.code, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}


class Usage(CkptError):
    """Flags that are unknown or contradict each other, a required one missing, or a target that exists."""

    exit_code = 2
    code = "usage"


class Unrecognised(CkptError):
    """No format knows what lies at the path, or nothing lies there."""

    code = "unrecognised"


class Damaged(CkptError):
    """The bytes contradict the metadata, or a file ends too early."""

    code = "damaged"


class MissingFile(CkptError):
    """A file that the checkpoint's own metadata names is not there."""

    code = "missing-file"


class MissingFact(CkptError):
    """A fact that decides the result is in no file; `fix` names every way to give it."""

    code = "missing-fact"


class Unsupported(CkptError):
    """Legitimate, but not expressed here. Only this kind may fall back to something else."""

    code = "unsupported"


class Unsafe(CkptError):
    """A pickle names something that would run code, or a path leads outside the checkpoint."""

    code = "unsafe"


class StateNotCarried(CkptError):
    """The target cannot hold the source's training state, and nobody said to let it go."""

    code = "state-not-carried"


class NoSpace(CkptError):
    """Less room on the disk than the result needs."""

    code = "no-space"


class SourceChanged(CkptError):
    """--resume finds another source, plan or version than the interrupted job had."""

    code = "source-changed"


class Denied(CkptError):
    """The Hub does not know this user, or this user may not do that."""

    exit_code = 4
    code = "credentials"


class Interrupted(CkptError):
    """Stopped before the end; --resume goes on."""

    exit_code = 5
    code = "interrupted"


class Mismatch(CkptError):
    """Two things that should be equal are not."""

    exit_code = 1
    code = "mismatch"
