"""Torch files made by hand: what is read, what is refused and how, and no bytes give anything but a clear error."""

import io
import os
import pickle
import struct
import tarfile
import time
import tracemalloc
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.core.errors import CkptError, Damaged, Unrecognised, Unsupported
from ckptctl.core.values import Global, OrderedPairs, Record, Storage, TensorRef
from ckptctl.formats.bytesource import FileBytes, HeldBytes
from ckptctl.formats.pickles.emit import dump
from ckptctl.formats.pickles.nodes import NumpyArray, PersistentId
from ckptctl.formats.torchfile.read import open_torch
from tests.support.torchfiles import call, stored, tensor_bytes, torch_stream, torch_zip, v2
from tests.support.unpickle import read_or_refuse

FLOATS = struct.pack("<6f", *range(6))


def opened(data, problems=None):
    return open_torch(HeldBytes(data, "f.pt"), problems)


def root(tree, storages=None):
    return opened(torch_zip(tree, {"0": FLOATS} if storages is None else storages)).root


def test_a_tensor_is_a_view_of_its_storage():
    data = torch_zip({"a": v2(stored("0", 6), 1, (2, 2), (2, 1)), "b": v2(stored("0", 6), 0, (), ())}, {"0": FLOATS})
    file = opened(data)
    a, b = file.root["a"], file.root["b"]
    assert (a.dtype.name, a.offset, a.shape, a.stride, a.storage.key) == ("float32", 1, (2, 2), (2, 1), "0")
    assert a.storage is b.storage is file.storages["0"]
    assert tensor_bytes(a, data) == struct.pack("<4f", 1, 2, 3, 4)
    assert tensor_bytes(b, data) == struct.pack("<f", 0)
    assert (file.variant, file.byteorder, file.unsupported, file.pickle_nbytes > 50) == ("zip", "little", [], True)


def test_all_ways_to_write_a_tensor():
    s, f8 = stored("0", 24, "UntypedStorage"), Global("torch", "float8_e4m3fn")
    v3 = call("torch._utils._rebuild_tensor_v3", s, 2, (3,), (1,), True, OrderedPairs(), f8)
    got = root(v3)
    assert (got.dtype.name, got.storage.dtype, got.offset, got.requires_grad) == ("float8_e4m3fn", None, 2, True)
    got = root(call("torch._utils._rebuild_tensor", stored("0", 6), 0, (6,), (1,)))
    assert (got.shape, got.requires_grad) == ((6,), False)
    inner = v2(stored("0", 6), 0, (6,), (1,))
    got = root(call("torch._utils._rebuild_parameter", inner, True, OrderedPairs()))
    assert (got.parameter, got.requires_grad) == (True, True)
    got = root(call("torch._utils._rebuild_parameter_with_state", inner, False, OrderedPairs(), {"tag": 1}))
    assert (got.parameter, got.attributes) == (True, {"tag": 1})
    got = root(v2(stored("0", 3, "ComplexFloatStorage"), 0, (3,), (1,), {"conj": True}))
    assert (got.dtype.name, got.conj, got.neg) == ("complex64", True, False)
    for module in ("torch._tensor", "torch.tensor"):
        tensor = Global("torch", "Tensor")
        got = root(call(f"{module}._rebuild_from_type_v2", inner.func, tensor, inner.args, {"_has_been_cloned": True}))
        assert (type(got), got.attributes) == (TensorRef, {"_has_been_cloned": True})


def test_a_bare_storage_is_a_leaf():
    assert type(root(stored("0", 24, "UntypedStorage"))) is Storage


def test_wrapped_tensors_stay_records_with_the_tensor_inside():
    local = v2(stored("0", 6), 0, (6,), (1,))
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    dtensor = Global("torch.distributed.tensor", "DTensor")
    tree = call("torch._tensor._rebuild_from_type_v2", wrapper, dtensor, (dtensor,), (None, {"_local_tensor": local}))
    file = opened(torch_zip({"w": tree}, {"0": FLOATS}))
    assert type(file.root["w"]) is Record
    assert type(file.root["w"].args[3][1]["_local_tensor"]) is TensorRef
    assert file.unsupported == []


