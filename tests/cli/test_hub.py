"""Sources on the Hub, through the command line and the API, by the real huggingface_hub against a loopback Hub."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import ckptctl
from ckptctl.core.errors import CkptError
from ckptctl.remote import hub as adapter
from ckptctl.remote import ranges
from tests.support.checkpoints import ckpt
from tests.support.commands import ckptctl as command
from tests.support.hub_reading import hub, safetensors, sharded, written  # noqa: F401 (a fixture)
from tests.support.saving import torch_bytes

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch):
    """No test waits long for another try."""
    monkeypatch.setattr(ranges, "pause_before", lambda tries: 0.01)
    monkeypatch.setattr(adapter, "pause_before", lambda tries: 0.01)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def plain(document, root, hub, name):  # noqa: F811
    """A document without the words that a Hub's repository and a folder do not share."""
    commit = hub.state.repo("model", name).find("main").oid
    text = json.dumps(document).replace(f"hf://{name}@{commit}", "ROOT").replace(str(root), "ROOT")
    return json.loads(text)


LAYOUTS = [
    "hf/llama-sharded",
    "hf/llama-bin-sharded",
    "torch/fsdp2_dp2_dcp",
    "torch/plain_zip",
    "deepspeed/zero2-dp2-bf16",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_said_of_a_repository_as_of_its_folder(hub, tmp_path, layout):  # noqa: F811
    root = ckpt(layout)
    files = files_of(root) if root.is_dir() else {root.name: root.read_bytes()}
    hub.add("model", "org/name", files)
    for commit in hub.state.repo("model", "org/name").commits.values():
        commit.tree.pop(".gitattributes", None)
    address = "hf://org/name" if root.is_dir() else f"hf://org/name/{root.name}"
    for line in (["inspect", "--tensors"], ["ls"], ["validate"], ["validate", "--level", "header"]):
        here, there = command(*line, str(root), "--json"), command(*line, address, "--json")
        assert there.code == here.code, there.out + there.err
        shown, said = plain(there.json, "/none", hub, "org/name"), plain(here.json, root, hub, "org/name")
        if not root.is_dir():
            shown = json.loads(json.dumps(shown).replace(f"ROOT/{root.name}", "ROOT"))
        assert shown == said
    for target in ("hf", "dcp"):
        flags = ["--to", target, *(["--no-optimizer"] if target == "hf" else [])]
        here = command("convert", str(root), str(tmp_path / f"here-{target}"), *flags)
        there = command("convert", address, str(tmp_path / f"there-{target}"), *flags)
        assert there.code == here.code, there.err
        if not here.code:
            assert files_of(tmp_path / f"there-{target}") == files_of(tmp_path / f"here-{target}")
    assert command("diff", str(root), address).code == 0
    assert command("diff", address, address).code == 0


def test_inspect_of_a_hundred_files_reads_their_headers_alone(hub):  # noqa: F811
    files = sharded(100, 256)
    total = sum(map(len, files.values()))
    hub.add("model", "org/name", files)
    hub.latency = 0.02
    took = []
    for _ in range(3):
        adapter.forget()
        hub.requests.clear()
        began = time.monotonic()
        done = command("inspect", "hf://org/name", "--json")
        took.append(time.monotonic() - began)
        assert done.code == 0, done.out
        assert done.json["kinds"]["weight"]["tensors"] == 200
        headers = hub.asked("GET", "/content/")
        assert {r.range for r in headers} == {"bytes=0-65535"}
        assert len(headers) == 100
        assert hub.sent < 100 * 65536 + 40_000 < total / 3
        assert all(r.path.startswith(("/api/models/org/name", "/org/name/resolve/", "/content/")) for r in hub.requests)
        if took[-1] < 3:
            break
    if os.getloadavg()[0] < 2 * len(os.sched_getaffinity(0)):
        assert min(took) < 3


def test_conversion_reads_each_value_once_and_streams(hub, tmp_path):  # noqa: F811
    files = sharded(4, 4096)
    hub.add("model", "org/name", files)
    done = command("convert", "hf://org/name", str(tmp_path / "out"), "--to", "dcp", "--memory", "32MiB", "--jobs", "3")
    assert done.code == 0, done.err
    assert hub.sent < sum(map(len, files.values())) + 4 * 65536 + 100_000
    equal = command("diff", str(written(files, tmp_path / "here")), str(tmp_path / "out"), "--json")
    assert equal.json["equal"]


def test_an_interrupted_conversion_goes_on_and_reads_no_value_again(hub, tmp_path):  # noqa: F811
    files = sharded(6, 4096)
    commit = hub.add("model", "org/name", files)
    line = [
        "convert",
        "hf://org/name",
        str(tmp_path / "out"),
        "--to",
        "hf",
        "--memory",
        "32MiB",
        "--jobs",
        "1",
        "--json",
    ]
    hub.fail("GET", "/resolve/.*model-00005", 404, times=99)
    assert command("inspect", f"hf://org/name@{commit}").code == 3  # its header is not there either
    hub.faults.clear()
    adapter.forget()
    assert command("inspect", "hf://org/name").code == 0  # the headers are kept now
    fault = hub.fail(
        "GET",
        "/content/" + hub.state.repo("model", "org/name").find("main").tree["model-00005-of-00006.safetensors"].sha256,
        404,
        times=99,
    )
    hub.fail("GET", "/resolve/.*model-00005", 404, times=99)
    stopped = command(*line)
    assert stopped.code == 3
    assert stopped.error["code"] == "missing-file"
    assert not (tmp_path / "out").exists()
    assert fault
    hub.faults.clear()
    hub.requests.clear()
    done = command(*line, "--resume")
    assert done.code == 0, done.out
    assert done.json["result"]["resumed_bytes"] > 3_000_000
    assert hub.sent < 4 * 4096 * 1024
    assert command("diff", str(written(files, tmp_path / "here")), str(tmp_path / "out")).code == 0


def test_resuming_another_revision_is_refused(hub, tmp_path):  # noqa: F811
    files = sharded(3, 4096)
    first = hub.add("model", "org/name", files)
    line = ["convert", "hf://org/name", str(tmp_path / "out"), "--to", "hf", "--json"]
    assert command("inspect", "hf://org/name").code == 0
    hub.fail("GET", "model-00003|/content/", 404, times=3)
    assert command(*line, "--jobs", "1", "--memory", "32MiB").code == 3
    hub.faults.clear()
    second = hub.add("model", "org/name", {"README.md": b"# new"})
    done = command(*line, "--jobs", "1", "--memory", "32MiB", "--resume")
    assert done.code == 3
    assert done.error["code"] == "source-changed"
    assert first in done.error["why"]
    assert second in done.error["why"]
    line[1] = f"hf://org/name@{first}"
    again = command(*line, "--jobs", "1", "--memory", "32MiB", "--resume")
    assert again.code == 0, again.out


def test_all_is_read_of_the_commit_that_was_the_revision_at_the_start(hub):  # noqa: F811
    files = sharded(2, 64, seed=1)
    commit = hub.add("model", "org/name", files)
    with ckptctl.open("hf://org/name") as checkpoint:
        hub.add("model", "org/name", sharded(2, 64, seed=2))
        values = checkpoint["layers.1.weight"].numpy()
        assert commit in repr(checkpoint)
    expected = np.frombuffer(files["model-00001-of-00002.safetensors"][-(64 * 1024 + 28) : -28], "<f4").reshape(64, 256)
    assert values.tobytes() == expected.tobytes()
    with ckptctl.open("hf://org/name") as checkpoint:
        assert checkpoint["layers.1.weight"].numpy().tobytes() != expected.tobytes()
    with ckptctl.open(f"hf://org/name@{commit}") as checkpoint:
        assert checkpoint["layers.1.weight"][3:5].tobytes() == expected[3:5].tobytes()


def test_revisions_kinds_and_paths(hub, tmp_path):  # noqa: F811
    one, two = (safetensors({"w": np.full((3, 4), v, np.float32)}) for v in (1, 2))
    hub.add("dataset", "org/runs", {"run/step_1/model.safetensors": one, "run/step_2/model.safetensors": two})
    repo = hub.state.repo("dataset", "org/runs")
    pull = hub.state.open_pull(repo, "more")
    hub.state.commit(
        repo,
        f"refs/pr/{pull.number}",
        "more",
        "",
        {
            "extra/model.safetensors": hub.state.large(
                next(e.sha256 for p, e in repo.find("main").tree.items() if "step_1" in p)
            )
        },
        [],
    )
    repo.tags["v1"] = repo.find("main").oid
    top = "hf://datasets/org/runs"
    for address, value in (
        (f"{top}/run/step_1", 1),
        (f"{top}@v1/run/step_1", 1),
        (f"{top}/run", 2),
        (f"{top}/run/step_2/model.safetensors", 2),
        (f"{top}@refs/pr/1/extra", 1),
        (f"{top}@refs%2Fpr%2F1/extra/model.safetensors", 1),
    ):
        with ckptctl.open(address) as checkpoint:
            assert checkpoint["w"].numpy().tolist() == [[value] * 4] * 3
    with ckptctl.open(f"{top}/run", step="1") as checkpoint:
        assert checkpoint["w"].numpy()[0, 0] == 1
    assert command("diff", f"{top}/run/step_1", f"{top}/run/step_2").code == 1


@pytest.mark.parametrize(
    "line",
    [
        ["show", "hf://org/name", "w"],
        ["reshard", "hf://org/name", "OUT", "--max-shard-size", "1MB"],
        ["strip", "hf://org/name", "OUT"],
        ["validate", "hf://org/name", "--model-config", "hf://org/name"],
        ["convert", "LOCAL", "OUT", "--to", "hf", "--model-config", "hf://org/name"],
        ["convert", "LOCAL", "OUT", "--to", "hf", "--merge-adapter", "hf://org/name"],
    ],
    ids=lambda line: line[0],
)
def test_what_does_not_read_from_the_hub_says_so(hub, tmp_path, line):  # noqa: F811
    files = {"model.safetensors": safetensors({"w": np.ones((3, 4), np.float32)})}
    hub.add("model", "org/name", files)
    local = written(files, tmp_path / "local")
    line = [{"OUT": str(tmp_path / "out"), "LOCAL": str(local)}.get(word, word) for word in line]
    done = command(*line)
    assert done.code in (2, 3)
    assert "hf://org/name" in done.err
    assert not hub.asked("GET", "/resolve/|/content/")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--level", "values"], ["--checksums"]])
def test_validating_every_byte_of_a_repository_is_wrong_usage(hub, flags):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4))
    done = command("validate", "hf://org/name", *flags, "--json")
    assert done.code == 2
    assert "--level" in done.error["fix"]
    assert not hub.sent


