"""A Hugging Face folder loaded by from_pretrained, in one process: losses and gradients, and no update."""

from __future__ import annotations

from typing import Any

from .rank import Session, follow


class Pretrained(Session):
    """Transformers' from_pretrained."""

    framework = "Transformers, from_pretrained"

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self.version = transformers.__version__
        dtype = getattr(torch, job["dtype"])
        self.net, info = transformers.AutoModelForCausalLM.from_pretrained(
            job["path"], dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
        lacking = sorted(set(info["missing_keys"]) - set(job["ties"]))
        if lacking or info["mismatched_keys"]:
            raise RuntimeError(
                f"from_pretrained: missing {lacking[:4]}, mismatched {list(info['mismatched_keys'])[:4]}"
            )
        self.net.to(job["device"]).train()


if __name__ == "__main__":
    follow(Pretrained)