def test_tensors_that_cannot_be_moved_are_told_by_name():
    s, hooks = stored("0", 6), OrderedPairs()
    plain = v2(s, 0, (6,), (1,))
    layout = call("torch.serialization._get_layout", "torch.sparse_coo")
    scheme = (Global("torch", "per_tensor_affine"), 0.5, 3)
    tree = {
        "sparse": call("torch._utils._rebuild_sparse_tensor", layout, (plain, plain, (6,))),
        "deep": {
            "meta": call("torch._utils._rebuild_meta_tensor_no_storage", Global("torch", "float32"), (2,), (1,), False)
        },
        "nested": call("torch._utils._rebuild_nested_tensor", plain, plain, plain, plain),
        "device": call("torch._utils._rebuild_device_tensor_from_numpy", 1, Global("torch", "float32"), "xla", False),
        "subclass": call(
            "torch._tensor._rebuild_from_type_v2", plain.func, Global("torchao", "Packed"), plain.args, {}
        ),
        "bits": v2(s, 0, (6,), (1,), {"other": 1}),
        "quantized": call(
            "torch._utils._rebuild_qtensor", stored("1", 6, "QInt8Storage"), 0, (6,), (1,), scheme, False, hooks
        ),
    }
    file = opened(torch_zip(tree, {"0": FLOATS, "1": b"123456"}))
    told = dict(file.unsupported)
    assert set(told) == {"sparse", "deep.meta", "nested", "device", "subclass", "bits", "quantized"}
    assert told["quantized"] == "a quantized tensor"
    assert told["subclass"] == "a tensor of the class torchao.Packed"
    assert file.storages["1"].dtype.storage == "QInt8Storage"


def test_numpy_arrays_are_arrays():
    np = pytest.importorskip("numpy")
    pickled = pickle.dumps({"state": np.arange(3, dtype="<u4")}, 2)
    got = opened(torch_zip(pickled, {})).root["state"]
    assert type(got) is NumpyArray
    assert (got.dtype, got.data) == ("<u4", struct.pack("<3I", 0, 1, 2))


def over(*args, numel=6, cls="FloatStorage"):
    return v2(stored("0", numel, cls), *args)


UINT16 = (stored("0", 24, "UntypedStorage"), 0, (13,), (1,), False, OrderedPairs(), Global("torch", "uint16"))
WRONG = {
    "bad-shape": [over(0, (-1,), (1,)), over(0, (2,), ()), over(0, (1,) * 65, (1,) * 65)],
    "bad-offsets": [over(-1, (1,), (1,)), over(5, (2,), (-1,))],
    "size-overflow": [
        over(0, (2**40, 2**40), (0, 0)),
        over(0, (2**200,), (0,)),
        over(2**63, (1,), (1,)),
        over(0, (1,), (1,), numel=2**63),
    ],
    "tensor-outside-storage": [
        over(0, (7,), (1,)),
        over(6, (), ()),
        over(0, (2, 2), (5, 1)),
        call("torch._utils._rebuild_tensor_v3", *UINT16),
    ],
    "storage-missing": [v2(stored("9", 6), 0, (6,), (1,))],
    "storage-size-mismatch": [over(0, (5,), (1,), numel=5), over(0, (1,), (1,), cls="DoubleStorage")],
    "pickle-damaged": [over("0", (6,), (1,)), over(0, (6.0,), (1,)), over(0, (6,), (1,), numel="6")],
}


