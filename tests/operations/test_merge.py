"""--merge-adapter: every element against a sum in float64 made here, and against PEFT's own merge."""

import json
import math
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ckptctl
from tests.formats.hf.test_adapter import P, adapter_save
from tests.support.checkpoints import fixture, run_torch, shared
from tests.support.commands import document, good, refused
from tests.support.format_suite import tree_bytes
from tests.support.saving import adamw, arange, hf_save, torch_save

RNG = np.random.default_rng(5)
HALF, FULL = ml_dtypes.bfloat16, np.float32


def randoms(*shape, dtype=FULL):
    return RNG.standard_normal(shape).astype(dtype)


def lora(module, rank, rows, columns, dtype=FULL):
    return {
        f"{P}{module}.lora_A.weight": randoms(rank, columns, dtype=dtype),
        f"{P}{module}.lora_B.weight": randoms(rows, rank, dtype=dtype),
    }


def expected(base, adapters, dtype=None):
    """Base + scale * B @ A: the rank summed in order, in float64, rounded once. adapters: (A, B, scale), A (r, in)."""
    total = base.astype(np.float64)
    for a, b, scale in adapters:
        a, b = a.astype(np.float64), b.astype(np.float64)
        product = np.zeros(total.shape)
        for k in range(len(a)):
            product = np.outer(b[:, k], a[k]) if k == 0 else product + np.outer(b[:, k], a[k])
        total = total + product * scale
    return total.astype(dtype or base.dtype)


def written(folder):
    return {n: a for f in sorted(folder.glob("*.safetensors")) for n, a in safetensors.numpy.load_file(f).items()}


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [FULL, HALF, np.float16, np.float64])
@pytest.mark.parametrize("factor", [FULL, HALF])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (33, 65), (128, 3)])
def test_each_element_is_the_sum_rounded_once(stored, factor, shape, tmp_path):
    base = {"x.q.weight": randoms(*shape, dtype=stored), "x.k.weight": randoms(*shape, dtype=stored)}
    tensors = lora("x.q", 3, *shape, dtype=factor)
    hf_save(tmp_path / "base", base)
    adapter_save(tmp_path / "a", tensors, r=3, lora_alpha=5)
    report = document("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a")
    got = written(tmp_path / "out")
    a, b = tensors.values()
    # double rounding cannot occur here: float64 -> bfloat16 as ml_dtypes does it goes through float32
    want = expected(base["x.q.weight"], [(a, b, 5 / 3)])
    if stored == HALF:
        want = nearest_bfloat16(expected(base["x.q.weight"], [(a, b, 5 / 3)], np.float64))
    assert got["x.q.weight"].tobytes() == want.tobytes()
    assert got["x.k.weight"].tobytes() == base["x.k.weight"].tobytes()
    assert report["plan"]["merged_elements"] == math.prod(shape)
    assert [line["fate"] for line in report["fidelity"] if line["part"] in ("adapter", "weights")] == ["converted"] * 2


def nearest_bfloat16(wide):
    """The nearest bfloat16 of each float64, ties to even: by the distance to both neighbours."""
    low = wide.astype(np.float32).astype(HALF)
    bits = low.view(np.uint16).astype(np.int32)
    best, error = low.copy(), np.abs(low.astype(np.float64) - wide)
    for step in (-1, 1):
        other = (bits + step).astype(np.uint16).view(HALF)
        far = np.abs(other.astype(np.float64) - wide)
        better = (far < error) | ((far == error) & (bits % 2 == 1))
        best, error = np.where(better, other, best), np.where(better, far, error)
    return best.astype(HALF)


@pytest.mark.parametrize(
    "flags", [["--jobs", "1"], ["--jobs", "5"], ["--memory", "16MiB"], ["--max-shard-size", "3MB"]], ids=str
)
def test_the_result_does_not_depend_on_how_the_work_is_cut(flags, tmp_path):
    shape, rank = (1100, 900), 150
    base = {"x.q.weight": randoms(*shape), "x.v.weight": randoms(5, 300_000)}
    tensors = {**lora("x.q", rank, *shape), **lora("x.v", rank, 5, 300_000)}
    hf_save(tmp_path / "base", base)
    adapter_save(tmp_path / "a", tensors, r=rank, lora_alpha=7)
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a", *flags)
    got = written(tmp_path / "out")
    for name in ("x.q", "x.v"):
        a, b = tensors[f"{P}{name}.lora_A.weight"], tensors[f"{P}{name}.lora_B.weight"]
        assert got[f"{name}.weight"].tobytes() == expected(base[f"{name}.weight"], [(a, b, 7 / rank)]).tobytes()


