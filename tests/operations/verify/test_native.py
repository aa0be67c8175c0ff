"""Native runs: which framework takes what, ranks that end whatever happens, pickles that are looked at before.

The runs of real frameworks need torch, and each its framework.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ckptctl import operations
from ckptctl.core.errors import CkptError, Unsafe, Unsupported, Usage
from ckptctl.operations.opening import open_checkpoint
from ckptctl.operations.verify import sides
from ckptctl.operations.verify.compare import Measure, compare
from ckptctl.operations.verify.forms import Forms
from ckptctl.operations.verify.more import require_more
from ckptctl.operations.verify.native import launch, saved
from ckptctl.operations.verify.native.comparing import aligned
from ckptctl.operations.verify.native.launch import Launch, run_ranks
from ckptctl.operations.verify.native.loading import load_file
from ckptctl.operations.verify.native.planning import dcp_paths, plan
from ckptctl.operations.verify.native.running import require_gpus, scan
from ckptctl.operations.verify.record import Record, Trained
from ckptctl.operations.verify.rules import Rule
from tests.support.checkpoints import FIXTURES, ROOT, ckpt, needs_torch, truth, truth_config

ADAM = Rule("adam")


def reading_of(layout):
    """How a layout is read: with the config of its truth, where there is one."""
    return operations.Reading(model_config=truth_config(layout))


def recorded(layout):
    """The losses that the run itself recorded after its save."""
    return json.loads((FIXTURES / layout / "truth" / "losses.json").read_text())["losses"][3:6]


def reference_batch(folder, *steps):
    """The batches of those steps of every real run, as its own script draws them, as a batch file."""
    import numpy as np
    import torch

    drawn = [torch.randint(0, 131, (4, 32), generator=torch.Generator().manual_seed(1000 + s)) for s in steps]
    np.savez(folder / "batch.npz", input_ids=np.stack([d.numpy() for d in drawn]))
    return folder / "batch.npz"


# ---- which framework, and what it is told


def planned(layout):
    checkpoint, _ = open_checkpoint(ckpt(layout), reading_of(layout))
    return plan(checkpoint, checkpoint, ADAM)


@pytest.mark.parametrize(
    ("layout", "runner", "world"),
    [
        ("torch/fsdp2_dp2_dcp", "run_fsdp", 2),
        ("torch/fsdp2_dp4_dcp", "run_fsdp", 4),
        ("torch/verl_fsdp2", "run_fsdp", 2),
        ("torch/plain_zip", "run_torch", 1),
        ("torch/trainer", "run_trainer", 1),
        ("torch/accelerate_fsdp2", "run_accelerate", 2),
        ("torch/lightning_ckpt", "run_lightning", 1),
        ("torch/lightning_fsdp2_dir", "run_lightning", 2),
        ("deepspeed/zero1-dp2-bf16", "run_deepspeed", 2),
        ("deepspeed/universal-zero1-dp2-bf16-fp32acc", "run_deepspeed", 1),
        ("hf/llama-single", "run_transformers", 1),
    ],
)
def test_the_framework_of_a_checkpoint_and_its_ranks(layout, runner, world):
    found = planned(layout)
    assert (found.runner, found.world) == (runner, world)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("torch/torchtitan_dcp", "torchtitan"),
        ("torch/fsdp1_local", "wrapping"),
        ("torch/verl_fsdp1", "FSDP1"),
        ("deepspeed/pipe-pp2-dp2-zero1-bf16", "pp 2"),
        ("deepspeed/moe-ep2-dp4-zero2-bf16", "ep 2"),
        ("megatron/qwen2_legacy_tp2pp2_tied", "tied embeddings"),
    ],
)
def test_what_only_the_run_s_own_program_loads_is_refused_by_name(layout, why):
    with pytest.raises(Unsupported, match="only the run's own program") as refused:
        planned(layout)
    assert why in refused.value.why


def test_groups_and_settings_are_the_checkpoint_s():
    job = planned("torch/fsdp2_dp2_dcp").job
    assert [len(g["params"]) for g in job["groups"]] == [30, 9]
    assert [g["settings"]["weight_decay"] for g in job["groups"]] == [0.1, 0.0]
    assert [g["settings"]["betas"] for g in job["groups"]] == [(0.9, 0.95)] * 2
    assert (job["optimizer"], job["frozen"], job["dtype"]) == ("AdamW", [], "float32")


def test_frozen_parameters_are_those_in_no_group():
    job = planned("deepspeed/zero2-dp2-bf16-frozen-excluded").job
    assert job["frozen"] == [] or not {n for g in job["groups"] for n in g["params"]} & set(job["frozen"])
    assert job["deepspeed"]["config"]["bf16"] == {"enabled": True}
    assert job["deepspeed"]["config"]["zero_optimization"] == {"stage": 2}
    assert job["deepspeed"]["tag"] == "global_step3"


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ({"stage": 2, "round_robin_gradients": True}, {"stage": 1, "round_robin_gradients": True}),
        ({"sub_group_size": 3e3, "round_robin_gradients": False}, {"stage": 1, "sub_group_size": 3000}),
        ({"sub_group_size": -1, "overlap_comm": True}, {"stage": 1}),
        ("auto", {"stage": 1}),
    ],
)
def test_how_flat_groups_were_dealt_is_told_to_deepspeed(saved, told):
    checkpoint, _ = open_checkpoint(ckpt("deepspeed/zero1-dp2-bf16"), reading_of("deepspeed/zero1-dp2-bf16"))
    own = {**checkpoint.values["deepspeed"], "ds_config": {"zero_optimization": saved}}
    changed = dataclasses.replace(checkpoint, values={**checkpoint.values, "deepspeed": own})
    assert plan(changed, changed, ADAM).job["deepspeed"]["config"]["zero_optimization"] == told


@needs_torch
@pytest.mark.parametrize("engine_scales", [True, False])
def test_a_loss_scale_that_deepspeed_s_engine_leaves_out_is_made_good(engine_scales):
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    import torch

    from ckptctl.operations.verify.native.run_deepspeed import DeepSpeed

    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    session = DeepSpeed.__new__(DeepSpeed)
    session.version = "0"
    session.net = torch.nn.Module()
    session.net.p = parameter
    session.wrapper = SimpleNamespace(loss_scale=256.0, fp16_groups=[[]], fp32_groups=[[]])
    session._whole_here = lambda: {id(parameter): None}
    scale = 256.0 if engine_scales else 1.0
    session.engine = SimpleNamespace(backward=lambda loss: (loss * scale).backward())
    session.backward((parameter * 3).sum())
    assert parameter.grad.tolist() == [768.0, 768.0]
    assert [(n, g.tolist()) for n, g in session.gradients()] == [("p", [3.0, 3.0])]
    assert bool(session.notes) is not engine_scales


@pytest.mark.parametrize(
    ("layout", "model", "optim", "flat", "groups"),
    [
        ("torch/fsdp2_dp2_dcp", ["app", "model"], ["app", "optim"], False, True),
        ("torch/fsdp2_dp2_flatoptim_dcp", ["model"], ["optim"], True, True),
        ("torch/fsdp2_dp4_dcp", ["model"], ["optimizer"], False, True),
        ("torch/dcp_safetensors", ["model"], ["optim"], False, False),
    ],
)
def test_where_a_dcp_has_model_and_optimizer(layout, model, optim, flat, groups):
    checkpoint, _ = open_checkpoint(ckpt(layout))
    assert dcp_paths(checkpoint) == {
        "model": model, "optim": optim, "flat": flat, "groups": groups, "folders": {"": ["model", "optim"]},
    }  # fmt: skip


def test_megatron_s_ranks_and_what_its_training_code_is_told():
    found = planned("megatron/legacy_tp2pp2_distopt_dp2")
    assert (found.runner, found.world) == ("run_megatron", 8)
    told = found.job["megatron"]
    assert (told["pp"], told["vpp"], told["dp"], told["vocabulary"]) == (2, 1, 2, 131)
    assert (told["format"], told["fused"], told["iteration"]) == ("torch", True, 3)
    assert (told["args"]["tensor_model_parallel_size"], told["args"]["num_query_groups"]) == (2, 4)
    chunks = planned("megatron/dist_tp1pp2_vpp2").job["megatron"]
    assert (chunks["vpp"], chunks["format"], chunks["fused"]) == (2, "torch_dist", False)


@pytest.mark.parametrize(
    ("parser", "saved"), [("layernorm_epsilon", "norm_epsilon"), ("norm_epsilon", "layernorm_epsilon"),
                          ("layernorm_epsilon", "layernorm_epsilon")],
)  # fmt: skip
def test_arguments_of_megatron_are_found_under_either_version_s_name(parser, saved, monkeypatch):
    """A parser of one version, args saved by another: the norm's epsilon is not left at its default."""
    from ckptctl.operations.verify.native.run_megatron import Live

    def add(made):
        made.add_argument("--norm-epsilon", type=float, default=1e-5, dest=parser)
        made.add_argument("--swiglu", action="store_true")
        made.add_argument("--no-position-embedding", action="store_false", dest="add_position_embedding")
        made.add_argument("--save", type=str)
        return made

    for name in ("megatron", "megatron.training", "megatron.training.arguments"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["megatron.training.arguments"].add_megatron_arguments = add
    live = Live.__new__(Live)
    live.plan = {"args": {saved: 1e-6, "swiglu": True, "add_position_embedding": False, "save": "x"}}
    live._own_flags = list
    assert live._flags() == ["--norm-epsilon", "1e-06", "--swiglu", "--no-position-embedding"]


def test_what_megatron_saves_is_read_as_the_run_s_own_truth(tmp_path, monkeypatch):
    layout = "megatron/legacy_tp2pp2_distopt_dp2"
    for word in ("before", "after"):
        shutil.copytree(ckpt(layout), tmp_path / word)
    monkeypatch.setattr(saved, "_digest", lambda array: hashlib.sha256(array.tobytes()).hexdigest())
    want = truth(layout)
    side = sides.opened(ckpt(layout), reading_of(layout)).under(list(want["model"]), {})
    told = {"losses": [1.0], "lr": [[0.1]], "finite": True}
    found = saved.record_of_saves(tmp_path, told, side.checkpoint, ADAM)
    assert told["types"] == {"weight": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"} | (
        {"master": "float32"} if "master" in told["types"] else {}
    )
    for kind, section in (("weight", "model"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        assert {n: p.before[kind] for n, p in found.parameters.items()} == {
            n: t.sha256 for n, t in want[section].items()
        }
    assert {p.step_before for p in found.parameters.values()} == {3.0}
    norm = found.parameters["model.norm.weight"]
    assert norm.settings is not None
    assert norm.settings["weight_decay"] == 0.0
    assert norm.after == norm.before
    assert len(norm.samples["weight"]) == norm.shape[0]


# ---- pickles


@pytest.mark.parametrize("case", ["bin-runs-code", "bin-runs-system", "bin-raw-pickle-runs-code", "bin-unknown-class"])
def test_a_pickle_that_is_not_clean_stops_before_anything_is_started(case, monkeypatch):
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *a, **k: pytest.fail("a rank was started"))
    checkpoint, _ = open_checkpoint(FIXTURES / "broken" / case)
    with pytest.raises(Unsafe, match="not clean") as refused:
        scan(checkpoint)
    assert (refused.value.exit_code, refused.value.code) == (3, "pickle-not-clean")


def test_a_clean_checkpoint_is_said_to_be():
    checkpoint, _ = open_checkpoint(ckpt("torch/trainer"))
    found = scan(checkpoint)
    assert found["clean"] is True
    assert found["files"] >= 5


# ---- ranks


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Runs ranks that do what a script says; gives the function, and the folder where they leave their process ids."""

    def run(script, world=2, timeout_s=60.0):
        monkeypatch.setattr(
            launch,
            "_START",
            "import json, os, sys, time\n"
            "job = json.load(open(sys.argv[3])); rank = int(os.environ['RANK'])\n"
            f"open({str(tmp_path)!r} + '/pid' + str(rank), 'w').write(str(os.getpid()))\n" + script,
        )
        return run_ranks("run_torch", {"word": "here"}, world, Launch(sys.executable, "cpu", timeout_s))

    return run


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def left_running(folder):
    """Processes that are not gone within some seconds: one that was killed may still be on its way out."""
    until = time.monotonic() + 10
    while left := [p.name for p in folder.glob("pid*") if is_running(int(p.read_text()))]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


TELL = (
    "json.dump({'rank': rank, 'job': job, 'world': os.environ['WORLD_SIZE']}, open(job['folder'] + '/story.json', 'w'))"
)


def test_what_rank_0_tells_comes_back_and_nothing_stays(ranks, tmp_path):
    found = ranks(f"if rank == 0: {TELL}")
    assert (found["rank"], found["world"], found["job"]["word"]) == (0, "2", "here")
    assert not Path(found["job"]["folder"]).exists()
    assert left_running(tmp_path) == []


def test_one_rank_that_fails_ends_the_others_and_its_own_words_come(ranks, tmp_path):
    script = (
        "if rank == 1:\n"
        "    told = {'kind': 'ValueError', 'text': 'no such layout', 'where': ''}\n"
        "    json.dump(told, open(job['folder'] + '/error1.json', 'w'))\n"
        "    sys.exit(4)\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    with pytest.raises(CkptError, match="run failed") as failed:
        ranks(script)
    assert time.monotonic() - started < 50
    assert "rank 1 ended with exit code 4" in failed.value.why
    assert "no such layout" in failed.value.why
    assert (failed.value.code, failed.value.exit_code) == ("native-failed", 3)
    assert left_running(tmp_path) == []


def test_a_killed_rank_is_told_by_its_signal(ranks, tmp_path):
    with pytest.raises(CkptError, match="run failed") as failed:
        ranks("import signal\nif rank == 0: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(600)\n")
    assert "SIGSEGV" in failed.value.why
    assert left_running(tmp_path) == []


def test_ranks_that_do_not_end_are_ended_with_what_they_started(ranks, tmp_path):
    script = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path)!r} + '/pidchild' + str(rank), 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(CkptError, match="took too long") as failed:
        ranks(script, timeout_s=6.0)
    assert failed.value.code == "native-timeout"
    assert "--native-timeout" in failed.value.fix
    assert left_running(tmp_path) == []


def test_a_framework_that_is_not_there_is_named_with_the_line_that_installs_it(ranks):
    script = (
        "json.dump({'kind': 'ModuleNotFoundError', 'text': \"No module named 'deepspeed'\", 'where': ''},"
        " open(job['folder'] + f'/error{rank}.json', 'w'))\nsys.exit(1)\n"
    )
    with pytest.raises(Unsupported, match="deepspeed") as failed:
        ranks(script)
    assert "pip install" in failed.value.fix
    assert "--python" in failed.value.fix


def test_a_rank_that_tells_nothing_is_a_failure(ranks):
    with pytest.raises(CkptError, match="run failed") as failed:
        ranks("pass")
    assert "without telling" in failed.value.why


def test_an_interpreter_that_is_not_there_is_said():
    with pytest.raises(CkptError, match="does not start"):
        run_ranks("run_torch", {}, 1, Launch("/nowhere/python"))


RESTING = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup starts, this
sys.path.insert(0, {root!r})
from ckptctl.execute.signals import terminable
from ckptctl.operations.verify.native import launch
launch._START = (
    "import os, runpy, subprocess, sys, time, types\\n"
    "package = types.ModuleType('ckptctl_native')\\n"
    "package.__path__ = [sys.argv[1]]\\n"
    "sys.modules['ckptctl_native'] = package\\n"
    "from ckptctl_native import rank\\n"
    "folder = os.path.dirname(sys.argv[3])\\n"
    "rank._die_with(int(os.environ['CKPTCTL_PARENT']), folder)\\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\\n"
    "number = os.environ['RANK']\\n"
    "for what, pid in (('pid', os.getpid()), ('pidchild', child.pid)):\\n"
    "    written = {folder!r} + '/' + what + number\\n"
    "    open(written + '.part', 'w').write(str(pid))\\n"
    "    os.replace(written + '.part', written)\\n"
    "time.sleep(600)\\n"
)
with terminable():
    launch.run_ranks("run_torch", {{}}, 2, launch.Launch(sys.executable))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_rank_and_no_folder(tmp_path, number):
    """What ranks started ends with them. After SIGKILL they see to it themselves."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    script = RESTING.format(root=str(ROOT), folder=str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    try:
        while len(list(tmp_path.glob("pid*[01]"))) < 4:
            assert parent.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        parent.send_signal(number)
        parent.wait(30)
    finally:
        parent.kill()
        parent.wait()
    while left_running(tmp_path) or list(scratch.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_runners_need_no_ckptctl():
    for module in sorted(Path(launch.__file__).parent.glob("*.py")):
        if module.name.startswith(("run_", "rank.")) or module.name == "loading.py":
            lines = [x.strip() for x in module.read_text().splitlines()]
            assert not [x for x in lines if x.startswith(("from ckptctl", "import ckptctl"))], module.name


@needs_torch
@pytest.mark.parametrize(
    ("version", "is_safe"), [("1.13.1", False), ("2.5.1", False), ("2.6.0a0+git", True), ("2.13.0+cpu", True)]
)
def test_a_torch_whose_loader_can_be_made_to_run_code_reads_no_file(version, is_safe, tmp_path, monkeypatch):
    """CVE-2025-32434: mended in torch 2.6.0. What is no plain data is refused by any."""
    import torch

    plain, odd = tmp_path / "plain.pt", tmp_path / "odd.pt"
    torch.save({"a": torch.arange(3), "step": 2}, plain)
    torch.save({"a": Path("x")}, odd)
    monkeypatch.setattr(torch, "__version__", version)
    if not is_safe:
        with pytest.raises(RuntimeError, match=r"below 2\.6 a crafted file can run code"):
            load_file(str(plain), "cpu")
        return
    assert load_file(str(plain), "cpu")["a"].tolist() == [0, 1, 2]
    with pytest.raises(pickle.UnpicklingError):
        load_file(str(odd), "cpu")


def test_gpus_that_are_not_there_are_refused_only_where_they_are_asked_for():
    require_gpus(Launch(device="cpu"), 64)


# ---- settings


@pytest.mark.parametrize(
    "settings", [{"python": "x"}, {"native": True, "layers": 1}, {"native": True, "no_optimizer": True},
                 {"native": True, "dtype": "bf16"}, {"recompute": "some"}]
)  # fmt: skip
def test_settings_that_do_not_go_together_are_mistakes_of_usage(settings):
    with pytest.raises(Usage):
        require_more(operations.Verification(**settings))


# ---- comparing


def one(**changes):
    made = {
        "before": {"weight": "w", "exp_avg": "m"}, "after": {"weight": "x", "exp_avg": "n"},
        "samples": {"weight": [1.0, 2.0], "exp_avg": [0.5, 0.25]}, "gradient_norms": [1.0], "step_before": 3.0,
        "step_after": 4.0, "settings": {"lr": 0.1},
    }  # fmt: skip
    return Trained("p", (2,), **{**made, **changes})


def judged(own, native, types=None):
    """The differences between verify's own record of one parameter and a framework's."""
    forms = Forms({("p", k): (None, "float32") for k in ("weight", "exp_avg", "master")})
    a, b = (Record([2.0], ["l"], [1.0], [[0.1]], {"p": p}) for p in (own, native))
    left, right, skipped = aligned(a, b, forms, types or {"weight": "float32", "exp_avg": "float32"})
    found = compare(left, right, Measure("float32", exact=False))
    return {(d["kind"], d["what"]) for d in found.differences}, skipped


def test_the_same_is_equal():
    assert judged(one(), one()) == (set(), {})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"before": {"weight": "other", "exp_avg": "m"}}, {("weight", "value")}),
        ({"before": {"weight": "w"}}, {("exp_avg", "only-in-a")}),
        ({"step_before": 2.0}, {("step", "value")}),
        ({"settings": {"lr": 0.2}}, {("group", "value")}),
        ({"gradient_norms": [1.1]}, {("gradient", "value")}),
        (
            {"after": {"weight": "y", "exp_avg": "n"}, "samples": {"weight": [1.0, 2.1], "exp_avg": [0.5, 0.25]}},
            {("updated weight", "value")},
        ),
        ({"after": {"weight": "y", "exp_avg": "n"}, "samples": {"weight": [1.0, 2.0], "exp_avg": [0.5, 0.25]}}, set()),
    ],
)
def test_what_a_framework_made_otherwise_is_found(changes, found):
    assert judged(one(), one(**changes))[0] == found


