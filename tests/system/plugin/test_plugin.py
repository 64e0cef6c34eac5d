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
    assert f"{32 if HARNESS else 30} GradScalers replaced, 4 Accelerators attached" in done.text
    assert "left alone: 2 Accelerators without fp16" in done.text
    assert "WARNING" not in done.text


def test_stock_fails_where_stock_is_at_fault_and_nowhere_else(ended: dict[str, Ended]) -> None:
    done = ended["stock"]
    assert done.failed == {
        "test_a_fused_step_minds_the_layout_of_a_gradient",
        "test_fp16_is_fp16",
        "test_an_overflow_is_a_skip",
    }
    assert done.counts["passed"] + 3 == ended["ours"].counts["passed"]
    assert "accel_scaler:" not in done.text


def test_a_wrong_scaler_fails_them(ended: dict[str, Ended]) -> None:
    failed = ended["wrong"].failed
    expected = {"test_scaling_changes_no_number", "test_a_copy_goes_on", "test_unscale"}
    expected |= {"test_a_step_is_a_step"} | ({"test_it_scales_cpu_float32"} if HARNESS else set())
    assert failed >= expected, ended["wrong"].text


# --- what is replaced ------------------------------------------------------------------------

EACH = """
import pytest, torch
from accel_scaler import GradScaler as Ours
from accelerate import Accelerator
from torch.amp import grad_scaler

MAKERS = [lambda: torch.amp.GradScaler("cpu"), lambda: grad_scaler.GradScaler(device="cpu"),
          lambda: torch.GradScaler("cpu"), lambda: torch.cpu.amp.GradScaler(),
          lambda: torch.cuda.amp.GradScaler(enabled=False)]

@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.filterwarnings("ignore")
def test_name(make):
    scaler = make()
    assert isinstance(scaler, Ours) == {torch}
    assert isinstance(scaler, torch.amp.GradScaler)

def test_accelerator():
    attached = type(Accelerator(cpu=True, mixed_precision="fp16")).__name__ == "ScaledAccelerator"
    assert attached == {accelerate}
"""
run("each", OPTION, test_each=EACH.format(torch=True, accelerate=True))
run(
    "torch",
    *(OPTION, "--accel-scaler-only", "torch"),
    test_each=EACH.format(torch=True, accelerate=False),
)
run(
    "accelerate",
    *(OPTION, "--accel-scaler-only", "accelerate"),
    test_each=EACH.format(torch=False, accelerate=True),
)


@pytest.mark.parametrize(
    ("name", "replaced", "attached"), [("each", 5, 1), ("torch", 5, 0), ("accelerate", 0, 1)]
)
def test_each_name_is_replaced_or_the_part_that_was_asked_for(
    ended: dict[str, Ended], name: str, replaced: int, attached: int
) -> None:
    done = ended[name]
    assert done.counts == {"passed": 6}, done.text
    (header,) = [line for line in done.text.splitlines() if line.startswith("accel_scaler: ")]
    says_torch = "GradScaler (torch.amp, torch.cuda.amp, torch.cpu.amp) replaced" in header
    says_accelerate = "fp16 Accelerators and Trainers attached" in header
    assert (says_torch, says_accelerate) == (replaced > 0, attached > 0)
    assert f"{replaced} GradScalers replaced, {attached} Accelerator" in done.text


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


MODE = """
from accelerate import Accelerator
def test_mode():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator._attachment.config.step_mode == "delayed"
"""
run("delayed", OPTION, "--accel-scaler-mode", "delayed", test_mode=MODE)


def test_the_mode_reaches_attached_optimizers(ended: dict[str, Ended]) -> None:
    assert ended["delayed"].counts == {"passed": 1}, ended["delayed"].text
    assert "step_mode=delayed" in ended["delayed"].text


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
    with pytest.raises(accel_scaler.ConfigError, match="hysteresis"):
        Accelerator(cpu=True, mixed_precision="fp16")
""",
)


def test_what_scales_by_itself_is_left_alone_and_said(ended: dict[str, Ended]) -> None:
    done = ended["alone"]
    assert done.counts == {"passed": 3}, done.text
    assert "1 Accelerator attached; left alone: 1 ShardedGradScaler" in done.text
    assert "not attached (once): attach: under MEGATRON_LM, Megatron-LM's optimizer" in done.text


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
    assert "0 GradScalers replaced, 1 Accelerator attached" in done.text


# --- what is said, and refused ---------------------------------------------------------------

NOTHING = "from accelerate import Accelerator\ndef test_it():\n    Accelerator(cpu=True)\n"
run("nothing", OPTION, test_nothing=NOTHING)
run("no mode", "--accel-scaler-mode", "overlap", test_nothing=NOTHING)
run("no only", "--accel-scaler-only", "torch", test_nothing=NOTHING)
SPOILT = "import torch\ntorch.amp.GradScaler('cpu')\nraise OSError('as planned')\n"
run("broken off", OPTION, conftest=SPOILT)


def test_a_run_that_replaced_nothing_says_so(ended: dict[str, Ended]) -> None:
    done = ended["nothing"]
    assert done.counts == {"passed": 1}
    assert "0 GradScalers replaced, 0 Accelerators attached" in done.text
    assert "WARNING: nothing was replaced" in done.text
    assert "1 Accelerator without fp16" in done.text


@pytest.mark.parametrize("option", ["mode", "only"])
def test_an_option_that_would_do_nothing_is_refused(ended: dict[str, Ended], option: str) -> None:
    done = ended[f"no {option}"]
    assert f"--accel-scaler-{option} does nothing without --with-accel-scaler" in done.text
    assert not done.counts


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
    options = [OPTION, "--accel-scaler-mode", "overlap", "-n", "2", "-p", "no:cacheprovider"]
    done = start(["-m", "pytest", *options, "test_children.py"], tmp_path)
    assert Ended(done.stdout).counts == {"passed": 2}, done.stdout + done.stderr
    assert "2 GradScalers replaced, 1 Accelerator attached" in done.stdout
    assert "step_mode=overlap" in done.stdout
