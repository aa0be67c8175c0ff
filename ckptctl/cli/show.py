"""ckptctl show."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl show step_300 lm_head.weight --slice '0:4, :8' --stats")
    def show(
        path: options.PATH,
        name: Annotated[
            str,
            typer.Argument(
                metavar="NAME", help="A tensor's name, or that of a value (`scheduler`).", show_default=False
            ),
        ],
        kind: Annotated[
            str, typer.Option("--kind", help="Which of the parameter's states: weight, exp_avg, ...")
        ] = "weight",
        slice_: Annotated[
            str,
            typer.Option(
                "--slice",
                envvar="CKPTCTL_SHOW_SLICE",
                help="Which elements, as in NumPy: '0:4, :8'. Reads only what it needs.",
            ),
        ] = "",
        stats: Annotated[
            bool, typer.Option("--stats", help="Minimum, maximum, mean, norm, and how many are NaN, infinite or zero.")
        ] = False,
        npy: Annotated[
            Path | None, typer.Option("--npy", help="Write the elements to a .npy file.", metavar="FILE")
        ] = None,
        json: options.JSON = False,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_SHOW_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
        memory: options.MEMORY = "512MiB",
    ) -> int:
        """Show one tensor's values and statistics, or a value of the training state."""
        reading = options.reading(locals())
        result = operations.show(path, name, reading, kind=kind, selection=slice_, stats=stats, npy=npy, memory=memory)
        report.show(result, as_json=json)
        return 0
