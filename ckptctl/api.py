"""The Python API: a checkpoint as a lazy mapping of names to tensors, and the commands as functions.

Everything here raises `CkptError` (see `core.errors`), whose what, where, why and fix are those that the command line
prints.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptctl import operations
from ckptctl.core.checkpoint import WEIGHTS, Checkpoint
from ckptctl.core.errors import Unsupported
from ckptctl.core.tensor import Key
from ckptctl.operations.elsewhere import near
from ckptctl.operations.opening import require_safe
from ckptctl.operations.showing import selected, statistics
from ckptctl.operations.tensors import TensorReader
from ckptctl.remote import places

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

_ROWS_SHOWN = 100


class TensorHandle:
    """One tensor of an open checkpoint. Nothing is read before numpy() or an index asks for it."""

    def __init__(self, view: CheckpointView, key: Key) -> None:
        self._view, self._key = view, key
        self._tensor = view.checkpoint.tensors[key]

    @property
    def name(self) -> str:
        """Its name, as the source's model has it."""
        return self._key.name

    @property
    def kind(self) -> str:
        """weight, exp_avg, exp_avg_sq, step, ..."""
        return self._key.kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._tensor.shown

    @property
    def dtype(self) -> str:
        """Its element type by torch's name: float32, bfloat16, ..."""
        return self._tensor.dtype.name

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self._tensor.nbytes

    def numpy(self) -> npt.NDArray[Any]:
        """All of it as a NumPy array, in its own type (ml_dtypes' for bfloat16 and float8).

        Bytes for types smaller than a byte.
        """
        return self._view.reader_of(self._key).array(self._key)

    def __getitem__(self, index: object) -> npt.NDArray[Any]:
        """A basic NumPy index: integers, slices, `...`. Reads only what it needs. IndexError as NumPy raises it."""
        return selected(self._view.reader_of(self._key), self._key, index)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def statistics(self) -> dict[str, Any]:
        """Minimum, maximum, mean, norm, and how many elements are NaN, infinite or zero.

        Reads it once in bounded memory.
        """
        return statistics(self._view.reader_of(self._key), self._key)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}: {self.dtype} {self.shape}>"


