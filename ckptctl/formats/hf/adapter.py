"""PEFT adapters: what adapter_config.json says, and what each tensor's name means. No tensor data is read.

Source: peft 0.21.2, utils/save_and_load.py (names in the file), tuners/lora/config.py and layer.py (their meaning).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged
from ckptctl.formats.jsonscan import short

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptctl.core.checkpoint import Checkpoint

PREFIX = "base_model.model."
"""What PEFT's wrapper puts before the base model's own names."""
CODE = "adapter-names"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.(?P<name>[^.]+))?")
_SAVED = re.compile(r"\.modules_to_save(?:\.[^.]+)?\.(?=[^.]+$)")


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one module's change, by the names of their tensors.

    Of a linear layer first is lora_A (rank, in) and second lora_B (out, rank); of an embedding first is (rank, rows)
    and second (columns, rank). The change of the weight is (second @ first) * scale, turned for an embedding.
    """

    first: str
    second: str
    embedding: bool


@dataclass(frozen=True, slots=True)
class Adapted:
    """An adapter's tensors by what they are for.

    factors are by module, whole are tensors that take the place of the base's, by the base's name; other are names that
    mean neither.
    """

    factors: Mapping[str, Factors] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    other: tuple[str, ...] = ()


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `inspect` shows of it."""
    targets = config.get("target_modules")
    return {
        "type": config.get("peft_type"),
        "base": config.get("base_model_name_or_path"),
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "rank_pattern": config.get("rank_pattern") or {},
        "alpha_pattern": config.get("alpha_pattern") or {},
        "target_modules": sorted(map(str, targets)) if isinstance(targets, list) else targets,
        "modules_to_save": config.get("modules_to_save") or [],
        "rslora": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
        "bias": config.get("bias"),
    }


def adapted(names: Iterable[str]) -> Adapted:
    """Names of a LoRA adapter's tensors, sorted by what they are for. PEFT leaves the adapter's own name out.

    A state dict that was saved around PEFT has it (`lora_A.default.weight`). Damaged where a module lacks one of its
    two factors, or has one twice.
    """
    pairs: dict[str, dict[str, str]] = {}
    embeddings: dict[str, bool] = {}
    whole: dict[str, str] = {}
    other: list[str] = []
    for name in names:
        if not name.startswith(PREFIX):
            other.append(name)
            continue
        bare = name.removeprefix(PREFIX)
        found = _FACTOR.fullmatch(bare.removesuffix(".weight"))
        if found is None:
            base = _SAVED.sub(".", bare).replace(".base_layer.", ".")
            if ".lora_" in bare or "trainable_tokens" in bare or base in whole:
                other.append(name)
            else:
                whole[base] = name
            continue
        pair = pairs.setdefault(found["module"], {})
        kind = bool(found["embedding"])
        if found["side"] in pair or embeddings.setdefault(found["module"], kind) != kind:
            raise Damaged(
                f"the module {short(found['module'])} has two factors {found['side']}",
                why=f"{short(pair.get(found['side'], ''))} and {short(name)}",
                fix="give an adapter folder that holds one adapter",
                code=CODE,
            )
        pair[found["side"]] = name
    for module, pair in pairs.items():
        if len(pair) == 1:
            raise Damaged(
                f"the module {short(module)} has one factor only",
                where=short(next(iter(pair.values()))),
                why=f"lora_{'B' if 'A' in pair else 'A'} is not there",
                fix="copy the adapter again",
                code=CODE,
            )
    factors = {m: Factors(p["A"], p["B"], embeddings[m]) for m, p in pairs.items()}
    return Adapted(factors, whole, tuple(other))


def rank_problems(checkpoint: Checkpoint, found: Adapted) -> list[Damaged]:
    """Modules whose two factors do not fit each other: their ranks differ, or they are no matrices."""
    out = []
    shapes = {k.name: t.shape for k, t in checkpoint.tensors.items()}
    for module, f in found.factors.items():
        a, b = shapes[f.first], shapes[f.second]
        if len(a) >= 2 and len(b) >= 2 and a[0] == b[1]:
            continue
        both = f"lora_A has shape {a}, lora_B {b}"
        if len(a) >= 2 and len(b) >= 2:
            both = f"lora_A has rank {a[0]}, lora_B has rank {b[1]}"
        what = f"the two factors of {short(module)} do not fit each other"
        fix = "copy the adapter again"
        out.append(Damaged(what, where=short(PREFIX + module), why=both, fix=fix, code="lora-rank-mismatch"))
    return out