@pytest.mark.parametrize("to", [["torch"], ["dcp", "--dp", "3"]])
def test_every_target_gets_the_same_weights(to, tmp_path):
    source = fixture("hf/llama-lora")
    words = ["--merge-adapter", source / "adapter"]
    good("convert", source / "base", tmp_path / "hf", "--to", "hf", *words)
    good("convert", source / "base", tmp_path / "out", "--to", *to, *words)
    assert document("diff", tmp_path / "hf", tmp_path / "out")["equal"]


def test_several_adapters_are_added_in_order_and_rounded_once(tmp_path):
    base = {"x.q.weight": randoms(9, 11, dtype=HALF)}
    one, two = lora("x.q", 2, 9, 11), lora("x.q", 4, 9, 11)
    hf_save(tmp_path / "base", base)
    adapter_save(tmp_path / "a", one, r=2, lora_alpha=6)
    adapter_save(tmp_path / "b", two, r=4, lora_alpha=6, use_rslora=True)
    words = ["--merge-adapter", tmp_path / "a", "--merge-adapter", tmp_path / "b"]
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", *words)
    terms = [(*one.values(), 3.0), (*two.values(), 6 / math.sqrt(4))]
    want = nearest_bfloat16(expected(base["x.q.weight"], terms, np.float64))
    assert written(tmp_path / "out")["x.q.weight"].tobytes() == want.tobytes()


def test_a_type_asked_for_is_rounded_to_at_once(tmp_path):
    base, tensors = {"x.q.weight": randoms(8, 6)}, lora("x.q", 2, 8, 6)
    hf_save(tmp_path / "base", base, {"dtype": "float32"})
    adapter_save(tmp_path / "a", tensors)
    words = ["--to", "hf", "--dtype", "bfloat16", "--merge-adapter", tmp_path / "a"]
    good("convert", tmp_path / "base", tmp_path / "out", *words)
    want = nearest_bfloat16(expected(base["x.q.weight"], [(*tensors.values(), 2.0)], np.float64))
    assert written(tmp_path / "out")["x.q.weight"].tobytes() == want.tobytes()


def test_patterns_give_modules_their_own_rank_and_alpha(tmp_path):
    base = {n: randoms(6, 6) for n in ("l.0.q.weight", "l.1.q.weight", "l.1.v.weight")}
    tensors = {**lora("l.0.q", 2, 6, 6), **lora("l.1.q", 3, 6, 6), **lora("l.1.v", 2, 6, 6)}
    hf_save(tmp_path / "base", base)
    settings = {"rank_pattern": {"l.1.q": 3}, "alpha_pattern": {r".*\.0\.q": 10, "v": 12}}
    adapter_save(tmp_path / "a", tensors, r=2, lora_alpha=4, **settings)
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a")
    for name, scale in (("l.0.q", 5.0), ("l.1.q", 4 / 3), ("l.1.v", 6.0)):
        a, b = tensors[f"{P}{name}.lora_A.weight"], tensors[f"{P}{name}.lora_B.weight"]
        want = expected(base[f"{name}.weight"], [(a, b, scale)])
        assert written(tmp_path / "out")[f"{name}.weight"].tobytes() == want.tobytes()


def test_conv1d_and_embeddings_add_the_transpose(tmp_path):
    base = {
        "h.0.attn.c_attn.weight": randoms(4, 12),
        "h.0.attn.c_proj.weight": randoms(4, 4),
        "wte.weight": randoms(9, 4),
    }
    tensors = {**lora("h.0.attn.c_attn", 2, 12, 4), **lora("h.0.attn.c_proj", 2, 4, 4)}
    tensors |= {f"{P}wte.lora_embedding_A": randoms(2, 9), f"{P}wte.lora_embedding_B": randoms(4, 2)}
    hf_save(tmp_path / "base", base, {"model_type": "gpt2", "tie_word_embeddings": False, "vocab_size": 9, "n_embd": 4})
    adapter_save(tmp_path / "a", tensors, fan_in_fan_out=True)
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a")
    got = written(tmp_path / "out")
    for name, (a, b) in zip(base, zip(*[iter(tensors.values())] * 2, strict=True), strict=True):
        assert got[name].tobytes() == expected(base[name], [(b.T, a.T, 2.0)]).tobytes(), name


