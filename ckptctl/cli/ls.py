"""ckptctl ls."""

from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl ls model.safetensors '*.q_proj.*'")
    def ls(
        path: options.PATH,
        pattern: Annotated[str, typer.Argument(metavar="[GLOB]", help="Only names that match.")] = "*",
        kind: Annotated[
            list[str] | None,
            typer.Option("--kind", help="Only this kind (weight, exp_avg, ...). May be given several times."),
        ] = None,
        json: options.JSON = False,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_LS_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
    ) -> int:
        """List tensors: name, kind, type, shape, bytes, pieces. Reads headers only."""
        reading = options.reading(locals())
        report.show(operations.ls(path, pattern, reading, kinds=tuple(kind or ())), as_json=json)
        return 0
