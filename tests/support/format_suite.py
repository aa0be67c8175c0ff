"""The conformance suite of formats. A format's tests subclass it and give samples, faults and the gaps they expect.

class TestMine(FormatSuite):
    format = "mine"

    @pytest.fixture(params=[...])       # Sample: layouts in fixtures/ with truth
    def sample(self, request): return request.param

    @pytest.fixture(params=[...], ids=str)   # Fault: how to damage one, and the error it must give
    def fault(self, request): return request.param

    def gaps(self, path): ...           # {file: [(start, stop), ...]} that hold no tensor, told without the product
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import ckptctl
from ckptctl import formats
from ckptctl.core.dtype import BY_NAME
from tests.support.checkpoints import Truth, ckpt, digests, fixture, truth, truth_config
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.plain import dcp_folder, torch_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ckptctl.api import CheckpointView, TensorHandle

SECTIONS = {"model": "weight", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STEPS = 3
"""Every run in fixtures/checkpoints/torch trained for three steps."""


class Sample(NamedTuple):
    """A layout in fixtures/. world_size and variant are what it must be told as."""

    name: str
    world_size: int | None = None
    variant: str = ""

    @property
    def path(self) -> Path:
        return ckpt(self.name)

    @property
    def words(self) -> list[str]:
        """Options that reading it takes."""
        config = truth_config(self.name)
        return ["--model-config", str(config)] if config else []

    @property
    def trained(self) -> bool:
        """Whether it holds an optimizer's state."""
        return "exp_avg" in truth(self.name)


def config_of(sample: Sample) -> Path:
    """The model's config.json."""
    return (truth_config(sample.name) or sample.path) / "config.json"


class Fault(NamedTuple):
    """How a checkpoint of one layout is damaged, and what must be said of it. damage gets a copy that it may change."""

    id: str
    layout: str
    damage: Callable[[Path], None]
    code: str
    words: str = ""

    def __str__(self) -> str:
        return self.id


def all_digests(view: CheckpointView) -> dict[tuple[str, str], Truth]:
    """(name, kind) -> type, shape and digest of every tensor, read through the API."""
    return {(t.name, t.kind): digest_of(t) for t in view.tensors()}


def digest_of(tensor: TensorHandle) -> Truth:
    """One tensor's."""
    data = np.ascontiguousarray(tensor.numpy()).tobytes()
    return Truth(BY_NAME[tensor.dtype].safetensors or tensor.dtype, tensor.shape, hashlib.sha256(data).hexdigest())


def widened(tensor: TensorHandle) -> Truth:
    """Of its float32 values: what truth holds of runs in bfloat16."""
    array = tensor.numpy().astype(np.float32)
    return Truth("F32", tensor.shape, hashlib.sha256(array.tobytes()).hexdigest())


def pieces_by_file(view: CheckpointView) -> dict[str, list[tuple[int, int]]]:
    """The byte ranges that each file's tensors take, merged, rising; compressed members as they lie in their file."""
    sources, out = view.checkpoint.sources, {}
    for key, tensor in view.checkpoint.tensors.items():
        for table in tensor.pieces:
            for piece in table:
                source = sources[piece.source]
                if source.codec:
                    out.setdefault(source.path, set()).add((source.start, source.stop))
                    continue
                order = sorted(zip(piece.strides, piece.size, strict=True), reverse=True)
                step = BY_NAME[tensor.dtype.name].bits // 8 or 1
                for stride, n in reversed(order):
                    assert stride == step or n == 1, f"{key} is no dense run"
                    step *= n
                if piece.numel:
                    out.setdefault(source.path, set()).add(
                        (source.start + piece.start, source.start + piece.start + step)
                    )
    return {path: merged(sorted(runs)) for path, runs in out.items()}


def merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that touch, joined."""
    out: list[tuple[int, int]] = []
    for start, stop in runs:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def tree_bytes(path: Path) -> dict[str, bytes]:
    """Every file of a result, by its name in it."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def weights_in(path: Path, to: str) -> dict[str, Truth]:
    """The weights of a result, read without the product."""
    if to == "hf":
        return digests(path)
    if to == "torch":
        return {n: t.truth for n, t in torch_tree(path)["model"].items()}
    items = dcp_folder(path).items
    return {n.removeprefix("model."): t.truth for n, t in items.items() if n.startswith("model.")}


def fates_of(report: dict[str, Any]) -> list[str]:
    """What became of every part, as a conversion's report says, but for config.json and what is made anew."""
    return [line["fate"] for line in report["fidelity"] if line["part"] != "config.json"]