def test_a_base_cut_over_ranks_is_merged_too(tmp_path):
    source = fixture("hf/llama-lora")
    good("convert", source / "base", tmp_path / "d", "--to", "dcp", "--dp", "3")
    words = ["--to", "hf", "--merge-adapter", source / "adapter"]
    good("convert", source / "base", tmp_path / "one", *words)
    good("convert", tmp_path / "d", tmp_path / "two", *words, "--model-config", source / "base")
    assert document("diff", tmp_path / "one", tmp_path / "two")["equal"]


def test_masters_are_merged_where_they_are_asked_for(tmp_path):
    half, full = randoms(6, 4, dtype=HALF), randoms(6, 4)
    tensors = lora("q", 2, 6, 4)
    torch_save(tmp_path / "t.pt", {"model": {"q.weight": half}, "optimizer": adamw(["q.weight"], {"q.weight": full})})
    adapter_save(tmp_path / "a", tensors)
    words = ["convert", tmp_path / "t.pt", tmp_path / "out", "--to", "torch", "--merge-adapter", tmp_path / "a"]
    assert refused(*words)["code"] == "state-not-carried"
    good(*words, "--no-optimizer")
    with ckptctl.open(tmp_path / "out") as view:
        want = nearest_bfloat16(expected(half, [(*tensors.values(), 2.0)], np.float64))
        assert view["q.weight"].numpy().tobytes() == want.tobytes()
        assert view.kinds == ("weight",)


# ---- whole tensors and ties -----------------------------------------------------------------------------------------


def test_a_saved_head_unties_the_model(tmp_path):
    source = shared("hf/qwen2-lora-tied")
    words = ["--to", "hf", "--merge-adapter", source / "adapter"]
    good("convert", source / "base", tmp_path / "out", *words)
    got, base = written(tmp_path / "out"), written(source / "base")
    adapter = safetensors.numpy.load_file(source / "adapter" / "adapter_model.safetensors")
    assert got["lm_head.weight"].tobytes() == adapter[P + "lm_head.weight"].tobytes()
    assert got["model.embed_tokens.weight"].tobytes() == base["model.embed_tokens.weight"].tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert sorted(got) == sorted(written(source / "merged"))


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_shared_embedding_that_is_saved_whole_stays_tied(to, tmp_path):
    base = {"model.embed_tokens.weight": randoms(9, 4, dtype=HALF), "model.norm.weight": randoms(4, dtype=HALF)}
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"]}
    hf_save(tmp_path / "base", base, config)
    saved = randoms(9, 4)
    adapter_save(tmp_path / "a", {P + "model.embed_tokens.weight": saved})
    good("convert", tmp_path / "base", tmp_path / "out", "--to", to, "--merge-adapter", tmp_path / "a")
    with ckptctl.open(tmp_path / "out") as view:
        names = {"hf": ["model.embed_tokens.weight"], "torch": ["lm_head.weight", "model.embed_tokens.weight"]}[to]
        assert sorted(n for n in view if "norm" not in n) == names
        for n in names:
            assert view[n].numpy().tobytes() == nearest_bfloat16(saved.astype(np.float64)).tobytes()


def test_an_adapted_head_of_a_tied_model_gets_bytes_of_its_own(tmp_path):
    base = {"model.embed_tokens.weight": randoms(9, 4)}
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "architectures": ["Qwen2ForCausalLM"]}
    hf_save(tmp_path / "base", base, config)
    tensors = lora("lm_head", 2, 9, 4)
    adapter_save(tmp_path / "a", tensors)
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a")
    got = written(tmp_path / "out")
    embedding = base["model.embed_tokens.weight"]
    assert got["model.embed_tokens.weight"].tobytes() == embedding.tobytes()
    assert got["lm_head.weight"].tobytes() == expected(embedding, [(*tensors.values(), 2.0)]).tobytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


# ---- what is refused ------------------------------------------------------------------------------------------------

