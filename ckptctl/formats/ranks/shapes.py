"""Shapes of a model's parameters where the files have none: from its config, by its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.names import family, head_and_embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptctl.core.checkpoint import Facts
    from ckptctl.names import Namespace

NO_SHAPE = "it is kept flat, and its shape is in no file: give the model's config with --model-config"


def shapes_of(facts: Facts, names: Sequence[str]) -> tuple[dict[str, tuple[int, ...]], str]:
    """Shapes by name, in the order of `named_parameters()`, for a model whose state has those names (none: any).

    ({}, why) where there is no config, its family is not known, or its parameters have other names.
    """
    if facts.config is None:
        return {}, NO_SHAPE
    found = family(facts.config)
    if found is None:
        said = facts.family or "none"
        return {}, f"it is kept flat, and the shapes of a model of this family ({said}) are not known here"
    namespaces: tuple[Namespace, ...] = ("module5", "module4")
    shapes: dict[str, tuple[int, ...]] = {}
    for namespace in namespaces:
        shapes = {p.name: p.shape for p in found.parameters(namespace)}
        pair = head_and_embedding([*shapes, *names])
        if pair is not None and pair[0] not in shapes and pair[1] in shapes and names:
            shapes[pair[0]] = shapes[pair[1]]
        if not names or all(n in shapes for n in names):
            return shapes, ""
    missing = next(n for n in names if n not in shapes)
    return {}, f"it is kept flat, and {facts.origin} describes a model without {missing}"
