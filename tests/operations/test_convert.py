"""Conversions of weights: types, files, ties, every kind of tensor; and how a result comes to stand at its place."""

import hashlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ckptctl
from ckptctl.core.dtype import BY_SAFETENSORS
from tests.support.checkpoints import ckpt, digest, digests, run_torch, safetensors_of, truth
from tests.support.commands import ckptctl as command
from tests.support.commands import document, good, refused
from tests.support.format_suite import tree_bytes, weights_in
from tests.support.plain import KNOWN, SAFETENSORS, dcp_folder, torch_tree
from tests.support.saving import Chunk, Parameter, Strided, adamw, arange, dcp_save, hf_save, torch_save

# ---- types ----------------------------------------------------------------------------------------------------------

BITS32 = np.array(
    [
        0x00000000, 0x80000000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x807FFFFF,
        0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0x33800000, 0x477FF000, 0x38FFE000,
    ],
    np.uint32,
)  # fmt: skip
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def odd_floats(dtype):
    """Zeros of both signs, ties, the largest, subnormals, infinities and NaNs with payloads, as that type."""
    wide = BITS32.view(np.float32)
    with np.errstate(all="ignore"):
        return wide if dtype == "float32" else wide.astype(NUMPY[dtype])


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_a_cast_rounds_as_numpy_does(stored, wanted, to, tmp_path):
    array = odd_floats(stored)
    path = hf_save(tmp_path / "src", {"w": array, "n": arange(5, dtype=np.int64), "b": np.array([True, False])})
    report = document("convert", path, tmp_path / "out", "--to", to, "--dtype", wanted)
    with ckptctl.open(tmp_path / "out") as view:
        assert view["w"].dtype == wanted
        got = view["w"].numpy()
        with np.errstate(all="ignore"):
            want = array.astype(NUMPY[wanted])
            nan = np.isnan(want.astype(np.float64))
            assert (np.isnan(got.astype(np.float64)) == nan).all()
        assert got[~nan].tobytes() == want[~nan].tobytes()
        if stored == wanted:
            assert got.tobytes() == array.tobytes()
        assert (view["n"].dtype, view["b"].dtype) == ("int64", "bool")
        assert view["n"].numpy().tolist() == [0, 1, 2, 3, 4]
    fate = next(line for line in report["fidelity"] if line["part"] == "weights")
    assert fate["fate"] == ("carried" if stored == wanted else "converted")
    if stored != wanted:
        assert f"1 cast {stored} -> {wanted}" in fate["detail"]
        assert list(report["plan"]["casts"].values()) == [array.size]


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_without_a_cast_every_bit_of_a_nan_is_kept(to, tmp_path):
    array = np.arange(0x7F800000, 0x7F800000 + 4096, dtype=np.uint32).view(np.float32).reshape(64, 64)
    half = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    path = hf_save(tmp_path / "src", {"w": array, "h": half})
    good("convert", path, tmp_path / "out", "--to", to)
    got = weights_in(tmp_path / "out", to)
    assert got["w"] == digest("F32", (64, 64), array.tobytes())
    assert got["h"] == digest("BF16", (65536,), half.tobytes())


def test_moments_are_never_cast(tmp_path):
    model = {"a": arange(3, 2)}
    path = torch_save(tmp_path / "x.pt", {"model": model, "optimizer": adamw(["a"], model)})
    good("convert", path, tmp_path / "out", "--to", "torch", "--dtype", "bfloat16")
    tree = torch_tree(tmp_path / "out")
    assert tree["model"]["a"].dtype == "bfloat16"
    assert {k: t.dtype for k, t in tree["optimizer"]["state"]["a"].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), "float32"
    )


@pytest.mark.parametrize(
    ("key", "said"), [("dtype", "float32"), ("torch_dtype", "float32"), ("torch_dtype", "torch.float32")]
)
def test_the_config_s_type_follows_the_weights(key, said, tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": False, key: said, "architectures": ["LlamaForCausalLM"]}
    path = hf_save(tmp_path / "src", {"w": arange(3)}, config)
    good("convert", path, tmp_path / "same", "--to", "hf")
    assert (tmp_path / "same" / "config.json").read_bytes() == (path / "config.json").read_bytes()
    report = document("convert", path, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, key: "bfloat16"}
    line = next(line for line in report["fidelity"] if line["part"] == "config.json")
    assert line["fate"] == "converted"
    assert f"{key} {said} -> bfloat16" in line["detail"]


def test_quantized_weights_are_not_cast(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}, "dtype": "float16"}
    path = hf_save(tmp_path / "src", {"q": arange(4, dtype=np.int32), "s": arange(4, dtype=np.float16)}, config)
    assert "quantized" in refused("convert", path, tmp_path / "out", "--to", "hf", "--dtype", "bfloat16")["what"]
    report = document("convert", path, tmp_path / "out", "--to", "hf")
    assert digests(tmp_path / "out") == digests(path)
    assert any(line["part"] == "quantization" for line in report["fidelity"])


