"""The plugin that runs other people's tests with us (tests/plugin): what it replaces, and its end.

The samples in ``theirs`` know nothing of it. Stock fails those of them that stand for faults of
stock, ours passes all, and a wrong scaler fails: so they notice both a missing replacement and a
bad one. The runs stand beside their tests and are made at once, by ``plugin_sessions.py``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS
from plugin_support import OPTION, THEIRS, Ended, start

SAMPLES = [str(THEIRS / "sample_torch.py"), str(THEIRS / "sample_accelerate.py")]
HARNESS = importlib.util.find_spec("expecttest") is not None
if HARNESS:  # torch's own test harness needs it
    SAMPLES.append(str(THEIRS / "sample_torch_harness.py"))

RUNS: dict[str, dict[str, Any]] = {}


def run(name: str, *args: str, **files: str) -> None:
    """Have pytest run in a folder with these files (their names without the ending)."""
    RUNS[name] = {"args": args, "files": {f"{key}.py": text for key, text in files.items()}}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All runs; each has put everything back, however it ended."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}
    assert "with_accel_scaler" in names, "install it: pip install -e tests/plugin (make does)"
    folder = tmp_path_factory.mktemp("sessions")
    done = start([str(HELPERS / "plugin_sessions.py")], folder, json.dumps(RUNS))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    left = {name: result["left"] for name, result in found.items() if result["left"]}
    assert not left, "not put back"
    return {name: Ended(result["text"]) for name, result in found.items()}


# --- the samples -----------------------------------------------------------------------------

run("ours", OPTION, *SAMPLES)
run("stock", *SAMPLES)
run("wrong", OPTION, "-p", "scales_too_much", *SAMPLES)


def test_the_samples_pass_with_ours(ended: dict[str, Ended]) -> None:
    done = ended["ours"]
    assert set(done.counts) == {"passed"}, done.text
    replaced = f"GradScalers replaced: {32 if HARNESS else 30}, Accelerators attached: 4, "
    assert f"{replaced}Trainers attached: 0; left alone: 2 Accelerators without fp16" in done.text
    assert "WARNING" not in done.text


def test_stock_fails_where_stock_is_at_fault_and_nowhere_else(ended: dict[str, Ended]) -> None:
    done = ended["stock"]
    assert done.failed == {
        "test_a_fused_step_minds_the_layout_of_a_gradient",
        "test_fp16_is_fp16",
        "test_an_overflow_is_a_skip",
    }
    assert done.counts["passed"] + 3 == ended["ours"].counts["passed"]
    assert "GradScalers replaced" not in done.text


def test_a_wrong_scaler_fails_them(ended: dict[str, Ended]) -> None:
    failed = ended["wrong"].failed
    expected = {"test_scaling_changes_no_number", "test_a_copy_goes_on", "test_unscale"}
    expected |= {"test_a_step_is_a_step"} | ({"test_it_scales_cpu_float32"} if HARNESS else set())
    assert failed >= expected, ended["wrong"].text


# --- what is replaced ------------------------------------------------------------------------

run(
    "early",
    OPTION,
    conftest="from torch.amp import GradScaler\nEARLY = GradScaler('cpu')\n",
    test_early="""
import accel_scaler, conftest
def test_it(kept=conftest.GradScaler):
    for scaler in (conftest.EARLY, conftest.GradScaler("cpu"), kept("cpu")):
        assert type(scaler) is accel_scaler.GradScaler
""",
)


def test_a_name_that_a_conftest_imported_is_replaced(ended: dict[str, Ended]) -> None:
    assert ended["early"].counts == {"passed": 1}, ended["early"].text


run(
    "alone",
    OPTION,
    test_alone="""
import pytest, torch
from accelerate import Accelerator, DistributedType, PartialState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
import accel_scaler

def test_sharded():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        assert not isinstance(ShardedGradScaler(device="cpu"), accel_scaler.GradScaler)
    finally:
        torch.distributed.destroy_process_group()

def test_refused(monkeypatch):
    # Megatron-LM itself needs a GPU; attach goes by this field of the state that all share.
    Accelerator(cpu=True, mixed_precision="fp16")
    kind = DistributedType.MEGATRON_LM
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    assert type(Accelerator(cpu=True, mixed_precision="fp16")) is Accelerator

def test_a_wrong_setting_is_no_refusal(monkeypatch):
    monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "0")
    with pytest.raises(accel_scaler.ConfigError, match="HYSTERESIS"):
        Accelerator(cpu=True, mixed_precision="fp16")
""",
)


def test_what_scales_by_itself_is_left_alone_and_said(ended: dict[str, Ended]) -> None:
    done = ended["alone"]
    assert done.counts == {"passed": 3}, done.text
    assert "Accelerators attached: 1," in done.text
    assert "1 ShardedGradScalers" in done.text
    assert "refused: attach: Megatron-LM's optimizer scales the loss" in done.text


run(
    "own",
    OPTION,
    test_own="""
