"""Running plans: threads within a memory budget, a journal to resume from, and a result that is whole or not there.

run(job, budget)        writes a job's result
space(job)              what it needs on the disk, and what is free
gang_nbytes(...)        the budget of plan.gangs that a run takes, for plan.reread_factor
"""

from ckptctl.execute.job import Budget, Job, Outcome, Progress, fitted, gang_nbytes, reread
from ckptctl.execute.local import run, space

__all__ = ["Budget", "Job", "Outcome", "Progress", "fitted", "gang_nbytes", "reread", "run", "space"]
