"""DCP folders: the conformance suite, over every layout that torch's own writers made."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest

from tests.support.checkpoints import fixture
from tests.support.format_suite import Fault, FormatSuite, Sample
from tests.support.plain import _Unpickler

SAMPLES = [
    Sample("torch/fsdp2_dp2_dcp", 2),
    Sample("torch/fsdp2_dp4_dcp", 4),
    Sample("torch/fsdp2_dp2_bf16_dcp", 2),
    Sample("torch/fsdp2_dp2_flatoptim_dcp", 2),
    Sample("torch/fsdp2_tp2x2_dcp", 4),
    Sample("torch/hsdp_2x2_dcp", 4),
    Sample("torch/dcp_file_per_item", 2),
    Sample("torch/dcp_no_dist", 1),
    Sample("torch/dcp_zstd", 2, "zstd"),
    Sample("torch/dcp_rank_local", 2, "rank-local"),
    Sample("torch/dcp_safetensors", 2, "safetensors"),
    Sample("torch/dcp_safetensors_bytes", 2, "safetensors"),
]
SMALL = "torch/hsdp_2x2_dcp"


def cut(name, by):
    def damage(path):
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:by])

    return damage


def remove(name):
    return lambda path: (path / name).unlink()


def replace(name, data):
    return lambda path: (path / name).write_bytes(data)


class RunsCode:
    def __reduce__(self):
        return (print, ("this must not be printed",))


FAULTS = [
    Fault("a data file is missing", SMALL, remove("__1_0.distcp"), "missing-file", "__1_0.distcp"),
    Fault("a data file ends early", SMALL, cut("__1_0.distcp", -9000), "data-truncated", "__1_0.distcp"),
    Fault("a data file is empty", SMALL, cut("__0_0.distcp", 0), "data-truncated", "__0_0.distcp"),
    Fault("a data file holds zeros", SMALL, replace("__1_0.distcp", bytes(200_000)), "damaged", "zeros"),
    Fault("the metadata ends early", SMALL, cut(".metadata", -100), "pickle-truncated", ".metadata"),
    Fault("the metadata is empty", SMALL, cut(".metadata", 0), "pickle-truncated", ".metadata"),
    Fault("the metadata is text", SMALL, replace(".metadata", b"{}"), "pickle-damaged", ".metadata"),
    Fault(
        "the metadata is another pickle", SMALL, replace(".metadata", pickle.dumps([1, 2])), "metadata-damaged", "list"
    ),
    Fault(
        "the metadata would run code",
        SMALL,
        replace(".metadata", pickle.dumps({"state_dict_metadata": {}, "storage_data": {}, "x": RunsCode()})),
        "pickle-calls-code",
        "print",
    ),
    Fault(
        "a compressed item is no frame",
        "torch/dcp_zstd",
        replace("__1_0.distcp", b"\x01" * 200_000),
        "archive-truncated",
        "zstd",
    ),
]


class TestDcp(FormatSuite):
    format = "dcp"

    @pytest.fixture(params=SAMPLES, ids=lambda s: s.name.split("/")[1])
    def sample(self, request):
        return request.param

    @pytest.fixture(params=FAULTS, ids=str)
    def fault(self, request):
        return request.param

    def gaps(self, path):
        """Everything but `data/0` of the items of tensors that belong to model or optimizer, by zipfile."""
        files = [path / ".metadata"] if (path / ".metadata").exists() else sorted(path.glob("__*.metadata"))
        trees = [_Unpickler(f.read_bytes(), {}).load().state for f in files]
        meta = {"state_dict_metadata": {n: m for t in trees for n, m in t["state_dict_metadata"].items()}}
        out, seen = {}, set()
        for index, info in (item for t in trees for item in t["storage_data"].items()):
            s = info.state
            if s.get("transform_descriptors"):
                return None
            again = (index.state["fqn"], index.state.get("offset")) in seen
            seen.add((index.state["fqn"], index.state.get("offset")))
            start, stop = s["offset"], s["offset"] + s["length"]
            if (path / s["relative_path"]).read_bytes()[
                start + 8 : start + 9
            ] == b"{":  # a blob: its header is no tensor
                head = int.from_bytes((path / s["relative_path"]).read_bytes()[start : start + 8], "little")
                out.setdefault(s["relative_path"], []).append((start, start + 8 + head))
                continue
            runs = out.setdefault(s["relative_path"], [])
            fqn = index.state["fqn"]
            whole = (path / s["relative_path"]).read_bytes()
            with zipfile.ZipFile(io.BytesIO(whole[start:stop])) as archive:
                data = [i for i in archive.infolist() if i.filename.endswith("data/0")]
                mine = ("model" in fqn or "optim" in fqn) and type(
                    meta["state_dict_metadata"][fqn]
                ).__name__ != "BytesStorageMetadata"
                if not mine or not data or again:
                    runs.append((start, stop))
                    continue
                at = data[0].header_offset
                head = whole[start + at : start + at + 30]
                first = start + at + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
                runs += [(start, first), (first + data[0].file_size, stop)]
        return {name: sorted({r for r in runs if r[0] < r[1]}) for name, runs in out.items()}


def test_the_samples_are_all_dcp_folders_of_the_repository():
    there = {f"torch/{p.parent.parent.name}" for p in fixture("torch").glob("*/ckpt/*metadata")}
    assert there == {s.name for s in SAMPLES}