def test_a_type_that_there_is_not_is_a_mistake(tmp_path):
    path = hf_save(tmp_path / "src", {"w": arange(3)})
    assert "int8" in refused("convert", path, tmp_path / "out", "--to", "hf", "--dtype", "int8", code=2)["what"]


# ---- every kind of tensor -------------------------------------------------------------------------------------------


def every_dtype():
    """An array of each type that torch and NumPy (with ml_dtypes) have, with bytes of every value."""
    out = {}
    for name, item, _ in KNOWN:
        dtype = getattr(ml_dtypes, name, None) or name
        raw = np.arange(48, dtype=np.uint8) % (2 if name == "bool" else 251)
        out[name] = raw.view(np.dtype(dtype)).reshape(-1, 1 if item == 16 else 3)
    return out


def test_a_file_of_every_type_goes_everywhere(tmp_path):
    arrays = every_dtype()
    path = torch_save(tmp_path / "x.pt", dict(arrays))
    want = {n: digest(SAFETENSORS[n], a.shape, a.tobytes()) for n, a in arrays.items()}
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        assert weights_in(tmp_path / to, to) == want
    error = refused("convert", path, tmp_path / "hf", "--to", "hf")
    assert "complex128" in error["what"]
    assert "--exclude 'complex128'" in error["fix"]
    good("convert", path, tmp_path / "hf", "--to", "hf", "--exclude", "complex128")
    assert weights_in(tmp_path / "hf", "hf") == {n: t for n, t in want.items() if n != "complex128"}
    good("convert", tmp_path / "hf", tmp_path / "back", "--to", "dcp")
    assert weights_in(tmp_path / "back", "dcp") == {n: t for n, t in want.items() if n != "complex128"}


def safetensors_file(path, entries):
    """A safetensors file of (name, dtype, shape, bytes), by hand, for types that NumPy lacks."""
    header, at = {}, 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in entries))
    return path


