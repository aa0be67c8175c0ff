"""Which tensors make one quantized weight together (quantized.toml): none of them means anything without the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.names.table import table

if TYPE_CHECKING:
    from collections.abc import Iterable


def quantized_by_names(names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """(method, module of each tensor of a quantized weight), from names alone; ("", {}) where nothing is quantized.

    The methods that were found are joined by a comma.
    """
    known = set(names)
    methods: dict[str, None] = {}
    modules: dict[str, str] = {}
    states: dict[str, list[str]] = {}
    for name in known:
        before, mark, _ = name.partition(".weight.quant_state.")
        if mark:
            states.setdefault(before, []).append(name)
    for rule in table("quantized")["rule"]:
        for mark in rule["marks"]:
            for name in known:
                module = name.removesuffix(mark)
                if module == name or module + rule["main"] not in known:
                    continue
                methods[rule["method"]] = None
                parts = [module + p for p in rule["parts"] if module + p in known]
                more = states.get(module, ()) if ".weight.quant_state.*" in rule["parts"] else ()
                modules.update(dict.fromkeys((*parts, *more), module))
    return ", ".join(methods), modules
