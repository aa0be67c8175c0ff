"""ckptctl push."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl push runs/step_300 org/my-model --private")
    def push(
        src: options.SRC,
        repo: Annotated[
            str, typer.Argument(metavar="OWNER/NAME", help="The repository on the Hub; made where it is new.")
        ],
        revision: Annotated[
            str, typer.Option("--revision", help="The branch; made where it is new.", metavar="BRANCH")
        ] = "main",
        create_pr: Annotated[
            bool, typer.Option("--create-pr", help="Leave it as an open pull request, for others to merge.")
        ] = False,
        private: Annotated[
            bool, typer.Option("--private", help="A new repository is private; one that is there must be.")
        ] = False,
        message: Annotated[
            str | None, typer.Option("--message", "-m", help="The commit's message.", metavar="TEXT")
        ] = None,
        no_check: Annotated[
            bool, typer.Option("--no-check", help="Push what `validate` finds errors in, too.")
        ] = False,
        include_state: Annotated[
            bool,
            typer.Option("--include-state", help="Keep the training state: the result is a folder for the Trainer."),
        ] = False,
        include: Annotated[
            list[str] | None,
            typer.Option(
                "--include", help="Only files whose path matches. May be given several times.", metavar="GLOB"
            ),
        ] = None,
        exclude: Annotated[
            list[str] | None,
            typer.Option("--exclude", help="No files whose path matches. May be given several times.", metavar="GLOB"),
        ] = None,
        as_is: Annotated[
            bool,
            typer.Option(
                "--as-is", help="In the source's own format, with its training state; a run's folder step by step."
            ),
        ] = False,
        repo_type: Annotated[
            str, typer.Option("--repo-type", help="The repository's type: model or dataset.", metavar="TYPE")
        ] = "model",
        keep_last: Annotated[
            int | None,
            typer.Option("--keep-last", min=1, help="With --as-is: older steps are deleted on the Hub.", metavar="N"),
        ] = None,
        dtype: Annotated[
            str, typer.Option("--dtype", help="Type of the weights: source, float32, bfloat16 or float16.")
        ] = "source",
        weights: Annotated[
            str,
            typer.Option(
                "--weights", help="Weights as the run stored them (model), or their float32 masters (master)."
            ),
        ] = "model",
        max_shard_size: options.MAX_SHARD_SIZE = "5GB",
        work_dir: Annotated[
            Path | None,
            typer.Option(
                "--work-dir", help="Where a conversion lies until it is sent. The system's otherwise.", metavar="DIR"
            ),
        ] = None,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_PUSH_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Say what would be sent; nothing is written here or on the Hub.")
        ] = False,
        jobs: options.JOBS = 0,
        memory: options.MEMORY = "512MiB",
        json: options.JSON = False,
        quiet: options.QUIET = False,
        verbose: options.VERBOSE = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Push a checkpoint to the Hugging Face Hub: checked, converted, with a card, whole, and compared after."""
        reading = options.reading(locals())
        wanted = operations.Push(
            repo,
            revision,
            create_pr,
            private,
            message,
            check=not no_check,
            include_state=include_state,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            as_is=as_is,
            kind=repo_type,
            keep_last=keep_last,
            dtype=dtype,
            weights=weights,
            max_shard_size=max_shard_size,
            work_dir=work_dir,
        )
        running = operations.Running(dry_run, jobs=jobs, memory=memory)
        with report.progress(enabled=not (quiet or no_progress or json)) as progress:
            result = operations.push(src, wanted, reading, running, progress=progress)
        report.show(result, as_json=json, quiet=quiet, verbose=verbose)
        return 0
