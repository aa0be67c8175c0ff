"""The figures of gpu_verify.sh as lines for docs/performance.md: verify.json and recompute.json in, Markdown out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def gib(n: int | None) -> str:
    """Bytes in GiB."""
    return "-" if n is None else f"{n / 2**30:.2f} GiB"


def verified(d: dict[str, Any]) -> None:
    """Both sides' loads and steps."""
    device, answer = d["device"], "equal" if d["equal"] else "NOT EQUAL"
    print(f"{device['called']}, torch {device['torch']}, computing in {device['dtype']}: {answer}")
    print("\n| side | loaded | seconds | GB/s | steps, s | peak on the device |\n|---|---|---|---|---|---|")
    for word in ("a", "b"):
        m = d[word]["measured"]
        row = (gib(m["loaded_bytes"]), m["load_seconds"], m["load_gb_per_second"], m["step_seconds"])
        print(f"| {d[word]['format']} | {' | '.join(map(str, row))} | {gib(m['peak_device_bytes'])} |")
    if not d["equal"]:
        print(json.dumps(d["differences"][:5], indent=1))


def recomputed(d: dict[str, Any]) -> None:
    """The policies, as their own report has them."""
    found = d.get("recompute")
    if found is None:
        print(json.dumps(d, indent=1)[:2000])
        return
    columns = [k for k, v in found["policies"][0].items() if not isinstance(v, (list, dict))]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in found["policies"]:
        print(f"| {' | '.join(str(row.get(c)) for c in columns)} |")


if __name__ == "__main__":
    for file, show in zip(sys.argv[1:], (verified, recomputed), strict=True):
        try:
            document = json.loads(Path(file).read_text())
            show(document)
        except (ValueError, KeyError) as error:
            print(f"{file}: {type(error).__name__}: {error}")
            print(Path(file).read_text()[:2000])