def test_every_type_of_safetensors_is_copied(tmp_path):
    entries = []
    for dtype in BY_SAFETENSORS.values():
        shape = (4, 8)
        entries.append(
            (
                dtype.name,
                dtype.safetensors,
                shape,
                bytes(i % 256 if dtype.name != "bool" else i % 2 for i in range(32 * dtype.bits // 8)),
            )
        )
    path = safetensors_file(tmp_path / "x.safetensors", entries)
    good("convert", path, tmp_path / "out", "--to", "hf")
    got = {n: (d, s, b) for n, d, s, b in safetensors_of(tmp_path / "out" / "model.safetensors")}
    assert got == {n: (d, s, b) for n, d, s, b in entries}
    shown = {t["name"]: t for t in document("ls", path)["tensors"]}
    assert shown["float4_e2m1fn_x2"]["shape"] == [4, 8]
    assert shown["float4_e2m1fn_x2"]["bytes"] == 16
    assert shown["float6_e2m3"]["bytes"] == 24


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_types_below_a_byte_are_refused_elsewhere_by_name(to, tmp_path):
    path = safetensors_file(tmp_path / "x.safetensors", [("w", "F4", (4, 8), bytes(16)), ("v", "F32", (1,), bytes(4))])
    error = refused("convert", path, tmp_path / "out", "--to", to)
    assert error["code"] == "unsupported"
    assert "float4_e2m1fn_x2" in error["what"]
    assert not (tmp_path / "out").exists()


SHAPES = {
    "scalar": arange(1).reshape(()),
    "empty": arange(0),
    "empty_rows": arange(0, 4),
    "no_columns": arange(4, 0),
    "one": arange(1),
    "one_by_one": arange(1, 1, 1),
    "row": arange(1, 9),
    "column": arange(9, 1),
    "deep": arange(2, 3, 2, 3, 2),
}


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
@pytest.mark.parametrize("source", ["hf", "torch", "dcp"])
def test_shapes_of_every_kind_go_everywhere(source, to, tmp_path):
    if source == "hf":
        path = hf_save(tmp_path / "src", SHAPES)
    elif source == "torch":
        path = torch_save(tmp_path / "src", SHAPES)
    else:
        path = dcp_save(tmp_path / "src", {("model", n): a for n, a in SHAPES.items()})
    for dp in (1, 4) if to == "dcp" else (1,):
        good("convert", path, tmp_path / f"out{dp}", "--to", to, *(["--dp", str(dp)] if to == "dcp" else []))
        assert weights_in(tmp_path / f"out{dp}", to) == {
            n: digest("F32", a.shape, a.tobytes()) for n, a in SHAPES.items()
        }


def views():
    """Views of one storage that are no plain run of it, and what their elements are."""
    base = arange(60)
    made = {
        "transposed": Strided(base, 0, (6, 10), (1, 6)),
        "expanded": Strided(base, 7, (3, 4), (0, 1)),
        "expanded_scalar": Strided(base, 9, (5,), (0,)),
        "every_third": Strided(base, 1, (4, 5), (15, 3)),
        "rows": Strided(base, 20, (2, 10), (10, 1)),
        "overlaps": Strided(base, 0, (50, 3), (1, 1)),
        "whole": Strided(base, 0, (60,), (1,)),
        "permuted": Strided(base, 0, (3, 5, 4), (1, 12, 3)),
    }
    strided = np.lib.stride_tricks.as_strided
    return made, {n: np.array(strided(base[v.offset :], v.size, [4 * s for s in v.stride])) for n, v in made.items()}


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_views_of_a_shared_storage_become_their_elements(to, tmp_path):
    made, want = views()
    path = torch_save(tmp_path / "x.pt", {"model": made})
    good("convert", path, tmp_path / "out", "--to", to, *(["--dp", "3"] if to == "dcp" else []))
    got = weights_in(tmp_path / "out", to)
    assert got == {n: digest("F32", a.shape, np.ascontiguousarray(a).tobytes()) for n, a in want.items()}
    with ckptctl.open(path) as view:
        assert all((view[n].numpy() == a).all() for n, a in want.items())
        assert (view["transposed"][2:4, 3] == want["transposed"][2:4, 3]).all()


def test_parameters_are_tensors_and_frozen_ones_too(tmp_path):
    path = torch_save(
        tmp_path / "x.pt", {"model": {"a": Parameter(arange(3)), "b": Parameter(arange(2), requires_grad=False)}}
    )
    good("convert", path, tmp_path / "out", "--to", "hf")
    assert set(digests(tmp_path / "out")) == {"a", "b"}


UNMOVABLE = """
import sys, torch
kinds = {
    "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag,
    "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8), "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(), "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": torch.empty(2, device="meta"),
}
for name, tensor in kinds.items():
    torch.save({"model": {"plain": torch.ones(2), name: tensor}}, f"{sys.argv[1]}/{name}.pt")
    values = {"model": {"plain": torch.ones(2)}, "step": 1, "extra": {"inner": [tensor]}}
    torch.save(values, f"{sys.argv[1]}/{name}-value.pt")
"""


@pytest.mark.real
@pytest.mark.filterwarnings("default")
def test_tensors_that_are_not_plain_stop_a_conversion_by_name(tmp_path):
    run_torch(UNMOVABLE, tmp_path)
    for path in sorted(tmp_path.glob("*.pt")):
        name = path.stem.removesuffix("-value")
        for to in ("hf", "torch", "dcp"):
            error = refused("convert", path, tmp_path / "out", "--to", to)
            if path.stem in ("conj-value", "neg-value") and to == "hf":
                assert error["code"] == "state-not-carried"
                continue
            assert error["code"] == "unsupported", error
            assert name in error["what"] or "inner" in error["what"], error
            assert error["why"], error
            assert not (tmp_path / "out").exists()
        found = document("inspect", path)
        assert found["kinds"]["weight"]["tensors"] >= 1
        if path.stem.startswith(("conj", "neg")):
            continue  # known by the tensor itself
        assert found["unsupported"], path.stem


def test_a_conjugated_tensor_can_be_left_out(tmp_path):
    view = Strided(arange(4, dtype=np.complex64), 0, (4,), (1,), ({"conj": True},))
    path = torch_save(tmp_path / "x.pt", {"model": {"c": view, "a": arange(2)}})
    error = refused("convert", path, tmp_path / "out", "--to", "torch")
    assert "--exclude 'c'" in error["fix"]
    good("convert", path, tmp_path / "out", "--to", "torch", "--exclude", "c")
    assert refused("show", path, "c")["code"] == "unsupported"


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["100KB", "30000", "64KiB", "0.05MB"])
def test_files_of_a_folder_stay_within_the_size_and_the_index_is_right(size, tmp_path):
    source = ckpt("hf/llama-single")
    good("convert", source, tmp_path / "out", "--to", "hf", "--max-shard-size", size)
    limit = {"100KB": 100_000, "30000": 30_000, "64KiB": 65_536, "0.05MB": 50_000}[size]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    where, total = {}, 0
    for file in files:
        held = [(n, len(data)) for n, _, _, data in safetensors_of(file)]
        assert sum(n for _, n in held) <= limit or len(held) == 1
        where |= dict.fromkeys((n for n, _ in held), file.name)
        total += sum(n for _, n in held)
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == total
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert digests(tmp_path / "out") == truth("hf/llama-single")["model"]


def test_files_are_cut_where_transformers_cuts_them(tmp_path):
    """fixtures/hf/llama-sharded is the same kind of model saved with max_shard_size='100KB'."""
    good("convert", ckpt("hf/llama-sharded"), tmp_path / "out", "--to", "hf", "--max-shard-size", "100KB")
    old = json.loads((ckpt("hf/llama-sharded") / "model.safetensors.index.json").read_text())["weight_map"]
    new = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(new.values())) == len(set(old.values()))