@pytest.mark.parametrize(("code", "number"), [(code, i) for code, cases in WRONG.items() for i in range(len(cases))])
def test_tensors_that_contradict_their_storages_are_damaged(code, number):
    data = torch_zip({"model": {"layer.weight": WRONG[code][number]}}, {"0": FLOATS})
    with pytest.raises(Damaged) as err:
        opened(data)
    assert err.value.code == code
    assert err.value.where.startswith("f.pt")
    if code not in ("pickle-damaged",) and number < 3:
        assert "model.layer.weight" in err.value.what + err.value.where


def test_what_is_wrong_can_be_collected():
    tree = {
        "a": v2(stored("0", 6), 0, (7,), (1,)),
        "b": v2(stored("1", 3), 0, (3,), (1,)),
        "c": v2(stored("2", 1), 0, (1,), (1,)),
    }
    problems = []
    file = opened(torch_zip(tree, {"0": FLOATS, "2": b"1234"}), problems)
    assert [(p.code, p.where) for p in problems] == [
        ("tensor-outside-storage", "f.pt, a"),
        ("storage-missing", "f.pt, b"),
    ]
    assert file.root["c"].storage.nbytes == 4


def test_one_storage_described_in_two_ways_is_damaged():
    with pytest.raises(Damaged, match="two ways"):
        root([v2(stored("0", 6), 0, (6,), (1,)), v2(stored("0", 3, "DoubleStorage"), 0, (3,), (1,))])


def test_empty_tensors_and_storages_are_whole():
    got = root(
        {"e": v2(stored("0", 0), 0, (0, 3), (3, 1)), "z": v2(stored("1", 6), 6, (0,), (1,))}, {"0": b"", "1": FLOATS}
    )
    assert (got["e"].numel, got["z"].numel) == (0, 0)


def test_storages_on_meta_are_told_not_damaged():
    file = opened(torch_zip({"m": v2(stored("0", 6, "FloatStorage", "meta"), 0, (6,), (1,))}, {}))
    assert file.unsupported == [("m", "a meta tensor, which has no data")]


def test_storage_classes_nobody_knows_stay_what_they_are():
    file = opened(torch_zip({"x": v2(stored("0", 6, "FancyStorage"), 0, (6,), (1,))}, {"0": FLOATS}))
    assert type(file.root["x"].args[0]) is PersistentId
    assert file.unsupported == [("x", "a tensor that torch 2.13 would not write so")]