from accelerate import Accelerator
from accel_scaler import GradScaler, ScaledAccelerator, ScalerConfig, attach
def test_directly():
    own = ScaledAccelerator(
        cpu=True, mixed_precision="fp16", scaler_config=ScalerConfig(init_scale=8.0))
    assert own.scaler.get_scale() == 8.0
    assert GradScaler("cpu", init_scale=4.0).get_scale() == 4.0
def test_an_argument_outranks_the_plugin():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    attach(accelerator, ScalerConfig(init_scale=16.0))
    assert accelerator.scaler.get_scale() == 16.0
""",
)


def test_what_a_test_attaches_itself_is_taken_as_it_is(ended: dict[str, Ended]) -> None:
    done = ended["own"]
    assert done.counts == {"passed": 2}, done.text
    assert "GradScalers replaced: 0, Accelerators attached: 1," in done.text


# --- what is said, and refused ---------------------------------------------------------------

NOTHING = "from accelerate import Accelerator\ndef test_it():\n    Accelerator(cpu=True)\n"
run("nothing", OPTION, test_nothing=NOTHING)
SPOILT = "import torch\ntorch.amp.GradScaler('cpu')\nraise OSError('as planned')\n"
run("broken off", OPTION, conftest=SPOILT)


def test_a_run_that_replaced_nothing_says_so(ended: dict[str, Ended]) -> None:
    done = ended["nothing"]
    assert done.counts == {"passed": 1}
    assert "GradScalers replaced: 0, Accelerators attached: 0, " in done.text
    assert "WARNING: nothing was replaced" in done.text
    assert "1 Accelerators without fp16" in done.text


def test_a_run_that_breaks_off_is_put_back_too(ended: dict[str, Ended]) -> None:
    """The fixture has looked."""
    assert "as planned" in ended["broken off"].text
    assert not ended["broken off"].counts


# --- processes -------------------------------------------------------------------------------

OFF = f"""
import os, sys
import pytest
OURS = {{"torch", "accel_scaler", "accel_scaler_replacing"}}
before = dict(os.environ)
class Look:
    def pytest_collection(self, session):
        assert not OURS & sys.modules.keys()
        now = {{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}}
        assert now == before, "the environment was changed"
        hooks = [type(finder).__name__ for finder in sys.meta_path]
        assert "Finder" not in hooks, hooks
assert pytest.main(["-q", "-p", "no:cacheprovider", "nothing.py"], plugins=[Look()]) == 0
assert pytest.main(["-q", "-p", "no:cacheprovider", "{OPTION}", "nothing.py"]) == 0
assert "torch" not in sys.modules, "asked for, but no test needs it"
print("DONE")
"""


def test_without_the_option_nothing_is_imported_or_changed(tmp_path: Path) -> None:
    """In a process that has not loaded torch."""
    (tmp_path / "nothing.py").write_text("def test_it():\n    pass\n")
    done = start(["-c", OFF], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("DONE\n")
    assert done.stdout.count("WARNING: nothing was replaced") == 1


CHILDREN = """
import multiprocessing, os, subprocess, sys

CODE = '''
import sys
assert not {"torch", "accelerate"} & sys.modules.keys(), "a child pays for what it does not use"
import sitecustomize
import torch
from accelerate import Accelerator
print(type(torch.amp.GradScaler("cpu")).__module__, sitecustomize.__file__,
      type(Accelerator(cpu=True, mixed_precision="fp16")).__name__,
      any("startup" in entry for entry in sys.path))
'''

def in_child(_):
    import torch
    return type(torch.amp.GradScaler("cpu")).__module__

def test_a_child_process(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("NEXT = True")
    path = os.environ["PYTHONPATH"] + os.pathsep + str(tmp_path)
    said = subprocess.run([sys.executable, "-c", CODE], check=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE).stdout
    assert said.split() == [
        "accel_scaler.scaling.grad_scaler", str(tmp_path / "sitecustomize.py"),
        "ScaledAccelerator", "False"]

def test_a_spawned_one():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(in_child, [0]) == ["accel_scaler.scaling.grad_scaler"]
"""


def test_workers_of_xdist_and_what_tests_start_are_reached_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_children.py").write_text(CHILDREN)
    options = [OPTION, "-n", "2", "-p", "no:cacheprovider"]
    done = start(["-m", "pytest", *options, "test_children.py"], tmp_path)
    assert Ended(done.stdout).counts == {"passed": 2}, done.stdout + done.stderr
    assert "GradScalers replaced: 2, Accelerators attached: 1," in done.stdout
