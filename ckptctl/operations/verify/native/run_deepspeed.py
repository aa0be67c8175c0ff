"""A DeepSpeed checkpoint loaded by `engine.load_checkpoint`, at the ZeRO stage and over the ranks that saved it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .rank import Session, follow, model_of, names_of, optimizer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeed(Session):
    """An engine. Source: DeepSpeed 0.19.8, runtime/engine.py; utils/tensor_fragment.py for whole tensors."""

    framework = "DeepSpeed"

    def __init__(self, job: dict[str, Any]) -> None:
        import deepspeed

        self.version = deepspeed.__version__
        if job["dtype"] == "float16" and job["device"] == "cpu":  # refused for its speed on CPUs; torch computes it
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        deepspeed.init_distributed(dist_backend="nccl" if job["device"] == "cuda" else "gloo")
        net = model_of(job)
        optimizer = optimizer_of(net.named_parameters(), job)
        config = job["deepspeed"]["config"]
        self.engine, self.wrapper, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        self.net = self.engine.module
        path, _ = self.engine.load_checkpoint(
            job["path"], tag=job["deepspeed"]["tag"], load_module_strict=not job["deepspeed"]["lax"],
            load_lr_scheduler_states=False,
        )  # fmt: skip
        if path is None:
            raise RuntimeError("engine.load_checkpoint loaded nothing")
        self.optimizer = getattr(self.wrapper, "optimizer", self.wrapper)
        self._link()

    def loss(self, batch: Any) -> tuple[Any, Any]:
        """The engine's forward pass."""
        out = self.engine(**batch, use_cache=False)
        return out.loss, out.logits

    def backward(self, loss: Any) -> None:
        """The engine's. Where it leaves out the loss scale that its optimizer will divide by, that is made good.

        Stage 0 in fp16: gradients, and so moments, would be too small by the scale, and smaller than eps in the end.
        Source: DeepSpeed 0.19.8, runtime/engine.py, backward, which scales the loss for a ZeROOptimizer alone;
        runtime/fp16/unfused_optimizer.py, unscale_and_clip_grads; fused_optimizer.py likewise.
        """
        scale = self._scale()
        if scale != 1.0 and self._whole_here():

            def scaled(gradient: Any) -> Any:  # what arrives here is what the engine multiplied the loss by
                if float(gradient) == scale:
                    return gradient
                if not self.notes:
                    self.notes = (
                        f"DeepSpeed {self.version} divides stage 0's gradients by the loss scale of {scale:g} without "
                        "having multiplied the loss by it: here the loss is multiplied",
                    )
                return gradient.new_full(gradient.shape, scale)

            loss.register_hook(scaled)
        self.engine.backward(loss)

    def _scale(self) -> float:
        """The loss scale of fp16; 1.0 elsewhere."""
        found = getattr(self.wrapper, "loss_scale", None)
        return float(found) if isinstance(found, (int, float)) and found else 1.0

    def update(self) -> None:
        """The engine's."""
        self.engine.step()
        self._link()

    def clip(self, largest: float) -> None:
        """The engine does it itself: its configuration says how far."""

    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside the engine's."""
        return list(self.wrapper.param_groups)

    def gradients(self) -> Iterator[tuple[str, Any]]:
        """Whole gradients, by DeepSpeed's own interface, which gives them as they are: with the loss scale of fp16."""
        from deepspeed.utils import safe_get_full_grad

        plain = self._whole_here()
        scale = self._scale()
        for name, parameter in self.net.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad if plain else safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient.detach().float() / scale

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """Weights as the model has them, masters and moments, each whole."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        plain = self._whole_here()
        for name, parameter in self.net.named_parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                weight = parameter.detach().clone().reshape(shape)
            yield name, "weight", weight
            if not parameter.requires_grad:
                continue
            if id(parameter) in plain:
                master, moments = plain[id(parameter)]
            else:
                master = safe_get_full_fp32_param(parameter)
                moments = {k: safe_get_full_optimizer_state(parameter, k) for k in MOMENTS}
            if master is not None and weight.dtype != master.dtype:
                yield name, "master", master.detach().reshape(shape)
            for kind, value in moments.items():
                if value is not None:
                    yield name, kind, value.detach().reshape(shape)

    def updates(self) -> dict[str, float]:
        """One count for all: the flat groups have no other."""
        steps = {float(s["step"]) for s in self.optimizer.state.values() if "step" in s}
        return {n: steps.copy().pop() for n in names_of(self)} if len(steps) == 1 else {}

    def _whole_here(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        """id(parameter): (master, moments), where nothing is partitioned; empty under ZeRO and BF16_Optimizer."""
        held: dict[int, tuple[Any, dict[str, Any]]] = {}
        wrapper = self.wrapper
        if type(wrapper).__module__.startswith("torch.optim"):
            for group in wrapper.param_groups:
                for p in group["params"]:
                    held[id(p)] = (p, {k: wrapper.state[p].get(k) for k in MOMENTS})
        elif hasattr(wrapper, "fp32_groups_flat"):  # FP16_Optimizer: one flat master a group
            for low, flat in zip(wrapper.fp16_groups, wrapper.fp32_groups_flat):  # noqa: B905
                state, start = wrapper.optimizer.state[flat], 0
                for p in low:
                    cut = slice(start, start + p.numel())
                    held[id(p)] = (flat[cut], {k: state[k][cut] for k in MOMENTS if k in state})
                    start += p.numel()
        elif hasattr(wrapper, "fp32_groups") and hasattr(wrapper, "fp16_groups"):  # FP16_UnfusedOptimizer
            for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups):  # noqa: B905
                for p, master in zip(low, high):  # noqa: B905
                    state = wrapper.optimizer.state[master]
                    held[id(p)] = (master, {k: state.get(k) for k in MOMENTS})
        return held

    def _link(self) -> None:
        """Parameters find their optimizer state anew after a load or a step.

        ZeRO-1 and 2 link it once, in the first group's step, when other groups have none, and by the optimizer's order
        where the flat groups lie in round-robin order.
        Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, _link_all_hp_params and
        _lazy_init_hp_params_optimizer_state.
        """
        wrapper = self.wrapper
        if not hasattr(wrapper, "_lazy_init_hp_params_optimizer_state") or not any(self.optimizer.state.values()):
            return
        wrapper._hp_optimizer_states_linked = False  # noqa: SLF001
        if getattr(wrapper, "round_robin_gradients", False):
            kept, wrapper.bit16_groups = wrapper.bit16_groups, wrapper.round_robin_bit16_groups
            wrapper._link_all_hp_params()  # noqa: SLF001
            wrapper._lazy_init_hp_params_optimizer_state()  # noqa: SLF001
            wrapper.bit16_groups = kept
        else:
            wrapper._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


if __name__ == "__main__":
    follow(DeepSpeed)
