"""ckptctl strip."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl strip runs/step_300 step_300_weights")
    def strip(
        src: options.SRC,
        dst: Annotated[
            Path | None,
            typer.Argument(metavar="[DST]", help="Where the result goes; none with --in-place.", show_default=False),
        ] = None,
        keep: Annotated[
            list[str] | None,
            typer.Option(
                "--keep",
                help="What stays besides the weights: masters, optimizer, averages, scheduler, rng, counters, other; "
                "or a glob: only tensors with such names. May be given several times.",
                metavar="PART|GLOB",
            ),
        ] = None,
        drop: Annotated[
            list[str] | None,
            typer.Option(
                "--drop",
                help="What goes, all else stays: a part, or a glob over tensor names. May be given several times.",
                metavar="PART|GLOB",
            ),
        ] = None,
        in_place: Annotated[
            bool, typer.Option("--in-place", help="Put the result in SRC's place once it is whole; needs --yes.")
        ] = False,
        yes: Annotated[bool, typer.Option("--yes", help="With --in-place: SRC may be replaced.")] = False,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_STRIP_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        verify_checksums: options.VERIFY_CHECKSUMS = False,
        layer_names: options.LAYER_NAMES = None,
        dry_run: options.DRY_RUN = False,
        overwrite: options.OVERWRITE = False,
        resume: options.RESUME = False,
        jobs: options.JOBS = 0,
        memory: options.MEMORY = "512MiB",
        report_file: Annotated[
            Path | None, typer.Option("--report", envvar="CKPTCTL_STRIP_REPORT", help=options.REPORT, metavar="FILE")
        ] = None,
        json: options.JSON = False,
        quiet: options.QUIET = False,
        verbose: options.VERBOSE = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Write a checkpoint without parts of it, in its own format: the weights alone by default."""
        reading = options.reading(locals())
        running = operations.Running(dry_run, None, overwrite, resume, jobs, memory, report_file)
        with report.progress(enabled=not (quiet or no_progress or json)) as progress:
            result = operations.strip(
                src,
                dst,
                reading,
                running,
                keep=tuple(keep or ()),
                drop=tuple(drop or ()),
                in_place=in_place,
                yes=yes,
                progress=progress,
            )
        report.show(result, as_json=json, quiet=quiet, verbose=verbose)
        return 0