class CheckpointView(Mapping[str, TensorHandle]):
    """A checkpoint as a mapping from weights' names to handles. Use as a context, or close it."""

    def __init__(self, checkpoint: Checkpoint, memory_nbytes: int = 256 << 20) -> None:
        self.checkpoint = checkpoint
        self._names = {k.name: k for k in checkpoint.tensors if k.kind in WEIGHTS}
        self._reader = TensorReader(checkpoint, memory_nbytes)

    def reader_of(self, key: Key) -> TensorReader:
        """What reads a tensor's values. Unsupported for one whose bytes are not plain elements."""
        why = self.checkpoint.tensors[key].why_unsupported
        if why:
            raise Unsupported(f"{key.name} cannot be read", why=why)
        return self._reader

    def __getitem__(self, name: str) -> TensorHandle:
        return TensorHandle(self, self._names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def format(self) -> str:
        """hf, torch, dcp."""
        return self.checkpoint.format

    @property
    def step(self) -> int | None:
        """The training step, None where the checkpoint does not say."""
        return self.checkpoint.step

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that are there."""
        return self.checkpoint.kinds

    @property
    def values(self) -> Any:
        """The training state that is no tensor, by name (scheduler, step, ...), as plain data and inert records."""
        return dict(self.checkpoint.values)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The model's config.json as data, None where there is none."""
        return self.checkpoint.facts.config

    def state(self, name: str, kind: str) -> TensorHandle:
        """One of a parameter's states: master, exp_avg, exp_avg_sq, step, ... KeyError where it is not there."""
        key = Key(name, kind)
        if key not in self.checkpoint.tensors:
            raise KeyError((name, kind))
        return TensorHandle(self, key)

    def tensors(self) -> Iterator[TensorHandle]:
        """Every tensor of every kind."""
        return (TensorHandle(self, k) for k in self.checkpoint.tensors)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __enter__(self) -> CheckpointView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"{self.format}, {len(self)} weights, kinds {', '.join(self.kinds)}, step {self.step}"
        return f"<checkpoint {places.shown(self.checkpoint.root)}: {what}>"

    def _repr_html_(self) -> str:
        """A table for notebooks: the first tensors, and how many there are."""
        keys = list(self.checkpoint.tensors)[:_ROWS_SHOWN]
        rows = []
        for key in keys:
            t = self.checkpoint.tensors[key]
            cells = (key.name, key.kind, t.dtype.name, " x ".join(map(str, t.shown)) or "scalar", f"{t.nbytes:,}")
            rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
        head = "".join(f"<th>{h}</th>" for h in ("name", "kind", "type", "shape", "bytes"))
        left = len(self.checkpoint.tensors) - len(keys)
        more = f"<p>and {left:,} more</p>" if left else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{table}{more}"


def open(
    path: str | Path,
    *,
    model_config: str | Path | None = None,
    format: str | None = None,
    step: str | None = None,
    param_order: str | Path | None = None,
    module: str | None = None,
    key_map: str | Path | None = None,
    layer_names: str | Path | None = None,
    replica: str | None = None,
    verify_replicas: bool = False,
) -> CheckpointView:
    """Open a checkpoint of any format that is read. Reads headers only; Unsafe where a pickle in it would run code.

    A path may be an address on the Hub, hf://owner/name[@revision][/path]: values are read from there when asked for.
    """
    checkpoint, _ = operations.open_checkpoint(
        near(path),
        operations.Reading(
            model_config, format, step, param_order, module, key_map, layer_names, replica, verify_replicas
        ),
    )
    require_safe(checkpoint)
    return CheckpointView(checkpoint)


def inspect(
    path: str | Path,
    *,
    model_config: str | Path | None = None,
    layer_names: str | Path | None = None,
    tensors: bool = False,
) -> dict[str, Any]:
    """What `ckptctl inspect --json` prints."""
    return operations.inspect(path, operations.Reading(model_config, layer_names=layer_names), tensors=tensors)


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    model_config: str | Path | None = None,
    param_order: str | Path | None = None,
    module: str | None = None,
    key_map: str | Path | None = None,
    layer_names: str | Path | None = None,
    verify_checksums: bool = False,
    replica: str | None = None,
    verify_replicas: bool = False,
    memory: str = "512MiB",
    jobs: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    progress: Callable[[Any], None] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl convert` does; returns what its `--json` prints.

    flags are those of the command, with underscores: dtype, weights, no_optimizer, only, exclude, trainable_only,
    max_shard_size, dp, index_keys, bare, names, merge_adapter, module_prefix. TypeError for one that does not exist.
    """
    reading = operations.Reading(
        model_config,
        param_order=param_order,
        module=module,
        key_map=key_map,
        layer_names=layer_names,
        replica=replica,
        verify_replicas=verify_replicas,
        verify_checksums=verify_checksums,
    )
    running = operations.Running(dry_run=dry_run, overwrite=overwrite, resume=resume, jobs=jobs, memory=memory)
    return operations.convert(src, dst, operations.Conversion(to, **flags), reading, running, progress=progress)


def reshard(
    src: str | Path,
    dst: str | Path,
    *,
    model_config: str | Path | None = None,
    param_order: str | Path | None = None,
    layer_names: str | Path | None = None,
    verify_checksums: bool = False,
    memory: str = "512MiB",
    jobs: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl reshard` does; returns what its `--json` prints.

    flags are the command's layout flags, with underscores: dp, tp, pp, vpp, ep, zero_stage, universal, megatron_format,
    optimizer, max_shard_size, ... Usage for one that the source's format does not take.
    """
    reading = operations.Reading(
        model_config, param_order=param_order, layer_names=layer_names, verify_checksums=verify_checksums
    )
    running = operations.Running(dry_run=dry_run, overwrite=overwrite, resume=resume, jobs=jobs, memory=memory)
    return operations.reshard(src, dst, reading, running, **flags)


def strip(
    src: str | Path,
    dst: str | Path | None = None,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    in_place: bool = False,
    yes: bool = False,
    model_config: str | Path | None = None,
    layer_names: str | Path | None = None,
    verify_checksums: bool = False,
    memory: str = "512MiB",
    jobs: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """What `ckptctl strip` does; returns what its `--json` prints."""
    running = operations.Running(dry_run=dry_run, overwrite=overwrite, resume=resume, jobs=jobs, memory=memory)
    return operations.strip(
        src,
        dst,
        operations.Reading(model_config, layer_names=layer_names, verify_checksums=verify_checksums),
        running,
        keep=tuple(keep),
        drop=tuple(drop),
        in_place=in_place,
        yes=yes,
    )


def push(
    src: str | Path,
    repo: str,
    *,
    model_config: str | Path | None = None,
    step: str | None = None,
    memory: str = "512MiB",
    jobs: int = 0,
    dry_run: bool = False,
    progress: Callable[[Any], None] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl push` does; returns what its `--json` prints.

    flags are those of the command, with underscores: revision, create_pr, private, message, include_state, include,
    exclude, as_is, keep_last, dtype, weights, max_shard_size, work_dir; check=False for --no-check, kind for
    --repo-type. TypeError for one that does not exist.
    """
    wanted = operations.Push(repo, **flags)
    running = operations.Running(dry_run=dry_run, jobs=jobs, memory=memory)
    return operations.push(src, wanted, operations.Reading(model_config, step=step), running, progress=progress)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    model_config: str | Path | None = None,
    layer_names: str | Path | None = None,
    memory: str = "512MiB",
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl diff` does; returns what its `--json` prints.

    flags are those of the command: weights, optimizer, state, ignore_dtype, only.
    """
    reading = operations.Reading(model_config, layer_names=layer_names)
    return operations.diff(a, b, operations.Comparison(**flags), reading, memory=memory)


def validate(
    *paths: str | Path,
    model_config: str | Path | None = None,
    layer_names: str | Path | None = None,
    memory: str = "256MiB",
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl validate` does; returns what its JSON report holds.

    flags are those of the command: level, checksums, against, select, ignore, fail_on, baseline, must_resume. TypeError
    for one that does not exist.
    """
    reading = operations.Reading(model_config, layer_names=layer_names)
    return operations.validate(paths, operations.Validation(**flags), reading, memory=memory)


def verify(
    a: str | Path,
    b: str | Path | None = None,
    *,
    model_config: str | Path | None = None,
    layer_names: str | Path | None = None,
    batch: str | Path | None = None,
    rows: int = 4,
    columns: int = 32,
    seed: int = 1234,
    **flags: Any,
) -> dict[str, Any]:
    """What `ckptctl verify` does; returns what its `--json` prints. Needs torch and Transformers.

    batch is a batch file; else rows x columns tokens are drawn from seed. flags are those of the command: steps,
    device, dtype, layers, memory, offload, lr (a tuple), clip, no_optimizer, no_model, same_settings, vocabulary.
    TypeError for one that does not exist.
    """
    wanted = operations.Batches(batch, rows=rows, columns=columns, seed=seed)
    what = operations.Verification(batch=wanted, **flags)
    return operations.verify_training(a, b, what, operations.Reading(model_config, layer_names=layer_names))
