"""Where each item of a DCP stood in the nested state that was saved: by the index's paths, or told from names. Pure.

Source: torch 2.13.0, distributed/checkpoint/_nested_dict.py, unflatten_state_dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.formats.dcp.metadata import NAME
from ckptctl.formats.state import MODEL_KEYS, OPTIMIZER_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ckptctl.core.checkpoint import PathKey
    from ckptctl.core.values import Tree

    Keys = tuple[PathKey, ...]


def nested(items: Collection[str], paths: Mapping[str, Keys], of: Callable[[str, Keys], Tree]) -> Tree:
    """The nested state of items, of(name, path) being what each one holds; without a path it stands by its own name.

    Damaged where two items have one place, or one lies below another.
    """
    root: dict[PathKey, Tree] = {}
    # The paths keep the order in which the state was saved; the items are in that of the ranks that wrote them.
    for name in [*(n for n in paths if n in items), *(n for n in items if n not in paths)]:
        path = paths.get(name) or (name,)
        at = root
        for key in path[:-1]:
            inner = at.setdefault(key, {})
            if not isinstance(inner, dict):
                raise Damaged(
                    f"{name} lies below another item",
                    where=NAME,
                    why=f"its path is {path}",
                    code="metadata-damaged",
                )
            at = inner
        if path[-1] in at:
            raise Damaged(
                f"{name} has the path of another item", where=NAME, why=f"it is {path}", code="metadata-damaged"
            )
        at[path[-1]] = of(name, path)
    return _lists(root)


def is_setting(path: tuple[PathKey, ...]) -> bool:
    """Whether an item is a setting of a param group, nested or flat."""
    return "param_groups" in path or (isinstance(path[-1], str) and path[-1].startswith("param_groups."))


def setting_name(path: tuple[PathKey, ...], name: str) -> str:
    """A setting's name without the keys around the optimizer, as other formats have it."""
    return ".".join(map(str, path[path.index("param_groups") :])) if "param_groups" in path else name


def without_paths(names: Iterable[str]) -> dict[str, tuple[PathKey, ...]]:
    """Paths for an index that has none (planner_data absent), by an optimizer's usual keys and the names of its state.

    A name cannot be cut at its dots: parameters have dots of their own. Whether `model.` is a key of the state or the
    first word of every parameter is told by the optimizer, which has the parameters' names too. {} where there is no
    optimizer: every name then stands by itself. Unsupported where that would make moments into weights.
    """
    every = list(names)
    wrapper = _wrapper(every)
    inner = {n: n[len(wrapper) :] for n in every}
    heads = {n: r.partition(".")[0] for n, r in inner.items()}
    rests = {n: r.partition(".")[2] for n, r in inner.items()}
    optimizers = {
        h for n, h in heads.items() if h in OPTIMIZER_KEYS and rests[n].startswith(("state.", "param_groups."))
    }
    if len(optimizers) != 1:
        looks = next(
            (n for n in every if ".param_groups." in n or n.endswith((".exp_avg", ".exp_avg_sq", ".momentum_buffer"))),
            None,
        )
        if looks is not None:
            raise Unsupported(
                f"the metadata has no paths (planner_data), and which names are the model's cannot be told ({looks})",
                where=NAME,
                fix="save with torch's own planner, which writes them",
            )
        return {}
    params = {
        rests[n][len("state.") :].rpartition(".")[0]
        for n, h in heads.items()
        if h in optimizers and rests[n].startswith("state.")
    }
    is_bare = bool(params & set(inner.values()))
    out: dict[str, tuple[PathKey, ...]] = {}
    for n in every:
        head, rest = heads[n], rests[n]
        cut = head in optimizers or (not is_bare and head in MODEL_KEYS)
        tail: tuple[PathKey, ...] = (head, rest) if cut and rest else (inner[n],)
        out[n] = (*wrapper.split(".")[:-1], *tail)
    return out


def _wrapper(names: Sequence[str]) -> str:
    """The first key of every name with its dot ("app."), where it is none of a model's or an optimizer's; else ""."""
    heads = {n.partition(".")[0] for n in names}
    head = next(iter(heads)) if len(heads) == 1 else ""
    if not head or head in (*MODEL_KEYS, *OPTIMIZER_KEYS) or not all("." in n for n in names):
        return ""
    below = {n.split(".")[1] for n in names}
    return f"{head}." if below & set(OPTIMIZER_KEYS) else ""


def _lists(tree: Tree) -> Tree:
    """Dicts whose keys count from 0 are the lists that were saved: only lists have integers in a path."""
    if not isinstance(tree, dict):
        return tree
    inner = {k: _lists(v) for k, v in tree.items()}
    if inner and all(isinstance(k, int) for k in inner):
        return [inner[k] for k in sorted(inner)]
    return inner