CARRIED = ("README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files that only a Hugging Face folder holds: a torch file or a DCP folder has no place for them."""


class FormatSuite:
    """What every format owes. Subclass it as the module's first lines show."""

    format = ""
    targets = ("hf", "torch", "dcp")

    def gaps(self, path: Path) -> dict[str, list[tuple[int, int]]] | None:
        """The ranges of each file that hold no tensor of model or optimizer; None where only the product can tell."""
        raise NotImplementedError

    def test_it_is_recognised(self, sample):
        found = formats.detect(sample.path)
        assert (found.format, found.path) == (self.format, sample.path)
        with ckptctl.open(sample.path) as view:
            assert view.format == self.format
            assert view.checkpoint.variant == sample.variant
            assert view.checkpoint.layout.get("world_size") == sample.world_size

    def test_every_tensor_equals_the_run_s_truth(self, sample):
        with ckptctl.open(sample.path) as view:
            there = {(t.name, t.kind) for t in view.tensors()}
            for section, tensors in truth(sample.name).items():
                kind = SECTIONS[section]
                assert {n for n, k in there if k == kind} == set(tensors)
                for name, want in tensors.items():
                    got = view.state(name, kind)
                    assert (digest_of(got) if got.dtype != "bfloat16" or want.dtype == "BF16" else widened(got)) == want
            if sample.trained:
                steps = [float(t.numpy()) for t in view.tensors() if t.kind == "step"]
                assert steps == [STEPS] * len(truth(sample.name)["model"])
                assert view.step == STEPS

    def test_every_byte_is_explained(self, sample):
        with ckptctl.open(sample.path) as view:
            held = pieces_by_file(view)
            files = {f.path: f.nbytes for f in view.checkpoint.files}
        root = sample.path if sample.path.is_dir() else sample.path.parent
        beside = {"truth.json", "info.json"}
        there = {p.name for p in root.iterdir() if p.name not in beside} if sample.path.is_dir() else {sample.path.name}
        assert set(files) == there
        assert all((root / f).stat().st_size == n for f, n in files.items())
        gaps = self.gaps(sample.path)
        for path, runs in held.items():
            name = path or sample.path.name
            if gaps is not None:
                assert runs == merged(runs)
                both = sorted([*runs, *gaps[name]])
                assert all(a[1] <= b[0] for a, b in itertools.pairwise(both)), f"{name}: a tensor lies in a gap"
                assert merged(both) == [(0, files[name])], f"{name}: bytes that nothing explains"

    @pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
    def test_every_target_gets_the_weights_of_the_truth(self, sample, to, tmp_path):
        words = ["--no-optimizer"] if to == "hf" else []
        good("convert", sample.path, tmp_path / "out", "--to", to, *words, *sample.words)
        got = weights_in(tmp_path / "out", to)
        want = truth(sample.name)["model"]
        with ckptctl.open(sample.path) as view:
            stored = {n: digest_of(t) for n, t in view.items()}
        config = json.loads(config_of(sample).read_text())
        if config["tie_word_embeddings"]:
            # A head that is the embedding: once in a folder whose config says so, under both names elsewhere.
            embedding = next(n for n in want if n.endswith(("embed_tokens.weight", "wte.weight")))
            stored.pop("lm_head.weight", None)
            assert got.pop("lm_head.weight", None) == (None if to == "hf" else stored[embedding])
        assert got == stored

    def test_what_is_written_is_read_again_with_equal_digests(self, sample, tmp_path):
        good("convert", sample.path, tmp_path / "out", "--to", self.format, *sample.words)
        with ckptctl.open(sample.path) as old, ckptctl.open(tmp_path / "out") as new:
            before, after = all_digests(old), all_digests(new)
        tied = set(before) - set(after)
        assert tied <= {("lm_head.weight", "weight")}
        assert not tied or self.format == "hf"
        assert after == {k: v for k, v in before.items() if k not in tied}

    def test_there_and_back_gives_equal_bytes(self, sample, tmp_path):
        here, config = tmp_path / "start", list(sample.words)
        good("convert", sample.path, here, "--to", self.format, *sample.words)
        if (here / "config.json").exists():
            config = ["--model-config", str(here)]
        for other in self.targets:
            if other == self.format or (other == "hf" and sample.trained):
                continue
            there, back = tmp_path / f"to-{other}", tmp_path / f"from-{other}"
            fates = fates_of(document("convert", here, there, "--to", other, *config))
            fates += fates_of(document("convert", there, back, "--to", self.format, *config))
            before, after = tree_bytes(here), tree_bytes(back)
            # What has no like in the other format, and was said: from then on nothing changes.
            if {"converted", "filled"} & set(fates):
                good("convert", back, tmp_path / f"again-{other}", "--to", other, *config)
                good("convert", tmp_path / f"again-{other}", tmp_path / f"back-{other}", "--to", self.format, *config)
                before = tree_bytes(tmp_path / f"back-{other}")
            for name, data in after.items():
                assert data == before[name], f"{self.format} -> {other} -> {self.format}: {name} differs"
            assert {n for n in before if n not in after} <= set(CARRIED)

    def test_each_damage_gives_its_own_error(self, fault, tmp_path):
        source = ckpt(fault.layout) if "/" in fault.layout else fixture(fault.layout)
        path = tmp_path / source.name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        fault.damage(path)
        error = refused("convert", path, tmp_path / "out", "--to", "torch")
        assert error["code"] == fault.code, error
        assert fault.words in f"{error['what']} {error['where']} {error['why']}", error
        assert error["where"] or str(path) in error["what"], error
        assert not (tmp_path / "out").exists()
        assert command("inspect", path, "--json").code in (0, 3)
