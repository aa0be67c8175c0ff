"""A conversion laid out, planned and checked, ready to run. Nothing is written; what checks need is read."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import NoSpace, Unsupported, Usage
from ckptctl.core.sizes import parse_size
from ckptctl.core.tensor import with_operands
from ckptctl.execute import Job, fitted
from ckptctl.formats import TARGETS
from ckptctl.formats.target import Choices
from ckptctl.operations.likeness import order_of
from ckptctl.operations.masters import count_of_updates, require_equal_steps, require_rounded_masters
from ckptctl.operations.opening import given_order
from ckptctl.operations.ties import require_equal_copies
from ckptctl.plan.account import Account, account
from ckptctl.plan.check import Totals, check, require_whole
from ckptctl.plan.index import SourceIndex
from ckptctl.plan.planner import EXTENT_NBYTES, Plan
from ckptctl.plan.steps import Cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptctl.core.checkpoint import Checkpoint
    from ckptctl.execute import Budget
    from ckptctl.formats.target import Content, Line, Written
    from ckptctl.operations.conversion import Conversion
    from ckptctl.operations.opening import Reading


@dataclass(frozen=True)
class Planned:
    """A conversion that is ready to run."""

    content: Content
    written: Written
    plan: Plan
    totals: Totals
    job: Job
    account: Account
    lines: tuple[Line, ...]


def choices_of(wanted: Conversion, like: Any, reading: Reading | None) -> Choices:
    """What the flags say of the result, whatever its mesh. like: the run that it is for, None without one."""
    choices = Choices(
        parse_size(wanted.max_shard_size, "--max-shard-size"),
        index_keys=wanted.index_keys,
        bare=wanted.bare,
        module_prefix=wanted.module_prefix,
        zero_stage=2 if wanted.zero_stage is None else wanted.zero_stage,
        universal=wanted.universal,
        megatron_format=wanted.megatron_format,
        optimizer=wanted.optimizer,
        vocab_divisor=wanted.vocab_divisor,
        keep_padding_rows=wanted.keep_padding_rows,
        layer_spec=wanted.layer_spec,
        like=like,
        **order_of(like, given_order(reading.param_order) if reading else ()),
    )
    if choices.max_shard_nbytes < 1:
        raise Usage("--max-shard-size must be at least 1 byte")
    return choices


def planned_job(
    content: Content,
    lines: list[Line],
    to: str,
    choices: Choices,
    dst: Path,
    budget: Budget,
    mark: dict[str, str],
    written: Written | None = None,
    shaped: Callable[[Written], Written] | None = None,
    whole: Checkpoint | None = None,
) -> Planned:
    """Lay out, plan and check. Nothing is written.

    written is the result where it is laid out already; shaped has the last word about its files; whole is the source
    before parts of it were left out, for the account of its bytes.
    """
    with _deep_values_refused(content.source):
        made = _laid_out(content, to, choices, budget) if written is None else written
        return _checked(content, lines, to, dst, budget, mark, made if shaped is None else shaped(made), whole)


@contextmanager
def _deep_values_refused(source: Checkpoint) -> Iterator[None]:
    """Unsupported where a tree of values is so deep, or so made, that walking it does not end."""
    try:
        yield
    except RecursionError as err:
        raise Unsupported(
            "a value of the training state is nested too deep, or holds itself",
            where=source.root,
            fix="leave it out where the checkpoint is made; --no-optimizer lets scheduler, random state, counters go",
        ) from err


def _laid_out(content: Content, to: str, choices: Choices, budget: Budget) -> Written:
    """What the format's writer makes of it."""
    if TARGETS[to].one_step or choices.universal:
        choices = replace(choices, updates=count_of_updates(content, budget, required=TARGETS[to].one_step))
    made: Written = import_module(f"ckptctl.formats.{to}.write").write(content, choices)
    return made


def _checked(
    content: Content,
    lines: list[Line],
    to: str,
    dst: Path,
    budget: Budget,
    mark: dict[str, str],
    written: Written,
    whole: Checkpoint | None,
) -> Planned:
    source = content.source
    whole = whole or source
    tensors = {**with_operands(source.tensors), **written.tensors}
    sources = (*source.sources, *written.sources)
    items = [*content.weights.values(), *content.states.values(), *content.held.values()]
    index = SourceIndex(tensors, sources)
    require_whole(index, {i.key for i in items})
    require_equal_copies(content, index, budget)
    require_rounded_masters(content, budget, TARGETS[to])
    if TARGETS[to].one_step_a_group:
        require_equal_steps(content, budget)
    casts = frozenset(Cast(i.tensor.held.name, i.dtype.name) for i in items if i.tensor.held.name != i.dtype.name)
    casts |= {Cast(*pair) for pair in written.casts}
    plan = Plan(written.files, index, casts, _extent_nbytes(budget))
    _require_possible(plan, dst)
    totals = check(plan)
    job = fitted(Job(plan, totals, sources, Path(source.root), dst, written.folder, mark), budget)
    used = {stored.key for i in items for stored in i.tensor.stored} | set(written.tensors)
    counted = {**with_operands(whole.tensors), **tensors}
    spent = account({k: t for k, t in counted.items() if not t.made}, sources, _sizes(source), used, whole.ties)
    told = [*(line for line in lines if line.part not in written.decided), *written.lines]
    return Planned(content, written, job.plan, job.totals, job, spent, tuple(told))


def _sizes(source: Checkpoint) -> dict[str, int]:
    """Bytes of each file by the path that sources have: a single file's is empty."""
    sizes = {f.path: f.nbytes for f in source.files}
    if not any(s.path == "" for s in source.sources):
        return sizes
    named = {s.path: sizes[s.path] for s in source.sources if s.path in sizes}  # adapters, by their own paths
    return {**named, "": sum(sizes.values()) - sum(named.values())}


def _extent_nbytes(budget: Budget) -> int:
    """Extents small enough that several fit the budget with their windows."""
    return max(1 << 20, min(EXTENT_NBYTES, budget.memory_nbytes // 16))


def _require_possible(plan: Plan, dst: Path) -> None:
    """NoSpace for a result larger than the whole disk, before it is planned: an expanded tensor may claim any size."""
    need = sum(f.nbytes for f in plan.files)
    place = next(p for p in (dst.absolute(), *dst.absolute().parents) if p.exists())
    total = shutil.disk_usage(place).total
    if need > total:
        raise NoSpace(
            "the result would be larger than the disk",
            where=str(dst),
            why=f"it has {need} bytes, the disk {total}",
            fix="check the shapes with `ckptctl ls`; choose another disk",
        )
