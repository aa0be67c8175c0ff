"""What the executor takes and gives back, as data: a job, its budget, its progress and its outcome.

Nothing runs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptctl.core.output import Region
from ckptctl.plan.check import Totals, check
from ckptctl.plan.gangs import reread_factor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ckptctl.core.tensor import Key, Source
    from ckptctl.plan.planner import Plan

Json = Any
"""Plain data that the json module writes."""

MIB = 1 << 20
_OVERHEAD_NBYTES = 48 * MIB
"""What NumPy, ctypes, threads and their stacks take beside the buffers, measured on CPython 3.11 and rounded up."""
_LEAST_NBYTES = 16 * MIB
"""Buffers of this size are taken however small the budget is."""
LEAST_EXTENT_NBYTES = 4 * MIB
"""Extents are not made smaller than this to read less."""
_REREAD = 1.25


@dataclass(frozen=True)
class Budget:
    """What a run may take.

    memory_nbytes bounds the memory above an idle interpreter. jobs is the number of threads; 0: one a core, at most 8.
    """

    memory_nbytes: int = 512 * MIB
    jobs: int = 0


@dataclass(frozen=True)
class Job:
    """One conversion: a checked plan, where its sources lie, and where its result goes.

    sources[i].path is relative to root ("" where root itself is the file). folder False: the plan has one file with
    path "", which becomes target itself. fingerprint is what else must be the same for --resume: options, metadata
    files.
    """

    plan: Plan
    totals: Totals
    sources: Sequence[Source]
    root: Path
    target: Path
    folder: bool
    fingerprint: Mapping[str, Json] = field(default_factory=dict)


class Progress(NamedTuple):
    """How far a job is. Bytes are those of the result."""

    done_nbytes: int
    total_nbytes: int
    seconds: float
    peak_rss_nbytes: int


@dataclass(frozen=True)
class Outcome:
    """What a finished job did.

    resumed_nbytes were there from an interrupted job, direct_nbytes were copied by the kernel (both are part of the
    result's size). read_nbytes counts source bytes that were read, gaps in windows and decoded members with them.
    checksums holds the CRC-32 of each file whose bytes all passed through memory, None for others. notes are sentences
    for the report.
    """

    seconds: float
    written_nbytes: int
    read_nbytes: int
    resumed_nbytes: int
    direct_nbytes: int
    checksums: Mapping[str, int | None]
    peak_rss_nbytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The buffers of one run, in bytes. working is what all of them may take together.

    chunk: a thread streams runs through one of these, small enough for a core's cache (below 512 KiB Python's own time
    shows). window: a stretch of a source that is read once and scattered. gang: the extents that are gathered together.
    extent: the largest one. decoded: all members kept decoded; member: the largest of those, what is larger goes to a
    scratch file.
    """

    working: int
    chunk: int
    window: int
    gang: int
    extent: int
    decoded: int
    member: int

    @property
    def buffers(self) -> int:
        """What is left for threads beside decoded members and their decoder."""
        return self.working - self.decoded * 4 // 3

    def gang_need(self, nbytes: int) -> int:
        """Memory of a gang whose extents are nbytes long together."""
        return nbytes + self.window


def sizes_of(budget: Budget, plan: Plan, coded: bool) -> Sizes:
    """How a budget is shared out. coded: some source is compressed, so that decoded members need room."""
    working = max(budget.memory_nbytes - _OVERHEAD_NBYTES - plan.index.nbytes, _LEAST_NBYTES)
    # Half is for members: three quarters of it to keep, one for the decoder's own window.
    decoded = working * 3 // 8 if coded else 0
    rest = working // 2 if coded else working
    window = min(16 * MIB, rest // 8)
    gang = rest // 2 - window
    return Sizes(working, min(MIB, rest // 16), window, gang, gang, decoded, decoded // 2)


def sizes_for(job: Job, budget: Budget) -> Sizes:
    """How a budget is shared out for a job."""
    return sizes_of(budget, job.plan, any(job.sources[n].codec for n in used_sources(job.plan)))


def fitted(job: Job, budget: Budget) -> Job:
    """The job with extents that fit the budget and let gangs read each stretch of a source about once.

    It is counted anew where they change. A run does this with every job; a dry run takes its numbers from here, too. A
    fitted job is left as it is.
    """
    sizes = sizes_for(job, budget)
    if job.plan.extent_nbytes > sizes.extent:
        job = _cut(job, max(1, sizes.extent))
    times = reread(job, budget)
    # With smaller extents a gang reaches over more files; where it is one tensor that is turned, they change nothing.
    while times > _REREAD and job.plan.extent_nbytes > LEAST_EXTENT_NBYTES:
        smaller = _cut(job, max(LEAST_EXTENT_NBYTES, job.plan.extent_nbytes // 4))
        fewer = reread(smaller, budget)
        if fewer > 0.8 * times:
            break
        job, times = smaller, fewer
    return job


def reread(job: Job, budget: Budget) -> float:
    """How often strided stretches of the source are read, 1.0 for once."""
    return reread_factor(job.plan, job.totals, sizes_for(job, budget).gang)


def _cut(job: Job, extent_nbytes: int) -> Job:
    plan = replace(job.plan, extent_nbytes=extent_nbytes)
    return replace(job, plan=plan, totals=check(plan))


def used_keys(plan: Plan) -> list[Key]:
    """The source tensors that the plan's regions take from, each once, in order of first use."""
    keys: dict[Key, None] = {}
    for file in plan.files:
        for segment in file.segments:
            if isinstance(segment, Region):
                keys.update(dict.fromkeys(p.hub for p in segment.parts) if segment.parts else {segment.key: None})
    return list(keys)


def used_sources(plan: Plan) -> list[int]:
    """The sources that those tensors lie in, rising. Others are never opened."""
    found: set[int] = set()
    for key in used_keys(plan):
        if key in plan.index.tensors:
            for table in (t for stored in plan.index.tensors[key].stored for t in stored.pieces):
                found.update(np.flatnonzero(np.bincount(table.source)).tolist())
    return sorted(found)
