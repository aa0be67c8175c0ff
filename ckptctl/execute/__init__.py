"""Running plans: threads within a memory budget, a journal to resume from, and a result that is whole or not there.

run(job, budget)        writes a job's result
space(job)              what it needs on the disk, and what is free
fitted(job, budget)     the job as a run takes it: extents cut to the budget
reread(job, budget)     how often strided stretches of the source will be read
"""

from ckptctl.execute.job import Budget, Job, Outcome, Progress, fitted, reread
from ckptctl.execute.local import run, space

__all__ = ["Budget", "Job", "Outcome", "Progress", "fitted", "reread", "run", "space"]
