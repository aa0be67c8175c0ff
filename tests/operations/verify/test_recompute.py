"""Recomputation: policies by word, memory counted by hand, gradients compared bit for bit, dropout included."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from ckptctl.core.errors import Unsupported, Usage
from ckptctl.operations.verify.recompute import BASE, Policy, largest, policies, require_gpu
from tests.support.checkpoints import needs_torch


def run_here(script):
    """What a script prints. It is run in this process: one of its own would import torch anew."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(script, {"__name__": "script"})
    return said.getvalue()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("none", [BASE]),
        ("full", [BASE, Policy("full", 1)]),
        (
            "none,full,every=2,selective",
            [BASE, Policy("full", 1), Policy("every=2", 2), Policy("selective", 1, selective=True)],
        ),
        ("selective, none ,selective", [BASE, Policy("selective", 1, selective=True)]),
    ],
)
def test_policies_by_word_with_none_first(words, found):
    assert list(policies(words)) == found


@pytest.mark.parametrize(
    "words", ["", "half", "every", "every=", "every=0", "every=-1", "every=two", "every=²", "full=2"]
)
def test_what_is_no_policy_is_a_mistake_of_usage(words):
    with pytest.raises(Usage, match="no policy"):
        policies(words)


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 7, 8, 63, 64, 65, 1000])
def test_the_largest_batch_is_found_by_halving(limit, room):
    tried = []

    def fits(rows):
        tried.append(rows)
        return rows <= room

    assert largest(fits, limit) == min(room, limit)
    assert max(tried) <= limit
    assert len(tried) <= 2 * limit.bit_length() + 2


def test_the_largest_batch_is_refused_on_a_cpu():
    with pytest.raises(Unsupported, match="needs a GPU"):
        require_gpu("cpu")
    require_gpu("cuda:1")


COUNTED = """
import json, torch
from ckptctl.operations.verify.gauge import gauge
cpu = torch.device("cpu")
out = {}
with gauge(cpu) as found:
    a = torch.zeros(1000)                       # 4000 bytes
    b = a.view(10, 100)                         # a view: none
    out["one"] = found.read()
    c = a + 1                                   # 4000 more
    a.add_(1)                                   # in place: none
    out["two"] = found.read()
    del a, b
    out["freed"] = found.read()
    d = torch.empty(0)
    e = c[:500].clone()                         # 2000 more
    del c
    out["last"] = found.read()
out["peak"] = found.peak_nbytes
held = torch.ones(100)
with gauge(cpu) as found:
    held.mul_(2)
    out["before"] = found.read()
print(json.dumps(out))
"""


@needs_torch
def test_live_bytes_are_those_of_storages_counted_by_hand():
    found = json.loads(run_here(COUNTED))
    assert found == {"one": 4000, "two": 8000, "freed": 4000, "last": 2000, "peak": 8000, "before": 0}


