"""ckptctl validate."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl validate runs/ --level values --output text --output junit=report.xml")
    def validate(
        paths: Annotated[
            list[Path],
            typer.Argument(metavar="PATH...", help="Checkpoints, or folders of runs.", show_default=False),
        ],
        level: Annotated[
            str,
            typer.Option(
                "--level",
                help="header: each file's header. structure: all that metadata tell. values: every byte.",
                metavar="LEVEL",
            ),
        ] = "structure",
        checksums: Annotated[
            bool,
            typer.Option(
                "--checksums", help="Check SHA-256 lists beside the files, and the Hub's hashes in its cache."
            ),
        ] = False,
        against: Annotated[
            Path | None,
            typer.Option(
                "--against",
                help="A folder, hf://owner/name, or a list of SHA-256 sums: what should be the same is compared.",
                metavar="DIR|FILE",
            ),
        ] = None,
        select: Annotated[
            list[str] | None,
            typer.Option("--select", help="Report only these rules: CK101, CK1, or a kind.", metavar="RULE"),
        ] = None,
        ignore: Annotated[
            list[str] | None,
            typer.Option("--ignore", help="Leave these rules out: CK101, CK1, or a kind.", metavar="RULE"),
        ] = None,
        fail_on: Annotated[
            str,
            typer.Option("--fail-on", help="Exit 1 from this severity on: error, warning or info.", metavar="SEVERITY"),
        ] = "error",
        baseline: Annotated[
            Path | None,
            typer.Option(
                "--baseline", help="An earlier JSON report: what it has is not reported again.", metavar="FILE"
            ),
        ] = None,
        resumable: Annotated[
            bool, typer.Option("--resumable", help="It is an error where no run can go on from the checkpoint.")
        ] = False,
        output: Annotated[
            list[str] | None,
            typer.Option(
                "--output",
                "-o",
                help="text, json, junit, sarif, github or gitlab, to stdout or a file. May be given several times.",
                metavar="FORM[=FILE]",
            ),
        ] = None,
        json: options.JSON = False,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_VALIDATE_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
        memory: options.MEMORY = "256MiB",
        jobs: options.JOBS = 0,
        quiet: options.QUIET = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Tell whether checkpoints are intact, safe, and can be resumed from. Changes nothing, runs nothing."""
        wanted = report.outputs([*(output or ()), *(["json"] if json else [])])
        reading = options.reading(locals())
        what = operations.Validation(
            level, checksums, against, tuple(select or ()), tuple(ignore or ()), fail_on, baseline, resumable
        )
        shown = not (quiet or no_progress or any(o.form == "json" and not o.file for o in wanted))
        with report.progress(enabled=shown) as progress:
            document = operations.validate(paths, what, reading, memory=memory, jobs=jobs, progress=progress)
        report.show_findings(document, [o for o in wanted if o.file or o.form != "text" or not quiet])
        return 0 if document["ok"] else 1
