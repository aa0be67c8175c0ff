"""ckptctl verify."""

from pathlib import Path
from typing import Annotated

import typer

from ckptctl import operations, report
from ckptctl.cli import options


def add(app: typer.Typer) -> None:
    """Register the command."""

    @app.command(epilog="Example: ckptctl verify runs/step_300 out --model-config runs/config.json")
    def verify(
        a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
        b: Annotated[
            Path | None,
            typer.Argument(
                metavar="[B]",
                help="Another that should train on alike. Without it, A against its own records.",
                show_default=False,
            ),
        ] = None,
        steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to train.")] = 1,
        batch: Annotated[
            Path | None,
            typer.Option("--batch", help="Token batches, one a step: .npz, .safetensors or .json.", metavar="FILE"),
        ] = None,
        data: Annotated[
            Path | None, typer.Option("--data", help="Text to train on: JSON lines with a text each.", metavar="JSONL")
        ] = None,
        tokenizer: Annotated[
            Path | None, typer.Option("--tokenizer", help="Folder of the tokenizer for --data.", metavar="DIR")
        ] = None,
        batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows of a batch.")] = 4,
        seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a row.")] = 32,
        seed: Annotated[int, typer.Option("--seed", min=0, help="Draws the tokens, and dropout.")] = 1234,
        device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
        dtype: Annotated[
            str, typer.Option("--dtype", help="Type to compute in: auto (the weights'), fp32, bf16 or fp16.")
        ] = "auto",
        layers: Annotated[
            int | None, typer.Option("--layers", help="Take only the model's first layers.", metavar="N")
        ] = None,
        offload: Annotated[
            bool, typer.Option("--offload", help="Keep no optimizer state on the device between steps.")
        ] = False,
        lr: Annotated[
            str | None,
            typer.Option("--lr", help="Learning rates of the steps, the last for all that follow.", metavar="X,..."),
        ] = None,
        clip_grad: Annotated[
            float, typer.Option("--clip-grad", min=0.0, help="Largest norm of the gradient; 0: any.", metavar="X")
        ] = 0.0,
        no_optimizer: Annotated[
            bool, typer.Option("--no-optimizer", help="Loss, logits and gradients alone; no update.")
        ] = False,
        native: Annotated[
            bool,
            typer.Option("--native", help="The checkpoint's own framework takes the same steps too; compared."),
        ] = False,
        python: Annotated[
            Path | None,
            typer.Option("--python", help="The interpreter that has the framework, for --native.", metavar="PATH"),
        ] = None,
        native_timeout: Annotated[
            float, typer.Option("--native-timeout", min=1.0, help="Seconds that --native may take.", metavar="S")
        ] = 900.0,
        recompute: Annotated[
            str | None,
            typer.Option(
                "--recompute",
                help="A step under each activation recomputation policy: none, full, every=N, selective.",
                metavar="POLICY,...",
            ),
        ] = None,
        find_max_batch: Annotated[
            bool, typer.Option("--find-max-batch", help="The largest batch under each policy, on a GPU.")
        ] = False,
        output: Annotated[
            list[str] | None,
            typer.Option("--output", "-o", help="A page or a picture besides.", metavar="html=FILE|png=FILE"),
        ] = None,
        no_model: Annotated[
            bool,
            typer.Option("--no-model", help="Draw gradients instead: the update alone, for models unknown here."),
        ] = False,
        same_settings: Annotated[
            bool,
            typer.Option(
                "--same-settings", help="Train both with A's settings (lr, decay, ...): what B has else is a note."
            ),
        ] = False,
        vocabulary: Annotated[
            str,
            typer.Option(
                "--vocabulary", help="megatron: train rows of padding too (padded) or not (true).", metavar="WHICH"
            ),
        ] = "auto",
        model_config: options.MODEL_CONFIG = None,
        param_order: options.PARAM_ORDER = None,
        module: options.MODULE = None,
        key_map: options.KEY_MAP = None,
        replica: options.REPLICA = None,
        verify_replicas: options.VERIFY_REPLICAS = False,
        layer_names: options.LAYER_NAMES = None,
        memory: options.MEMORY = "512MiB",
        json: options.JSON = False,
        quiet: options.QUIET = False,
        no_progress: options.NO_PROGRESS = False,
    ) -> int:
        """Train the next step from a checkpoint, or two, and compare. Exit 0 equal, 1 not. Needs torch."""
        files = report.verify_files(output or (), has_picture=recompute is not None or find_max_batch)
        reading = options.reading(locals())
        what = operations.Verification(
            steps=steps,
            batch=operations.Batches(batch, data, tokenizer, batch_size, seq_len, seed),
            device=device,
            dtype=dtype,
            layers=layers,
            memory=memory,
            offload=offload,
            lr=operations.parse_rates(lr),
            clip=clip_grad,
            no_optimizer=no_optimizer,
            native=native,
            python=None if python is None else str(python),
            native_timeout_s=native_timeout,
            recompute=recompute,
            find_max_batch=find_max_batch,
            no_model=no_model,
            same_settings=same_settings,
            vocabulary=vocabulary,
        )
        say = report.saying(enabled=not (quiet or no_progress or json))
        result = operations.verify_training(a, b, what, reading, progress=say)
        report.write_verify_files(result, files)
        report.show(result, as_json=json, quiet=quiet)
        return 0 if result["equal"] else 1
