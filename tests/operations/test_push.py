"""push, with the real huggingface_hub client against a Hub on the loopback; what is there is read from the server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import ROOT, ckpt, fixture
from tests.support.commands import ckptctl, document, good, refused
from tests.support.hub_client import hub, start, use  # noqa: F401 (a fixture)
from tests.support.hub_server import TOKEN, HubServer

REPO = "org/model"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def model(folder: Path, shards: int = 3, rows: int = 8, seed: int = 0) -> Path:
    """A sharded Hugging Face folder of an unknown family, written by hand."""
    folder.mkdir(parents=True)
    rng, weight_map = np.random.default_rng(seed), {}
    for number in range(shards):
        name, file = f"layer.{number}.weight", f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        value = rng.standard_normal((rows, 64), dtype=np.float32)
        head = json.dumps({name: {"dtype": "F32", "shape": [rows, 64], "data_offsets": [0, value.nbytes]}}).encode()
        head += b" " * (-len(head) % 8)
        (folder / file).write_bytes(len(head).to_bytes(8, "little") + head + value.tobytes())
        weight_map[name] = file
    index = {"metadata": {"total_size": shards * rows * 256}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return model(tmp_path / "small")


def same_but_card(local: Path, hub: HubServer, name: str = REPO, revision: str = "main") -> bool:  # noqa: F811
    there = hub.files(name, revision)
    assert "README.md" in there
    mine = files_of(local)
    return {k: v for k, v in there.items() if k != "README.md"} == {k: v for k, v in mine.items() if k != "README.md"}


def test_push_sends_every_file_and_a_second_push_none(hub, small, tmp_path):  # noqa: F811
    done = document("push", small, REPO)
    assert same_but_card(small, hub)
    assert done["sent"]["files"] == 5
    assert done["verified"] == {"files": 5, "bytes": done["sent"]["bytes"]}
    assert done["commits"] == 1
    assert {f["path"]: f["sha256"] for f in done["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in hub.files(REPO).items()
    }
    received, commits = hub.received, len(hub.state.repo("model", REPO).history("main"))
    again = document("push", small, REPO)
    assert again["sent"] == {"files": 0, "bytes": 0}
    assert again["there"]["files"] == 5
    assert hub.received == received
    assert len(hub.state.repo("model", REPO).history("main")) == commits
    assert again["commit"] == done["commit"]


def test_what_was_pushed_is_downloaded_byte_for_byte(hub, small, tmp_path):  # noqa: F811
    from huggingface_hub import snapshot_download

    good("push", small, REPO)
    got = Path(snapshot_download(REPO, local_dir=tmp_path / "got"))
    loaded = {k: v for k, v in files_of(got).items() if not k.startswith((".cache/", ".gitattributes", "README.md"))}
    assert loaded == files_of(small)


def test_large_files_go_in_parts_and_a_part_that_fails_is_sent_again(hub, tmp_path):  # noqa: F811
    folder = model(tmp_path / "large", shards=1, rows=10_000)
    hub.fail("PUT", "/part/2$", 503)
    hub.fail("POST", "/preupload/", 429)
    hub.fail("POST", "objects/batch", 500)
    good("push", folder, REPO)
    assert same_but_card(folder, hub)
    assert len(hub.asked("PUT", "/part/2$")) == 2


@pytest.mark.parametrize("act", [408, 429, 503, 520, "drop", "lose"])
def test_a_commit_that_fails_or_whose_answer_is_lost_is_made_once(hub, small, act):  # noqa: F811
    hub.fail("POST", "/commit/", act)
    done = document("push", small, REPO)
    assert same_but_card(small, hub)
    assert len(hub.state.repo("model", REPO).history("main")) == 2  # the repository's first, and ours
    assert done["commits"] == 1
    assert len(hub.asked("POST", "/commit/")) == (1 if act == "lose" else 2)


def test_a_server_that_stays_busy_is_given_up_after_five_tries_and_the_same_command_goes_on(hub, small):  # noqa: F811
    fault = hub.fail("POST", "/commit/", 503, times=99, words="under maintenance")
    error = refused("push", small, REPO, code=5)
    assert error["code"] == "hub-unreachable"
    assert "under maintenance" in error["why"]
    assert len(hub.asked("POST", "/commit/")) == 5
    fault.times = 0
    sent = sum(r.received for r in hub.asked("PUT", "content"))
    good("push", small, REPO)
    assert same_but_card(small, hub)
    assert sum(r.received for r in hub.asked("PUT", "content")) == sent


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/commit/", 403, 4),
        ("POST", "/commit/", 400, 3),
        ("POST", "/repos/create", 402, 3),
        ("POST", "/preupload/", 403, 4),
        ("POST", "objects/batch", 413, 3),
        ("PUT", "/content/", 403, 4),
    ],
)
def test_what_stays_refused_stops_at_once_with_the_servers_words(hub, small, method, path, status, code):  # noqa: F811
    hub.fail(method, path, status, times=99, words="storage limit of the free plan reached")
    error = refused("push", small, REPO, code=code)
    assert "storage limit of the free plan reached" in error["why"]
    assert len({r.path for r in hub.asked(method, path)}) == len(hub.asked(method, path))  # nothing was asked twice


def test_a_wrong_token_is_exit_4_and_is_nowhere_to_be_seen(hub, small, caplog):  # noqa: F811
    caplog.set_level("DEBUG")
    wrong = "hf_thisOneIsNotTheRightOne"
    done = ckptctl("push", small, REPO, "--json", HF_TOKEN=wrong)
    assert done.code == 4
    assert done.error["code"] == "credentials"
    assert "HF_TOKEN" in done.error["fix"]
    assert wrong not in done.out + done.err + caplog.text
    assert not hub.state.repos


def test_without_a_token_nothing_is_asked_of_the_hub_but_what_is_there(hub, small, monkeypatch):  # noqa: F811
    monkeypatch.delenv("HF_TOKEN")
    assert refused("push", small, REPO, code=4)["code"] == "credentials"
    assert not hub.asked("POST", "")


def test_the_token_stands_in_no_output_no_log_and_no_file(hub, small, tmp_path, caplog):  # noqa: F811
    hub.fail("POST", "/commit/", 400, words=f"your token {TOKEN} is fine, your request is not")
    outs = [ckptctl("push", small, REPO)]
    caplog.clear()
    caplog.set_level("DEBUG")
    outs += [ckptctl("push", small, REPO, "-v"), ckptctl("push", small, REPO, "--json")]
    assert [done.code for done in outs] == [3, 0, 0]
    assert "(token) is fine" in outs[0].err
    assert all(TOKEN not in done.out + done.err for done in outs)
    assert TOKEN not in caplog.text
    assert all(TOKEN.encode() not in data for data in hub.files(REPO).values())
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(TOKEN.encode() not in p.read_bytes() for p in written)


def test_a_commit_of_somebody_else_meanwhile_stays(hub, small):  # noqa: F811
    def other(handler):
        from tests.support.hub_routes import commit

        hub.add("model", REPO, {"theirs.txt": b"theirs"})
        commit(handler)

    hub.fail("POST", "/commit/", other)
    good("push", small, REPO)
    assert hub.files(REPO).pop("theirs.txt") == b"theirs"
    assert {"model.safetensors.index.json", "README.md"} < set(hub.files(REPO))
    assert len(hub.asked("POST", "/commit/")) == 2


def test_a_conflict_of_a_merge_stops_and_nothing_shows(hub, tmp_path, monkeypatch):  # noqa: F811
    from ckptctl.operations import publishing

    monkeypatch.setattr(publishing, "COMMIT_FILES", 4)

    def other(handler):
        from tests.support.hub_routes import merge

        hub.add("model", REPO, {"model.safetensors.index.json": b"{}"})
        merge(handler)

    hub.fail("POST", "/merge", other)
    error = refused("push", model(tmp_path / "many", shards=9), REPO)
    assert "Merge conflict in model.safetensors.index.json" in error["why"]
    assert set(hub.files(REPO)) == {"model.safetensors.index.json"}


def test_a_pull_request_is_left_open_and_found_again(hub, small):  # noqa: F811
    done = document("push", small, REPO, "--create-pr")
    repo = hub.state.repo("model", REPO)
    assert done["pull_request"]["number"] == 1
    assert repo.pulls[0].status == "open"
    assert list(hub.files(REPO)) == []
    assert same_but_card(small, hub, revision="refs/pr/1")
    again = document("push", small, REPO, "--create-pr")
    assert again["pull_request"]["number"] == 1
    assert again["sent"]["files"] == 0
    hub.state.merge(repo, 1)
    assert document("push", small, REPO, "--create-pr")["pull_request"] is None
    assert len(repo.pulls) == 1


def test_more_files_than_one_commit_takes_are_published_by_a_merged_pull_request(hub, tmp_path, monkeypatch):  # noqa: F811
    from ckptctl.operations import publishing

    monkeypatch.setattr(publishing, "COMMIT_FILES", 4)
    folder = model(tmp_path / "many", shards=9)
    hub.fail("POST", "/merge", "lose")
    done = document("push", folder, REPO)
    repo = hub.state.repo("model", REPO)
    assert same_but_card(folder, hub)
    assert [p.status for p in repo.pulls] == ["merged"]
    assert len(repo.history("main")) == 2  # what a reader of main sees: nothing, then all
    assert done["commits"] == 3
    assert done["pull_request"] is None


def test_a_push_that_was_killed_goes_on_in_its_pull_request(hub, tmp_path, monkeypatch):  # noqa: F811
    from ckptctl.operations import publishing

    monkeypatch.setattr(publishing, "COMMIT_FILES", 4)
    folder = model(tmp_path / "many", shards=9)
    hub.fail("POST", "/commit/refs", 200, times=0)
    stop = hub.fail("POST", "/commit/", 403, times=0)

    def second(handler):
        hub.fail("POST", "/commit/", 403, times=1)
        from tests.support.hub_routes import commit

        commit(handler)

    hub.fail("POST", "/commit/", second)
    assert ckptctl("push", folder, REPO).code == 4
    assert stop.times == 0
    assert list(hub.files(REPO)) == []
    good("push", folder, REPO)
    assert same_but_card(folder, hub)
    assert [p.status for p in hub.state.repo("model", REPO).pulls] == ["merged"]


def test_on_another_branch_the_index_comes_last(hub, tmp_path, monkeypatch):  # noqa: F811
    from ckptctl.operations import publishing

    monkeypatch.setattr(publishing, "COMMIT_FILES", 4)
    folder = model(tmp_path / "many", shards=9)
    good("push", folder, REPO, "--revision", "wip")
    repo = hub.state.repo("model", REPO)
    assert list(hub.files(REPO)) == []
    assert same_but_card(folder, hub, revision="wip")
    trees = [set(c.tree) for c in reversed(repo.history("wip"))]
    with_index = [t for t in trees if "model.safetensors.index.json" in t]
    assert all(len([n for n in t if n.endswith(".safetensors")]) == 9 for t in with_index)
    assert len(trees) == 4


def test_weights_of_an_earlier_push_that_a_loader_would_take_are_deleted(hub, small, tmp_path):  # noqa: F811
    hub.add("model", REPO, {"model.safetensors": b"old", "notes/model.safetensors": b"kept", "LICENSE": b"mine"})
    planned = document("push", small, REPO, "--dry-run")
    done = document("push", small, REPO)
    assert done["deleted"] == planned["deleted"] == ["model.safetensors"]
    assert {"notes/model.safetensors", "LICENSE"} < set(hub.files(REPO))
    assert len(hub.state.repo("model", REPO).history("main")) == 3  # one commit did both


def test_a_dry_run_writes_nothing_here_or_there(hub, small):  # noqa: F811
    before = files_of(small)
    done = document("push", small, REPO, "--dry-run")
    assert {f["path"]: f["state"] for f in done["files"]}["README.md"] == "sent"
    assert done["sent"]["files"] == 5
    assert not hub.asked("POST", "")
    assert not hub.state.repos
    assert files_of(small) == before


def test_include_and_exclude_choose_files(hub, small):  # noqa: F811
    hub.add("model", REPO, {"model.safetensors": b"old"})
    good("push", small, REPO, "--include", "*.safetensors", "--exclude", "*-00002-*")
    assert sorted(hub.files(REPO)) == [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors",
    ]
    assert "fits no file" in refused("push", small, REPO, "--include", "*.gguf", code=2)["what"]


def test_private_is_asked_for_and_a_public_one_refused(hub, small):  # noqa: F811
    good("push", small, REPO, "--private", "--message", "first")
    repo = hub.state.repo("model", REPO)
    assert repo.private
    assert repo.history("main")[0].title == "first"
    hub.state.create("model", "org/open", private=False)
    assert refused("push", small, "org/open", "--private")["code"] == "repo-is-public"
    assert hub.files("org/open") == {}


def test_a_damaged_checkpoint_is_not_pushed_unless_asked_for(hub, small):  # noqa: F811
    (small / "model-00002-of-00003.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    error = refused("push", small, REPO)
    assert not hub.state.repos
    assert error["where"] or error["what"]
    assert not hub.asked("POST", "")


def test_a_file_that_changes_meanwhile_is_noticed(hub, small):  # noqa: F811
    file = small / "model.safetensors.index.json"
    text = file.read_text()

    def change(handler):
        from tests.support.hub_routes import preupload

        file.write_text(text + " ")
        preupload(handler)

    hub.fail("POST", "/preupload/", change)
    error = refused("push", small, REPO)
    assert error["code"] in ("hub-differs", "hub-refused")


def test_a_file_that_the_hub_leaves_out_or_changes_is_noticed(hub, small):  # noqa: F811
    def ignoring(handler):
        asked = handler.asked()
        modes = [
            {"path": f["path"], "uploadMode": "regular", "shouldIgnore": f["path"].endswith(".json"), "oid": None}
            for f in asked["files"]
        ]
        handler.json({"files": modes})

    hub.fail("POST", "/preupload/", ignoring, times=99)
    error = refused("push", small, REPO)
    assert error["code"] == "hub-differs", error["why"]
    assert "model.safetensors.index.json" in error["what"]
    assert ".gitignore" in error["why"]


def test_other_bytes_on_the_hub_than_were_sent_are_an_error(hub, small):  # noqa: F811
    def spoiled(handler):
        from tests.support.hub_routes import commit

        commit(handler)
        tree = hub.state.repo("model", REPO).find("main").tree
        tree["model.safetensors.index.json"] = hub.state.store(b"{}")

    hub.fail("POST", "/commit/", spoiled)
    error = refused("push", small, REPO)
    assert error["code"] == "hub-differs"
    assert "model.safetensors.index.json" in error["what"]
    assert "2 bytes" in error["why"]


def test_any_source_is_converted_on_the_way(hub, tmp_path):  # noqa: F811
    source, config = ckpt("torch/fsdp2_dp2_dcp"), fixture("torch/fsdp2_dp2_dcp") / "truth"
    done = document("push", source, REPO, "--model-config", config, "--work-dir", tmp_path)
    assert done["converted"]
    assert {line["fate"] for line in done["fidelity"] if line["part"] == "exp_avg"} == {"dropped"}
    good("convert", source, tmp_path / "out", "--to", "hf", "--no-optimizer", "--model-config", config)
    assert same_but_card(tmp_path / "out", hub)
    assert not list(tmp_path.glob("ckptctl-push-*"))
    received = hub.received
    assert document("push", source, REPO, "--model-config", config)["sent"]["files"] == 0
    assert hub.received == received
    card = hub.files(REPO)["README.md"].decode()
    assert str(config) not in card
    assert "140,224 in 39 tensors" in card


def test_a_conversion_that_could_not_be_sent_is_kept_for_the_next_push(hub, tmp_path, monkeypatch):  # noqa: F811
    source, config = ckpt("torch/fsdp2_dp2_dcp"), fixture("torch/fsdp2_dp2_dcp") / "truth"
    words = ("push", source, REPO, "--model-config", config, "--work-dir", tmp_path)
    fault = hub.fail("POST", "/commit/", 503, times=99)
    refused(*words, code=5)
    fault.times = 0
    (home,) = tmp_path.glob("ckptctl-push-*")
    from ckptctl.operations import staging

    monkeypatch.setattr(staging, "convert", None)  # it would be called if the result were not found
    good(*words)
    assert not home.exists()
    assert set(hub.files(REPO)) == {"README.md", "config.json", "model.safetensors"}


def test_a_trainer_folder_goes_without_its_state_or_with_it(hub, tmp_path):  # noqa: F811
    source = ckpt("torch/trainer")
    good("push", source, REPO)
    assert set(hub.files(REPO)) == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    good("push", source, "org/state", "--include-state")
    assert same_but_card(source, hub, "org/state")
    dcp = ckpt("torch/fsdp2_dp2_dcp")
    config = fixture("torch/fsdp2_dp2_dcp") / "truth"
    good("push", dcp, "org/dcp", "--include-state", "--model-config", config)
    assert "optimizer.pt" in hub.files("org/dcp")


def test_bin_files_become_safetensors(hub):  # noqa: F811
    good("push", ckpt("hf/llama-bin-sharded"), REPO)
    assert not [n for n in hub.files(REPO) if n.endswith(".bin")]
    assert "model.safetensors" in hub.files(REPO)


@pytest.mark.parametrize("name", ["hf/llama-dcp-hf-4ranks", "broken/ok-minimal.safetensors"])
def test_safetensors_that_no_loader_finds_by_name_are_laid_out_again(hub, name):  # noqa: F811
    good("push", ckpt(name), REPO)
    assert "model.safetensors" in hub.files(REPO)
    assert not [n for n in hub.files(REPO) if n.startswith("shard-")]


def test_an_adapter_goes_as_it_is_and_its_card_names_the_base(hub, tmp_path):  # noqa: F811
    folder = tmp_path / "adapter"
    shutil.copytree(fixture("hf/llama-lora") / "adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/base"}))
    (folder / "README.md").unlink()
    hub.add("model", REPO, {"adapter_model.bin": b"old", "model.safetensors": b"kept"})
    good("push", folder, REPO)
    there = hub.files(REPO)
    assert set(there) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "model.safetensors"}
    assert b"base_model: org/base" in there["README.md"]
    assert [r.status for r in hub.asked("POST", "validate-yaml")] == [200]


def test_two_pushes_of_one_conversion_do_not_meet(hub, tmp_path):  # noqa: F811
    source, config = ckpt("torch/fsdp2_dp2_dcp"), fixture("torch/fsdp2_dp2_dcp") / "truth"
    words = ("push", source, REPO, "--model-config", config, "--work-dir", tmp_path)
    codes = []

    def meanwhile(handler):
        from tests.support.hub_routes import preupload

        codes.append(
            subprocess.run([sys.executable, "-m", "ckptctl", *map(str, words)], env=env, check=False).returncode
        )
        preupload(handler)

    env = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    hub.fail("POST", "/preupload/", meanwhile)
    good(*words)
    assert codes == [3]
    assert "model.safetensors" in hub.files(REPO)


def test_offline_is_heeded(hub, small, monkeypatch):  # noqa: F811
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused("push", small, REPO)["code"] == "hub-offline"
    assert not hub.requests


def test_a_source_on_the_hub_is_refused(hub):  # noqa: F811
    assert refused("push", "hf://org/a", REPO, code=2)["code"] == "hub-not-here"
    assert refused("push", "hf://org/a", REPO, "--as-is", code=2)["code"] == "hub-not-here"
    assert not hub.requests


def test_a_pause_longer_than_a_minute_is_not_waited_for(hub, small):  # noqa: F811
    hub.fail("POST", "/commit/", 429, times=99, words="come back later", headers={"Retry-After": "3600"})
    error = refused("push", small, REPO, code=5)
    assert "come back later" in error["why"]
    assert len(hub.asked("POST", "/commit/")) == 1


def test_values_are_checked_too(hub):  # noqa: F811
    done = document("push", ckpt("broken/nan-weights"), REPO, "--dry-run")
    assert done["check"]["level"] == "values"
    assert done["check"]["counts"]["warning"] >= 1


def test_from_python(hub, small):  # noqa: F811
    import ckptctl as package

    assert package.push(small, REPO, private=True, check=False)["sent"]["files"] == 5
    with pytest.raises(package.CkptError) as caught:
        package.push(small, REPO, revision="x", create_pr=True)
    assert caught.value.exit_code == 2


def test_flags_that_contradict_each_other_are_refused(hub, small):  # noqa: F811
    for words in (
        ("--create-pr", "--revision", "x"),
        ("--keep-last", "2"),
        ("--as-is", "--include-state"),
        ("--as-is", "--dtype", "float32"),
        ("--as-is", "--keep-last", "1", "--create-pr"),
        ("--repo-type", "space"),
        ("--as-is", "--keep-last", "1"),
    ):
        assert refused("push", small, REPO, *words, code=2)["code"] == "usage", words
    assert refused("push", small, "not a name", code=2)["code"] == "usage"
    assert not hub.requests


def test_kill_in_the_middle_and_push_again_sends_only_what_is_missing(tmp_path):
    folder = model(tmp_path / "model", shards=6, rows=4000)
    total = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    with HubServer(tmp_path / "hub") as server:
        server.hold_after = total // 2
        first = start(server, tmp_path / "home", "push", folder, REPO, "--jobs", "1")
        assert server.held.wait(60), first.communicate(timeout=5)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30)
        server.hold_after = None
        assert server.files(REPO) == {}
        before = {p.name for p in server.state.objects.iterdir()}
        done = start(server, tmp_path / "home", "push", folder, REPO, "--json")
        out, err = done.communicate(timeout=120)
        assert done.returncode == 0, err
        assert same_but_card(folder, server)
        put = [r.path.split("/")[2] for r in server.asked("PUT", "/content/") if r.status == 200]
        assert len(put) == len(set(put))  # nothing was sent twice
        assert len(before & set(put)) >= 1
        assert json.loads(out)["verified"]["files"] == 8
        assert TOKEN not in out + err


def test_a_killed_conversion_goes_on_and_leaves_nothing(tmp_path):
    source, config = ckpt("torch/fsdp2_dp2_dcp"), fixture("torch/fsdp2_dp2_dcp") / "truth"
    words = ("push", source, REPO, "--model-config", config, "--work-dir", tmp_path)
    with HubServer(tmp_path / "hub") as server:
        server.hold_after = 1000
        first = start(server, tmp_path / "home", *words)
        assert server.held.wait(60), first.communicate(timeout=5)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30)
        server.hold_after = None
        assert len(list(tmp_path.glob("ckptctl-push-*"))) == 1
        done = start(server, tmp_path / "home", *words)
        _, err = done.communicate(timeout=120)
        assert done.returncode == 0, err
        assert "model.safetensors" in server.files(REPO)
        assert not list(tmp_path.glob("ckptctl-push-*"))


def test_through_xet_storage(tmp_path):
    pytest.importorskip("hf_xet")
    folder = model(tmp_path / "model", shards=2, rows=4000)
    with HubServer(tmp_path / "hub", xet=True) as server:
        for count in range(2):
            done = start(server, tmp_path / "home", "push", folder, REPO, "--json", xet=True)
            out, err = done.communicate(timeout=120)
            assert done.returncode == 0, err
            assert json.loads(out)["sent"]["files"] == (4 if count == 0 else 0)
        assert same_but_card(folder, server)
        assert server.asked("GET", "xet-write-token")
        assert not server.asked("PUT", "/content/")
        script = "import sys, huggingface_hub as h; h.snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
        words = (sys.executable, "-c", script, REPO, str(tmp_path / "got"))
        env = {**os.environ, **server.environment(tmp_path / "other", xet=True)}
        subprocess.run(words, env=env, check=True, capture_output=True)
        assert server.asked("GET", "xet-read-token")
        assert not [r for r in server.requests if r.sent and r.path.endswith(".safetensors")]
        loaded = {k: v for k, v in files_of(tmp_path / "got").items() if k.endswith((".safetensors", ".index.json"))}
        assert loaded == files_of(folder)


def test_other_files_of_a_folder_stay_here(hub, tmp_path):  # noqa: F811
    folder = tmp_path / "copy"
    shutil.copytree(ckpt("hf/qwen2-extras"), folder)
    (folder / "runs").mkdir()
    (folder / "runs" / "events.out").write_text("private")
    (folder / "secrets.env").write_text("KEY=1")
    good("push", folder, REPO)
    assert not {n for n in hub.files(REPO) if "runs" in n or "secrets" in n}


# ---- runs in their own format ---------------------------------------------------------------------------------------


def run_of(folder: Path, *steps: int, tracker: int | None = None) -> Path:
    """A DeepSpeed run with several steps, each a copy of a real one."""
    one = fixture("deepspeed/zero2-dp2-bf16-frozen-excluded") / "global_step3"
    folder.mkdir()
    for step in steps:
        shutil.copytree(one, folder / f"global_step{step}")
        for file in (folder / f"global_step{step}").iterdir():
            file.write_bytes(file.read_bytes())
    if tracker is not None:
        (folder / "latest").write_text(f"global_step{tracker}")
    return folder


def tops(hub: HubServer, name: str = "org/run", kind: str = "model") -> list[str]:  # noqa: F811
    return sorted({path.split("/")[0] for path in hub.files(name, kind=kind)})


def test_a_run_goes_step_by_step_its_pointer_last(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, 20, 100, tracker=100)
    done = document("push", run, "org/run", "--as-is", "--repo-type", "dataset", "--no-check")
    there = hub.files("org/run", kind="dataset")
    assert {k: v for k, v in there.items() if k != "README.md"} == files_of(run)
    assert [s["step"] for s in done["steps"]] == [3, 20, 100]
    seen = [set(c.tree) for c in reversed(hub.state.repo("dataset", "org/run").history("main"))][1:]
    steps = [sorted({int(p.split("/")[0][11:]) for p in tree if "/" in p}) for tree in seen]
    assert steps == [[3], [3, 20], [3, 20, 100], [3, 20, 100]]
    assert ["latest" in tree for tree in seen] == [False, False, False, True]
    assert b"3, 20, 100" in there["README.md"]
    assert document("push", run, "org/run", "--as-is", "--repo-type", "dataset", "--no-check")["sent"]["files"] == 0


def test_keep_last_takes_older_steps_from_the_hub_when_the_new_ones_are_there(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, 20, tracker=20)
    words = ("push", run, "org/run", "--as-is", "--keep-last", "2", "--no-check")
    good(*words)
    assert tops(hub) == ["README.md", "global_step20", "global_step3", "latest"]
    shutil.copytree(run / "global_step3", run / "global_step100")
    (run / "latest").write_text("global_step100")
    assert document(*words, "--dry-run")["deleted"] == ["global_step3/"]
    done = document(*words)
    assert done["deleted"] == ["global_step3/"]
    assert [s["step"] for s in done["steps"]] == [20, 100]
    assert tops(hub) == ["README.md", "global_step100", "global_step20", "latest"]
    assert hub.files("org/run")["latest"] == b"global_step100"
    history = hub.state.repo("model", "org/run").history("main")
    gone = next(
        c for c in reversed(history) if not any(p.startswith("global_step3/") for p in c.tree) and len(c.tree) > 5
    )
    assert any(p.startswith("global_step100/") for p in gone.tree)
    shutil.rmtree(run / "global_step20")  # here the run keeps one; the Hub keeps two
    assert document(*words)["deleted"] == []
    assert tops(hub) == ["README.md", "global_step100", "global_step20", "latest"]


def test_the_step_that_the_pointer_names_is_never_deleted(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, tracker=3)
    hub.add("model", "org/run", {"global_step7/a.pt": b"a", "global_step9/a.pt": b"a", "1999/x": b"n"})
    done = document("push", run, "org/run", "--as-is", "--keep-last", "1", "--no-check")
    assert done["deleted"] == ["global_step7/"]
    assert tops(hub) == ["1999", "README.md", "global_step3", "global_step9", "latest"]


def test_a_step_that_is_still_being_saved_is_left_out(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, 20, tracker=3)
    done = document("push", run, "org/run", "--as-is")
    assert any("step 20 is left out" in w for w in done["warnings"])
    assert tops(hub) == ["README.md", "global_step3", "latest"]
    (run / "latest").write_text("global_step21")
    assert refused("push", run, "org/run", "--as-is")["code"] == "tracker-names-missing-step"


def test_one_step_of_a_run_and_one_checkpoint_alone(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, 20, tracker=20)
    good("push", run, "org/run", "--as-is", "--step", "3", "--no-check")
    assert tops(hub) == ["README.md", "global_step3"]
    assert refused("push", run, "org/run", "--as-is", "--step", "4")["code"] == "unrecognised"
    dcp = ckpt("torch/fsdp2_dp2_dcp")
    good("push", dcp, "org/dcp", "--as-is")
    assert {k: v for k, v in hub.files("org/dcp").items() if k != "README.md"} == files_of(dcp)
    file = ckpt("torch/plain_zip")
    assert file.is_file()
    good("push", file, "org/file", "--as-is")
    assert hub.files("org/file")[file.name] == file.read_bytes()


def test_lightning_s_files_and_folders_are_steps(hub, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(ckpt("torch/lightning_ckpt"), run / "epoch=0-step=3.ckpt")
    shutil.copytree(ckpt("torch/lightning_fsdp2_dir"), run / "epoch=0-step=20.ckpt")
    (run / "hparams.yaml").write_text("a: 1")
    done = document("push", run, "org/run", "--as-is")
    assert [s["step"] for s in done["steps"]] == [3, 20]
    assert any("hparams.yaml" in w for w in done["warnings"])
    assert tops(hub) == ["README.md", "epoch=0-step=20.ckpt", "epoch=0-step=3.ckpt"]
    assert document("push", run, "org/run", "--as-is", "--keep-last", "1")["deleted"] == ["epoch=0-step=3.ckpt"]
    assert tops(hub) == ["README.md", "epoch=0-step=20.ckpt"]


def test_a_trainer_s_step_without_its_last_file_is_left_out(hub, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    shutil.copytree(ckpt("torch/trainer"), run / "checkpoint-3")
    shutil.copytree(ckpt("torch/trainer"), run / "checkpoint-20")
    (run / "checkpoint-20" / "trainer_state.json").unlink()
    done = document("push", run, "org/run", "--as-is")
    assert any("step 20 is left out" in w for w in done["warnings"])
    assert tops(hub) == ["README.md", "checkpoint-3"]
    shutil.rmtree(run / "checkpoint-3")
    assert refused("push", run, "org/run", "--as-is")["code"] == "unrecognised"


def test_a_damaged_step_stops_the_push_of_a_run(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, tracker=3)
    model_states = run / "global_step3" / "mp_rank_00_model_states.pt"
    model_states.write_bytes(model_states.read_bytes()[:-100])
    refused("push", run, "org/run", "--as-is")
    assert not hub.state.repos


def test_a_link_that_leaves_a_step_is_refused(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, tracker=3)
    (tmp_path / "secret").write_text("key")
    (run / "global_step3" / ".env").write_text("KEY=1")
    done = document("push", run, "org/run", "--as-is", "--no-check", "--dry-run")
    assert not [f for f in done["files"] if ".env" in f["path"]]
    (run / "global_step3" / "extra.pt").symlink_to(tmp_path / "secret")
    assert refused("push", run, "org/run", "--as-is", "--no-check")["code"] == "link-escapes"


def test_links_that_lead_elsewhere_are_refused(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, tracker=3)
    step = run / "global_step3"
    (run / ".private").mkdir()
    (run / ".private" / "key").write_text("key")
    (run / "notes.txt").write_text("mine")
    (tmp_path / "more").mkdir()
    for link, target in (("a.pt", run / ".private" / "key"), ("folder", tmp_path / "more")):
        (step / link).symlink_to(target)
        assert refused("push", run, "org/run", "--as-is", "--no-check")["code"] == "link-escapes"
        (step / link).unlink()
    (step / "b.txt").symlink_to(run / "notes.txt")  # of the same run, and not for who pushes one step alone
    assert refused("push", step, "org/run", "--as-is", "--no-check")["code"] == "link-escapes"
    sent = document("push", run, "org/run", "--as-is", "--no-check", "--dry-run")
    assert "global_step3/b.txt" in [f["path"] for f in sent["files"]]


def test_a_run_as_one_pull_request(hub, tmp_path):  # noqa: F811
    run = run_of(tmp_path / "run", 3, 20, tracker=20)
    done = document("push", run, "org/run", "--as-is", "--create-pr", "--no-check")
    assert done["pull_request"]["number"] == 1
    assert hub.files("org/run") == {}
    there = hub.files("org/run", "refs/pr/1")
    assert {k: v for k, v in there.items() if k != "README.md"} == files_of(run)
    again = document("push", run, "org/run", "--as-is", "--create-pr", "--no-check")
    assert (again["pull_request"]["number"], again["sent"]["files"]) == (1, 0)
    assert len(hub.state.repo("model", "org/run").pulls) == 1
