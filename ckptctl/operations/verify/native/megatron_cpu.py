"""What lets megatron-core run on a CPU, for checks of numbers: its calls of CUDA do nothing, or what a CPU does.

Nothing of its arithmetic is changed. On GPUs none of this is used.
Source of what is called: megatron-core 0.16.1 (core/tensor_parallel/random.py, core/optimizer/, core/distributed/
param_and_grad_buffer.py, core/transformer/torch_norm.py, core/transformer/moe/moe_utils.py, training/initialize.py).
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SEED_STATE = bytes(16)


class _Nothing:
    """A stream or an event: whatever is asked of it does nothing."""

    device = "cpu"

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes anything."""

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def before_import() -> None:
    """Stand-ins in torch, to be made before megatron is imported."""
    import torch

    cuda = torch.cuda
    facts = types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=1 << 34, multi_processor_count=1)
    answers: dict[str, Any] = {
        "current_device": "cpu", "device_count": 1, "set_device": None, "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None, "get_device_capability": (9, 0), "get_device_properties": facts,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "manual_seed": None,
        "manual_seed_all": None, "set_rng_state": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, _answering(answer))
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Nothing()
    cuda.get_rng_state = _random_state
    cuda.default_generators = ()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    own_type = torch.Tensor.type

    def cuda_type(tensor: Any, dtype: Any = None, *args: Any, **named: Any) -> Any:
        """Types by the names that a GPU's tensors have: the optimizer sorts parameters by them."""
        if dtype is None:
            plain = own_type(tensor).removeprefix("torch.").removeprefix("cuda.")  # a mode may call this one again
            return f"torch.cuda.{plain}"
        return own_type(tensor, dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype, *args, **named)

    torch.Tensor.type = cuda_type
    stub = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")  # needs triton
    stub.enable_batch_invariant_mode = lambda *_, **__: None  # type: ignore[attr-defined]
    stub.is_batch_invariant_mode_enabled = lambda *_, **__: False  # type: ignore[attr-defined]
    sys.modules[stub.__name__] = stub

    class ToCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Tensors that are asked for on a GPU are made here."""

        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if str(named.get("device")).startswith("cuda"):
                named["device"] = "cpu"
            return func(*args, **named)

    ToCpu().__enter__()


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _random_state(*_: Any, **__: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(_SEED_STATE), dtype=torch.uint8).clone()


def after_import() -> None:
    """What is to be changed in megatron itself: fused code is not used, collectives come one by one."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.random as randomness
    import megatron.core.transformer.moe.moe_utils as experts
    import megatron.core.transformer.torch_norm as norms
    import megatron.training.initialize as initialize
    import torch.distributed as dist

    randomness._set_cuda_rng_state = lambda *_, **__: None  # noqa: SLF001
    if hasattr(randomness, "_get_cuda_rng_state"):
        randomness._get_cuda_rng_state = _random_state  # noqa: SLF001
    initialize._compile_dependencies = lambda: None  # noqa: SLF001
    if not hasattr(experts, "te_general_gemm"):
        experts.te_general_gemm = None

    @contextlib.contextmanager
    def one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
        """Gloo has no coalesced collectives: those inside are done at once, each by itself, which gives the same."""
        kept = dist.all_reduce, buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func
        now = [_at_once(f) for f in kept]
        dist.all_reduce, buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func = now
        try:
            yield types.SimpleNamespace(wait=lambda: None)
        finally:
            dist.all_reduce, buffers.dist_reduce_scatter_func, buffers.dist_all_gather_func = kept

    buffers._coalescing_manager = one_by_one  # noqa: SLF001
    make = norms.WrappedTorchNorm.__new__

    def marked(kind: Any, config: Any, *args: Any, **named: Any) -> Any:
        """Torch's norms refuse sequence parallelism only since nothing marks their parameters: they are marked."""
        kept, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(kind, config, *args, **named)
        finally:
            config.sequence_parallel = kept
        for parameter in norm.parameters():
            parameter.sequence_parallel = kept
        return norm

    norms.WrappedTorchNorm.__new__ = marked


def _at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: function(*args, **{**named, "async_op": False})


def fused_like() -> Any:
    """A class like the FusedAdam of Apex and Transformer Engine: the count of steps in the group, two moments each.

    Files of the distributed optimizer have that layout. Source: NVIDIA apex, optimizers/fused_adam.py.
    """
    import torch

    class FusedLike(torch.optim.Optimizer):  # type: ignore[misc]
        """AdamW in float32, on a CPU."""

        def __init__(
            self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
            weight_decay: float = 0.0, bias_correction: bool = True, adam_w_mode: bool = True, **_: Any,
        ) -> None:  # fmt: skip
            settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
            super().__init__(params, {**settings, "weight_decay": weight_decay})
            self.adam_w_mode = int(adam_w_mode)
            self.capturable = self.master_weights = False

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = count = group.get("step", 0) + 1
                first, second = group["betas"]
                corrected = group["bias_correction"]
                scale = (1 - first**count, 1 - second**count) if corrected else (1.0, 1.0)
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    held = self.state[parameter]
                    for kind in ("exp_avg", "exp_avg_sq"):
                        if kind not in held:
                            held[kind] = torch.zeros_like(parameter, dtype=torch.float32)
                    gradient, decay = parameter.grad.float(), group["weight_decay"]
                    if not self.adam_w_mode:
                        gradient = gradient + decay * parameter
                    held["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                    held["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                    update = (held["exp_avg"] / scale[0]) / ((held["exp_avg_sq"] / scale[1]).sqrt() + group["eps"])
                    if self.adam_w_mode:
                        update = update + decay * parameter
                    parameter.add_(update, alpha=-group["lr"])

    return FusedLike
