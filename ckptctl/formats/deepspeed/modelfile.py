"""The model-states file: module weights, the shapes and order of the flat groups, ties, counters, client state.

Source: DeepSpeed 0.19.8, runtime/engine.py, _common_checkpoint_state and save_checkpoint; real files of 0.19.8. Keys
that older versions lack are absent here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ckptctl.core.errors import Damaged, MissingFile
from ckptctl.core.values import TensorRef, Tree
from ckptctl.formats.deepspeed.folder import is_of_stage_three
from ckptctl.formats.deepspeed.opened import whole_number
from ckptctl.formats.pickles.nodes import show
from ckptctl.formats.torchtensor import aliases

if TYPE_CHECKING:
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.opened import Opened

OWN = "deepspeed"
"""Where settings are among the values. A caller's client state may have the name too: it is then one of them."""
SETTINGS = ("ds_config", "ds_version")
OPTIONAL = ("lr_scheduler", "data_sampler", "random_ltd")
STRUCTURE: Final = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "num_experts",
        "ds_autoep_layers",
        "universal_checkpoint_info",
        "sparse_tensor_module_names",
    }
)
ROUND_ROBIN = "round_robin_gradients"


def zero_section(config: Any) -> dict[Any, Any]:
    """zero_optimization of a run's configuration; {} where there is none."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, dict) else {}


@dataclass
class ModelFile:
    """What one model-states file says. module is None for a pipeline's; shapes are None at stage 0."""

    path: str
    source: int
    module: dict[str, TensorRef] | None
    module_values: dict[str, Tree]
    buffers: frozenset[str]
    shapes: list[dict[str, Shape]] | None
    frozen: dict[str, Shape] | None
    fragments: dict[str, TensorRef]
    shared: dict[str, str]
    optimizer: Tree
    dp: int | None
    mp: int | None
    tp: int | None
    pp: int | None
    steps: int | None
    config: Mapping[str, Any]
    experts: list[int]
    universal: Mapping[str, Tree]
    values: dict[str, Tree] = field(default_factory=dict)
    autoep: bool = False
    """Whether AutoEP took a model's own experts apart (DeepSpeed since 0.19.2)."""
    odd_keys: tuple[str, ...] = ()
    """Names of values that are no text in the file: they are text here."""

    @property
    def stage(self) -> int | None:
        """zero_optimization.stage of the run's configuration."""
        return whole_number(zero_section(self.config).get("stage"))

    @property
    def run_dtype(self) -> str:
        """What the run computes in, by its configuration."""
        for section, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            part = self.config.get(section)
            if isinstance(part, dict) and part.get("enabled") in (True, "auto"):
                return name
        return "float32"


def read_model(file: Opened) -> ModelFile:
    """The parts of a model-states file. Damaged for parts of the wrong kind."""
    root = file.mapping(file.root, "the model-states file")
    module, module_values = None, {}
    if root.get("module") is not None:
        entries = file.mapping(root["module"], "module")
        module = {str(n): v for n, v in entries.items() if isinstance(v, TensorRef)}
        module_values = {str(n): file.value(str(n), v) for n, v in entries.items() if not isinstance(v, TensorRef)}
    fragments = root.get("frozen_param_fragments")
    config = root.get("ds_config")
    dims = root.get("checkpoint_parallel_dimensions")
    experts = root.get("num_experts")
    info = root.get("universal_checkpoint_info")
    names = root.get("buffer_names")
    degrees: Mapping[str, Tree] = dims if isinstance(dims, dict) else {}
    model = ModelFile(
        file.path,
        file.number,
        module,
        module_values,
        frozenset(map(str, names)) if isinstance(names, (list, tuple)) else frozenset(),
        shapes_of(file, root),
        _shapes(file, root["frozen_param_shapes"], "frozen_param_shapes")
        if root.get("frozen_param_shapes") is not None
        else None,
        {str(n): v for n, v in fragments.items() if isinstance(v, TensorRef)} if isinstance(fragments, dict) else {},
        _shared(root.get("shared_params")),
        root.get("optimizer"),
        whole_number(root.get("dp_world_size")),
        whole_number(root.get("mp_world_size")),
        whole_number(degrees.get("tp_degree")),
        whole_number(degrees.get("pp_degree")),
        whole_number(root.get("global_steps")),
        config if isinstance(config, dict) else {},
        [n for n in experts if type(n) is int] if isinstance(experts, (list, tuple)) else [],
        info if isinstance(info, dict) else {},
        _values(file, root),
        bool(root.get("ds_autoep_layers")),
        tuple(show(k) for k in root if not isinstance(k, str)),
    )
    if is_of_stage_three(file.path):
        empty_places(model)
    return model


