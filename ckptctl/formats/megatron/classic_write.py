"""The classic layout of a result: a folder a tensor-, pipeline-, expert-rank. Nothing is written here.

Source: Megatron-LM core_v0.16.1, megatron/training/checkpointing.py, generate_state_dict, save_checkpoint;
core/optimizer/distrib_optimizer.py, get_parameter_state_dp_zero.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import TYPE_CHECKING

from ckptctl.core.dtype import BY_NAME
from ckptctl.core.output import Fill, OutputFile, Segment
from ckptctl.core.values import Array, Global, OrderedPairs, TensorRef, Tree
from ckptctl.formats.megatron import model, runargs, stages
from ckptctl.formats.megatron.buffers import STATE_KEYS, laid_out, slot_name
from ckptctl.formats.megatron.found import SCALER
from ckptctl.formats.megatron.groups import Param
from ckptctl.formats.megatron.ranks import OPTIMIZER_FILE, Rank, folder_name
from ckptctl.formats.megatron.write import F32, MOMENTS, Target, common
from ckptctl.formats.torch.write import TorchTree

if TYPE_CHECKING:
    from ckptctl.core.output import Region
    from ckptctl.formats.megatron.buffers import Buffer
    from ckptctl.formats.megatron.state import Sort
    from ckptctl.formats.target import Line

_LINEAR = re.compile(r"(.*(?:linear_\w+|output_layer))\.(?:weight|bias)$")


def files(target: Target) -> tuple[list[OutputFile], list[Line]]:
    """The files of every rank."""
    layout = _Layout(target)
    facts, out = target.facts, []
    for pp, ep, tp in product(range(facts.pp), range(facts.ep), range(facts.tp)):
        rank = Rank(tp, pp, ep)
        folder = f"{target.folder}/{folder_name(rank, facts.pp, facts.ep)}"
        layout.touch(rank)
        out.append(OutputFile(f"{folder}/model_optim_rng.pt", _Maker(layout.model_file, rank)))
        if target.groups is not None and target.distributed:
            out.append(OutputFile(f"{folder}/{OPTIMIZER_FILE}", _Maker(layout.optimizer_file, rank)))
    return out, []


class _Maker:
    """A file's segments when they are asked for."""

    def __init__(self, make: object, rank: Rank) -> None:
        self._make, self._rank = make, rank

    def __call__(self) -> list[Segment]:
        return self._make(self._rank)  # type: ignore[operator, no-any-return]


