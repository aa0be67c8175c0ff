"""Lightning's checkpoint: a `.ckpt` file, or with ranks a folder of a DCP and `meta.pt`. Nothing is written here.

Source: lightning 2.6.6, pytorch/trainer/connectors/checkpoint_connector.py, dump_checkpoint and restore_*;
pytorch/strategies/model_parallel.py, save_checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA, Optimizer
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.core.output import OutputFile, Segment
from ckptctl.core.values import OrderedPairs, Tree
from ckptctl.formats.carry import Carried
from ckptctl.formats.dcp import write as dcp
from ckptctl.formats.lightning.loops import loops_at
from ckptctl.formats.lightning.read import META, VERSION
from ckptctl.formats.order import numbered
from ckptctl.formats.schedule import schedulers
from ckptctl.formats.state import number
from ckptctl.formats.target import Choices, Content, Line, Written
from ckptctl.formats.torch.write import TorchTree, averages, merged_states

if TYPE_CHECKING:
    from ckptctl.formats.dcp.write import Named

WRITTEN_VERSION = "2.6.6"
"""The Lightning whose layout is written; other 2.x versions load it."""


def write(content: Content, choices: Choices) -> Written:
    """One file that `Trainer.fit(ckpt_path=...)` resumes from; a folder where ranks are asked for.

    MissingFact where nothing says under which attribute the LightningModule holds the model.
    """
    if choices.own_names:
        return _again(content, choices)
    prefix = _prefix(content, choices)
    lines = [_names(prefix)]
    values = _values(content, lines)
    if choices.sharded:
        return _folder(content, choices, prefix, values, lines)
    instead = "a folder, which --dp writes, has names and needs no order"
    content, told = numbered(content, choices.param_order, instead)
    lines += told

    def segments() -> list[Segment]:
        made = TorchTree(plain=True, held=content.held)
        return made.segments({**_weights(content, prefix, made), **_rest(content, values, made)})

    return Written((OutputFile("", segments),), False, tuple(lines))


def _prefix(content: Content, choices: Choices) -> str:
    """What stands before every name, with its dot."""
    module = choices.module_prefix
    if module is None and content.source.format == "lightning":
        module = content.source.module
    if module is None:
        raise MissingFact(
            "which attribute of the LightningModule holds the model is in no file",
            where=content.source.root,
            why="Lightning's names begin with it: net.… where the module says self.net = model",
            fix="give it with --module-prefix NAME, or --module-prefix '' where names are to stay as they are",
            code="module-prefix",
        )
    return f"{module.rstrip('.')}." if module else ""


def _names(prefix: str) -> Line:
    return Line("names", "written", f"under {prefix}" if prefix else "as they are, under no attribute")


def _weights(content: Content, prefix: str, made: TorchTree) -> dict[str, Tree]:
    """The module's state dict, and each optimizer's with torch's numbers."""
    model = OrderedPairs(
        {prefix + name: made.tensor(content.weights[content.ties.get(name, name)]) for name in content.weights}
    )
    model.update({prefix + name: made.value(v) for name, v in content.model_values.items()})
    out: dict[str, Tree] = {"state_dict": model}
    averaged = averages(content)
    if content.optimizer is not None or len(content.states) > len(averaged):
        out["optimizer_states"] = _optimizers(content, made)
    if averaged:
        out[EMA] = OrderedPairs({prefix + name: made.tensor(item) for name, item in averaged.items()})
    return out


