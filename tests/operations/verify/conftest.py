"""One thread for torch, here and in the processes that tests start: for small tensors several are many times slower."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
