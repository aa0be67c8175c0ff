"""Random states as Megatron seeds them: against real torch, and against ranks of real runs that drew nothing since."""

from __future__ import annotations

import hashlib
import struct

import pytest

from ckptctl.core.errors import Damaged
from ckptctl.core.values import Array
from ckptctl.formats.megatron.facts import Facts
from ckptctl.formats.megatron.seeds import seeded, torch_state
from ckptctl.operations.opening import open_checkpoint
from tests.formats.megatron.test_read import CLASSIC, TIED
from tests.support.checkpoints import ckpt, truth_config
from tests.support.commands import document

# sha256 of torch.get_rng_state() after torch.manual_seed(n), torch 2.13.0
SEEDED = {
    1: "f5defda135ec2e0d1513e6979390f58397d31a904d5f6540f8b88ae64d1decc1",
    1234: "de89fdb4ebc4cb9ba868b924a5bdd7042b3741bf9939013d2c1f38675274a084",
    (1 << 31) - 1: "5eab49a8f9a13250d84041f0dd752218da3d717137e06b94eef7bc2e58c0797d",
}


@pytest.mark.parametrize("seed", SEEDED)
def test_torchs_generator_after_manual_seed(seed):
    assert hashlib.sha256(torch_state(seed)).hexdigest() == SEEDED[seed]


def plain(tree):
    """A state in which arrays compare by value."""
    if isinstance(tree, Array):
        return tree.shape, bytes(tree.data)
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items()}
    return tuple(map(plain, tree)) if isinstance(tree, (list, tuple)) else tree


@pytest.mark.parametrize(
    "name",
    [CLASSIC, TIED, "megatron/dist_tp1pp2_vpp2", "megatron/mixtral_legacy_ep2", "megatron/mixtral_dist_ep2"],
)
def test_ranks_of_real_runs_have_these_seeds(name):
    checkpoint = open_checkpoint(ckpt(name))[0]
    facts = Facts(checkpoint.native["args"].state)
    ranks = checkpoint.native["rng_state"]
    assert len(ranks) == facts.tp * facts.pp * facts.ep
    for (pp_rank, tp_rank, third), states in ranks.items():
        (ours,), (theirs,) = plain(seeded(facts, tp_rank, pp_rank, third)), plain(states)
        assert ours["rng_tracker_states"] == theirs["rng_tracker_states"]
        assert ours["cuda_rng_state"] == theirs["cuda_rng_state"]
        assert ours["random_rng_state"] == theirs["random_rng_state"]
        assert ours["np_rng_state"] == theirs["np_rng_state"]


def test_seeds_by_hand():
    states = seeded(Facts({"seed": 7, "data_parallel_size": 3, "data_parallel_random_init": True}), 1, 2, 3)
    found = [
        {k: struct.unpack("<QQ", v.data) for k, v in s["rng_tracker_states"].items()} for s in states
    ]  # stages are 100 apart, replicas 10
    assert [f["data-parallel-rng"] for f in found] == [(207, 0), (217, 0), (227, 0)]
    assert found[0] == {
        "data-parallel-rng": (207, 0),
        "model-parallel-rng": (207 + 2718 + 1, 0),
        "expert-parallel-rng": (207 + 1024 + 300 + 1, 0),
    }


@pytest.mark.parametrize("seed", [0, 1 << 31])
def test_a_seed_that_no_generator_takes_is_damage(seed):
    with pytest.raises(Damaged, match="seed"):
        seeded(Facts({"seed": seed}), 0, 0, 0)


@pytest.mark.parametrize(("form", "ranks"), [("torch", 4), ("torch_dist", 4)])
def test_another_mesh_has_a_state_for_each_of_its_ranks(form, ranks, tmp_path):
    out = tmp_path / "out"
    words = ("--tp", "1", "--pp", "4", "--megatron-format", form, "--model-config", truth_config(TIED))
    done = document("reshard", ckpt(TIED), out, *words)
    line = next(x for x in done["fidelity"] if x["part"] == "random state")
    assert line["fate"] == "written"
    assert "seeded from 1234" in line["detail"]
    states = open_checkpoint(out)[0].native["rng_state"]
    assert sorted(states) == [(pp, 0, 0) for pp in range(ranks)]
    seeds = [struct.unpack("<QQ", s[0]["rng_tracker_states"]["data-parallel-rng"].data) for s in states.values()]
    assert seeds == [(1234 + 100 * pp, 0) for pp in range(ranks)]
