"""ckptctl diff."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl diff runs/step_300 out --weights master --ignore-dtype")
    def diff(
        a: Annotated[Path, typer.Argument(metavar="A", help="One checkpoint.", show_default=False)],
        b: Annotated[Path, typer.Argument(metavar="B", help="The other.", show_default=False)],
        weights: Annotated[
            str,
            typer.Option(
                "--weights", help="Compare weights as stored (model), or float32 masters where there are some (master)."
            ),
        ] = "model",
        optimizer: Annotated[
            bool, typer.Option("--optimizer", help="Compare masters, moments, steps and group settings too.")
        ] = False,
        state: Annotated[
            bool, typer.Option("--state", help="Compare scheduler, counters and random state too.")
        ] = False,
        ignore_dtype: Annotated[bool, typer.Option("--ignore-dtype", help="Equal if exact after widening.")] = False,
        rtol: Annotated[
            float, typer.Option("--rtol", help="Floats are equal where |a - b| <= atol + rtol * |b|.", metavar="X")
        ] = 0.0,
        atol: Annotated[float, typer.Option("--atol", help="The absolute part of that tolerance.", metavar="X")] = 0.0,
        stats: Annotated[bool, typer.Option("--stats", help="Norms and cosines, by layer and tensor.")] = False,
        only: options.ONLY = None,
        model_config: options.MODEL_CONFIG = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
        memory: options.MEMORY = "512MiB",
        output: options.HTML = None,
        json: options.JSON = False,
        quiet: options.QUIET = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Compare two checkpoints by value, across formats and layouts. Exit 0 equal, 1 different."""
        reading = options.reading(locals())
        pages = report.html_files(output or ())
        what = operations.Comparison(
            weights=weights,
            optimizer=optimizer,
            state=state,
            ignore_dtype=ignore_dtype,
            only=tuple(only or ()),
            rtol=rtol,
            atol=atol,
            stats=stats or bool(pages),
        )
        with report.progress(enabled=not (quiet or no_progress or json)) as progress:
            result = operations.diff(a, b, what, reading, memory=memory, progress=progress)
        report.write_pages(result, pages)
        report.show(result, as_json=json, quiet=quiet)
        return 0 if result["equal"] else 1
