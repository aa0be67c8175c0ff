"""What the command line and the Python API call: one function a command, documents out. Imports below this are cheap; heavy ones are late."""

from ckptctl.operations.comparing import Comparison, diff
from ckptctl.operations.content import Conversion
from ckptctl.operations.convert import Running, convert, reshard
from ckptctl.operations.inspecting import inspect, ls
from ckptctl.operations.opening import Reading, open_checkpoint
from ckptctl.operations.showing import show

__all__ = ["Comparison", "Conversion", "Reading", "Running", "convert", "diff", "inspect", "ls", "open_checkpoint", "reshard", "show"]
