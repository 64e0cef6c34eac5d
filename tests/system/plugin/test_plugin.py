"""The plugin that runs other people's tests with us (tests/plugin): what it replaces, and its end.

The samples in ``theirs`` know nothing of it. Stock fails those of them that stand for faults of
stock, ours passes all: so they notice a missing replacement.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path

import pytest
from launching import run
from places import HELPERS, ROOT

THEIRS = ROOT / "tests/system/plugin/theirs"
OPTION = "--with-accel-scaler"
SAMPLES = [str(THEIRS / "sample_torch.py"), str(THEIRS / "sample_accelerate.py")]
FILES = {
    "early/conftest.py": "from torch.amp import GradScaler\nEARLY = GradScaler('cpu')\n",
    "early/early.py": """
import accel_scaler, conftest
def test_it(kept=conftest.GradScaler):
    for scaler in (conftest.EARLY, conftest.GradScaler("cpu"), kept("cpu")):
        assert type(scaler) is accel_scaler.GradScaler
""",
    "alone.py": """
import pytest, torch
from accelerate import Accelerator, DistributedType, PartialState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from accel_scaler import ConfigError, GradScaler, ScaledAccelerator, ScalerConfig, attach

def test_sharded():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        assert not isinstance(ShardedGradScaler(device="cpu"), GradScaler)
    finally:
        torch.distributed.destroy_process_group()

def test_a_scaler_of_ours_and_an_argument_outrank_the_plugin():
    config = ScalerConfig(init_scale=8.0)
    own = ScaledAccelerator(cpu=True, mixed_precision="fp16", scaler_config=config)
    assert own.scaler.get_scale() == 8.0
    assert GradScaler("cpu", init_scale=4.0).get_scale() == 4.0
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert attach(accelerator, ScalerConfig(init_scale=16.0)).scaler.get_scale() == 16.0

def test_refused(monkeypatch):
    # Megatron-LM itself needs a GPU; attach goes by this field of the state that all share.
    kind = DistributedType.MEGATRON_LM
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    assert type(Accelerator(cpu=True, mixed_precision="fp16")) is Accelerator

def test_a_wrong_setting_is_no_refusal(monkeypatch):
    monkeypatch.setenv("ACCEL_SCALER_HYSTERESIS", "0")
    with pytest.raises(ConfigError, match="hysteresis"):
        Accelerator(cpu=True, mixed_precision="fp16")
""",
}
RUNS = {
    "stock": SAMPLES,
    "ours": [OPTION, *SAMPLES],
    "alone": [OPTION, "alone.py"],
    "early": [OPTION, "early/early.py"],
}
QUICK = ["-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider", "--tb=short"]
SESSIONS = """
import json, os, sys
import accelerate, pytest, torch

def touched():
    own = ("PYTHON", "ACCEL_SCALER_", "PYTEST_WITH_")
    environment = {k: v for k, v in os.environ.items() if k.startswith(own)}
    inits = torch.amp.GradScaler.__init__, accelerate.Accelerator.__init__
    return inits, list(sys.meta_path), environment

for name, arguments in json.loads(sys.argv[1]).items():
    print("RUN", name, flush=True)
    before = touched()
    pytest.main(arguments)
    assert touched() == before, name
"""


def python(command: list[str], folder: Path) -> str:
    """Run it in a folder, with plugin and samples; what it printed, once it ended well."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests/plugin", HELPERS, THEIRS]))
    code, out, err = run([sys.executable, *command], folder, PYTHONPATH=path)
    assert code == 0, out + err
    return out


class Ended:
    """A run of pytest: what it printed, and how many tests ended how."""

    def __init__(self, text: str) -> None:
        self.text = text
        last = [line for line in text.splitlines() if re.search(r" in [\d.]+s", line)]
        counts = re.findall(r"(\d+) (passed|failed|error|skipped)", last[-1]) if last else []
        self.counts = {what: int(number) for number, what in counts}

    @property
    def failed(self) -> set[str]:
        """The functions whose tests failed, by the short summary."""
        found = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", self.text, re.MULTILINE)
        return {name.split("::")[-1].split("[")[0] for name in found}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All runs, one after the other in one process; each has put everything back."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}
    assert "with_accel_scaler" in names, "install it: pip install -e tests/plugin (make does)"
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "early").mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    runs = {name: [*QUICK, "--rootdir", str(folder), *rest] for name, rest in RUNS.items()}
    out = python(["-c", SESSIONS, json.dumps(runs)], folder)
    said = {part.split("\n")[0]: Ended(part) for part in out.split("RUN ")[1:]}
    assert said.keys() == RUNS.keys()
    return said


def test_the_samples_pass_with_ours(ended: dict[str, Ended]) -> None:
    done = ended["ours"]
    assert set(done.counts) == {"passed"}, done.text
    replaced = "GradScalers replaced: 25, Accelerators attached: 4, Trainers attached: 0; "
    assert f"{replaced}left alone: 2 Accelerators without fp16" in done.text
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


def test_a_name_that_a_conftest_imported_is_replaced(ended: dict[str, Ended]) -> None:
    assert ended["early"].counts == {"passed": 1}, ended["early"].text


def test_what_scales_by_itself_is_left_alone_and_said(ended: dict[str, Ended]) -> None:
    done = ended["alone"]
    assert done.counts == {"passed": 4}, done.text
    assert "Accelerators attached: 1," in done.text
    assert "1 ShardedGradScalers" in done.text
    assert "refused: attach: Megatron-LM's optimizer scales the loss" in done.text


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
    out = python(["-c", OFF], tmp_path)
    assert out.endswith("DONE\n")
    assert out.count("WARNING: nothing was replaced") == 1


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
    out = python(["-m", "pytest", *options, "test_children.py"], tmp_path)
    assert Ended(out).counts == {"passed": 2}, out
    assert "GradScalers replaced: 2, Accelerators attached: 1," in out
