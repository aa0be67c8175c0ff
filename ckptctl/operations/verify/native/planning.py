"""Which framework is to take a checkpoint up, and what it must be told: from our reader's view of it. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptctl.core.checkpoint import MASTER, WEIGHTS, Checkpoint
from ckptctl.core.errors import MissingFact, Unsupported
from ckptctl.core.values import as_number
from ckptctl.formats.deepspeed.modelfile import ROUND_ROBIN, zero_section
from ckptctl.formats.megatron.runargs import source_args
from ckptctl.operations.state_values import plain
from ckptctl.operations.verify.native.saved import padding_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptctl.operations.verify.rules import Rule

Data = dict[str, Any]


@dataclass(frozen=True)
class Native:
    """A run to start: the runner's module, its ranks, and the parts of its job that are of this checkpoint."""

    runner: str
    world: int
    job: Data = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plan(checkpoint: Checkpoint, named: Checkpoint, rule: Rule | None) -> Native:
    """How the real framework loads a checkpoint as a user's run would, at the layout that it has.

    named is the same under the model's parameter names; rule how its parameters are updated, None where there is no
    optimizer. Raises Unsupported, naming it, for what only the run's own program could load.
    """
    makers: dict[str, Callable[[Checkpoint], Native]] = {
        "dcp": _dcp, "deepspeed": _deepspeed, "torch": _torch, "trainer": _trainer, "accelerate": _accelerate,
        "lightning": _lightning, "megatron": partial(_megatron, named=named), "hf": _hf,
    }  # fmt: skip
    maker = makers.get(checkpoint.format)
    if maker is None:
        raise _own_program(checkpoint, f"no framework is known here that loads {checkpoint.format} into a torch model")
    found = maker(checkpoint)
    return Native(found.runner, found.world, {**_shared(named, rule), **found.job}, found.notes)


def _shared(named: Checkpoint, rule: Rule | None) -> Data:
    """What every runner is told: config, type, groups, what is frozen."""
    config = dict(named.facts.config or {})
    weights = {k.name: t for k, t in named.tensors.items() if k.kind in WEIGHTS}
    types = [t.dtype.name for k, t in named.tensors.items() if k.kind == "weight"]
    groups, optimizer = _groups(named, rule) if rule is not None else ([], "")
    trained = {n for g in groups for n in g["params"]}
    frozen = [n for n in weights if n not in trained and n not in named.ties] if groups else []
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return {
        "path": str(Path(named.root).absolute()),
        "config": config,
        "architecture": first if isinstance(first, str) and first.endswith(("CausalLM", "LMHeadModel")) else "",
        "dtype": _widest_or_first(types),
        "groups": groups,
        "optimizer": optimizer,
        "frozen": frozen,
        "ties": sorted(named.ties),
        "files": [],
    }