def _optimizers(content: Content, made: TorchTree) -> list[Tree]:
    """Each optimizer's state dict: numbers count from 0 in the order of its groups."""
    optimizer = content.optimizer or Optimizer(())
    states = merged_states(content, optimizer, made.tensor, made.value)
    listed = {n for g in optimizer.groups for n in g.params}
    lost = next((n for n in states if n not in listed), None)
    if lost is not None:
        raise MissingFact(
            f"{lost} is in no param group, so it has no number",
            why="Lightning keys an optimizer's state by torch's numbers, in the order of its groups",
            fix="convert with --no-optimizer, or to dcp",
            code="param-order",
        )
    out: list[Tree] = []
    for owner in sorted({g.owner for g in optimizer.groups}):
        groups = [g for g in optimizer.groups if g.owner == owner]
        numbers = {n: i for i, n in enumerate(n for g in groups for n in g.params)}
        out.append(
            {
                "state": {numbers[n]: states[n] for n in numbers if n in states},
                "param_groups": [
                    {**{k: made.value(v) for k, v in g.options.items()}, "params": [numbers[n] for n in g.params]}
                    for g in groups
                ],
                **{k: made.value(v) for k, v in optimizer.options.items()},
            }
        )
    return out


def _values(content: Content, lines: list[Line]) -> dict[str, Tree]:
    """Everything besides weights and optimizers, by Lightning's keys. Values that it does not know keep their names."""
    given = dict(content.values)
    if given.get("optimizer_states") == []:  # a module that has no optimizer
        del given["optimizer_states"]
    for name in ("state_dict", "optimizer_states", *([EMA] if averages(content) else [])):
        if name in given:
            raise Unsupported(
                f"a value of the source is called {name}, as a part of the result is",
                fix="rename it where the source is made",
            )
    found, names = schedulers(given)
    for name in names:
        del given[name]
    step = content.source.step or 0
    epoch = number(given.get("epoch"))
    fresh = "loops" not in given
    if fresh:
        detail = f"made for step {step}, at the start of epoch {epoch or 0}: Lightning keeps no other place in the data"
        lines.append(Line("loops", "written", detail))
    out: dict[str, Tree] = {
        "epoch": given.pop("epoch", 0),
        "global_step": given.pop("global_step", step),
        VERSION: given.pop(VERSION, WRITTEN_VERSION),
        "loops": loops_at(step, epoch or 0) if fresh else given.pop("loops"),
    }
    if content.optimizer is not None or content.states or names:
        out.update(callbacks=given.pop("callbacks", {}), lr_schedulers=found)
        if content.optimizer is None and not content.states:
            out["optimizer_states"] = []
    return {**out, **given}


def _rest(content: Content, values: dict[str, Tree], made: TorchTree) -> dict[str, Tree]:
    return {name: made.value(value) for name, value in values.items()}


# ---- folders --------------------------------------------------------------------------------------------------------


def _folder(content: Content, choices: Choices, prefix: str, values: dict[str, Tree], lines: list[Line]) -> Written:
    """Weights and optimizers as a DCP, keyed as ModelParallelStrategy keys them; the rest in meta.pt."""
    named = list(dcp.model_items(content, "state_dict", prefix))
    owners = sorted({g.owner for g in content.optimizer.groups}) if content.optimizer else []
    for owner in owners or ([0] if content.states else []):
        named += dcp.optimizer_items(content, f"optimizer_{owner}", prefix, owner)
    meta: dict[str, Tree] = values
    averaged = averages(content)

    def segments() -> list[Segment]:
        made = TorchTree(plain=True, held=content.held)
        more = {EMA: {prefix + n: made.tensor(i) for n, i in averaged.items()}} if averaged else {}
        return made.segments({**_rest(content, meta, made), **more})

    return _written(content, named, choices, [OutputFile(META, segments)], lines)


def _again(content: Content, choices: Choices) -> Written:
    """A folder for another number of ranks: the DCP under its own names, meta.pt as it is."""
    if content.source.variant != "sharded":
        raise Unsupported(
            "a .ckpt file has no layout to change",
            where=content.source.root,
            fix="`ckptctl convert --to lightning --dp N` makes a folder for N ranks of it",
        )
    carried = Carried(content.source)
    carried.add(META)
    made = _written(content, list(dcp.own_items(content)), choices, carried.files, [])
    return Written(made.files, True, made.lines, carried.tensors, carried.sources)


def _written(
    content: Content, named: list[Named], choices: Choices, more: list[OutputFile], lines: list[Line]
) -> Written:
    return Written((*dcp.folder(named, choices), *more), True, (*lines, *dcp.layout_lines(content, named, choices)))
