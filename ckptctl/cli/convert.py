"""ckptctl convert."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(
        epilog="Example: ckptctl convert runs/step_300 out --to hf --no-optimizer --model-config runs/config.json"
    )
    def convert(
        src: options.SRC,
        dst: options.DST,
        to: Annotated[
            str,
            typer.Option(
                "--to",
                help="Target: hf, trainer, torch, dcp, deepspeed, torchtitan, lightning, accelerate or megatron.",
                metavar="FORMAT",
                show_default=False,
            ),
        ],
        dtype: Annotated[
            str, typer.Option("--dtype", help="Type of the weights: source, float32, bfloat16 or float16.")
        ] = "source",
        weights: Annotated[
            str,
            typer.Option(
                "--weights",
                help="Weights as the run stored them (model), or their float32 masters where there are any (master).",
            ),
        ] = "model",
        no_optimizer: Annotated[
            bool,
            typer.Option("--no-optimizer", help="Let go of moments, masters, scheduler, random state and counters."),
        ] = False,
        only: options.ONLY = None,
        exclude: options.EXCLUDE = None,
        trainable_only: Annotated[
            bool, typer.Option("--trainable-only", help="Only weights that the optimizer updates.")
        ] = False,
        max_shard_size: options.MAX_SHARD_SIZE = "5GB",
        dp: options.DP = None,
        tp: options.TP = None,
        zero_stage: options.ZERO_STAGE = None,
        universal: options.UNIVERSAL = False,
        pp: options.PP = None,
        vpp: options.VPP = None,
        ep: options.EP = None,
        megatron_format: options.MEGATRON_FORMAT = None,
        optimizer: options.OPTIMIZER = None,
        vocab_divisor: options.VOCAB_DIVISOR = None,
        keep_padding_rows: options.KEEP_PADDING_ROWS = False,
        layer_spec: options.LAYER_SPEC = None,
        like: options.LIKE = None,
        index_keys: Annotated[
            bool,
            typer.Option("--index-keys", help="torch: key the optimizer's state by torch's numbers, not by names."),
        ] = False,
        bare: Annotated[bool, typer.Option("--bare", help="hf: weights without config.json and the like.")] = False,
        merge_adapter: Annotated[
            list[Path] | None,
            typer.Option(
                "--merge-adapter",
                help="Add a LoRA adapter (PEFT) to the weights. May be given several times.",
                metavar="DIR",
            ),
        ] = None,
        names: Annotated[
            str | None,
            typer.Option(
                "--names",
                help="torch, dcp, trainer, deepspeed: names of stacked experts: module5, module4 or disk.",
                metavar="NAMING",
            ),
        ] = None,
        module_prefix: Annotated[
            str | None,
            typer.Option(
                "--module-prefix",
                help="lightning: the attribute of the LightningModule that holds the model (net for self.net).",
                metavar="NAME",
            ),
        ] = None,
        model_config: options.MODEL_CONFIG = None,
        from_: Annotated[
            str | None, typer.Option("--from", envvar="CKPTCTL_CONVERT_FROM", help=options.FROM, metavar="FORMAT")
        ] = None,
        step: options.STEP = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
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
            Path | None, typer.Option("--report", envvar="CKPTCTL_CONVERT_REPORT", help=options.REPORT, metavar="FILE")
        ] = None,
        json: options.JSON = False,
        quiet: options.QUIET = False,
        verbose: options.VERBOSE = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Convert a checkpoint into another format, with its training state, bit for bit unless a cast is asked for."""
        reading = options.reading(locals())
        wanted = operations.Conversion(
            to=to,
            dtype=dtype,
            weights=weights,
            no_optimizer=no_optimizer,
            only=tuple(only or ()),
            exclude=tuple(exclude or ()),
            trainable_only=trainable_only,
            max_shard_size=max_shard_size,
            dp=dp,
            tp=tp,
            index_keys=index_keys,
            bare=bare,
            merge_adapter=tuple(map(str, merge_adapter or ())),
            names=names,
            module_prefix=module_prefix,
            zero_stage=zero_stage,
            universal=universal,
            pp=pp,
            vpp=vpp,
            ep=ep,
            megatron_format=megatron_format,
            optimizer=optimizer,
            vocab_divisor=vocab_divisor,
            keep_padding_rows=keep_padding_rows,
            layer_spec=layer_spec,
            like=like,
        )
        running = operations.Running(dry_run, plan_out, overwrite, resume, jobs, memory, report_file, verify)
        with report.progress(enabled=not (quiet or no_progress or json)) as progress:
            result = operations.convert(src, dst, wanted, reading, running, progress=progress)
        report.show(result, as_json=json, quiet=quiet, verbose=verbose)
        return 0