@pytest.mark.parametrize("level", ["header", "structure"])
def test_a_folder_is_compared_with_what_the_hub_lists(hub, tmp_path, level):  # noqa: F811
    files = {**sharded(2, 300), "tokenizer.json": b'{"a": 1}'}
    hub.add("model", "org/name", files)
    line = [
        "validate",
        str(written(files, tmp_path / "here")),
        "--level",
        level,
        "--against",
        "hf://org/name",
        "--json",
    ]
    assert command(*line).code == 0
    assert not hub.asked("GET", "/resolve/|/content/")
    large, small = tmp_path / "here" / "model-00002-of-00002.safetensors", tmp_path / "here" / "tokenizer.json"
    data = bytearray(large.read_bytes())
    data[-1] ^= 1
    large.write_bytes(data)
    small.write_bytes(b'{"a": 2}')
    (tmp_path / "here" / "config.json").unlink()
    done = command(*line)
    assert done.code == 1
    found = {(f["kind"], f["where"]["file"]) for f in done.json["findings"]}
    assert {("checksum-mismatch", large.name), ("checksum-mismatch", small.name)} <= found
    assert ("file-missing-beside", "config.json") in found
    assert "hf://org/name@" in next(f["why"] for f in done.json["findings"] if f["kind"] == "file-missing-beside")
    assert not hub.asked("GET", "/resolve/|/content/")
    small.write_bytes(b"{}")
    assert "2 bytes" in str(command(*line).json["findings"])


