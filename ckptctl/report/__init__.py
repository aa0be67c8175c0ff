"""What people and machines see: documents in, text or JSON out. No decision is made here."""

from ckptctl.report.html import html_files, write_pages
from ckptctl.report.outputs import outputs, show_findings
from ckptctl.report.progress import progress, saying
from ckptctl.report.recompute import verify_files, write_verify_files
from ckptctl.report.show import show

__all__ = [
    "html_files",
    "outputs",
    "progress",
    "saying",
    "show",
    "show_findings",
    "verify_files",
    "write_pages",
    "write_verify_files",
]
