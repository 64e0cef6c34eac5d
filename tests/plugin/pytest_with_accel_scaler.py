"""Run anybody's tests with ``accel_scaler`` in place of the stock gradient scaler.

    pip install -e tests/plugin          # from this project's folder, next to accel_scaler itself
    pytest --with-accel-scaler path/     # from any folder, on any tests; they are not changed

Without the option the plugin imports nothing and changes nothing. With it, in the process that runs
the tests and in every Python that they start:

- ``torch.amp.GradScaler``, ``torch.GradScaler``, ``torch.cuda.amp.GradScaler`` and
  ``torch.cpu.amp.GradScaler`` make an ``accel_scaler.GradScaler``, under whatever name and whenever
  they were imported, and so do subclasses of them. ``isinstance`` goes on working both ways.
- each ``accelerate.Accelerator`` with ``mixed_precision="fp16"`` and each ``transformers.Trainer``
  with such an accelerator is attached (``accel_scaler.attach``). Tests that leave the precision
  open get it from the environment: ``ACCELERATE_MIXED_PRECISION=fp16 pytest ...``. On a CPU, stock
  Accelerate trains those in float32 without a word, and ours in float16: numbers then differ.

Left alone: torch's ``ShardedGradScaler`` (FSDP1) where no Accelerator holds it; Accelerators under
DeepSpeed, Megatron-LM, XLA or fp8, which scale by themselves; Pythons started with -I, -E or -S.

The settings of ACCEL_SCALER_* hold: ``ACCEL_SCALER_STEP_MODE=overlap pytest ...``. The summary says
how often the stock scaler was replaced. Works with pytest-xdist and ``unittest`` tests.

If a test fails, run it without the option first. The intended differences are in
docs/what-to-expect.md (F1 to F13).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEY = pytest.StashKey["Any"]()
STARTUP = Path(__file__).resolve().parent / "pytest_with_accel_scaler_startup"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option; see the top of this file."""
    parser.getgroup("accel_scaler").addoption(
        "--with-accel-scaler",
        action="store_true",
        help="run the tests with accel_scaler in place of torch's GradScaler, and attached to "
        "every Accelerator",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest can import a scaler."""
    _start(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Where a conftest has named this plugin, which is later."""
    _start(config, config.option)


def _start(config: pytest.Config, option: Any) -> None:
    if option.with_accel_scaler and KEY not in config.stash:
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        config.stash[KEY] = stack.enter_context(_replaced())


@contextlib.contextmanager
def _replaced() -> Iterator[Any]:
    """Install the replacement here and in child processes; afterwards all is as before."""
    import accel_scaler_replacing as replacing

    there = replacing.current()
    if there is not None:  # a worker of xdist, or another run inside this process
        yield there
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="with_accel_scaler_"))
        tally = Path(folder) / "tally"
        tally.touch()
        replacement = replacing.Replacement(_startup_of_accel_scaler(), str(tally))
        path = os.environ.get("PYTHONPATH")
        # An empty entry would mean the current directory.
        entries = [str(STARTUP)] if not path else [str(STARTUP), path]
        stack.enter_context(_variable("PYTHONPATH", os.pathsep.join(entries)))
        stack.enter_context(_variable(replacing.VARIABLE, replacement.to_environment()))
        replacement.install()
        stack.callback(replacement.undo)
        yield replacement


def _startup_of_accel_scaler() -> str:
    spec = importlib.util.find_spec("accel_scaler")
    if spec is None or spec.origin is None:
        raise pytest.UsageError(
            "--with-accel-scaler: accel_scaler is not installed for this Python; install it "
            "(pip install . in its folder), or run pytest from an environment that has it."
        )
    if os.pathsep in str(STARTUP):
        raise pytest.UsageError(
            f"--with-accel-scaler: the plugin lies in {str(STARTUP)!r}; a path with "
            f"{os.pathsep!r} cannot stand in PYTHONPATH. Install it elsewhere."
        )
    return str(Path(spec.origin).parent / "launch" / "startup")


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many were replaced, and a warning if none was."""
    replacement = config.stash.get(KEY, None)
    if replacement is None:
        return
    counts = replacement.counts()
    terminalreporter.section(f"accel_scaler, from {Path(replacement.startup).parents[1]}")
    terminalreporter.write_line(
        f"GradScalers replaced: {counts['scaler']}, Accelerators attached: "
        f"{counts['accelerator']}, Trainers attached: {counts['trainer']}; left alone: "
        f"{counts['unscaled']} Accelerators without fp16, {counts['sharded']} ShardedGradScalers"
    )
    for event in sorted(counts):
        if event.startswith("refused: "):
            terminalreporter.write_line(f"{event} ({counts[event]} times)")
    if not (counts["scaler"] or counts["accelerator"]):
        terminalreporter.write_line(
            "WARNING: nothing was replaced, so these tests have shown nothing about accel_scaler. "
            "No test made a GradScaler of torch's or an Accelerator with mixed_precision='fp16'. "
            "For tests that leave the precision open, set ACCELERATE_MIXED_PRECISION=fp16.",
            yellow=True,
        )