def shapes_of(file: Opened, root: Mapping[Tree, Tree]) -> list[dict[str, Shape]] | None:
    """param_shapes, by flat group, or of all groups together (before 0.5); None where it is not there."""
    found = root.get("param_shapes")
    if found is None:
        return None
    listed = list(found) if isinstance(found, (list, tuple)) else [found]
    return [_shapes(file, g, f"param_shapes[{i}]") for i, g in enumerate(listed)]


def empty_places(model: ModelFile) -> None:
    """Old stage 3 files hold one element, a 1, in the place of every parameter: here they are places as today's are.

    Names of one such element are one parameter: the file has no other list of ties.
    Source: DeepSpeed 0.3.10 to 0.5.8, runtime/zero/partition_parameters.py, _partition_param.
    """
    listed = {n: s for g in (*(model.shapes or ()), model.frozen or {}) for n, s in g.items()}
    module = model.module or {}
    if not any(r.shape == (1,) != listed.get(n, (1,)) for n, r in module.items()):
        return
    places = {n: r for n, r in module.items() if r.shape == (1,) and n not in model.buffers}
    names: dict[str, list[str]] = {}
    for alias, first in aliases(places).items():
        names.setdefault(first, [first]).append(alias)
    for same in names.values():
        owner = next((n for n in same if n in listed), "")
        model.shared.update({n: owner for n in same if owner and n not in listed})
    model.module = module | {n: replace(r, shape=(0,), stride=(1,)) for n, r in places.items()}


def _shapes(file: Opened, tree: Tree, what: str) -> dict[str, Shape]:
    out = {}
    for name, shape in file.mapping(tree, what).items():
        if not isinstance(shape, (tuple, list)) or not all(type(n) is int and n >= 0 for n in shape):
            raise Damaged(f"{what}: {name} has no shape", where=file.path, why=str(shape)[:80], code="zero-layout")
        out[str(name)] = tuple(shape)
    return out


def _shared(tree: Tree) -> dict[str, str]:
    """Alias to stored name. DeepSpeed 0.9.0 and 0.9.1 wrote lists of pairs."""
    if isinstance(tree, dict):
        return {str(a): str(b) for a, b in tree.items()}
    if isinstance(tree, (list, tuple)):
        return {str(p[0]): str(p[1]) for p in tree if isinstance(p, (list, tuple)) and len(p) == 2}
    return {}


def _values(file: Opened, root: Mapping[Tree, Tree]) -> dict[str, Tree]:
    """Counters, scheduler, and what the caller added as client state, by name."""
    out: dict[str, Tree] = {}
    for key, tree in root.items():
        name = str(key)
        if name in STRUCTURE or name in SETTINGS or (name in OPTIONAL and tree is None):
            continue
        out[name] = file.value(name, tree)
    settings = {name: file.value(name, root[name]) for name in SETTINGS if root.get(name) is not None}
    if OWN in out:
        settings[OWN] = out.pop(OWN)
    if settings:
        out[OWN] = settings
    return out


def one_save(models: Sequence[ModelFile]) -> None:
    """Damaged where two model-states files are of different steps or world sizes."""
    first = models[0]
    for model in models[1:]:
        for what, a, b in (("step", first.steps, model.steps), ("data-parallel size", first.dp, model.dp)):
            if a != b:
                raise Damaged(
                    f"two ranks' files are of different saves: {what} {a} and {b}",
                    where=f"{first.path}, {model.path}",
                    fix="copy the step again, from one save",
                    code="mixed-saves",
                )


def every_rank(models: Sequence[ModelFile]) -> None:
    """MissingFile where there are fewer model-states files than the run had model-parallel ranks."""
    first = models[0]
    if first.mp is not None and first.mp > len(models):
        raise MissingFile(
            f"there are files of {len(models)} model-parallel ranks, the run had {first.mp}",
            where=first.path,
            why=f"mp_world_size is {first.mp}",
            fix="copy the files of every rank",
        )
