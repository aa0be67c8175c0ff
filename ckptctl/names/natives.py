"""How one naming's tensors are made of the hub's: stacked experts, torchtitan's heads. The hub has names on disk."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported
from ckptctl.core.remake import Native
from ckptctl.core.tensor import Key, Part
from ckptctl.names.families import Family, Parameter
from ckptctl.names.table import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptctl.names.families import Namespace


def in_memory(family: Family, namespace: Namespace = "module5") -> list[Native]:
    """Parameters and buffers of a model in memory that are others on disk: renamed, or stacked."""
    return list(_in_memory(family.name, json.dumps(dict(family.config), sort_keys=True, default=str), namespace))


@lru_cache(maxsize=4)  # asked for several times in one conversion; a model may have fifty thousand experts' matrices
def _in_memory(name: str, config: str, namespace: Namespace) -> tuple[Native, ...]:
    family, out = Family(name, json.loads(config)), []
    for p in (*family.parameters(namespace), *family.buffers(namespace)):
        if p.stacks:
            out.append(_stacked(p))
        elif p.name != p.disk:
            out.append(Native.renamed(p.name, p.disk, p.shape))
    return tuple(out)


def _stacked(p: Parameter) -> Native:
    """(experts, n * rows, columns): for each expert its n matrices of (rows, columns), one under the other."""
    n = len(p.stacks[0]) if p.stacks else 1
    experts, rows, columns = p.shape[0], p.shape[1] // n, p.shape[2]
    view, size = (experts, n, rows, columns), (1, 1, rows, columns)
    parts = tuple(
        Part(Key(name), view, (e, s, 0, 0), size, size, (0, 0, 0, 0), (0, 1, 2, 3))
        for e, expert in enumerate(p.stacks)
        for s, name in enumerate(expert)
    )
    return Native(p.name, p.shape, parts, ((rows, columns),) * len(parts))


def looks_like_torchtitan(names: Iterable[str]) -> bool:
    """Whether a model's names are torchtitan's: Meta's words for the embedding and the attention's output."""
    known = set(names)
    return "tok_embeddings.weight" in known and any(
        re.fullmatch(r"layers\.\d+\.attention\.wo\.weight", n) for n in known
    )


def torchtitan(family: Family, names: Iterable[str] = ()) -> list[Native]:
    """The parameters of a family as torchtitan has them, under those of its old names that are among names.

    Unsupported for a family whose names there are not known here.
    """
    slots: dict[str, dict[str, Any]] | None = table("torchtitan").get(family.name)
    if slots is None:
        raise Unsupported(
            f"torchtitan's names of {family.name} models are not known here",
            why=f"known are {', '.join(table('torchtitan'))}",
            fix="give them with --key-map",
        )
    known = set(names)
    out = []
    for p in _with_head(family):
        layer = next(iter(re.findall(r"\.(\d+)\.", p.name)), "")
        entry = slots.get(re.sub(r"\.\d+\.", ".{l}.", p.name, count=1))
        if entry is None:
            raise Unsupported(
                f"torchtitan's {family.name} has no parameter for {p.name}",
                why="the config asks for one that its models do not have",
                fix="leave it out, or give its name with --key-map",
            )
        name, old = (str(entry.get(k, entry["name"])).replace("{l}", layer) for k in ("name", "old"))
        native = old if old in known and name not in known else name
        if entry.get("rows") == "interleaved":
            out.append(_interleaved(native, p, int(family.sizes[entry["heads"]])))
        else:
            out.append(Native.renamed(native, p.name, p.shape))
    return out


def _with_head(family: Family) -> Iterator[Parameter]:
    """A model's parameters; a tied head too, since a file may hold it."""
    seen = {}
    for p in family.parameters("disk"):
        seen[p.name] = p.shape
        yield p
    if "lm_head.weight" not in seen:
        yield Parameter("lm_head.weight", seen["model.embed_tokens.weight"])


def _interleaved(native: str, p: Parameter, heads: int) -> Native:
    """Rows of each head in pairs (half, 2) in the native tensor, in halves (2, half) in the hub's."""
    rows, columns = p.shape
    if heads < 1 or rows % (2 * heads):
        raise Damaged(
            f"{p.name} has {rows} rows, which are no {heads} heads of an even width",
            fix="check num_attention_heads, num_key_value_heads and head_dim of the config",
            code="config-numbers",
        )
    half = rows // heads // 2
    size = (heads, half, 2, columns)
    part = Part(Key(p.name), size, (0,) * 4, size, (heads, 2, half, columns), (0,) * 4, (0, 2, 1, 3))
    return Native(native, p.shape, (part,), (p.shape,))
