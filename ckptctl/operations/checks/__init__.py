"""The checks of `validate`, one module a kind of thing that is looked at. Each adds findings to a Found."""

from ckptctl.operations.checks.found import Found, Level

__all__ = ["Found", "Level"]