def test_compressed_records_are_refused():
    data = torch_zip({"a": v2(stored("0", 6000), 0, (6000,), (1,))}, {"0": bytes(24000)}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(Unsupported) as err:
        opened(data)
    assert err.value.code == "archive-compressed"


def test_byte_orders():
    assert opened(torch_zip({}, {}, byteorder=b"little")).root == {}
    with pytest.raises(Unsupported, match="big-endian"):
        opened(torch_zip({}, {}, byteorder=b"big"))
    with pytest.raises(Damaged, match="neither"):
        opened(torch_zip({}, {}, byteorder=b"middle"))


def test_torchscript_is_told_apart_and_its_weights_are_reachable():
    module = Record(
        Global("__torch__.torch.nn", "Linear"),
        how="newobj",
        state={"weight": v2(stored("0", 6), 0, (6,), (1,))},
        has_state=True,
    )
    file = opened(torch_zip(module, {"0": FLOATS}, constants__pkl=dump(())))
    assert file.variant == "torchscript"
    assert type(file.root.state["weight"]) is TensorRef
    assert file.unknown == []


def test_bytes_after_the_pickle_are_damage():
    with pytest.raises(Damaged) as err:
        opened(torch_zip(dump({}) + b"more", {}))
    assert err.value.code == "trailing-bytes"


def test_a_zip_of_something_else_is_unrecognised():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", b"x")
    with pytest.raises(Unrecognised, match="no torch file"):
        opened(out.getvalue())


# Streams before torch 1.6


def stream(tree=None, storages=None, **options):
    tree = (
        {"a": v2(stored("140", 6), 1, (2, 2), (2, 1)), "b": v2(stored("99", 2, "LongStorage"), 0, (2,), (1,))}
        if tree is None
        else tree
    )
    storages = [("140", 6, FLOATS), ("99", 2, struct.pack("<2q", 7, 8))] if storages is None else storages
    return torch_stream(tree, storages, **options)


def test_a_stream_is_read_as_a_zip_is():
    data = stream()
    file = opened(data)
    assert file.variant == "legacy"
    assert tensor_bytes(file.root["a"], data) == struct.pack("<4f", 1, 2, 3, 4)
    assert tensor_bytes(file.root["b"], data) == struct.pack("<2q", 7, 8)


def test_old_views_lie_inside_their_storage():
    data = stream(
        {"v": v2(stored("140", 6, "FloatStorage", "cpu", ("141", 2, 3)), 1, (2,), (1,))}, [("140", 6, FLOATS)]
    )
    file = opened(data)
    assert tensor_bytes(file.root["v"], data) == struct.pack("<2f", 3, 4)
    with pytest.raises(Damaged, match="outside it"):
        opened(
            stream(
                {"v": v2(stored("140", 6, "FloatStorage", "cpu", ("141", 4, 3)), 1, (2,), (1,))}, [("140", 6, FLOATS)]
            )
        )


def test_a_whole_pickled_module_is_its_class():
    tree = {
        "m": PersistentId(("module", Global("torch.nn", "Linear"), "linear.py", "import os")),
        "a": v2(stored("140", 6), 0, (6,), (1,)),
    }
    assert opened(stream(tree, [("140", 6, FLOATS)])).root["m"] == Global("torch.nn", "Linear")


def test_a_stream_cut_anywhere_is_damaged():
    data = stream()
    for n in range(20, len(data)):
        with pytest.raises(Damaged) as err:
            opened(data[:n])
        assert err.value.code in ("pickle-truncated", "data-truncated"), n


STREAMS = {
    "trailing-bytes": stream() + b"x",
    "storage-size-mismatch": stream(storages=[("140", 5, FLOATS), ("99", 2, bytes(16))]),
    "storage-unknown": stream(storages=[("140", 6, FLOATS), ("7", 6, FLOATS)]),
    "storage-missing": stream(storages=[("140", 6, FLOATS)]),
    "pickle-damaged": stream(storages=[("140", 6, FLOATS), ("140", 6, FLOATS)]),
}


@pytest.mark.parametrize("code", STREAMS)
def test_a_stream_that_contradicts_itself_is_damaged(code):
    with pytest.raises(Damaged) as err:
        opened(STREAMS[code])
    assert err.value.code == code


def test_a_big_endian_stream_is_refused_by_name():
    with pytest.raises(Unsupported, match="big-endian"):
        opened(stream(little=False))


def test_only_the_front_of_a_stream_is_read(tmp_path):
    path = tmp_path / "large.pt"
    numel = 1 << 32
    tree = {"names": ["x" * 200_000], "a": v2(stored("1", numel), 0, (numel,), (1,))}
    path.write_bytes(torch_stream(tree, [("1", numel, b"")]))
    os.truncate(path, path.stat().st_size + 4 * numel)  # a hole of 16 GiB
    tracemalloc.start()
    with FileBytes(path) as reader:
        assert open_torch(reader).storages["1"].nbytes == 4 * numel
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


# What is no torch file


OTHERS = {
    "empty": (b"", Damaged, "empty-file", "empty"),
    "zeros": (bytes(2000), Damaged, "damaged", "zeros"),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        Damaged,
        "lfs-pointer",
        "LFS pointer",
    ),
    "html": (b"\n<!DOCTYPE html><html>404</html>", Damaged, "html-page", "web page"),
    "json": (b'{"a": 1}', Unrecognised, "unrecognised", "no torch file"),
    "text": (b"Just some words, as in a README.\n", Unrecognised, "unrecognised", "no torch file"),
    "noise": (b"\xff\xfe" + bytes(range(200)), Unrecognised, "unrecognised", "no torch file"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", Unrecognised, "unrecognised", "no torch file"),
    "zip cut": (torch_zip({}, {})[:-30], Damaged, "archive-truncated", "cut off"),
    "pickle cut": (pickle.dumps([1, 2, 3], 4)[:-1], Damaged, "pickle-truncated", "ends"),
    "newer protocol": (b"\x80\x07N.", Unsupported, "pickle-protocol", "protocol 7"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_torch_file_is_called_by_its_name(name):
    data, kind, code, text = OTHERS[name]
    with pytest.raises(kind, match=text) as err:
        opened(data)
    assert err.value.code == code
    assert err.value.where == "f.pt"


def test_tars_of_torch_0_1_are_named():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    with pytest.raises(Unsupported, match="tar file of torch"):
        opened(out.getvalue())


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_is_its_tree(protocol):
    file = opened(pickle.dumps({"epoch": 3, "betas": (0.9, 0.999)}, protocol))
    assert (file.variant, file.root, file.storages) == ("pickle", {"epoch": 3, "betas": (0.9, 0.999)}, {})
    with pytest.raises(CkptError):
        opened(pickle.dumps(1, protocol) + b"more")


def test_folders_and_missing_files_are_no_tracebacks(tmp_path):
    for path in (tmp_path, tmp_path / "absent", tmp_path / "nul\0"):
        with pytest.raises(Unrecognised):
            FileBytes(path)


def test_reads_outside_a_source_are_damage(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    with FileBytes(path, 2, 6) as source:
        assert (source.nbytes, source.read(1, 3)) == (4, b"345")
        for start, n in ((0, 5), (-1, 1), (4, 1), (0, 1 << 60)):
            with pytest.raises(Damaged):
                source.read(start, n)
    with pytest.raises(Damaged):
        FileBytes(path, 0, 11)


# Hostile bytes

TREE = {
    "a": v2(stored("0", 6), 1, (2, 2), (2, 1)),
    "o": OrderedPairs(k=[1.5, None, b"x"]),
    "s": Global("torch", "float32"),
}
SEEDS = [
    torch_zip(TREE, {"0": FLOATS}),
    stream(),
    dump({"a": [1, (2, 3)]}),
    pickle.dumps({"k": {1, 2}, "b": bytearray(b"x")}, 5),
]


@settings(max_examples=300)
@given(st.sampled_from(SEEDS), st.data())
def test_mutated_files_are_read_or_refused(seed, data):
    raw = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "double", "big"]))
        if how == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "cut" and len(raw) > 1:
            del raw[at : at + data.draw(st.integers(1, 8))]
        elif how == "double":
            raw[at:at] = raw[at : at + 20]
        else:
            raw[at : at + 4] = b"\xff\xff\xff\x7f"
        raw = raw or bytearray(b"x")
    read_or_refuse(lambda: opened(bytes(raw), []), "f.pt")


@settings(max_examples=200)
@given(st.binary(max_size=300), st.data())
def test_mutated_pickles_inside_a_good_zip_are_read_or_refused(noise, data):
    raw = bytearray(dump(TREE))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 10))] = noise
    read_or_refuse(lambda: opened(torch_zip(bytes(raw), {"0": FLOATS})), "f.pt")


def test_sizes_with_a_million_digits_take_no_time():
    huge = 1 << 3_000_000
    for tree in (
        v2(stored("0", 6), 0, (huge,) * 5, (1,) * 5),
        v2(stored("0", huge), 0, (1,), (1,)),
        v2(stored("0", 6), 0, (2**62,) * 100_000, (1,) * 100_000),
    ):
        begin = time.monotonic()
        with pytest.raises(Damaged):
            root({"a": tree})
        assert time.monotonic() - begin < 5


def test_large_claims_take_no_memory():
    data = torch_zip({"a": v2(stored("0", 2**60), 0, (2**60,), (1,))}, {"0": FLOATS})
    tracemalloc.start()
    with pytest.raises(Damaged):
        opened(data)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