SQUARE = {"x.q.weight": np.eye(4, dtype=FULL), "x.v.weight": np.ones((4, 6), FULL)}
REFUSED = {
    "adapter-kind": (lora("x.q", 2, 4, 4), {"peft_type": "LOHA"}),
    "adapter-setting": (lora("x.q", 2, 4, 4), {"use_dora": True}),
    "adapter-setting 2": (lora("x.q", 2, 4, 4), {"init_lora_weights": "pissa_niter_4"}),
    "adapter-setting 3": (lora("x.q", 2, 4, 4), {"trainable_token_indices": [1, 2]}),
    "adapter-setting 4": (lora("x.q", 2, 4, 4), {"something_new": {"a": 1}}),
    "adapter-setting 5": (lora("x.q", 2, 4, 4), {"rank_pattern": {"(a+)+": 2}}),
    "adapter-setting 6": (lora("x.q", 2, 4, 4), {"alpha_pattern": {"[": 2}}),
    "adapter-names": ({**lora("x.q", 2, 4, 4), f"{P}x.q.lora_magnitude_vector": np.ones(4, FULL)}, {}),
    "adapter-unmatched": ({**lora("x.q", 2, 4, 4), **lora("x.gone", 2, 4, 4)}, {}),
    "adapter-shape": (lora("x.q", 2, 4, 5), {}),
    "adapter-shape 2": ({f"{P}x.q.weight": np.ones((5, 4), FULL)}, {}),
    "lora-rank-mismatch": (lora("x.q", 2, 4, 4), {"r": 3}),
    "adapter-config": (lora("x.q", 2, 4, 4), {"lora_alpha": None}),
    "adapter-orientation": ({**lora("x.q", 2, 4, 4), **lora("x.v", 2, 4, 6)}, {"fan_in_fan_out": True}),
    "adapter-type": ({**lora("x.q", 2, 4, 4), f"{P}x.q.lora_A.weight": np.ones((2, 4), np.int8)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_merged_exactly_is_refused_by_its_own_code(case, tmp_path):
    tensors, settings = REFUSED[case]
    hf_save(tmp_path / "base", SQUARE)
    adapter_save(tmp_path / "a", tensors, **settings)
    error = refused("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "a")
    assert error["code"] == case.split()[0], error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_adapter_is_wrong_usage(tmp_path):
    hf_save(tmp_path / "base", SQUARE)
    refused("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "base", code=2)


def test_a_quantized_base_is_refused(tmp_path):
    source = shared("hf/llama-fp8-blocks")
    words = ["--to", "hf", "--merge-adapter", fixture("hf/llama-lora") / "adapter"]
    assert refused("convert", source, tmp_path / "out", *words)["code"] == "merge-base"


def test_the_optimizer_of_an_adapter_s_trainer_folder_is_no_part_of_a_merge(tmp_path):
    source = fixture("hf/llama-lora")
    shutil.copytree(source / "adapter", tmp_path / "a")
    (tmp_path / "a" / "trainer_state.json").write_text('{"global_step": 3}')
    state = {"state": {0: {"exp_avg": arange(4, 32)}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    torch_save(tmp_path / "a" / "optimizer.pt", state)
    for name, adapter in (("one", source / "adapter"), ("two", tmp_path / "a")):
        good("convert", source / "base", tmp_path / name, "--to", "hf", "--merge-adapter", adapter)
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")


# ---- against PEFT ---------------------------------------------------------------------------------------------------

SCRIPT = """
import importlib.util, json, sys, torch
if not (importlib.util.find_spec("peft") and importlib.util.find_spec("transformers")):
    sys.exit(print("none"))
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
out, spec = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
config = AutoConfig.for_model(**spec["model"])
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained(out + "/base")
net = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **spec["lora"]))
for name, p in net.named_parameters():
    if p.requires_grad:
        p.data = torch.randn_like(p) * 0.1
net.save_pretrained(out + "/adapter")
net.merge_and_unload().save_pretrained(out + "/merged")
"""
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 31, "attention_bias": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 8}
PEFT = {
    "plain": (LLAMA, {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]}),
    "rslora": (LLAMA, {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"}),
    "patterns": (
        LLAMA,
        {
            "r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 9},
            "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        },
    ),
    "bias": (LLAMA, {"r": 2, "target_modules": ["q_proj"], "bias": "all"}),
    "bias of lora": (LLAMA, {"r": 2, "target_modules": ["q_proj"], "bias": "lora_only"}),
    "saved": (LLAMA, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding": (LLAMA, {"r": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "conv1d": (GPT2, {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", PEFT)
def test_a_merge_equals_peft_s_to_the_last_bits(case, tmp_path):
    model, settings = PEFT[case]
    if "none" in run_torch(SCRIPT, tmp_path, json.dumps({"model": model, "lora": settings})):
        pytest.skip("needs PEFT and Transformers beside torch")
    good("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--merge-adapter", tmp_path / "adapter")
    got, want, base = (written(tmp_path / f) for f in ("out", "merged", "base"))
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        # PEFT rounds each step to float32; here is one rounding at the end: a few units in the last place of a term.
        np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=4e-7 * max(1, np.abs(array).max()), err_msg=name)
    assert any(got[n].tobytes() != base.get(n, got[n] * 0).tobytes() for n in got)