def test_a_framework_without_masters_of_float32_weights_has_the_weight_as_its_master():
    own = one(before={"weight": "w", "master": "w", "exp_avg": "m"})
    assert judged(own, one()) == (set(), {})
    assert judged(one(before={"weight": "w", "master": "z", "exp_avg": "m"}), one())[0] == {("master", "value")}


def test_what_cannot_be_compared_is_counted():
    found, skipped = judged(
        one(), one(before={"weight": "other", "exp_avg": "m"}), {"weight": "bfloat16", "exp_avg": "float32"}
    )
    assert (found, skipped) == (set(), {"weight as loaded": 1})
    assert judged(one(), one(step_before=None)) == (set(), {"step counts": 1})
    assert judged(one(), one(settings={})) == (set(), {"group settings": 1})


# ---- real frameworks


NEEDS = {"deepspeed": "deepspeed", "trainer": "accelerate", "lightning_ckpt": "lightning"}


@needs_torch
@pytest.mark.real
@pytest.mark.parametrize(
    "layout", ["torch/fsdp2_dp2_dcp", "torch/trainer", "torch/lightning_ckpt", "deepspeed/zero1-dp2-bf16"]
)
def test_the_real_framework_goes_on_as_its_run_did_and_as_verify_does(layout, tmp_path):
    for word, module in NEEDS.items():
        if word in layout and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    what = operations.Verification(
        steps=2, batch=operations.Batches(file=reference_batch(tmp_path, 4, 5)), device="cpu", native=True
    )
    found = operations.verify_training(ckpt(layout), None, what, reading_of(layout))
    native = found["native"]["a"]
    assert native["losses"] == pytest.approx(recorded(layout)[:2], abs=2e-5 if "bf16" not in layout else 2e-4)
    assert native["differences"] == []
    assert found["native"]["equal"]
    assert native["compared"]["weight"] == native["compared"]["exp_avg"] == found["parameters"]
    assert native["pickles"]["clean"]


