"""Against real torch: what it saves is read to its values; what is written it loads with weights_only=True."""

import hashlib
import json

import pytest

from ckptctl.core.values import TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.pickles.emit import StorageKeys, dump
from ckptctl.formats.pickles.walk import path_text, walk
from ckptctl.formats.torchfile.read import open_torch
from tests.support.checkpoints import FIXTURES, fixture, run_torch
from tests.support.torchfiles import tensor_bytes, torch_zip

pytestmark = pytest.mark.real

SAVE = """
import collections, hashlib, json, sys
import torch
from torch import nn

torch.manual_seed(0)
base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
odd = torch.tensor([0x7FC12345, 0xFF800001, 0x80000000], dtype=torch.uint32).view(torch.float32)
module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
tied = nn.Parameter(torch.randn(5, 2))
marked = torch.ones(2)
marked.note = "kept"
loop = {"self": None}
loop["self"] = loop
tree = {
    "base": base, "view": base[1:3, ::2], "transposed": base.t(), "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3), "odd": odd,
    "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "expanded": torch.ones(1).expand(4),
    "state": module.state_dict(), "tied": [tied, tied], "grad": torch.zeros(2, requires_grad=True), "marked": marked,
    "frozen": nn.Parameter(torch.ones(1), requires_grad=False),
    "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag,
    "plain": {"size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "set": {1, 2},
              "tuple": (1, None, True),
              "bytes": b"\\x00\\xff", "array": bytearray(b"xy"), "big": 2**100, "nan": float("nan"),
              3: "int key", ("a", 1): "tuple key",
              "counter": collections.Counter("aab"), "ordered": collections.OrderedDict(b=1, a=2), "complex": 1 + 2j,
              "text": "\\u00e9\\U0001f600"},
    "loop": loop,
}
# torch 2.13 cannot load untyped storages from a stream that it wrote itself.
late = () if sys.argv[1] == "legacy" else ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
             "complex64", "complex128", *late):
    tree[name] = torch.arange(3).to(getattr(torch, name))
torch.save(tree, sys.argv[2], _use_new_zipfile_serialization=sys.argv[1] != "legacy")

def digest(t):
    flat = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()

found = {}
def visit(path, node):
    if isinstance(node, torch.Tensor):
        found[path] = [str(node.dtype)[6:], list(node.shape), list(node.stride()), node.is_conj(), node.is_neg(),
                       node.requires_grad, isinstance(node, nn.Parameter), digest(node)]
    elif isinstance(node, dict) and node is not loop:
        for key, value in node.items():
            visit(f"{path}.{key}" if path else str(key), value)
visit("", tree)
print(json.dumps(found))
"""

LOAD = """
import sys
import torch

ours = torch.load(sys.argv[1], weights_only=True)
theirs = torch.load(sys.argv[2], weights_only=sys.argv[3] == "True")
seen = set()

def same(a, b, at):
    assert type(a) is type(b), (at, type(a), type(b))
    if (id(a), id(b)) in seen:
        return
    seen.add((id(a), id(b)))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset()), at
        assert (a.is_conj(), a.is_neg(), a.requires_grad) == (b.is_conj(), b.is_neg(), b.requires_grad), at
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes(), at
        assert bytes(a.untyped_storage()) == bytes(b.untyped_storage()), at
        same(a.__dict__, b.__dict__, at + ".__dict__")
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            same(a[key], b[key], f"{at}.{key}")
        same(getattr(a, "_metadata", None), getattr(b, "_metadata", None), at + "._metadata")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{at}[{i}]")
    else:
        assert repr(a) == repr(b), (at, a, b)

same(ours, theirs, "")
if isinstance(ours, dict) and "tied" in ours:
    assert ours["tied"][0] is ours["tied"][1] and ours["loop"]["self"] is ours["loop"]
    assert ours["view"].untyped_storage().data_ptr() == ours["base"].untyped_storage().data_ptr()
print("same")
"""


