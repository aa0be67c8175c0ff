"""The model of a config, built by Transformers, and what its parameters are called. No weight is read here."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Damaged, Unsupported, Usage
from ckptctl.operations.verify.device import torch_dtype
from ckptctl.operations.verify.needs import torch_module, transformers_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptctl.operations.verify.device import Device

_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Built:
    """A model on its device. parameters and buffers are by name, each tensor once; ties maps second names to the first.

    layers is how many the model has, of how many its config says.
    """

    net: Any
    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]
    ties: Mapping[str, str]
    vocabulary: int
    layers: int
    of_layers: int

    @property
    def is_truncated(self) -> bool:
        """Whether it has fewer layers than its config says."""
        return self.layers != self.of_layers


def built(
    config: Mapping[str, Any], device: Device, dtype: str, *, layers: int | None = None, seed: int | None
) -> Built:
    """The model of a config.json, in train mode, computing in dtype (torch's name). Attention is the plain one.

    With a seed its weights are drawn as for a new run; without, they are whatever memory holds, to be loaded over.
    layers: take only the first so many. Unsupported where Transformers has no such model, Damaged where the config is
    none of it.
    """
    torch, transformers = torch_module(), transformers_module()
    with _quiet(transformers):
        made, total = _configured(config, layers)
    kind = _class_of(config, made)
    with _quiet(transformers), torch.device(device.name):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            net = _from_config(kind, made, torch_dtype(dtype), drawn=seed is not None)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as err:
            raise Damaged(
                f"Transformers cannot build the {made.model_type} model of the config",
                why=f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}",
                fix="check the config (--model-config)",
                code="model-config",
            ) from err
    net.tie_weights()  # a model whose weights are not drawn has not tied them either
    net.train()
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    parameters: dict[str, Any] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner == name:
            parameters[name] = parameter
        else:
            ties[name] = owner
    saved = set(net.state_dict().keys())
    buffers = {n: b for n, b in net.named_buffers() if n in saved}
    count = getattr(made, "num_hidden_layers", None)
    number = count if isinstance(count, int) else 0
    vocabulary = int(getattr(made.get_text_config(), "vocab_size", 0) or 0)
    return Built(net, parameters, buffers, ties, vocabulary, number, total or number)


def _configured(config: Mapping[str, Any], layers: int | None) -> tuple[Any, int | None]:
    """Transformers' config of the data, and how many layers the data says."""
    transformers = transformers_module()
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise Damaged("the config has no model_type", fix="give the model's config.json (--model-config)")
    if config.get("auto_map") and family not in transformers.CONFIG_MAPPING:
        raise Unsupported(
            f"a {family} model is built by code of its own repository, which is not run here",
            fix="verify its state alone: --no-model",
            code="remote-code",
        )
    if family not in transformers.CONFIG_MAPPING:
        raise Unsupported(
            f"Transformers {transformers.__version__} has no {family} model",
            fix="install a version that has it, or verify the state alone: --no-model",
            code="model-unknown",
        )
    data = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    try:
        made = transformers.CONFIG_MAPPING[family].from_dict(data)
    except Exception as err:  # validators of Transformers and of huggingface_hub raise kinds of their own
        raise Damaged(
            f"the config is none of a {family} model", why=f"{type(err).__name__}: {err}", code="model-config"
        ) from err
    total = getattr(made, "num_hidden_layers", None)
    if layers is not None and isinstance(total, int):
        if not 1 <= layers <= total:
            raise Usage(f"--layers {layers}: the model has {total} layers")
        made.num_hidden_layers = layers
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(getattr(made, name, None), list):
                setattr(made, name, getattr(made, name)[:layers])
    made.use_cache = False
    return made, total if isinstance(total, int) else None


def _class_of(config: Mapping[str, Any], made: Any) -> Any:
    """The model's class: that which the config names, else the causal language model of its type."""
    transformers = transformers_module()
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if first.endswith(_HEADS) and isinstance(getattr(transformers, first, None), type):
        return getattr(transformers, first)
    if first and not first.endswith(_HEADS):
        raise Unsupported(
            f"{first} is no language model",
            why="a step is trained on tokens, by the loss of the next one",
            fix="verify the state alone: --no-model",
            code="no-language-model",
        )
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(made)]  # noqa: SLF001
    except KeyError as err:
        raise Unsupported(
            f"Transformers has no causal language model of type {made.model_type}",
            fix="verify the state alone: --no-model",
            code="no-language-model",
        ) from err


def _from_config(kind: Any, made: Any, dtype: Any, *, drawn: bool) -> Any:
    context = _nothing() if drawn else _undrawn()
    with context:
        try:
            return kind._from_config(made, attn_implementation="eager", dtype=dtype)  # noqa: SLF001
        except TypeError as err:
            if "dtype" not in str(err):
                raise
            return kind._from_config(made, attn_implementation="eager", torch_dtype=dtype)  # noqa: SLF001


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _undrawn() -> Iterator[None]:
    """Inside, a model's weights are not drawn: they are loaded. Drawing those of a large model takes minutes."""
    from importlib import import_module

    for home in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            skip = import_module(home).no_init_weights
        except (ImportError, AttributeError):
            continue
        with skip():
            yield
        return
    yield


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Inside, Transformers says errors only."""
    logging = transformers.utils.logging
    kept = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(kept)