def test_one_file_has_no_index(tmp_path):
    good("convert", ckpt("hf/llama-sharded"), tmp_path / "out", "--to", "hf")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("size", ["0", "-1", "lots", "5 XB"])
def test_a_size_that_is_none_is_a_mistake(size, tmp_path):
    refused("convert", ckpt("hf/llama-single"), tmp_path / "out", "--to", "hf", f"--max-shard-size={size}", code=2)


def test_tokenizer_and_the_like_go_along_byte_for_byte(tmp_path):
    source = ckpt("hf/qwen2-extras")
    report = document("convert", source, tmp_path / "out", "--to", "hf")
    wanted = json.loads((source / "truth.json").read_text())["carry_unchanged"]
    for name in wanted:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    line = next(line for line in report["fidelity"] if line["part"] == "tokenizer and other files")
    assert line["fate"] == "carried"
    good("convert", source, tmp_path / "bare", "--to", "hf", "--bare")
    assert [p.name for p in (tmp_path / "bare").iterdir()] == ["model.safetensors"]


def test_without_a_config_the_report_says_what_is_missing(tmp_path):
    report = document("convert", hf_save(tmp_path / "src", {"w": arange(2)}), tmp_path / "out", "--to", "hf")
    line = next(line for line in report["fidelity"] if line["part"] == "config.json")
    assert (line["fate"], "--model-config" in line["detail"]) == ("absent", True)


def test_a_config_of_another_model_is_refused(tmp_path):
    path = hf_save(tmp_path / "src", {"model.embed_tokens.weight": arange(10, 4)})
    for field, value in (("vocab_size", 11), ("hidden_size", 8)):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "vocab_size": 10, "hidden_size": 4, field: value})
        )
        error = refused("convert", path, tmp_path / "out", "--to", "hf", "--model-config", tmp_path / "config.json")
        assert (error["code"], field in error["what"]) == ("shape-differs-from-config", True)


def test_metadata_of_safetensors_is_kept(tmp_path):
    path = hf_save(tmp_path / "src", {"w": arange(2)}, metadata={"note": "mine", "format": "pt"})
    good("convert", path, tmp_path / "out", "--to", "hf")
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"note": "mine", "format": "pt"}


