"""A Trainer's folder as output files: a Hugging Face folder, and what `resume_from_checkpoint` looks for beside it.

Nothing is written here. The optimizer's state gets the numbers that the Trainer will give the model's parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.core.checkpoint import MASTER
from ckptctl.core.errors import MissingFact, StateNotCarried, Unsupported
from ckptctl.core.output import OutputFile, Put
from ckptctl.formats.carry import Carried
from ckptctl.formats.hf.write import write as hf_write
from ckptctl.formats.target import Choices, Content, Line, Written
from ckptctl.formats.torch.write import TorchTree, merged_states
from ckptctl.formats.trainer import files
from ckptctl.formats.trainer.groups import scheduler, two_groups
from ckptctl.formats.trainer.order import numbering
from ckptctl.formats.trainer.progress import random_states, trainer_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptctl.core.checkpoint import Group, Optimizer
    from ckptctl.core.output import Segment
    from ckptctl.core.values import Tree


def write(content: Content, choices: Choices) -> Written:
    """The folder of one step.

    StateNotCarried for masters beside the weights, and where there is no optimizer's state: such a folder is there to
    go on from. MissingFact where the order of the model's parameters is not known.
    """
    source = content.source
    if content.optimizer is None:
        raise StateNotCarried(
            "a Trainer folder is there to go on from, and there is no optimizer's state to write",
            where=source.root,
            fix="convert to hf for the weights alone",
        )
    _refuse_masters(content)
    _require_steps(content)
    weights = hf_write(content, choices)
    two = two_groups(content.optimizer, numbering(content), source.root)
    state, state_line = trainer_state(source, content.values)
    schedule, scheduled, schedule_line = scheduler(
        content.values, two, int(state["global_step"]), len(content.optimizer.groups)
    )
    randoms, used_random, random_line = random_states(source, content.values)
    out = [
        _torch_file(files.OPTIMIZER, content, lambda made: _optimizer(content, content.optimizer, two.groups, made)),
        _torch_file(files.SCHEDULER, content, _value(schedule)),
        *(_torch_file(files.rng_name(rank), content, _value(tree)) for rank, tree in randoms.items()),
        OutputFile(files.STATE, lambda: [Put(files.state_bytes(state))]),
    ]
    lines = [*weights.lines, *two.lines, schedule_line, random_line, state_line]
    used = {*scheduled, *used_random, "trainer_state", "step"}
    if isinstance(content.values.get("scaler"), dict):
        out.append(_torch_file(files.SCALER, content, _value(content.values["scaler"])))
        used.add("scaler")
    left = {n: v for n, v in content.values.items() if n not in used}
    if left:
        out.append(_torch_file(files.OTHER_VALUES, content, _value(left)))
        told = f"{', '.join(left)}: in {files.OTHER_VALUES}, which the Trainer passes over"
        lines.append(Line("other values", "carried", told))
    carried = Carried(source, [*weights.files, *out], dict(weights.tensors), weights.sources)
    own = [f.path for f in source.files if f.role == "own"] if source.format == "trainer" else []
    for path in own:
        carried.add(path)
    if own:
        lines.append(Line("arguments", "carried", ", ".join(own)))
    return Written(
        tuple(carried.files),
        True,
        tuple(lines),
        carried.tensors,
        carried.sources,
        decided=frozenset(line.part for line in (schedule_line, random_line, *two.lines)) | _OTHER,
    )


_OTHER = frozenset({"other values", "counters"})


def _refuse_masters(content: Content) -> None:
    """Masters are held where they are the weights; else there is no place for them."""
    masters = {name: item for (name, kind), item in content.states.items() if kind == MASTER}
    apart = [n for n, m in masters.items() if n in content.weights and content.weights[n].key != m.key]
    cast = [n for n, m in masters.items() if n in content.weights and content.weights[n].dtype.name != m.dtype.name]
    if apart or cast:
        raise StateNotCarried(
            f"a Trainer folder has no place for masters beside the weights ({len(masters)} tensors)",
            where=content.source.root,
            why="a Trainer's weights are what its optimizer updates",
            fix="write the masters as the weights: --weights master --dtype float32; "
            "or --to hf --no-optimizer for the weights alone",
        )


def _require_steps(content: Content) -> None:
    """MissingFact for moments without a count of steps: torch corrects the moments' bias by it."""
    scalars = content.optimizer.scalars if content.optimizer is not None else {}
    for name, kind in content.states:
        if kind == "exp_avg" and (name, "step") not in content.states and (name, "step") not in scalars:
            raise MissingFact(
                f"how many steps the optimizer has made with {name} is in no file",
                where=content.source.root,
                why="there are moments of it, and no step",
                fix="convert from a checkpoint of the run that has its steps, or to torch or dcp",
                code="step",
            )


def _torch_file(name: str, content: Content, tree: Callable[[TorchTree], Tree]) -> OutputFile:
    def segments() -> list[Segment]:
        made = TorchTree(held=content.held)
        return made.segments(tree(made), root=name.partition(".")[0])

    return OutputFile(name, segments)


def _value(tree: Tree) -> Callable[[TorchTree], Tree]:
    return lambda made: made.value(tree)


def _optimizer(content: Content, optimizer: Optimizer | None, groups: tuple[Group, Group], made: TorchTree) -> Tree:
    assert optimizer is not None
    kept = {k: i for k, i in content.states.items() if k[1] != MASTER}
    states = merged_states(replace(content, states=kept), optimizer, made.tensor, made.value)
    order = [n for g in groups for n in g.params]
    numbers = {n: i for i, n in enumerate(order)}
    lost = next((n for n in states if n not in numbers), None)
    if lost is not None:
        raise Unsupported(
            f"{lost} has state and is in no param group, so that a Trainer has no number for it",
            where=content.source.root,
            fix=f"leave it out with --exclude '{lost}', or convert to torch or dcp",
        )
    return {
        "state": {numbers[n]: states[n] for n in order if n in states},
        "param_groups": [
            {**{k: made.value(v) for k, v in g.options.items()}, "params": [numbers[n] for n in g.params]}
            for g in groups
        ],
        **{k: made.value(v) for k, v in optimizer.options.items()},
    }
