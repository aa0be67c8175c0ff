"""ckptctl inspect."""

from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl inspect runs/step_300 --json")
    def inspect(
        path: options.PATH,
        tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
        output: options.HTML = None,
        json: options.JSON = False,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_INSPECT_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
    ) -> int:
        """Show what a checkpoint holds: format, layout, tensors, training state, what is missing.

        Reads headers only.
        """
        reading = options.reading(locals())
        pages = report.html_files(output or ())
        document = operations.inspect(path, reading, tensors=tensors or bool(pages), places=bool(pages))
        report.write_pages(document, pages)
        for name in ("holdings", *(() if tensors else ("tensors",))):
            document.pop(name, None)  # what only the page has
        report.show(document, as_json=json)
        return 0