def test_two_repositories_are_compared_by_their_hashes(hub):  # noqa: F811
    files = sharded(2, 300)
    hub.add("model", "org/one", files)
    hub.add("model", "org/two", files)
    line = ["validate", "hf://org/one", "--against", "hf://org/two", "--json"]
    assert command(*line).code == 0
    hub.add("model", "org/two", {"config.json": b"[]"})
    done = command(*line)
    assert [(f["kind"], f["where"]["file"]) for f in done.json["findings"]] == [("checksum-mismatch", "config.json")]


@pytest.mark.parametrize("address", ["hf://", "hf://org/name@", "hf://org/na me", "hf://org/name/../x"])
def test_an_address_that_is_none_asks_nobody(hub, address):  # noqa: F811
    done = command("inspect", address, "--json")
    assert done.code == 2
    assert done.error["code"] == "hub-address"
    assert not hub.requests


def test_what_is_not_there(hub):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4))
    for address, code in (
        ("hf://org/none", 3),
        ("hf://org/name@none", 3),
        ("hf://org/name/none", 3),
        ("hf://org/name/none/deep", 3),
        ("hf://datasets/org/name", 3),
    ):
        done = command("inspect", address, "--json")
        assert done.code == code, done.out
        assert done.error["code"] == "unrecognised"
        assert done.error["fix"]


