"""Activation recomputation: the same step under several policies, compared bit by bit, with what each saves and costs.

A policy says which decoder layers forget their activations after the forward pass and compute them again in the
backward
pass. That trades time for memory and may change nothing else: dropout is drawn again from the same random state.
Takes any Transformers model and batch; nothing here reads a checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptctl.core.errors import Unsupported, Usage
from ckptctl.operations.verify.gauge import Gauge, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Document = dict[str, Any]
_DEPENDS_ON_DROPOUT = "dropout_p"


@dataclass(frozen=True, slots=True)
class Policy:
    """Which layers are computed again: every Nth (0: none), and whether all of a layer or only what is cheap."""

    name: str
    every: int
    selective: bool = False


BASE = Policy("none", 0)


def policies(words: str) -> tuple[Policy, ...]:
    """The policies of `none,full,every=2,selective`. None always comes first: others are compared with it."""
    found = [BASE]
    for word in (w.strip() for w in words.split(",")):
        kind, _, number = word.partition("=")
        if word == "none":
            continue
        if word in ("full", "selective"):
            policy = Policy(word, 1, word == "selective")
        elif kind == "every" and number.isascii() and number.isdigit() and 0 < int(number) < 1 << 31:
            policy = Policy(word, int(number))
        else:
            raise Usage(
                f"--recompute {words}: there is no policy {word!r}",
                fix="a list of none, full, every=N (each Nth layer) and selective",
            )
        if policy not in found:
            found.append(policy)
    return tuple(found)


def layers_of(model: Any) -> tuple[str, list[Any]]:
    """The name of a model's list of decoder layers, and the layers: its heaviest outermost list of modules.

    Raises Unsupported where it has none.
    """
    from torch.nn import ModuleList

    lists = {n: m for n, m in model.named_modules() if isinstance(m, ModuleList) and len(m)}
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    if not outer:
        raise Unsupported("the model has no list of layers that could be computed again", why=type(model).__name__)
    weights = {n: sum(p.numel() for p in m.parameters()) for n, m in outer.items()}
    name = max(outer, key=lambda n: weights[n])
    return name, list(outer[name])


@contextmanager
def recomputing(layers: Sequence[Any], policy: Policy) -> Iterator[int]:
    """The layers under a policy, while inside. Gives how many of them are computed again."""
    from torch.utils.checkpoint import checkpoint

    more = {"context_fn": _selective_contexts} if policy.selective else {}
    chosen = layers[:: policy.every] if policy.every else []
    for layer in chosen:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True, **more)
    try:
        yield len(chosen)
    finally:
        for layer in chosen:
            del layer.forward


def _selective_contexts() -> Any:
    """What the selective policy keeps: products by weights, and fused attention. All else is cheap to do again.

    Batched products (attention scores of an unfused attention) grow with the square of the sequence and are not kept.
    Nor is fused
    attention with dropout: what is not done again does not move the random state on, and later dropout would differ.
    """
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(operation, "__name__", "")
        keep = operation in products or ("scaled_dot_product" in name and not _dropout(operation, args, kwargs))
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _dropout(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The dropout that an attention operation is called with."""
    for at, argument in enumerate(operation._schema.arguments):  # noqa: SLF001 (the only place that tells names)
        if argument.name == _DEPENDS_ON_DROPOUT:
            return float(args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value or 0.0))
    return 0.0


