"""Every layout of a collection of real checkpoints: converted to each target, and `verify SRC CONVERTED` says equal.

    python benchmarks/verify_layouts.py COLLECTION [--only 'deepspeed/zero2*'] [--targets trainer,dcp]

COLLECTION has FRAMEWORK/LAYOUT folders as the tests use them: the checkpoint, and truth/config.json beside it. Layouts
without an optimizer are passed over. A line a pair on stdout; exit 1 where one is not equal. Needs ckptctl[verify].
Where a run's recorded losses are beside it (truth/losses.json), the steps after the save are trained too and compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ckptctl import operations
from ckptctl.core.errors import CkptError

TARGETS = {
    "trainer": {},
    "dcp": {},
    "deepspeed": {"dp": 2},
    "megatron": {},
}
BESIDE = {"truth", "truth.json", "info.json"}


def copy_of(layout: Path, into: Path) -> Path:
    """The checkpoint alone, without what says what is true of it; below ckpt/ a folder of one entry is stepped into."""
    inner = layout / "ckpt"
    source = inner if inner.exists() else layout
    copy = into / layout.name
    shutil.copytree(
        source, copy, symlinks=True, ignore=lambda at, names: BESIDE & set(names) if at == str(layout) else ()
    )
    found = copy
    while inner.exists() and found.is_dir() and len(entries := sorted(found.iterdir())) == 1:
        found = entries[0]
    return found


def converted(source: Path, target: str, out: Path, reading: operations.Reading) -> list[str]:
    """Convert; where the target has no place for weights beside their masters, of the masters. Returns the flags."""
    ways = ({}, {"weights": "master", "dtype": "float32"})
    for number, more in enumerate(ways):
        try:
            operations.convert(source, out, operations.Conversion(to=target, **TARGETS[target], **more), reading)
            return [f"--{k} {v}" for k, v in more.items()]
        except CkptError:
            if number == len(ways) - 1:
                raise
    return []


def main() -> int:
    """Run it."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("collection", type=Path)
    ask.add_argument("--only", action="append", default=[], metavar="GLOB")
    ask.add_argument("--targets", default=",".join(TARGETS))
    ask.add_argument("--megatron-settings", action="store_true", help="--same-settings for megatron")
    ask.add_argument("--steps", type=int, default=1)
    got = ask.parse_args()
    bad = 0
    for layout in sorted(p for p in got.collection.glob("*/*") if p.is_dir()):
        name = f"{layout.parent.name}/{layout.name}"
        if got.only and not any(fnmatch.fnmatch(name, glob) for glob in got.only):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            bad += one(name, layout, Path(scratch), got)
    return 1 if bad else 0


def one(name: str, layout: Path, scratch: Path, got: argparse.Namespace) -> int:
    """All targets of one layout; how many are not equal."""
    config = layout / "truth" / "config.json"
    reading = operations.Reading(model_config=config if config.exists() else None)
    source = copy_of(layout, scratch)
    try:
        checkpoint, _ = operations.open_checkpoint(source, reading)
    except CkptError as error:
        print(f"skip {name}: {error}", flush=True)
        return 0
    if checkpoint.optimizer is None or not any(
        k.kind not in ("weight", "buffer", "master") for k in checkpoint.tensors
    ):
        return 0
    bad = 0
    for target in got.targets.split(","):
        out, began = scratch / f"to-{target}", time.time()
        try:
            said = converted(source, target, out, reading)
        except CkptError as error:
            print(f"skip {name} -> {target}: {error} [{error.code}] {error.why}", flush=True)
            continue
        what = operations.Verification(steps=got.steps, no_model=checkpoint.facts.config is None)
        if target == "megatron" and got.megatron_settings:
            what = replace(what, same_settings=True)
        try:
            try:
                result = operations.verify_training(source, out, what, reading)
            except CkptError as error:
                if error.code != "weights-missing":  # saved without its frozen weights: the state alone can be compared
                    raise
                said.append("--no-model")
                result = operations.verify_training(source, out, replace(what, no_model=True), reading)
        except CkptError as error:
            print(f"FAIL {name} -> {target}: {error} [{error.code}] {error.why}", flush=True)
            bad += 1
            continue
        how = result["tolerance"]["mode"] + "".join(f" {s}" for s in said)
        word = "ok  " if result["equal"] else "FAIL"
        more = (
            ""
            if result["equal"]
            else f" {len(result['differences'])} differences: {json.dumps(result['differences'][:3])}"
        )
        print(f"{word} {name} -> {target}: {how}, {time.time() - began:.1f} s{more}", flush=True)
        bad += not result["equal"]
        shutil.rmtree(out, ignore_errors=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
