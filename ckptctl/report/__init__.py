"""What people and machines see: documents in, text or JSON out. No decision is made here."""

from ckptctl.report.outputs import outputs, show_findings
from ckptctl.report.progress import progress
from ckptctl.report.show import show

__all__ = ["outputs", "progress", "show", "show_findings"]
