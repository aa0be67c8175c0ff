"""What a LoRA adapter's settings mean for a merge: which are understood, and a module's scale. Pure.

Source: peft 0.21.2, tuners/lora/config.py (LoraConfig), layer.py (update_layer, get_delta_weight), utils/other.py
(get_pattern_key).
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.jsonscan import short

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEUTRAL = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Settings that say nothing of a merged weight, or that are used below. Any other one that is set is refused."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "true", "false")
"""Ways to begin that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ, ... change the base when training starts."""
_MANY = re.compile(r"\)[*+{?]")
_SETTING_CODE = "adapter-setting"


def require_plain(config: Mapping[str, Any], where: str) -> None:
    """Unsupported, naming it, for another kind of adapter or a setting that changes what a merge is."""
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise Unsupported(
            f"an adapter of kind {short(str(kind))} is not merged",
            where=where,
            why="only LORA is",
            fix="merge it with PEFT (merge_and_unload), then convert the result",
            code="adapter-kind",
        )
    for name, value in config.items():
        if name not in _NEUTRAL and value not in (None, False, {}, [], ""):
            raise _refused(name, value, where)
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise _refused("init_lora_weights", start, where, "training began by changing the base's weights")
    if config.get("bias", "none") not in (None, "none", "all", "lora_only"):
        raise _refused("bias", config.get("bias"), where)


def _refused(name: str, value: object, where: str, why: str = "") -> Unsupported:
    return Unsupported(
        f"the adapter's setting {short(name)} is not merged",
        where=where,
        why=why or f"it is {short(str(value))}",
        fix="merge it with PEFT (merge_and_unload), then convert the result",
        code=_SETTING_CODE,
    )


def scale(config: Mapping[str, Any], module: str, rank: int, where: str) -> float:
    """What the product of a module's factors is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank).

    Damaged where the settings name another rank than the factors have, or no number.
    """
    wanted = _of_module(config, "rank_pattern", "r", module, where)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module, where)
    if wanted != rank:
        raise Damaged(
            f"the factors of {short(module)} have rank {rank}, adapter_config.json says {wanted:g}",
            where=where,
            why="rank decides the scale",
            fix="copy both files of the adapter again",
            code="lora-rank-mismatch",
        )
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_module(config: Mapping[str, Any], patterns: str, plain: str, module: str, where: str) -> float:
    found = config.get(patterns) or {}
    value = config.get(plain)
    if isinstance(found, dict):
        value = next((v for pattern, v in found.items() if _matches(pattern, module, patterns, where)), value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        what = f"adapter_config.json gives no {plain} for {short(module)}"
        why = f"it is {short(str(value))}"
        raise Damaged(what, where=where, why=why, fix="copy it again", code="adapter-config")
    return float(value)


def _matches(pattern: str, module: str, setting: str, where: str) -> bool:
    """Whether a pattern names a module as PEFT matches it. A repeated group, which may take for ever, is refused."""
    if _MANY.search(pattern) or len(pattern) > 1000:
        raise _refused(setting, pattern, where, "a pattern with a repeated group is not matched")
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as err:
        raise _refused(setting, pattern, where, f"it is no pattern: {err}") from err
