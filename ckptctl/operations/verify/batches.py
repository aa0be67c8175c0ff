"""The token batches that steps are trained on: seeded, from a file, or from text. Arrays of NumPy; no torch here.

A batch file has `input_ids` and, where they differ, `labels` (-100: no loss there) and `attention_mask`, each of shape
(rows, columns) for one step or (steps, rows, columns): as .npz, .safetensors, or .json (an object with nested lists, or
a list of such objects, one a step).
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptctl.core.errors import MissingFile, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

Ids = npt.NDArray[np.int64]
FIELDS = ("input_ids", "labels", "attention_mask")
IGNORED = -100
"""A label without a loss."""
_FILE_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step is trained on, each (rows, columns)."""

    input_ids: Ids
    labels: Ids
    attention_mask: Ids | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where batches come from: a file, a file of text with its tokenizer, or numbers drawn from seed."""

    file: Path | str | None = None
    data: Path | str | None = None
    tokenizer: Path | str | None = None
    rows: int = 4
    columns: int = 32
    seed: int = 1234

    @property
    def described(self) -> dict[str, Any]:
        """For the report."""
        if self.file is not None:
            return {"from": "file", "file": str(self.file)}
        if self.data is not None:
            return {"from": "text", "file": str(self.data), "tokenizer": str(self.tokenizer)}
        return {"from": "seed", "seed": self.seed, "rows": self.rows, "columns": self.columns}


def batches(wanted: Wanted, steps: int, vocabulary: int) -> list[Batch]:
    """One batch a step. Usage where the file has fewer, or ids that the vocabulary has not."""
    if wanted.rows < 1 or wanted.columns < 2:
        raise Usage("--batch-size is at least 1, --seq-len at least 2")
    if wanted.file is not None:
        made = _from_file(Path(wanted.file))
    elif wanted.data is not None:
        made = _from_text(wanted, steps)
    else:
        made = [_drawn(wanted, step, vocabulary) for step in range(steps)]
    if len(made) < steps:
        raise Usage(
            f"{wanted.file or wanted.data} has {len(made)} batches, --steps {steps} needs as many",
            fix="add batches, or give fewer --steps",
            code="batches",
        )
    for number, batch in enumerate(made[:steps]):
        lo, hi = int(batch.input_ids.min()), int(batch.input_ids.max())
        if lo < 0 or hi >= vocabulary:
            raise Usage(
                f"batch {number} has the token {lo if lo < 0 else hi}, the vocabulary {vocabulary} tokens",
                fix="take the batch of this model's tokenizer",
                code="batches",
            )
        learned = batch.labels[:, 1:][batch.labels[:, 1:] != IGNORED]
        wrong = batch.labels[(batch.labels != IGNORED) & ((batch.labels < 0) | (batch.labels >= vocabulary))]
        if wrong.size or not learned.size:
            why = f"has the label {wrong[0]}, the vocabulary {vocabulary} tokens" if wrong.size else "has no label"
            raise Usage(
                f"batch {number} {why}",
                fix="labels are tokens, and -100 where there is no loss; a batch without any has no loss at all",
                code="batches",
            )
        _require_mask(batch, number)
    return made[:steps]


def _require_mask(batch: Batch, number: int) -> None:
    """Usage for an attention mask of other numbers than 0 and 1, or of a row that learns and may look at nothing."""
    mask = batch.attention_mask
    if mask is None:
        return
    learns = (batch.labels[:, 1:] != IGNORED).any(axis=1)
    blind = np.flatnonzero(learns & ~mask.any(axis=1))
    odd = mask[(mask != 0) & (mask != 1)]
    if odd.size or blind.size:
        why = f"has {odd[0]} in attention_mask" if odd.size else f"has an attention_mask of zeros in row {blind[0]}"
        raise Usage(
            f"batch {number} {why}",
            why="it is 1 for a token and 0 for padding; a row without any token has nothing to learn from",
            fix="correct the mask, or give that row's labels as -100",
            code="batches",
        )


def _drawn(wanted: Wanted, step: int, vocabulary: int) -> Batch:
    ids = np.random.default_rng([wanted.seed, step]).integers(0, vocabulary, (wanted.rows, wanted.columns), np.int64)
    return Batch(ids, ids)


def _from_file(path: Path) -> list[Batch]:
    if not path.is_file():
        raise MissingFile(f"--batch: there is no file {path}")
    if path.stat().st_size > _FILE_LIMIT:
        raise Usage(f"--batch {path} has {path.stat().st_size} bytes, more than {_FILE_LIMIT}", code="batches")
    suffix = path.suffix
    try:
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _steps_of({k: arrays[k] for k in FIELDS if k in arrays}, path)
        if suffix == ".safetensors":
            from safetensors.numpy import load_file

            return _steps_of({k: v for k, v in load_file(path).items() if k in FIELDS}, path)
        if suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
            every = found if isinstance(found, list) else [found]
            return [b for one in every for b in _steps_of(_arrays(one), path)]
    except (ValueError, OSError, KeyError, TypeError, OverflowError, RecursionError, zipfile.BadZipFile) as err:
        raise _wrong(path, str(err)) from err
    except Exception as err:  # safetensors' own error has no public base
        if isinstance(err, Usage) or not type(err).__module__.startswith("safetensors"):
            raise
        raise _wrong(path, str(err)) from err
    raise _wrong(path, "its name ends in none of .npz, .safetensors, .json")


def _arrays(one: Any) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise TypeError(f"a step is a {type(one).__name__}, not an object with input_ids")
    return {k: np.asarray(one[k]) for k in FIELDS if one.get(k) is not None}


def _steps_of(arrays: Mapping[str, Any], path: Path) -> list[Batch]:
    if "input_ids" not in arrays:
        raise _wrong(path, "it has no input_ids")
    whole: dict[str, Ids] = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (2, 3) or not array.size:
            raise _wrong(path, f"{name} is {array.dtype} {array.shape}, not whole numbers of (rows, columns)")
        whole[name] = np.ascontiguousarray(array[None] if array.ndim == 2 else array, np.int64)
    ids = whole["input_ids"]
    unlike = next((n for n, a in whole.items() if a.shape != ids.shape), None)
    if unlike is not None:
        raise _wrong(path, f"{unlike} is {arrays[unlike].shape}, input_ids {arrays['input_ids'].shape}")
    labels, mask = whole.get("labels", ids), whole.get("attention_mask")
    if ids.shape[2] < 2:
        raise _wrong(path, "a row of one token has no next one to learn")
    return [Batch(ids[i], labels[i], None if mask is None else mask[i]) for i in range(len(ids))]


def _wrong(path: Path, why: str) -> Usage:
    return Usage(f"--batch {path} is no batch", why=why, fix="see docs/commands/verify.md", code="batches")


def _from_text(wanted: Wanted, steps: int) -> list[Batch]:
    """Tokens of the texts one after the other, cut into rows; what is left over is not used."""
    from ckptctl.operations.verify.needs import transformers_module

    path = Path(str(wanted.data))
    if wanted.tokenizer is None:
        raise Usage("--data needs --tokenizer: a folder with the model's tokenizer files")
    if not path.is_file():
        raise MissingFile(f"--data: there is no file {path}")
    if not Path(wanted.tokenizer).exists():
        raise MissingFile(f"--tokenizer: there is nothing at {wanted.tokenizer}")
    try:
        tokenizer = transformers_module().AutoTokenizer.from_pretrained(str(wanted.tokenizer), local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise Usage(
            f"--tokenizer {wanted.tokenizer}: no tokenizer could be loaded", why=str(err).splitlines()[0]
        ) from err
    needed, tokens = steps * wanted.rows * wanted.columns, list[int]()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(tokens) >= needed:
                    break
                if line.strip():
                    tokens += tokenizer(_text(line, path, number))["input_ids"]
    except UnicodeDecodeError as err:
        raise Usage(f"--data {path}: it is no UTF-8 text", why=str(err), code="batches") from err
    if len(tokens) < needed:
        raise Usage(
            f"{path} has {len(tokens)} tokens, {steps} batches of {wanted.rows} x {wanted.columns} need {needed}",
            fix="give more text, or smaller --batch-size, --seq-len, --steps",
            code="batches",
        )
    ids = np.array(tokens[:needed], np.int64).reshape(steps, wanted.rows, wanted.columns)
    return [Batch(one, one) for one in ids]


def _text(line: str, path: Path, number: int) -> str:
    try:
        found = json.loads(line)
    except ValueError as err:
        raise Usage(f"--data {path}: line {number} is no JSON", why=str(err), code="batches") from err
    text = found if isinstance(found, str) else found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise Usage(f'--data {path}: line {number} is no text and no object with a "text"', code="batches")
    return text
