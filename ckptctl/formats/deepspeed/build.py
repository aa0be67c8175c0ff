"""What is gathered while a DeepSpeed checkpoint is read, and the weights: whole in module, or derived from masters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, Checkpoint, Facts, File, Group, Optimizer
from ckptctl.core.dtype import BY_NAME
from ckptctl.core.errors import Damaged
from ckptctl.core.tensor import Key, Tensor
from ckptctl.formats.bytesource import read_whole
from ckptctl.formats.deepspeed import teams
from ckptctl.formats.deepspeed.opened import plain_object
from ckptctl.formats.hf.files import scan_folder
from ckptctl.formats.torchtensor import aliases, tensor_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptctl.core.dtype import DType
    from ckptctl.core.values import TensorRef, Tree
    from ckptctl.formats.deepspeed.folder import Files
    from ckptctl.formats.deepspeed.layout import Shape
    from ckptctl.formats.deepspeed.modelfile import ModelFile
    from ckptctl.formats.deepspeed.opened import Pile
    from ckptctl.formats.deepspeed.zero import Native


@dataclass
class Build:
    """A checkpoint while it is put together."""

    files: Files
    pile: Pile
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scalars: dict[tuple[str, str], Tree] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    model_values: dict[str, Tree] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Files that a run needs and a reader does not."""
    layout: dict[str, int | None] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    stages: dict[int, dict[str, Shape]] = field(default_factory=dict)
    """Each pipeline stage's parameters, where its optimizer is whole."""
    slices: Mapping[str, Tree] = field(default_factory=dict)
    """universal_checkpoint_info of an optimizer's file, where AutoTP puts it."""
    step: int | None = None
    unnamed: str = ""
    order_known: bool = True
    variant: str = ""
    facts: Facts = field(default_factory=Facts)

    def take_values(self, first: ModelFile) -> None:
        """The step and the values of the first model-states file; a word where their names are no text there."""
        self.step, self.values = first.steps, dict(first.values)
        if first.odd_keys:
            self.warnings.append(
                f"client state has names that are no text, which become text: {', '.join(first.odd_keys[:4])}"
            )

    def take(self, native: Native) -> None:
        """States and groups of one model-parallel rank; groups with equal settings at one place are joined.

        A tied layer's parameters are in several stages' optimizers: replicas.
        """
        for key, tensor in native.tensors.items():
            known = self.tensors.setdefault(key, tensor)
            if known is not tensor:
                if (known.shape, known.dtype.name) != (tensor.shape, tensor.dtype.name):
                    raise Damaged(
                        f"{key.kind} of {key.name} differs between stages in shape or type", code="mixed-saves"
                    )
                self.tensors[key] = replace(known, replicas=(*known.replicas, tensor.pieces))
        for place, value in native.scalars.items():
            self.scalars.setdefault(place, value)
        joined = list(self.groups)
        for number, group in enumerate(native.groups):
            seen = {n for g in joined for n in g.params}
            params = tuple(n for n in group.params if n not in seen)
            if number < len(self.groups) and repr(self.groups[number].options) == repr(group.options):
                joined[number] = Group((*joined[number].params, *params), group.options)
            elif params or group.options:
                joined.append(Group(params, group.options))
        self.groups = joined
        self.unnamed = self.unnamed or native.unnamed

    def put(self, tensor: Tensor) -> None:
        """One tensor of the model, under its own kind."""
        if tensor.key in self.tensors:
            raise Damaged(f"{tensor.key.name} is in two files", code="duplicate-tensor")
        self.tensors[tensor.key] = tensor

    def weights(self, model: ModelFile) -> None:
        """Module weights that the file holds, buffers, and ties: by shared_params, or by one storage."""
        module = model.module or {}
        held = {n: r for n, r in module.items() if r.numel or (n not in self.derived(model))}
        for name, ref in held.items():
            kind = "buffer" if name in model.buffers else "weight"
            key = Key(name, kind)
            self.put(tensor_of(key, ref, model.source))
        self._require_shapes(model, held)
        self.ties.update(aliases(held))
        for alias, owner in self.believed(model).items():
            owner = self.ties.get(owner, owner)
            if alias in self.ties or alias == owner or Key(owner) not in self.tensors or Key(alias) not in self.tensors:
                continue
            mine, other = self.tensors[Key(alias)], self.tensors[Key(owner)]
            if mine.shape != other.shape:
                self.warnings.append(
                    f"{model.path} says that {alias} is {owner}, but their shapes are {mine.shape} and {other.shape}: "
                    "DeepSpeed 0.9.0 and 0.9.1 wrote wrong ties"
                )
                continue
            self.ties[alias] = owner

    def _require_shapes(self, model: ModelFile, held: Mapping[str, TensorRef]) -> None:
        """Damaged where a weight has another shape in module than in the list by which flat groups are cut."""
        for name, shape in ((n, s) for g in (*(model.shapes or ()), model.frozen or {}) for n, s in g.items()):
            ref = held.get(name)
            if ref is not None and ref.shape != shape:
                raise Damaged(
                    f"{name} has shape {ref.shape} in module, {shape} by param_shapes",
                    where=model.path,
                    why="the file contradicts itself",
                    fix="copy the step again",
                    code="zero-layout",
                )
        lost = [n for g in model.shapes or () for n in g if model.module and n not in model.module]
        lost = [n for n in lost if Key(n) not in self.tensors]
        if lost:
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            self.warnings.append(
                f"module has no {lost[0]}{more}, which the optimizer trains: its master is taken, and DeepSpeed does "
                "not load the checkpoint"
            )

    def believed(self, model: ModelFile) -> dict[str, str]:
        """Ties that a model-states file tells, less those of parameters that the optimizer has apart.

        DeepSpeed 0.9.0 and 0.9.1 took all parameters of stage 3 for the first one: where that is seen, none of the
        file's is believed.
        """
        apart = {n for g in (*(model.shapes or ()), model.frozen or {}) for n in g}
        wrong = [a for a, o in model.shared.items() if a in apart and a != o]
        if not wrong:
            return model.shared
        said = (
            f"{model.path} says that {wrong[0]} is {model.shared[wrong[0]]}, but each has values of its own: its ties "
            "are not taken (DeepSpeed 0.9.0 and 0.9.1 wrote wrong ones)"
        )
        if said not in self.warnings:
            self.warnings.append(said)
        return {}

    def derived(self, model: ModelFile) -> set[str]:
        """Names that module has as an empty placeholder while their shape is another one: ZeRO-3.

        A parameter may have no element at all, too, at any stage.
        """
        module, frozen = model.module or {}, model.frozen or {}
        shapes = {n: s for g in model.shapes or () for n, s in g.items()} | frozen
        if not any(Key(n, MASTER) in self.tensors for n in shapes):
            return set(frozen) if model.stage == 3 else set()
        places = {n for n, r in module.items() if is_placeholder(r) and n not in model.buffers}
        if model.stage != 3 and not any(shapes.get(n, (0,)) != (0,) for n in places):
            return set()
        return {n for n in places if n in frozen or shapes.get(n) != (0,)}

    def derive(self, model: ModelFile) -> None:
        """Weights of which only the float32 master is stored, in the run's type; and aliases of them."""
        module = model.module or {}
        for key, master in list(self.tensors.items()):
            if key.kind != MASTER or Key(key.name) in self.tensors or Key(key.name, "buffer") in self.tensors:
                continue
            if self.unnamed and key.name not in module:
                continue  # a number: whose weights the master is of is not known
            ref = module.get(key.name)
            dtype = ref.dtype if ref is not None else BY_NAME[model.run_dtype]
            self.put(cast_of(master, key.name, dtype))
        for alias, owner in self.believed(model).items():
            source = self.tensors.get(Key(owner))
            if source is not None and Key(alias) not in self.tensors and alias != owner:
                self.put(cast_of(source, alias, source.dtype, stored=source.cast_from))
                self.ties[alias] = owner

    def keep(self, rest: dict[str, Tree]) -> None:
        """What stands beside the optimizer's state, among DeepSpeed's own values."""
        if rest:
            own = self.values.setdefault("deepspeed", {})
            own.update({k: plain_object(v) for k, v in rest.items() if k not in own})

    def trainable(self, model: ModelFile, mp: int) -> dict[str, Shape]:
        """A whole optimizer's candidates in order: module's tensors less buffers and aliases; a stage's layers."""
        if model.module is None:
            return dict(self.stages.get(mp, {}))
        kept = {n: r for n, r in model.module.items() if n not in model.buffers and n not in model.shared}
        tied = aliases(kept)
        return {n: r.shape for n, r in kept.items() if n not in tied}

    def checkpoint(self) -> Checkpoint:
        """All of it."""
        facts = self.facts
        extras: tuple[str, ...] = ()
        if facts.config is None and (self.files.root / "config.json").is_file():
            folder = scan_folder(self.files.root)
            if folder.config is not None:
                facts = Facts(folder.config, read_whole(self.files.root / "config.json"), "config.json")
                extras = folder.carried
        listed = [*self.pile.files.values()]
        listed += [File(n, (self.files.root / n).stat().st_size, "extra") for n in extras if n != "config.json"]
        ranked = {"weight": 0, "buffer": 0}
        order = sorted(self.tensors, key=lambda k: ranked.get(k.kind, 1))  # stable: each kind in the files' order
        self.tensors = {k: self.tensors[k] for k in order} | self.pile.held
        optimizer = None
        states = any(k.kind not in ("weight", "buffer", "other") for k in self.tensors)
        if self.groups or self.scalars or states:
            optimizer = Optimizer(
                teams.unsized(self.groups), self.scalars, self.order_known, keyed="integers", unnamed=self.unnamed
            )
        return Checkpoint(
            "deepspeed",
            self.variant,
            str(self.files.root),
            tuple(self.pile.sources),
            self.tensors,
            optimizer,
            self.values,
            self.model_values,
            self.ties,
            facts,
            self.layout,
            self.step,
            tuple(listed),
            extras=extras,
            unsafe=tuple(self.pile.unsafe),
            unknown_globals=tuple(self.pile.unknown),
            unsupported=tuple(self.pile.unsupported),
            warnings=tuple(self.warnings),
            missing=tuple(self.missing),
            gap_reason="zip headers, pickles and alignment; padding of flat groups",
            rounded_masters=True,
            about=self.about,
        )


def cast_of(master: Tensor, name: str, dtype: DType, stored: DType | None = None) -> Tensor:
    """The weight that a float32 master stands for: its values are a cast away."""
    return Tensor(
        Key(name), dtype, master.shape, master.pieces, trainable=master.trainable, cast_from=stored or master.held
    )


def is_placeholder(ref: TensorRef | None) -> bool:
    """Whether a tensor of module only keeps the place of one."""
    return ref is not None and ref.shape == (0,)
