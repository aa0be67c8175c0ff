"""What people and machines see: documents in, text or JSON out. No decision is made here."""

from ckptctl.report.progress import progress
from ckptctl.report.show import show

__all__ = ["progress", "show"]
