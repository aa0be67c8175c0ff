"""Accelerate's folder for FSDP with sharded state: a DCP of the model, one of the optimizer, and files beside them.

Nothing is written here. Source: accelerate 1.15.0, utils/fsdp_utils.py, load_fsdp_model, load_fsdp_optimizer;
checkpointing.py, load_accelerator_state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import EMA
from ckptctl.core.errors import Unsupported
from ckptctl.core.output import OutputFile, Segment
from ckptctl.formats.accelerate.parts import MODEL, OPTIMIZER, OTHER_VALUES, file_of
from ckptctl.formats.carry import Carried
from ckptctl.formats.dcp import write as dcp
from ckptctl.formats.schedule import schedulers
from ckptctl.formats.target import Choices, Content, Line, Written
from ckptctl.formats.torch.write import TorchTree, averages

if TYPE_CHECKING:
    from ckptctl.core.values import Tree


def write(content: Content, choices: Choices) -> Written:
    """The folder that `accelerator.load_state` takes with FSDP on, for choices.dp ranks."""
    if choices.own_names:
        return _again(content, choices)
    owners = {g.owner for g in content.optimizer.groups} if content.optimizer else set()
    if len(content.source.modules) > 1 or len(owners) > 1:
        raise Unsupported(
            "the source holds several models or optimizers, and one of each is written to an Accelerate folder",
            where=content.source.root,
            why=f"they are {', '.join(content.source.modules)}" if content.source.modules else "",
            fix="take one with --module NAME",
        )
    model = list(dcp.model_items(content))
    files = dcp.folder(model, choices, f"{MODEL}_0/")
    averaged = averages(content)
    if content.optimizer is not None or len(content.states) > len(averaged):
        files += dcp.folder(list(dcp.optimizer_items(content, OPTIMIZER)), choices, f"{OPTIMIZER}_0/")
    lines = dcp.layout_lines(content, model, choices)
    files += _files(content, choices, lines)
    return Written(tuple(files), True, tuple(lines))


def _files(content: Content, choices: Choices, lines: list[Line]) -> list[OutputFile]:
    """Schedulers, random states, and the values that Accelerate has a file for; the rest in a file of our own."""
    given = dict(content.values)
    plans, names = schedulers(given)
    for name in names:
        del given[name]
    trees = {f"scheduler{f'_{i}' if i else ''}.bin": tree for i, tree in enumerate(plans)}
    if not plans and content.optimizer is not None:
        lines.append(Line("scheduler.bin", "absent", "load_state needs it where a scheduler was prepared"))
    random = given.get("random_states")
    if isinstance(random, dict) and content.source.format == "accelerate":
        del given["random_states"]
        if len(random) == choices.dp:
            trees.update({f"random_states_{rank}.pkl": tree for rank, tree in random.items()})
        else:
            lines.append(
                Line("random state", "dropped", f"of {len(random)} ranks: it means nothing for {choices.dp} ranks")
            )
    for name in [n for n in given if file_of(n)]:
        trees[file_of(name)] = given.pop(name)
    out = [_file(content, name, tree) for name, tree in trees.items()]
    averaged = averages(content)
    if given or averaged:
        told = ", ".join([*given, *([EMA] if averaged else [])])
        lines.append(Line("other values", "carried", f"{told}: in {OTHER_VALUES}, which Accelerate passes over"))
        out.append(_file(content, OTHER_VALUES, given, ema=True))
    return out


def _file(content: Content, name: str, tree: Tree, *, ema: bool = False) -> OutputFile:
    def segments() -> list[Segment]:
        made = TorchTree(held=content.held)
        root = made.value(tree)
        averaged = averages(content) if ema else {}
        if averaged:
            root[EMA] = {n: made.tensor(item) for n, item in averaged.items()}
        return made.segments(root)

    return OutputFile(name, segments)


def _again(content: Content, choices: Choices) -> Written:
    """The folder for another number of ranks: each DCP under its own names, other files as they are."""
    folders = list(dict.fromkeys(e.folder for e in content.source.entries))
    if not folders or content.source.variant != "fsdp sharded":
        raise Unsupported(
            "the folder holds whole files: there is no layout to change",
            where=content.source.root,
            fix="`ckptctl convert --to accelerate --dp N` writes one that is cut",
        )
    files: list[OutputFile] = []
    lines: list[Line] = []
    for at in folders:
        named = list(dcp.own_items(content, at))
        files += dcp.folder(named, choices, at)
        lines = lines or dcp.layout_lines(content, named, choices)
    carried = Carried(content.source)
    ranks = sum(f.path.startswith("random_states_") for f in content.source.files)
    for file in content.source.files:
        if "/" in file.path or (file.path.startswith("random_states_") and ranks != choices.dp):
            continue
        carried.add(file.path)
    if ranks and ranks != choices.dp:
        lines.append(Line("random state", "dropped", f"of {ranks} ranks: it means nothing for {choices.dp} ranks"))
    return Written((*files, *carried.files), True, tuple(lines), carried.tensors, carried.sources)