# ---- ties -----------------------------------------------------------------------------------------------------------

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied_model(path, head, config, kind="torch"):
    """A model whose head is the embedding's own array, an equal copy, another one, or absent."""
    embedding = arange(6, 4)
    heads = {"shared": embedding, "equal": embedding.copy(), "different": embedding + np.float32(1), "absent": None}
    tensors = {EMBED: embedding, "model.norm.weight": arange(4)}
    if heads[head] is not None:
        tensors[HEAD] = heads[head]
    if kind == "hf":
        return hf_save(path, tensors, config)
    path.mkdir()
    torch_save(path / "pytorch_model.bin", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize(
    ("kind", "head"),
    [("torch", h) for h in ("shared", "equal", "different", "absent")]
    + [("hf", h) for h in ("equal", "different", "absent")],
)
def test_tied_weights(head, said, kind, tmp_path):
    config = {"model_type": "llama", "vocab_size": 6, "hidden_size": 4, "architectures": ["LlamaForCausalLM"]}
    config |= {} if said is None else {"tie_word_embeddings": said}
    path = tied_model(tmp_path / "src", head, config, kind)
    if said and head == "different":
        error = refused("convert", path, tmp_path / "out", "--to", "hf")
        assert error["code"] == "tied-tensors-differ"
        assert "element 0" in error["why"]
        assert not (tmp_path / "out").exists()
        return
    good("convert", path, tmp_path / "out", "--to", "hf")
    names = set(digests(tmp_path / "out"))
    assert names == {EMBED, "model.norm.weight"} | ({HEAD} if head != "absent" and not said else set())
    for to in ("torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        got = weights_in(tmp_path / to, to)
        assert (HEAD in got) == (head != "absent" or bool(said))
        if HEAD in got and head != "different":
            assert got[HEAD] == got[EMBED]
    tree = torch_tree(tmp_path / "torch")["model"]
    if head == "shared" or (head == "absent" and said):
        assert tree[HEAD].storage == tree[EMBED].storage


def test_a_family_that_ties_by_default_is_known(tmp_path):
    config = {"model_type": "gpt2", "vocab_size": 6, "n_embd": 4}
    embedding = arange(6, 4)
    path = hf_save(tmp_path / "src", {"transformer.wte.weight": embedding, HEAD: embedding.copy()}, config)
    good("convert", path, tmp_path / "out", "--to", "hf")
    assert set(digests(tmp_path / "out")) == {"transformer.wte.weight"}


def test_shared_storages_without_a_config_are_written_twice_and_said(tmp_path):
    weight = arange(4, 4)
    path = torch_save(tmp_path / "x.pt", {"a": weight, "b": weight})
    report = document("convert", path, tmp_path / "out", "--to", "hf")
    assert digests(tmp_path / "out")["a"] == digests(tmp_path / "out")["b"]
    line = next(line for line in report["fidelity"] if line["part"] == "tied weights")
    assert (line["fate"], line["detail"].startswith("b has a copy of a")) == ("filled", True)
    assert document("inspect", path)["ties"] == {"b": "a"}
    good("convert", path, tmp_path / "again", "--to", "torch")
    tree = torch_tree(tmp_path / "again")["model"]
    assert tree["a"].storage == tree["b"].storage


def test_a_cast_of_tied_weights_ties_them_still(tmp_path):
    weight = arange(4, 4)
    path = torch_save(tmp_path / "x.pt", {"a": weight, "b": weight})
    good("convert", path, tmp_path / "out", "--to", "torch", "--dtype", "bfloat16")
    tree = torch_tree(tmp_path / "out")["model"]
    assert tree["a"].storage == tree["b"].storage


# ---- the target -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    return hf_save(tmp_path / "src", {"w": arange(64, 8)})


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_a_target_that_is_there_is_left_alone(small, to, tmp_path):
    for make in (lambda p: p.mkdir(), lambda p: p.write_text("mine")):
        target = tmp_path / f"out{make.__code__.co_firstlineno}{make.__code__.co_names}"
        make(target)
        before = tree_bytes(target)
        error = refused("convert", small, target, "--to", to, code=2)
        assert "--overwrite" in error["fix"]
        assert tree_bytes(target) == before


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_overwrite_replaces_all_of_it(small, to, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    good("convert", small, tmp_path / "out", "--to", to, "--overwrite")
    assert "old" not in tree_bytes(tmp_path / "out")
    assert set(weights_in(tmp_path / "out", to)) == {"w"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "src"]


def test_a_failed_conversion_leaves_the_old_target(small, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    refused("convert", ckpt("torch/hsdp_2x2_dcp"), tmp_path / "out", "--to", "hf", "--overwrite")
    assert tree_bytes(tmp_path / "out") == {"old": b"old"}


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_a_dry_run_writes_nothing_and_tells_what_would_be(small, to, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    report = document("convert", small, tmp_path / "out", "--to", to, "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    assert report["dry_run"] is True
    assert "result" not in report
    good("convert", small, tmp_path / "out", "--to", to)
    assert report["plan"]["written_bytes"] == sum(len(d) for d in tree_bytes(tmp_path / "out").values())
    assert report["plan"]["files"] == len(tree_bytes(tmp_path / "out"))
    text = good("convert", small, tmp_path / "other", "--to", to, "--dry-run").out
    assert "nothing was written" in text


def test_a_target_inside_its_source_is_refused(small, tmp_path):
    refused("convert", small, small / "out", "--to", "torch", code=2)
    refused("convert", small, small, "--to", "hf", "--overwrite", code=2)
    assert sorted(p.name for p in small.iterdir()) == ["model.safetensors"]


def test_the_plan_is_written_as_lines_of_json(small, tmp_path):
    good("convert", small, tmp_path / "out", "--to", "hf", "--plan-out", tmp_path / "plan.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    files = [line for line in lines if "file" in line]
    assert [f["path"] for f in files] == ["model.safetensors"]
    assert sum(line["extent"][2] - line["extent"][1] for line in lines if "extent" in line) == files[0]["nbytes"]


def test_little_memory_gives_the_same_bytes(tmp_path):
    source = ckpt("torch/plain_zip")
    good("convert", source, tmp_path / "a", "--to", "dcp", "--dp", "3")
    good("convert", source, tmp_path / "b", "--to", "dcp", "--dp", "3", "--memory", "16MiB", "--jobs", "1")
    assert tree_bytes(tmp_path / "a") == tree_bytes(tmp_path / "b")
    assert "16MiB" in refused("convert", source, tmp_path / "c", "--to", "dcp", "--memory", "1MiB", code=2)["fix"]


def test_the_source_is_never_changed(tmp_path):
    shutil.copytree(ckpt("torch/hsdp_2x2_dcp"), tmp_path / "src")
    before = {
        p: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in (tmp_path / "src").iterdir()
    }
    for to in ("torch", "dcp"):
        good("convert", tmp_path / "src", tmp_path / to, "--to", to)
    assert {
        p: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in (tmp_path / "src").iterdir()
    } == before


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (["--to", "hf", "--dp", "2"], "--dp"),
        (["--to", "torch", "--dp", "2"], "--dp"),
        (["--to", "dcp", "--index-keys"], "--index-keys"),
        (["--to", "dcp", "--bare"], "--bare"),
        (["--to", "gguf"], "gguf"),
        (["--to", "hf", "--weights", "best"], "best"),
        ([], "--to"),
    ],
)
def test_flags_that_do_not_belong_are_mistakes(small, words, needle, tmp_path):
    error = refused("convert", small, tmp_path / "out", *words, code=2)
    assert needle in error["what"]


def test_every_source_byte_is_accounted_for(tmp_path):
    report = document("convert", ckpt("torch/plain_zip"), tmp_path / "out", "--to", "hf", "--no-optimizer")
    account = report["source_bytes"]
    assert account["total"] == ckpt("torch/plain_zip").stat().st_size
    assert account["used"] == sum(int(np.prod(t.shape)) * 4 for t in truth("torch/plain_zip")["model"].values())
    assert account["used"] + sum(account["dropped"].values()) + account["gaps"] == account["total"]
    assert set(account["dropped"]) >= {"exp_avg", "exp_avg_sq", "step"}


def test_dcp_chunks_on_any_cut_are_put_together(tmp_path):
    w = arange(7, 6)
    cut = [
        Chunk("__0_0.distcp", (0, 0), (3, 4)),
        Chunk("__1_0.distcp", (0, 4), (3, 2)),
        Chunk("__2_0.distcp", (3, 0), (4, 6)),
    ]
    empty = Chunk("__3_0.distcp", (7, 0), (0, 6))
    path = dcp_save(tmp_path / "src", {("model", "w"): w}, {"model.w": [*cut, empty]})
    for to in ("hf", "torch", "dcp"):
        good("convert", path, tmp_path / to, "--to", to)
        assert weights_in(tmp_path / to, to) == {"w": digest("F32", (7, 6), w.tobytes())}
    assert command("diff", path, tmp_path / "hf").code == 0
    assert dcp_folder(tmp_path / "dcp").chunks["model.w"] == [("__0_0.distcp", (0, 0), (7, 6))]
