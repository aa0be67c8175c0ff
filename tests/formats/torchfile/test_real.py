"""Every torch file of the real checkpoints: opens, holds the truth, and comes back byte for byte."""

import itertools
from pathlib import Path

import pytest

from ckptctl.core.values import TensorRef
from ckptctl.formats.bytesource import FileBytes
from ckptctl.formats.pickles.build import load
from ckptctl.formats.pickles.emit import StorageKeys, dump
from ckptctl.formats.pickles.walk import path_text, walk
from ckptctl.formats.torchfile.read import CALLS, arrays, open_torch
from ckptctl.formats.torchfile.rebuild import Storages
from tests.support.checkpoints import FIXTURES, SHARED, digest, fixture, truth
from tests.support.torchfiles import tensor_bytes
from tests.support.trees import difference

pytestmark = pytest.mark.real


def torch_files(root: Path) -> list[str]:
    """The files below root that begin as a zip or a pickle does."""
    found = []
    for path in sorted(root.rglob("*")):
        if (
            path.is_file()
            and "broken" not in path.parts
            and path.suffix not in (".distcp", ".safetensors", ".json", ".npz")
        ):
            with path.open("rb") as file:
                head = file.read(4)
            if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] <= b"\x05"):
                found.append(str(path.relative_to(root)))
    return found


def check(path: Path) -> None:
    with FileBytes(path) as reader:
        opened = open_torch(reader)
        assert opened.unsafe == []
        assert opened.unknown == []
        assert opened.unsupported == []
        order = StorageKeys()
        data = dump(opened.root, order)
        storages = Storages("again")
        again = load(data, "again", persistent=storages, rebuild=CALLS, finish=arrays.FINISH)
        assert difference(again.tree, opened.root) == ""
        assert dump(again.tree, StorageKeys()) == data
        assert sorted(storages.by_key, key=int) == [str(k) for k in range(len(order.order))]
        if opened.variant == "zip":
            assert opened.directory is not None
            record = opened.directory.record("data.pkl")
            assert data == reader.read(record.start, record.nbytes)
        places = sorted((s.start_byte, s.start_byte + s.nbytes) for s in opened.storages.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        assert not places or (places[0][0] > 0 and places[-1][1] <= reader.nbytes)


@pytest.mark.parametrize("name", torch_files(FIXTURES))
def test_a_torch_file_opens_and_comes_back_byte_for_byte(name):
    check(FIXTURES / name)


def test_all_torch_files_of_the_larger_collection_do_too():
    if not SHARED.exists():
        pytest.skip("needs ../shared/checkpoints, which is not part of the repository")
    names = torch_files(SHARED)
    assert len(names) > 100
    for name in names:
        check(SHARED / name)


SAFETENSORS = {"float32": "F32", "float64": "F64", "int64": "I64", "bfloat16": "BF16", "uint8": "U8"}


@pytest.mark.parametrize(("layout", "variant"), [("torch/plain_zip", "zip"), ("torch/plain_legacy", "legacy")])
def test_the_weights_are_those_of_the_run(layout, variant):
    (path,) = (fixture(layout) / "ckpt").rglob("*.pt")
    data = path.read_bytes()
    opened = open_torch(FileBytes(path))
    assert opened.variant == variant
    found = {}
    for where, node in walk(opened.root):
        if isinstance(node, TensorRef):
            found[path_text(where)] = digest(SAFETENSORS[node.dtype.name], node.shape, tensor_bytes(node, data))
    expected = truth(layout)["model"]
    assert expected
    for name, want in expected.items():
        assert found[f"model.{name}"] == want


def test_a_range_of_a_file_is_a_file_of_its_own(tmp_path):
    (path,) = (fixture("torch/plain_zip") / "ckpt").rglob("*.pt")
    data = path.read_bytes()
    (tmp_path / "held.distcp").write_bytes(b"x" * 12345 + data + b"tail")
    with FileBytes(tmp_path / "held.distcp", 12345, 12345 + len(data)) as inner:
        opened = open_torch(inner)
    whole = open_torch(FileBytes(path))
    assert {k: s.start_byte for k, s in opened.storages.items()} == {k: s.start_byte for k, s in whole.storages.items()}


BROKEN = {
    "bin-storage-missing": ("storage-missing", ", b", "20 bytes"),
    "bin-storage-short": ("storage-size-mismatch", ", b", "20 bytes wanted, 12 there"),
    "bin-truncated": ("archive-truncated", "pytorch_model.bin", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_files_give_their_own_error(name):
    from ckptctl.core.errors import Damaged

    code, where, why = BROKEN[name]
    with pytest.raises(Damaged) as err:
        open_torch(FileBytes(fixture(f"broken/{name}") / "pytorch_model.bin"))
    assert err.value.code == code
    assert err.value.where.endswith(where)
    assert why in err.value.why


@pytest.mark.parametrize(
    ("name", "asked"),
    [("bin-runs-code", "io.open"), ("bin-runs-system", "posix.system"), ("bin-raw-pickle-runs-code", "io.open")],
)
def test_hostile_files_run_nothing_and_are_named(name, asked, tmp_path, monkeypatch):
    from ckptctl.core.errors import Unsafe

    monkeypatch.chdir(tmp_path)
    opened = open_torch(FileBytes(fixture(f"broken/{name}") / "pytorch_model.bin"))
    assert list(tmp_path.iterdir()) == []
    assert [str(f.name) for f in opened.unsafe] == [asked]
    with pytest.raises(Unsafe, match=asked) as err:
        opened.require_safe()
    assert err.value.code == "pickle-calls-code"
    assert err.value.where.endswith("pytorch_model.bin")


def test_a_class_that_nobody_knows_is_named_and_harmless():
    opened = open_torch(FileBytes(fixture("broken/bin-unknown-class") / "pytorch_model.bin"))
    opened.require_safe()
    assert [str(f.name) for f in opened.unknown] == ["torch._utils._rebuild_tensor_vX"]


def test_views_of_one_storage_share_it():
    path = fixture("broken/ok-bin-shared-storage") / "pytorch_model.bin"
    opened = open_torch(FileBytes(path))
    refs = [node for _, node in walk(opened.root) if isinstance(node, TensorRef)]
    assert len({id(ref.storage) for ref in refs}) < len(refs)