def recompute(
    model: Any,
    batch: Mapping[str, Any],
    wanted: Sequence[Policy],
    *,
    seed: int = 0,
    repeats: int = 2,
    loss_of: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Document:
    """One forward and backward pass of the model under each policy: equal or not, bytes, seconds.

    batch has tensors on the model's device (input_ids, labels: (rows, tokens)). The model keeps its weights; its
    gradients are gone
    afterwards. `kept_bytes` is what the forward pass leaves for the backward pass, `peak_bytes` the most that was
    alive during
    both, gradients included; neither counts weights. Times are the best of `repeats`.
    """
    loss_of = loss_of or causal_loss
    device = next(model.parameters()).device
    where, layers = layers_of(model)
    with _training(model):
        rows = _rows(model, batch, wanted, layers, device, seed, repeats, loss_of)
    base = rows[0]
    for row in rows:
        row["saving"] = 1 - row["peak_bytes"] / base["peak_bytes"] if base["peak_bytes"] else 0.0
        row["kept_saving"] = 1 - row["kept_bytes"] / base["kept_bytes"] if base["kept_bytes"] else 0.0
        row["extra_time"] = row["seconds"] / base["seconds"] - 1 if base["seconds"] else 0.0
    return {
        "layers": {"name": where, "count": len(layers)},
        "batch": [int(n) for n in batch["input_ids"].shape],
        "dropout": _has_dropout(model),
        "measured": "allocator" if device.type == "cuda" else "live tensors",
        "repeatable": base["repeatable"],
        "equal": all(row["equal"] for row in rows),
        "policies": rows,
    }


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """The model in training mode and without a cache of keys and values, while inside; without gradients afterwards."""
    was_training, cache = model.training, getattr(model.config, "use_cache", None)
    model.train()
    try:
        if cache is not None:
            model.config.use_cache = False  # a layer that is computed again would add to the cache again
        yield
    finally:
        model.train(was_training)
        if cache is not None:
            model.config.use_cache = cache
        model.zero_grad(set_to_none=True)


def _rows(
    model: Any,
    batch: Mapping[str, Any],
    wanted: Sequence[Policy],
    layers: Sequence[Any],
    device: Any,
    seed: int,
    repeats: int,
    loss_of: Callable[[Any, Mapping[str, Any]], Any],
) -> list[Document]:
    rows: list[Document] = []
    base: dict[str, tuple[str, float]] = {}
    for policy in (BASE, *(p for p in wanted if p != BASE)):
        with recomputing(layers, policy) as count:
            step = partial(_step, model, batch, device, seed, loss_of)
            if not rows:
                step()  # the first one of all pays for lazily made things
            with gauge(device) as memory:
                loss, kept, _ = step(memory)
            found = gradients(model)
            base = base or found
            times, again = [], found
            for _ in range(max(1, repeats)):
                times.append(step()[2])
                again = gradients(model)
        rows.append(
            {
                "policy": policy.name,
                "recomputed_layers": count,
                "loss": loss,
                "equal": found == base and loss == (rows[0]["loss"] if rows else loss),
                "repeatable": again == found,
                "first_difference": _first(found, base),
                "kept_bytes": kept,
                "peak_bytes": memory.peak_nbytes,
                "seconds": min(times),
            }
        )
    return rows


def _first(found: Mapping[str, tuple[str, float]], base: Mapping[str, tuple[str, float]]) -> Document | None:
    """The first parameter in the model's order whose gradient is not the base's."""
    for name, (digest, norm) in found.items():
        if base[name][0] != digest:
            return {"name": name, "norm": norm, "norm_without": base[name][1]}
    return None


def _step(
    model: Any,
    batch: Mapping[str, Any],
    device: Any,
    seed: int,
    loss_of: Callable[[Any, Mapping[str, Any]], Any],
    memory: Gauge | None = None,
) -> tuple[float, int, float]:
    """(loss, bytes kept after the forward pass, seconds) of one pass. The gradients stay in the model."""
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    _wait(device)
    start = time.perf_counter()
    loss = loss_of(model, batch)
    kept = memory.read() if memory is not None else 0
    loss.backward()
    _wait(device)
    return float(loss.detach()), kept, time.perf_counter() - start


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def causal_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    """The model's own loss on a batch."""
    return model(**batch).loss


def gradients(model: Any) -> dict[str, tuple[str, float]]:
    """(digest of the bytes, norm) of each parameter's gradient, in the model's order."""
    import torch

    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        flat = parameter.grad.detach().reshape(-1).contiguous()
        data = flat.view(torch.uint8).cpu().numpy()
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64 if flat.dtype != torch.float16 else torch.float32)
        found[name] = (hashlib.blake2b(data, digest_size=16).hexdigest(), float(norm))
    return found


def _has_dropout(model: Any) -> bool:
    """Whether anything in the model draws dropout while it trains."""
    from torch.nn import Dropout

    rates = [m.p if isinstance(m, Dropout) else getattr(m, "attention_dropout", 0) for m in model.modules()]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The most rows, of 1 to limit, that fit; 0 where one does not. Doubles until it fails, then halves the gap."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_max_batch(
    model: Any,
    batch: Mapping[str, Any],
    wanted: Sequence[Policy],
    *,
    seed: int = 0,
    limit: int = 1 << 16,
    loss_of: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> list[Document]:
    """The most rows of the batch's length with which a step fits on the GPU, by policy.

    What is on the GPU already stays there.

    Raises Unsupported on a CPU: its memory has no edge that a step could run into and come back from.
    """
    import torch

    device = next(model.parameters()).device
    require_gpu(device.type)
    _, layers = layers_of(model)

    def fits(rows: int) -> bool:
        wide = {k: _with_rows(v, rows) for k, v in batch.items()}
        try:
            _step(model, wide, device, seed, loss_of or causal_loss)
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            model.zero_grad(set_to_none=True)
            wide.clear()
            torch.cuda.empty_cache()
        return True

    found = []
    with _training(model):
        for policy in wanted:
            with recomputing(layers, policy):
                rows = largest(fits, limit)
            found.append({"policy": policy.name, "max_batch": rows, "at_limit": rows == limit})
    return found


def require_gpu(device: str) -> None:
    """Unsupported where the device, by its name, is no GPU."""
    if not device.startswith("cuda"):
        raise Unsupported(
            "--find-max-batch needs a GPU",
            why=f"the step runs on {device}, where running out of memory ends the process",
            fix="--device cuda, on a machine that has one; --recompute alone measures memory on a CPU too",
        )


def _with_rows(tensor: Any, rows: int) -> Any:
    """The first rows of a batch's tensor, its rows repeated where there are not enough."""
    have = tensor.shape[0]
    return tensor.repeat(-(-rows // have), *([1] * (tensor.ndim - 1)))[:rows]
