"""Words that wrappers put into parameters' names: FSDP, activation checkpointing, torch.compile, DDP. Pure.

The first three put a word of their own, which no module is called, at any place; DDP and DataParallel put `module.`
before every name, so that it is theirs only where every name has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptctl.core.values import Tree
    from ckptctl.formats.state import Found

WORDS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""Source: torch 2.13.0, _dynamo/eval_frame.py OptimizedModule; distributed/fsdp/fully_sharded_data_parallel.py
FSDP_WRAPPED_MODULE; distributed/algorithms/_checkpoint/checkpoint_wrapper.py _CHECKPOINT_WRAPPED_MODULE; lightning
2.6.6, fabric/wrappers.py _FabricModule."""
BEFORE_ALL = "module"
FLAT = ("_flat_param", "flat_param")
"""Last words of FSDP's flat parameters, which are no parameters of the model: their names are left alone."""


def names(given: Iterable[str], taken: set[str] | None = None) -> dict[str, str]:
    """Each name without its wrappers' words. The words are put into taken.

    Unsupported where two names become one.
    """
    words = {n: n.split(".") for n in given}
    if any(w[-1] in FLAT for w in words.values()):
        return {n: n for n in words}
    out: dict[str, list[str]] = {}
    for n, parts in words.items():
        out[n] = [p for p in parts[:-1] if p not in WORDS] + parts[-1:]
        if taken is not None:
            taken.update(p for p in parts[:-1] if p in WORDS)
    while out and all(len(p) > 1 and p[0] == BEFORE_ALL for p in out.values()):
        out = {n: p[1:] for n, p in out.items()}
        if taken is not None:
            taken.add(BEFORE_ALL)
    made = {n: ".".join(p) for n, p in out.items()}
    by_made: dict[str, str] = {}
    for n, name in made.items():
        if by_made.setdefault(name, n) != n:
            raise Unsupported(
                f"{n} and {by_made[name]} would both be called {name!r}",
                why="wrappers' words are taken out of names",
                fix="save the state dict of the unwrapped module",
                code="duplicate-name",
            )
    return made


def take_out(found: Found) -> None:
    """Takes wrappers' words out of every name of the model and the optimizer. Nothing is done where there are none."""
    taken: set[str] = set()
    of_model = names([*found.model, *found.model_values], taken)
    of_states = names([k for k in (*found.states, *_listed(found)) if isinstance(k, str)], taken)
    if not taken:
        return
    found.wrappers = tuple(sorted(taken))
    found.model = {of_model[n]: leaf for n, leaf in found.model.items()}
    found.model_values = {of_model[n]: value for n, value in found.model_values.items()}
    to = {**of_states, **of_model}
    found.states = {to.get(k, k) if isinstance(k, str) else k: entry for k, entry in found.states.items()}
    for group in found.groups:
        for option in ("params", "param_names"):
            given: Tree = group.get(option)
            if isinstance(given, (list, tuple)):
                group[option] = [to.get(n, n) if isinstance(n, str) else n for n in given]


def _listed(found: Found) -> list[Tree]:
    """What the groups list, by name or number."""
    options = [g.get(o) for g in found.groups for o in ("params", "param_names")]
    return [n for given in options if isinstance(given, (list, tuple)) for n in given]


def unwrapped(found: Found) -> tuple[str, ...]:
    """What a reader says of names that were changed; () where none was."""
    words = ", ".join(found.wrappers)
    return (f"names are without the words of wrappers: {words}",) if words else ()