class _Layout:
    """What each rank holds."""

    def __init__(self, target: Target) -> None:
        self.target, self.facts = target, target.facts
        shapes = dict(target.shapes)
        if target.tied:
            shapes[model.HEAD] = shapes[model.EMBEDDING]
        self.local = stages.local_shapes(shapes, self.facts.tp, "the result", fused=target.fused)
        self.chunks = stages.chunks_of(target.weights, self.facts, tied=target.tied)
        self.order = model.order_of(fused=target.fused, grouped=target.grouped)

    def names(self, rank: Rank, chunk: int) -> list[str]:
        """A chunk's weights in order, under whole names; of experts those of the rank."""
        per = self.facts.experts // self.facts.ep if self.facts.experts else 0
        found = [
            n
            for n in self.chunks[rank.pp, chunk]
            if not model.is_expert(n) or rank.ep * per <= model.expert_of(n) < (rank.ep + 1) * per
        ]
        return sorted(found, key=self.order)

    def local_name(self, name: str, rank: Rank, chunk: int) -> str:
        """A name as the rank's file has it: layers and experts counted from its first."""
        per = self.facts.experts // self.facts.ep if self.facts.experts else 0
        name = self.target.fused_key(name) if self.target.fused else name
        return model.counted_from(name, self.facts.first_layer(rank.pp, chunk), rank.ep * per)

    def params(self, rank: Rank) -> list[tuple[int, str]]:
        """(chunk, whole name) of a rank's parameters, in order."""
        return [(c, n) for c in range(self.facts.vpp) for n in self.names(rank, c) if not model.is_buffer(n)]

    def touch(self, rank: Rank) -> None:
        """Asks for every tensor once, so that what is written besides the content's is known beforehand."""
        for chunk in range(self.facts.vpp):
            for name in self.names(rank, chunk):
                for kind in (
                    "weight",
                    *(("master", *MOMENTS) if self.target.groups and not model.is_buffer(name) else ()),
                ):
                    self.target.part(name, kind, rank.tp, self.local)

    # ---- files ------------------------------------------------------------------------------------------------------

    def model_file(self, rank: Rank) -> list[Segment]:
        """model_optim_rng.pt of a rank."""
        target, facts, made = self.target, self.facts, TorchTree()
        number = rank.pp * facts.tp * (facts.dp or 1) + rank.ep * facts.tp + rank.tp
        root: dict[str, Tree] = {"args": runargs.namespace(facts, target.content.source, rank=number, local_rank=0)}
        root |= {k: made.value(v) for k, v in common(target).items() if not k.startswith("num_")}
        for chunk in range(facts.vpp):
            root["model" if facts.vpp == 1 else f"model{chunk}"] = self.chunk(rank, chunk, made)
        if target.groups is not None:
            schedule = root.pop("opt_param_scheduler")
            root["optimizer"] = self.optimizer(rank, made)
            root["opt_param_scheduler"] = schedule
        states = target.random_state(rank.pp, rank.tp, rank.ep, rank.ep)
        if states is not None:
            root["rng_state"] = made.value(states)
        root["num_floating_point_operations_so_far"] = common(target)["num_floating_point_operations_so_far"]
        return made.segments(root, root="model_optim_rng")

    def chunk(self, rank: Rank, chunk: int, made: TorchTree) -> OrderedPairs:
        """One chunk's weights, with an empty _extra_state after each linear layer, as local layers have."""
        out = OrderedPairs()
        module = ""
        for name in self.names(rank, chunk):
            plain = self.local_name(name, rank, chunk)
            found = _LINEAR.match(plain)
            if module and (found is None or found[1] != module):
                out[f"{module}._extra_state"] = None
            module = found[1] if found and not self.target.fused else ""
            out[plain] = self.tensor(name, "weight", rank, made)
        if module:
            out[f"{module}._extra_state"] = None
        last = rank.pp == self.facts.pp - 1 and chunk == self.facts.vpp - 1
        if last and not self.target.fused:
            out.setdefault("output_layer._extra_state", None)
        return out

    def tensor(self, name: str, kind: str, rank: Rank, made: TorchTree) -> TensorRef:
        """A rank's part of a parameter or a state of it."""
        fill = self.target.part(name, kind, rank.tp, self.local)
        return made.packed(self.target.dtype(name, kind), self.local[name], fill)

    def optimizer(self, rank: Rank, made: TorchTree) -> Tree:
        """The value of `optimizer`: one, or a list of two where experts are apart."""
        assert self.target.groups is not None
        apart = self.facts.ep > 1
        parts = [self.part(families, rank, made) for families in self.target.groups.chained()]
        return parts if apart else parts[0]

    def part(self, families: list[Sort], rank: Rank, made: TorchTree) -> Tree:
        """One optimizer: its groups number parameters one after another."""
        groups = self.target.groups
        assert groups is not None
        params = self.params(rank)
        state: dict[int, Tree] = {}
        listed: list[dict[str, Tree]] = []
        masters: list[list[Tree]] = []
        for fam in families:
            mine = [n for _, n in params if groups.sorting.sort_of(n, self.local[n]) == fam]
            settings = dict(groups.of[fam])
            if groups.step is not None:
                settings["step"] = int(groups.step)
            if not self.target.distributed:
                ids = list(range(len(state), len(state) + len(mine)))
                for i, name in zip(ids, mine, strict=True):
                    state[i] = self.state(name, rank, made, groups.step)
                settings["params"] = ids
                halves = [n for n in mine if self.target.dtype(n, "weight").name != "float32"]
                masters.append([self.tensor(n, "master", rank, made) for n in halves])
            listed.append(settings)
        scaler = {} if self.target.scaler is None else {SCALER: made.value(self.target.scaler)}
        if self.target.distributed:
            return {"optimizer": {"param_groups": listed}, **scaler}
        inner = {"state": state, "param_groups": listed}
        return {"optimizer": inner, **scaler, "fp32_from_fp16_params": masters} if any(masters) else inner

    def state(self, name: str, rank: Rank, made: TorchTree, step: Tree) -> dict[str, Tree]:
        """Step and moments of one parameter, as torch's AdamW has them."""
        out: dict[str, Tree] = {}
        if step is not None:
            out["step"] = made.array(step_array(step))
        return out | {kind: self.tensor(name, kind, rank, made) for kind in MOMENTS}

    # ---- the distributed optimizer ----------------------------------------------------------------------------------

    def optimizer_file(self, rank: Rank) -> list[Segment]:
        """distrib_optim.pt of a rank. Under expert parallelism dense state is in the first expert rank's file only."""
        made = TorchTree()
        if self.facts.ep == 1:
            return made.segments(self.buffers(rank, None, made), root="distrib_optim")
        dense = self.buffers(rank, False, made) if rank.ep == 0 else None
        return made.segments([dense, self.buffers(rank, True, made)], root="distrib_optim")

    def buffers(self, rank: Rank, experts: bool | None, made: TorchTree) -> dict[Tree, Tree]:
        """A buffer for each chunk and type."""
        out: dict[Tree, Tree] = {"buckets_coalesced": True}
        for chunk in range(self.facts.vpp):
            params = [
                Param(n, self.local[n], chunk, self.target.dtype(n, "weight").name)
                for n in self.names(rank, chunk)
                if not model.is_buffer(n) and (experts is None or model.is_expert(n) == experts)
            ]
            by_type: dict[Tree, Tree] = {}
            for dtype in dict.fromkeys(p.dtype for p in params):
                of = [p for p in params if p.dtype == dtype]
                placed = laid_out(of, rank.pp, self.facts)
                states: dict[str, Tree] = {}
                for key, kind in STATE_KEYS.items():
                    fill = self.buffer(of, placed, kind, rank)
                    states[key] = made.packed(F32, (placed.numel,), fill)
                by_type[Global("torch", dtype), Global("torch", "float32")] = {**states, "numel_unpadded": placed.numel}
            out[chunk] = by_type
        return out

    def buffer(self, params: list[Param], placed: Buffer, kind: str, rank: Rank) -> list[Region | Fill]:
        """One state of a buffer's parameters, each in its place; gaps are zeros."""
        out: list[Region | Fill] = []
        at = 0
        starts = {p.name: placed.joined(slot_name(p)) for p in params}
        for p in sorted(params, key=lambda p: starts[p.name]):
            start = starts[p.name]
            if start > at:
                out.append(_gap(start - at))
            out += self.target.part(p.name, kind, rank.tp, self.local)
            at = start + math.prod(p.shape)
        if placed.numel > at:
            out.append(_gap(placed.numel - at))
        return out


def _gap(numel: int) -> Fill:
    return Fill(numel * F32.itemsize, b"\0" * F32.itemsize, "alignment of the optimizer's buffers")


def step_array(step: Tree) -> Array:
    """A count of updates as torch's AdamW keeps it: a 0-d float32 tensor."""
    import numpy as np

    return Array("float32", (), np.array(float(step), BY_NAME["float32"].numpy).tobytes())