def test_private_repositories_need_a_token_which_is_never_shown(hub, monkeypatch, capfd):  # noqa: F811
    hub.add("model", "org/secret", sharded(2, 8), private=True)
    for flags in ([], ["--json"]):
        done = command("inspect", "hf://org/secret", *flags)
        assert done.code == 0, done.err
        assert hub.token not in done.out + done.err
    assert all(r.token for r in hub.requests if r.host.startswith("127"))
    assert not any(r.token for r in hub.requests if r.host.startswith("localhost"))
    for token, code in (("hf_another", 4), ("", 4)):
        monkeypatch.setenv("HF_TOKEN", token)
        done = command("inspect", "hf://org/secret", "--json")
        assert done.code == code, done.out
        assert done.error["code"] == "credentials"
        assert "HF_TOKEN" in done.error["fix"]
        assert not token or token not in done.out + done.err
    out, err = capfd.readouterr()
    assert hub.token not in out + err


def test_offline_mode_asks_nobody(hub, monkeypatch):  # noqa: F811
    from huggingface_hub import constants

    hub.add("model", "org/name", sharded(1, 4))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = command("inspect", "hf://org/name", "--json")
    assert done.code == 3
    assert done.error["code"] == "hub-offline"
    assert "HF_HUB_OFFLINE" in done.error["what"]
    assert not hub.requests


def test_files_in_the_hubs_cache_are_read_there_where_the_commit_is_the_same(hub):  # noqa: F811
    from huggingface_hub import snapshot_download

    hub.add("model", "org/name", sharded(3, 300))
    snapshot_download("org/name")
    hub.requests.clear()
    done = command("validate", "hf://org/name", "--json")
    assert done.code == 0, done.out
    assert not hub.asked("GET", "/resolve/|/content/")
    hub.add("model", "org/name", {"README.md": b"# new"})
    assert command("validate", "hf://org/name", "--json").code == 0
    assert hub.asked("GET", "/content/")


def test_a_conversion_goes_on_whether_the_hubs_cache_has_the_files_by_then_or_not(hub, tmp_path):  # noqa: F811
    from huggingface_hub import snapshot_download

    files = sharded(3, 4096)
    hub.add("model", "org/name", files)
    line = [
        "convert",
        "hf://org/name",
        str(tmp_path / "out"),
        "--to",
        "hf",
        "--jobs",
        "1",
        "--memory",
        "32MiB",
        "--json",
    ]
    assert command("inspect", "hf://org/name").code == 0
    third = hub.state.repo("model", "org/name").find("main").tree["model-00003-of-00003.safetensors"]
    hub.fail("GET", f"model-00003|/content/{third.sha256}", 404, times=99)
    assert command(*line).code == 3
    hub.faults.clear()
    snapshot_download("org/name")
    adapter.forget()
    hub.requests.clear()
    done = command(*line, "--resume")
    assert done.code == 0, done.out
    assert done.json["result"]["resumed_bytes"]
    assert not hub.sent
    assert command("diff", str(written(files, tmp_path / "here")), str(tmp_path / "out")).code == 0


def test_large_torch_files_are_read_by_their_directories_and_pickles(hub, tmp_path):  # noqa: F811
    rng = np.random.default_rng(3)
    state = {f"layers.{i}.weight": rng.standard_normal((300, 256), np.float32) for i in range(20)}
    data = torch_bytes(state)
    hub.add("model", "org/name", {"pytorch_model.bin": data, "config.json": b"{}"})
    hub.latency = 0.01
    assert len(data) > 6_000_000
    done = command("inspect", "hf://org/name", "--tensors", "--json")
    assert done.code == 0, done.out
    assert len(done.json["tensors"]) == 20
    assert hub.sent < 400_000
    with ckptctl.open("hf://org/name") as checkpoint:
        assert checkpoint["layers.7.weight"][5].tobytes() == state["layers.7.weight"][5].tobytes()
    assert hub.sent < 600_000


def test_what_the_cache_holds_in_part_is_not_taken(hub):  # noqa: F811
    from huggingface_hub import hf_hub_download

    hub.add("model", "org/name", sharded(3, 300))
    path = Path(hf_hub_download("org/name", "model-00002-of-00003.safetensors"))
    path.resolve().write_bytes(b"short")
    hub.requests.clear()
    assert command("inspect", "hf://org/name", "--json").code == 0
    assert len({r.path for r in hub.asked("GET", "/content/")}) == 3


