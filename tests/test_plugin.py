"""The plugin that runs other people's tests with us (tests/plugin): what it replaces, and its end.

The samples in tests/theirs know nothing of it. Stock fails those of them that stand for faults of
stock, ours passes all, and a wrong scaler fails: so they notice both a missing replacement and a
bad one. Where nothing is said of a process, pytest runs inside this one, which has torch loaded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from accel_scaler import GradScaler, ScaledAccelerator

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent
THEIRS = HERE / "theirs"
OPTION = "--with-accel-scaler"
SAMPLES = [THEIRS / "sample_torch.py", THEIRS / "sample_accelerate.py"]
if importlib.util.find_spec("expecttest"):
    SAMPLES.append(THEIRS / "sample_torch_harness.py")


def scalers() -> list[Any]:
    """One of each stock name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.amp.GradScaler("cpu"),
            torch.amp.grad_scaler.GradScaler("cpu"),
            torch.GradScaler("cpu"),
            torch.cpu.amp.GradScaler(),
            torch.cuda.amp.GradScaler(enabled=False),
        ]


def surroundings() -> tuple[Any, ...]:
    """All that the plugin may touch."""
    return (
        torch.amp.GradScaler.__init__,
        torch.cpu.amp.GradScaler.__init__,
        accelerate.Accelerator.__init__,
        list(sys.meta_path),
        {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_CURRENT_TEST")},
    )


@pytest.fixture
def untouched(pytester: pytest.Pytester) -> Iterator[None]:
    """Everything is put back, however the run within ended."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}
    assert "with_accel_scaler" in names, "install it: pip install -e tests/plugin (make does)"
    before = surroundings()
    yield
    for was, is_now in zip(before, surroundings(), strict=True):
        assert was == is_now
    assert not any(isinstance(scaler, GradScaler) for scaler in scalers())


class Kept:
    """pytester forgets what was imported within; torch cannot be imported in part again."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}

    def pytest_unconfigure(self) -> None:
        lasting = ("torch", "accelerate", "numpy", "expecttest", "accel_scaler")
        new = {name: it for name, it in sys.modules.items() if name.split(".")[0] in lasting}
        self.modules.update(new)


@pytest.fixture
def here(pytester: pytest.Pytester, untouched: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run pytest inside this process, in an empty folder; what was printed, and the counts."""
    monkeypatch.syspath_prepend(str(THEIRS))

    def run(*args: Any) -> tuple[str, dict[str, int]]:
        kept = Kept()
        arguments = ("-p", "no:cacheprovider", "--tb=line", *args)
        done = pytester.runpytest_inprocess(*arguments, plugins=[kept])
        sys.modules.update(kept.modules)
        text = done.stdout.str()
        return text + done.stderr.str(), done.parseoutcomes() if "=====" in text else {}

    return run


def failed(text: str) -> set[str]:
    """The functions whose tests failed, by the short summary."""
    found = re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)", text, re.MULTILINE)
    return {name.split("::")[-1].split("[")[0] for name in found}


# --- the samples -----------------------------------------------------------------------------


def test_the_samples_pass_with_ours(here: Any) -> None:
    text, counts = here(OPTION, *SAMPLES)
    assert set(counts) <= {"passed", "warnings"}, text
    assert counts["passed"] >= 35
    assert "32 GradScalers replaced" in text or len(SAMPLES) < 3
    assert "4 Accelerators attached; left alone: 2 Accelerators without fp16" in text


def test_stock_fails_where_stock_is_at_fault_and_nowhere_else(here: Any) -> None:
    text, _ = here(*SAMPLES)
    assert failed(text) == {
        "test_a_fused_step_minds_the_layout_of_a_gradient",
        "test_fp16_is_fp16",
        "test_an_overflow_is_a_skip",
    }
    assert "accel_scaler:" not in text


def test_a_wrong_scaler_fails_them(here: Any) -> None:
    text, _ = here(OPTION, "-p", "scales_too_much", *SAMPLES)
    assert failed(text) >= {
        "test_scaling_changes_no_number",
        "test_a_copy_goes_on",
        "test_unscale",
        "test_a_step_is_a_step",
    }
    if len(SAMPLES) > 2:
        assert "test_it_scales_cpu_float32" in failed(text)


@pytest.mark.parametrize("mode", ["overlap", "delayed"])
def test_the_mode_reaches_attached_optimizers(
    here: Any, pytester: pytest.Pytester, mode: str
) -> None:
    pytester.makepyfile(f"""
        from accelerate import Accelerator
        def test_mode():
            accelerator = Accelerator(cpu=True, mixed_precision="fp16")
            assert accelerator._scaler_config.step_mode == "{mode}"
    """)
    text, counts = here(OPTION, "--accel-scaler-mode", mode)
    assert counts["passed"] == 1, text
    assert f"step_mode={mode}" in text


# --- what is replaced ------------------------------------------------------------------------

EACH = """
import pytest, torch, accelerate
from accel_scaler import GradScaler as Ours
from accelerate import Accelerator
SEEN = {{}}

def make(name, *args, **kwargs):
    target = torch
    for part in name.split("."):
        target = getattr(target, part)
    return target(*args, **kwargs)

CASES = [("amp.GradScaler", ("cpu",)), ("amp.grad_scaler.GradScaler", ("cpu",)),
         ("GradScaler", ("cpu",)), ("cpu.amp.GradScaler", ()), ("cuda.amp.GradScaler", ())]

@pytest.mark.parametrize(("name", "args"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_name(name, args):
    scaler = make(name, *args, enabled=not name.startswith("cuda"))
    assert isinstance(scaler, Ours) == {torch}
    assert isinstance(scaler, torch.amp.GradScaler)

def test_accelerator():
    attached = type(Accelerator(cpu=True, mixed_precision="fp16")).__name__ == "ScaledAccelerator"
    assert attached == {accelerate}
"""


@pytest.mark.parametrize("only", [None, "torch", "accelerate"])
def test_each_name_is_replaced_or_the_part_that_was_asked_for(
    here: Any, pytester: pytest.Pytester, only: str | None
) -> None:
    parts = [part for part in ("torch", "accelerate") if only in (None, part)]
    pytester.makepyfile(EACH.format(torch="torch" in parts, accelerate="accelerate" in parts))
    text, counts = here(OPTION, *([] if only is None else ["--accel-scaler-only", only]))
    assert counts["passed"] == 6, text
    (header,) = [line for line in text.splitlines() if line.startswith("accel_scaler: ")]
    assert ("GradScaler (torch.amp, torch.cuda.amp, torch.cpu.amp) replaced" in header) == (
        "torch" in parts
    )
    assert ("Accelerators and Trainers attached" in header) == ("accelerate" in parts)
    replaced, attached = 5 * ("torch" in parts), int("accelerate" in parts)
    assert f"{replaced} GradScalers replaced, {attached} Accelerator" in text


def test_a_name_that_a_conftest_imported_is_replaced(here: Any, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from torch.amp import GradScaler\nEARLY = GradScaler('cpu')\n")
    pytester.makepyfile("""
        import accel_scaler, conftest
        def test_it(kept=conftest.GradScaler):
            for scaler in (conftest.EARLY, conftest.GradScaler("cpu"), kept("cpu")):
                assert type(scaler) is accel_scaler.GradScaler
    """)
    text, counts = here(OPTION)
    assert counts["passed"] == 1, text


def test_what_a_test_attaches_itself_is_taken_as_it_is(
    here: Any, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile("""
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
    """)
    text, counts = here(OPTION)
    assert counts["passed"] == 2, text
    assert "0 GradScalers replaced, 1 Accelerator attached" in text


# --- what is said, and refused ---------------------------------------------------------------


def test_a_run_that_replaced_nothing_says_so(here: Any, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from accelerate import Accelerator
        def test_it():
            Accelerator(cpu=True)
    """)
    text, counts = here(OPTION)
    assert counts["passed"] == 1
    assert "0 GradScalers replaced, 0 Accelerators attached" in text
    assert "WARNING: nothing was replaced" in text
    assert "1 Accelerator without fp16" in text
    assert "WARNING" not in here(OPTION, SAMPLES[0], "-k", "subclass_is")[0]


def test_an_option_that_would_do_nothing_is_refused(here: Any) -> None:
    for option, value in (("mode", "overlap"), ("only", "torch")):
        text, counts = here(f"--accel-scaler-{option}", value)
        assert f"--accel-scaler-{option} does nothing without --with-accel-scaler" in text
        assert "passed" not in counts


def test_a_run_that_breaks_off_is_put_back_too(here: Any, pytester: pytest.Pytester) -> None:
    """The check is in the fixture's end."""
    pytester.makeconftest("import torch\ntorch.amp.GradScaler('cpu')\nraise OSError('as planned')")
    text, counts = here(OPTION)
    assert "as planned" in text
    assert "passed" not in counts


# --- processes -------------------------------------------------------------------------------

OFF = f"""
import os, sys
import pytest
before = dict(os.environ), list(sys.meta_path), list(sys.path)
class Look:
    def pytest_configure(self, config):
        self.seen = {{"torch", "accel_scaler", "accel_scaler_replacing"}} & sys.modules.keys()
        assert dict(os.environ) == before[0], "the environment was changed"
look = Look()
assert pytest.main(["-q", "-p", "no:cacheprovider", "nothing.py"], plugins=[look]) == 0
assert not look.seen, look.seen
assert "torch" not in sys.modules
lazy = pytest.main(["-q", "-p", "no:cacheprovider", "{OPTION}", "nothing.py"])
assert lazy == 0
assert "torch" not in sys.modules, "asked for, but no test needs it"
print("DONE")
"""


def test_without_the_option_nothing_is_imported_or_changed(
    pytester: pytest.Pytester, untouched: None
) -> None:
    """In a process of its own, which has not loaded torch."""
    pytester.makepyfile(nothing="def test_it():\n    pass\n")
    done = pytester.run(sys.executable, "-c", OFF, timeout=120)
    assert done.ret == 0, done.stderr.str()
    assert done.stdout.lines[-1] == "DONE"
    assert sum("WARNING: nothing was replaced" in line for line in done.stdout.lines) == 1


CHILDREN = """
import multiprocessing, os, subprocess, sys
import pytest

CODE = '''
import sys
assert "torch" not in sys.modules, "a child pays for what it does not use"
import sitecustomize
import torch
from accelerate import Accelerator
print(type(torch.amp.GradScaler("cpu")).__module__, sitecustomize.__file__,
      type(Accelerator(cpu=True, mixed_precision="fp16")).__name__,
      any("startup" in p for p in sys.path))
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
        "accel_scaler.scaler", str(tmp_path / "sitecustomize.py"), "ScaledAccelerator", "False"]

def test_a_spawned_one():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(in_child, [0]) == ["accel_scaler.scaler"]
"""


def test_workers_of_xdist_and_what_tests_start_are_reached_and_counted(
    pytester: pytest.Pytester, untouched: None
) -> None:
    pytester.makepyfile(test_children=CHILDREN)
    done = pytester.runpytest_subprocess(
        OPTION, "-n", "2", "-p", "no:cacheprovider", "--accel-scaler-mode", "overlap", timeout=200
    )
    done.assert_outcomes(passed=2)
    text = done.stdout.str()
    assert "2 GradScalers replaced, 1 Accelerator attached" in text
    assert "step_mode=overlap" in text


def test_the_stock_classes_are_what_they_were() -> None:
    """No test above has left a class changed: the names make stock objects."""
    assert {type(scaler).__module__.split(".")[0] for scaler in scalers()} == {"torch"}
    assert type(accelerate.Accelerator(cpu=True)) is not ScaledAccelerator
