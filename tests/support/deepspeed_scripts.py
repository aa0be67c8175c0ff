"""DeepSpeed's own converters, and what a universal folder holds by torch. A script; needs DeepSpeed.

    python deepspeed_scripts.py JOBS.json RESULTS.json

JOBS.json is a list of [what, ...]: ["fp32", FOLDER, OUT] runs zero_to_fp32 with safe_serialization, ["universal",
STEP_FOLDER, OUT] ds_to_universal with one worker and --inject_missing_state, ["digests", FOLDER] reads zero/*/*.pt.
RESULTS.json gets for each an error's last line or "", or {"<parameter> <state>": [elements, SHA-256]}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")


def digests(folder: Path) -> dict[str, list]:
    import torch

    out = {}
    for file in sorted((folder / "zero").rglob("*.pt")):
        if file.name == "optimizer_state.pt":
            continue
        held = torch.load(file, map_location="cpu", weights_only=False)  # noqa: TID251
        tensor = held["param"] if isinstance(held, dict) else torch.as_tensor(held)
        data = tensor.detach().float().contiguous().view(-1).numpy().tobytes()
        out[f"{file.parent.relative_to(folder / 'zero')} {file.stem}"] = [
            tensor.numel(),
            hashlib.sha256(data).hexdigest(),
        ]
    return out


def run(what: str, source: str, out: str = "") -> object:
    if what == "digests":
        return digests(Path(source))
    if what == "fp32":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

        convert_zero_checkpoint_to_fp32_state_dict(source, out, safe_serialization=True)
        return ""
    from deepspeed.checkpoint import ds_to_universal

    chosen = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    words = argparse.Namespace(input_folder=source, output_folder=out, inject_missing_state=True, **chosen)
    ds_to_universal.main(words)
    return ""


def main() -> None:
    jobs, results = (Path(p) for p in sys.argv[1:3])
    import deepspeed  # noqa: F401  (once, before the forks)

    answers = []
    for number, job in enumerate(json.loads(jobs.read_text())):
        answer = results.with_suffix(f".{number}")
        child = os.fork()
        if not child:
            try:
                answer.write_text(json.dumps(run(*job)))
            except BaseException as err:
                answer.write_text(json.dumps(f"{type(err).__name__}: {err}"))
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        answers.append(json.loads(answer.read_text()) if answer.exists() else "the process was killed")
        answer.unlink(missing_ok=True)
        results.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
