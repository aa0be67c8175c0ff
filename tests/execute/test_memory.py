"""Peak memory of whole jobs, in a process of their own: set by the budget, not by what is converted."""

import subprocess
import sys
import textwrap

import pytest

from tests.support.checkpoints import ROOT

CHILD = textwrap.dedent("""
    import os, resource, sys
    from pathlib import Path

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    idle = peak()
    from ckptctl.core.dtype import BY_NAME
    from ckptctl.core.output import OutputFile, Region
    from ckptctl.core.tensor import Key, PieceTable, Source, Tensor
    from ckptctl.execute import Budget, Job, run
    from ckptctl.plan.check import check
    from ckptctl.plan.index import SourceIndex
    from ckptctl.plan.planner import Plan
    from ckptctl.plan.steps import Cast

    os.fsync = lambda fd: None
    folder, kind, memory, n = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 8192
    with (folder / "source").open("wb") as file:
        file.truncate(n * n * 4)
    f4, to = BY_NAME["float32"], BY_NAME["bfloat16" if kind == "cast" else "float32"]
    key, view = Key("t"), (n, n)
    strides = (4, 4 * n) if kind == "turned" else None
    tensor = Tensor(key, f4, view, (PieceTable.whole(view, 4, 0, 0, strides),))
    w = n // 4 if kind == "columns" else n
    files = tuple(
        OutputFile(str(r), lambda r=r: [Region(key, to, view, (0, r * w), (n, w), crc=kind == "checked")])
        for r in range(n // w)
    )
    plan = Plan(files, SourceIndex({key: tensor}, [Source("")]), frozenset([Cast("float32", "bfloat16")]))
    run(Job(plan, check(plan), [Source("")], folder / "source", folder / "made", True), Budget(memory, 4))
    print(peak() - idle)
""")


@pytest.mark.parametrize("kind", ["runs", "checked", "cast", "columns", "turned"])
@pytest.mark.parametrize("mib", [96, 256])
def test_peak_memory_above_an_idle_interpreter_is_within_the_budget(tmp_path, kind, mib):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path, kind, str(mib << 20)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= mib << 20
