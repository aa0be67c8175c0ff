"""The parameters of a known family in the order of its modules, in the namespace that given names are of. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.names import NAMESPACES, family

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.checkpoint import Facts
    from ckptctl.names import Parameter


def registered(facts: Facts, names: Iterable[str]) -> tuple[Parameter, ...] | None:
    """The family's parameters under the first namespace that has all the names; None where there is none.

    Damaged where the config's numbers make no model.
    """
    known = family(facts.config) if facts.config is not None else None
    wanted = set(names)
    for space in NAMESPACES if known is not None else ():
        parameters = known.parameters(space) if known is not None else ()
        if wanted <= {p.name for p in parameters}:
            return parameters
    return None
