"""`python -m ckptctl` and the `ckptctl` command. `--version` answers before anything heavy is imported."""

from __future__ import annotations

import io
import sys

from ckptctl import __version__


def main() -> int:
    """Run the command line with sys.argv; returns the exit code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        sys.stdout.write(f"ckptctl {__version__}\n")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal has no letters for is no failure
    import gc

    from ckptctl.cli.main import run

    # One short job that makes hardly any cycles: looking for some every 700 objects is a tenth of the planning.
    gc.set_threshold(100_000, 20, 20)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
