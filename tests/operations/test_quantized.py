"""Quantized weights: carried as bits, known without a config, never parted from their scales nor cut inside a unit."""

import ml_dtypes
import numpy as np
import pytest

import ckptctl
from ckptctl.core.tensor import Key
from ckptctl.names import quantized_by_names
from tests.support.checkpoints import shared
from tests.support.commands import document, good, refused
from tests.support.format_suite import all_digests, weights_in
from tests.support.saving import arange, hf_save

F8 = ml_dtypes.float8_e4m3fn
PLAIN = {"model.embed_tokens.weight": arange(9, 4), "model.norm.weight": arange(4)}
MODULES = {
    "gptq or awq": {
        "qweight": arange(2, 16, dtype=np.int32), "qzeros": arange(2, 2, dtype=np.int32),
        "scales": arange(2, 16, dtype=np.float16), "g_idx": arange(16, dtype=np.int32),
    },
    "fp8": {"weight": arange(6, 8).astype(F8), "weight_scale_inv": arange(3, 4)},
    "scaled weights": {"weight": arange(6, 8).astype(F8), "weight_scale": arange(6, 1), "input_scale": arange(1)[0]},
    "bitsandbytes": {
        "weight": arange(24, 1, dtype=np.uint8), "weight.absmax": arange(3), "weight.quant_map": arange(16),
        "weight.quant_state.bitsandbytes__nf4": arange(40, dtype=np.uint8),
    },
    "compressed-tensors": {
        "weight_packed": arange(6, 2, dtype=np.int32), "weight_scale": arange(6, 2),
        "weight_shape": arange(2, dtype=np.int64),
    },
}  # fmt: skip


NAMES = [f"model.layers.{layer}.{module}" for layer in range(3) for module in ("q_proj", "up_proj")]


def tensors_of(method):
    return PLAIN | {f"{n}.{p}": np.asarray(a) for n in NAMES for p, a in MODULES[method].items()}


@pytest.mark.parametrize("method", MODULES)
@pytest.mark.parametrize("config", [None, {"quantization_config": {"quant_method": "said"}}])
def test_the_method_is_told_from_config_or_names(method, config, tmp_path):
    found = document("inspect", hf_save(tmp_path / "src", tensors_of(method), config))
    assert found["quantized"] == ("said" if config else method)
    assert found["kinds"]["weight"]["tensors"] == 2 + 6 * len(MODULES[method])


@pytest.mark.parametrize("method", MODULES)
@pytest.mark.parametrize("ranks", ["2", "5"])
def test_a_packed_tensor_is_whole_in_one_file_with_its_scales(method, ranks, tmp_path):
    source = hf_save(tmp_path / "src", tensors_of(method))
    good("convert", source, tmp_path / "d", "--to", "dcp", "--dp", ranks)
    with ckptctl.open(tmp_path / "d") as view, ckptctl.open(source) as before:
        assert all_digests(view) == all_digests(before)
        files = {}
        for handle in view.tensors():
            tensor = view.checkpoint.tensors[Key(handle.name)]
            places = {
                int(s)
                for table in tensor.pieces
                for s, n in zip(table.source, table.size.prod(axis=1), strict=True)
                if n
            }
            module = next((m for m in NAMES if handle.name.startswith(m + ".")), "")
            if module:
                assert len(places) == 1
                files.setdefault(module, set()).update(places)
            elif handle.name == "model.embed_tokens.weight":
                assert len(places) > 1
        assert all(len(f) == 1 for f in files.values())
        assert len(set.union(*files.values())) > 1


@pytest.mark.parametrize("method", MODULES)
def test_bits_come_back_through_every_format(method, tmp_path):
    source = hf_save(tmp_path / "src", tensors_of(method))
    good("convert", source, tmp_path / "t", "--to", "torch")
    good("convert", tmp_path / "t", tmp_path / "d", "--to", "dcp", "--dp", "3")
    good("reshard", tmp_path / "d", tmp_path / "d2", "--dp", "4")
    good("convert", tmp_path / "d2", tmp_path / "out", "--to", "hf", "--max-shard-size", "100")
    assert weights_in(tmp_path / "out", "hf") == weights_in(source, "hf")


@pytest.mark.parametrize("method", MODULES)
@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_a_cast_is_refused_without_a_config_too(method, to, tmp_path):
    source = hf_save(tmp_path / "src", tensors_of(method))
    error = refused("convert", source, tmp_path / "out", "--to", to, "--dtype", "bfloat16")
    assert method in error["what"]


@pytest.mark.parametrize("method", MODULES)
def test_numbers_are_not_parted_from_their_scales(method, tmp_path):
    source = hf_save(tmp_path / "src", tensors_of(method))
    main = next(iter(MODULES[method]))
    words = ["convert", source, tmp_path / "out", "--to", "torch"]
    assert refused(*words, "--exclude", f"*.layers.1.q_proj.{main}")["code"] == "quantized-parts"
    good(*words, "--exclude", "*.layers.1.q_proj.*")
    with ckptctl.open(tmp_path / "out") as view:
        assert len(view) == 2 + 5 * len(MODULES[method])


@pytest.mark.parametrize("name", ["bnb-llama-4bit", "llama-fp8-blocks"])
def test_real_folders_keep_every_bit_over_ranks(name, tmp_path):
    source = shared(f"hf/{name}")
    good("convert", source, tmp_path / "d", "--to", "dcp", "--dp", "3")
    good("convert", tmp_path / "d", tmp_path / "out", "--to", "hf", "--model-config", source)
    assert weights_in(tmp_path / "out", "hf") == weights_in(source, "hf")
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_names_that_only_look_alike_are_not_quantized():
    assert quantized_by_names(["a.weight", "a.scales", "b.SCB", "c.weight_scale", "moe_blocks", "a.weight.mask"]) == (
        "",
        {},
    )


def test_a_module_is_all_its_tensors():
    names = ["a.weight", "a.SCB", "a.weight_format", "a.bias", "e_blocks", "e_scales", "e_bias"]
    assert quantized_by_names(names) == (
        "bitsandbytes, mxfp4",
        {"a.weight": "a", "a.SCB": "a", "a.weight_format": "a", "e_blocks": "e", "e_scales": "e"},
    )