def answered(body: bytes, kind: str = "application/json"):
    return lambda handler: handler.reply(body, 200, {"Content-Type": kind})


_ENTRY = b'{"type": "file", "path": "%b", "oid": "x", "size": 5}'
TREES = {
    "a page": b"<html>log in</html>",
    "nothing": b"",
    "no list": b'{"a": 1}',
    "numbers": b"[1, 2]",
    "no size": b'[{"type": "file", "path": "a", "oid": "x"}]',
    "a negative size": b'[{"type": "file", "path": "a", "oid": "x", "size": -5}]',
    "a size of words": b'[{"type": "file", "path": "a", "oid": "x", "size": "many"}]',
    "a size of a fraction": b'[{"type": "file", "path": "a", "oid": "x", "size": 1e400}]',
    "a huge size": b'[{"type": "file", "path": "a", "oid": "x", "size": 99999999999999999999999}]',
    "a way out": b'[{"type": "file", "path": "../../etc/a", "oid": "x", "size": 5}]',
    "an absolute path": b'[{"type": "file", "path": "/etc/a", "oid": "x", "size": 5}]',
    "one path twice": b"[" + _ENTRY % b"a" + b"," + _ENTRY % b"a" + b"]",
    "a file that is a folder": b"[" + _ENTRY % b"a" + b"," + _ENTRY % b"a/b" + b"]",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("body", TREES.values(), ids=TREES)
def test_a_list_of_files_that_is_none_is_an_error(hub, body):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4))
    hub.fail("GET", "/tree/", answered(body), times=99)
    done = command("inspect", "hf://org/name", "--json")
    assert done.code == 3
    assert done.error["code"] in ("hub-answer", "hub-file-not-placed", "hub-unreachable"), done.out
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "body",
    [b"<html>log in</html>", b"", b"[]", b'{"id": "x"}', b'{"id": "x", "sha": 5}', b'{"id": "x", "sha": "../.."}'],
)
def test_a_description_that_is_none_is_an_error(hub, body):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4))
    hub.fail("GET", "/api/models/org/name$", answered(body), times=99)
    done = command("inspect", "hf://org/name", "--json")
    assert done.code == 3
    assert done.error["code"] == "hub-answer"


def test_a_hub_that_is_busy_is_asked_again(hub):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4))
    hub.fail("GET", "/api/models/org/name$", 503, times=2)
    hub.fail("GET", "/resolve/", 429, times=2, headers={})
    assert command("inspect", "hf://org/name").code == 0


def test_a_hub_that_is_not_there_is_an_error(hub, monkeypatch):  # noqa: F811
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = command("inspect", "hf://org/name", "--json")
    assert done.code == 3
    assert done.error["code"] == "hub-unreachable"


def test_a_file_that_is_damaged_is_named_by_its_address(hub):  # noqa: F811
    files = sharded(2, 8)
    files["model-00002-of-00002.safetensors"] = b"\xff" * 100
    commit = hub.add("model", "org/name", files)
    done = command("inspect", "hf://org/name", "--json")
    assert done.code == 3
    assert "/tmp" not in done.out
    assert "model-00002-of-00002.safetensors" in done.error["where"]
    checked = command("validate", "hf://org/name", "--json")
    assert checked.code == 1
    assert checked.json["checkpoints"][0]["path"] == f"hf://org/name@{commit}"


def test_a_finding_s_place_is_an_address_in_sarif(hub):  # noqa: F811
    commit = hub.add("model", "org/name", {"a b.safetensors": b"\xff" * 100})
    done = command("validate", "hf://org/name/a b.safetensors", "--output", "sarif")
    (result,) = json.loads(done.out)["runs"][0]["results"][:1]
    where = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert where == f"hf://org/name%40{commit}/a%20b.safetensors"


def test_nothing_of_it_stays_in_the_temporary_folder(hub, tmp_path, monkeypatch):  # noqa: F811
    import tempfile

    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    hub.add("model", "org/name", sharded(2, 8))
    assert command("inspect", "hf://org/name").code == 0
    assert len(list(folder.iterdir())) == 1
    adapter.forget()
    assert not list(folder.iterdir())


def test_values_that_cannot_be_read_any_more_are_an_error_of_the_api(hub):  # noqa: F811
    hub.add("model", "org/name", sharded(1, 4096))
    with ckptctl.open("hf://org/name") as checkpoint:
        hub.fail("GET", "/", 404, times=99)
        with pytest.raises(CkptError) as raised:
            checkpoint["layers.1.weight"].numpy()
        assert raised.value.where.startswith("hf://org/name@")
