"""A torchtitan step folder: DCP without a key around the model, flat optimizer keys, train_state and lr_scheduler.

Names and the order of heads are those of `names/torchtitan.toml`, given before. Source: pytorch/torchtitan b5bcd76,
components/checkpointer/dcp.py (_flattened_model_states_sd), components/optimizer/utils.py (get_flat_optim_state_dict).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import Optimizer, part_of
from ckptctl.core.errors import Unsupported
from ckptctl.formats.dcp.write import Named, flattened, laid_out
from ckptctl.formats.state import number
from ckptctl.formats.target import Choices, Content, Item, Line, Written
from ckptctl.formats.torch.write import merged_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptctl.core.values import Tree


def write(content: Content, choices: Choices) -> Written:
    """The folder `step-N` for choices.dp ranks; step-0 where no step is known, as torchtitan calls its seed."""
    step = content.source.step
    lines: list[Line] = []
    values = _values(content, lines)
    named = [*_model(content), *_optimizer(content)]
    taken = {n.name for n in named}
    for name, value in values.items():
        for item in flattened((name,), value, content.held):
            if item.name in taken:
                raise Unsupported(
                    f"a value of the source is called {item.name}, as a part of the result is",
                    fix="rename it where the source is made",
                )
            named.append(item)
    folder = f"step-{step or 0}/"
    if step is None:
        lines.append(Line("layout", "written", "step-0, torchtitan's seed checkpoint: the source says no step"))
    written = laid_out(named, content, choices, folder)
    return Written(written.files, True, (*written.lines, *lines), variant="torchtitan")


def _model(content: Content) -> Iterator[Named]:
    for name, item in content.weights.items():
        yield Named(name, (name,), item)
    for name, value in content.model_values.items():
        yield Named(name, (name,), None, value, content.held)


def _optimizer(content: Content) -> Iterator[Named]:
    """Flat keys: state and settings by parameter. Groups are told apart by their settings, order is not kept."""
    optimizer = content.optimizer or Optimizer(())
    for name, entry in merged_states(content, optimizer, lambda item: item, lambda value: value).items():
        for kind, value in entry.items():
            flat = f"state.{name}.{kind}"
            is_item = isinstance(value, Item)
            yield Named(
                f"optimizer.{flat}", ("optimizer", flat), value if is_item else None, None if is_item else value
            )
    for group in optimizer.groups:
        for name in group.params:
            for option, value in group.options.items():
                flat = f"param_groups.{name}.{option}"
                yield Named(f"optimizer.{flat}", ("optimizer", flat), None, value, content.held)
    for option, value in optimizer.options.items():
        yield from flattened(("optimizer", option), value, content.held)


def _values(content: Content, lines: list[Line]) -> dict[str, Tree]:
    """Values under torchtitan's keys: its own as they are, else counters and the schedule's epoch from the source's."""
    out = dict(content.values)
    has_state = content.optimizer is not None or bool(content.states)
    if "train_state" not in out and has_state and content.source.step is not None:
        out["train_state"] = {"step": content.source.step, "ntokens_seen": 0}
        lines.append(
            Line("counters", "written", f"train_state: step {content.source.step}, ntokens_seen 0 (not in the source)")
        )
    if "lr_scheduler" in out and not isinstance(out["lr_scheduler"], dict):
        return out
    epoch = next((e for n, v in out.items() if part_of(n) == "scheduler" and (e := _epoch(v)) is not None), None)
    if "lr_scheduler" not in out and epoch is not None:
        out["lr_scheduler"] = {"last_epoch": epoch}
        lines.append(
            Line("scheduler", "written", f"lr_scheduler: last_epoch {epoch}; its curve comes from torchtitan's config")
        )
    return out


def _epoch(value: Tree) -> int | None:
    found: Mapping[str, Tree] | None = value if isinstance(value, dict) else None
    return None if found is None else number(found.get("last_epoch"))