def _groups(named: Checkpoint, rule: Rule) -> tuple[list[Data], str]:
    """(params and settings of each group, torch's class for them).

    Where the checkpoint has moments but no groups, one group with the settings that are usual.
    """
    listed: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
    if named.optimizer is not None:
        listed = [(g.params, g.options) for g in named.optimizer.groups]
    if not listed:
        names = dict.fromkeys(k.name for k in named.tensors if k.kind not in (*WEIGHTS, MASTER, "step"))
        listed = [(tuple(names), {})]
    groups: list[Data] = []
    for params, options in listed:
        settings = rule.settings({k: plain(v) for k, v in options.items()})
        decoupled = {k: settings.pop(k) for k in ("decoupled_weight_decay", "bias_correction") if k in settings}
        names_kept = [n for n in params if n not in named.ties]
        groups.append({"params": names_kept, "settings": settings, "decoupled": decoupled})
    kinds = {bool(g["decoupled"].get("decoupled_weight_decay", True)) for g in groups}
    if len(kinds) > 1 or not all(g["decoupled"].get("bias_correction", True) for g in groups):
        raise Unsupported(
            "torch has no optimizer for these groups",
            where=named.root,
            why="decoupled weight decay in some of them only, or no bias correction",
            fix="leave --native out",
        )
    adam = "AdamW" if True in kinds else "Adam"
    return groups, {"adam": adam, "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}[rule.name]


def _widest_or_first(types: Sequence[str]) -> str:
    floats = [t for t in types if t in ("float32", "bfloat16", "float16")]
    return max(set(floats), key=floats.count) if floats else "float32"


def _own_program(checkpoint: Checkpoint, why: str) -> Unsupported:
    return Unsupported(
        "--native: only the run's own program can load this checkpoint",
        where=checkpoint.root,
        why=why,
        fix="leave --native out: verify's own step reads it",
        code="native-unknown",
    )


def _world(checkpoint: Checkpoint) -> int:
    number = checkpoint.layout.get("world_size")
    return int(number) if number else 1


# ---- torch and DCP


def _dcp(checkpoint: Checkpoint) -> Native:
    if checkpoint.variant == "torchtitan" or checkpoint.naming == "torchtitan":
        raise _own_program(checkpoint, "torchtitan's models have classes and names of their own")
    if checkpoint.variant == "safetensors":
        raise _own_program(checkpoint, "no reader of torch takes items as safetensors, which torch itself wrote")
    return Native("run_fsdp", _world(checkpoint), {"dcp": dcp_paths(checkpoint)}, _mesh_note(checkpoint))


def _mesh_note(checkpoint: Checkpoint) -> tuple[str, ...]:
    tp = checkpoint.layout.get("tp") or 1
    if tp == 1:
        return ()
    return (f"saved over tp {tp}: torch's loader puts it on {_world(checkpoint)} data-parallel ranks",)


def dcp_paths(checkpoint: Checkpoint) -> Data:
    """Under which keys the items of a DCP lie: paths of the model's and the optimizer's dict, whether groups are there.

    Names are those that the reader gave; an item's path ends in its name. folders says which folder holds which part.
    """
    model: set[tuple[str, ...]] = set()
    optim: set[tuple[str, ...]] = set()
    groups = flat = False
    folders: dict[str, set[str]] = {}
    names = {k.name for k in checkpoint.tensors if k.kind in WEIGHTS}
    for entry in checkpoint.entries:
        words = [str(w) for w in entry.path]
        dotted = ".".join(words)
        if entry.key is not None and entry.key.kind in WEIGHTS and dotted.endswith(entry.key.name):
            model.add(_before(words, entry.key.name))
            folders.setdefault(entry.folder, set()).add("model")
        elif entry.key is not None and entry.key.kind not in WEIGHTS:
            at = next((i for i, w in enumerate(words) if w == "state" or w.startswith("state.")), None)
            if at is not None:
                optim.add(tuple(words[:at]))
                folders.setdefault(entry.folder, set()).add("optim")
        if "param_groups" in dotted:
            groups = True
            after = dotted.partition("param_groups.")[2]
            flat = flat or any(after.startswith(f"{n}.") for n in (after.rpartition(".")[0],) if n in names)
    if len(model) != 1 or len(optim) > 1:
        raise _own_program(checkpoint, f"its items lie under {sorted(model) or 'no model'} and {sorted(optim)}")
    return {
        "model": list(next(iter(model))),
        "optim": list(next(iter(optim), ())),
        "groups": groups,
        "flat": flat,
        "folders": {f: sorted(parts) for f, parts in folders.items()},
    }


def _before(words: Sequence[str], name: str) -> tuple[str, ...]:
    """The part of a path before a name, whose dots may be in one word or in several."""
    for cut in range(len(words) + 1):
        if ".".join(words[cut:]) == name:
            return tuple(words[:cut])
    return ("",)


def _torch(checkpoint: Checkpoint) -> Native:
    if checkpoint.variant == "verl":
        return _rank_files(checkpoint)
    if Path(checkpoint.root).is_dir() or checkpoint.variant not in ("zip", "legacy"):
        raise _own_program(checkpoint, f"a rank's own files ({checkpoint.variant}) fit that run's wrapping alone")
    optimizer = ["optimizer"]
    for word in ("optimizer", "optim", "optimizer_state_dict", "optimizer_state"):
        if any(str(e.path[0]) == word for e in checkpoint.entries if e.path):
            optimizer = [word]
    prefix = f"{checkpoint.module}." if checkpoint.module else ""
    return Native(
        "run_torch", 1, {"torch": {"model": list(checkpoint.model_path), "optimizer": optimizer, "prefix": prefix}}
    )


def _rank_files(checkpoint: Checkpoint) -> Native:
    world, root = _world(checkpoint), Path(checkpoint.root).absolute()
    about = root / "fsdp_config.json"
    if about.is_file() and '"FSDP_version": 1' in about.read_text(errors="replace"):
        raise _own_program(checkpoint, "FSDP1's flat parameters fit that run's wrapping alone")
    tail = [f"world_size_{world}_rank_{r}.pt" for r in range(world)]
    files = [{"model": str(root / f"model_{t}"), "optimizer": str(root / f"optim_{t}")} for t in tail]
    return Native("run_fsdp", world, {"files": files})


def _hf(checkpoint: Checkpoint) -> Native:
    return Native("run_transformers", 1, {}, ("weights alone: losses and gradients, and no update",))


# ---- frameworks on torch


def _trainer(checkpoint: Checkpoint) -> Native:
    if checkpoint.step is None:
        raise MissingFact("trainer_state.json does not say the step", where=checkpoint.root)
    return Native("run_trainer", 1, {"trainer": {"step": checkpoint.step}})


def _accelerate(checkpoint: Checkpoint) -> Native:
    is_sharded = checkpoint.variant.startswith("fsdp")
    job = {"accelerate": {"fsdp": 2 if is_sharded else 0, "full": "full" in checkpoint.variant}}
    notes = ("loaded under FSDP2, whichever FSDP saved it: both write the same names",) if is_sharded else ()
    return Native("run_accelerate", _world(checkpoint), job, notes)


def _lightning(checkpoint: Checkpoint) -> Native:
    sharded = "sharded" in checkpoint.variant
    job = {"lightning": {"module": checkpoint.module, "sharded": sharded, "step": checkpoint.step or 0}}
    return Native("run_lightning", _world(checkpoint) if sharded else 1, job)


# ---- DeepSpeed


def _deepspeed(checkpoint: Checkpoint) -> Native:
    layout, about = checkpoint.layout, checkpoint.about
    for axis in ("tp", "pp", "ep"):
        if (layout.get(axis) or 1) > 1:
            raise _own_program(checkpoint, f"{axis} {layout[axis]}: its modules are made by the run's own program")
    universal = checkpoint.variant == "universal"
    world = int(layout.get("dp") or 1)
    stage = int(layout.get("zero_stage") or 0)
    notes: tuple[str, ...] = ()
    if universal:
        stage = int(as_number(about.get("made_from_stage")) or 1)
        notes = ("a universal folder belongs to no number of ranks: loaded on 1",)
    names = {k.name: t.dtype.name for k, t in checkpoint.tensors.items() if k.kind == "weight"}
    dtype = str(about.get("dtype") or _widest_or_first(list(names.values()))).removeprefix("torch.")
    config: Data = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": stage, **({} if universal else _layout_settings(checkpoint))},
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    elif dtype == "float16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if about.get("optimizer") == "BF16_Optimizer":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    root, tag = _run_and_tag(Path(checkpoint.root))
    job = {"path": str(root), "deepspeed": {"config": config, "tag": tag, "lax": False}, "dtype": dtype}
    return Native("run_deepspeed", world, job, notes)


def _layout_settings(checkpoint: Checkpoint) -> Data:
    """What decides where parameters lie in the ranks' flat groups, as the run's own configuration had it."""
    own = checkpoint.values.get("deepspeed")
    found = zero_section(own.get("ds_config") if isinstance(own, dict) else None)
    out: Data = {ROUND_ROBIN: True} if found.get(ROUND_ROBIN) is True else {}
    size = as_number(found.get("sub_group_size"))
    return out | ({"sub_group_size": int(size)} if isinstance(size, (int, float)) and size > 0 else {})


def _run_and_tag(path: Path) -> tuple[Path, str | None]:
    """The folder that engine.load_checkpoint is given, and the tag below it."""
    path = path.absolute()
    for tracker in ("latest", "latest_universal"):
        if (path / tracker).is_file():
            return path, (path / tracker).read_text(errors="replace").strip()
    return path.parent, path.name


# ---- Megatron


def _megatron(checkpoint: Checkpoint, named: Checkpoint) -> Native:
    """What Megatron-LM's training code needs to make the run anew: its own args, as plain data."""
    args = {k: plain(v) for k, v in source_args(checkpoint).items()}
    if not args:
        raise _own_program(checkpoint, "the args of its run are not in it")
    if (checkpoint.layout.get("pp") or 1) > 1 and args.get("untie_embeddings_and_output_weights") is False:
        raise _own_program(checkpoint, "tied embeddings on two pipeline stages: their step is not that of the run here")
    layout, counted = checkpoint.layout, (named.facts.config or {}).get("vocab_size")
    if not isinstance(counted, int):
        raise MissingFact("the true vocabulary is in no file", where=checkpoint.root, fix="--model-config")
    root = Path(checkpoint.root).absolute()
    is_run = (root / "latest_checkpointed_iteration.txt").is_file()
    options = [g.options for g in checkpoint.optimizer.groups] if checkpoint.optimizer is not None else []
    fused = bool(args.get("use_distributed_optimizer")) or any("step" in o for o in options)
    job: Data = {
        "args": {k: v for k, v in args.items() if isinstance(v, (bool, int, float, str, list))},
        "vocabulary": counted - padding_rows(named),
        "counted": counted,
        "layers": int(args.get("num_layers") or 0),
        "pp": int(layout.get("pp") or 1),
        "vpp": int(layout.get("vpp") or 1),
        "dp": int(layout.get("dp") or 1),
        "format": "torch_dist" if checkpoint.variant == "torch_dist" else "torch",
        "load": str(root if is_run else root.parent),
        "iteration": None if is_run else checkpoint.step,
        "fused": fused,
    }
    world = int(layout.get("tp") or 1) * job["pp"] * job["dp"]
    notes = () if padding_rows(named) else ("the loss is over the true vocabulary: padded rows are no tokens",)
    return Native("run_megatron", world, {"megatron": job}, notes)
