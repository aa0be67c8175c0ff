"""ckptctl reshard."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl reshard runs/step_300 step_300_dp8 --dp 8")
    def reshard(
        src: options.SRC,
        dst: options.DST,
        dp: options.DP = None,
        tp: options.TP = None,
        pp: options.PP = None,
        vpp: options.VPP = None,
        ep: options.EP = None,
        zero_stage: options.ZERO_STAGE = None,
        universal: options.UNIVERSAL = False,
        megatron_format: options.MEGATRON_FORMAT = None,
        optimizer: options.OPTIMIZER = None,
        vocab_divisor: options.VOCAB_DIVISOR = None,
        keep_padding_rows: options.KEEP_PADDING_ROWS = False,
        layer_spec: options.LAYER_SPEC = None,
        like: options.LIKE = None,
        max_shard_size: Annotated[
            str | None,
            typer.Option(
                "--max-shard-size", help="Largest file of a Hugging Face folder, in bytes of tensors.", metavar="SIZE"
            ),
        ] = None,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_RESHARD_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        verify_checksums: options.VERIFY_CHECKSUMS = False,
        layer_names: options.LAYER_NAMES = None,
        dry_run: options.DRY_RUN = False,
        plan_out: options.PLAN_OUT = None,
        verify: options.VERIFY = False,
        overwrite: options.OVERWRITE = False,
        resume: options.RESUME = False,
        jobs: options.JOBS = 0,
        memory: options.MEMORY = "512MiB",
        report_file: Annotated[
            Path | None, typer.Option("--report", envvar="CKPTCTL_RESHARD_REPORT", help=options.REPORT, metavar="FILE")
        ] = None,
        json: options.JSON = False,
        quiet: options.QUIET = False,
        verbose: options.VERBOSE = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Change a checkpoint's layout and keep its format.

        A DCP for other ranks, DeepSpeed for another ZeRO stage and other ranks, Megatron for another mesh,
        Hugging Face in files of another size.
        """
        reading = options.reading(locals())
        running = operations.Running(dry_run, plan_out, overwrite, resume, jobs, memory, report_file, verify)
        with report.progress(enabled=not (quiet or no_progress or json)) as progress:
            result = operations.reshard(
                src,
                dst,
                reading,
                running,
                dp=dp,
                tp=tp,
                pp=pp,
                ep=ep,
                zero_stage=zero_stage,
                universal=universal,
                max_shard_size=max_shard_size,
                progress=progress,
                vpp=vpp,
                megatron_format=megatron_format,
                optimizer=optimizer,
                vocab_divisor=vocab_divisor,
                keep_padding_rows=keep_padding_rows,
                layer_spec=layer_spec,
                like=like,
            )
        report.show(result, as_json=json, quiet=quiet, verbose=verbose)
        return 0
