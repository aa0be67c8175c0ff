"""Options that several commands share, with one help text each."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptctl import operations

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint: a folder or a file.", show_default=False)]
SRC = Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint to read; never changed.", show_default=False)]
DST = Annotated[
    Path, typer.Argument(metavar="DST", help="Where the result goes. Must not be there yet.", show_default=False)
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
MODEL_CONFIG = Annotated[
    Path | None,
    typer.Option("--model-config", help="The model's config.json, or a folder that has one.", metavar="DIR|FILE"),
]
FROM = "The source's format; found by itself otherwise."
STEP = Annotated[
    str | None, typer.Option("--step", help="Which step of a run's folder: a number, or latest.", metavar="N|latest")
]
PARAM_ORDER = Annotated[
    Path | None,
    typer.Option(
        "--param-order",
        help="Names of the optimizer's parameters, one a line, in its order: for state keyed by numbers.",
        metavar="FILE",
    ),
]
MODULE = Annotated[
    str | None,
    typer.Option(
        "--module",
        help="Which module's weights are meant, where an outer one holds several (Lightning) or several models lie "
        "side by side (Accelerate): its name; '' takes all names as they are.",
        metavar="NAME",
    ),
]
KEY_MAP = Annotated[
    Path | None,
    typer.Option(
        "--key-map",
        help="Rules for private names and shapes: rename, split, concat, ...; TOML or JSON.",
        metavar="FILE",
    ),
]
LAYER_NAMES = Annotated[
    Path | None,
    typer.Option(
        "--layer-names",
        help="What a DeepSpeed pipeline's layers are called: a layer's number and a name a line.",
        metavar="FILE",
    ),
]
REPLICA = Annotated[
    str | None,
    typer.Option(
        "--replica",
        help="Whose copy is taken where ranks hold different ones of a tensor: first or last. An error otherwise.",
        metavar="WHICH",
    ),
]
VERIFY_REPLICAS = Annotated[
    bool, typer.Option("--verify-replicas", help="Read and compare all copies of what several ranks hold.")
]
VERIFY_CHECKSUMS = Annotated[
    bool,
    typer.Option("--verify-checksums", help="Read the source whole first; compare it with its torch files' checksums."),
]
ONLY = Annotated[
    list[str] | None,
    typer.Option("--only", help="Take only tensors whose name matches. May be given several times.", metavar="GLOB"),
]
EXCLUDE = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="Leave out tensors whose name matches. May be given several times.", metavar="GLOB"),
]
VERIFY = Annotated[
    bool,
    typer.Option("--verify", help="Train the next step from the result too, before it has its name (needs torch)."),
]
OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace DST; it stands until the result is complete.")]
RESUME = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted job for this DST.")]
JOBS = Annotated[int, typer.Option("--jobs", "-j", min=0, help="Threads; 0 chooses.")]
MEMORY = Annotated[str, typer.Option("--memory", help="Memory for data, above the interpreter.", metavar="SIZE")]
REPORT = "Write the fidelity report to a file as JSON too."
DRY_RUN = Annotated[
    bool, typer.Option("--dry-run", help="Plan and check only: what would be read, written and needed.")
]
PLAN_OUT = Annotated[
    Path | None, typer.Option("--plan-out", help="Write the plan to a file as JSON lines.", metavar="FILE")
]
MAX_SHARD_SIZE = Annotated[
    str,
    typer.Option(
        "--max-shard-size", help="Largest file of a Hugging Face folder, in bytes of tensors.", metavar="SIZE"
    ),
]
DP = Annotated[int | None, typer.Option("--dp", min=1, help="Data-parallel ranks of the result.")]
TP = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of the result.")]
VPP = Annotated[int | None, typer.Option("--vpp", min=1, help="Chunks of layers a stage (megatron).")]
MEGATRON_FORMAT = Annotated[
    str | None,
    typer.Option("--megatron-format", help="megatron: torch (classic ranks) or torch_dist.", metavar="FORMAT"),
]
OPTIMIZER = Annotated[str | None, typer.Option("--optimizer", help="megatron: plain or distributed.", metavar="KIND")]
VOCAB_DIVISOR = Annotated[
    int | None,
    typer.Option(
        "--vocab-divisor",
        min=1,
        help="megatron: rows of the vocabulary become a multiple of it times tp. The source's, else 128.",
    ),
]
KEEP_PADDING_ROWS = Annotated[
    bool,
    typer.Option(
        "--keep-padding-rows",
        help="megatron: where the padded vocabulary's size changes, keep trained padding rows that fit. Else zeros.",
    ),
]
LAYER_SPEC = Annotated[
    str | None,
    typer.Option(
        "--layer-spec",
        help="megatron: names of megatron-core's local layers or of the Transformer Engine's (local, te).",
        metavar="SPEC",
    ),
]
LIKE = Annotated[
    Path | None,
    typer.Option(
        "--like",
        help="megatron, deepspeed, dcp: the run that the result is for: a checkpoint of it, or for megatron a file of "
        "its arguments. What no other flag says is as it has it.",
        metavar="PATH",
    ),
]
HTML = Annotated[
    list[str] | None,
    typer.Option("--output", "-o", help="One self-contained page, html=FILE, besides.", metavar="html=FILE"),
]
QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no report on the terminal; errors only.")]
VERBOSE = Annotated[bool, typer.Option("--verbose", "-v", help="More detail on stderr.")]
NO_PROGRESS = Annotated[bool, typer.Option("--no-progress", help="No progress bar.")]

ZERO_STAGE = Annotated[
    int | None, typer.Option("--zero-stage", help="deepspeed: ZeRO stage, 0 to 3.", metavar="S", show_default=False)
]
UNIVERSAL = Annotated[bool, typer.Option("--universal", help="deepspeed: a universal folder, for any number of ranks.")]
PP = Annotated[int | None, typer.Option("--pp", help="Pipeline stages.", metavar="N", show_default=False)]
EP = Annotated[int | None, typer.Option("--ep", help="Expert-parallel ranks.", metavar="N", show_default=False)]


def reading(given: Mapping[str, Any]) -> operations.Reading:
    """What a command's own arguments (its `locals()`) say of how sources are read.

    Options that the command does not have keep their defaults. The option --from cannot be called `from` in Python.
    """
    named = {**given, "format": given.get("from_")}
    return operations.Reading(**{f.name: named[f.name] for f in fields(operations.Reading) if f.name in named})