@needs_torch
@pytest.mark.real
def test_real_megatron_goes_on_as_its_run_did_and_as_verify_does(tmp_path, monkeypatch):
    source, layout = os.environ.get("CKPTCTL_MEGATRON_SRC"), "megatron/dist_tp1pp2_vpp2"
    if not source or importlib.util.find_spec("megatron") is None:
        pytest.skip("needs megatron-core, and a checkout of Megatron-LM named in CKPTCTL_MEGATRON_SRC")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), source]))
    what = operations.Verification(
        batch=operations.Batches(file=reference_batch(tmp_path, 4)), device="cpu", native=True
    )
    found = operations.verify_training(ckpt(layout), None, what, reading_of(layout))
    losses = json.loads((FIXTURES / layout / "truth" / "losses.json").read_text())
    native = found["native"]["a"]
    assert native["losses"] == pytest.approx([losses["train"]["4"]], abs=2e-5)
    assert native["differences"] == []


@needs_torch
@pytest.mark.real
def test_two_native_runs_of_one_layout_are_equal_bit_for_bit_but_for_what_is_other_in_one(tmp_path):
    """A moment of one parameter is other in b: it alone is told, so all else has the same bits on both sides."""
    source, layout = ckpt("torch/plain_zip"), "torch/plain_zip"
    operations.convert(
        source, tmp_path / "b.pt", operations.Conversion(to="torch", index_keys=True), reading_of(layout)
    )
    import torch

    saved = torch.load(tmp_path / "b.pt", weights_only=True)  # noqa: TID251
    saved["optimizer"]["state"][0]["exp_avg"].view(-1)[7] += 1e-3
    torch.save(saved, tmp_path / "b.pt")
    what = operations.Verification(batch=operations.Batches(rows=2, columns=8), device="cpu", native=True, clip=0.0)
    found = operations.verify_training(source, tmp_path / "b.pt", what, reading_of(layout))
    between = found["native"]["between"]
    assert (found["equal"], between["equal"], between["tolerance"]["mode"]) == (False, False, "bits")
    assert {d["name"] for d in between["differences"]} == {"model.embed_tokens.weight"}
    assert {d["kind"] for d in between["differences"]} == {"exp_avg", "updated exp_avg", "updated weight"}
    assert between["compared"]["exp_avg"] == found["parameters"]
    assert [found["native"][word]["differences"] for word in "ab"] == [[], []]


def test_the_command_line_refuses_a_picture_of_nothing(tmp_path):
    command = [
        sys.executable,
        "-m",
        "ckptctl",
        "verify",
        str(ckpt("torch/trainer")),
        "--output",
        f"png={tmp_path / 'x.png'}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--recompute" in done.stderr
