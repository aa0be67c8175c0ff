"""Layers of multi-token prediction (`mtp.*`): kept under their own names, as whole tensors. Pure.

Source: Megatron-LM core_v0.16.1, core/transformer/multi_token_prediction.py, core/models/gpt/gpt_model.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptctl.formats.megatron.facts import Facts

PREFIX = "mtp."


def require_readable(names: Iterable[str], facts: Facts, where: str) -> None:
    """Unsupported for classic files of meshes in which such layers have copies and numbers that are not read.

    A last stage has the embedding again for them, and experts are counted from the rank's own first.
    """
    found = [n for n in names if n.startswith(PREFIX)]
    if found and (facts.pp > 1 or (facts.ep > 1 and any(".experts." in n for n in found))):
        raise Unsupported(
            f"{found[0]} is of multi-token prediction, which is read of one stage and one expert-parallel rank alone",
            where=where,
            why=f"args say pp={facts.pp}, ep={facts.ep}",
            fix="save the run as torch_dist, of which every mesh is read",
            code="tensor-unknown",
        )


def require_writable(names: Iterable[str], facts: Facts, form: str, source: str) -> None:
    """Unsupported where a result cannot have such layers as the run's loader looks for them."""
    found = [n for n in names if n.startswith(PREFIX)]
    experts = [n for n in found if ".experts." in n]
    stacked = any(".experts.experts." in n for n in experts)
    if not found:
        return
    what, fix = "", "leave them out with --exclude 'mtp.*'"
    if form == "torch" and (facts.pp > 1 or facts.ep > 1):
        what = f"classic files of pp={facts.pp}, ep={facts.ep} with multi-token prediction are not written"
        fix = f"take --megatron-format torch_dist, or {fix}"
    elif experts and stacked != (form == "torch_dist"):
        what = f"experts of multi-token prediction go from {source} to {source} alone"
    if what:
        raise Unsupported(what, why=f"the source has {found[0]}", fix=fix, code="tensor-unknown")


def extra_states(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Keys of the empty _extra_state of such layers' linear modules in torch_dist."""
    for name, shape in shapes.items():
        found = re.fullmatch(r"(mtp\..+\.(?:linear_\w+|eh_proj))\.weight", name)
        if found and ".experts.experts." in name:
            yield from (f"{found[1]}._extra_state/shard_{e}_{shape[0]}" for e in range(shape[0]))
        elif found:
            yield f"{found[1]}._extra_state/shard_0_1"
