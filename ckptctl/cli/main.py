"""Joins the commands, and turns every way to fail into its exit code, message and JSON."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

from ckptctl import __version__
from ckptctl.cli import convert, diff, inspect, ls, push, reshard, show, strip, validate, verify
from ckptctl.core.errors import CkptError
from ckptctl.report import text

if TYPE_CHECKING:
    from collections.abc import Sequence

_CTRL_C = 130

app = typer.Typer(
    name="ckptctl",
    help="Inspect, check, convert and compare training checkpoints, without the framework that wrote them.",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"auto_envvar_prefix": "CKPTCTL", "help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 the answer is no, 2 wrong usage, 3 could not, 4 credentials missing or refused, "
    "5 stopped but resumable, 130 Ctrl-C.",
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"ckptctl {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Inspect, check, convert and compare training checkpoints, without the framework that wrote them."""


_COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (inspect, ls, show, convert, reshard, diff, strip, validate, push, verify)
}
for module in _COMMANDS.values():
    module.add(app)


def run(argv: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; a user's mistake never shows a traceback."""
    name = next((word for word in argv if word in _COMMANDS), "")
    said = os.environ.get(f"CKPTCTL_{name.upper()}_JSON", "").lower()
    wants_json = "--json" in argv or _output_is_json(argv) or said not in ("", "0", "false", "no", "off")
    command = typer.main.get_command(app)
    try:
        code = command.main(args=list(argv), prog_name="ckptctl", standalone_mode=False)
        sys.stdout.flush()
        if code == _CTRL_C:  # the parser's own, without a word
            return _stopped()
        return code if isinstance(code, int) else 0
    except CkptError as error:
        text.show_error(error, as_json=wants_json, command=name)
        return error.exit_code
    except KeyboardInterrupt:
        return _stopped()
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        # So the parser ends a command whose output nobody reads any more.
        return _unread() if isinstance(ended.__context__, OSError) else int(ended.code or 0)
    except (MemoryError, RecursionError) as error:
        wrapped = CkptError(
            "the input asks for more memory than there is",
            why=type(error).__name__,
            fix="use `--memory` with a smaller value, or report this checkpoint",
            code="out-of-memory",
        )
        text.show_error(wrapped, as_json=wants_json, command=name)
        return wrapped.exit_code
    except OSError as error:
        wrapped = CkptError(error.strerror or str(error), where=str(error.filename or ""), code="system")
        text.show_error(wrapped, as_json=wants_json, command=name)
        return wrapped.exit_code
    except ModuleNotFoundError as error:
        missing = _not_installed(error, name)
        if missing is None:
            return _bug(error, wants_json)
        text.show_error(missing, as_json=wants_json, command=name)
        return missing.exit_code
    except Exception as error:
        if type(error).__name__ == "Abort":
            return _stopped()
        usage = _usage(error)
        if usage is None:
            return _bug(error, wants_json)
        text.show_error(usage, as_json=wants_json, command=name)
        return usage.exit_code


def _not_installed(error: ModuleNotFoundError, command: str) -> CkptError | None:
    """A package that ckptctl needs and that is not there, with the line that installs it; None for a module of ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "ckptctl"):
        return None
    needs = "ckptctl[verify]" if command == "verify" else "ckptctl"
    return CkptError(
        f"{package} is not installed, and ckptctl needs it",
        where=sys.executable,
        why=str(error),
        fix=f"install it: pip install '{needs}'",
        code="needs-install",
    )


def _output_is_json(argv: Sequence[str]) -> bool:
    """Whether `--output json` asks for the one document on stdout, which is then the error's too."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    return any(a in ("--output=json", "-ojson") or (a in ("--output", "-o") and b == "json") for a, b in pairs)


def _usage(error: Exception) -> CkptError | None:
    """The parser's own complaints as ours: they have an exit code and format_message, whatever class they are."""
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    from ckptctl.core.errors import Usage

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ckptctl"
    return Usage(str(message()).rstrip("."), fix=f"see `{path} --help`")


def _unread() -> int:
    """The reader of our output went away (`| head`): not an error. Nothing more may be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _stopped() -> int:
    sys.stderr.write("stopped; what was written so far is kept where --resume finds it\n")
    return _CTRL_C


def _bug(error: Exception, wants_json: bool) -> int:
    """Something we did not think of: say so, with the traceback, as a failure of the tool and not of its user."""
    wrapped = CkptError(
        f"internal error: {type(error).__name__}: {error}",
        fix="please report this, with the traceback on standard error",
        code="internal",
    )
    traceback.print_exception(error, file=sys.stderr)
    text.show_error(wrapped, as_json=wants_json, command="")
    return wrapped.exit_code