def written_again(path, out):
    """The file's tree and storages, emitted and packed again."""
    data, order = path.read_bytes(), StorageKeys()
    opened = open_torch(FileBytes(path))
    pickled = dump(opened.root, order)
    storages = {str(k): data[s.start_byte : s.start_byte + s.nbytes] for k, s in enumerate(order.order)}
    out.write_bytes(torch_zip(pickled, storages))


@pytest.mark.parametrize("variant", ["zip", "legacy"])
def test_all_kinds_of_tensors_and_values_are_read_and_written(variant, tmp_path):
    path = tmp_path / "saved.pt"
    expected = json.loads(run_torch(SAVE, variant, path))
    data, opened = path.read_bytes(), open_torch(FileBytes(path))
    assert opened.variant == variant
    assert (opened.unsafe, opened.unknown, opened.unsupported) == ([], [], [])
    found = {path_text(at): node for at, node in walk(opened.root) if isinstance(node, TensorRef)}
    for name, (dtype, shape, stride, conj, neg, grad, parameter, sha256) in expected.items():
        ref = found[name]
        assert (ref.dtype.name, list(ref.shape), list(ref.stride)) == (dtype, shape, stride), name
        assert (ref.conj, ref.neg, ref.requires_grad, ref.parameter) == (conj, neg, grad, parameter), name
        if not conj and not neg:
            assert hashlib.sha256(tensor_bytes(ref, data)).hexdigest() == sha256, name
    assert found["marked"].attributes == {"note": "kept"}
    written_again(path, tmp_path / "again.pt")
    assert run_torch(LOAD, tmp_path / "again.pt", path, "True") == "same\n"


REAL = [
    "torch/plain_zip",
    "torch/plain_legacy",
    "torch/trainer",
    "hf/qwen2-bin",
    "hf/qwen2-bin-prezip",
    "torch/lightning_ckpt",
]


def torch_files_of(name):
    folder = fixture(name)
    return [
        p for p in sorted(folder.rglob("*")) if p.suffix in (".pt", ".bin", ".ckpt") and p.name != "training_args.bin"
    ]


@pytest.mark.parametrize(
    "path", [p for name in REAL if (FIXTURES / name).exists() for p in torch_files_of(name)], ids=lambda p: p.name
)
def test_real_files_written_again_load_in_torch(path, tmp_path):
    with FileBytes(path) as reader:
        plain = not any(g.module.startswith("numpy") for g in open_torch(reader).globals)
    if not plain:
        pytest.skip("torch itself refuses NumPy arrays with weights_only=True")
    written_again(path, tmp_path / "again.pt")
    assert run_torch(LOAD, tmp_path / "again.pt", path, "True") == "same\n"


SCRIPTED = """
import sys, torch
from torch import nn
module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
torch.jit.script(module).save(sys.argv[1])
kinds = {
    "q": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8), "s": torch.eye(3).to_sparse(),
    "n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "m": torch.empty(2, device="meta"),
    "plain": torch.ones(1),
}
torch.save(kinds, sys.argv[2])
"""


def test_what_cannot_be_moved_is_told_and_torchscript_is_reachable(tmp_path):
    run_torch(SCRIPTED, tmp_path / "script.pt", tmp_path / "kinds.pt")
    script = open_torch(FileBytes(tmp_path / "script.pt"))
    assert script.variant == "torchscript"
    assert sorted(ref.shape for _, ref in walk(script.root) if isinstance(ref, TensorRef)) == [(2,), (2, 3)]
    assert (script.unsafe, script.unknown) == ([], [])
    kinds = open_torch(FileBytes(tmp_path / "kinds.pt"))
    assert {at for at, _ in kinds.unsupported} == {"q", "s", "n", "m"}
    assert isinstance(kinds.root["plain"], TensorRef)
    assert (kinds.unsafe, kinds.unknown) == ([], [])