BLOCKS = """
import json, types, torch
from torch import nn
from ckptctl.operations.verify.recompute import policies, recompute
import ckptctl.operations.verify.recompute as module
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self, drop, leaky=False):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(drop)
        self.leaky, self.calls = leaky, 0
    def forward(self, x):
        self.calls += 1
        factor = 1.0 + 0.1 * (self.calls % 2) if self.leaky else 1.0
        return x + factor * self.drop(self.down(torch.relu(self.up(x))))

class Net(nn.Module):
    def __init__(self, drop=0.0, leaky=False):
        super().__init__()
        torch.manual_seed(3)
        self.config = types.SimpleNamespace(use_cache=True)
        self.embed, self.blocks = nn.Embedding(32, 16), nn.ModuleList(Block(drop, leaky) for _ in range(4))
        self.head = nn.Linear(16, 32)
    def forward(self, input_ids, labels):
        assert self.config.use_cache is False and self.training
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

ids = torch.arange(24).reshape(3, 8)
batch = {"input_ids": ids, "labels": ids}
words = policies("full,every=3,selective")
out = {}
for name, net in (("plain", Net()), ("dropout", Net(0.5)), ("leaky", Net(leaky=True))):
    net.eval()
    weights = [p.detach().clone() for p in net.parameters()]
    out[name] = recompute(net, batch, words, seed=5)
    out[name]["as it was"] = [
        not net.training, net.config.use_cache, all(p.grad is None for p in net.parameters()),
        all(torch.equal(p, w) for p, w in zip(net.parameters(), weights)),
        all("forward" not in vars(b) for b in net.blocks),
    ]
plain = Net()
loss = plain.train()
plain.config.use_cache = False
loss = plain(**batch).loss
loss.backward()
out["loss"] = float(loss.detach())
try:
    recompute(nn.Linear(2, 2), batch, words)
except Exception as error:
    out["flat"] = [type(error).__name__, str(error)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def blocks():
    return json.loads(run_here(BLOCKS))


@needs_torch
def test_gradients_are_equal_under_every_policy_and_layers_are_counted(blocks):
    found = blocks["plain"]
    assert (found["equal"], found["repeatable"], found["dropout"]) == (True, True, False)
    assert found["layers"] == {"name": "blocks", "count": 4}
    assert [p["policy"] for p in found["policies"]] == ["none", "full", "every=3", "selective"]
    assert [p["recomputed_layers"] for p in found["policies"]] == [0, 4, 2, 4]
    assert all(p["equal"] and p["first_difference"] is None for p in found["policies"])
    assert {p["loss"] for p in found["policies"]} == {blocks["loss"]}


@needs_torch
def test_dropout_is_drawn_again_alike(blocks):
    found = blocks["dropout"]
    assert (found["equal"], found["dropout"]) == (True, True)


@needs_torch
def test_a_layer_that_is_not_the_same_the_second_time_is_found(blocks):
    found = blocks["leaky"]
    assert found["equal"] is False
    full = found["policies"][1]
    assert full["equal"] is False
    assert full["first_difference"]["name"] == "embed.weight"
    assert full["first_difference"]["norm"] != full["first_difference"]["norm_without"]


@needs_torch
def test_memory_is_that_of_what_a_layer_keeps(blocks):
    none, full, third, selective = blocks["plain"]["policies"]
    # 24 tokens of 16 numbers: a block's input, 1536 bytes, is kept for its first product, and so is the head's; 64
    # numbers a token, 6144 bytes, come out of relu; logarithms of 32 probabilities are 3072; two numbers are the loss.
    ends = 5 * 1536 + 3072 + 2 * 4
    assert none["kept_bytes"] == ends + 4 * 6144
    assert full["kept_bytes"] == ends
    assert third["kept_bytes"] == ends + 2 * 6144
    # What the products give: 64 numbers a token of the first, 16 of the second, which nothing else would keep.
    assert selective["kept_bytes"] == ends + 4 * (6144 + 1536)
    for p in (full, third, selective):
        assert p["kept_saving"] == pytest.approx(1 - p["kept_bytes"] / none["kept_bytes"])
        assert p["saving"] == pytest.approx(1 - p["peak_bytes"] / none["peak_bytes"])
        assert p["peak_bytes"] >= p["kept_bytes"]


@needs_torch
def test_the_model_is_left_as_it_was(blocks):
    assert all(all(blocks[name]["as it was"]) for name in ("plain", "dropout", "leaky"))


@needs_torch
def test_a_model_without_layers_is_refused(blocks):
    assert blocks["flat"][0] == "Unsupported"


FAMILIES = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from ckptctl.operations.verify.recompute import policies, recompute
torch.set_num_threads(1)
out = {}
for family, attention in (("gpt2", "sdpa"), ("mixtral", "eager")):
    sizes = dict(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=24, max_position_embeddings=32, num_local_experts=3, num_experts_per_tok=2,
                 n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **sizes)
    net = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    ids = torch.arange(32).reshape(2, 16)
    out[family] = recompute(net, {"input_ids": ids, "labels": ids}, policies("full,every=2,selective"), repeats=1)
print(json.dumps(out))
"""


@needs_torch
@pytest.mark.real
def test_real_models_have_equal_gradients_with_the_dropout_of_their_config():
    found = json.loads(run_here(FAMILIES).splitlines()[-1])
    assert [found[f]["equal"] for f in ("gpt2", "mixtral")] == [True, True]
    assert found["gpt2"]["dropout"]
    assert found["gpt2"]["layers"] == {"name": "transformer.h", "count": 2}
    assert found["mixtral"]["layers"] == {"name": "model.layers", "count": 2}
    assert all(p["kept_saving"] > 0.2 for f in found.values() for p in f["policies"][1:])
